"""io_uring as the kernel may behave: short, interrupted, busy, failing, or forbidden."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from zero_offload import DiskSettings, DiskStore, HostArena, StoreError
from zero_offload.build import CompileError, find_compiler
from zero_offload.testing import faults, native

SETTINGS = DiskSettings(block_bytes=8192, queue_depth=3, num_workers=1)
UNIT_BYTES = 4096


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The disk I/O over a kernel that misbehaves when it is told to."""
    here = Path(__file__).parent
    csrc = here.parent / "csrc"
    try:
        compiler = find_compiler(os.environ)
    except CompileError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("native") / "faulty_io.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{csrc}", "-o", str(out)]
    subprocess.run([*compiler, *flags, str(here / "faulty_io.cpp")], check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture
def store(faulty: ctypes.CDLL, tmp_path: Path) -> Iterator[DiskStore]:
    """A store over it, on a disk that takes whole units alone."""
    system = faults.only_units_of(UNIT_BYTES)
    with native(library=faulty), DiskStore(tmp_path, SETTINGS, system=system) as made:
        if made.status.transport != "io_uring":
            pytest.skip(made.status.uring_reason)
        if made.status.direct_bytes != UNIT_BYTES:
            pytest.skip(made.status.direct_reason)
        yield made
        faulty.zero_set_fault(0, 1, 1 << 30)


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
    faulty: ctypes.CDLL, store: DiskStore, fault: tuple[int, int, int], start: int, nbytes: int
) -> None:
    """A kernel may move less than asked at any time; the rest is still ours to move."""
    source, into = (HostArena("x").allocate(start + nbytes)[start:] for _ in range(2))
    source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    faulty.zero_set_fault(*fault)

    store.write("x", source).result()
    store.read("x", into).result()

    assert torch.equal(into, source)
    (path,) = store.folder.iterdir()
    on_disk = path.read_bytes()
    assert on_disk[:nbytes] == source.numpy().tobytes()
    assert not any(on_disk[nbytes:])  # nothing of what else went through the same memory


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_request_ends_the_transfer_and_not_the_ring(
    faulty: ctypes.CDLL, store: DiskStore, number: int
) -> None:
    """Memory must not be written by what is left in flight after the caller was told."""
    memory = HostArena("x").allocate(100_000)
    faulty.zero_set_fault(number, 5, 1 << 30)
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        store.write("x", memory).result()
    num_results = faulty.zero_num_results()
    faulty.zero_set_fault(0, 1, 1 << 30)

    assert caught.value.errno == number
    assert num_results < 5 + SETTINGS.queue_depth  # nothing was begun after the failure
    store.write("y", memory).result()
    assert torch.equal(store.read("y", torch.ones_like(memory)).result(), memory)


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
    faulty: ctypes.CDLL, store: DiskStore, fault: tuple[int, int, int], number: int
) -> None:
    """The same for ever: a hang says nothing, and a write that was none is a lost value."""
    faulty.zero_set_fault(*fault)

    with pytest.raises(StoreError, match=os.strerror(number)):
        store.write("x", HostArena("x").allocate(4096)).result()


class _Instead:
    """A library in which some functions are others."""

    def __init__(self, library: Any, **functions: Any) -> None:
        self.__dict__.update(functions, library=library)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)


def test_a_forbidden_io_uring_leaves_threads_and_a_reason(
    faulty: ctypes.CDLL, tmp_path: Path
) -> None:
    """Containers forbid it; the job must go on, and say why it is slower."""
    forbidden = _Instead(faulty, zero_ring_open=lambda depth, ring: -errno.EPERM)
    for settings, arguments, reason in (
        (DiskSettings(), {"library": forbidden}, "io_uring_setup: Operation not permitted"),
        (DiskSettings(), {"reason": "no compiler"}, "no compiler"),
        (DiskSettings(uses_uring=False), {"library": faulty}, "uses_uring is False"),
    ):
        with native(**arguments), DiskStore(tmp_path, settings) as store:
            assert store.status.transport == "threads"
            assert reason in store.status.uring_reason
            store.write("x", torch.ones(3)).result()
            assert store.read("x", torch.zeros(3)).result().tolist() == [1, 1, 1]


def test_settings_refuse_what_no_disk_takes() -> None:
    """Said where it is written, not by EINVAL in a worker thread."""
    for settings, words in (
        ({"block_bytes": 1000}, "of 4096"),
        ({"queue_depth": 0}, "queue"),
    ):
        with pytest.raises(ValueError, match=words):
            DiskSettings(**settings)
