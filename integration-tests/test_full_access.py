"""Values, gradients and optimizer state by parameter: plain torch's, at every stage."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zero_comm import Group
from zero_comm.testing import equal, on_cpu
from zero_engine import (
    full_grad,
    full_optimizer_state,
    full_param,
    local_grad,
    local_optimizer_state,
    local_param,
)
from zero_partition import StateError
from zero_partition.plan import Span

STAGES = parity.STAGES


def _plain(group: Group) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    model, optimizer = parity.build_with_optimizer()
    return model, optimizer, parity.as_ddp(model, group)


def _backward(model: nn.Module, step: int, rank: int) -> None:
    parity.loss_of(model, parity.batch(step, 0, rank)).backward()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(1, 2)
def test_what_is_read_is_what_plain_torch_has(group: Group, stage: int) -> None:
    """Tied, frozen, unused, odd and one-element parameters, of two dtypes."""
    plain, plain_optimizer, wrapped = _plain(group)
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(wrapped, plain_optimizer, range(2), rank=group.rank)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    _backward(wrapped, 2, group.rank)
    _backward(model, 2, group.rank)

    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, param), theirs in pairs:
        assert equal(full_param(param), theirs), name
        grad = full_grad(param)
        assert (grad is None) == (theirs.grad is None), name
        if grad is not None:
            assert grad.shape == theirs.grad.shape
            assert equal(grad, theirs.grad), name
        state = plain_optimizer.state.get(theirs)
        if not state:
            with pytest.raises(StateError, match=rf"no state for parameter '{name}'"):
                full_optimizer_state(param, "exp_avg")
            continue
        for key, value in state.items():
            assert equal(full_optimizer_state(param, key), value), (name, key)
        assert type(grad) is Tensor
    assert full_param(model.head.weight, to_rank=0) is None or group.rank == 0
    assert (full_grad(model.scale, to_rank=group.world_size - 1) is None) == (
        group.rank != group.world_size - 1
    )


@pytest.mark.parametrize(
    ("stage", "from_rank"), [*zip(STAGES, (None, 1) * 2, strict=True), (3, None)]
)
def test_what_is_written_is_trained_with(group: Group, stage: int, from_rank: int | None) -> None:
    """Values, gradients and moments: the next steps are those of plain torch given the same."""
    plain, plain_optimizer, wrapped = _plain(group)
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    curves: list[list[float]] = []
    mine = from_rank in (None, group.rank)
    for module, chosen in ((wrapped, plain_optimizer), (model, optimizer)):
        losses = parity.run_steps(module, chosen, range(2), rank=group.rank)
        is_ours = module is model
        for index, param in enumerate((model if is_ours else plain).parameters()):
            value = torch.linspace(-1, 1, param.numel()).view(param.shape) / (index + 1)
            if is_ours:
                zero_engine.set_full_param(param, value if mine else None, from_rank=from_rank)
            else:
                param.data.copy_(value)
        loss = parity.loss_of(module, parity.batch(2, 0, group.rank))
        losses.append(loss.item())  # of the values just written, not of copies made before
        loss.backward()
        for param in (model if is_ours else plain).parameters():
            value = torch.linspace(1, 2, param.numel()).view(param.shape)
            if is_ours:
                if not param.requires_grad:
                    with pytest.raises(StateError, match=r"'frozen' was frozen"):
                        zero_engine.set_full_grad(param, value)
                    continue
                zero_engine.set_full_grad(param, value if mine else None, from_rank=from_rank)
                if param is model.unused:
                    continue
                zero_engine.set_full_optimizer_state(
                    param, "exp_avg_sq", value if mine else None, from_rank=from_rank
                )
                zero_engine.set_full_optimizer_state(param, "step", 7)
            elif param.requires_grad:
                param.grad = value.to(param.dtype)
                if param is not plain.unused:
                    plain_optimizer.state[param]["exp_avg_sq"].copy_(value)
                    plain_optimizer.state[param]["step"].fill_(7)
        chosen.step()
        chosen.zero_grad()
        losses += parity.run_steps(module, chosen, range(3, 5), rank=group.rank)
        curves.append(losses)

    assert curves[0] == curves[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_local_parts_laid_end_to_end_are_the_whole(ranks, stage: int) -> None:
    """Shard-wise averages and statistics need no communication, if the parts are the parts."""
    parts = ranks(3).run(_parts, stage=stage)

    for name in parts[0][0]:
        whole, grad, moment = parts[0][1][name]
        assert equal(torch.cat([rank[0][name][0] for rank in parts]), whole.flatten())
        assert equal(torch.cat([rank[0][name][1] for rank in parts]), grad.flatten())
        assert equal(torch.cat([rank[0][name][2] for rank in parts]), moment.flatten())


def _parts(group: Group, stage: int) -> tuple[dict, dict]:
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    _backward(model, 1, group.rank)
    local, whole = {}, {}
    for name, param in model.named_parameters():
        if param.requires_grad and param is not model.unused:
            zero_engine.set_local_grad(param, local_grad(param) * 2)
            moment = local_optimizer_state(param, "exp_avg")
            zero_engine.set_local_optimizer_state(param, "exp_avg", moment + 1)
            if stage:
                zero_engine.set_local_param(param, local_param(param) + 1)
            else:
                with pytest.raises(StateError, match="whole on every rank at stage 0"):
                    zero_engine.set_local_param(param, local_param(param))
            local[name] = on_cpu((local_param(param), local_grad(param), moment + 1))
            whole[name] = on_cpu(
                (full_param(param), full_grad(param), full_optimizer_state(param, "exp_avg"))
            )
    optimizer.zero_grad()
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    return local, whole


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_there_from_backward_to_zero_grad(group: Group, stage: int) -> None:
    """Elsewhere there is nothing to return, and zeros or old values would mislead."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    weight = model.blocks[0].up.weight

    def assert_none() -> None:
        for ask in (full_grad, local_grad):
            with pytest.raises(
                StateError, match=r"no gradients now.*loss\.backward\(\).*zero_grad"
            ):
                ask(weight)

    assert_none()
    _backward(model, 0, group.rank)
    assert full_grad(weight) is not None
    assert full_grad(model.unused) is None
    assert full_grad(model.frozen) is None
    optimizer.zero_grad()
    assert_none()

    class Stop(Exception):  # noqa: N818
        pass

    def stop(_: Tensor) -> None:
        with pytest.raises(StateError, match="a backward is running"):
            full_grad(weight)
        raise Stop

    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    handle = model.blocks[1].up.weight.register_hook(stop)
    with pytest.raises(Stop):
        loss.backward()
    handle.remove()
    with pytest.raises(StateError, match="a backward that an exception ended"):
        full_grad(weight)
    optimizer.zero_grad()
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


@pytest.mark.parametrize("stage", STAGES)
def test_inside_no_sync_a_gradient_is_the_ranks_own(group: Group, stage: int) -> None:
    """Nothing has been averaged yet; after it, asking reduces."""
    alone = parity.build()
    _backward(alone, 0, group.rank)
    plain, _, wrapped = _plain(group)
    _backward(wrapped, 0, group.rank)
    model, _ = parity.build_sharded(group, ZeroConfig(stage))
    with zero_engine.no_sync(model):
        _backward(model, 0, group.rank)
        local = {name: full_grad(param) for name, param in model.named_parameters()}
        if stage:
            with pytest.raises(StateError, match="inside no_sync"):
                local_grad(model.scale)
    averaged = {name: full_grad(param) for name, param in model.named_parameters()}
    for name, param in alone.named_parameters():
        expected = dict(plain.named_parameters())[name].grad
        for ours, theirs in ((local[name], param.grad), (averaged[name], expected)):
            assert (ours is None) == (theirs is None), name
            assert ours is None or equal(ours, theirs), name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_gradient_is_written_where_none_has_come(
    group: Group, stage: int, is_inside: bool
) -> None:
    """Inside no_sync it is this rank's own, to which the next backward adds, as with DDP."""
    kept = []
    for is_ours in (True, False):
        model = parity.build(_HalfUsed)
        optimizer = parity.adamw(model)
        if is_ours:
            zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
            named, no_sync = model.named_parameters(), partial(zero_engine.no_sync, model)
            called, put = model, zero_engine.set_full_grad
        else:
            called = DistributedDataParallel(model, find_unused_parameters=True)
            named, no_sync, put = model.named_parameters(), called.no_sync, _put
        with no_sync() if is_inside else nullcontext():
            called(torch.ones(2, 4) * (group.rank + 1)).sum().backward()
            for _, param in named:
                own = group.rank + 1 if is_inside else 1
                put(param, torch.linspace(-1, 1, param.numel()).view(param.shape) * own)
        if is_inside:
            called(torch.ones(2, 4) * (group.rank + 2), uses_all=True).sum().backward()
        optimizer.step()
        kept.append([full_param(p) if is_ours else p.detach() for p in model.parameters()])

    for ours, theirs in zip(*kept, strict=True):
        assert equal(ours, theirs)


def _put(param: nn.Parameter, value: Tensor) -> None:
    param.grad = value


class _HalfUsed(nn.Module):
    """The second of its units may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, *, uses_all: bool = False) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if uses_all else x


@pytest.mark.parametrize("stage", STAGES)
def test_many_gradients_are_updated_in_one_pass(group: Group, stage: int) -> None:
    """The same as one after the other, by new tensors or in place."""
    plain, _, wrapped = _plain(group)
    model, _ = parity.build_sharded(group, ZeroConfig(stage))
    _backward(wrapped, 0, group.rank)
    _backward(model, 0, group.rank)
    for param in plain.parameters():
        if param.grad is not None:
            param.grad = param.grad / 2 if param.dim() > 1 else param.grad.mul_(3)

    def update(param: nn.Parameter, grad: Tensor) -> Tensor | None:
        if param.dim() > 1:
            return grad / 2
        grad.mul_(3)
        return None

    zero_engine.update_full_grads(model.parameters(), update, ahead=2)
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours = full_grad(param)
        assert ours is None or equal(ours, theirs.grad), name


def test_wrong_arguments_are_named_on_all_ranks(group: Group) -> None:
    """A rank that raises alone leaves the others waiting."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    up = model.blocks[0].up
    expected = "expected a Parameter of a sharded model, got"
    with pytest.raises(StateError, match=rf"{expected} a Parameter of shape \(3,\) "):
        full_param(nn.Parameter(torch.ones(3)))
    with pytest.raises(StateError, match=rf"{expected} 'blocks\.0\.up\.weight' that"):
        full_param("blocks.0.up.weight")
    with pytest.raises(
        StateError, match=r"'blocks\.0\.up\.weight'.*shape \(13, 6\), got shape \(2,\)"
    ):
        zero_engine.set_full_param(up.weight, torch.ones(2))
    wrong = torch.ones(2) if group.rank == 1 else None
    with pytest.raises(StateError, match=r"expected a tensor of shape \(13, 6\), got"):
        zero_engine.set_full_param(up.weight, wrong, from_rank=1)
    with pytest.raises(StateError, match=r"expected from_rank in 0\.\.1, got 2"):
        zero_engine.set_full_param(up.weight, torch.ones(13, 6), from_rank=2)
    with pytest.raises(StateError, match="no state for parameter"):
        full_optimizer_state(up.weight, "exp_avg")
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    with pytest.raises(StateError, match=r"expected one of \['exp_avg', .*got 'momentum'"):
        full_optimizer_state(up.weight, "momentum")
    with pytest.raises(StateError, match=r"expected this rank's part, a tensor of \d+ elements"):
        zero_engine.set_local_param(up.weight, torch.ones(1))
    inference = parity.build()
    zero_engine.shard(inference, None, ZeroConfig(3), group=group)
    with pytest.raises(StateError, match="without an optimizer"):
        full_optimizer_state(inference.scale, "exp_avg")


def test_a_parameter_in_use_is_not_written(group: Group) -> None:
    """Half of a forward would see the one value and half the other."""
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    bias = model.blocks[0].up.bias

    def write(*_: object) -> None:
        with pytest.raises(StateError, match="is in use by a forward or backward"):
            zero_engine.set_full_param(bias, torch.ones(13))
        with (
            pytest.raises(StateError, match="cannot be modified while"),
            zero_engine.GatheredParameters(bias, modifier_rank=0),
        ):
            pass
        with zero_engine.GatheredParameters(bias), nullcontext():
            assert bias.data.shape == (13,)

    model.blocks[0].up.register_forward_hook(write)
    _backward(model, 0, group.rank)


def test_the_status_of_a_parameter_says_where_it_lies(ranks) -> None:
    """What others hang on Parameter objects, without touching them."""
    spans = zip(*ranks(2).run(_status), strict=True)
    for position, (first, second) in enumerate(spans):
        assert first.start == 0 or not first.numel
        assert first.numel + second.numel == (13 * 6, 6)[position]


def _status(group: Group) -> list[Span]:
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    tied = zero_partition.parameter_status(model.embed.weight)
    assert tied.names == ("embed.weight", "head.weight")
    status = zero_partition.parameter_status(model.blocks[1].up.weight)
    assert (status.unit, status.shape, status.is_trainable) == ("blocks.1", (13, 6), True)
    assert not status.is_whole
    assert vars(model.blocks[1].up.weight).keys() <= {"_post_accumulate_grad_hooks"}
    return [status.part, zero_partition.parameter_status(model.blocks[1].down.bias).part]
