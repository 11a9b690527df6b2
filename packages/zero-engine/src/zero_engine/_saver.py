"""Saver: checkpoints that are written while training goes on."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import nn
from zero_comm import Group, all_gather_json, collective
from zero_partition import Placement, ShardedAverage

from ._copies import Copies, Copying
from ._errors import FileError
from ._file_system import FILE_SYSTEM, FileSystem, named
from ._save import SaveReport, report_of
from ._together import together
from ._writing import Writing, sharded_of

_POLL_S: Final = 0.02
_AT_EXIT_S: Final = 20.0
_SAID: Final = ".written-"  # a rank's word that its files are on disk, in the partial folder

# NOTE(background): no thread but the main one takes part in collectives. Ranks tell rank 0 by small
# files beside what they have written; rank 0's thread waits for those of all, and publishes. That
# something went wrong, every rank learns in the next call, which is collective.


@final
@frozen(kw_only=True)
class Snapshot:
    """What a save has blocked training for."""

    path: Path  # of the checkpoint's own folder, once it is complete
    num_bytes: int  # of host memory that this rank holds until then
    seconds: float


@final
class Saver:
    """Saves in the background: training waits for a copy in host memory, and not for the disk.

        with zero_engine.Saver(folder, model, optimizer, keep=3) as saver:
            for step in range(...):
                ...
                if step % 100 == 0:
                    saver.save(step=step)

    One checkpoint at a time is written; its copy takes as much host memory as this rank has of
    parameters and optimizer state, which is kept for the next until `close`. Leaving the block
    waits for the last one.

    Args:
        folder: As for `zero_engine.save`, and so below.
        model: That was sharded.
        optimizer: That was sharded with it, or None.
        keep: How many checkpoints to keep; all when None.
        exclude_frozen: Leave out parameters that do not train.
        overlap: Copy while the next forward and backward run, which read the same values: `save`
            returns at once, and whatever writes to them next, as the optimizer's step, waits for
            what is left. Until then nobody may write to parameters or state in place. Buffers, and
            what rests outside the device, are copied at once.
        timeout_s: How long rank 0 waits for the files of the others, in seconds.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int | None = None,
        exclude_frozen: bool = False,
        overlap: bool = False,
        timeout_s: float = 1800.0,
        system: FileSystem = FILE_SYSTEM,
    ) -> None:
        self._model, self._optimizer, self._timeout_s = model, optimizer, timeout_s
        self._asked: dict[str, Any] = {
            "folder": folder,
            "keep": keep,
            "has_frozen": not exclude_frozen,
        }
        self._asked |= {"is_latest": True, "system": system}
        self._overlap = overlap
        self._under_way: _Background | None = None
        self._copies = Copies()

    @collective
    def save(
        self,
        *,
        step: int,
        extra: Any = None,
        scheduler: Any = None,
        tag: str | None = None,
        average: ShardedAverage | None = None,
    ) -> Snapshot:
        """Copy everything to host memory, and begin to write it. Collective.

        Waits for the save before, if that is still being written.

        Args:
            step: As for `zero_engine.save`, as are the others.
            extra: Likewise.
            scheduler: Likewise.
            tag: Likewise.
            average: Likewise.

        Raises:
            FileError: The save before failed, on this rank or another; nothing new was begun, and
                the next call begins anew. Or as for `zero_engine.save`, as for all else.
        """
        self.wait()
        begun = time.monotonic()
        writing = Writing.begin(
            self._model,
            self._optimizer,
            step=step,
            extra=extra,
            scheduler=scheduler,
            tag=tag,
            average=average,
            **self._asked,
        )
        sharded = sharded_of(self._model, self._optimizer, "Saver.save()")
        copying = Copying() if self._overlap else None
        if copying is not None and sharded.placements.params is Placement.REPLICATED:
            for name, param in self._model.named_parameters():  # shards are behind our own gates
                copying.watch(name, param)

        def take() -> int:
            return self._copies.take(writing, copying)

        try:
            sizes = together(take, what="Saver.save()", group=writing.group)
        except BaseException:
            writing.abandon()
            raise
        self._under_way = _Background(writing, copying, self._timeout_s)
        self._under_way.start()
        if copying is not None:
            sharded.before_write.append(copying.wait)
        return Snapshot(
            path=writing.request.folder / writing.request.tag,
            num_bytes=sizes[writing.group.rank],
            seconds=time.monotonic() - begun,
        )

    @collective
    def wait(self) -> SaveReport | None:
        """Block until the last save is complete. Collective.

        Returns:
            What was saved; None if nothing was under way.

        Raises:
            FileError: It failed, on this rank or another; the checkpoint before is as it was.
        """
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        return under_way.finish()

    def close(self) -> None:
        """As `wait`, and give back the memory of copies."""
        try:
            self.wait()
        finally:
            self._copies = Copies()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait; after an exception for this rank's own part only, as other ranks may be gone."""
        if kind is None:
            self.close()
        elif self._under_way is not None:
            self._under_way.thread.join()


@define(eq=False)
class _Background:
    """One save, on a thread of its own."""

    writing: Writing
    copying: Copying | None  # before it is written
    timeout_s: float
    thread: Thread = field(init=False)
    is_over: Event = field(factory=Event, init=False)  # rank 0 need not wait for others' files
    error: Exception | None = field(default=None, init=False)
    written: dict[str, Any] | None = field(default=None, init=False)

    def start(self) -> None:
        self.thread = Thread(target=self._run, name="zero-save", daemon=False)
        self.thread.start()

    def finish(self) -> SaveReport:
        """Collective."""
        writing = self.writing
        if writing.group.rank:
            self.thread.join()
        problems = all_gather_json("" if self.error is None else "failed", group=writing.group)
        if any(problems):  # which a rank whose disk is full could not say otherwise
            self.is_over.set()
        self.thread.join()
        if self.error is not None:
            writing.abandon()  # others may have written since, and have ended by now

        def look() -> dict[str, Any] | None:
            if self.error is not None:
                raise self.error
            return self.written

        said = together(look, what="a save in the background", group=writing.group)
        return report_of(writing, said)

    def _run(self) -> None:
        writing = self.writing
        try:
            self._write()
            if writing.group.rank == 0:
                said = _collect(writing.path, writing.group, self.timeout_s, self.is_over)
                for rank in range(writing.group.world_size):
                    writing.system.unlink(_said_at(writing.path, rank))
                writing.publish(said)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they would hold the copies
            self.error = error
        finally:
            writing.abandon()
            writing.batches, writing.frozen_batches = [], []

    def _write(self) -> None:
        """And tell rank 0, of a failure too."""
        writing = self.writing
        at, problem = _said_at(writing.path, writing.group.rank), ""
        try:
            if self.copying is not None:
                self.copying.run()
            self.written = writing.write()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            content = json.dumps({"problem": problem, "written": self.written}).encode()
            temporary = at.with_name(f"{at.name}.partial")
            try:
                writing.system.write_file(temporary, content)
                writing.system.rename(temporary, at)
            except OSError as error:
                if not problem:
                    raise named(error, at) from error


def _said_at(path: Path, rank: int) -> Path:
    return path / f"{_SAID}{rank:05}"


def _collect(path: Path, group: Group, timeout_s: float, is_over: Event) -> list[dict[str, Any]]:
    """What every rank has written, when all have. On rank 0's thread."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, dict[str, Any]] = {}
    while len(found) < group.world_size:
        for rank in _missing(found, group):
            at = _said_at(path, rank)
            if at.exists():
                said = json.loads(at.read_bytes())
                if said["problem"]:
                    raise FileError(
                        f"a save in the background: rank {rank} failed: {said['problem']}"
                    )
                found[rank] = said["written"]
        if len(found) < group.world_size:
            if not main_thread().is_alive() and timeout_s > _AT_EXIT_S:
                timeout_s = _AT_EXIT_S  # the job is ending, and another rank may have ended
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise FileError(
                    f"{path}: rank {min(_missing(found, group))} has not written its files within "
                    f"{timeout_s:g} s; is it alive, and does it see the same folder?"
                )
            if is_over.wait(_POLL_S):
                raise FileError(f"{path}: another rank failed to write its files")
    return [found[rank] for rank in range(group.world_size)]


def _missing(found: Iterable[int], group: Group) -> list[int]:
    return [rank for rank in range(group.world_size) if rank not in found]
