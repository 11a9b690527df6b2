"""Weights in files of safetensors or torch, read range by range."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from zero_comm import Group, collective
from zero_partition.seams import AbstractRangeReader, LoadReport, load_ranges

from zero_engine.checks import default_group
from zero_engine.config import ZeroConfig
from zero_engine.errors import FileError

from .tensor_file import CODES
from .torch_file import open_torch_file

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


# ---- Weights in files of safetensors or torch, read range by range ----


# What a folder may have, the first first.
_IN_FOLDER: Final = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_MAPPED_BYTES: Final = 4 * 2**20  # read through one mapping of a file
_MAPPED_AROUND_BYTES: Final = 2**17  # the kernel maps what it has at hand near what is read


@define(eq=False)
class _File:
    """A file of tensors, mapped: what is read of it is this process's until the mapping goes.

    So it is opened again now and then, and not for each range: the header of a file with many
    experts takes long to parse.
    """

    path: Path
    _opened: Any = field(default=None, init=False)
    _mapped_bytes: int = field(default=0, init=False)

    def open(self) -> Any:
        """The library's handle on the file.

        Raises:
            FileError: The file is missing, not of this format, or cut short.
        """
        if self._opened is None:
            if not self.path.is_file():
                raise FileError(f"{self.path}: no such file")
            try:
                self._opened = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise FileError(
                    f"{self.path}: expected a whole safetensors file ({error}); save or download "
                    "it again"
                ) from error
        return self._opened

    def view(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor, or the tensor if it has no rows; reads nothing yet."""
        try:
            part = self.open().get_slice(name)
            return part[first:last] if part.get_shape() else self.open().get_tensor(name)
        except SafetensorError as error:
            raise FileError(f"{self.path}: cannot read {name!r}: {error}") from error

    def read(self, name: str, first: int, last: int) -> Tensor:
        """As `view`, for rows that will be read before the next are."""
        rows = self.view(name, first, last)
        num_bytes = rows.nbytes + _MAPPED_AROUND_BYTES
        if self._mapped_bytes + num_bytes > _MAPPED_BYTES:
            self.close()
            rows = self.view(name, first, last)
        self._mapped_bytes += num_bytes
        return rows

    def close(self) -> None:
        """Let go of the mapping, which stays as long as tensors that view it."""
        self._opened, self._mapped_bytes = None, 0


@final
@frozen
class SafetensorsRange(AbstractRangeReader):
    """One tensor of one file."""

    name: str  # in the file
    tensor_shape: torch.Size
    tensor_dtype: torch.dtype
    _file: _File

    @property
    def shape(self) -> torch.Size:
        """From the header."""
        return self.tensor_shape

    @property
    def dtype(self) -> torch.dtype:
        """From the header."""
        return self.tensor_dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), as a view of the mapped file: copy what is to stay.

        Raises:
            FileError: The file went, or was cut short, since it was opened first.
        """
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        row_numel = self.shape[1:].numel()  # 1 if there are no rows
        first, last = start // row_numel, -(-stop // row_numel)
        rows = self._file.read(self.name, first, last).view(-1)
        return rows[start - first * row_numel : stop - first * row_numel]


@collective
def load_pretrained(
    model: nn.Module,
    source: str | Path | Iterable[str | Path],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    group: Group | None = None,
    config: ZeroConfig | None = None,
) -> LoadReport:
    """Read weights from files, each rank only the bytes it keeps. Collective.

    Files are of safetensors, or state dicts that torch.save wrote (.pt, .pth, .bin), which are read
    with `weights_only=True`, so that nothing of them is run, and mapped. The model may be built
    inside `Init`, on the meta device, or be sharded already. Beyond the shards a rank needs 8 MiB,
    or the largest buffer; what it reads of torch's files stays in the system's cache. Float values
    are rounded to the model's float dtype; all other dtypes must be the model's.

    Args:
        model: Names are those of its `state_dict()`; tied parameters may come under any of theirs.
        source: A file, several, a Hugging Face index file, or a folder that has
            `model.safetensors.index.json`, `model.safetensors`, `pytorch_model.bin.index.json` or
            `pytorch_model.bin`. The same on every rank.
        strict: Whether missing and unexpected names are errors.
        rename: From a name in the files to one in the model, None to leave it out.
        group: As for `shard`.
        config: For `timeout_s`.

    Returns:
        The names that did not match; none if strict.

    Raises:
        FileError: A file is missing, of neither format, cut short, or asks for more than tensors
            and plain values: it is named with what it asks for.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing
            was written.
        zero_comm.AgreementError: Ranks have different models or files.
        zero_comm.CommError: A rank did not take part in time.
    """
    config = ZeroConfig() if config is None else config
    found = open_weights(source)
    readers: dict[str, AbstractRangeReader] = {}
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


def open_weights(
    source: str | Path | Iterable[str | Path],
) -> dict[str, AbstractRangeReader]:
    """The tensors of one file, several, an index file or a folder, by name; reads headers only.

    Raises:
        FileError: A file is missing, of neither format, asks for more than tensors and plain
            values, or two files hold the same name.
    """
    if not isinstance(source, str | Path):
        return _merge(dict.fromkeys(map(Path, source)))
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if not found:
            raise FileError(
                f"{path}: expected a folder with one of {', '.join(_IN_FOLDER)}, found none; name "
                "the files themselves"
            )
        path = found[0]
    return _read_index(path) if path.suffix == ".json" else dict(_read_file(path))


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights as Hugging Face names them. Local."""
    return any((folder / name).is_file() for name in _IN_FOLDER)


def _read_index(path: Path) -> dict[str, AbstractRangeReader]:
    files = _weight_map(path)
    headers = {}
    for file in dict.fromkeys(files.values()):
        if Path(file).name != file:
            raise FileError(f"{path}: expected files beside the index, got {file!r}")
        if not (path.parent / file).is_file():
            raise FileError(
                f"{path}: names {file!r}, but there is no such file beside it; the download may be "
                "incomplete"
            )
        headers[file] = _read_file(path.parent / file)
    lost = [name for name, file in files.items() if name not in headers[file]]
    if lost:
        raise FileError(
            f"{path}: names {', '.join(map(repr, lost))}, which the files listed for them do not "
            "hold; the download may be incomplete"
        )
    return {name: headers[file][name] for name, file in files.items()}


def _weight_map(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise FileError(f"{path}: no such file")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise FileError(f"{path}: expected JSON ({error}); download it again") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileError(f"{path}: expected a 'weight_map' from names to files")
    return files


def _merge(paths: Iterable[Path]) -> dict[str, AbstractRangeReader]:
    merged: dict[str, AbstractRangeReader] = {}
    origin: dict[str, Path] = {}
    for path in paths:
        for name, reader in _read_file(path).items():
            if name in merged:
                raise FileError(f"{name!r} is both in {origin[name]} and in {path}")
            merged[name], origin[name] = reader, path
    return merged


def _read_file(path: Path) -> Mapping[str, AbstractRangeReader]:
    return open_torch_file(path) if path.suffix in _TORCH_SUFFIXES else _read_header(path)


def _read_header(path: Path) -> dict[str, SafetensorsRange]:
    file = _File(path)
    found = {}
    for name in file.open().keys():  # noqa: SIM118  # it is no mapping
        shape = torch.Size(file.open().get_slice(name).get_shape())
        found[name] = SafetensorsRange(name, shape, file.view(name, 0, 0).dtype, file)
    file.close()
    return found
