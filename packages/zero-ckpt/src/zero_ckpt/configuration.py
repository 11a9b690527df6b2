"""Configuration from the arguments of `configure` and a section of DeepSpeed's file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from zero_ckpt.inputs.packed import PackedSaver
from zero_ckpt.inputs.savers import AbstractSaver, KeepSaver
from zero_ckpt.inputs.split import group_class

from .errors import CheckpointError

if TYPE_CHECKING:
    from zero_comm import Group

# Words in the names of an mpu's getters, in the order in which they are looked for: Megatron's of
# today, those of DeepSpeed's pipeline grid, and Megatron's before it had pipelines.
_AXES: Final = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_GETTERS: Final = ("get_{}_rank", "get_{}_world_size", "get_{}_group")


@frozen
class ModelParallel:
    """Getters of rank, world size and process group; called late, as an mpu may start later."""

    rank: Callable[[], int]
    world_size: Callable[[], int]
    process_group: Callable[[], Any]

    @classmethod
    def of(cls, mpu: Any) -> ModelParallel:
        """Return the getters of an mpu or a DeviceMesh of one dimension. Local.

        None means a single rank.
        """
        if mpu is None:
            return cls(lambda: 0, lambda: 1, lambda: None)
        if _is_mesh(mpu):
            if mpu.ndim != 1:
                raise CheckpointError(
                    f"configure(mpu_=): expected a DeviceMesh of one dimension, got {mpu}; give "
                    "the one that splits layers, as in mesh['tp']"
                )
            return cls(mpu.get_local_rank, mpu.size, mpu.get_group)
        for axis in _AXES:
            getters: list[Any] = [getattr(mpu, name.format(axis), None) for name in _GETTERS]
            if all(map(callable, getters)):
                return cls(*getters)
        wanted = " or ".join(f"get_{axis}_*" for axis in _AXES)
        raise CheckpointError(
            f"configure(mpu_=): expected None, a DeviceMesh of one dimension or an object with "
            f"the getters {wanted} (each of rank, world_size and group), got {mpu!r}"
        )

    def group(self) -> Group | None:
        """Return the ranks that inputs are split over; None if only one. Collective among them."""
        world_size = self.world_size()
        if world_size == 1:
            return None
        kind = group_class()
        process_group = self.process_group()
        try:
            group = kind.from_process_group(process_group)
        except (TypeError, ValueError) as error:
            # torch raises these for a process group that it does not know.
            raise CheckpointError(
                "configure(mpu_=): expected its group to be a process group of torch.distributed, "
                f"got {process_group!r}"
            ) from error
        if group.world_size != world_size:
            raise CheckpointError(
                f"configure(mpu_=): expected a group of as many ranks as its world size says, "
                f"{world_size}, got {group.world_size} ({process_group!r}, rank {group.rank})"
            )
        return group


def _is_mesh(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  (slow to import)

    return isinstance(value, DeviceMesh)


_SECTION: Final = "activation_checkpointing"
# Argument of `configure` -> key in the section of DeepSpeed's file.
_KEYS: Final = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


@frozen
class Configuration:
    """Settings for keeping inputs and for each call, named as the arguments of `configure`."""

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False

    def __attrs_post_init__(self) -> None:
        if self.contiguous_checkpointing and self.num_checkpoints is None:
            raise CheckpointError(
                "contiguous checkpointing: expected the number of checkpointed layers, got none; "
                "give configure(num_checkpoints=), number_checkpoints in the section "
                f"{_SECTION!r}, or call set_num_layers() first"
            )

    def saver(self, model_parallel: ModelParallel) -> AbstractSaver:
        """Return a saver for these settings.

        Collective over the model-parallel group if it splits inputs.
        """
        group = model_parallel.group() if self.partition_activations else None
        num_slots = self.num_checkpoints if self.contiguous_checkpointing else None
        if group is None and num_slots is None and not self.checkpoint_in_cpu:
            return KeepSaver()
        return PackedSaver(group=group, on_host=self.checkpoint_in_cpu, num_slots=num_slots)


def checked(name: str, value: Any, where: str) -> Any:
    """Return the value if it is valid for argument `name` of `configure`; else CheckpointError."""
    if name == "num_checkpoints":
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{where}: expected an int of 1 or more, got {value!r}")
    elif not isinstance(value, bool):
        raise CheckpointError(f"{where}: expected True or False, got {value!r}")
    return value


def configuration_of(
    source: Any, arguments: Mapping[str, Any], num_checkpoints: int | None
) -> Configuration:
    """Return a configuration from arguments that are not None, else the file, else the defaults.

    `arguments` are those of `configure`, and `source` is its `deepspeed_config`, the file.
    `num_checkpoints` is the previous number of layers, used where neither has one.
    """
    section = _section_of(source)
    found = {"num_checkpoints": num_checkpoints}
    for name, key in _KEYS.items():
        if section.get(key) is not None:
            found[name] = checked(name, section[key], f"{_SECTION}.{key}")
        if arguments[name] is not None:
            found[name] = checked(name, arguments[name], f"configure({name}=)")
    return Configuration(**found)


def _section_of(source: Any) -> Mapping[str, Any]:
    if source is None:
        return {}
    if isinstance(source, str | os.PathLike):
        source = _read(Path(source))
    if isinstance(source, Mapping):
        section = source.get(_SECTION)
    elif hasattr(source, f"{_SECTION}_config"):  # a DeepSpeedConfig
        section = getattr(source, f"{_SECTION}_config")
    else:
        raise CheckpointError(
            "configure(deepspeed_config=): expected a dict, the path of a JSON file, or an object "
            f"with {_SECTION}_config, got {source!r:.80}"
        )
    if section is None:
        return {}
    keys = list(_KEYS.values())
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
    except (OSError, ValueError) as error:
        # A ValueError says that the text is no JSON, or that the bytes are no UTF-8.
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
