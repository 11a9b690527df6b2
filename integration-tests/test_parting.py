"""Ranks that part: each is told who did what, and none steps twice with what it should not have.

Over gloo no rank steps with a wrong value, because its host waits for what it uses. On a device the
host is ahead: there it may be one step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ends
import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from attrs import define
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import RankPool, rely_on
from zero_partition import ZeroRedundancyOptimizer

PATIENCE_S = 0.25
SOON_S = 15.0  # the machine may be busy; the group's own timeout is longer by far
WIDTH = 4
COMMON, AFTER = 2, 3  # steps before ranks part, and after, as if nothing were wrong

TRAININGS = ("stage 1", "stage 3", "redundancy")


class Chooser(nn.Module):
    """Modules of equal size, of which a call uses some in some order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.choices = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:  # noqa: D102
        x = self.first(x)
        for choice in chosen:
            x = self.choices[choice](x).tanh()
        return self.last(x).square().mean()


@define
class Run:
    """A training of this rank's."""

    group: Group
    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    num_steps: int = 0

    def backward(self, chosen: tuple[int, ...] = (0, 1)) -> None:
        """Add to the gradients."""
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) + self.group.rank
        self.model(x, chosen).backward()

    def step(self, chosen: tuple[int, ...] = (0, 1)) -> None:
        """Make a whole one."""
        self.backward(chosen)
        self.optimizer.step()
        self.num_steps += 1
        self.optimizer.zero_grad()

    @property
    def is_odd(self) -> bool:
        """Whether this is the rank that does something else."""
        return self.group.rank == 1


# ---- How ranks part ----


def _another_module(run: Run) -> None:
    run.step((0, 2) if run.is_odd else (0, 1))


def _another_order(run: Run) -> None:
    run.step((1, 0) if run.is_odd else (0, 1))


def _a_module_more(run: Run) -> None:
    run.step((0, 1, 2) if run.is_odd else (0, 1))


def _a_backward_more(run: Run) -> None:
    if run.is_odd:
        run.backward()
    run.step()


def _a_step_more(run: Run) -> None:
    if run.is_odd:
        run.step()
    run.step()


def _an_update_more(run: Run) -> None:
    run.backward()
    if run.is_odd:
        run.optimizer.step()
    run.optimizer.step()


def _clip_grad_norm_(run: Run) -> None:
    run.backward()
    if run.is_odd:
        zero_engine.clip_grad_norm_(run.model, 1.0)
    run.optimizer.step()


def _full_state_dict(run: Run) -> None:
    if run.is_odd:
        zero_engine.full_state_dict(run.model)
    run.step()


def _save(run: Run) -> None:
    if run.is_odd:
        zero_engine.save(run.folder, run.model, run.optimizer, step=0)
    run.step()


def _consolidate_state_dict(run: Run) -> None:
    if run.is_odd:
        run.optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
    run.step()


def _a_sum_of_its_own(run: Run) -> None:
    if run.is_odd:
        dist.all_reduce(torch.ones(3), group=run.group.process_group)
    run.step()


def _a_sum_within_a_step(run: Run) -> None:
    run.backward()
    if run.is_odd:
        dist.all_reduce(torch.ones(3), group=run.group.process_group)
    run.optimizer.step()


def _named(call: str) -> str:
    return rf"rank 1 is in {call}\(\), which must be called on all ranks"


_UNITS = r"gathering unit 'choices\.\d'"
_EVEN = r"same number of backwards"
_OWN = r"(torch\.distributed\.all_reduce\(\)|collectives of its own)"
SHARDED = TRAININGS[:2]
# Whether gathers are collective decides for these; a rank with other gradients has zeros for them.
BRANCHES: dict[Callable[[Run], None], str] = {
    _another_module: rf"(?s){_UNITS}.*set_leaf_modules",
    _another_order: rf"(?s){_UNITS}.*set_leaf_modules",
    _a_module_more: rf"(?s){_UNITS}.*set_leaf_modules",
}
PARTINGS: dict[Callable[[Run], None], tuple[tuple[str, ...], str]] = {
    _a_backward_more: (SHARDED, _EVEN),
    _a_step_more: (SHARDED, _EVEN),
    _an_update_more: (TRAININGS, r"(same number of backwards|on every rank|same on all ranks)"),
    _clip_grad_norm_: (SHARDED, _named("clip_grad_norm_")),
    _full_state_dict: (SHARDED, _named("full_state_dict")),
    _save: (SHARDED, _named("save")),
    _consolidate_state_dict: (("redundancy",), "rank 1"),
    _a_sum_of_its_own: (SHARDED, _OWN),
    _a_sum_within_a_step: (TRAININGS, _OWN),
}


def _group(group: Group, *, reads: bool) -> Group:
    if reads:
        return Group.from_process_group(group.process_group, patience_s=PATIENCE_S)
    return parity.by_messages(patience_s=PATIENCE_S)


def _run(group: Group, training: str, folder: Path) -> Run:
    if training != "redundancy":
        config = ZeroConfig(int(training[-1]))
        return Run(group, *parity.build_sharded(group, config, make=Chooser), folder)
    model = parity.as_ddp(parity.build(Chooser), group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group=group, lr=1e-3)
    return Run(group, model, optimizer, folder)


def _part(
    group: Group, *, way: Any, training: str, reads: bool, folder: Path
) -> tuple[str, str, int, float]:
    """Train, part, and go on as if nothing were wrong: what this rank is told, and when."""
    group = _group(group, reads=reads)
    run = _run(group, training, folder)
    for _ in range(COMMON):
        run.step()
    rely_on(group)
    run.num_steps, began = 0, time.monotonic()
    error: BaseException | None = None
    try:
        way(run)
        for _ in range(AFTER):
            run.step()
        rely_on(group)
        dist.barrier(group.process_group)
    except RuntimeError as caught:
        error = caught
    return type(error).__name__, str(error), run.num_steps, time.monotonic() - began


def _cases(ways: dict[Callable[[Run], None], tuple[tuple[str, ...], str]]) -> list[Any]:
    return [
        pytest.param(way, training, says, id=f"{way.__name__[1:]}-{training}")
        for way, (trainings, says) in ways.items()
        for training in trainings
    ]


_READS = pytest.mark.cpu_only("ranks read each other's memory")
each_transport = pytest.mark.parametrize(
    "reads", [pytest.param(True, id="reads", marks=_READS), pytest.param(False, id="messages")]
)


@each_transport
@pytest.mark.parametrize(("way", "training", "says"), _cases(PARTINGS))
@pytest.mark.drawn(2)
def test_ranks_that_part_are_told_before_a_second_step(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    *,
    way: Callable[[Run], None],
    training: str,
    says: str,
    reads: bool,
) -> None:
    """It hangs elsewhere, or goes on with values of another meaning."""
    pool = ranks(2)
    is_on_cpu = pool.device == "cpu"
    if is_on_cpu and training == "redundancy":
        pytest.skip("DDP's own collectives over gloo wait in C++, where nobody sees it")
    if is_on_cpu and (way, training) == (_full_state_dict, "stage 1"):
        pytest.skip("each rank of the CPU has what it needs")
    told = pool.run(_part, way=way, training=training, reads=reads, folder=tmp_path)

    names = [name for name, *_ in told]
    assert "DivergenceError" in names, told
    if way not in (_a_sum_of_its_own, _a_sum_within_a_step, _a_step_more):
        assert set(names) == {"DivergenceError"}  # else torch tells who is in a call of torch's
    for name, text, num_steps, seconds in told:
        assert name != "NoneType"
        assert seconds < SOON_S
        if name == "DivergenceError":
            assert "rank 0" in text
            assert "rank 1" in text
            assert re.search(says, text), text
        if way is not _a_step_more:
            assert num_steps <= int(not is_on_cpu or (training == "stage 3" and not reads))


@each_transport
@pytest.mark.parametrize("training", SHARDED)
@pytest.mark.parametrize("way", BRANCHES)
def test_ranks_may_take_branches_where_gathers_need_nobody(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    way: Callable[[Run], None],
    training: str,
    reads: bool,
) -> None:
    """Elsewhere they are told so: the same values would be gathered for another unit."""
    pool = ranks(2)
    is_on_cpu = pool.device == "cpu"
    told = pool.run(_part, way=way, training=training, reads=reads, folder=tmp_path)

    # gloo's messages meet by what they mean, so each may send first what it needs first.
    is_right = training == "stage 1" or reads or (is_on_cpu and way is _another_order)
    for name, text, num_steps, _ in told:
        if is_right:
            assert (name, num_steps) == ("NoneType", 1 + AFTER), text
        else:
            assert name == "DivergenceError"
            assert re.search(BRANCHES[way], text), text
            # Another order is seen in what is launched ahead of use, so in the step that follows.
            assert num_steps <= int(not is_on_cpu) + (way is _another_order)


# ---- Ranks that end ----

# What the other may be in, or come to next.
_CALLS = (
    r"gathering|reducing|publishing|agree|all_gather|optimizer\.step"
    r"|a write to shards|reading a shard"
)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fate", ends.FATES)
def test_a_rank_that_does_not_go_on_is_named_in_time(
    ranks: Callable[[int], RankPool], tmp_path: Path, stage: int, fate: str
) -> None:
    """Who waits for it hears which rank it is, in which call; at the latest by the timeout."""
    text, seconds = ends.tell(ranks(2).device, tmp_path, stage, fate)

    assert seconds < (ends.TIMEOUT_S + 2 if fate == "sleeps" else SOON_S)
    assert text.startswith(("CommError", "DivergenceError")), text
    assert "rank 1" in text
    assert re.search(_CALLS, text), text
