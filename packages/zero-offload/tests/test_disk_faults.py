"""A disk that fails ends in correct data or in an error with the key, the path and the bytes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from attrs import evolve
from zero_offload import DiskSettings, DiskStore, HostArena, StoreError
from zero_offload.testing import SYSTEM, System, checksums_in_pieces, faults, native

THREADS = DiskSettings(uses_uring=False)


@pytest.mark.parametrize(
    ("call", "number", "remedy"),
    [
        ("pwritev", errno.EIO, "device fails"),
        ("pwritev", errno.ENOSPC, "free some of the disk"),
        ("open", errno.EACCES, "permissions"),
        ("open", errno.EROFS, "read-only"),
        ("open", errno.EMFILE, "ulimit -n"),
        ("fallocate", errno.EDQUOT, "quota"),
    ],
)
def test_a_refused_write_is_told_with_key_path_and_bytes(
    tmp_path: Path, call: str, number: int, remedy: str
) -> None:
    """The message comes out of a worker thread, an hour into a job: it must stand by itself."""
    # The store's own start makes a lock file, probes O_DIRECT and locks: those are granted.
    system = faults.refusing(call, number, after={"open": 2, "pwritev": 1, "fallocate": 0}[call])
    with DiskStore(tmp_path, THREADS, system=system) as store:
        with pytest.raises(StoreError, match=remedy) as caught:
            store.write("moments", torch.zeros(1000)).result()

        error = caught.value
        assert (error.key, error.nbytes, error.errno) == ("moments", 4000, number)
        assert error.path.startswith(str(store.folder))
        assert "'moments' (4000 bytes)" in str(error)
        with pytest.raises(StoreError, match=r"'moments'.*(never written|last write failed)"):
            store.read("moments", torch.zeros(1000)).result()


def test_a_value_half_replaced_is_not_given_back_and_can_be_written_again(tmp_path: Path) -> None:
    """Neither the old nor the new, it would train on as both; what is in the file is ours."""
    failing = iter([False, False, False, True])  # the probe's, the first write, half of the second

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(failing, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(fd, buffers, offset)

    settings = DiskSettings(block_bytes=4096, queue_depth=1, num_workers=1, uses_uring=False)
    with DiskStore(tmp_path, settings, system=evolve(SYSTEM, pwritev=pwritev)) as store:
        value = torch.ones(2048)
        store.write("x", torch.zeros(2048)).result()
        with pytest.raises(StoreError, match="cannot write"):
            store.write("x", value).result()
        with pytest.raises(StoreError, match="'x' cannot be read: its last write failed"):
            store.read("x", torch.zeros(2048)).result()
        store.write("x", value).result()

        assert torch.equal(store.read("x", torch.zeros(2048)).result(), value)


@pytest.mark.parametrize("uses_uring", [True, False])
def test_what_fills_the_last_unit_is_zero(tmp_path: Path, uses_uring: bool) -> None:
    """The blocks that odd ends go through hold bytes of other values."""
    with DiskStore(tmp_path, DiskSettings(uses_uring=uses_uring, num_workers=1)) as store:
        if store.status.direct_bytes == 1:
            pytest.skip(store.status.direct_reason)
        for nbytes in (4000, 100):
            store.write(str(nbytes), torch.full((nbytes,), 7, dtype=torch.uint8)).result()

        found = [path.read_bytes() for path in sorted(store.folder.iterdir())]

    assert found == [b"\7" * 4000 + bytes(96), b"\7" * 100 + bytes(3996)]


def test_the_unit_of_a_file_system_is_found(tmp_path: Path) -> None:
    """Devices with large blocks refuse 4096 bytes; the page cache would halve their speed."""
    for system, unit in (
        (faults.only_units_of(16384), 16384),
        (faults.only_units_of(4096), 4096),
        (faults.no_direct_open(), 1),
    ):
        with DiskStore(tmp_path, system=system) as store:
            assert store.status.direct_bytes == unit
            assert bool(store.status.direct_reason) == (unit == 1)


def test_a_refused_read_is_told(tmp_path: Path) -> None:
    """A bad sector, say."""
    system = faults.refusing("preadv", errno.EIO, after=1)
    with DiskStore(tmp_path, THREADS, system=system) as store:
        store.write("x", torch.zeros(1000)).result()

        with pytest.raises(StoreError, match=r"cannot read 'x'.*device fails"):
            store.read("x", torch.zeros(1000)).result()


def test_a_disk_that_cannot_do_is_told_at_the_start(tmp_path: Path) -> None:
    """Else it fails in the night, when the last sub-group is swapped for the first time."""
    for number in (errno.EROFS, errno.EACCES):
        with pytest.raises(StoreError, match="cannot make a folder"):
            DiskStore(tmp_path, system=faults.refusing("open", number))
    assert list(tmp_path.iterdir()) == []
    with DiskStore(tmp_path, system=faults.free_bytes(10 * 4096)) as store:
        with pytest.raises(StoreError, match=r"2 values need 45056 bytes.* 40960 bytes are") as no:
            store.allocate({"a": 1, "b": 40_000})
        assert (no.value.errno, no.value.nbytes) == (errno.ENOSPC, 45056)
        assert list(store.folder.iterdir()) == []
        store.allocate({"a": 1, "b": 36_000})
    system = faults.refusing("fallocate", errno.ENOSPC, after=2)
    with DiskStore(tmp_path, system=system) as store:
        with pytest.raises(StoreError, match=r"3 values need 24576 bytes.*'c'"):
            store.allocate({"a": 4096, "b": 8192, "c": 12000})
        assert store.sizes() == {}
        assert list(store.folder.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path) -> None:
    """By default the system answers it with a signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DiskStore(tmp_path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            with pytest.raises(StoreError, match="ulimit -f"):
                store.write("x", torch.zeros(2**20)).result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        store.write("x", torch.zeros(2**20)).result()


def test_a_write_under_way_is_waited_for_before_room_is_taken(tmp_path: Path) -> None:
    """Who hears of its error at once, and asks for less room, would hear that there is some."""
    begun, may_fail = threading.Event(), threading.Event()

    def fallocate(fd: int, start: int, numel: int) -> None:
        if not begun.is_set():
            begun.set()
            assert may_fail.wait(20)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, start, numel)

    with DiskStore(tmp_path, system=evolve(SYSTEM, fallocate=fallocate)) as store:
        writing = store.write("a", torch.zeros(100))
        assert begun.wait(20)
        threading.Timer(0.05, may_fail.set).start()
        store.allocate({"a": 40})

        assert store.sizes() == {"a": 40}
        with pytest.raises(StoreError, match="free some of the disk"):
            writing.result()


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def _scribble(path: Path) -> None:
    path.write_bytes(b"?" + path.read_bytes()[1:])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # clocks may tick slower than this test


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("other")))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda path: os.truncate(path, 4096), "it had 40960 bytes and now has 4096"),
        (_replace, "another file has been put in its place"),
        (_scribble, "something else has written to it"),
        (Path.unlink, "it has been removed"),
        (_link, "Too many levels of symbolic links"),
    ],
)
def test_a_file_changed_behind_our_back_is_named(
    tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    """A cleaning script in /tmp must end the job, not its accuracy."""
    with DiskStore(tmp_path) as store:
        store.write("x", torch.zeros(10_000)).result()
        (path,) = store.folder.iterdir()
        change(path)

        for operation in (store.read, store.write):
            with pytest.raises(StoreError, match=text) as caught:
                operation("x", torch.zeros(10_000)).result()

        assert caught.value.path == str(path)
        assert caught.value.key == "x"


@pytest.mark.parametrize("how", ["as compiled", "threads", "plain Python"])
@pytest.mark.parametrize("piece_bytes", [2**30, 100], ids=["at once", "in pieces"])
def test_a_checksum_sees_what_no_date_tells(tmp_path: Path, how: str, piece_bytes: int) -> None:
    """A device that returns other bytes changes no date. Every byte counts, wherever it lies."""
    settings = DiskSettings(has_checksums=True, uses_uring=how != "threads")
    with ExitStack() as stack:
        stack.enter_context(checksums_in_pieces(piece_bytes))
        if how == "plain Python":
            stack.enter_context(native())
        store = stack.enter_context(DiskStore(tmp_path, settings))
        for nbytes in (1, 7, 8, 9, 1003, 40_000):
            value = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)[1:]
            into = torch.zeros_like(value)
            for position in (0, nbytes // 2, nbytes - 1):
                store.write("x", value).result()
                assert torch.equal(store.read("x", into).result(), value)
                (path,) = store.folder.iterdir()
                date = path.stat().st_mtime_ns
                with path.open("r+b") as file:
                    file.seek(position)
                    file.write(bytes([255 - value[position]]))
                os.utime(path, ns=(date, date))

                with pytest.raises(StoreError, match=f"its {store.status.checksum} is not that"):
                    store.read("x", into).result()
            store.delete("x")
        assert store.status.checksum == "crc32" or how != "plain Python"


@pytest.mark.parametrize("uses_uring", [True, False])
def test_a_file_that_ends_early_is_told_by_the_count(tmp_path: Path, uses_uring: bool) -> None:
    """A file truncated at the last moment must not look like one that was read."""
    before: list[os.stat_result] = []
    system = evolve(SYSTEM, fstat=lambda fd: before[0] if before else os.fstat(fd))
    settings = DiskSettings(block_bytes=8192, queue_depth=3, uses_uring=uses_uring)
    with DiskStore(tmp_path, settings, system=system) as store:
        if uses_uring and store.status.transport != "io_uring":
            pytest.skip(store.status.uring_reason)
        into = HostArena("x").allocate(50_001)
        store.write("x", torch.ones(50_000, dtype=torch.uint8)).result()
        (path,) = store.folder.iterdir()
        before.append(path.stat())
        for nbytes in (40_960, 4096, 0):
            os.truncate(path, nbytes)
            for start in (0, 1):
                with pytest.raises(StoreError, match=f"it ends after {nbytes} of 50000 bytes"):
                    store.read("x", into[start : 50_000 + start]).result()


def test_no_file_stays_open(tmp_path: Path) -> None:
    """A leak of one file a step ends a job after a thousand of them."""

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def use(system: System) -> None:
        with DiskStore(tmp_path, DiskSettings(num_workers=1), system=system) as store:
            for _ in range(3):
                future = store.write("x", torch.zeros(1000))
                assert future.exception() is None or isinstance(future.exception(), StoreError)
                store.read("x", torch.zeros(1000)).exception()

    granted = System()
    use(granted)
    before = num_open()
    for system in (granted, faults.refusing("fstat", errno.EIO, after=2), faults.no_direct_open()):
        use(system)

        assert num_open() == before
