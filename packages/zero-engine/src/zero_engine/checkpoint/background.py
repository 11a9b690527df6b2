"""Saver: checkpoints that are written while training goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread, main_thread
from types import FrameType
from typing import Any, Final, final

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import AnyRanks, CommError, all_gather_json, collective
from zero_offload import HostArena
from zero_partition import ShardedAverage, StateError
from zero_partition.plan import Placement
from zero_partition.seams import find_sharded

from zero_engine.errors import ConfigError, FileError
from zero_engine.torch_private import version_of

from .file_system import FILE_SYSTEM, FileSystem, naming, read_regular
from .folder import check_folder, run_on_all_ranks
from .pipeline import CheckpointRanks
from .save import begin, sharded_of
from .writer import CheckpointWriter, SaveReport, SaveRequest, WriteBatch

# Alignment of each copy in host memory.
_ALIGN_BYTES: Final = 64


@define(eq=False)
class Copying:
    """Copies that are taken on another thread while training reads the same values."""

    # Copies to make, and their sources.
    _pending: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)
    # Name, tensor and its version when `watch` was called.
    _watched: list[tuple[str, Tensor, int]] = field(factory=list, init=False)
    _is_over: Event = field(factory=Event, init=False)
    _device: torch.device | None = field(default=None, init=False)
    # Event on `_device` after the work that copies wait for.
    _is_ready: torch.Event | None = field(default=None, init=False)

    def watch(self, name: str, tensor: Tensor) -> None:
        """Let `run` fail if a tensor is written to before all copies are made."""
        self._watched.append((name, tensor, version_of(tensor)))

    def add(self, name: str, copy: Tensor, source: Tensor) -> None:
        """Let `run` copy `source` to `copy`; the source must not be written to before."""
        self.watch(name, source)
        self._pending.append((copy, source))

    def follow(self, device: torch.device) -> None:
        """Let copies wait for all work launched on a device by now, and for no later work."""
        self._device, self._is_ready = device, torch.Event(device)
        self._is_ready.record(torch.accelerator.current_stream(device))

    def run(self) -> None:
        """Make all copies. Called on the thread that writes.

        Raises:
            FileError: A value that is watched was written to meanwhile.
        """
        try:
            self._copy()
            for name, tensor, version in self._watched:
                if version_of(tensor) != version:
                    raise FileError(
                        f"{name}: was written to while it was copied. With overlap=True, "
                        "parameters and state must not change until the optimizer's next step; "
                        "leave overlap out, or write later"
                    )
        finally:
            self._pending, self._watched = [], []
            self._is_over.set()

    def wait(self) -> None:
        """Wait until copies are made, so that their sources may be written to."""
        self._is_over.wait()

    def _copy(self) -> None:
        if self._is_ready is not None:
            stream = torch.Stream(self._device)
            with stream:
                stream.wait_event(self._is_ready)
                for copy, source in self._pending:
                    if not source.is_cpu:
                        copy.copy_(source, non_blocking=True)
            stream.synchronize()
        for copy, source in self._pending:
            # numpy copies on one core. torch would use all cores, which training needs.
            if source.is_cpu:
                np.copyto(copy.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


@define(eq=False)
class HostSnapshot:
    """Host memory for copies of the values of a checkpoint that is being written.

    The next checkpoint uses it again: faulting pages in anew takes longer than filling them.
    """

    _arena: HostArena = field(factory=lambda: HostArena("copies of a checkpoint"), init=False)
    # One mapping for all copies, since thousands would be slow.
    _memory: Tensor | None = field(default=None, init=False)

    def capture(self, writer: CheckpointWriter, copying: Copying | None) -> int:
        """Let a writer write from copies, and return the bytes of the copies.

        With `copying`, batches that are views of trained memory are copied by it later. All other
        batches are copied at once.
        """
        sizes = [run.num_bytes for batch in writer.batches for run in batch.runs]
        aligned = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes]
        if self._memory is None or self._memory.numel() != sum(aligned):
            # Release the memory before more is allocated.
            self._memory = None
            self._memory = self._arena.allocate(sum(aligned))
        buffers = iter(self._memory.split(aligned))
        writer.read_from([_copied(batch, buffers, copying) for batch in writer.batches])
        device = writer.group.device
        if device.type != "cpu" and copying is not None:
            copying.follow(device)
        elif device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
        return sum(sizes)


def _copied(batch: WriteBatch, buffers: Iterator[Tensor], copying: Copying | None) -> WriteBatch:
    values = []
    for run, value in zip(batch.runs, batch.read(), strict=True):
        copy, flat = next(buffers)[: run.num_bytes].view(run.dtype), value.detach().view(-1)
        if (flat.dtype, flat.numel()) != (copy.dtype, copy.numel()):
            # The writer raises an error for it.
            values.append(flat)
            continue
        if copying is not None and batch.is_resident:
            copying.add(run.key, copy, flat)
        else:
            copy.copy_(flat, non_blocking=True)
        values.append(copy)
    return WriteBatch(batch.runs, lambda: values, is_frozen=batch.is_frozen)


_POLL_S: Final = 0.02
# Seconds without a change in the folder after which rank 0 stops waiting for files of other ranks:
# when the program ends; when an exception has ended training here, and a rank may be in fsync; and
# when communication has failed, and a rank may be dead.
_AT_EXIT_S: Final = 20.0
_LEFT_S: Final = 120.0
_APART_S: Final = 10.0
_LOG: Final = logging.getLogger(__name__)

# NOTE(background): only the main thread takes part in collectives. Ranks tell rank 0 by small files
# beside those that they have written; rank 0's thread waits for those of all ranks, and publishes.
# Ranks learn of a failure in the next call, which is collective.


@final
@frozen(kw_only=True)
class Snapshot:
    """Copy in host memory for which a save has blocked training."""

    # The checkpoint's own folder, once it is complete.
    path: Path
    # Bytes of host memory that this rank uses until then.
    num_bytes: int
    seconds: float


@final
class Saver:
    """Background saver: training waits for a copy in host memory, and not for the disk.

        with zero_engine.Saver(folder, model, optimizer, keep=3) as saver:
            for step in range(...):
                ...
                if step % 100 == 0:
                    saver.save(step=step)

    One checkpoint is written at a time. Its copy takes as much host memory as this rank has of
    parameters and optimizer state; the next one uses it again, until `close`. Leaving the block
    waits for the last checkpoint.

    Args:
        folder: As for `zero_engine.save`, like all arguments of these names.
        model: The model that was sharded.
        optimizer: The optimizer that was sharded with it, or None.
        keep: How many checkpoints to keep; all when None.
        exclude_frozen: Leave out parameters that do not train.
        overlap: Copy while the next forward and backward run, which only read the values. `save`
            returns at once, and the next function of zero that writes to them, such as the
            optimizer's step, waits for the remaining copies. Until then your code must not write to
            parameters or state in place. Buffers and offloaded state are copied at once.
        timeout_s: How long rank 0 waits for the files of other ranks, in seconds.
        stages: As for `zero_engine.save`.
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
        stages: AnyRanks | None = None,
        system: FileSystem = FILE_SYSTEM,
    ) -> None:
        check_folder("Saver()", folder)
        # Raises if it is no module.
        find_sharded(model)
        self._model, self._optimizer = model, optimizer
        self._ask = partial(
            SaveRequest,
            model=model,
            optimizer=optimizer,
            folder=folder,
            keep=keep,
            exclude_frozen=exclude_frozen,
            stages=stages,
            system=system,
        )
        self._overlap, self._timeout_s = overlap, timeout_s
        self._under_way: _Background | None = None
        self._host = HostSnapshot()

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

        Waits for the previous save, if that is still being written. Arguments and errors are those
        of `zero_engine.save`; besides:

        Raises:
            FileError: The previous save failed, on this rank or another; no new one was started,
                and the next call starts one.
        """
        self.wait()
        started_at = time.monotonic()
        writer = begin(
            self._ask(step=step, extra=extra, scheduler=scheduler, tag=tag, average=average)
        )
        sharded = sharded_of(self._model, self._optimizer, "Saver.save()")
        copying = Copying() if self._overlap else None
        # Shards need not be watched: our functions write to them, and these wait for the copies.
        if copying is not None and sharded.placements.params is Placement.REPLICATED:
            for name, param in self._model.named_parameters():
                copying.watch(name, param)
        try:
            sizes = run_on_all_ranks(
                lambda: self._host.capture(writer, copying), what="Saver.save()", group=writer.group
            )
        except BaseException:
            writer.abandon()
            raise
        self._under_way = _Background(writer, copying, self._timeout_s)
        if copying is not None:
            sharded.before_write.append(copying.wait)
        return Snapshot(
            path=writer.final,
            num_bytes=sizes[writer.group.rank],
            seconds=time.monotonic() - started_at,
        )

    @collective
    def wait(self) -> SaveReport | None:
        """Block until the last save is complete. Collective.

        Returns:
            A report of what was saved; None if nothing was being written.

        Raises:
            FileError: It failed, on this rank or another; the previous checkpoint is unchanged.
        """
        if self._under_way is None:
            return None
        under_way, self._under_way = self._under_way, None
        return under_way.finish()

    def close(self) -> None:
        """Wait for the last save, and free the memory of copies. Collective."""
        try:
            self.wait()
        finally:
            self._host = HostSnapshot()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close; after an exception wait locally (`_Background.leave`), as ranks may be gone."""
        if kind is None:
            self.close()
        elif self._under_way is not None:
            self._under_way.leave(kind)


def _failed(rank: int, problem: str) -> str:
    return f"a save in the background: rank {rank} failed: {problem}"


@define(eq=False)
class _Background:
    """One save, on a thread of its own."""

    writer: CheckpointWriter
    # Copies to make before anything is written; None if they are made already.
    copying: Copying | None
    timeout_s: float
    thread: Thread = field(init=False)
    # Set when a rank has failed, so that rank 0 does not wait for more files; `problem` says why.
    is_over: Event = field(factory=Event, init=False)
    problem: str = field(default="", init=False)
    # Seconds without a change in the folder after which rank 0 takes other ranks for dead.
    idle_s: float = field(default=math.inf, init=False)
    error: Exception | None = field(default=None, init=False)
    written: dict[str, Any] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = Thread(target=self._run, name="zero-save", daemon=False)
        self.thread.start()

    def finish(self) -> SaveReport:
        """Wait for all ranks; return the report, or raise if one of them failed. Collective."""
        writer = self.writer
        if writer.group.rank:
            self.thread.join()
        try:
            own = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
            problems = all_gather_json(own, group=writer.group)
        except CommError as error:
            self.leave(type(error))
            raise
        # A rank whose disk is full tells of its failure only here: it cannot write a file.
        for rank, problem in enumerate(problems):
            if problem and not self.is_over.is_set():
                self.problem = _failed(rank, problem)
                self.is_over.set()
        self.thread.join()
        self._clean_up()

        def look() -> dict[str, Any] | None:
            if self.error is not None:
                raise self.error
            return self.written

        said = run_on_all_ranks(look, what="a save in the background", group=writer.group)
        return writer.report(said)

    def leave(self, kind: type[BaseException]) -> None:
        """Wait for this rank's files, and on rank 0 for others' while they write. Local.

        Args:
            kind: Type of the exception that ends training here.
        """
        self.idle_s = _APART_S if issubclass(kind, CommError) else _LEFT_S
        self.thread.join()
        self._clean_up()
        if self.error is not None:
            _LOG.warning("a save in the background was given up: %s", self.error)

    def _clean_up(self) -> None:
        """Remove a save that has failed, once the other ranks write no more.

        Else these would fail too, since the folder that they write to is gone.
        """
        if self.error is not None:
            self.writer.abandon()

    def _run(self) -> None:
        writer = self.writer
        try:
            self._write()
            if writer.group.rank == 0:
                writer.publish(self._collect())
        except Exception as error:
            # The frames refer to the copies, whose memory would not be released.
            traceback.clear_frames(error.__traceback__)
            self.error = error
        else:
            writer.abandon()
        finally:
            writer.read_from([])

    def _write(self) -> None:
        """Write this rank's files, then a small file that tells rank 0 of success or failure."""
        system, at, problem = self.writer.asked.system, self._said_by(self.writer.group.rank), ""
        try:
            if self.copying is not None:
                self.copying.run()
            self.written = self.writer.write()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            content = json.dumps({"problem": problem, "written": self.written}).encode()
            partial = at.with_name(f"{at.name}.partial")
            with suppress(OSError) if problem else naming(at):
                system.write_file(partial, content)
                # The last that this rank does in the folder, which rank 0 may rename from now on.
                system.rename(partial, at)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of all files in the folder by now, by name."""
        with suppress(OSError):
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.writer.path)}
        return {}

    def _said_by(self, rank: int) -> Path:
        """Return the path of the file that says that a rank has written, or has failed."""
        return self.writer.path / f".written-{rank:05}"

    def _collect(self) -> list[dict[str, Any]]:
        """Wait for all ranks' files; return what each has written. On rank 0's thread."""
        found, writer, started_at = [], self.writer, time.monotonic()
        seen, changed = None, started_at
        for rank in range(writer.group.world_size):
            at = self._said_by(rank)
            while not at.exists():
                # The program is ending here, and other ranks may have ended already.
                if not main_thread().is_alive():
                    self.idle_s = min(self.idle_s, _AT_EXIT_S)
                now, sizes = time.monotonic(), None if math.isinf(self.idle_s) else self._sizes()
                if sizes != seen:
                    seen, changed = sizes, now
                if now - started_at > self.timeout_s:
                    raise FileError(
                        f"{writer.path}: rank {rank} has not written its files within "
                        f"{self.timeout_s:g} s; is it alive, and does it see the same folder?"
                    )
                if now - changed > self.idle_s:
                    raise FileError(
                        f"{writer.path}: rank {rank} has not written its files, nothing was "
                        f"written for {self.idle_s:g} s, and training has ended here; is it alive?"
                    )
                if self.is_over.wait(_POLL_S):
                    raise FileError(self.problem)
            said = json.loads(read_regular(at))
            if said["problem"]:
                raise FileError(_failed(rank, said["problem"]))
            found.append(said["written"])
        for rank in range(writer.group.world_size):
            writer.asked.system.unlink(self._said_by(rank))
        return found


# Sent by schedulers, such as Slurm and Kubernetes, and by spot machines.
_USUAL: Final = (signal.SIGTERM, signal.SIGUSR1)


@final
class StopSignals:
    """Recorder of signals that ask the job to end, so that it can save between two steps.

        with zero_engine.checkpoint.StopSignals(model) as stop:
            for step in range(...):
                ...
                optimizer.step()
                optimizer.zero_grad()
                if stop.arrived():
                    zero_engine.save(folder, model, optimizer, step=step + 1)
                    break

    Inside the block the signals do nothing else: SIGTERM does not end the process. After it,
    the previous handlers are installed again.

    Args:
        model: The model that was sharded; its ranks tell each other of signals.
        signals: The signals to record.
        stages: As for `zero_engine.save`: ranks of all stages tell each other then. Making it is
            collective among them.

    Raises:
        zero_partition.StateError: The model is not sharded; or, from `with`, this is not the main
            thread, which alone can take signals.
        ConfigError: `signals` is empty, or contains something else than signals.
    """

    def __init__(
        self,
        model: nn.Module,
        signals: Iterable[signal.Signals] = _USUAL,
        *,
        stages: AnyRanks | None = None,
    ) -> None:
        sharded = sharded_of(model, None, "StopSignals()")
        self._group = CheckpointRanks.of(sharded, stages).group
        self._signals = tuple(signals)
        if not self._signals or not all(isinstance(s, signal.Signals) for s in self._signals):
            raise ConfigError(
                "StopSignals.signals: expected some of Python's signal.Signals, such as "
                f"signal.SIGTERM, got {signals!r}"
            )
        self._before: dict[signal.Signals, Any] = {}
        self._noted = ""

    def arrived(self) -> str | None:
        """Return the name of a signal that some rank received in this block, or None. Collective.

        The same on every rank: one small message per call.
        """
        said = all_gather_json(self._noted, group=self._group)
        return next((name for name in said if name), None)

    def __enter__(self) -> StopSignals:
        self._noted = ""
        try:
            for each in self._signals:
                self._before[each] = signal.signal(each, self._note)
        except ValueError as error:
            self._put_back()
            raise StateError(f"StopSignals: {error}; enter it in the main thread") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = signal.Signals(number).name

    def _put_back(self) -> None:
        while self._before:
            each, handler = self._before.popitem()
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
