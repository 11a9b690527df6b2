"""An exception from outside may come anywhere in a step: what follows is as if it had not come.

At moments drawn by ZERO_SEED; at each line of ours by `hatch run interrupts`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from interrupts import (
    CASES,
    Case,
    InterruptError,
    Interrupting,
    are_equal,
    gradients,
    interrupted,
)
from torch import nn
from zero_comm import CommError, Group
from zero_partition import StateError
from zero_partition.run.gradients import BufferGradients, GradientReducer
from zero_partition.run.schedule import Schedule
from zero_partition.run.unit import Unit
from zero_partition.seams import find_sharded
from zero_partition.torch_private import plain_call

ASKED: Final = os.environ.get("ZERO_INTERRUPTS", "")  # moments of each test, or "all"
SEED: Final = int(os.environ["ZERO_SEED"])
LIMIT_S: Final = 3600 if ASKED else 60


def _moments(
    lines: Sequence[tuple[str, int]], *, usually: int, has_peers: bool = False
) -> list[int]:
    """Return the moments at which to interrupt, in order; 1 is the first of `lines`.

    Each is at another line of ours. "all" is each line when it runs first and last and once
    between, with peers once: a step runs a line some eight times, and all moments of all cells
    would take a day.
    """
    draw, of_lines = Random(SEED), [*_by_line(lines).values()]
    if ASKED != "all":
        of_lines = draw.sample(of_lines, min(int(ASKED or usually), len(of_lines)))
    has_ends = ASKED == "all" and not has_peers
    chosen = [{draw.choice(at), *((at[0], at[-1]) if has_ends else ())} for at in of_lines]
    return sorted(set().union(*chosen))


def _moments_within(lines: Sequence[tuple[str, int]], functions: Sequence[Any]) -> list[int]:
    """Return a moment of each line of these functions that runs: the second, if it runs twice.

    A step's first call of a function often finds nothing under way.
    """
    moments, found = _by_line(lines), list[int]()
    for function in functions:
        code = function.__code__
        runs = [moments.get((code.co_filename, line), []) for *_, line in code.co_lines()]
        assert any(runs), f"a step does not come to {code.co_qualname}"
        found += [at[:2][-1] for at in runs if at]
    return sorted(set(found))


def _by_line(lines: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[int]]:
    """Return the moments of each line, in order; 1 is the first of `lines`."""
    found = defaultdict[tuple[str, int], list[int]](list)
    for moment, line in enumerate(lines, 1):
        found[line].append(moment)
    return found


@pytest.mark.ranks(1, timeout_s=LIMIT_S)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.drawn(2)
def test_a_model_is_idle_after_zero_grad_whatever_was_interrupted(group: Group, case: Case) -> None:
    """Of 600 moments in forward and backward 40 left an endless loop, or "a forward is running"."""
    wrong = _wrong_after_zero_grad(case, partial(_moments, usually=100))
    assert not wrong, f"seed {SEED}: {wrong}"


# What holds a slot or a reduction that is begun and has not ended.
_BETWEEN: Final = (
    *(BufferGradients.launch, BufferGradients.advance, BufferGradients.finish),
    *(GradientReducer.collect, Schedule._use, Schedule._prefetch, Schedule.before_backward),
)
_FEW_CASES: Final = ("stage-0", "stage-2-int8", "stage-3-two-slots")
_OF_THIS_THREAD: Final = pytest.mark.cpu_only(
    "a device's backward runs in a thread of its own, where no Ctrl-C comes"
)


@_OF_THIS_THREAD
@pytest.mark.ranks(1, timeout_s=LIMIT_S)
@pytest.mark.parametrize("name", _FEW_CASES)
def test_a_model_is_idle_whatever_was_begun_and_not_ended(group: Group, name: str) -> None:
    """At every line of those, in each run of all tests."""
    wrong = _wrong_after_zero_grad(CASES[name], partial(_moments_within, functions=_BETWEEN))
    assert not wrong, wrong


def _wrong_after_zero_grad(
    case: Case, choose: Callable[[Sequence[tuple[str, int]]], list[int]]
) -> list[str]:
    """Interrupt forward and backward at the moments chosen; what went wrong at which."""
    model, optimizer = case.build(None)
    expected = _step(case, model, optimizer)
    with Interrupting() as counted:
        case.run(model, 7)
    optimizer.zero_grad()
    wrong = []

    for at in choose(counted.lines):
        with interrupted(at) as interrupting:
            case.run(model, 7)
        outcome = ""
        try:
            optimizer.zero_grad()
            sharded = find_sharded(model)
            if sharded.phase.name != "IDLE" or sharded.schedule.is_running:
                outcome = f"{sharded.phase.name}, is_running {sharded.schedule.is_running}"
            if not are_equal(_step(case, model, optimizer), expected):
                outcome = "other values"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome:
            wrong.append(f"{interrupting.where} ({at}): {outcome[:150]}")
            model, optimizer = case.build(None)
    return wrong


def _step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = case.run(model, 7)
    found = [*losses, *gradients(optimizer)]
    optimizer.zero_grad()
    return found


@pytest.mark.ranks(1, timeout_s=LIMIT_S)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.drawn(3)
def test_a_model_is_idle_after_load_whatever_was_interrupted(
    group: Group, case: Case, tmp_path: Path
) -> None:
    """Also in the optimizer's step and in zero_grad()."""
    model, optimizer = case.build(group)
    zero_engine.save(tmp_path / "run", model, optimizer, step=2)

    def train() -> list[torch.Tensor]:
        losses = case.run(model, 7)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    def finish() -> list[Any]:
        losses = [*train(), *train()]
        return [*losses, *zero_engine.full_state_dict(model).values()]

    expected = finish()
    zero_engine.load(tmp_path / "run", model, optimizer)
    with Interrupting() as counted:
        train()
    wrong = []

    for at in _moments(counted.lines, usually=30):
        with interrupted(at) as interrupting:
            train()
        outcome = ""
        try:
            zero_engine.load(tmp_path / "run", model, optimizer)
            optimizer.zero_grad()
            if not are_equal(finish(), expected):
                outcome = "other values"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome:
            wrong.append(f"{interrupting.where} ({at}): {outcome[:150]}")
            model, optimizer = case.build(group)
        zero_engine.load(tmp_path / "run", model, optimizer)

    assert not wrong, f"seed {SEED}: {wrong}"


@pytest.mark.ranks(1, timeout_s=LIMIT_S)
def test_an_interrupted_save_leaves_nothing_that_the_next_does_not_remove(
    group: Group, tmp_path: Path
) -> None:
    """In the same process: its partial folder stayed for as long as that lived."""
    case, folder = CASES["stage-1"], tmp_path / "run"
    model, optimizer = case.build(None)
    with Interrupting() as counted:
        zero_engine.save(folder, model, optimizer, step=0)
    wrong = []

    for step, at in enumerate(_moments(counted.lines, usually=60), 1):
        with interrupted(at) as interrupting:
            zero_engine.save(folder, model, optimizer, step=step)
        zero_engine.save(folder, model, optimizer, step=step, tag="whole", keep=1)
        names = {path.name for path in folder.iterdir()}
        if names != {"whole", "latest"}:
            wrong.append(f"{interrupting.where} ({at}): {sorted(names)}")

    assert not wrong, f"seed {SEED}: {wrong}"


def test_no_moment_leaves_a_with_statement_entered() -> None:
    """As no signal does: from there on parameters at rest were read as NaN, and found wrong."""
    for at in range(1, 10):
        with interrupted(at):
            plain_call(abs, (-1,), {})
        assert torch._C._is_torch_function_enabled(), f"moment {at}"


# ---- Two ranks ----

_CASES: Final = ("stage-0", "stage-1", "stage-3", "stage-3-host", "stage-2-int8")
_WHICH: Final = ("one", "both", "both-elsewhere")
_TRANSPORTS: Final = ("reading", "messages")
CELLS: Final = [  # a third of them in every run of all tests
    (case, which, transport)
    for a, case in enumerate(_CASES)
    for b, which in enumerate(_WHICH)
    for c, transport in enumerate(_TRANSPORTS)
    if ASKED or (a + b + c) % 3 == 0
]
_PATIENCE_S: Final = 0.5
_SOON_S: Final = 20.0  # for either rank to have its gradients, or to know why not


@pytest.mark.ranks(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "which", "transport"), CELLS, ids=map("-".join, CELLS))
def test_ranks_go_on_or_are_told_that_they_cannot(
    group: Group, name: str, which: str, transport: str
) -> None:
    """No wrong gradient, no hang and no error of another kind, whoever is interrupted where.

    Who was interrupted drops gradients and runs the step again. Who was not has run it once.
    """
    choose = partial(_moments, usually=8, has_peers=True)
    wrong = _wrong_of_ranks(group.rank, CASES[name], which, transport, choose)
    assert not wrong, f"seed {SEED}: " + "\n".join(wrong)


@pytest.mark.drawn(3)
@_OF_THIS_THREAD
@pytest.mark.ranks(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize("name", _FEW_CASES)
def test_ranks_go_on_whatever_was_begun_and_not_ended(group: Group, name: str) -> None:
    """At every line of those, in each run of all tests."""
    choose = partial(_moments_within, functions=_BETWEEN)
    wrong = _wrong_of_ranks(group.rank, CASES[name], "both", "messages", choose)
    assert not wrong, "\n".join(wrong)


def _wrong_of_ranks(
    rank: int,
    case: Case,
    which: str,
    transport: str,
    choose: Callable[[Sequence[tuple[str, int]]], list[int]],
) -> list[str]:
    """Interrupt a step at the moments chosen; what went wrong at which."""
    wrong, told = [], 0
    model, optimizer = case.build(_group_of(transport))
    with Interrupting() as counted:
        case.run(model, 7)
    model = None
    for at in choose(_everyone(counted.lines)[0]):
        if model is None:
            its_group = _group_of(transport)
            model, optimizer = case.build(its_group)
            expected = _step(case, model, optimizer)
        mine = {"one": at * (rank == 0), "both": at, "both-elsewhere": at + 37 * rank}[which]
        began, outcome = time.monotonic(), "right"
        interrupting = Interrupting(mine)
        try:
            found = _interrupted_step(case, model, optimizer, interrupting)
            if not are_equal(found, expected):
                outcome = "WRONG"
        except (CommError, StateError) as error:
            outcome = f"told: {type(error).__name__}: {error}"
        except Exception as error:
            outcome = f"RAW {type(error).__name__}: {error}"
        if time.monotonic() - began > _SOON_S:
            outcome = f"LATE, {outcome}"
        outcomes = _everyone(outcome)
        told += any(each.startswith("told") for each in outcomes)
        if any(each != "right" for each in outcomes):
            model = None
            dist.destroy_process_group(its_group.process_group)  # which has parted
        if not all(each.startswith(("right", "told")) for each in outcomes):
            wrong.append(f"{interrupting.where} ({at}): {[each[:300] for each in outcomes]}")
    print(f"{which} {transport}: {told} told")
    return wrong


@pytest.mark.ranks(2, timeout_s=LIMIT_S)
def test_a_backward_that_ran_out_of_memory_in_a_gather_may_be_run_again(group: Group) -> None:
    """The unit believed that its slot was being filled, and read what another had left there."""
    case = CASES["stage-3"]
    model, optimizer = case.build(_group_of("messages"))
    expected = _step(case, model, optimizer)
    loss = parity.loss_of(model, parity.batch(7, 0, group.rank))
    with (
        mock.patch.object(Unit, "_take_slot", side_effect=torch.OutOfMemoryError("no memory")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss.backward(retain_graph=True)

    loss.backward()

    assert are_equal([loss.detach(), *gradients(optimizer)], expected)
    optimizer.zero_grad()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _write_gathered(param: nn.Parameter) -> None:
    with zero_engine.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.fill_(1.0)


_AFTER: Final[dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], object]]] = {
    "a step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "a forward": _train,
    "a forward of a part": lambda model, optimizer: model[0](torch.ones(2, 4)).sum().backward(),
    "a write": lambda model, optimizer: zero_engine.set_full_param(
        model[0].weight, torch.ones(4, 4)
    ),
    "a write inside a context": lambda model, optimizer: _write_gathered(model[0].weight),
    "offload_states": lambda model, optimizer: (
        zero_engine.offload_states(model),
        zero_engine.reload_states(model),
    ),
    "a read": lambda model, optimizer: zero_engine.full_state_dict(model),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(
        {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    ),
    "release_buffers": lambda model, optimizer: zero_engine.release_buffers(model),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", _AFTER)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_follows_a_broken_forward_is_as_if_it_had_not_been(
    group: Group, after: str, stage: int
) -> None:
    """Whatever is called first has to end the forward, which did not come to say that it ended."""

    def run(is_broken: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = zero_engine.ZeroConfig(stage, min_unit_bytes=0)
        zero_engine.shard(model, optimizer, config, group=group)
        _train(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        if is_broken:
            ends = mock.patch.object(Schedule, "after_forward", side_effect=InterruptError)
            with ends, pytest.raises(InterruptError):
                model(torch.ones(2, 4))
        _AFTER[after](model, optimizer)
        _train(model, optimizer)
        return zero_engine.full_state_dict(model)

    assert are_equal([*run(True).values()], [*run(False).values()])


def _interrupted_step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, interrupting: Interrupting
) -> list[Any]:
    try:
        with interrupting:
            losses = case.run(model, 7)
    except InterruptError:
        optimizer.zero_grad()
        losses = case.run(model, 7)
    found = [*losses, *gradients(optimizer)]
    optimizer.zero_grad()
    return found


def _group_of(transport: str) -> Group:
    if transport == "messages" and torch.get_default_device().type == "cpu":
        return parity.by_messages(patience_s=_PATIENCE_S)
    return Group.from_process_group(dist.new_group(), patience_s=_PATIENCE_S)


def _everyone(mine: Any) -> list[Any]:
    """What each rank says, over the run's own group, which nobody has parted from."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said
