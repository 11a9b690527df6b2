"""A file holds what was saved, however its disk takes writes, or there is an error."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zero_engine
from safetensors.torch import load_file
from torch import nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import FileError, Saver
from zero_engine.testing import FileSystem, save

PAGE = 4096
BLOCK = 4 * 2**20  # what is written at a time
SIZES = (PAGE - 1, PAGE, BLOCK - 1, BLOCK, BLOCK + 1, 9 * 2**20 + 5)
NAME = "frozen-00000-00.safetensors"


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

    return FileSystem(write=write_strictly, **calls)


def _bytes(numel: int) -> nn.Module:
    """A model of so many bytes, which do not train, and so are in a file of their own."""
    torch.manual_seed(numel)
    model = nn.Module()
    values = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    model.values = nn.Parameter(values, requires_grad=False)
    return zero_engine.shard(model, None, zero_engine.ZeroConfig(3), group=Group.solo())[0]


@functools.cache
def _of_file_size(num_bytes: int) -> nn.Module:
    numel = num_bytes - 128
    with TemporaryDirectory() as folder:
        path = zero_engine.save(folder, _bytes(numel), step=1).path / NAME
        return _bytes(numel + num_bytes - path.stat().st_size)


def _assert_saved(folder: Path, system: FileSystem, size: int) -> None:
    """Bytes are on disk, and are as their checksum says; load() sees to that."""
    model = _of_file_size(size)
    path = save(folder, model, step=1, tag=str(size), system=system).path

    assert (path / NAME).stat().st_size == size
    (found,) = (v for name, v in load_file(path / NAME).items() if "padding" not in name)
    assert equal(found, zero_engine.full_param(model.values))
    assert zero_engine.load(folder, model, tag=str(size)) is not None


def _write_large_blocks(file: int, view: memoryview) -> int:
    """A disk whose blocks are larger than a page says so no sooner than at the write."""
    if _is_direct(file) and len(view) % (16 * PAGE):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.write(file, view)


def _write_some(most: int, file: int, view: memoryview) -> int:
    """A write may take less than it is given; after an odd number of bytes none can be direct."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # so that it takes an odd number
    written = os.write(file, view[:most])
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return written


def _write_slowly(file: int, view: memoryview) -> int:
    """A block that is filled anew while it is written has the bytes of a later one."""
    time.sleep(0.02)
    return os.write(file, view)


WRITES: dict[str, Callable[[int, Any], int]] = {
    "usual": os.write,
    "large blocks": _write_large_blocks,
    "an odd number": functools.partial(_write_some, 2 * PAGE + 1),
    "some pages": functools.partial(_write_some, 16 * PAGE),
    "slow": _write_slowly,
}


@pytest.mark.parametrize("how", WRITES)
def test_a_file_of_any_size_holds_what_was_saved(tmp_path: Path, how: str) -> None:
    """Sizes around pages and blocks: what fills neither must not be lost, or padded."""
    for size in (10 * BLOCK,) if how == "slow" else (*SIZES, BLOCK + PAGE):
        _assert_saved(tmp_path, _disk(WRITES[how]), size)


def _refusing(code: int, *, makes_it: bool = False) -> FileSystem:
    """A file system without direct writes: some refuse before they make the file, some after."""

    def open_usually(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            if makes_it:
                path.touch()
            raise OSError(code, os.strerror(code))
        return os.open(path, flags, mode)

    return _disk(open=open_usually)


def test_only_a_refused_flag_is_a_reason_to_write_in_the_usual_way(tmp_path: Path) -> None:
    """Any other error of opening is raised, also on the thread of a Saver."""
    for makes_it in (False, True):
        for size in SIZES:
            system = _refusing(errno.EINVAL, makes_it=makes_it)
            _assert_saved(tmp_path / str(makes_it), system, size)
    model = _of_file_size(PAGE)
    for code in (errno.EACCES, errno.EIO):
        with pytest.raises(FileError, match=os.strerror(code)):
            save(tmp_path, model, step=1, system=_refusing(code))
        with (
            pytest.raises(FileError, match=os.strerror(code)),
            Saver(tmp_path, model, system=_refusing(code)) as saver,
        ):
            saver.save(step=1)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_file_is_on_disk_before_it_is_closed_and_closed_on_errors(
    tmp_path: Path, num_blocks: int
) -> None:
    """A checkpoint that a power cut takes away is none: all of it is synced, once, at the end.

    An error in the background, where a block is written while the next one fills, is raised.
    """
    model = _of_file_size(num_blocks * BLOCK)
    calls: dict[str, list[str]] = {}
    names: dict[int, str] = {}
    is_full = False

    def open_it(path: Path, flags: int, mode: int) -> int:
        file = os.open(path, flags, mode)
        names[file] = path.name
        return file

    def write(file: int, view: memoryview) -> int:
        calls.setdefault(names[file], []).append("write")
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, view)

    def close(file: int) -> None:
        calls.setdefault(names.pop(file), []).append("close")
        os.close(file)

    def sync(file: int) -> None:
        calls.setdefault(names[file], []).append("fsync")

    system = _disk(write, open=open_it, close=close, fsync=sync)
    save(tmp_path, model, step=1, system=system)
    assert calls[NAME] == ["write"] * num_blocks + ["fsync", "close"]
    assert calls["manifest.json"][-2:] == ["fsync", "close"]

    calls.clear()
    is_full = True
    with pytest.raises(FileError, match="No space left"):
        save(tmp_path, model, step=2, system=system)
    assert not names
    assert not any("fsync" in of_file for of_file in calls.values())


def test_what_another_job_may_still_write_is_left_alone(tmp_path: Path) -> None:
    """It makes its folder first, and then the lock by which one knows that it lives."""
    for name, age_s in (("young", 10), ("old", 3600)):
        folder = tmp_path / f".{name}.partial-0"
        folder.mkdir()
        os.utime(folder, (time.time() - age_s,) * 2)
    zero_engine.save(tmp_path, _bytes(8), step=1)
    assert sorted(path.name for path in tmp_path.glob(".*.partial-0")) == [".young.partial-0"]
