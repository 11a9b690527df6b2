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
    assert torch.equal(found, zero_engine.full_param(model.values))
    assert zero_engine.load(folder, model, tag=str(size)) is not None


def test_a_file_of_any_size_holds_what_was_saved(tmp_path: Path) -> None:
    """Sizes around pages and blocks: what fills neither must not be lost, or padded."""
    for size in SIZES:
        _assert_saved(tmp_path, _disk(), size)


@pytest.mark.parametrize("makes_it", [False, True], ids=["refused", "made and refused"])
def test_a_file_system_without_direct_writes_takes_the_usual_ones(tmp_path, makes_it: bool) -> None:
    """Some refuse the flag before they make the file, and some after."""
    seen = []

    def open_usually(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            if makes_it:
                path.touch()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        seen.append(path.name)
        return os.open(path, flags, mode)

    for size in SIZES:
        _assert_saved(tmp_path, _disk(open=open_usually), size)
    assert seen.count(NAME) == len(SIZES)


def test_a_disk_that_refuses_a_direct_write_gets_a_usual_one(tmp_path: Path) -> None:
    """One whose blocks are larger than a page says so no sooner than at the write."""

    def write_large_blocks(file: int, view: memoryview) -> int:
        if _is_direct(file) and len(view) % (16 * PAGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.write(file, view)

    for size in (*SIZES, BLOCK + PAGE):
        _assert_saved(tmp_path, _disk(write_large_blocks), size)


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
        _assert_saved(tmp_path, _disk(write_some), size)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_an_error_in_the_background_is_raised(tmp_path: Path, num_blocks: int) -> None:
    """And nothing is left open: a block is written while the next one fills, unheard by others."""
    model, opened, synced = _bytes(num_blocks * BLOCK), [], []

    def write_to_a_full_disk(file: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_it(path: Path, flags: int, mode: int) -> int:
        opened.append(os.open(path, flags, mode))
        return opened[-1]

    def close(file: int) -> None:
        opened.remove(file)
        os.close(file)

    system = _disk(write_to_a_full_disk, open=open_it, close=close, fsync=synced.append)
    with pytest.raises(FileError, match="No space left"):
        save(tmp_path, model, step=1, system=system)

    assert not opened
    assert not synced


def test_a_block_is_not_filled_anew_while_it_is_written(tmp_path: Path) -> None:
    """A slow disk would get the bytes of a block that comes later."""

    def write_slowly(file: int, view: memoryview) -> int:
        time.sleep(0.02)
        return os.write(file, view)

    _assert_saved(tmp_path, _disk(write_slowly), 10 * BLOCK)


def test_a_file_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    """A checkpoint that a power cut takes away is none: all of it is synced, once, at the end."""
    calls: dict[str, list[str]] = {}
    names: dict[int, str] = {}

    def note(what: str, file: int) -> None:
        calls.setdefault(names[file], []).append(what)

    def open_it(path: Path, flags: int, mode: int) -> int:
        file = os.open(path, flags, mode)
        names[file] = path.name
        return file

    def write(file: int, view: memoryview) -> int:
        note("write", file)
        return os.write(file, view)

    def close(file: int) -> None:
        note("close", file)
        os.close(file)

    system = _disk(write, open=open_it, close=close, fsync=lambda file: note("fsync", file))
    save(tmp_path, _of_file_size(2 * BLOCK + 1), step=1, system=system)

    assert calls[NAME] == ["write", "write", "write", "fsync", "close"]
    assert calls["manifest.json"][-2:] == ["fsync", "close"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EIO])
def test_any_other_error_of_opening_is_raised(tmp_path: Path, code: int) -> None:
    """Only a refused flag is a reason to go on without it."""

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return os.open(path, flags, mode)

    model = _of_file_size(PAGE)
    with pytest.raises(FileError, match=os.strerror(code)):
        save(tmp_path, model, step=1, system=_disk(open=refuse))
    with (
        pytest.raises(FileError, match=os.strerror(code)),
        Saver(tmp_path, model, system=_disk(open=refuse)) as saver,
    ):
        saver.save(step=1)
