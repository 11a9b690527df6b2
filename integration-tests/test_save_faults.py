"""Whatever goes wrong in a save, the checkpoint before is whole, and all ranks know."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    """Counts calls of a file system, and fails at one of them: for good if that is a crash."""

    fails_at: int
    error: BaseException
    num_calls: int = 0
    failed_in: str = ""
    open_files: set[int] = field(factory=set)

    def system(self) -> FileSystem:
        return FileSystem(**{name: partial(self._call, name) for name in CALLS})

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
    model, optimizer = make(Group.solo())
    for step in (1, 2):
        save_step(tmp_path / "before", model, optimizer, step, tag=tag)
    seen = set()
    for at in range(1, 200):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        error = _CrashError() if is_crash else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        faulty = _Faulty(at, error)
        try:
            save_step(folder, model, optimizer, 3, tag=tag, system=faulty.system(), keep=1)
        except (FileError, _CrashError) as raised:
            assert is_crash or "No space left" in str(raised)
            assert check_newest(folder) in (2, 3), faulty.failed_in
            if not is_crash and check_newest(folder) == 2:
                left = {path.name for path in folder.iterdir()}
                assert left == {"same", "latest"}, faulty.failed_in
        else:
            assert check_newest(folder) == 3
        seen.add(faulty.failed_in)
        for file in faulty.open_files:  # as the kernel does for the dead
            os.close(file)
        if is_crash or at % 8 == 0:  # nothing stands in the way of the next, and nothing stays
            save_step(folder, model, optimizer, 4, tag=tag, keep=1)
            assert check_newest(folder) == 4
            hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
            stays = [path for path in hidden if any(path.iterdir())]  # young, it may be in the make
            assert not stays, (faulty.failed_in, stays)
        if faulty.num_calls < at:
            break
    assert seen >= {"", "mkdir", "open", "write", "fsync", "close", "rename", "unlink", "link"}


def test_what_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A loop at any instant, and one of two ranks: SIGKILL runs no handler."""
    loop, of_two = tmp_path / "loop", tmp_path / "two"

    done = subprocess.run(
        [sys.executable, save_loops.__file__, loop, of_two],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.startswith(f"{save_loops.NUM_KILLS} killed"), done.stderr
    # The rank's death is seen before the receive has begun, or while that waits.
    assert re.search(r"rank 1.*did not (begin|finish)", done.stdout), done.stdout + done.stderr
    assert check_newest(of_two) == 1
    save_step(of_two, *make(Group.solo()), 3)
    assert {path.name for path in of_two.iterdir()} == {"step-1", "step-3", "latest"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_stops_all(group: Group, tmp_path: Path, failing: int) -> None:
    """The others must not go on as if there were a checkpoint, nor wait for one."""
    model, optimizer = make(group)
    save_step(tmp_path, model, optimizer, 1)
    no_room = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    system = FileSystem(write=no_room) if group.rank == failing else REAL
    expected = "free some space" if group.rank == failing else f"rank {failing} failed"
    with pytest.raises(FileError, match=expected):
        save_step(tmp_path, model, optimizer, 2, system=system)

    assert check_newest(tmp_path) == 1
    if group.rank == 0:  # which clears up after the others know
        assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}
    save_step(tmp_path, model, optimizer, 3)
    assert check_newest(tmp_path) == 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to do."""
    model, optimizer = make(Group.solo())
    for code in (errno.EROFS, errno.EACCES):
        for call in ("mkdir", "open", "listdir"):
            refuse = Mock(side_effect=OSError(code, os.strerror(code)))
            with pytest.raises(FileError, match="save to a folder that this process may write to"):
                save_step(tmp_path / "a", model, optimizer, 1, system=FileSystem(**{call: refuse}))

    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="file: cannot be written"):
        save_step(tmp_path / "file", model, optimizer, 1)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    """By when they were saved: a run that has gone back begins with smaller steps."""
    model, optimizer = make(Group.solo())
    for step in (5, 9, 3, 4):
        save_step(tmp_path, model, optimizer, step, keep=2)

        assert check_newest(tmp_path) == step
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4", "latest"}
    assert (tmp_path / "latest").read_text() == "step-4"
