"""Reader: what zero_engine finds of this package, by its entry point."""

from __future__ import annotations

from typing import Final, final

from zero_engine.readers import AbstractReader

from .configuration.settings import read_zero_arguments
from .engine_config import config_of_engine, read_engine_config
from .load import load_checkpoint
from .optimizers import make_optimizer
from .saved import DeepSpeedFolder, holds_deepspeed, is_deepspeed


@final
class DeepSpeedReader(AbstractReader):
    """Reads DeepSpeed's configurations and checkpoints."""

    zero_arguments = staticmethod(read_zero_arguments)
    engine_config = staticmethod(read_engine_config)
    config_of_engine = staticmethod(config_of_engine)
    make_optimizer = staticmethod(make_optimizer)
    is_checkpoint = staticmethod(is_deepspeed)
    holds_checkpoint = staticmethod(holds_deepspeed)
    open_checkpoint = staticmethod(DeepSpeedFolder.open)
    load_checkpoint = staticmethod(load_checkpoint)


READER: Final = DeepSpeedReader()
