"""A disk home alone: what its memory is bounded by, and what reads see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zero_engine import Offload
from zero_engine._disk import Disk
from zero_engine._shard_homes import DiskHome
from zero_offload import HostArena
from zero_partition import ShardSize

NUMELS = [1024 * (k + 1) for k in range(12)]


@pytest.fixture
def home(tmp_path: Path):
    """With a dozen shards that all differ in size."""
    disk = Disk(Offload(params="disk", path=tmp_path))
    home = DiskHome(disk, HostArena("test"))
    home.allocate({index: ShardSize(numel, torch.float32) for index, numel in enumerate(NUMELS)})
    yield home
    home.end()


def _write(home: DiskHome, index: int, value: float) -> None:
    home.open(index, reads=False).fill_(value)
    home.close(index)


def _read(home: DiskHome, index: int) -> torch.Tensor:
    into = torch.empty(NUMELS[index])
    home.read(index, into).wait()
    return into


def test_memory_does_not_grow_with_the_number_of_sizes(home: DiskHome) -> None:
    """A model whose units all differ must not end with all of its shards in host memory."""
    for index in range(len(NUMELS)):
        _write(home, index, float(index))
    home.settle()

    largest = NUMELS[-1] * 4
    in_use = 3 * largest  # one that is open, two that are being written
    assert home.host_bytes <= in_use + 2 * largest + largest
    assert home.host_bytes < sum(NUMELS) * 4  # else the bound shows nothing
    for index in range(len(NUMELS)):
        assert (_read(home, index) == index).all()


def test_what_is_expected_and_then_changed_is_read_anew(home: DiskHome) -> None:
    """A shard that was read ahead of a step is of yesterday after it."""
    _write(home, 0, 1.0)
    home.settle()
    home.expect([0])
    _write(home, 0, 2.0)

    assert (_read(home, 0) == 2.0).all()


def test_the_folder_is_gone_when_the_last_user_ends(tmp_path: Path) -> None:
    """Two homes share a store, whole copies for generation and shards: neither may close it."""
    disk = Disk(Offload(params="disk", path=tmp_path))
    home = DiskHome(disk, HostArena("test"))
    home.allocate({0: ShardSize(8, torch.float32)})
    _write(home, 0, 3.0)
    other = home.another()
    other.allocate({0: ShardSize(16, torch.float32)})
    other.end()

    into = torch.empty(8)
    home.read(0, into).wait()
    assert (into == 3.0).all()
    home.end()
    home.end()
    assert not list(tmp_path.iterdir())
