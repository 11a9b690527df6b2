"""Interface to packages that read files of another library; this package has no code for these."""

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
# Name of the entry point.
_LIBRARY: Final = "deepspeed"


class AbstractReader(ABC):
    """Reader of another library's configurations and checkpoints.

    A package registers an instance as an entry point of the group `zero_engine.readers`.
    """

    @abstractmethod
    def zero_arguments(
        self, source: Any, *, model: nn.Module | None, auto: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return keyword arguments of ZeroConfig; see `ZeroConfig.from_deepspeed`. Local."""

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
        """Return an EngineConfig; see `EngineConfig.from_deepspeed`. Local."""

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
        """Return the EngineConfig of `initialize`, completed by its other arguments. Local."""

    @abstractmethod
    def make_optimizer(
        self, params: Iterable[Any], name: str, options: Mapping[str, Any], /
    ) -> torch.optim.Optimizer:
        """Return an optimizer by the name that the library's files give it. Local."""

    @abstractmethod
    def is_checkpoint(self, folder: Path, tag: str | None) -> bool:
        """Return whether the library saved the folder of a tag, or `folder` itself. Local."""

    @abstractmethod
    def has_checkpoint(self, folder: Path, tag: str | None) -> bool:
        """Return whether `is_checkpoint` is true of `folder` or of any folder in it. Local."""

    @abstractmethod
    def open_checkpoint(self, folder: Path, tag: str | None) -> Any:
        """Open a checkpoint for `export`: an object with `path`, `source` and `frozen`. Local."""

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
        """Load a checkpoint and return its report; see `load_deepspeed`. Collective."""


@cache
def find_reader() -> AbstractReader | None:
    """Return the reader of DeepSpeed's files; None if no package has one. Local."""
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
    """Return the reader of DeepSpeed's files, which `what` needs. Local.

    Raises:
        ConfigError: There is none; the error says what to install.
    """
    reader = find_reader()
    if reader is None:
        raise ConfigError(
            f"{what}: expected a package that reads files of DeepSpeed, got none; "
            f"install zero-{_LIBRARY}"
        )
    return reader
