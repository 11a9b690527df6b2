"""Folders of checkpoints: find the complete ones and the newest, and open one of them."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, final

from attrs import frozen
from torch import Tensor
from zero_comm import Group, all_gather_json
from zero_partition.plan import shown
from zero_partition.seams import AbstractRangeReader, SplitReader, StateSource

from zero_engine.errors import ConfigError, FileError

from .file_system import OpenFolder, open_regular, read_regular
from .manifest import MANIFEST, FileFacts, Manifest, TensorFacts, read_fields, read_manifest
from .ranges import FileRun, Range, TensorFile

T = TypeVar("T")

LATEST: Final = "latest"
# In the name of a folder that is being replaced by one of the same tag.
REPLACED: Final = ".replaced-"

# NOTE(complete): a folder TAG is complete: it gets its name when everything in it is on disk. While
# it is replaced by another of the same tag, there is no TAG for a moment; the old one is then
# `.TAG.replaced-XXXX`, and counts as complete. All other names that begin with a dot are ignored.


def find_complete(folder: Path) -> dict[str, Path]:
    """Return the folders of complete checkpoints by tag; see NOTE(complete). Local."""
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
    """Return the tag in the file `latest`; None if there is no such file, or no tag in it."""
    try:
        tag = read_regular(folder / LATEST).decode("utf-8", errors="replace").strip()
    except (OSError, FileError):
        return None
    return tag if tag and Path(tag).name == tag else None


def has_parts(path: Path) -> bool:
    """Return whether a folder has files that ranks write for one checkpoint. Local."""
    return any(path.glob("rank-*.safetensors"))


def serials_in(found: Mapping[str, Path]) -> tuple[dict[str, int], dict[str, FileError]]:
    """Return serials by tag, the newest first, and errors of damaged manifests by tag.

    A checkpoint that is loaded by its tag only has the serial 0.
    """
    serials, damaged = {}, {}
    for tag, path in found.items():
        try:
            serials[tag] = read_fields(path / MANIFEST, "serial")[0] or 0
        except FileError as error:
            damaged[tag] = error
    return dict(sorted(serials.items(), key=lambda item: -item[1])), damaged


def other_tags(folder: Path, tag: str) -> str:
    """Say which tags can be loaded in place of a damaged checkpoint, the newest first."""
    found = find_complete(folder)
    whole = [name for name in serials_in(found)[0] if name != tag and _is_whole(found[name])]
    if not whole:
        return "there is no other checkpoint here that could be loaded"
    return f"load another checkpoint, with tag={' or '.join(map(repr, whole))}"


def _is_whole(path: Path) -> bool:
    """Return whether all files of a checkpoint are there, of the sizes that its manifest says."""
    with suppress(OSError, FileError):
        [files] = read_fields(path / MANIFEST, "files")
        return all((path / name).stat().st_size == of.num_bytes for name, of in files.items())
    return False


def _manifests_in(folder: Path) -> dict[Path, int]:
    """Return the inode of the manifest in each complete checkpoint's folder."""
    found = {}
    for path in find_complete(folder).values():
        # The checkpoint may have been removed since it was found.
        with suppress(OSError):
            found[path] = (path / MANIFEST).stat().st_ino
    return found


# Most changes of a folder that are tolerated while one of its checkpoints is opened.
_MOST_CHANGES: Final = 100
# Bytes that are read at a time to verify a file.
_VERIFIED_BYTES: Final = 4 * 2**20

# Sections of a manifest with tensors of each rank.
_OF_RANKS: Final = ("rank_buffers", "rngs", "loco")


@final
@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint. Opening reads its manifest; tensors are read when they are asked for.

    Readers are by the names of `model.state_dict()`. An entry of the optimizer's state that is no
    tensor has its value in place of a reader.
    """

    path: Path
    manifest: Manifest
    # Values in the dtype that is trained: the master's, where there is one.
    source: StateSource
    # Name of each trained parameter -> its average.
    average: Mapping[str, AbstractRangeReader]
    # The checkpoint's own folder, kept open so that no other process removes it.
    folder: OpenFolder
    # Section -> rank -> name -> reader.
    _of_ranks: Mapping[str, Mapping[int, Mapping[str, Range]]]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters in it that do not train."""
        return frozenset(name for name, of in self.manifest.params.items() if of.is_frozen)

    @classmethod
    def open(cls, folder: str | Path, tag: str | None = None) -> Checkpoint | None:
        """Open the newest complete checkpoint of a folder, or that of a tag. Local.

        Reads no tensors. Another job may replace and prune checkpoints meanwhile; this one stays.

        Returns:
            The checkpoint; None if the folder has no complete one, or does not exist.
        """
        folder = Path(folder)
        num_changes = 0
        while True:
            before = _manifests_in(folder)
            try:
                return cls._open(folder, tag)
            except FileError:
                num_changes += 1
                if _manifests_in(folder) == before or num_changes > _MOST_CHANGES:
                    raise

    @classmethod
    def _open(cls, folder: Path, tag: str | None) -> Checkpoint | None:
        found, hint = find_complete(folder), read_latest(folder)
        if hint is not None and hint not in found and has_parts(folder / hint):
            found[hint] = folder / hint
        # Its manifest is missing. Reading that raises an error that says so.
        if tag is not None and tag not in found:
            raise FileError(
                f"{folder}: expected a checkpoint {tag!r}, found "
                f"{', '.join(map(repr, sorted(found))) or 'none at all'}"
            )
        serials, damaged = serials_in(found if tag is None else {tag: found[tag]})
        if damaged and (tag is not None or hint is None or hint in damaged):
            # Without a hint, the damaged one may be the newest.
            bad = hint if hint in damaged else next(iter(damaged))
            raise FileError(f"{damaged[bad]}; {other_tags(folder, bad)}") from damaged[bad]
        if tag is None:
            tag = next((name for name, serial in serials.items() if serial), None)
        return None if tag is None else cls._of(found[tag])

    @classmethod
    def _of(cls, path: Path) -> Checkpoint:
        try:
            folder = OpenFolder(path)
        except OSError as error:
            raise FileError(f"{path}: cannot be opened: {error.strerror}") from error
        said = read_manifest(path / MANIFEST, folder)
        files = {name: TensorFile(path / name, folder) for name in said.files}

        def tensors(of: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _reader(name, entry, files) for name, entry in of.items()}

        def by_rank(of: Mapping[int, Mapping[str, TensorFacts]]) -> dict[int, dict[str, Range]]:
            return {rank: tensors(of_rank) for rank, of_rank in of.items()}

        try:
            source = StateSource(
                params=tensors(said.params),
                buffers=tensors(said.buffers),
                ties=said.ties,
                may_lack=frozenset(),
                states={name: tensors(of) for name, of in said.optimizer.items()},
                param_groups=said.param_groups,
                where=str(path),
                extra=said.state_dict_extra,
                shared=said.shared_state,
                own_said=said.own_said,
                own=by_rank(said.own_state),
                layout=said.state_dict,
            )
            return cls(
                path=path,
                manifest=said,
                source=source,
                average=tensors(said.average),
                folder=folder,
                of_ranks={name: by_rank(getattr(said, name)) for name in _OF_RANKS},
            )
        except FileError as error:
            raise FileError(f"{path / MANIFEST}: {error}") from error

    def read(self, section: str, rank: int) -> dict[str, Tensor]:
        """Return a rank's own tensors of a section, by name; empty if it saved none."""
        own = self._of_ranks[section].get(rank, {})
        return {name: reader.whole() for name, reader in own.items()}

    def verify(self, files: Iterable[str]) -> None:
        """Check files against sizes and checksums in the manifest; FileError if damaged. Local."""
        with ThreadPoolExecutor(1) as ahead:
            for name in files:
                facts = self.manifest.files[name]
                damage = _find_damage(self.path / name, facts, self.folder, ahead)
                if damage is not None:
                    raise FileError(f"{damage}; {other_tags(self.path.parent, self.manifest.tag)}")


def _reader(name: str, said: Any, files: Mapping[str, TensorFile]) -> Any:
    """Return a reader of a tensor's elements; a value that is no tensor is returned itself."""
    if not isinstance(said, TensorFacts):
        return said
    if foreign := {piece.file for piece in said.pieces} - files.keys():
        raise FileError(
            f"expected all files of {name!r} to be named among the files, got {min(foreign)!r}"
        )
    runs = (FileRun(files[p.file], p.key, said.dtype, p.stop - p.start) for p in said.pieces)
    if said.split is None:
        return Range(said.shape, said.dtype, tuple(runs))
    return SplitReader(Range(said.shape, said.dtype, tuple(runs)), said.split)


def _find_damage(path: Path, facts: FileFacts, folder: OpenFolder, ahead: Executor) -> str | None:
    """Return what is wrong with a file, None if nothing is; `ahead` reads its parts ahead."""
    try:
        num_bytes, crc32, parts = 0, 0, deque(bytearray(_VERIFIED_BYTES) for _ in range(2))
        with open_regular(path, folder) as file:
            coming = ahead.submit(file.readinto, parts[0])
            while count := coming.result():
                part = memoryview(parts[0])[:count]
                parts.rotate()
                coming = ahead.submit(file.readinto, parts[0])
                num_bytes, crc32 = num_bytes + count, zlib.crc32(part, crc32)
    except FileError as error:
        return str(error)
    except OSError as error:
        return f"{path}: expected {facts.num_bytes} bytes, and it cannot be read: {error.strerror}"
    if (num_bytes, crc32) == (facts.num_bytes, facts.crc32):
        return None
    return (
        f"{path}: expected {facts.num_bytes} bytes of crc32 {facts.crc32:08x}, got {num_bytes} of "
        f"{crc32:08x}: it was damaged after it was saved"
    )


def check_folder(where: str, folder: Any) -> None:
    """Raise ConfigError unless `folder` is a path; an empty one is the working directory."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise ConfigError(f"{where}: expected the path of a folder first, got {shown(folder)}")


def on_all(act: Callable[[], T], *, what: str, group: Group, timeout_s: float | None = None) -> T:
    """Run `act` on every rank as `run_on_all_ranks` does; return what it returned here. Collective.

    The result may be of any type.
    """
    results: list[T] = []
    run_on_all_ranks(lambda: results.append(act()), what=what, group=group, timeout_s=timeout_s)
    return results[0]


def run_on_all_ranks(
    act: Callable[[], Any], *, what: str, group: Group, timeout_s: float | None = None
) -> list[Any]:
    """Run `act` on every rank, wait for all, and return its results by rank. Collective.

    `act` returns a value that JSON can represent. If it fails on a rank, that rank raises its
    error, and all others raise a FileError that names `what`. The timeout is the group's own when
    None.
    """
    problem, result = None, None
    try:
        result = act()
    except Exception as error:
        problem = error
    mine = ["" if problem is None else f"{type(problem).__name__}: {problem}", result]
    said = all_gather_json(mine, group=group, timeout_s=timeout_s)
    if problem is not None:
        raise problem
    for rank, (theirs, _) in enumerate(said):
        if theirs:
            raise FileError(f"{what}: rank {rank} failed (seen on rank {group.rank}): {theirs}")
    return [result for _, result in said]
