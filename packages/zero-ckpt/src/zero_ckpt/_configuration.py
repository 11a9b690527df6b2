"""What `configure` was told, from its arguments and from a section of DeepSpeed's file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import frozen

from ._errors import CheckpointError
from ._model_parallel import ModelParallel
from ._packed import PackedSaver
from ._savers import AbstractSaver, KeepSaver

_SECTION: Final = "activation_checkpointing"


@frozen
class Configuration:
    """How inputs are kept, and what else is done around each call."""

    partitions: bool = False  # each rank of the model-parallel group keeps its part
    on_host: bool = False
    is_contiguous: bool = False  # in buffers made once, for so many layers as there are:
    num_layers: int | None = None
    synchronizes: bool = False
    profiles: bool = False

    def check(self) -> Configuration:
        """This one, if it can be.

        Raises:
            CheckpointError: Contiguous buffers without a number of layers.
        """
        if self.is_contiguous and self.num_layers is None:
            raise CheckpointError(
                "contiguous checkpointing: expected the number of checkpointed layers, got none; "
                "give configure(num_checkpoints=), number_checkpoints in the section "
                f"{_SECTION!r}, or call set_num_layers() first"
            )
        return self

    def saver(self, model_parallel: ModelParallel) -> AbstractSaver:
        """What keeps inputs so. Collective over the model-parallel group if it splits them."""
        group = model_parallel.group() if self.partitions else None
        num_slots = self.num_layers if self.is_contiguous else None
        if group is None and num_slots is None and not self.on_host:
            return KeepSaver()
        return PackedSaver(group=group, on_host=self.on_host, num_slots=num_slots)


@frozen
class _Option:
    """One choice: its field here, its argument of `configure`, its key in the file."""

    name: str
    argument: str
    key: str

    def checked(self, value: Any, where: str) -> Any:
        """The value, if it is of the option's type."""
        if self.name == "num_layers":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{where}: expected an int of 1 or more, got {value!r}")
        elif not isinstance(value, bool):
            raise CheckpointError(f"{where}: expected True or False, got {value!r}")
        return value


_OPTIONS: Final = (
    _Option("partitions", "partition_activations", "partition_activations"),
    _Option("is_contiguous", "contiguous_checkpointing", "contiguous_memory_optimization"),
    _Option("num_layers", "num_checkpoints", "number_checkpoints"),
    _Option("on_host", "checkpoint_in_cpu", "cpu_checkpointing"),
    _Option("synchronizes", "synchronize", "synchronize_checkpoint_boundary"),
    _Option("profiles", "profile", "profile"),
)


def configuration_of(
    source: Any, arguments: Mapping[str, Any], num_layers: int | None
) -> Configuration:
    """From the arguments of `configure` that are not None, else from the file, else the defaults.

    Args:
        source: Its `deepspeed_config`.
        arguments: By name; all that choose an option.
        num_layers: Where neither says.

    Raises:
        CheckpointError: A key is unknown, a value of the wrong type, the file cannot be read, or
            contiguous buffers are asked for without a number of layers.
    """
    section = _section_of(source)
    found = {"num_layers": num_layers}
    for option in _OPTIONS:
        value, where = section.get(option.key), f"{_SECTION}.{option.key}"
        if value is not None:
            found[option.name] = option.checked(value, where)
        value, where = arguments[option.argument], f"configure({option.argument}=)"
        if value is not None:
            found[option.name] = option.checked(value, where)
    return Configuration(**found).check()


def changed(configuration: Configuration, argument: str, value: Any, where: str) -> Configuration:
    """The same but for one option, named by its argument of `configure`.

    Raises:
        CheckpointError: The value is of the wrong type.
    """
    (option,) = (option for option in _OPTIONS if option.argument == argument)
    return attrs.evolve(configuration, **{option.name: option.checked(value, where)})


def _section_of(source: Any) -> Mapping[str, Any]:
    if source is None:
        return {}
    if isinstance(source, str | os.PathLike):
        source = _read(Path(source))
    if isinstance(source, Mapping):
        section = source.get(_SECTION)
    elif hasattr(source, f"{_SECTION}_config"):  # DeepSpeed's own object
        section = getattr(source, f"{_SECTION}_config")
    else:
        raise CheckpointError(
            "configure(deepspeed_config=): expected a dict, the path of a JSON file, or an object "
            f"with {_SECTION}_config, got {source!r:.80}"
        )
    if section is None:
        return {}
    keys = [option.key for option in _OPTIONS]
    if not isinstance(section, Mapping):
        if not any(hasattr(section, key) for key in keys):
            raise CheckpointError(
                f"configure(deepspeed_config=): expected {_SECTION!r} to be a section with keys of "
                f"{', '.join(keys)}, got {section!r:.80}"
            )
        return {key: getattr(section, key, None) for key in keys}
    for key in section:
        if key not in keys:
            raise CheckpointError(
                f"{_SECTION}.{key}: expected one of {', '.join(keys)}; remove it, or correct its "
                "spelling"
            )
    return section


def _read(path: Path) -> Any:
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, and undecodable bytes
        raise CheckpointError(
            f"configure(deepspeed_config=): expected the path of a JSON file, got {str(path)!r}: "
            f"{error}"
        ) from error
    if not isinstance(source, dict):
        raise CheckpointError(
            f"configure(deepspeed_config=): expected an object ({{...}}) in {str(path)!r}, got "
            f"{source!r:.80}"
        )
    return source
