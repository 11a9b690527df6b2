"""A new file holds what was put into it, however its disk takes writes, or there is an error."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import attrs
import pytest
import torch
from zero_engine._file_system import FILE_SYSTEM, FileSystem
from zero_engine._new_file import NewFile

PAGE = 4096
BLOCK = 4 * 2**20  # what is written at a time
SIZES = (0, 1, PAGE - 1, PAGE, BLOCK - 1, BLOCK, BLOCK + 1, 9 * 2**20 + 5)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _disk(write: Callable[[int, Any], int] = os.write, **calls: Any) -> FileSystem:
    """This machine's, but as strict as any disk about what is written past the page cache."""

    def write_strictly(file: int, view: memoryview) -> int:
        if _is_direct(file):
            address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
            position = os.lseek(file, 0, os.SEEK_CUR)
            assert not any(n % PAGE for n in (address, position, len(view))), "is not aligned"
        return write(file, view)

    return attrs.evolve(FILE_SYSTEM, write=write_strictly, **calls)


def _assert_written(folder: Path, system: FileSystem, size: int, *, step: int = 10**6 + 3) -> None:
    """Put bytes step by step; they, their number and their checksum are on disk then."""
    content = random.Random(size).randbytes(size)
    lent = bytearray(step)
    with NewFile(folder / str(size), system) as file:
        for start in range(0, size, step):
            part = content[start : start + step]
            lent[: len(part)] = part
            file.put(memoryview(lent)[: len(part)])  # the next part takes its place

    assert (folder / str(size)).read_bytes() == content
    assert (file.num_bytes, file.crc32) == (size, zlib.crc32(content))


@pytest.mark.parametrize("step", [10**6 + 3, BLOCK, 10 * 2**20], ids=["odd", "block", "all"])
def test_a_file_of_any_size_holds_what_was_put(tmp_path: Path, step: int) -> None:
    """Sizes around pages and blocks: what fills neither must not be lost, or padded."""
    for size in SIZES:
        _assert_written(tmp_path, _disk(), size, step=step)


@pytest.mark.parametrize("makes_it", [False, True], ids=["refused", "made and refused"])
def test_a_file_system_without_direct_writes_takes_the_usual_ones(tmp_path, makes_it: bool) -> None:
    """Some refuse the flag before they make the file, and some after."""
    seen = []

    def open_usually(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            if makes_it:
                path.touch()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        seen.append(flags)
        return os.open(path, flags, mode)

    for size in SIZES:
        _assert_written(tmp_path, _disk(open=open_usually), size)
    assert len(seen) == len(SIZES)


def test_a_disk_that_refuses_a_direct_write_gets_a_usual_one(tmp_path: Path) -> None:
    """One whose blocks are larger than a page says so no sooner than at the write."""

    def write_large_blocks(file: int, view: memoryview) -> int:
        if _is_direct(file) and len(view) % (16 * PAGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.write(file, view)

    for size in (*SIZES, BLOCK + PAGE):
        _assert_written(tmp_path, _disk(write_large_blocks), size)


@pytest.mark.parametrize("most", [2 * PAGE + 1, 16 * PAGE, 10**6], ids=str)
def test_what_a_write_leaves_is_written_next(tmp_path: Path, most: int) -> None:
    """A write may take less than it is given; after an odd number of bytes none can be direct."""

    def write_some(file: int, view: memoryview) -> int:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # so that it takes an odd number
        written = os.write(file, view[:most])
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return written

    for size in SIZES:
        _assert_written(tmp_path, _disk(write_some), size)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_an_error_in_the_background_is_raised(tmp_path: Path, num_blocks: int) -> None:
    """By whichever call comes next, the end of the context at the latest; and nothing is left open.

    A block is written while the caller goes on: nobody else would hear of it.
    """
    closed, synced = [], []

    def write_to_a_full_disk(file: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(file: int) -> None:
        closed.append(file)
        os.close(file)

    system = _disk(write_to_a_full_disk, close=close, fsync=synced.append)
    with (
        pytest.raises(OSError, match="No space left"),
        NewFile(tmp_path / "full", system) as file,
    ):
        file.put(memoryview(bytes(num_blocks * BLOCK)))

    assert len(closed) == 1
    assert not synced


def test_the_callers_own_error_is_the_one_that_is_raised(tmp_path: Path) -> None:
    """What it was about to write did not come: there is no file to complete."""
    synced = []
    with (
        pytest.raises(ZeroDivisionError),
        NewFile(tmp_path / "half", _disk(fsync=synced.append)) as file,
    ):
        file.put(memoryview(bytes(BLOCK + 1)))
        raise ZeroDivisionError

    assert not synced


def test_the_caller_goes_on_while_blocks_are_written(tmp_path: Path) -> None:
    """That is what the others are for: gathering values and writing them take turns else."""
    may_write, content = Event(), random.Random(0).randbytes(4 * BLOCK - 1)

    def write_late(file: int, view: memoryview) -> int:
        assert may_write.wait(20)
        return os.write(file, view)

    with NewFile(tmp_path / "late", _disk(write_late)) as file:
        file.put(memoryview(content))
        may_write.set()

    assert (tmp_path / "late").read_bytes() == content


def test_a_block_is_not_filled_anew_while_it_is_written(tmp_path: Path) -> None:
    """A slow disk would get the bytes of a block that comes later."""

    def write_slowly(file: int, view: memoryview) -> int:
        time.sleep(0.02)
        return os.write(file, view)

    _assert_written(tmp_path, _disk(write_slowly), 10 * BLOCK)


def test_a_file_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    """A checkpoint that a power cut takes away is none: all of it is synced, once, at the end."""
    calls = []

    def write(file: int, view: memoryview) -> int:
        calls.append("write")
        return os.write(file, view)

    def close(file: int) -> None:
        calls.append("close")
        os.close(file)

    system = _disk(write, close=close, fsync=lambda file: calls.append("fsync"))
    _assert_written(tmp_path, system, 2 * BLOCK + 1)

    assert calls == ["write", "write", "write", "fsync", "close"]


def test_a_file_that_is_there_is_not_written_to(tmp_path: Path) -> None:
    """It may be another rank's, or of the checkpoint before."""
    (tmp_path / "there").write_bytes(b"theirs")

    with pytest.raises(FileExistsError), NewFile(tmp_path / "there", FILE_SYSTEM):
        pass

    assert (tmp_path / "there").read_bytes() == b"theirs"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EIO])
def test_any_other_error_of_opening_is_raised(tmp_path: Path, code: int) -> None:
    """Only a refused flag is a reason to go on without it."""

    def refuse(path: Path, flags: int, mode: int) -> int:
        raise OSError(code, os.strerror(code))

    with (
        pytest.raises(OSError, match=os.strerror(code)),
        NewFile(tmp_path / "new", _disk(open=refuse)),
    ):
        pass
