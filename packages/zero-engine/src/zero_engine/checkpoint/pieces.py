"""Checkpoint: a folder that was saved, opened to be read range by range."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor
from zero_partition.seams import AbstractRangeReader

from zero_engine.errors import FileError

from .manifest import MANIFEST, FileFacts, StoredTensor, facts_of_files, from_json, read_manifest
from .tensor_file import TensorFile

LATEST: Final = "latest"
REPLACED: Final = ".replaced-"  # in the name of a folder that gives way to one of the same tag
_VERIFIED_BYTES: Final = 4 * 2**20  # read at a time

# NOTE(complete): a folder TAG is complete: it got its name when everything in it was on disk. While
# it is replaced by another of the same tag there is a moment without TAG, when the one before is
# `.TAG.replaced-XXXX`, and as good. All else that begins with a dot is ignored.


@final
@frozen
class PiecesRange(AbstractRangeReader):
    """One tensor of a checkpoint, joined from pieces in its files."""

    name: str  # for errors
    stored: StoredTensor
    _files: Mapping[str, TensorFile]

    @property
    def shape(self) -> torch.Size:
        """From the manifest."""
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """From the manifest."""
        return self.stored.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in memory of their own.

        Raises:
            FileError: A file is missing, or is not what the manifest says.
        """
        parts = []
        for piece in self.stored.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                span = (first - piece.start, last - piece.start)
                parts.append(self._files[piece.file].read(piece.key, self.dtype, *span))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def whole(self) -> Tensor:
        """All of it, in its shape."""
        return self.read(0, self.shape.numel()).view(self.shape)


@final
@frozen
class Checkpoint:
    """A complete checkpoint. Opening reads its manifest; tensors are read when they are asked for.

    Readers are by the names of `model.state_dict()`. An entry of the optimizer's state that is no
    tensor is its value.
    """

    path: Path
    tag: str
    step: int
    world_size: int  # that saved it
    stage: int  # likewise
    serial: int | None  # grows with every save to the folder; None: loaded by its tag only
    params: Mapping[str, PiecesRange]  # in the dtype in which they are trained: that of masters
    ties: Mapping[str, str]  # from further names of tied parameters to those in `params`
    frozen: frozenset[str]  # names in `params` of those that do not train
    computes_in: Mapping[str, torch.dtype]  # by name in `params`: what the model computes with
    excludes_frozen: bool  # parameters that did not train were left out
    buffers: Mapping[str, PiecesRange]  # persistent ones, of rank 0
    rank_buffers: Mapping[int, Mapping[str, PiecesRange]]  # of ranks where they differ from those
    optimizer: Mapping[str, Mapping[str, Any]]  # by parameter and entry: PiecesRange, or a value
    own_said: Mapping[str, Any]  # of entries of it that have no whole: `StateSource.own_said`
    own_state: Mapping[int, Mapping[str, PiecesRange]]  # by rank: their tensors, numbered
    param_groups: tuple[Mapping[str, Any], ...]  # options, and "params": names
    rngs: Mapping[int, Mapping[str, PiecesRange]]  # by rank and stream
    loco: Mapping[int, Mapping[str, PiecesRange]]  # by rank: what encoding gradients has lost
    loco_facts: Mapping[str, str]  # what these are of; empty where none were kept
    average: Mapping[str, PiecesRange]  # of parameters that train
    num_updates: int | None  # of the average; None: none was saved
    scheduler: Any
    engine: Any
    extra: Any
    files: Mapping[str, FileFacts]

    @classmethod
    def open(cls, folder: str | Path, tag: str | None = None) -> Checkpoint | None:
        """The newest complete checkpoint of a folder, or that of a tag. Local; reads no tensors.

        Returns:
            None if the folder holds no complete checkpoint, or does not exist.

        Raises:
            FileError: There is no checkpoint of that tag, or what should be read is damaged; names
                the tags that can be loaded.
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
        manifests: dict[str, dict[str, Any]] = {}
        damaged: dict[str, FileError] = {}
        for name in found if tag is None else [tag]:
            try:
                manifests[name] = read_manifest(found[name] / MANIFEST)
            except FileError as error:
                damaged[name] = error
        if damaged and (tag is not None or hint is None or hint in damaged):
            bad = hint if hint in damaged else next(iter(damaged))  # it may be the newest
            raise FileError(f"{damaged[bad]}; {_other_tags(folder, bad)}") from damaged[bad]
        if tag is not None:
            return cls._of(found[tag], manifests[tag])
        ranked = {
            name: said["serial"]
            for name, said in manifests.items()
            if said.get("serial") is not None
        }
        if not ranked:
            return None
        newest = max(ranked, key=lambda name: ranked[name])
        return cls._of(found[newest], manifests[newest])

    @classmethod
    def _of(cls, path: Path, said: Mapping[str, Any]) -> Checkpoint:
        try:
            facts = facts_of_files(said["files"])
            files = {name: TensorFile(path / name) for name in facts}
            read = _Maker(files)
            return cls(
                path=path,
                tag=str(said["tag"]),
                step=int(said["step"]),
                world_size=int(said["world_size"]),
                stage=int(said["stage"]),
                serial=said["serial"],
                params=read.tensors(said["params"]),
                ties=dict(said["ties"]),
                frozen=frozenset(name for name, s in said["params"].items() if s.get("frozen")),
                computes_in={
                    name: getattr(torch, s["computes_in"])
                    for name, s in said["params"].items()
                    if "computes_in" in s
                },
                excludes_frozen=bool(said["excludes_frozen"]),
                buffers=read.tensors(said["buffers"]),
                rank_buffers={int(r): read.tensors(of) for r, of in said["rank_buffers"].items()},
                optimizer={
                    name: {key: read.entry(f"{name}: {key}", e) for key, e in of.items()}
                    for name, of in said["optimizer"].items()
                },
                own_said=dict(said.get("own_said", {})),
                own_state={int(r): read.tensors(o) for r, o in said.get("own_state", {}).items()},
                param_groups=tuple(from_json(group) for group in said["param_groups"]),
                rngs={int(r): read.tensors(of) for r, of in said["rngs"].items()},
                loco={int(r): read.tensors(of) for r, of in said.get("loco", {}).items()},
                loco_facts=dict(said.get("loco_facts", {})),
                average=read.tensors(said.get("average", {})),
                num_updates=said.get("num_updates"),
                scheduler=from_json(said["scheduler"]),
                engine=from_json(said["engine"]),
                extra=from_json(said["extra"]),
                files=facts,
            )
        except (KeyError, TypeError, ValueError, AttributeError, FileError) as error:
            raise FileError(
                f"{path / MANIFEST}: expected a manifest of a checkpoint ({error!r})"
            ) from error

    def verify(self, files: Collection[str] | None = None) -> int:
        """See that files are what they were when they were saved. Local; 4 MiB at a time.

        Args:
            files: Some of `self.files`; all when None.

        Returns:
            Bytes read.

        Raises:
            FileError: Names the first file that is not, what was expected and what came, and the
                tags that can be loaded.
        """
        chosen = self.files if files is None else {name: self.files[name] for name in files}
        for name, facts in chosen.items():
            damage = _find_damage(self.path / name, facts)
            if damage is not None:
                raise FileError(f"{damage}; {_other_tags(self.path.parent, self.tag)}")
        return sum(facts.num_bytes for facts in chosen.values())


@frozen
class _Maker:
    """Makes readers of what a manifest says."""

    files: Mapping[str, TensorFile]

    def tensors(self, said: Mapping[str, Any]) -> dict[str, PiecesRange]:
        return {name: self.tensor(name, tensor) for name, tensor in said.items()}

    def tensor(self, name: str, said: Mapping[str, Any]) -> PiecesRange:
        stored = StoredTensor.of(said)
        unknown = {piece.file for piece in stored.pieces} - self.files.keys()
        if unknown:
            raise FileError(f"{name!r} lies in {sorted(unknown)}, which is not among the files")
        return PiecesRange(name, stored, self.files)

    def entry(self, name: str, said: Mapping[str, Any]) -> Any:
        return from_json(said["value"]) if "value" in said else self.tensor(name, said)


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


def _other_tags(folder: Path, tag: str) -> str:
    """What to load in place of a checkpoint that is damaged: the newest first."""
    serials: dict[str, int] = {}
    for name, path in find_complete(folder).items():
        try:
            said = read_manifest(path / MANIFEST)
            facts = facts_of_files(said["files"])
            is_whole = all((path / n).stat().st_size == f.num_bytes for n, f in facts.items())
        except (OSError, KeyError, TypeError, ValueError):  # damaged, too
            continue
        if is_whole and name != tag:
            serials[name] = said.get("serial") or 0
    ranked = sorted(serials, key=lambda name: serials[name], reverse=True)
    if not ranked:
        return "there is no other checkpoint here that could be loaded"
    return f"load another checkpoint, with tag={' or '.join(map(repr, ranked))}"


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
