"""deepspeed.utils.zero_to_fp32 and deepspeed.checkpoint.utils: weights, in one process."""

from __future__ import annotations

import os
import re
import sys
from copy import copy
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_engine import ConfigError, export
from zero_engine.checkpoint.export import open_weights_of, write_weights
from zero_partition.seams import AbstractRangeReader


@final
@frozen
class LazyTensor:
    """A tensor that is read by `contiguous()`, each time anew."""

    _reader: AbstractRangeReader

    @property
    def shape(self) -> torch.Size:
        """Return the shape, without reading the values."""
        return self._reader.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return fp32 for a floating-point tensor, else the dtype in the checkpoint."""
        dtype = self._reader.dtype
        return torch.float32 if dtype.is_floating_point else dtype

    def contiguous(self) -> Tensor:
        """Read the values into memory of their own.

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
    """Return a state dict for the plain model's `load_state_dict`, in fp32, on the host. Local.

    Args:
        checkpoint_dir: The folder that `engine.save_checkpoint`, `zero_engine.save` or DeepSpeed
            wrote to, as for `zero_engine.export`.
        tag: Which checkpoint; the newest when None.
        exclude_frozen_parameters: Leave out parameters that do not train.
        lazy_mode: Values are read by their `contiguous()`, one after another in little memory.

    Returns:
        Weights and persistent buffers by name. Tied parameters are one tensor under all names.

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


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights, rounded from fp32, into a model that is not sharded. Local.

    Args:
        model: On the host, for as long as this takes.
        checkpoint_dir: As for `get_fp32_state_dict_from_zero_checkpoint`, as `tag`.
        tag: Likewise.

    Returns:
        The same model.

    Raises:
        zero_engine.FileError: As for `zero_engine.export`.
        RuntimeError: torch's, of names that are missing, unexpected or of another shape.
    """
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(  # noqa: PLR0917 - the order is DeepSpeed's
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's weights, in fp32, to a folder. Local.

    Args:
        checkpoint_dir: As for `get_fp32_state_dict_from_zero_checkpoint`, as `tag`.
        output_dir: The folder; made if need be.
        max_shard_size: Of one file of safetensors, in bytes or as "5GB"; no bound when None.
        safe_serialization: True: files of safetensors, by `zero_engine.export`, in a new or empty
            folder. False: one file "pytorch_model.bin", as `torch.save` writes it.
        tag: See above.
        exclude_frozen_parameters: Leave out parameters that do not train; without
            `safe_serialization` only.

    Raises:
        zero_engine.ConfigError: `max_shard_size` is no size, or frozen parameters are to be left
            out of files of safetensors.
        zero_engine.FileError: As for `zero_engine.export`.
    """
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        )
        write_weights(state, Path(output_dir) / "pytorch_model.bin")
        return
    if exclude_frozen_parameters:
        raise ConfigError(
            "convert_zero_checkpoint_to_fp32_state_dict(): expected exclude_frozen_parameters=False"
            " with safe_serialization=True, which writes what from_pretrained loads, got True"
        )
    limit = sys.maxsize if max_shard_size is None else _num_bytes(max_shard_size)
    export(
        Path(checkpoint_dir),
        Path(output_dir),
        tag=tag,
        dtype=torch.float32,
        max_shard_bytes=limit,
    )


def _num_bytes(size: str | int) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]i?)?B?", str(size), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"max_shard_size: expected bytes, or a size such as '5GB', got {size!r}")
    prefix = (match[2] or "").lower()
    step = 1024 if prefix.endswith("i") else 1000
    return int(match[1]) * step ** " kmgt".index(prefix[:1] or " ")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy a tree of dicts, lists and tuples, with tensors in memory of their own. Local.

    `torch.save` writes the whole memory that a tensor is a part of.

    Args:
        item: A state dict, say.
        device: Where copies go.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        # Keep the type and its settings, such as the factory of a defaultdict.
        copied = copy(item)
        copied |= {key: clone_tensors_for_torch_save(each, device) for key, each in item.items()}
        return copied
    if isinstance(item, list | tuple):
        parts = [clone_tensors_for_torch_save(each, device) for each in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item
