"""Weights in files of safetensors or torch, read range by range."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from torch import nn
from zero_comm import AnyRanks, collective
from zero_partition.seams import AbstractRangeReader, StateLoadReport, load_ranges

from zero_engine.checks import default_group
from zero_engine.config import ZeroConfig
from zero_engine.errors import FileError

from .file_system import read_regular
from .ranges import Range, open_safetensors, open_torch_file

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
# Files to look for in a folder, in this order.
_IN_FOLDER: Final = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")


@collective
def load_pretrained(
    model: nn.Module,
    source: str | Path | Iterable[str | Path],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    group: AnyRanks | None = None,
    config: ZeroConfig | None = None,
) -> StateLoadReport:
    """Read weights from files, each rank only the bytes it keeps. Collective.

    Files are of safetensors, or state dicts that torch.save wrote (.pt, .pth, .bin), which are read
    with `weights_only=True`, so that nothing of them is run, and mapped. The model may be built
    inside `Init`, on the meta device, or be sharded already. Beyond the shards a rank needs 2 MiB,
    or the largest buffer; what it reads of torch's files stays in the system's cache. Float values
    are rounded to the model's float dtype; all other dtypes must be the model's.

    Args:
        model: Names are those of its `state_dict()`; tied parameters may have any of theirs.
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
    """Open the tensors of one file, several, an index or a folder by name; reads only headers.

    Raises:
        FileError: A file is missing, of neither format, asks for more than tensors and plain
            values, or two files have the same name.
    """
    if not isinstance(source, str | Path):
        return _merge(dict.fromkeys(map(Path, source)))
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if not found:
            raise FileError(
                f"{path}: expected a folder with one of {', '.join(_IN_FOLDER)}, found none; name "
                "the files themselves, or call zero_engine.load() for a checkpoint of save()"
            )
        path = found[0]
    return _read_index(path) if path.suffix == ".json" else dict(_read_file(path))


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights as Hugging Face names them. Local."""
    return any((folder / name).is_file() for name in _IN_FOLDER)


def _read_index(path: Path) -> dict[str, AbstractRangeReader]:
    if not path.is_file():
        raise FileError(f"load_pretrained(): {path.absolute()}: no such file or folder")
    try:
        content = json.loads(read_regular(path))
    except ValueError as error:
        raise FileError(f"{path}: expected JSON ({error}); download it again") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileError(f"{path}: expected a 'weight_map' from names to files")
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
            "contain; the download may be incomplete"
        )
    return {name: headers[file][name] for name, file in files.items()}


def _merge(paths: Iterable[Path]) -> dict[str, AbstractRangeReader]:
    merged: dict[str, AbstractRangeReader] = {}
    origin: dict[str, Path] = {}
    for path in paths:
        for name, reader in _read_file(path).items():
            if name in merged:
                raise FileError(f"{name!r} is both in {origin[name]} and in {path}")
            merged[name], origin[name] = reader, path
    return merged


def _read_file(path: Path) -> Mapping[str, Range]:
    return open_torch_file(path) if path.suffix in _TORCH_SUFFIXES else open_safetensors(path)
