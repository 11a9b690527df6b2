"""Loops as people write them around a model: the numbers of plain torch, or an error that helps.

All ranks see one batch, so that the mean of two gradients is either, bit for bit.
"""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residual import Blocks
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import assert_trains_as_plain
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_partition import PartitionError, ShardedParamError, StateError
from zero_partition.run import gradients
from zero_partition.seams import find_sharded

WIDTH = 16
Optimizer = torch.optim.Optimizer


class _Net(Blocks):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class _Recursive(_Net):
    """Its own parameters are in use around, and again inside, a call of itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(super().forward(x)) * self.head.bias
        x = self(x, depth - 1) if depth else x
        return self.head(x)


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _steps(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = _mean_square,
    *,
    num: int = 3,
    backward: Callable[[Tensor], object] = Tensor.backward,
    then: Callable[[], object] = lambda: None,
) -> list[float]:
    losses = []
    for step in range(num):
        loss = loss_of(model, _x(step))
        backward(loss)
        losses.append(loss.item())
        then()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ---- Hooks ----


def _full_backward_hooks(model: nn.Module, optimizer: Optimizer) -> list[float]:
    seen: list[float] = []
    for block in model.blocks:
        block.register_full_backward_hook(
            lambda block, *_: seen.append(block.linear.weight.sum().item())
        )
        block.linear.register_full_backward_hook(
            lambda linear, grads, _: (grads[0] * linear.weight.mean(),)
        )
        block.register_full_backward_pre_hook(
            lambda block, grads: (grads[0] * block.norm.weight.sum(),)
        )
    return _steps(model, optimizer) + seen


def _hooks_on_every_module(model: nn.Module, optimizer: Optimizer) -> list[float]:
    seen: list[float] = []
    hooks = [
        torch_module.register_module_forward_pre_hook(
            lambda module, _: seen.extend(p.sum().item() for p in module.parameters(recurse=False))
        ),
        torch_module.register_module_full_backward_hook(
            lambda _, __, grads: seen.append(grads[0].sum().item())
        ),
    ]
    try:
        return _steps(model, optimizer) + seen
    finally:
        for hook in hooks:
            hook.remove()


def _hooks_on_parameters(model: nn.Module, optimizer: Optimizer) -> list[float]:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    return _steps(model, optimizer)


def _replaced_forwards(model: nn.Module, optimizer: Optimizer) -> list[float]:
    for block in model.blocks:

        def forward(self: nn.Module, x: Tensor, plain: Callable = block.forward) -> Tensor:
            return plain(x) * self.norm.weight.mean()

        block.forward = types.MethodType(forward, block)
    plain = model.forward
    model.forward = lambda x: plain(x) * 2
    return _steps(model, optimizer)


# ---- Autograd ----


def _saved_elsewhere(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Everything that autograd saves, weights too, lies in memory of the user's."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return _mean_square(model, x)

    return _steps(model, optimizer, loss_of)


def _anomaly_detection(model: nn.Module, optimizer: Optimizer) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            return _steps(model, optimizer)


def _backward_to_some(model: nn.Module, optimizer: Optimizer) -> list[float]:
    some = [*model.blocks[2].parameters(), model.head.bias]
    return _steps(model, optimizer, backward=lambda loss: loss.backward(inputs=some))


def _pipelined(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Two graphs joined by hand, with one reduction, which the last backward makes."""
    first = cut = torch.empty(0)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal first, cut
        first = model.blocks[1](model.blocks[0](x))
        cut = first.detach().requires_grad_()
        return model.head(model.blocks[3](model.blocks[2](cut))).square().mean()

    return _steps(model, optimizer, loss_of, then=lambda: first.backward(cut.grad))


def _attacked_input(model: nn.Module, optimizer: Optimizer) -> list[float]:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        _mean_square(model, x.requires_grad_()).backward()
        optimizer.zero_grad()
        assert x.grad is not None
        return _mean_square(model, x.detach() + 0.1 * x.grad.sign())

    return _steps(model, optimizer, loss_of)


def _other_order_each_step(model: nn.Module, optimizer: Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        for index in torch.randperm(4, generator=generator).tolist()[:3]:
            x = model.blocks[index](x)
        return model.head(x).square().mean()

    return _steps(model, optimizer, loss_of, num=6)


def _flattened_parameters(model: nn.Module, optimizer: Optimizer) -> list[float]:
    return _steps(
        model,
        optimizer,
        lambda m, x: _mean_square(m, x) + 0.1 * parameters_to_vector(m.parameters()).norm(),
    )


# ---- Threads ----


def _blocks_in_threads(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Each thread numbers its autograd nodes from zero."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            with ThreadPoolExecutor(1) as threads:
                x = threads.submit(block, x).result()
        return model.head(x).square().mean()

    return _steps(model, optimizer, loss_of)


def _branches_in_threads(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Autograd then goes through both at once, node by node."""

    def second(x: Tensor) -> Tensor:
        for _ in range(2):  # takes numbers of this thread's
            torch.ones(1, requires_grad=True).exp()
        return model.blocks[1](x)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(model.blocks[0], x).result()
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(second, x).result()
        return model.head(first + other).square().mean()

    return _steps(model, optimizer, loss_of)


def _backward_in_a_thread(model: nn.Module, optimizer: Optimizer) -> list[float]:
    with ThreadPoolExecutor(1) as threads:
        return _steps(
            model, optimizer, backward=lambda loss: threads.submit(loss.backward).result()
        )


# ---- Parameters and modules ----


def _frozen_by_turns(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """As a GAN does, whose halves are one module here; at times all that comes first is frozen."""
    losses = []
    for step in range(4):
        model.blocks[1].requires_grad_(step % 2 == 0)
        model.head.requires_grad_(step % 2 == 1)
        losses += _steps(model, optimizer, num=1)
    return losses


def _layers_removed(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = _steps(model, optimizer)
    del model.blocks[1]
    return losses + _steps(model, optimizer)


def _layers_reordered(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = _steps(model, optimizer)
    model.blocks = nn.ModuleList(reversed(list(model.blocks)))
    return losses + _steps(model, optimizer)


# ---- Optimizers ----


def _steps_without_gradients(model: nn.Module, optimizer: Optimizer) -> list[float]:
    optimizer.step()
    losses = _steps(model, optimizer)
    optimizer.step()
    return losses + _steps(model, optimizer)


def _gradients_by_hand(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Without a backward, in place of what one left, and before one, which adds to them."""
    for when in ("alone", "after", "before"):
        if when == "after":
            _mean_square(model, _x(0)).backward()
        for param in model.parameters():
            param.grad = torch.full(param.shape, 0.1)
        if when == "before":
            _mean_square(model, _x(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _steps(model, optimizer)


def _gradients_replaced(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Between two backwards: the second adds to what the user has put there."""
    losses = []
    for step in range(3):
        for half in range(2):
            loss = _mean_square(model, _x(2 * step + half))
            loss.backward()
            losses.append(loss.item())
            for param in optimizer.param_groups[0]["params"]:
                param.grad = None if param.grad is None else param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _gradients_scaled_in_backward(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """By the hook of a parameter whose gradient comes last, when others' have been added."""
    losses = []
    for step in range(3):
        for half in range(2):
            loss = _mean_square(model, _x(2 * step + half))

            def halve(_: Tensor, earlier: Tensor | None = model.head.bias.grad) -> None:
                if earlier is not None:
                    earlier.mul_(0.5)

            hook = model.blocks[0].linear.weight.register_hook(halve)
            loss.backward()
            hook.remove()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


LOOPS: dict[str, Callable[[nn.Module, Optimizer], list[float]]] = {
    loop.__name__.strip("_").replace("_", "-"): loop
    for loop in (
        *(_full_backward_hooks, _hooks_on_every_module, _hooks_on_parameters, _replaced_forwards),
        *(_saved_elsewhere, _anomaly_detection, _backward_to_some, _pipelined, _attacked_input),
        *(_other_order_each_step, _flattened_parameters),
        *(_blocks_in_threads, _branches_in_threads, _backward_in_a_thread),
        *(_frozen_by_turns, _layers_removed, _layers_reordered),
        *(_gradients_by_hand, _gradients_replaced, _gradients_scaled_in_backward),
        _steps_without_gradients,
    )
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("turn", "loop"), list(enumerate(LOOPS)))
def test_loops_train_as_in_plain_torch(group: Group, turn: int, loop: str) -> None:
    """A loop that works without us is not to be written anew."""
    configs = [ZeroConfig(stage, window=2) for stage in (turn % 2 * 2, 3)]
    merged = zero_engine.ZeroConfig(1 + turn % 3)  # small modules in one unit
    assert_trains_as_plain(group, _Net, LOOPS[loop], *configs, merged)


def test_a_gradient_that_is_scaled_within_a_backward_is_scaled_whole(group: Group) -> None:
    """Also where it was taken from `param.grad`, and others of its unit are to come."""
    with mock.patch.object(gradients, "MAX_WAITING", 1):
        loop = _gradients_scaled_in_backward
        assert_trains_as_plain(group, _Net, loop, zero_engine.ZeroConfig(2))


@pytest.mark.parametrize("window", [1, 3])
def test_a_unit_stays_whole_until_the_outermost_of_its_calls_ends(
    group: Group, window: int
) -> None:
    """In forward, and in backward, where calls inside it are complete before it is."""
    config = ZeroConfig(3, window=window)
    ((model, _),) = assert_trains_as_plain(group, _Recursive, _steps, config)
    assert find_sharded(model).outside.num_gathers == 0  # whole from the outer call's begin to end


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_steps_in_backward_is_told_where_gradients_are(
    group: Group, stage: int
) -> None:
    """It would find no gradient and train nothing, or this rank's alone and train wrongly."""
    model, optimizer = _sharded(group, stage)
    expected = _steps(model, optimizer)
    model, optimizer = _sharded(group, stage)
    own = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: own[p].step()) for p in own]
    with pytest.raises(StateError, match=r"whose gradient is sharded(?s:.*)let it step after"):
        _mean_square(model, _x(0)).backward()
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    seen: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.append)  # who only looks is let be

    assert _steps(model, optimizer) == expected
    assert len(seen) == 3 * len(own)


# ---- Refused, by name ----


def _sharded(group: Group, stage: int) -> tuple[nn.Module, Optimizer]:
    model = parity.build(_Net)
    optimizer = parity.adamw(model)
    return zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_set_by_hand_count_in_the_norm(group: Group, stage: int) -> None:
    """Clipping that overlooked them would let them through at any size."""
    model, _ = _sharded(group, stage)
    for param in model.parameters():
        param.grad = torch.full(param.shape, 0.1)
    total = zero_engine.clip_grad_norm_(model, 1.0)
    numel = sum(param.numel() for param in model.parameters())
    assert_close(total.item(), 0.1 * numel**0.5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_is_not_silently_missing_from_parameters(group: Group, stage: int) -> None:
    """`optimizer.state[param]` would be an empty dict, which also breaks the next state_dict()."""
    model, optimizer = _sharded(group, stage)
    _steps(model, optimizer)
    weight = model.head.weight
    for _ in range(2):
        for look in (
            lambda: optimizer.state[weight],
            lambda: weight in optimizer.state,
            lambda: optimizer.state.get(weight),
        ):
            with pytest.raises(StateError, match=r"parameter 'head\.weight'.*full_optimizer_state"):
                look()
        state = zero_engine.full_optimizer_state_dict(model)
        zero_engine.load_full_optimizer_state_dict(model, state)
    shard = optimizer.param_groups[0]["params"][-2]
    assert optimizer.state[shard]["exp_avg"].shape == shard.shape
    zero_engine.unshard(model, optimizer)
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape


def _shared_parameter(group: Group, stage: int) -> None:
    first, second = parity.build(_Net), parity.build(_Net)
    second.head = first.head
    zero_engine.shard(first, None, ZeroConfig(stage), group=group)
    with pytest.raises(PartitionError, match=r"'head\.weight' belongs to a sharded _Net already"):
        zero_engine.shard(second, None, ZeroConfig(stage), group=group)


def _lazy(group: Group, stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(PartitionError, match=r"parameter '1\.weight' of a lazy module.*forward"):
        zero_engine.shard(model, None, ZeroConfig(stage), group=group)
    with pytest.raises(PartitionError, match=r"parameter '1\.weight' of a lazy module.*forward"):
        zero_engine.plan(model, ZeroConfig(stage), world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PartitionError, match=r"parameter '1\.weight' of a lazy module.*forward"):
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    model(torch.ones(1, 4))
    zero_engine.shard(model, None, ZeroConfig(stage), group=group)


def _buffer_of_a_parameter(group: Group, stage: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("row", model.weight.data[0])
    with pytest.raises(PartitionError, match=r"buffer 'row' is a view of parameter 'weight'"):
        zero_engine.shard(model, None, ZeroConfig(stage), group=group)
    model.row = model.row.clone()
    zero_engine.shard(model, None, ZeroConfig(stage), group=group)


def _wrapped_in_ddp(group: Group, stage: int) -> None:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen[0].requires_grad_(False)
    zero_engine.shard(frozen, None, ZeroConfig(stage), group=group)
    for model in (_sharded(group, stage)[0], frozen):
        with pytest.raises(StateError, match=r"inside DistributedData.*call the model itself"):
            DistributedDataParallel(model, process_group=group.process_group)(_x(0))


@pytest.mark.parametrize("stage", parity.STAGES)
def test_what_would_train_wrongly_is_named(group: Group, stage: int) -> None:
    """Memory that two own would hold old values; two that reduce would reduce twice."""
    log = logging.getLogger("zero_engine")
    for level in (logging.INFO, logging.WARNING):  # a line about the plan comes first
        log.setLevel(level)
        for mistake in (_shared_parameter, _lazy, _buffer_of_a_parameter, _wrapped_in_ddp):
            mistake(group, stage)
    log.setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_cannot_be_done_at_rest_is_named(group: Group) -> None:
    """A vector of all parameters is the whole model, on every rank."""
    model, _ = _sharded(group, 3)
    _mean_square(model, _x(0))
    with (
        torch.no_grad(),
        pytest.raises(ShardedParamError, match=r"(?s)'blocks\.0\.norm\.weight'.*full_para"),
    ):
        parameters_to_vector(model.parameters())
    with pytest.raises(StateError, match=r"torch\.jit\.trace.*full_state_dict"):
        torch.jit.trace(model, _x(0))
    numel = sum(param.numel() for param in model.parameters())
    vector_to_parameters(torch.zeros(numel), model.parameters())
    with pytest.raises(StateError, match=r"its memory was replaced.*load_state_dict\(\)"):
        _mean_square(model, _x(0))


def test_a_module_that_writes_to_its_own_weight_is_named(group: Group) -> None:
    """`max_norm` does, in forward; what it writes into a slot is gone with the slot."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, WIDTH, max_norm=0.5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    model = parity.build(Table)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    with pytest.raises(StateError, match=r"parameter 'table\.weight': Embedding\.forward .*wrote"):
        model(torch.arange(4))
