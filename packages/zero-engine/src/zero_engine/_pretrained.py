"""Weights in safetensors files, read range by range."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import AbstractRangeReader, LoadReport, load_ranges

from ._config import ZeroConfig
from ._errors import FileError
from ._group import default_group

# NOTE(format): eight bytes, little-endian, say how long the header is; the header is JSON: name to
# dtype, shape and the offsets of its bytes, counted from the header's end. That is all that is
# needed to read a range, and nothing of it can run code.

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES: Final = 100 * 2**20  # the format's own limit
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


@final
@frozen
class SafetensorsRange(AbstractRangeReader):
    """One tensor of one file."""

    path: Path
    start_bytes: int  # of its first element, in the file
    tensor_shape: torch.Size
    tensor_dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """From the header."""
        return self.tensor_shape

    @property
    def dtype(self) -> torch.dtype:
        """From the header."""
        return self.tensor_dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in memory of their own."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        itemsize = self.dtype.itemsize
        wire = bytearray((stop - start) * itemsize)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start_bytes + start * itemsize)
            view, done = memoryview(wire), 0
            while done < len(wire):
                count = file.readinto(view[done:])
                if not count:
                    raise FileError(
                        f"{self.path}: ended {len(wire) - done} bytes early; it was cut short "
                        "since it was opened"
                    )
                done += count
        return torch.frombuffer(wire, dtype=self.dtype)


def load_pretrained(
    model: nn.Module,
    source: str | Path | Iterable[str | Path],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    group: Group | None = None,
    config: ZeroConfig | None = None,
) -> LoadReport:
    """Read weights from safetensors files, each rank only the bytes it keeps. Collective.

    The model may be built inside `Init`, on the meta device, or be sharded already. Beyond the
    shards a rank needs 8 MiB, or the largest buffer. Float values are rounded to the model's float
    dtype; all other dtypes must be the model's.

    Args:
        model: Names are those of its `state_dict()`; tied parameters may come under any of theirs.
        source: A .safetensors file, several, a Hugging Face index file, or a folder that has
            `model.safetensors.index.json` or `model.safetensors`. The same on every rank.
        strict: Whether missing and unexpected names are errors.
        rename: From a name in the files to one in the model, None to leave it out.
        group: As for `shard`.
        config: For `timeout_s`.

    Returns:
        The names that did not match; none if strict.

    Raises:
        FileError: A file is missing, not of this format, or cut short.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing
            was written.
        zero_comm.AgreementError: Ranks have different models or files.
        zero_comm.CommError: A rank did not take part in time.
    """
    config = ZeroConfig() if config is None else config
    found = open_safetensors(source)
    readers: dict[str, SafetensorsRange] = {}
    origin: dict[str, str] = {}
    for name, reader in found.items():
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if new in readers:
            raise FileError(f"rename() gives {new!r} to both {origin[new]!r} and {name!r}")
        readers[new], origin[new] = reader, name
    return load_ranges(
        model,
        readers,
        group=default_group(model) if group is None else group,
        strict=strict,
        timeout_s=config.timeout_s,
    )


def open_safetensors(source: str | Path | Iterable[str | Path]) -> dict[str, SafetensorsRange]:
    """The tensors of one file, several, an index file or a folder, by name; reads headers only.

    Raises:
        FileError: A file is missing, not of this format, or two files hold the same name.
    """
    if not isinstance(source, str | Path):
        return _merge({path: _read_header(path) for path in map(Path, source)})
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not found:
            raise FileError(
                f"{path}: expected a folder with {_INDEX} or {_SINGLE}, found neither; name the "
                "files themselves"
            )
        path = found[0]
    return _read_index(path) if path.suffix == ".json" else _read_header(path)


def _read_index(path: Path) -> dict[str, SafetensorsRange]:
    content = _parse(path, path.read_bytes())
    files = content.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise FileError(f"{path}: expected a 'weight_map' from names to files")
    for file in files.values():
        if Path(file).name != file:
            raise FileError(f"{path}: expected files beside the index, got {file!r}")
    headers = {file: _read_header(path.parent / file) for file in dict.fromkeys(files.values())}
    lost = [name for name, file in files.items() if name not in headers[file]]
    if lost:
        raise FileError(
            f"{path}: names {', '.join(map(repr, lost))}, which the files listed for them do not "
            "hold; the download may be incomplete"
        )
    return {name: headers[file][name] for name, file in files.items()}


def _merge(headers: Mapping[Path, dict[str, SafetensorsRange]]) -> dict[str, SafetensorsRange]:
    merged: dict[str, SafetensorsRange] = {}
    for path, header in headers.items():
        twice = merged.keys() & header.keys()
        if twice:
            name = min(twice)
            raise FileError(f"{name!r} is both in {merged[name].path} and in {path}")
        merged |= header
    return merged


def _read_header(path: Path) -> dict[str, SafetensorsRange]:
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise FileError(f"{path}: no safetensors file, or cut short ({size} bytes)")
        content = _parse(path, file.read(length))
    content.pop("__metadata__", None)
    start = 8 + length
    return {name: _range(path, name, entry, start, size) for name, entry in content.items()}


def _range(path: Path, name: str, entry: Any, start: int, size: int) -> SafetensorsRange:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: cannot read the entry of {name!r}: {entry!r}") from error
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or first < 0 or last - first != expected or start + last > size:
        raise FileError(
            f"{path}: {name!r} should take {expected} bytes, but its entry says [{first}, {last}) "
            f"of {size - start}; the file is damaged or cut short"
        )
    return SafetensorsRange(path, start + first, shape, dtype)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FileError(f"{path}: expected JSON, got {text[:40]!r}") from error
    if not isinstance(content, dict):
        raise FileError(f"{path}: expected a JSON object, got {text[:40]!r}")
    return content
