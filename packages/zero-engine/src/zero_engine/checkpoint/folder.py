"""A folder of checkpoints: which are complete, and one of them opened to be read range by range."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import field, frozen
from torch import Tensor
from zero_partition.seams import StateSource

from zero_engine.errors import FileError

from .manifest import (
    MANIFEST,
    FileFacts,
    dtype_of,
    facts_of_files,
    file_name,
    from_json,
    read_manifest,
)
from .ranges import FileRun, Range, TensorFile

LATEST: Final = "latest"
REPLACED: Final = ".replaced-"  # in the name of a folder that gives way to one of the same tag

# NOTE(complete): a folder TAG is complete: it got its name when everything in it was on disk. While
# it is replaced by another of the same tag there is a moment without TAG, when the one before is
# `.TAG.replaced-XXXX`, and as good. All else that begins with a dot is ignored.


def find_complete(folder: Path) -> dict[str, Path]:
    """Folders of complete checkpoints by tag; see NOTE(complete). Local."""
    if not folder.is_dir():
        return {}
    found, replaced = {}, {}
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or not (path / MANIFEST).exists():
            continue
        if not path.name.startswith("."):
            found[path.name] = path
        elif REPLACED in path.name:
            replaced[path.name[1:].rpartition(REPLACED)[0]] = path
    return replaced | found


def read_latest(folder: Path) -> str | None:
    """The tag that was complete last, as far as `latest` tells."""
    try:
        return (folder / LATEST).read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def holds_parts(path: Path) -> bool:
    """Whether a folder has files that ranks write for one checkpoint. Local."""
    return any(path.glob("rank-*.safetensors"))


def read_manifests(
    found: Mapping[str, Path],
) -> tuple[dict[str, dict[str, Any]], dict[str, FileError]]:
    """What the manifests of these checkpoints say, and what is wrong with the others. Local."""
    manifests, damaged = {}, {}
    for tag, path in found.items():
        try:
            manifests[tag] = read_manifest(path / MANIFEST)
        except FileError as error:
            damaged[tag] = error
    return manifests, damaged


def serials_of(found: Mapping[str, Path]) -> dict[str, int]:
    """By tag; 0 of those that are loaded by it only. Damaged ones have none: nobody loads them."""
    return {tag: int(said.get("serial") or 0) for tag, said in read_manifests(found)[0].items()}


def other_tags(folder: Path, tag: str) -> str:
    """What to load in place of a checkpoint that is damaged: the newest first."""
    found, serials = find_complete(folder), {}
    for name, said in read_manifests(found)[0].items():
        with suppress(OSError, KeyError, TypeError, ValueError):  # damaged, too
            facts = facts_of_files(said["files"]).items()
            is_whole = all((found[name] / n).stat().st_size == f.num_bytes for n, f in facts)
            if is_whole and name != tag:
                serials[name] = said.get("serial") or 0
    ranked = sorted(serials, key=serials.__getitem__, reverse=True)
    if not ranked:
        return "there is no other checkpoint here that could be loaded"
    return f"load another checkpoint, with tag={' or '.join(map(repr, ranked))}"


_VERIFIED_BYTES: Final = 4 * 2**20  # read at a time

# What a manifest says, by what is made of it.
_PLAIN: Final = (
    *("tag", "step", "world_size", "serial", "excludes_frozen", "loco_facts", "num_updates"),
)
_VALUES: Final = ("scheduler", "engine", "extra")
_OF_RANKS: Final = ("rank_buffers", "rngs", "loco")
_SINCE: Final[dict[str, Any]] = {  # what the first ones do not say
    **{name: {} for name in ("own_said", "own_state", "loco", "loco_facts", "average")},
    "num_updates": None,
}


@final
@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint. Opening reads its manifest; tensors are read when they are asked for.

    Readers are by the names of `model.state_dict()`. An entry of the optimizer's state that is no
    tensor is its value.
    """

    path: Path
    tag: str = field(converter=str)
    step: int = field(converter=int)
    world_size: int = field(converter=int)  # that saved it
    serial: int | None  # grows with every save to the folder; None: loaded by its tag only
    source: StateSource  # values in the dtype in which they are trained: that of masters
    frozen: frozenset[str]  # names of parameters in it that do not train
    excludes_frozen: bool = field(converter=bool)  # parameters that did not train were left out
    rank_buffers: Mapping[int, Mapping[str, Range]]  # of ranks where they differ from rank 0's
    rngs: Mapping[int, Mapping[str, Range]]  # by rank and stream
    loco: Mapping[int, Mapping[str, Range]]  # by rank: what encoding gradients has lost
    loco_facts: Mapping[str, str]  # what these are of; empty where none were kept
    average: Mapping[str, Range]  # of parameters that train
    num_updates: int | None  # of the average; None: none was saved
    scheduler: Any
    engine: Any
    extra: Any
    files: Mapping[str, FileFacts]

    @classmethod
    def open(cls, folder: str | Path, tag: str | None = None) -> Checkpoint | None:
        """The newest complete checkpoint of a folder, or that of a tag. Local; reads no tensors.

        None if the folder holds no complete checkpoint, or does not exist.
        """
        folder = Path(folder)
        found, hint = find_complete(folder), read_latest(folder)
        if hint is not None and hint not in found and holds_parts(folder / hint):
            found[hint] = folder / hint  # its manifest is gone
        if tag is not None and tag not in found:
            raise FileError(
                f"{folder}: expected a checkpoint {tag!r}, got "
                f"{', '.join(sorted(found)) or 'none at all'}"
            )
        manifests, damaged = read_manifests(found if tag is None else {tag: found[tag]})
        if damaged and (tag is not None or hint is None or hint in damaged):
            bad = hint if hint in damaged else next(iter(damaged))  # it may be the newest
            raise FileError(f"{damaged[bad]}; {other_tags(folder, bad)}") from damaged[bad]
        if tag is None:
            ranked = [name for name, said in manifests.items() if said.get("serial") is not None]
            tag = max(ranked, key=lambda name: manifests[name]["serial"], default=None)
        return None if tag is None else cls._of(found[tag], manifests[tag])

    @classmethod
    def _of(cls, path: Path, said: Mapping[str, Any]) -> Checkpoint:
        said = {**_SINCE, **said}
        try:
            facts = facts_of_files(said["files"])
            files = {name: TensorFile(path / name) for name in facts}

            def tensors(of: Mapping[str, Any]) -> dict[str, Any]:
                return {name: _entry(name, entry, files) for name, entry in of.items()}

            def by_rank(of: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
                return {int(rank): tensors(of_rank) for rank, of_rank in of.items()}

            source = StateSource(
                params=tensors(said["params"]),
                buffers=tensors(said["buffers"]),
                ties=said["ties"],
                may_lack=frozenset(),
                states={name: tensors(of) for name, of in said["optimizer"].items()},
                param_groups=tuple(from_json(group) for group in said["param_groups"]),
                where=str(path),
                own_said=said["own_said"],
                own=by_rank(said["own_state"]),
            )
            fields: dict[str, Any] = {name: said[name] for name in _PLAIN}
            fields |= {name: from_json(said[name]) for name in _VALUES}
            fields |= {name: by_rank(said[name]) for name in _OF_RANKS}
            return cls(
                path=path,
                source=source,
                frozen=frozenset(n for n, s in said["params"].items() if s.get("frozen")),
                average=tensors(said["average"]),
                files=facts,
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError, FileError) as error:
            raise FileError(
                f"{path / MANIFEST}: expected a manifest of a checkpoint ({error!r})"
            ) from error

    def read(self, section: str, rank: int) -> dict[str, Tensor]:
        """A rank's own tensors; none where it saved none."""
        own: Mapping[str, Range] = getattr(self, section).get(rank, {})
        return {name: reader.whole() for name, reader in own.items()}

    def verify(self, files: Iterable[str]) -> None:
        """See that some of its files are what they were when they were saved. Local."""
        for name in files:
            damage = _find_damage(self.path / name, self.files[name])
            if damage is not None:
                raise FileError(f"{damage}; {other_tags(self.path.parent, self.tag)}")


def _entry(name: str, said: Mapping[str, Any], files: Mapping[str, TensorFile]) -> Any:
    """A value, or a tensor whose pieces, in any order, are all of its elements once."""
    if "value" in said:
        return from_json(said["value"])
    dtype, shape = dtype_of(said["dtype"]), torch.Size(said["shape"])
    runs, cursor = [], 0
    for piece in sorted(said["pieces"], key=lambda piece: (piece["start"], piece["stop"])):
        start, stop, file = int(piece["start"]), int(piece["stop"]), file_name(piece["file"])
        if file not in files:
            raise FileError(f"{name!r} lies in {file!r}, which is not among the files")
        if start != cursor or stop <= start:
            raise FileError(
                f"expected a piece that starts at element {cursor}, got [{start}, {stop}) in {file}"
            )
        runs.append(FileRun(files[file], str(piece["key"]), dtype, stop - start))
        cursor = stop
    if cursor != shape.numel():
        raise FileError(f"expected pieces of {shape.numel()} elements, got {cursor}")
    return Range(shape, dtype, tuple(runs))


def _find_damage(path: Path, facts: FileFacts) -> str | None:
    try:
        num_bytes, crc32 = 0, 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_VERIFIED_BYTES):
                num_bytes, crc32 = num_bytes + len(chunk), zlib.crc32(chunk, crc32)
    except OSError as error:
        return f"{path}: expected {facts.num_bytes} bytes, and it cannot be read: {error.strerror}"
    if (num_bytes, crc32) == (facts.num_bytes, facts.crc32):
        return None
    return (
        f"{path}: expected {facts.num_bytes} bytes of crc32 {facts.crc32:08x}, got {num_bytes} of "
        f"{crc32:08x}: it was damaged after it was saved"
    )
