"""What is moved, and when: no value is stale, and nothing is moved for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from zero_offload import DiskSettings, DiskStore, HostArena, StoreError, residence
from zero_offload.testing import SYSTEM, OffloadedShards, RecordingStore


def test_a_shard_read_ahead_of_a_write_is_read_anew() -> None:
    """Else a model computes with the values of the step before."""
    store = RecordingStore(is_lazy=False)
    shards = OffloadedShards(HostArena("shards"), lambda: store)
    shards.allocate({0: torch.empty(100, device="meta"), 1: torch.empty(100, device="meta")})
    for turn in range(3):
        for index in (0, 1):
            shards.open(index, reads=False).fill_(10 * turn + index)
            shards.close(index)
        into = torch.zeros(100)
        shards.read(1, into).wait()
        shards.expect([0, 1])

        assert into.unique().tolist() == [10 * turn + 1]

    into = torch.zeros(100)
    shards.read(0, into).wait()
    assert into.unique().tolist() == [20]
    shards.end()
    assert store.sizes() == {}


def test_a_write_that_failed_does_not_hide_the_one_after_it() -> None:
    """Its values were kept as those that the disk lacks, and read for ever after."""
    shards = OffloadedShards(
        HostArena("shards"), lambda: RecordingStore(is_lazy=False, fails=("write", 0))
    )
    shards.allocate({0: torch.empty(100, device="meta")})
    for value in (1, 2):
        shards.open(0, reads=False).fill_(value)
        shards.close(0)
    with pytest.raises(StoreError, match="injected"):
        shards.flush()

    into = torch.zeros(100)
    shards.read(0, into).wait()
    assert into.unique().tolist() == [2]
    shards.end()


class _Copy:
    """A copy to a device that has begun and does not end before somebody waits for it."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def test_a_host_that_is_ahead_of_its_device_takes_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches cost the host nothing, so it may be a whole model ahead of a device that is slow."""
    copies: list[_Copy] = []

    def begin_to_copy(*_: object) -> _Copy:
        copies.append(_Copy())
        return copies[-1]

    monkeypatch.setattr(residence.shards, "copy_beside", begin_to_copy)
    monkeypatch.setattr(torch.accelerator, "current_stream", mock.Mock())
    store, into = RecordingStore(is_lazy=False), torch.empty(100, device="meta")
    shards = OffloadedShards(HostArena("shards"), lambda: store)
    shards.allocate(dict.fromkeys(range(9), into))
    for index in range(9):
        shards.open(index, reads=False).fill_(index)
        shards.close(index)
    shards.flush()
    for index in range(9):
        shards.read(index, into).wait()

    assert shards.host_bytes <= (residence.COPIES_BEHIND + residence.FREE_SHARDS + 1) * 400
    assert [copy.is_over for copy in copies[: -residence.COPIES_BEHIND - 1]] == [True] * 6
    shards.end()


def test_only_what_is_odd_goes_through_other_memory(tmp_path: Path) -> None:
    """A copy of everything would cost as much as the disk."""
    seen: list[tuple[int, int]] = []

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        address = np.frombuffer(buffers[0], dtype=np.uint8).ctypes.data
        seen.append((address, len(buffers[0])))
        return SYSTEM.pwritev(fd, buffers, offset)

    settings = DiskSettings(block_bytes=8192, queue_depth=1, num_workers=1, uses_uring=False)
    with DiskStore(tmp_path, settings, system=evolve(SYSTEM, pwritev=pwritev)) as store:
        if store.status.direct_bytes == 1:
            pytest.skip(store.status.direct_reason)
        seen.clear()
        memory = HostArena("x").allocate(3 * 8192 + 100)
        store.write("x", memory).result()

    *whole, (odd, _) = seen
    assert whole == [(memory.data_ptr() + 8192 * k, 8192) for k in range(3)]
    assert not memory.data_ptr() <= odd < memory.data_ptr() + memory.nbytes
