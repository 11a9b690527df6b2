"""io_uring as the kernel may behave: short, interrupted, busy, failing, or forbidden."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from zero_offload import DiskSettings, DiskStore, HostArena, StoreError, host_memory
from zero_offload._native._compile import CompileError, find_compiler
from zero_offload._ring import RingTransport, choose_transport, declare_io, io_library
from zero_offload._system import SYSTEM
from zero_offload._transfer import ThreadTransport, Transfer, plan_blocks

SETTINGS = DiskSettings(block_bytes=8192, queue_depth=3, num_workers=1)


@pytest.fixture(scope="module")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    here = Path(__file__).parent
    csrc = here.parent / "csrc"
    try:
        compiler = find_compiler(os.environ)
    except CompileError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("native") / "faulty_io.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{csrc}", "-o", str(out)]
    subprocess.run([*compiler, *flags, str(here / "faulty_io.cpp")], check=True)
    library = ctypes.CDLL(str(out))
    assert declare_io(library) == ""
    return library


@pytest.fixture
def faulty(faulty_library: ctypes.CDLL) -> Iterator[RingTransport]:
    try:
        transport = RingTransport(SETTINGS, 4096, faulty_library)
    except OSError as error:
        pytest.skip(f"io_uring_setup: {error}")
    yield transport
    faulty_library.zero_set_fault(0, 1, 1 << 30)
    transport.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 8191, 8192, 100_003])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(
    "fault",
    [
        (0, 1, 5000),
        (0, 1, 4096),
        (0, 5, 100),
        (errno.EINTR, 2, 1 << 30),
        (errno.EAGAIN, 7, 6000),
    ],
    ids=["odd ends", "units", "less than a unit", "interrupted", "busy and short"],
)
def test_partial_and_interrupted_requests_are_completed(
    faulty: RingTransport, tmp_path: Path, fault: tuple[int, int, int], start: int, nbytes: int
) -> None:
    """A kernel may move less than asked at any time; the rest is still ours to move."""
    source, into = (HostArena("x").allocate(start + nbytes)[start:] for _ in range(2))
    source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    faulty.library.zero_set_fault(*fault)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        written = faulty.move(Transfer(fd, True, source.data_ptr(), nbytes, 4096, 4096))
        read = faulty.move(Transfer(fd, False, into.data_ptr(), nbytes, 4096, 4096))
    finally:
        os.close(fd)

    assert (written, read) == (nbytes, nbytes)
    assert torch.equal(into, source)
    on_disk = (tmp_path / "f").read_bytes()[4096:]
    assert on_disk[:nbytes] == source.numpy().tobytes()
    assert not any(on_disk[nbytes:])  # nothing of what else went through the same memory


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_request_ends_the_transfer_and_not_the_ring(
    faulty: RingTransport, tmp_path: Path, number: int
) -> None:
    """Memory must not be written by what is left in flight after the caller was told."""
    memory = HostArena("x").allocate(100_000)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        faulty.library.zero_set_fault(number, 5, 1 << 30)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            faulty.move(Transfer(fd, True, memory.data_ptr(), 100_000, 0, 4096))
        num_results = faulty.library.zero_num_results()
        faulty.library.zero_set_fault(0, 1, 1 << 30)

        assert caught.value.errno == number
        assert num_results < 5 + SETTINGS.queue_depth  # nothing was begun after the failure
        assert faulty.move(Transfer(fd, True, memory.data_ptr(), 100_000, 0, 4096)) == 100_000
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ((0, 1, 100), errno.EIO),
        ((0, 1, 0), errno.EIO),
        ((errno.EAGAIN, 1, 1 << 30), errno.EAGAIN),
    ],
    ids=["100 of 4096 bytes", "nothing", "busy"],
)
def test_a_kernel_without_progress_is_an_error_in_the_end(
    faulty: RingTransport, tmp_path: Path, fault: tuple[int, int, int], number: int
) -> None:
    """The same for ever: a hang says nothing, and a write that was none is a lost value."""
    memory = HostArena("x").allocate(4096)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        faulty.library.zero_set_fault(*fault)
        with pytest.raises(OSError, match=os.strerror(number)):
            faulty.move(Transfer(fd, True, memory.data_ptr(), 4096, 0, 4096))
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_the_end_of_the_file_is_told_by_the_count(tmp_path: Path, kind: str) -> None:
    """A truncated file must not look like one that was read."""
    library, reason = io_library()
    settings = DiskSettings(block_bytes=8192, queue_depth=3, uses_uring=kind == "io_uring")
    transport, why = choose_transport(settings, 4096, library, reason, SYSTEM)
    if kind == "io_uring" and why:
        pytest.skip(why)
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    memory = HostArena("x").allocate(50_000)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_DIRECT)
    try:
        assert transport.move(Transfer(fd, False, memory.data_ptr(), 50_000, 0, 4096)) == 10_000
        assert transport.move(Transfer(fd, False, memory.data_ptr(), 9_999, 0, 4096)) == 9_999
        assert (
            transport.move(Transfer(fd, False, memory.data_ptr() + 1, 50_000 - 1, 4096, 4096))
            == 5_904
        )
    finally:
        os.close(fd)
        transport.close()


@pytest.mark.parametrize("seed", range(50))
def test_blocks_cover_every_byte_once_and_only_odd_ones_bounce(seed: int) -> None:
    """A byte moved twice costs time; one not moved, the value."""
    rng = np.random.default_rng(seed)
    align = int(rng.choice([1, 4096, 16384]))
    block_bytes = align * int(rng.integers(1, 5)) * (1 if align > 1 else 1000)
    address, nbytes = int(rng.choice([0, 1, 8192, align])), int(rng.integers(0, 200_000))

    blocks = list(plan_blocks(address, nbytes, block_bytes=block_bytes, align=align))

    starts = [block.start for block in blocks]
    assert starts == [0, *np.cumsum([block.nbytes for block in blocks])][: len(blocks)]
    assert sum(block.nbytes for block in blocks) == nbytes
    for block in blocks:
        assert 0 < block.nbytes <= block_bytes
        assert block.start % align == 0
        is_odd = (address + block.start) % align or block.nbytes % align
        assert block.bounces == bool(is_odd)


def test_a_forbidden_io_uring_leaves_threads_and_a_reason(tmp_path: Path) -> None:
    """Containers forbid it; the job must go on, and say why it is slower."""
    asked = DiskSettings()

    class Forbidding:
        def zero_ring_open(self, depth: int, ring: object) -> int:
            return -errno.EPERM

    transport, why = choose_transport(asked, 4096, Forbidding(), "", SYSTEM)  # type: ignore
    transport.close()
    missing, no_library = choose_transport(asked, 4096, None, "no compiler", SYSTEM)
    missing.close()
    with DiskStore(tmp_path, DiskSettings(uses_uring=False)) as store:
        status = store.status

    assert isinstance(transport, ThreadTransport)
    assert why == "io_uring_setup: Operation not permitted"
    assert isinstance(missing, ThreadTransport)
    assert no_library == "no compiler"
    assert (status.transport, status.uring_reason) == ("threads", "uses_uring is False")


def test_registered_buffers_move_the_same_bytes(tmp_path: Path) -> None:
    """They are another request to the kernel, and may be refused: `status` tells."""
    buffer = HostArena("x").allocate(200_000)
    buffer.copy_(torch.randint(0, 256, (200_000,), dtype=torch.uint8))
    into = torch.empty_like(buffer)
    with DiskStore(tmp_path, DiskSettings(block_bytes=8192)) as store:
        if store.status.transport != "io_uring":
            pytest.skip(store.status.uring_reason)
        store.register([buffer])
        status = store.status
        store.write("x", buffer[4096:]).result()
        store.read("x", into[4096:]).result()
        store.register([])

        assert torch.equal(into[4096:], buffer[4096:])
        assert (status.registered_bytes, status.register_reason) in (
            (200_000, ""),
            (0, status.register_reason),
        )
        assert store.status.registered_bytes == 0


def test_only_what_lies_within_registered_memory_is_asked_for_as_such(tmp_path: Path) -> None:
    """The kernel refuses a request that begins or ends outside of it."""
    buffer = HostArena("x").allocate(100_000)
    buffer.copy_(torch.randint(0, 256, (100_000,), dtype=torch.uint8))
    into = torch.empty_like(buffer)
    part = buffer[2 * 8192 : 5 * 8192 + 4096]
    with DiskStore(tmp_path, DiskSettings(block_bytes=8192)) as store:
        store.register([buffer])
        if not store.status.registered_bytes:
            pytest.skip(store.status.register_reason)
        store.register([part])
        assert (store.status.registered_bytes, store.status.register_reason) == (part.nbytes, "")
        store.write("x", buffer).result()
        store.read("x", into).result()

    assert torch.equal(into, buffer)


def test_registered_memory_lives_while_the_kernel_knows_it(tmp_path: Path) -> None:
    """Its addresses, given to another tensor, would be read and written through old pages."""
    with DiskStore(tmp_path) as store:
        store.register([HostArena("registered").allocate(4096)])
        if not store.status.registered_bytes:
            pytest.skip(store.status.register_reason)

        assert host_memory()["registered"] == 4096
        store.register([])
        assert "registered" not in host_memory()


def test_refused_registration_says_why_and_all_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_MEMLOCK is 8 MiB on most machines."""
    buffer = HostArena("x").allocate(50_000)
    with DiskStore(tmp_path) as store:
        if store.status.transport != "io_uring":
            pytest.skip(store.status.uring_reason)
        register = store._transport.library.zero_ring_register
        with monkeypatch.context() as patch:
            patch.setattr(
                store._transport.library,
                "zero_ring_register",
                lambda ring, starts, sizes, count: (
                    -errno.ENOMEM if count else register(ring, None, None, 0)
                ),
            )
            store.register([buffer])

        assert store.status.registered_bytes == 0
        assert "RLIMIT_MEMLOCK" in store.status.register_reason
        store.write("x", buffer).result()
        store.read("x", buffer).result()


def test_a_library_of_another_version_is_not_called() -> None:
    """A stale build would be handed structures it does not know."""

    class Other:
        def zero_io_abi(self) -> int:
            return 999

    assert "version 999" in declare_io(Other())  # type: ignore
    assert "no disk I/O" in declare_io(object())  # type: ignore


def test_settings_refuse_what_no_disk_takes() -> None:
    """Said where it is written, not by EINVAL in a worker thread."""
    with pytest.raises(ValueError, match="multiple of 4096"):
        DiskSettings(block_bytes=1000)
    with pytest.raises(ValueError, match="queue_depth"):
        DiskSettings(queue_depth=0)
    with pytest.raises(StoreError, match="no folder"):
        DiskStore(Path("/nowhere/at/all"))
