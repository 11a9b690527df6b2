"""Reader: how files of another library reach this package, which knows none of their formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .errors import ConfigError

_GROUP: Final = "zero_engine.readers"
_LIBRARY: Final = "deepspeed"  # the name of its entry point


class AbstractReader(ABC):
    """Reads configurations and checkpoints of another library.

    A package registers an instance as an entry point of the group `zero_engine.readers`.
    """

    @abstractmethod
    def zero_arguments(
        self, source: Any, *, model: nn.Module | None, auto: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Keyword arguments of ZeroConfig; see `ZeroConfig.from_deepspeed`. Local."""

    @abstractmethod
    def engine_config(
        self,
        source: Any,
        *,
        world_size: int,
        model: nn.Module | None,
        auto: Mapping[str, Any] | None,
        implied: Mapping[str, Any] | None,
    ) -> Any:
        """An EngineConfig; see `EngineConfig.from_deepspeed`. Local."""

    @abstractmethod
    def config_of_engine(
        self,
        source: Any,
        *,
        world_size: int,
        model: nn.Module,
        auto: Mapping[str, Any] | None,
        args: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> Any:
        """The EngineConfig of `initialize`, whose other arguments complete what it says. Local."""

    @abstractmethod
    def make_optimizer(
        self, params: Iterable[Any], name: str, options: Mapping[str, Any], /
    ) -> torch.optim.Optimizer:
        """An optimizer by the name that the library's files give it. Local."""

    @abstractmethod
    def is_checkpoint(self, folder: Path, tag: str | None) -> bool:
        """Whether the library saved what `tag` names, or the folder itself. Local."""

    @abstractmethod
    def holds_checkpoint(self, folder: Path, tag: str | None) -> bool:
        """The same, or a checkpoint in any folder of this one. Local."""

    @abstractmethod
    def open_checkpoint(self, folder: Path, tag: str | None) -> Any:
        """What `export` reads: an object with `path`, `source` and `frozen`. Local."""

    @abstractmethod
    def load_checkpoint(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        tag: str | None,
        is_strict: bool,
        group: Any,
    ) -> Any:
        """What was loaded; see `load_deepspeed`. Collective."""


@cache
def find_reader() -> AbstractReader | None:
    """The reader of DeepSpeed's files, if a package that has one is installed. Local."""
    for entry in entry_points(group=_GROUP, name=_LIBRARY):
        try:
            reader = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the entry point {entry.value!r} of the group {_GROUP!r} cannot be loaded "
                f"({error}); install zero-engine and what has it in versions that go together"
            ) from error
        if isinstance(reader, AbstractReader):
            return reader
    return None


def reader_for(what: str) -> AbstractReader:
    """The same where it is needed; ConfigError says what to install if there is none. Local."""
    reader = find_reader()
    if reader is None:
        raise ConfigError(
            f"{what}: expected a package that reads files of DeepSpeed, got none; "
            f"install zero-{_LIBRARY}"
        )
    return reader
