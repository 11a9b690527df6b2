"""Host memory: as much as was asked for, there when it is given, gone when nobody looks."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import re
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch
from zero_offload import BudgetError, HostArena, host_memory, set_host_budget
from zero_offload.memory import arena
from zero_offload.testing import budget as made
from zero_offload.testing import budget_of, interleave, nodes_of_process, spread

MADV_POPULATE_WRITE = 23  # of Linux
MARGIN_BYTES = 128 * 2**20  # what is left to the rest of the process and the machine


def _resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 1_000_001, 2**25 + 2**24 + 1])
def test_memory_has_its_exact_size_and_is_resident(nbytes: int) -> None:
    """Torch's pinned allocator doubles what is above a power of two; and late pages kill a job."""
    budget = made()
    before = _resident_bytes()

    arena = HostArena("x", is_pinned=False, budget=budget)
    memory = arena.allocate(nbytes)

    assert arena.pin_reason == ("is_pinned is False" if nbytes else "")
    assert budget.held().get("x", 0) <= (nbytes * 1.001 + mmap.PAGESIZE if nbytes else 0)
    if nbytes > 2**25:
        assert abs(_resident_bytes() - before - nbytes) < 0.05 * nbytes
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert memory.nbytes == nbytes  # none at all for a rank whose shard is empty
    assert not memory.any()


def test_memory_lives_until_its_last_view_dies() -> None:
    """A view in a parameter or a future outlives whoever asked for the memory."""
    budget = made()
    arena = HostArena("x", budget=budget)
    memory = arena.allocate(100_000, dtype=torch.float32)
    view = memory[10:20].view(2, 5)
    del memory, arena

    view.fill_(3)

    assert view.sum() == 30
    assert budget.held()
    del view
    assert budget.held() == {}


def test_a_refusal_says_who_holds_what() -> None:
    """Out of memory at step 1 of 100,000 is settled by knowing what to make smaller."""
    budget = made(10 * 4096)
    kept = HostArena("moments", budget=budget).allocate(6 * 4096)

    with pytest.raises(BudgetError, match=r"'grads' asks for .*\(20480 bytes\)") as caught:
        HostArena("grads", budget=budget).allocate(5 * 4096)

    assert re.search(r"has .*\(16384 bytes\) left", str(caught.value))
    assert re.search(r"24576 bytes\)  moments", str(caught.value))
    assert caught.value.held == {"moments": kept.nbytes} == budget.held()
    assert caught.value.nbytes == 5 * 4096


def test_one_budget_serves_the_process() -> None:
    """Two libraries that each keep to their own limit still end the process together."""
    memory = HostArena("one").allocate(4096)
    try:
        set_host_budget(sum(host_memory().values()))
        with pytest.raises(BudgetError, match="'two'"):
            HostArena("two").allocate(1)
    finally:
        set_host_budget(None)

    assert host_memory()["one"] == memory.nbytes
    with pytest.raises(ValueError, match="-1"):
        set_host_budget(-1)


def test_what_the_machine_lacks_is_refused_before_it_is_touched() -> None:
    """The kernel's answer would be a signal that no one can catch."""
    budget = made(available_bytes=200 * 2**20, source="control group limit y")

    with pytest.raises(BudgetError, match=r"this machine \(control group limit y\)"):
        HostArena("x", budget=budget).allocate(100 * 2**20)
    with pytest.raises(BudgetError, match="this machine"):
        HostArena("x", budget=budget_of(Path("/"))).allocate(1 << 50)

    assert budget.held() == {}


def test_memory_promised_to_another_thread_is_not_promised_again() -> None:
    """Pages are free until touched; two threads must not both be told that they are theirs."""
    budget = made(available_bytes=300 * 2**20)

    with (
        budget.taking("first", 100 * 2**20),
        pytest.raises(BudgetError),
        budget.taking("second", 100 * 2**20),
    ):
        pass
    with budget.taking("second", 100 * 2**20):
        pass

    assert budget.held() == {"first": 100 * 2**20, "second": 100 * 2**20}


def test_a_refusal_of_the_system_is_typed_and_holds_nothing() -> None:
    """`ulimit -v` is set on many clusters."""
    budget = made()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, limits[1]))
    try:
        with pytest.raises(BudgetError, match="refuses to map"):
            HostArena("x", budget=budget).allocate(2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

    assert budget.held() == {}


@pytest.mark.parametrize(
    ("files", "nbytes", "source"),
    [
        (
            {"proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 500000 kB\n"},
            512_000_000,
            "MemAvailable",
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 5000000 kB\n",
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/memory.max": "1000000000\n",
                "sys/fs/cgroup/a/memory.current": "400000000\n",
                "sys/fs/cgroup/a/memory.stat": "active_file 7\ninactive_file 100000000\n",
            },
            700_000_000,
            "a/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/x\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            },
            0,
            "memory.limit_in_bytes",
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/x\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "800000000\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "100000000\n",
            },
            700_000_000,
            "x/memory.limit_in_bytes",
        ),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "1000000000\n",
                "sys/fs/cgroup/a/memory.current": "400000000\n",
            },
            600_000_000,
            "a/memory.max",
        ),
        ({"proc/self/cgroup": "4:memory:/\n"}, 1 << 60, "unknown"),
    ],
    ids=["machine", "v2, an outer group", "v1 in a container, over", "v1", "no stat", "nothing"],
)
def test_the_strictest_limit_counts(
    tmp_path: Path, files: dict[str, str], nbytes: int, source: str
) -> None:
    """A container's limit is invisible in the machine's own figures."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    with pytest.raises(BudgetError) as caught:
        HostArena("x", budget=budget_of(tmp_path)).allocate(1 << 60)

    left = max(0, nbytes - MARGIN_BYTES)
    assert f"{source}) has" in str(caught.value)
    assert f"({left} bytes) left" in str(caught.value)


def test_memory_spreads_over_the_nodes_of_this_process(tmp_path: Path) -> None:
    """Else all of it lies with the thread that touched it, at half the machine's bandwidth."""
    import os

    core = min(os.sched_getaffinity(0))
    for node, cores in {
        "node0": f"{core}",
        "node1": f"{core}-{core + 1},9999",
        "node2": "",
    }.items():
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    memory = HostArena("x").allocate(8192)

    assert nodes_of_process(tmp_path) == [0, 1]
    assert nodes_of_process(tmp_path / "elsewhere") == []
    assert spread(memory.data_ptr(), 8192, [0]) == ""
    # One node suffices to see the call accepted, or refused with its own words (seccomp).
    assert interleave(memory.data_ptr(), 8192, [0]) in ("", "mbind: Operation not permitted")
    refusals = ("mbind: Invalid argument", "mbind: Operation not permitted")
    assert interleave(memory.data_ptr() + 1, 8192, [0]) in refusals


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_page_locked_for_the_device() -> None:
    """Copies from other memory wait for the CPU, and overlap with nothing."""
    arena = HostArena("x")
    memory = arena.allocate(1_000_003, dtype=torch.float32)

    assert arena.pin_reason == ""
    assert memory.is_pinned()
    assert memory[5:].is_pinned()
    memory.normal_()
    assert torch.equal(memory.to("cuda", non_blocking=True).cpu(), memory)
    del memory
    assert arena.allocate(3).is_pinned()  # the last was let go of, or this would be refused


def test_other_accelerators_lock_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages cannot be registered. The disk wants a page's address, whatever torch gives."""
    real, given = torch.zeros, []

    def zeros(numel: int, *, dtype: torch.dtype, pin_memory: bool, device: str) -> torch.Tensor:
        assert pin_memory and device == "cpu"
        given.append(real(numel + 64, dtype=dtype)[64:])  # begins at no page
        return given[-1]

    monkeypatch.setattr(arena, "accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits := mock.Mock())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    budget = made()
    holder = HostArena("x", budget=budget)
    memory = holder.allocate(10_001)

    assert (holder.pin_reason, memory.numel()) == ("", 10_001)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    start, stop = given[0].data_ptr(), given[0].data_ptr() + given[0].nbytes
    assert start <= memory.data_ptr()
    assert memory.data_ptr() + memory.nbytes <= stop
    assert budget.held() == {"x": 3 * mmap.PAGESIZE}
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    del memory
    waits.assert_called_once_with(3)
    assert not budget.held()


def test_an_accelerator_that_locks_nothing_is_served_plain_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are slower then, and the arena says why."""
    monkeypatch.setattr(arena, "accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=RuntimeError("no pinned memory")))
    holder = HostArena("x", budget=made())

    memory = holder.allocate(5)

    assert holder.pin_reason == "pin_memory of 4096 bytes for xpu: no pinned memory"
    assert memory.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("nodes", "words"), [([0], [1]), ([0, 63], [1 | 1 << 63]), ([1, 64, 130], [2, 1, 4])]
)
def test_nodes_are_the_bits_of_whole_words(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int], words: list[int]
) -> None:
    """The kernel reads one bit less than it is told, and memory beyond the words is not ours."""
    libc = mock.Mock()
    libc.syscall.return_value = 0
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: libc)

    assert spread(4096, 8192, nodes[:1]) == ""
    assert not libc.syscall.called
    assert interleave(4096, 8192, nodes) == ""

    _, address, nbytes, _, mask, num_bits, _ = libc.syscall.call_args.args
    assert (address.value, nbytes.value) == (4096, 8192)
    assert list(mask) == words
    assert num_bits.value - 1 == 64 * len(words)


def test_nodes_are_those_whose_cores_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of other nodes is further away, and in a container may be somebody else's."""
    monkeypatch.setattr("os.sched_getaffinity", {0: {5}}.__getitem__)  # 0: this process
    for node, cores in {"node0": "3-4", "node1": "6-9", "node2": "0,5", "node3": "2-7"}.items():
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")

    assert nodes_of_process(tmp_path) == [2, 3]


@pytest.mark.parametrize(("code", "is_refused"), [(errno.ENOMEM, True), (errno.EINVAL, False)])
def test_pages_that_cannot_be_provided_are_given_back(
    monkeypatch: pytest.MonkeyPatch, code: int, is_refused: bool
) -> None:
    """A kernel before 5.14 does not know the request: there pages are touched one by one."""
    gc.collect()  # memory of tests before this one, which tracebacks keep
    real, unmapped = arena._libc, []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        if advice != MADV_POPULATE_WRITE:
            return 0
        ctypes.set_errno(code)
        return -1

    def munmap(address: int, nbytes: int) -> int:
        unmapped.append(nbytes)
        return real.munmap(address, nbytes)

    libc = mock.Mock(mmap=real.mmap, madvise=madvise, munmap=munmap)
    monkeypatch.setattr(arena, "_libc", libc)
    budget = made()

    if is_refused:
        with pytest.raises(BudgetError, match="ran out while providing them"):
            HostArena("x", budget=budget).allocate(2**25)
    else:
        before = _resident_bytes()
        memory = HostArena("x", budget=budget).allocate(2**25)
        assert _resident_bytes() - before > 0.9 * 2**25
        del memory
    assert unmapped == [2**25]
    assert budget.held() == {}


def test_a_budget_of_nothing_is_a_budget() -> None:
    """None is no limit, and less than nothing a mistake."""
    set_host_budget(0)
    try:
        with pytest.raises(BudgetError):
            HostArena("x").allocate(1)
        with pytest.raises(ValueError, match="-1"):
            set_host_budget(-1)
    finally:
        set_host_budget(None)
