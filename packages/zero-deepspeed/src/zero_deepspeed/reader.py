"""Reader of DeepSpeed's files, which zero_engine finds by this package's entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

from attrs import frozen
from zero_engine.engine import EngineConfig
from zero_engine.readers import AbstractReader

from .configuration.settings import read_zero_arguments
from .engine_config import config_of_engine, read_engine_config
from .load import load_checkpoint
from .optimizers import make_optimizer
from .saved import DeepSpeedFolder, has_deepspeed, is_deepspeed


@final
@frozen
class DeepSpeedReader(AbstractReader):
    """Reads DeepSpeed's configurations and checkpoints.

    Args:
        is_universal: Where no tag is asked for, `latest_universal` names the checkpoint.
    """

    is_universal: bool = False

    zero_arguments = staticmethod(read_zero_arguments)
    make_optimizer = staticmethod(make_optimizer)
    is_checkpoint = staticmethod(is_deepspeed)
    has_checkpoint = staticmethod(has_deepspeed)
    open_checkpoint = staticmethod(DeepSpeedFolder.open)

    def engine_config(self, source: Any, **options: Any) -> EngineConfig:
        """See `EngineConfig.from_deepspeed`. Local."""
        return read_engine_config(source, universal=DeepSpeedReader(is_universal=True), **options)

    def config_of_engine(self, source: Any, **options: Any) -> EngineConfig:
        """See `initialize`. Local."""
        return config_of_engine(source, universal=DeepSpeedReader(is_universal=True), **options)

    def load_checkpoint(self, folder: str | Path, *args: Any, **options: Any) -> Any:
        """See `zero_engine.load_deepspeed`. Collective."""
        return load_checkpoint(folder, *args, is_universal=self.is_universal, **options)


READER: Final = DeepSpeedReader()
