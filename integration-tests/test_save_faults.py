"""Whatever goes wrong in a save, the checkpoint before is whole, and all ranks know."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import save_loops
from attrs import define, field
from save_loops import REAL, check_newest, make, save_step
from zero_comm import Group
from zero_engine import FileError
from zero_engine.testing import FileSystem

CALLS = tuple(field.name for field in attrs.fields(FileSystem))


class _CrashError(BaseException):
    """The process is dead: nothing after it happens."""


@define
class _Faulty:
    """Counts calls of a file system, and fails at one of them."""

    fails_at: int
    error: BaseException
    is_dead_then: bool
    num_calls: int = 0
    failed_in: str = ""
    open_files: set[int] = field(factory=set)

    def system(self) -> FileSystem:
        return FileSystem(**{name: self._wrap(name) for name in CALLS})

    def _wrap(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.num_calls += 1
            is_dead = self.is_dead_then and self.num_calls > self.fails_at
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

        return call

    def bury(self) -> None:
        """What the kernel does for the dead."""
        while self.open_files:
            os.close(self.open_files.pop())


@pytest.mark.parametrize(
    ("is_crash", "tag"), [(True, None), (True, "same"), (False, "same")], ids=str
)
def test_a_fault_at_any_call_leaves_a_whole_checkpoint(tmp_path, is_crash: bool, tag) -> None:
    """Disks fill up, and machines stop, at every instruction."""
    model, optimizer = make(Group.solo())
    for step in (1, 2):
        save_step(tmp_path / "before", model, optimizer, step, tag=tag)
    seen = set()
    for at in range(1, 200):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        error = _CrashError() if is_crash else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        faulty = _Faulty(at, error, is_crash)
        try:
            save_step(folder, model, optimizer, 3, tag=tag, system=faulty.system(), keep=1)
        except (FileError, _CrashError) as raised:
            assert is_crash or "No space left" in str(raised)
            assert check_newest(folder) in (2, 3), faulty.failed_in
            if not is_crash and check_newest(folder) == 2:
                assert not [p for p in folder.iterdir() if "partial" in p.name], faulty.failed_in
        else:
            assert check_newest(folder) == 3
        seen.add(faulty.failed_in)
        faulty.bury()
        if is_crash or at % 8 == 0:  # nothing stands in the way of the next, and nothing stays
            save_step(folder, model, optimizer, 4, tag=tag, keep=1)
            assert check_newest(folder) == 4
            hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
            stays = [path for path in hidden if any(path.iterdir())]  # young, it may be in the make
            assert not stays, (faulty.failed_in, stays)
        if faulty.num_calls < at:
            break
    assert seen >= {"", "mkdir", "open", "write", "fsync", "close", "rename", "unlink", "link"}


def test_a_killed_save_loop_leaves_a_whole_checkpoint_each_time(tmp_path: Path) -> None:
    """The kernel's word: SIGKILL runs no handler, and lets nothing end well."""
    script = Path(save_loops.__file__)

    done = subprocess.run(
        [sys.executable, script, tmp_path, "10"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.startswith("10 of 10"), done.stderr


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_stops_all(group: Group, tmp_path: Path, failing: int) -> None:
    """The others must not go on as if there were a checkpoint, nor wait for one."""
    model, optimizer = make(group)
    save_step(tmp_path, model, optimizer, 1)

    def no_room(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    system = FileSystem(write=no_room) if group.rank == failing else REAL
    expected = "free some space" if group.rank == failing else f"rank {failing} failed"
    with pytest.raises(FileError, match=expected):
        save_step(tmp_path, model, optimizer, 2, system=system)

    assert check_newest(tmp_path) == 1
    if group.rank == 0:  # which clears up after the others know
        assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}
    save_step(tmp_path, model, optimizer, 3)
    assert check_newest(tmp_path) == 3


def test_a_rank_that_dies_in_the_middle_is_named_to_the_others(tmp_path: Path) -> None:
    """A host is lost, and what it was writing with it."""
    script, folder = Path(save_loops.__file__), tmp_path / "saved"

    done = subprocess.run(
        [sys.executable, script, folder, "die"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    # Its death is seen before the receive has begun, or while that waits.
    assert re.search(r"rank 1.*did not (begin|finish)", done.stdout), done.stdout + done.stderr
    assert check_newest(folder) == 1
    save_step(folder, *make(Group.solo()), 3)
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-3", "latest"}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "listdir"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, call: str, code: int) -> None:
    """With what to do."""
    model, optimizer = make(Group.solo())

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    system = FileSystem(**{call: refuse})
    with pytest.raises(FileError, match="save to a folder that this process may write to"):
        save_step(tmp_path / "there", model, optimizer, 1, system=system)


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    """A typing error in a path."""
    (tmp_path / "there").touch()
    model, optimizer = make(Group.solo())

    with pytest.raises(FileError, match="there: cannot be written"):
        save_step(tmp_path / "there", model, optimizer, 1)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    """Somebody's folder of plots may have the name of a tag."""
    model, optimizer = make(Group.solo())
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").touch()

    with pytest.raises(FileError, match="choose another tag"):
        save_step(tmp_path, model, optimizer, 1, tag="plots")

    assert (tmp_path / "plots" / "loss.png").exists()


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    """By when they were saved: a run that has gone back begins with smaller steps."""
    model, optimizer = make(Group.solo())
    for step in (5, 9, 3, 4):
        save_step(tmp_path, model, optimizer, step, keep=2)

        assert check_newest(tmp_path) == step
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4", "latest"}
    assert (tmp_path / "latest").read_text() == "step-4"
