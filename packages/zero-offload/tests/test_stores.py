"""Whatever store holds it, a value comes back as it was written last."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from zero_offload import (
    AbstractStore,
    DiskSettings,
    DiskStore,
    HostArena,
    HostStore,
    StoreError,
    host_memory,
    native_status,
    tune,
)
from zero_offload.testing import faults

SMALL: Final = {"block_bytes": 8192, "queue_depth": 3, "num_workers": 3}  # many blocks in a test
Make = Callable[[Path], AbstractStore]


def _threads(**settings: object) -> DiskSettings:
    return DiskSettings(**SMALL, uses_uring=False, **settings)


STORES: Final[dict[str, Make]] = {
    "host": lambda folder: HostStore(),
    "io_uring": lambda folder: DiskStore(folder, DiskSettings(**SMALL)),
    "io_uring, page cache": lambda folder: DiskStore(
        folder, DiskSettings(**SMALL, is_direct=False)
    ),
    "io_uring, checksums": lambda folder: DiskStore(
        folder, DiskSettings(**SMALL, has_checksums=True)
    ),
    "threads": lambda folder: DiskStore(folder, _threads()),
    "threads, page cache": lambda folder: DiskStore(folder, _threads(is_direct=False)),
    "cut short": lambda folder: DiskStore(folder, _threads(), system=faults.cut_short(5000)),
    "cut short, page cache": lambda folder: DiskStore(
        folder, _threads(is_direct=False), system=faults.cut_short(1000)
    ),
    "interrupted": lambda folder: DiskStore(
        folder, _threads(), system=faults.now_and_then(errno.EINTR, 3)
    ),
    "busy": lambda folder: DiskStore(
        folder, _threads(), system=faults.now_and_then(errno.EAGAIN, 5)
    ),
    "4 KiB only": lambda folder: DiskStore(folder, _threads(), system=faults.only_units_of(4096)),
    "16 KiB only": lambda folder: DiskStore(
        folder,
        DiskSettings(block_bytes=32768, uses_uring=False),
        system=faults.only_units_of(16384),
    ),
    "no O_DIRECT": lambda folder: DiskStore(folder, system=faults.no_direct_open()),
    "no fallocate": lambda folder: DiskStore(
        folder, system=faults.refusing("fallocate", errno.EOPNOTSUPP)
    ),
    "no locks": lambda folder: DiskStore(folder, system=faults.refusing("flock", errno.ENOLCK)),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param.startswith("io_uring"):
        _needs_native()
    with STORES[request.param](tmp_path) as made:
        yield made


def _needs_native() -> None:
    if not native_status().loaded:
        pytest.skip(f"no native disk I/O: {native_status().reason}")


def _random_tensor(rng: np.random.Generator) -> torch.Tensor:
    """Of odd sizes around the units of disks, and at odd addresses."""
    around = int(rng.choice([0, 1, 511, 4096, 8192, 16384, 65536]))
    nbytes = max(0, around + int(rng.integers(-9, 10)))
    start = int(rng.choice([0, 1, 512, 4096]))
    make = HostArena("test").allocate if rng.random() < 0.5 else torch.empty
    memory = make(start + nbytes, dtype=torch.uint8)
    memory.copy_(torch.from_numpy(rng.integers(0, 256, start + nbytes, dtype=np.uint8)))
    return memory[start:]


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_equal_a_dictionary(store: AbstractStore, seed: int) -> None:
    """Many values under way at once, replaced, deleted, of any size: none may touch another."""
    rng = np.random.default_rng(seed)
    oracle: dict[str, torch.Tensor] = {}
    under_way = []
    for _ in range(60):
        key = str(rng.choice(["a", "b/c", "ü", "d" * 300]))
        what = rng.choice(["write", "read", "delete"], p=[0.5, 0.45, 0.05])
        if what == "write":
            oracle[key] = _random_tensor(rng)
            under_way.append((store.write(key, oracle[key]), None))
        elif key in oracle and what == "read":
            into = HostArena("test").allocate(oracle[key].numel() + 1)[int(rng.integers(2)) :]
            into = into[: oracle[key].numel()].fill_(7)
            under_way.append((store.read(key, into), oracle[key]))
        elif key in oracle:
            store.delete(key)
            del oracle[key]

    for future, expected in under_way:
        result = future.result(timeout=30)

        assert (result is None) if expected is None else torch.equal(result, expected)

    assert store.sizes() == {key: value.nbytes for key, value in oracle.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (40_001,)], ids=str)
def test_any_shape_and_dtype_comes_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """A store moves bytes; what they mean is the caller's."""
    source = (torch.rand(shape) * 100).to(dtype)
    for name in ("host", "no O_DIRECT"):
        with STORES[name](tmp_path) as store:
            store.write("x", source).result()

            found = store.read("x", torch.empty_like(source)).result()

            assert torch.equal(found, source)


def test_threads_share_a_store(store: AbstractStore) -> None:
    """Hooks run in autograd's threads, the optimizer in the main one."""

    def work(index: int) -> bool:
        source = torch.full((5000 + index,), float(index))
        into = torch.empty_like(source)
        for _ in range(5):
            store.write(f"key {index}", source)
            store.read(f"key {index}", into).result(timeout=30)
        return torch.equal(into, source)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


def test_what_would_be_half_a_value_or_none_is_refused_by_name(store: AbstractStore) -> None:
    """It would train on with noise; and the key is what to look for after a swap that failed."""
    store.allocate({"reserved": 64})
    store.write("x", torch.zeros(8))
    with pytest.raises(StoreError, match="'x' is allocated already"):  # or will be
        store.allocate({"x": 32})
    before = store.sizes()
    for use, words in (
        (lambda: store.read("nowhere", torch.empty(4)).result(), r"'nowhere'.*never written"),
        (lambda: store.read("reserved", torch.empty(16)).result(), r"'reserved'.*never written"),
        (lambda: store.delete("nowhere"), r"'nowhere'.*never written"),
        (lambda: store.allocate({"other": 1, "reserved": 64}), "'reserved' is allocated already"),
        (
            lambda: store.read("x", torch.empty(4)).result(),
            r"'x': expected .* 8 elements of torch.float32.*got 4",
        ),
        (
            lambda: store.read("x", torch.empty(8, dtype=torch.int32)).result(),
            r"8 elements of torch.float32.*torch\.int32",
        ),
        (lambda: store.write("x", torch.zeros(4, 4).t()).result(), "contiguous"),
        (lambda: store.write("", torch.zeros(1)).result(), "empty"),
    ):
        with pytest.raises(StoreError, match=words):
            use()
    assert store.sizes() == before


def test_a_closed_store_says_so(store: AbstractStore) -> None:
    """Else a late hook writes where nothing is kept any more."""
    future = store.write("x", torch.zeros(100_000))
    store.close()
    store.close()

    assert future.done()
    with pytest.raises(StoreError, match="is closed"):
        store.write("x", torch.zeros(4)).result()
    with pytest.raises(StoreError, match="is closed"):
        store.allocate({"y": 4})


def test_a_done_future_holds_nothing(store: AbstractStore) -> None:
    """A buffer that a store still refers to is memory nobody accounts for."""
    import gc
    import weakref

    source = HostArena("borrowed").allocate(4096)
    storage = weakref.ref(source)
    store.write("x", source).result()
    store.write("y", torch.zeros(1)).result()

    del source
    gc.collect()

    assert storage() is None


def test_tune_prints_a_table_and_returns_its_first_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user believes settings whose figures are beside those of the others."""
    # It takes a quarter of what is free, and 256 MiB at most.
    monkeypatch.setattr(os, "statvfs", faults.free_bytes(32 * 2**20).statvfs)

    settings = tune(tmp_path, seconds=0)

    title, _, *rows = capsys.readouterr().out.splitlines()
    transport, block_kib, depth, *speeds = rows[0].split()
    assert title.startswith("one file of 8 MiB")
    assert transport == ("io_uring" if settings.uses_uring else "threads")
    assert int(block_kib) * 1024 == settings.block_bytes
    assert int(depth) == settings.queue_depth
    assert all(float(speed) > 0 for speed in speeds)
    assert isinstance(settings, DiskSettings)
    assert list(tmp_path.iterdir()) == []
    assert "tune" not in host_memory()
    with DiskStore(tmp_path, settings) as store:
        store.write("x", torch.zeros(3)).result()


@pytest.mark.parametrize("use", [tune, DiskStore])
def test_a_place_that_is_none_is_told(tmp_path: Path, use: Callable[[Path], object]) -> None:
    """A folder made in its place would fill the disk below an unmounted one."""
    with pytest.raises(StoreError, match=r"no folder.*is it mounted"):
        use(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
