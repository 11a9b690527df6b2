"""Disks that fill and fail, and budgets: words before training, and a way on afterwards."""

from __future__ import annotations

import copy
import errno
import gc
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from attrs import evolve
from parity import ZeroConfig
from residences import Cell, assert_same, cpu_adam, failing_disk, parts_of
from zero_comm import Group
from zero_engine import FileError, Offload
from zero_offload import BudgetError, DiskSettings, DiskStore, StoreError, TornStepError
from zero_offload.testing import SYSTEM, faults
from zero_partition import PartitionError
from zero_partition.seams import find_sharded

BOTH: Final = Cell(3, "disk", "disk")


def _on(system: Any) -> Any:
    """Disk stores that the engine opens rest on it; the kernel's ring goes around it, so none."""
    make = DiskStore.__init__

    def made(store: DiskStore, path: Path, settings: DiskSettings) -> None:
        make(store, path, evolve(settings, uses_uring=False), system=system)

    return mock.patch.object(DiskStore, "__init__", made)


def _shard(group: Group, offload: Offload) -> tuple[Any, Any]:
    model = parity.build(parity.tiny_float32)
    optimizer = cpu_adam(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, offload=offload), group=group)
    return model, optimizer


# ---- Before training ----


@pytest.mark.parametrize("num_files", [0, 3, 15])
@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all", "one"])
def test_a_full_disk_is_known_before_anything_is_sharded(
    group: Group, tmp_path: Path, num_files: int, who: tuple[int, ...]
) -> None:
    """Every rank says so, nobody waits, and the model is as it was: another place can be tried."""
    model = parity.build(parity.tiny_float32)
    before = copy.deepcopy(model.state_dict())
    optimizer = cpu_adam(model)
    config = ZeroConfig(3, offload=BOTH.offload(tmp_path))
    full = faults.refusing("fallocate", errno.ENOSPC, after=num_files)
    with _on(full if group.rank in who else SYSTEM):
        expected = StoreError if group.rank in who else PartitionError
        with pytest.raises(expected, match="No space left") as caught:
            zero_engine.shard(model, optimizer, config, group=group)
    if group.rank in who:
        assert caught.value.errno == errno.ENOSPC
    else:
        assert "rank 1 cannot keep its part" in str(caught.value)
    assert find_sharded(model) is None
    parity.assert_same_weights(model.state_dict(), before, what="after a refusal")
    torch.distributed.barrier()
    assert not list(Path(tmp_path).iterdir())

    zero_engine.shard(model, optimizer, config, group=group)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    zero_engine.unshard(model, optimizer)


def test_a_folder_that_is_missing_on_one_rank_is_named_by_all(group: Group, tmp_path: Path) -> None:
    """A disk that one machine has not mounted is the commonest mistake there is."""
    offload = BOTH.offload(tmp_path if group.rank == 0 else f"{tmp_path}/nowhere")
    expected, part = (
        (PartitionError, "rank 1 cannot keep its part")
        if group.rank == 0
        else (StoreError, "name an existing one")
    )
    with pytest.raises(expected, match=part):
        _shard(group, offload)


def test_a_budget_that_is_too_small_says_what_asks_for_how_much(
    group: Group, tmp_path: Path
) -> None:
    """With a number that works, and that is enough."""
    offload = evolve(BOTH.offload(tmp_path), budget_bytes=2 if group.rank else 10**9)
    expected = BudgetError if group.rank else PartitionError
    with pytest.raises(expected, match=r"(?s)budget_bytes=2 .*slots") as caught:
        _shard(group, offload)
    if group.rank:
        assert sum(caught.value.held.values()) == caught.value.nbytes > 2
        offload = evolve(offload, budget_bytes=caught.value.nbytes)
    model, optimizer = _shard(group, offload)
    zero_engine.unshard(model, optimizer)


@pytest.mark.ranks(1)
def test_a_model_that_is_dropped_leaves_no_file(group: Group, tmp_path: Path) -> None:
    """Nobody calls unshard() at the end of a script, or of a cell of a notebook."""
    model, optimizer = _shard(group, BOTH.offload(tmp_path))
    parity.run_steps(model, optimizer, range(2), rank=0)
    assert list(Path(tmp_path).iterdir())
    del model, optimizer
    deadline = time.monotonic() + 10  # a thread of the store may hold on to it until it has ended
    while list(Path(tmp_path).iterdir()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not list(Path(tmp_path).iterdir())


# ---- During training ----


@pytest.mark.parametrize(
    ("verb", "part", "skips"),
    [
        ("write", "optimizer", 1),
        ("write", "optimizer", -3),  # the last of the step, which does not wait for them
        ("read", "optimizer", 2),
        ("write", "parameters", 1),
    ],
)
@pytest.mark.ranks(timeout_s=60)
def test_a_disk_that_fails_in_a_step_leaves_what_can_be_resumed(
    group: Group, tmp_path: Path, verb: str, part: str, skips: int
) -> None:
    """The error says that the step is torn; weights and state that were saved make it whole."""
    whole, its_optimizer = _shard(group, BOTH.offload(tmp_path))
    parity.run_steps(whole, its_optimizer, range(4), rank=group.rank)
    expected = parts_of(whole, its_optimizer)
    zero_engine.unshard(whole, its_optimizer)

    model, optimizer = _shard(group, BOTH.offload(tmp_path))
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    move = getattr(DiskStore, verb)
    with mock.patch.object(DiskStore, verb, autospec=True, side_effect=move) as moves:
        parity.run_steps(model, optimizer, range(1, 2), rank=group.rank)
    num_moves = sum(part in call.args[1] for call in moves.call_args_list)
    weights = {name: zero_engine.full_param(p) for name, p in model.named_parameters()}
    state = zero_engine.full_optimizer_state_dict(model)
    parity.loss_of(model, parity.batch(2, 0, group.rank)).backward()
    with (
        failing_disk(verb, part, after=skips % num_moves),
        pytest.raises(TornStepError, match="no such disk"),
    ):
        optimizer.step()
        if skips < 0:
            zero_engine.local_optimizer_state(model.scale, "exp_avg")
        optimizer.zero_grad()
        parity.loss_of(model, parity.batch(3, 0, group.rank)).backward()
        optimizer.step()
    with pytest.raises(TornStepError, match="of two different steps"):
        optimizer.step()

    optimizer.zero_grad()
    zero_engine.load_full_optimizer_state_dict(model, state)
    model.load_state_dict(weights, strict=False)
    parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    assert_same(parts_of(model, optimizer), expected, "resumed")
    zero_engine.unshard(model, optimizer)


def test_a_disk_that_fails_in_a_load_is_told_by_it(group: Group, tmp_path: Path) -> None:
    """Else the next step would say so, of values that nobody has written since."""
    model, optimizer = _shard(group, BOTH.offload(tmp_path))
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    zero_engine.save(tmp_path, model, optimizer, step=1)
    expected = parts_of(model, optimizer)
    write = DiskStore.write
    with mock.patch.object(DiskStore, "write", autospec=True, side_effect=write) as writes:
        zero_engine.load(tmp_path, model, optimizer)
    last = sum("parameters" in call.args[1] for call in writes.call_args_list) - 1
    with (
        failing_disk("write", "parameters", after=last),
        pytest.raises(FileError, match=r"no such disk.*load again"),
    ):
        zero_engine.load(tmp_path, model, optimizer)
    zero_engine.load(tmp_path, model, optimizer)
    assert_same(parts_of(model, optimizer), expected, "loaded again")
    zero_engine.unshard(model, optimizer)
