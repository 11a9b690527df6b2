"""Whatever goes wrong in a save, the checkpoint before is whole, and all ranks know.

Run as a script, it saves to a folder while its processes are killed, and says how that went.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import attrs
import pytest
import torch
import torch.distributed as dist
import zero_engine
from attrs import define, field
from torch import nn
from zero_comm import CommError, Group
from zero_engine import FileError
from zero_engine.checkpoint import StopSignals, background
from zero_engine.checkpoint.folder import Checkpoint
from zero_engine.testing import FileSystem, save

REAL = FileSystem()
CALLS = tuple(field.name for field in attrs.fields(FileSystem))
NUM_KILLS = 10
NUM_LOADS = 150


# ---- A model whose every value is its step, so that what is loaded can be told ----


def _make(group: Group) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained, and frozen, and with a momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, 0.9)
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(3, min_unit_bytes=0), group=group)
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save_step(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    system: FileSystem = REAL,
    tag: str | None = None,
    keep: int | None = 2,
) -> None:
    """Every value that is trained is the step; all others are 1. Collective."""
    for param in model.parameters():
        value = torch.full(param.shape, float(step) if param.requires_grad else 1.0)
        zero_engine.set_full_param(param, value)
        if param.requires_grad:
            zero_engine.set_full_optimizer_state(param, "momentum_buffer", value)
    save(folder, model, optimizer, step=step, system=system, extra=step, tag=tag, keep=keep)


@functools.cache
def _reader() -> tuple[nn.Module, torch.optim.Optimizer]:
    return _make(Group.solo(torch.get_default_device()))


def _check_newest(folder: Path) -> int:
    """The step of the newest checkpoint, which is whole and as it was saved; 0 if there is none."""
    model, optimizer = _reader()
    report = zero_engine.load(folder, model, optimizer, missing_ok=True)
    if report is None:
        return 0
    assert (report.num_tensors, report.extra) == (4 + 3, report.step)
    for name, param in model.named_parameters():
        expected = float(report.step) if param.requires_grad else 1.0
        values = [zero_engine.full_param(param)]
        if param.requires_grad:
            values.append(zero_engine.full_optimizer_state(param, "momentum_buffer"))
        assert all((value == expected).all() for value in values), name
    return report.step


# ---- Faults ----


class _CrashError(BaseException):
    """The process is dead: nothing after it happens."""


@define
class _Faulty:
    """Counts calls of a file system, and fails at one of them: for good if that is a crash."""

    fails_at: int
    error: BaseException
    num_calls: int = 0
    failed_in: str = ""
    open_files: set[int] = field(factory=set)

    def system(self) -> FileSystem:
        return FileSystem(**{name: functools.partial(self._call, name) for name in CALLS})

    def _call(self, name: str, *args: Any) -> Any:
        self.num_calls += 1
        is_dead = isinstance(self.error, _CrashError) and self.num_calls > self.fails_at
        if self.num_calls == self.fails_at or is_dead:
            self.failed_in = self.failed_in or name
            if name == "write" and not is_dead:  # as a full disk does: half of it
                os.write(args[0], args[1][: len(args[1]) // 2])
            raise self.error
        found = getattr(REAL, name)(*args)
        if name == "open":
            self.open_files.add(found)
        elif name == "close":
            self.open_files.remove(args[0])
        return found


@pytest.mark.parametrize(
    ("is_crash", "tag"), [(True, None), (True, "same"), (False, "same")], ids=str
)
def test_a_fault_at_any_call_leaves_a_whole_checkpoint(tmp_path, is_crash: bool, tag) -> None:
    """Disks fill up, and machines stop, at every instruction."""
    model, optimizer = _make(Group.solo())
    for step in (1, 2):
        _save_step(tmp_path / "before", model, optimizer, step, tag=tag)
    seen = set()
    for at in range(1, 200):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        error = _CrashError() if is_crash else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        faulty = _Faulty(at, error)
        try:
            _save_step(folder, model, optimizer, 3, tag=tag, system=faulty.system(), keep=1)
        except (FileError, _CrashError) as raised:
            assert is_crash or "No space left" in str(raised)
            assert _check_newest(folder) in (2, 3), faulty.failed_in
            if not is_crash and _check_newest(folder) == 2:
                left = {path.name for path in folder.iterdir()}
                assert left == {"same", "latest"}, faulty.failed_in
        else:
            assert _check_newest(folder) == 3
        seen.add(faulty.failed_in)
        for file in faulty.open_files:  # as the kernel does for the dead
            os.close(file)
        if is_crash or at % 8 == 0:  # nothing stands in the way of the next, and nothing stays
            _save_step(folder, model, optimizer, 4, tag=tag, keep=1)
            assert _check_newest(folder) == 4
            hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
            stays = [path for path in hidden if any(path.iterdir())]  # young, it may be in the make
            assert not stays, (faulty.failed_in, stays)
        if faulty.num_calls < at:
            break
    assert seen >= {"", "mkdir", "open", "write", "fsync", "close", "rename", "unlink", "link"}


def _kill_loops(folder: Path) -> None:
    """Fork a save loop, kill it at a random instant, look; and again."""
    model, optimizer = _make(Group.solo())
    draw, last = random.Random(0), 0
    for _ in range(NUM_KILLS):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            for step in range(last + 1, 1_000_000):
                _save_step(folder, model, optimizer, step, tag="same" if step % 3 == 0 else None)
                os.write(writing, b"x")
        os.read(reading, 1)  # it has saved once
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        found = _check_newest(folder)
        assert found > last, (found, last)
        last = found
        hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
        assert len(hidden) <= 4, hidden  # the next save removes what this one has left
    print(f"{NUM_KILLS} killed, at step {last}", flush=True)


def _as_one_of_two(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, FileSystem]:
    """Fork, and save a first checkpoint; by its file system rank 1 dies when it writes another."""
    rank = int(os.fork() == 0)
    meeting = f"file://{folder}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model, optimizer = _make(Group.from_process_group(patience_s=0.2))
    _save_step(folder, model, optimizer, 1)

    def die(*args: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    return model, optimizer, FileSystem(write=die) if rank else REAL


def _kill_rank(folder: Path) -> None:
    """Two ranks, of which one dies while it writes; the other prints what it learns."""
    model, optimizer, system = _as_one_of_two(folder)
    try:
        _save_step(folder, model, optimizer, 2, system=system)
    except CommError as error:
        print(error, flush=True)
    os._exit(0)


def _kill_rank_behind(folder: Path, then: str) -> None:
    """As `_kill_rank`, while training goes on; the other prints what it learns, and how soon."""
    model, optimizer, system = _as_one_of_two(folder)
    began = time.monotonic()
    try:
        with (
            StopSignals(model),
            zero_engine.Saver(folder, model, optimizer, system=system) as saver,
        ):
            saver.save(step=2)
            began = time.monotonic()
            while then == "train":
                model(torch.ones(2, 9)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if then == "save":
                saver.save(step=3)
    except CommError as error:
        print(f"{time.monotonic() - began:.1f} s: {error}", flush=True)
    sys.exit()  # waits for threads, as the end of a program does


@pytest.mark.parametrize("then", ["train", "save", "leave"])
@pytest.mark.drawn(3)
def test_the_death_of_a_rank_that_saves_in_the_background_is_named_soon(
    tmp_path: Path, then: str
) -> None:
    """Rank 0 waited half an hour for the files of the other."""
    began = time.monotonic()

    done = subprocess.run(
        [sys.executable, __file__, then, tmp_path / "run"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert time.monotonic() - began < 60
    said = re.search(r"([\d.]+) s: (.*)", done.stdout)
    assert said is not None, done.stdout + done.stderr
    assert float(said[1]) < 20, done.stdout
    assert "rank 1" in said[2]
    assert re.search(r"given up: .*rank 1 has not written its files", done.stderr), done.stderr
    assert _check_newest(tmp_path / "run") == 1


def test_what_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A loop at any instant, and one of two ranks: SIGKILL runs no handler."""
    loop, of_two = tmp_path / "loop", tmp_path / "two"

    done = subprocess.run(
        [sys.executable, __file__, loop, of_two],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.startswith(f"{NUM_KILLS} killed"), done.stderr
    # The rank's death is seen before the receive has begun, or while that waits.
    assert re.search(r"rank 1.*did not (begin|finish)", done.stdout), done.stdout + done.stderr
    assert _check_newest(of_two) == 1
    _save_step(of_two, *_make(Group.solo()), 3)
    assert {path.name for path in of_two.iterdir()} == {"step-1", "step-3", "latest"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_stops_all(group: Group, tmp_path: Path, failing: int) -> None:
    """The others must not go on as if there were a checkpoint, nor wait for one."""
    model, optimizer = _make(group)
    _save_step(tmp_path, model, optimizer, 1)
    no_room = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    system = FileSystem(write=no_room) if group.rank == failing else REAL
    expected = "free some space" if group.rank == failing else f"rank {failing} failed"
    with pytest.raises(FileError, match=expected):
        _save_step(tmp_path, model, optimizer, 2, system=system)

    assert _check_newest(tmp_path) == 1
    if group.rank == 0:  # which clears up after the others know
        assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}
    _save_step(tmp_path, model, optimizer, 3)
    assert _check_newest(tmp_path) == 3


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_save_in_the_background_leaves_nothing_behind(
    group: Group, tmp_path: Path, failing: int | None
) -> None:
    """Whether a rank's disk is full or not: no descriptors, and no folder that is not complete."""
    model, optimizer = _make(group)
    _save_step(tmp_path, model, optimizer, 1)
    system = FileSystem()
    if group.rank == failing:
        system = FileSystem(
            write=Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        )

    saver = zero_engine.Saver(tmp_path, model, optimizer, system=system)
    saver.save(step=2)
    if failing is None:
        saver.wait()
    else:
        why = f"rank {failing} failed.*"
        expected = f"{'' if group.rank == failing else why}free some space"
        with pytest.raises(FileError, match=expected):
            saver.wait()

    assert not _open_in(tmp_path)
    if group.rank == 0:
        complete = {"step-1", "latest"} if failing is not None else {"step-1", "step-2", "latest"}
        assert {path.name for path in tmp_path.iterdir()} == complete


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to do."""
    model, optimizer = _make(Group.solo())
    for code in (errno.EROFS, errno.EACCES):
        for call in ("mkdir", "open", "listdir"):
            refuse = Mock(side_effect=OSError(code, os.strerror(code)))
            with pytest.raises(FileError, match="save to a folder that this process may write to"):
                _save_step(tmp_path / "a", model, optimizer, 1, system=FileSystem(**{call: refuse}))

    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="file: cannot be written"):
        _save_step(tmp_path / "file", model, optimizer, 1)


def test_files_have_the_permissions_of_this_process(tmp_path: Path) -> None:
    """Who works in a group reads what others of it have saved."""
    model, optimizer = _make(Group.solo())
    before = os.umask(0o024)
    try:
        _save_step(tmp_path, model, optimizer, 1)
    finally:
        os.umask(before)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    folders = {name for name, mode in modes.items() if (tmp_path / name).is_dir()}
    assert {modes.pop(name) for name in folders} == {0o753}
    assert {*modes.values()} == {0o642}, modes


def test_a_slow_rank_is_waited_for_while_the_program_runs(group: Group, tmp_path: Path) -> None:
    """Only as a program ends is a rank given up that writes nothing for a while."""
    model, optimizer = _make(group)

    def write_slowly(file: int, view: Any) -> int:
        time.sleep(0.2)
        return os.write(file, view)

    saver = zero_engine.Saver(
        tmp_path, model, optimizer, system=FileSystem(write=write_slowly) if group.rank else REAL
    )
    with patch.object(background, "_AT_EXIT_S", 0.0):
        saver.save(step=1)
        saver.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}


def test_the_last_rank_to_write_may_be_slow_afterwards(group: Group, tmp_path: Path) -> None:
    """Rank 0 publishes the folder as soon as the last file is there, under the other ranks."""

    def rename_slowly(source: Path, target: Path) -> None:
        source.rename(target)
        if group.rank and target.name.startswith(".written"):
            time.sleep(1.0)  # rank 0 renames the folder in this time

    model, optimizer = _make(group)
    system = FileSystem(rename=rename_slowly)
    with zero_engine.Saver(tmp_path, model, optimizer, system=system) as saver:
        saver.save(step=1)
    report = zero_engine.load(tmp_path, model, optimizer)
    assert report is not None and report.step == 1


@pytest.mark.parametrize("lost", ["manifest.json", "rank-*.safetensors"])
def test_what_is_left_of_a_checkpoint_is_replaced(tmp_path: Path, lost: str) -> None:
    """A folder that is neither empty nor ours is refused; a damaged checkpoint is ours."""
    model, optimizer = _make(Group.solo())
    _save_step(tmp_path, model, optimizer, 1)
    for path in [*(tmp_path / "step-1").glob(lost)]:
        path.unlink()

    _save_step(tmp_path, model, optimizer, 1)

    assert _check_newest(tmp_path) == 1


def test_what_a_dead_job_has_left_is_removed_and_holds_nothing(tmp_path: Path) -> None:
    """A descriptor a save, in a job that others restart beside, ends in EMFILE after a week."""
    model, optimizer = _make(Group.solo())
    _save_step(tmp_path, model, optimizer, 1)
    for step in (2, 3):
        (tmp_path / ".step-9.partial-0123abcd").mkdir()
        (tmp_path / ".step-9.partial-0123abcd" / "lock").touch()
        _save_step(tmp_path, model, optimizer, step)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        assert not _open_in(tmp_path)


def _open_in(folder: Path) -> list[Path]:
    """Files and folders of a folder that this process has open, those that are removed too."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of this listing, and of other threads
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def test_what_was_being_replaced_survives_a_failed_save(tmp_path: Path) -> None:
    """A kill between two renames leaves the only checkpoint under a name that begins with a dot."""
    model, optimizer = _make(Group.solo())
    _save_step(tmp_path, model, optimizer, 1, tag="same")
    (tmp_path / "same").rename(tmp_path / ".same.replaced-0123abcd")
    no_room = FileSystem(write=Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    for tag in ("same", "other"):
        with pytest.raises(FileError, match="free some space"):
            _save_step(tmp_path, model, optimizer, 2, tag=tag, system=no_room)

    assert _check_newest(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"same", "latest"}


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    """By when they were saved: a run that has gone back begins with smaller steps."""
    model, optimizer = _make(Group.solo())
    for step in (5, 9, 3, 4):
        _save_step(tmp_path, model, optimizer, step, keep=2)

        assert _check_newest(tmp_path) == step
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4", "latest"}
    assert (tmp_path / "latest").read_text() == "step-4"


@pytest.mark.parametrize(
    ("tag", "is_closed"), [(None, True), ("same", True), (None, False)], ids=str
)
def test_what_is_read_stays_until_it_was_read(
    tmp_path: Path, tag: str | None, is_closed: bool
) -> None:
    """Of 363 loads beside a job that keeps one checkpoint 4 failed: files went while it read."""
    model, optimizer = _make(Group.solo())
    _save_step(tmp_path, model, optimizer, 1, tag=tag, keep=1)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint is not None

    for step in (2, 3):
        _save_step(tmp_path, model, optimizer, step, tag=tag, keep=1)

    checkpoint.verify(checkpoint.manifest.files)
    assert checkpoint.source.params["0.weight"].read(0, 63).unique().tolist() == [1.0]
    assert _check_newest(tmp_path) == 3
    if is_closed:
        checkpoint.folder.close()
    else:  # as after an exception
        del checkpoint
        gc.collect()
    _save_step(tmp_path, model, optimizer, 4, tag=tag, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {tag or "step-4", "latest"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("tag", ["", "same"])
def test_a_load_beside_a_job_that_keeps_one_checkpoint_finds_a_whole_one(
    tmp_path: Path, tag: str
) -> None:
    """What it chose may be gone before it is opened: then there is a newer one."""
    done = subprocess.run(
        [sys.executable, __file__, "beside", tmp_path / "run", tag],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.startswith(f"{NUM_LOADS} loads"), done.stdout + done.stderr


def _load_beside(folder: Path, tag: str) -> None:
    """Load while a process saves as fast as it can."""
    model, optimizer = _make(Group.solo())
    _save_step(folder, model, optimizer, 1, tag=tag or None, keep=1)
    child = os.fork()
    if not child:
        for step in range(2, 1_000_000):
            _save_step(folder, model, optimizer, step, tag=tag or None, keep=1)
    try:
        steps = [_check_newest(folder) for _ in range(NUM_LOADS)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps == sorted(steps), steps
    print(f"{NUM_LOADS} loads, of steps {steps[0]} to {steps[-1]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "beside":
        _load_beside(Path(sys.argv[2]), sys.argv[3])
        sys.exit()
    if sys.argv[1] in {"train", "save", "leave"}:
        _kill_rank_behind(Path(sys.argv[2]), sys.argv[1])
    child = os.fork()  # a process that has run a backward has threads for each accelerator
    if not child:
        _kill_loops(Path(sys.argv[1]))
        sys.exit()
    os.waitpid(child, 0)
    _kill_rank(Path(sys.argv[2]))
