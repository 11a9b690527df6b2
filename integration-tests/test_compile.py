"""torch.compile of blocks, before or after shard(): DDP's numbers, and compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import StateError
from zero_partition.seams import find_sharded

# torch.compile's own, when it looks at tensors that are no leaves
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NUM_STEPS = 5
SETTLED = 2  # steps after which nothing may be compiled any more


# ---- What is compiled, and when ----


def _compile_in_place(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(fullgraph=True, **options)  # so that a graph break of ours would raise
    return model


def _compile_by_wrapping(model: nn.Module, **options: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True, **options)
    return model


def _compile_forward(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, **options)
    return model


def _compile_model_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def _compile_model_by_wrapping(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)


BLOCKS: Final = (_compile_in_place, _compile_by_wrapping, _compile_forward)
MODELS: Final = (_compile_model_in_place, _compile_model_by_wrapping)
Compile = Callable[..., nn.Module]
_OF_MODE: Final = pytest.mark.cpu_only("dynamo cannot trace the tests' mode of default devices")


@pytest.mark.parametrize(
    "how",
    [*BLOCKS, *(pytest.param(how, marks=_OF_MODE) for how in MODELS)],
    ids=lambda f: f.__name__.strip("_"),
)
@pytest.mark.ranks(timeout_s=60.0)
@pytest.mark.drawn(2)
def test_what_is_compiled_before_shard_trains_as_under_ddp(group: Group, how: Compile) -> None:
    """Parameters change their memory at every use; compiled code must not take it for news."""
    stages = {_compile_in_place: (0, 2, 3), _compile_by_wrapping: (1,)}
    _compare(group, how, stages=stages.get(how, (3,)), is_before=True)


@pytest.mark.parametrize("how", (_compile_in_place, MODELS[1]), ids=lambda f: f.__name__.strip("_"))
@pytest.mark.ranks(timeout_s=60.0)
def test_what_is_compiled_after_shard_trains_as_under_ddp(group: Group, how: Compile) -> None:
    """`compile()` replaces what a call does, and must not leave out our part in it."""
    _compare(group, how, stages=(3,), is_before=False)


def _compare(
    group: Group,
    compile_it: Compile,
    stages: tuple[int, ...],
    is_before: bool,
    backend: str = "aot_eager",
) -> None:
    plain = compile_it(parity.build(parity.tiny_float32), backend=backend)
    ddp = parity.as_ddp(plain, group)
    expected = parity.run_steps(ddp, _optimizer(plain), range(NUM_STEPS), rank=group.rank)
    for stage in stages:
        losses, weights = _train(group, compile_it, stage, is_before, backend)
        assert losses == expected, f"stage {stage}"
        if group.rank == 0:
            for ours, theirs in zip(weights.values(), plain.state_dict().values(), strict=True):
                assert equal(ours, theirs), f"stage {stage}"


def _train(
    group: Group, compile_it: Compile, stage: int, is_before: bool, backend: str
) -> tuple[list[float], dict[str, Any]]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = parity.build(parity.tiny_float32)
    if is_before:
        model = compile_it(model, backend=counter)
    optimizer = _optimizer(model)
    sharded, _ = zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    if not is_before:
        model = compile_it(model, backend=counter)
    losses = parity.run_steps(model, optimizer, range(SETTLED), rank=group.rank)
    num_compiled = _num_compiled(counter)
    losses += parity.run_steps(model, optimizer, range(SETTLED, NUM_STEPS), rank=group.rank)
    assert counter.frame_count > 0, "nothing was compiled"
    assert _num_compiled(counter) == num_compiled, f"compiled again: {dict(counters['stats'])}"
    torch._dynamo.reset()
    return losses, zero_engine.full_state_dict(sharded)


def _num_compiled(counter: CompileCounterWithBackend) -> tuple[int, int]:
    return counter.frame_count, counters["stats"]["unique_graphs"]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return parity.OPTIMIZERS["adamw"](parity.param_groups(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")  # inductor's own
@pytest.mark.ranks(timeout_s=280.0)
@pytest.mark.drawn(2)
def test_inductor_takes_parameters_where_they_are(group: Group) -> None:
    """Native code is made for strides and alignments; on others it copies, or is made again."""
    _compare(group, _compile_in_place, stages=(3,), is_before=True, backend="inductor")


# ---- What comes between ----


@pytest.mark.ranks(timeout_s=60.0)
def test_evaluation_and_accidents_leave_compiled_blocks_as_they_were(group: Group) -> None:
    """A guard on what is temporary (gradients, views, grad mode) would compile anew each time."""
    undisturbed = _compile_by_wrapping(parity.build(parity.tiny_float32), backend="aot_eager")
    optimizer = _optimizer(undisturbed)
    ddp = parity.as_ddp(undisturbed, group)
    expected = parity.run_steps(ddp, optimizer, range(NUM_STEPS), rank=group.rank)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = _compile_by_wrapping(parity.build(parity.tiny_float32), backend=counter)
    optimizer = _optimizer(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, window=2), group=group)
    losses = []
    for step in range(NUM_STEPS):
        _interrupt(model, group)
        loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
        loss.backward()
        with torch.no_grad():  # while guards stand in `param.grad`
            model.eval()
            assert not parity.loss_of(model, parity.batch(9, 0, group.rank)).isnan()
            model.train()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SETTLED:
            num_compiled = _num_compiled(counter)
    assert losses == expected
    assert _num_compiled(counter) == num_compiled
    torch._dynamo.reset()


def _interrupt(model: nn.Module, group: Group) -> None:
    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.gates[0].register_forward_pre_hook(raise_it)
    with pytest.raises(KeyboardInterrupt):
        parity.loss_of(model, parity.batch(0, 0, group.rank))
    hook.remove()
    for unit in find_sharded(model).units:
        assert unit.depth == 0
        assert unit.state.name != "UNSHARDED"


def test_a_shallow_copy_of_a_block_is_told_apart(group: Group) -> None:
    """It has our hooks, and not what makes its parameters whole."""
    import copy

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    shallow = copy.copy(model[1])
    with pytest.raises(StateError, match=r"unit '1'.*call the very module"):
        shallow(torch.ones(1, 4))
    x: Tensor = model(torch.ones(1, 4))
    assert not x.isnan().any()
