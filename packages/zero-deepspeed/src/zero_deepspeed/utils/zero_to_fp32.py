"""deepspeed.utils.zero_to_fp32: a checkpoint's weights, put together in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor
from zero_engine.checkpoint.export import open_weights_of
from zero_partition.seams import AbstractRangeReader

__all__ = ["get_fp32_state_dict_from_zero_checkpoint"]


@final
@frozen
class LazyTensor:
    """A tensor that is read by `contiguous()`, each time anew."""

    _reader: AbstractRangeReader

    @property
    def shape(self) -> torch.Size:
        """Known without reading."""
        return self._reader.shape

    @property
    def dtype(self) -> torch.dtype:
        """fp32, unless it is no floating-point tensor."""
        dtype = self._reader.dtype
        return torch.float32 if dtype.is_floating_point else dtype

    def contiguous(self) -> Tensor:
        """The values, in memory of their own.

        Raises:
            zero_engine.FileError: A file went, or was cut short, since it was opened.
        """
        values = self._reader.read(0, self.shape.numel()).to(self.dtype, copy=True)
        return values.view(self.shape)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """What `model.load_state_dict` of the plain model takes, in fp32, on the host. Local.

    Args:
        checkpoint_dir: What `engine.save_checkpoint`, `zero_engine.save` or DeepSpeed wrote to: as
            for `zero_engine.export`.
        tag: Which checkpoint; the newest when None.
        exclude_frozen_parameters: Leave out parameters that do not train.
        lazy_mode: Values are read by their `contiguous()`, one after another in little memory.

    Returns:
        Weights and persistent buffers by name. Tied parameters, in all their names, are one tensor.

    Raises:
        zero_engine.FileError: As for `zero_engine.export`.
    """
    path, has_frozen = Path(checkpoint_dir), not exclude_frozen_parameters
    found, readers = open_weights_of(path, tag, has_frozen=has_frozen)
    values: dict[str, Any] = {name: LazyTensor(reader) for name, reader in readers.items()}
    if not lazy_mode:
        values = {name: value.contiguous() for name, value in values.items()}
    ties = {name: first for name, first in found.source.ties.items() if first in values}
    return values | {name: values[first] for name, first in ties.items()}
