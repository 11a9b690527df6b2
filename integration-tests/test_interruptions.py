"""What comes between forward, backward and step must leave the numbers as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_weights_of
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import StateError, memory_report
from zero_partition.seams import ShardedModel, find_sharded

NUM_STEPS = 4
UNDISTURBED: dict[tuple[int, int], tuple[list[float], dict[str, Any]]] = {}  # kept by each rank


# ---- Evaluation ----


@pytest.mark.parametrize(
    ("when", "stages"), parity.in_turn(["between-steps", "before-backward", "before-step"])
)
def test_evaluation_in_the_middle_of_training_changes_nothing(
    group: Group, when: str, stages: tuple[int, ...]
) -> None:
    """A validation loss is taken whenever the user likes; it takes slots from units in training."""
    for stage in stages:
        expected = _train_undisturbed(group, stage)
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage, window=2))
        losses = []
        for step in range(NUM_STEPS):
            loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
            losses.append(loss.item())
            if when == "before-backward":
                _evaluate_once(model, group)
            loss.backward()
            if when == "before-step":
                _evaluate_once(model, group)
            optimizer.step()
            optimizer.zero_grad()
            if when == "between-steps":
                _evaluate_once(model, group)
        _assert_undisturbed(model, losses, expected, f"stage {stage}")


def _evaluate_once(model: nn.Module, group: Group) -> None:
    """By the model and by a part of it, in memory that inference mode made, and in other."""
    model.eval()
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found.append(parity.loss_of(model, parity.batch(99, 0, group.rank)))
            model.blocks[2](torch.ones(1, parity.WIDTH))
    model.train()
    assert equal(*found)
    assert not torch.isnan(found[0])


# ---- Exceptions ----


class _AccidentError(KeyboardInterrupt):
    """What `except Exception` does not see."""


@pytest.mark.parametrize(
    ("where", "stages"),
    parity.in_turn(["before-block", "in-block", "after-block", "at-input"]),
)
def test_an_exception_in_forward_leaves_nothing_behind(
    group: Group, where: str, stages: tuple[int, ...]
) -> None:
    """The user catches it, skips the batch, and goes on; so must we."""

    def raise_it(*_: Any) -> None:
        raise _AccidentError

    for stage in stages:
        expected = _train_undisturbed(group, stage)
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage, window=2))
        losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
        bytes_before = _buffer_bytes(model)
        place = {
            "before-block": model.blocks[1].register_forward_pre_hook,
            "in-block": model.blocks[1].up.register_forward_pre_hook,
            "after-block": model.blocks[1].register_forward_hook,
            "at-input": model.register_forward_pre_hook,
        }[where]
        hook = place(raise_it)

        with pytest.raises(_AccidentError):
            parity.loss_of(model, parity.batch(50, 0, group.rank))
        hook.remove()
        if stage == 3:  # a gather ahead of use may be on its way
            assert all(unit.state.name != "UNSHARDED" for unit in find_sharded(model).units)

        losses += parity.run_steps(model, optimizer, range(2, NUM_STEPS), rank=group.rank)
        assert _buffer_bytes(model) == bytes_before
        _assert_undisturbed(model, losses, expected, f"stage {stage}")


@pytest.mark.parametrize(
    ("retry", "block", "stages"),
    [
        *parity.in_turn(["zero-grad", "forward"], [0, 1, 2])[::2],
        ("by-model", 0, (1, 3)),
        ("by-hand", 0, (0, 1, 2, 3)),
    ],
)
def test_an_exception_in_backward_leaves_nothing_behind(
    group: Group, block: int, retry: str, stages: tuple[int, ...]
) -> None:
    """Some units are reduced by then, and some are not: none is in the next step's gradients."""
    for stage in stages:
        expected = _train_undisturbed(group, stage)
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage, window=2))
        losses = parity.run_steps(model, optimizer, range(2), rank=group.rank)
        bytes_before = _buffer_bytes(model)
        _fail_in_backward(model, block, group)
        if stage == 3:
            _assert_soon_none_is_whole(find_sharded(model))
        if retry == "forward":  # zero_grad() comes after it, as in loops that begin with it
            parity.loss_of(model, parity.batch(51, 0, group.rank))
            assert not any(g.slot for g in find_sharded(model).reducer.gradients)
        if retry == "by-hand":
            for param in (*model.parameters(), *optimizer.param_groups[0]["params"]):
                param.grad = None
        else:
            (model if retry == "by-model" else optimizer).zero_grad()
        if retry not in ("by-model", "by-hand"):  # which may put units to rest at the next forward
            # The model's own may stay whole: a loss whose backward is to come may have read it.
            what = f"stage {stage}, after the accident"
            _assert_at_rest(find_sharded(model), what, but_for="(model)")

        losses += parity.run_steps(model, optimizer, range(2, NUM_STEPS), rank=group.rank)
        assert _buffer_bytes(model) == bytes_before
        _assert_undisturbed(model, losses, expected, f"stage {stage}")


def _assert_soon_none_is_whole(sharded: ShardedModel) -> None:
    """What was launched ahead is left to its next use. A device's thread of autograd tells late."""
    deadline = time.monotonic() + 5
    while any(unit.state.name == "UNSHARDED" for unit in sharded.units):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _fail_in_backward(model: nn.Module, block: int, group: Group) -> None:
    """Of a batch of its own, where the gradient of a block's output arrives."""

    def raise_it(grad: Tensor) -> None:
        raise _AccidentError

    hook = model.blocks[block].register_forward_hook(
        lambda module, args, output: output.register_hook(raise_it) and None
    )
    loss = parity.loss_of(model, parity.batch(50, 0, group.rank))
    hook.remove()
    with pytest.raises(_AccidentError):
        loss.backward()


def test_a_step_on_half_a_backward_is_refused_and_so_is_clipping(group: Group) -> None:
    """Some gradients would be this batch's and some would be missing."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    _fail_in_backward(model, 0, group)

    with pytest.raises(StateError, match=r"clip_grad_norm_\(\) after a backward that an exception"):
        zero_engine.clip_grad_norm_(model, 1.0)
    with pytest.raises(StateError, match=r"Call optimizer\.zero_grad\(\)"):
        optimizer.step()


# ---- Graphs that live longer ----


@pytest.mark.parametrize(
    ("order", "window", "stages"),
    parity.in_turn(
        ["first-in-first-out", "last-in-first-out", "summed", "one-graph-twice"], [1, 2, 5]
    )[::2],
)
def test_two_forwards_then_two_backwards(
    group: Group, order: str, window: int, stages: tuple[int, ...]
) -> None:
    """A siamese loss: units must return to their place for each graph, and again for a kept one."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(3):
            pair = [parity.loss_of(model, parity.batch(step, i, group.rank)) for i in range(2)]
            losses += [loss.item() for loss in pair]
            match order:
                case "summed":
                    pair = [pair[0] + pair[1]]
                case "last-in-first-out":
                    pair.reverse()
                case "one-graph-twice":
                    pair = [pair[1], 2 * pair[1]]
            with _summed_locally(model):
                for loss in pair[:-1]:
                    loss.backward(retain_graph=order == "one-graph-twice")
            parity.finish_step(pair[-1], optimizer)
        return losses

    _assert_same_as_plain(group, train, window=window, stages=stages)


@contextmanager
def _summed_locally(model: nn.Module) -> Iterator[None]:
    """One reduction per step, so that the result can be compared bit for bit."""
    is_ours = find_sharded(model) is not None
    with zero_engine.no_sync(model) if is_ours else nullcontext():
        yield


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_between_forward_and_backward_is_refused(group: Group, stage: int) -> None:
    """The gradients would be those of other weights than the graph was made with."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    loss = parity.loss_of(model, parity.batch(1, 0, group.rank))
    optimizer.step()

    with pytest.raises(StateError, match=r"changed between this graph's forward and.*run the forw"):
        loss.backward()
    optimizer.zero_grad()


def test_release_between_forward_and_backward_is_refused_by_backward(group: Group) -> None:
    """The graph's views point at memory that was given away."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    zero_engine.release_buffers(model)

    with pytest.raises(
        StateError, match=r"release_buffers\(\) was called between.*run the forward"
    ):
        loss.backward()
    optimizer.zero_grad()
    losses = parity.run_steps(model, optimizer, range(NUM_STEPS), rank=group.rank)
    _assert_undisturbed(model, losses, _train_undisturbed(group, 3), "after the refusal")


# ---- Recomputation, and modules used in unusual ways ----


class _Checkpointed(parity.Tiny):
    """Recomputes each block, or two blocks as one segment, in backward."""

    def __init__(self, use_reentrant: bool, per_segment: int) -> None:
        super().__init__()
        self.use_reentrant, self.per_segment = use_reentrant, per_segment

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions + self.frozen
        for start in range(0, len(self.blocks), self.per_segment):
            segment = nn.Sequential(*self.blocks[start : start + self.per_segment])
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant)
        for gate in self.gates:
            x = gate(x)
        x = x + self.lift(self.adapter(x.to(self.lift.weight.dtype))).float()
        return self.head(x) * self.scale


SEGMENTS = parity.in_turn([1, 3], [False, True], [1, 2, 3])


@pytest.mark.parametrize(
    ("window", "use_reentrant", "per_segment", "stages"), SEGMENTS[:6:2] + SEGMENTS[7::2]
)
def test_recomputing_activations_gives_the_same_numbers(
    group: Group, use_reentrant: bool, per_segment: int, window: int, stages: tuple[int, ...]
) -> None:
    """Units run forward again in the middle of backward, nested in one another's turn."""
    for stage in stages:
        model, optimizer = parity.build_sharded(
            group,
            ZeroConfig(stage, window=window),
            make=lambda: _Checkpointed(use_reentrant, per_segment),
        )
        losses = parity.run_steps(model, optimizer, range(NUM_STEPS), rank=group.rank)
        _assert_undisturbed(model, losses, _train_undisturbed(group, stage), f"stage {stage}")


class _Reusing(parity.Tiny):
    """Blocks called twice, and in another order."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 0, 2, 2, 1):
            x = self.blocks[index](x)
        return self.head(x)


@pytest.mark.parametrize(("window", "stages"), parity.in_turn([1, 2, 5]))
def test_a_block_may_be_called_twice(group: Group, window: int, stages: tuple[int, ...]) -> None:
    """Its gradient is complete only when backward has passed both calls."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return parity.run_steps(model, optimizer, range(3), rank=group.rank)

    _assert_same_as_plain(group, train, make=_Reusing, window=window, stages=stages)


# ---- What is compared ----


def _train_undisturbed(group: Group, stage: int) -> tuple[list[float], dict[str, Any]]:
    """The same for every test, whatever the transport."""
    if (group.world_size, stage) not in UNDISTURBED:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        losses = parity.run_steps(model, optimizer, range(NUM_STEPS), rank=group.rank)
        UNDISTURBED[group.world_size, stage] = losses, zero_engine.full_state_dict(model)
    return UNDISTURBED[group.world_size, stage]


def _assert_undisturbed(
    model: nn.Module,
    losses: list[float],
    expected: tuple[list[float], dict[str, Any]],
    what: str,
) -> None:
    assert losses == expected[0], f"{what}: {losses} != {expected[0]}"
    parity.assert_same_weights(zero_engine.full_state_dict(model), expected[1], what=what)
    _assert_at_rest(find_sharded(model), what)


def _assert_at_rest(sharded: ShardedModel, what: str, *, but_for: str = "") -> None:
    for unit in sharded.units:
        rests_sharded = sharded.placements.params is sharded.placements.params.SHARDED
        assert unit.depth == 0, f"{what}: {unit.name} believes that its forward runs"
        if rests_sharded and unit.name != but_for:
            assert unit.state.name == "SHARDED", f"{what}: {unit.name} is {unit.state.name}"


def _buffer_bytes(model: nn.Module) -> tuple[int, int]:
    report = memory_report(model)
    return report.slots_bytes, report.reduction_bytes


def _assert_same_as_plain(
    group: Group,
    train: Callable[[nn.Module, torch.optim.Optimizer], list[float]],
    *,
    make: Callable[[], nn.Module] = parity.Tiny,
    stages: tuple[int, ...] = parity.STAGES,
    **options: Any,
) -> None:
    """As one rank's autograd has it, averaged by hand. DDP cannot do all that is asked here."""
    plain, plain_optimizer = parity.build_with_optimizer(make=make)

    def average(*_: object) -> None:
        for param in plain.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=group.process_group)
                param.grad.div_(group.world_size)

    plain_optimizer.register_step_pre_hook(average)
    expected = train(plain, plain_optimizer)

    for stage in stages:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage, **options), make=make)
        assert train(model, optimizer) == expected, f"stage {stage}"
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")
