"""Hugging Face's files of a model's weights: their names, headers and index. Arithmetic only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from attrs import field, frozen
from zero_partition import AbstractRangeReader

from ._errors import FileError
from ._tensor_file import CODES

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

_EXPORTED_CODES: Final = CODES | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
_LENGTH_BYTES: Final = 8
_ALIGN_BYTES: Final = 8  # as the safetensors library writes headers


@frozen
class ExportedTensor:
    """One tensor as it is going to be written."""

    name: str
    reader: AbstractRangeReader
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.reader.shape.numel() * self.dtype.itemsize


@frozen
class ExportedFile:
    """One file: its tensors lie in their order, end to end, after the header."""

    name: str
    tensors: tuple[ExportedTensor, ...]
    header: bytes = field(init=False)

    def __attrs_post_init__(self) -> None:
        said: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        cursor = 0
        for tensor in self.tensors:
            said[tensor.name] = {
                "dtype": _EXPORTED_CODES[tensor.dtype],
                "shape": list(tensor.reader.shape),
                "data_offsets": [cursor, cursor + tensor.num_bytes],
            }
            cursor += tensor.num_bytes
        text = json.dumps(said, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN_BYTES)
        object.__setattr__(self, "header", len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def plan_files(
    readers: Mapping[str, AbstractRangeReader],
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> tuple[ExportedFile, ...]:
    """Which tensor goes to which file. Pure.

    Files are filled in the order of the names, and none but those of one tensor are larger than
    they may be, headers aside. Within a file the widest dtypes come first, so that all are aligned,
    and then names in order: as the safetensors library would write it.

    Args:
        readers: By name.
        dtype: Of tensors of a floating-point dtype; as they are when None.
        max_shard_bytes: Of tensors in one file.

    Raises:
        FileError: A tensor is of a dtype that the format has no word for.
    """
    chosen = [_exported(name, reader, dtype) for name, reader in readers.items()]
    parts = list(_split(chosen, max_shard_bytes)) or [[]]
    if len(parts) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    return tuple(
        ExportedFile(name, tuple(sorted(part, key=lambda t: (-t.dtype.itemsize, t.name))))
        for name, part in zip(names, parts, strict=True)
    )


def index_of(files: Iterable[ExportedFile]) -> bytes:
    """The index beside several files, which says where each tensor lies."""
    tensors = {tensor.name: (tensor, file.name) for file in files for tensor in file.tensors}
    content = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor, _ in tensors.values())},
        "weight_map": {name: tensors[name][1] for name in sorted(tensors)},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _exported(name: str, reader: AbstractRangeReader, dtype: torch.dtype | None) -> ExportedTensor:
    chosen = reader.dtype
    if dtype is not None and reader.dtype.is_floating_point:
        chosen = dtype
    if chosen not in _EXPORTED_CODES:
        raise FileError(
            f"{name!r}: expected one of the dtypes of safetensors, got {chosen}; leave it out of "
            "the model's state dict, or export it with a dtype that the format has"
        )
    return ExportedTensor(name, reader, chosen)


def _split(tensors: Iterable[ExportedTensor], max_bytes: int) -> Iterator[list[ExportedTensor]]:
    part: list[ExportedTensor] = []
    filled = 0
    for tensor in tensors:
        if part and filled + tensor.num_bytes > max_bytes:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.num_bytes
    if part:
        yield part
