"""Writer of one checkpoint: every rank writes its pieces, and rank 0 publishes them all."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import AnyRanks, Group
from zero_partition import ShardedAverage
from zero_partition.plan import Split

from zero_engine.errors import FileError

from .file_system import FILE_SYSTEM, FileSystem, NewFile, naming, open_regular, removing
from .folder import LATEST, REPLACED, find_complete, has_parts, serials_in
from .manifest import MANIFEST, FileFacts, no_pieces, read_fields, seal
from .ranges import CODES, file_bytes, in_files

FILE_BYTES: Final = 2**30
# Mapped tensors begin at multiples of this, which suits any dtype and vector units.
_ALIGN_BYTES: Final = 64

_PARTIAL: Final = ".partial-"
_PRUNED: Final = ".pruned-"
_LOCK: Final = "lock"
# Age from which a partial folder without a lock file is left over: a job makes the file at once.
_NO_LOCK_S: Final = 60.0

# NOTE(order): everything is written to `.TAG.partial-XXXX` and is on disk before that is renamed to
# TAG, so a folder whose name has no dot in front is complete. A folder to be removed is renamed
# first. Rank 0's process holds a lock in the partial folder: if no process does, the folder is left
# over. The lock's file is made first and removed last, so that a kill leaves no folder without it.

# NOTE(linked): frozen parameters are compared with their file in the previous checkpoint, byte by
# byte. If they are equal, that file gets a second name. Reading takes less time than writing, and a
# file that has been damaged since then is not used again.


@frozen
class WriteItem:
    """A run of elements of a flattened tensor, which this rank writes."""

    # Keys of the tensor's entry in the manifest.
    path: tuple[str, ...]
    dtype: torch.dtype
    # Shape of the whole tensor.
    shape: torch.Size
    start: int
    stop: int
    # With a split, `start` and `stop` count elements in the order of its parts.
    split: Split | None = None

    @property
    def key(self) -> str:
        """Key of the run in its file."""
        return f"{'/'.join(self.path)}:{self.start}"

    @property
    def said(self) -> dict[str, Any]:
        """Return the manifest's entry of the whole tensor, without pieces."""
        return no_pieces(self.dtype, self.shape, self.split)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return (self.stop - self.start) * self.dtype.itemsize


@frozen(eq=False)
class WriteBatch:
    """Runs that are read together."""

    runs: tuple[WriteItem, ...]
    # Returns the values of each run, 1-D.
    read: Callable[[], Sequence[Tensor]]
    is_resident: bool = False  # see `zero_partition.seams.PartBatch`
    # Whether the runs are of parameters that do not train.
    is_frozen: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all its runs."""
        return sum(run.num_bytes for run in self.runs)


@frozen(kw_only=True, eq=False)
class SaveRequest:
    """Arguments of `save`, plus fields that users do not see: `engine` and `system`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    folder: Any
    step: Any
    extra: Any = None
    scheduler: Any = None
    tag: Any = None
    keep: Any = None
    exclude_frozen: bool = False
    is_latest: bool = True
    average: ShardedAverage | None = None
    stages: AnyRanks | None = None
    # Values that an engine saves; an engine also warns of gradients itself.
    engine: Any = None
    system: FileSystem = FILE_SYSTEM


@final
@frozen(kw_only=True)
class SaveReport:
    """Path and size of a checkpoint that was saved."""

    # The checkpoint's own folder.
    path: Path
    # Whole tensors, and bytes of all ranks' files.
    num_tensors: int
    num_bytes: int
    # Bytes of this rank's files that the previous checkpoint has, too.
    linked_bytes: int


@define(eq=False, kw_only=True)
class CheckpointWriter:
    """Checkpoint that is written by its methods, in their order; `abandon` ends it. Local."""

    asked: SaveRequest
    # All ranks that write it.
    group: Group
    # Content of the manifest. `publish` adds the files, and where tensors are in them.
    content: dict[str, Any]
    # Runs that this rank writes.
    batches: list[WriteBatch]
    # Whole tensors of all ranks.
    num_tensors: int
    # The partial folder.
    path: Path = field(init=False)
    # Descriptor of the lock's file on rank 0; see NOTE(order).
    _lock: int | None = field(default=None, init=False)

    @property
    def folder(self) -> Path:
        """Folder of all checkpoints."""
        return Path(self.asked.folder)

    @property
    def final(self) -> Path:
        """Path of the checkpoint's own folder when it is complete."""
        return self.folder / self.content["tag"]

    def make_folder(self) -> str | None:
        """Make the partial folder on rank 0 and return its name; return None on other ranks.

        Leftovers of dead jobs are removed first.
        """
        if self.group.rank:
            return None
        final, system = self.final, self.asked.system
        self.path = self.folder / f".{final.name}{_PARTIAL}{secrets.token_hex(4)}"
        try:
            with naming(self.folder):
                system.make_folders(self.folder)
                _remove_leftovers(self.folder, system)
                is_empty = final.is_dir() and not any(final.iterdir())
                if final.exists() and not _is_replaceable(final) and not is_empty:
                    raise FileError(
                        f"{final}: expected nothing, or a checkpoint to replace, and this is none; "
                        "choose another tag, or remove it"
                    )
                if self.asked.is_latest:
                    serials = serials_in(find_complete(self.folder))[0].values()
                    self.content["serial"] = 1 + max(serials, default=0)
                system.mkdir(self.path)
                self._lock = system.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                # The file system may have no locks; see `_is_left_over`.
                with suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileError:
            self.abandon()
            raise
        return self.path.name

    def write_in(self, name: str) -> None:
        """Write to the partial folder of this name, which rank 0 has made. Local."""
        self.path = self.folder / name

    def read_from(self, batches: list[WriteBatch]) -> None:
        """Write from these batches instead: copies of the values. Local."""
        self.batches = batches

    def write(self) -> dict[str, Any]:
        """Write this rank's files to disk; return their pieces and checksums, for `publish`.

        Batches are read one at a time. Frozen ones are read twice if they are compared with the
        previous checkpoint and differ.
        """
        pieces: list[dict[str, Any]] = []
        files: dict[str, FileFacts] = {}
        for prefix, is_frozen in (("frozen", True), ("rank", False)):
            batches = [batch for batch in self.batches if batch.is_frozen is is_frozen]
            before = self._before() if is_frozen and batches else None
            for index, chosen in enumerate(in_files(batches, FILE_BYTES)):
                path = self.path / f"{prefix}-{self.group.rank:05}-{index:02}.safetensors"
                name = path.name
                if before and name in before[1] and self._link(path, chosen, before[0]):
                    files[name] = before[1][name]
                else:
                    files[name] = self._write_file(path, chosen)
                for run in (run for batch in chosen for run in batch.runs):
                    where = {"file": name, "key": run.key, "start": run.start, "stop": run.stop}
                    pieces.append({"path": run.path, "said": run.said, "piece": where})
        facts = {name: {"bytes": f.num_bytes, "crc32": f.crc32} for name, f in files.items()}
        return {"pieces": pieces, "files": facts}

    def publish(self, written: Sequence[dict[str, Any]]) -> None:
        """On rank 0, make a complete checkpoint of what all ranks have written.

        The checkpoint that it replaces, and those that `keep` excludes, are removed. After an
        error, a folder of the tag, if there is one, is a complete checkpoint all the same: this
        one, or the one that was to be replaced.
        """
        if self.group.rank:
            return
        content, final, system = self.content, self.final, self.asked.system
        for one in (one for of_rank in written for one in of_rank["pieces"]):
            tensor = tensor_at(content, one["path"], one["said"])
            if one["piece"]["stop"] > one["piece"]["start"]:
                tensor.get("parts", tensor)["pieces"].append(one["piece"])
        content["files"] = {name: f for of_rank in written for name, f in of_rank["files"].items()}
        with naming(final):
            system.write_file(self.path / MANIFEST, seal(content))
            system.sync_folder(self.path)
            self._rename()
            system.sync_folder(self.folder)
            # A lock file that stays does no harm.
            with suppress(OSError):
                system.unlink(final / _LOCK)
            self._release()
            if self.asked.is_latest:
                aside = f".{LATEST}{_PARTIAL}{secrets.token_hex(4)}"
                with system.published(self.folder / LATEST, aside) as path:
                    system.write_file(path, final.name.encode())
            _remove_leftovers(self.folder, system)
            if self.asked.keep is not None:
                _prune(final, self.asked.keep, system)

    def abandon(self) -> None:
        """Remove the partial folder, if that is possible. After `publish` nothing is removed."""
        # An interrupt may come before the path is set.
        path = getattr(self, "path", None)
        if self.group.rank == 0 and path is not None and path.exists():
            _remove(path, self.asked.system)
        self._release()

    def report(self, written: Sequence[dict[str, Any]]) -> SaveReport:
        """Return the report of a checkpoint that is complete."""
        mine = written[self.group.rank]["files"]
        try:
            linked = [f["bytes"] for n, f in mine.items() if (self.final / n).stat().st_nlink > 1]
        except OSError:
            # The checkpoint has been pruned or replaced by now.
            linked = []
        return SaveReport(
            path=self.final,
            num_tensors=self.num_tensors,
            num_bytes=sum(f["bytes"] for of_rank in written for f in of_rank["files"].values()),
            linked_bytes=sum(linked),
        )

    def _before(self) -> tuple[Path, dict[str, FileFacts]] | None:
        """Return the folder and files of the newest checkpoint with an intact manifest, or None."""
        # The checkpoint may be removed meanwhile.
        with suppress(OSError, FileError):
            found = find_complete(self.folder)
            tag = next((tag for tag, serial in serials_in(found)[0].items() if serial), None)
            if tag is not None:
                return found[tag], read_fields(found[tag] / MANIFEST, "files")[0]
        return None

    def _write_file(self, path: Path, batches: Sequence[WriteBatch]) -> FileFacts:
        with naming(path), NewFile(path, self.asked.system) as file:
            for view in _bytes_of(batches):
                file.put(view)
        return FileFacts(file.num_bytes, file.crc32)

    def _link(self, path: Path, batches: Sequence[WriteBatch], before: Path) -> bool:
        """Hard-link the previous checkpoint's file if its bytes are the same; return whether."""
        # The file may be gone, or the file system may have no hard links.
        with suppress(OSError, FileError):
            with open_regular(before / path.name) as file:
                is_same = all(file.read(len(view)) == view for view in _bytes_of(batches))
                is_same = is_same and not file.read(1)
            if is_same:
                self.asked.system.link(before / path.name, path)
            return is_same
        return False

    def _rename(self) -> None:
        aside = self.folder / f".{self.final.name}{REPLACED}{secrets.token_hex(4)}"
        is_replaced = _is_replaceable(self.final)
        if is_replaced:
            self.asked.system.rename(self.final, aside)
        try:
            # This replaces an empty folder, too.
            self.asked.system.rename(self.path, self.final)
        except OSError:
            if is_replaced:
                self.asked.system.rename(aside, self.final)
            raise

    def __del__(self) -> None:
        """Release the lock if an interrupt came before `abandon`: the next save then cleans up."""
        # Python would only print an error.
        with suppress(BaseException):
            self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                self.asked.system.close(lock)


def tensor_at(
    content: dict[str, Any], path: Sequence[str], said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a manifest's entry of a tensor; if there is none, make it of `said`."""
    at = content
    for name in path[:-1]:
        at = at.setdefault(name, {})
    return at.setdefault(path[-1], said)


def _bytes_of(batches: Sequence[WriteBatch]) -> Iterator[memoryview]:
    """Return all bytes of a file. The format has no gaps, so paddings are tensors as well."""
    tensors: list[tuple[str, str, list[int], int]] = []
    cursor = 0
    for index, run in enumerate(run for batch in batches for run in batch.runs):
        if padding := -cursor % _ALIGN_BYTES:
            tensors.append((f"padding.{index}", "U8", [padding], padding))
        cursor += padding + run.num_bytes
        code = CODES.get(run.dtype)
        numel = run.num_bytes if code is None else run.stop - run.start
        tensors.append((run.key, code or "U8", [numel], run.num_bytes))
    return file_bytes(tensors, _values(batches), align=_ALIGN_BYTES)


def _values(batches: Sequence[WriteBatch]) -> Iterator[Tensor]:
    """Yield a padding and then the values of each run, batch by batch as these are read."""
    cursor = 0
    for batch in batches:
        for run, value in zip(batch.runs, batch.read(), strict=True):
            if value.dtype != run.dtype or value.numel() != run.stop - run.start:
                raise FileError(
                    f"{run.key}: expected {run.stop - run.start} elements of {run.dtype}, got "
                    f"{value.numel()} of {value.dtype}: it has changed while it was saved"
                )
            padding = -cursor % _ALIGN_BYTES
            yield torch.zeros(padding, dtype=torch.uint8, device="cpu")
            yield value
            cursor += padding + run.num_bytes


def _is_replaceable(path: Path) -> bool:
    """Return whether a folder is a checkpoint, or has parts of one but no manifest."""
    return (path / MANIFEST).exists() or has_parts(path)


def _remove_leftovers(folder: Path, system: FileSystem) -> None:
    """Remove folders and files of dead jobs; finish or undo a replacement that one has started."""
    complete = find_complete(folder)
    for path in [folder / name for name in system.listdir(folder) if name.startswith(".")]:
        tag, was_replaced, _ = path.name[1:].rpartition(REPLACED)
        if was_replaced and (path / MANIFEST).exists() and complete.get(tag) == path:
            system.rename(path, folder / tag)
        elif was_replaced:
            _retire(path, tag, system)
        elif _PRUNED in path.name or (_PARTIAL in path.name and _is_left_over(path)):
            _remove(path, system)
        elif path.name.startswith(f".{LATEST}{_PARTIAL}"):
            system.unlink(path)


def _is_left_over(path: Path) -> bool:
    """Return whether the job that made a partial folder is dead; False if that is unknown."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        with suppress(OSError):
            return time.time() - path.stat().st_mtime > _NO_LOCK_S
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _remove(path: Path, system: FileSystem) -> None:
    """Remove a folder that is no complete checkpoint, unless a process is reading it."""
    with suppress(OSError), removing(path):
        system.remove(path, last=_LOCK)


def _prune(newest: Path, keep: int, system: FileSystem) -> None:
    """Remove all but `keep` checkpoints: `newest`, and the newest ones before it."""
    found = find_complete(newest.parent)
    serials = serials_in(found)[0]
    others = [tag for tag, serial in serials.items() if serial and tag != newest.name]
    # The oldest are removed first, in case this is interrupted.
    for tag in reversed(others[keep - 1 :]):
        _retire(found[tag], tag, system)


def _retire(path: Path, tag: str, system: FileSystem) -> None:
    """Rename a checkpoint, so that it does not count as complete any more, and remove it."""
    aside = path.with_name(f".{tag}{_PRUNED}{secrets.token_hex(4)}")
    system.rename(path, aside)
    system.sync_folder(aside.parent)
    _remove(aside, system)
