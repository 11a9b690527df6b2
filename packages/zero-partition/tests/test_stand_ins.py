"""Stand-ins cannot be mistaken for data: of parameters, of gradients, and of what is parked."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_partition import StateError, clip_grad_norm_, partition
from zero_partition.plan import STAGES, Stage
from zero_partition.seams import offload_states, reload_states


def _partition(
    group: Group, stage: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a backward."""
    model = nn.Sequential(nn.Linear(3, 2, dtype=dtype), nn.Linear(2, 3, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    placements = STAGES[Stage(stage)]
    partition(model, optimizer, group=group, placements=placements, min_unit_bytes=0)
    model(torch.full((2, 3), float(group.rank + 1), dtype=dtype)).sum().backward()
    return model, optimizer


# ---- A parameter whose values are shards ----


def test_a_sharded_parameter_has_its_shape_and_no_bytes_of_another(group: Group) -> None:
    """It never shows another unit's values; values drawn at random would be lost without a word."""
    for dtype in (torch.float32, torch.bfloat16):
        params = list(_partition(group, 3, dtype)[0].parameters())
        assert [param.shape for param in params] == [(2, 3), (2,), (3, 2), (3,)]
        assert all(param.dtype is dtype for param in params)
        assert all(p.untyped_storage().nbytes() == dtype.itemsize for p in params)
        # Detectors of tied weights compare addresses.
        assert len({param.data_ptr() for param in params}) == len(params)
        for write in (nn.init.normal_, nn.init.ones_):
            with pytest.raises(StateError, match="GatheredParameters"):
                write(params[0])


# ---- Gradients ----

USES_OF_VALUES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "add": lambda p: p.grad + 1,
    "norm": lambda p: p.grad.norm(),
    "mul by elements": lambda p: p.grad.mul_(torch.ones(2, 3)),
    "add in place": lambda p: p.grad.add_(1),
    "tolist": lambda p: p.grad.tolist(),
    "step": lambda p: torch.optim.SGD([p], lr=1.0).step(),
}
NORMS: dict[str, Callable[[Tensor], Any]] = {
    "vector_norm": torch.linalg.vector_norm,
    "foreach_norm": lambda g: torch._foreach_norm([g]),
    "method": lambda g: g.norm(),
    "function": torch.norm,
}


def test_a_guard_refuses_every_use_of_values(group: Group) -> None:
    """A sharded gradient that reads as none would be a silent no-op."""
    for stage in (1, 2, 3):
        model, optimizer = _partition(group, stage)
        param = model[0].weight
        for name, use in USES_OF_VALUES.items():
            says = r"clip_grad_norm_|would write to parameter|was built after shard"
            with pytest.raises(StateError, match=says):
                use(param)
                raise AssertionError(name)
        guard = param.grad
        assert (guard.shape, guard.dtype, guard.numel(), guard.dim()) == ((2, 3), param.dtype, 6, 2)
        assert "sharded" in repr(guard)

        # What the optimizer has is this rank's part: an ordinary tensor, but for its norm.
        part = optimizer.param_groups[0]["params"][0].grad
        for name, norm in NORMS.items():
            with pytest.raises(StateError, match=f"rank {group.rank} of 2"):
                norm(part)
                raise AssertionError(name)
        before = part * 1
        assert type(before) is Tensor
        part.mul_(3)
        assert equal(part * 1, before * 3)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda g: g.mul_(0.5),
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(0.5)),
    "div_": lambda g: g.div_(4),
    "foreach_mul_": lambda g: torch._foreach_mul_([g], 3.0),
    "foreach_div_": lambda g: torch._foreach_div_([g], 3.0),
    "zero_": lambda g: g.zero_(),
    "foreach_zero_": lambda g: torch._foreach_zero_([g]),
    "requires_grad_": lambda g: g.requires_grad_(False),
    "detach_": lambda g: g.detach_(),
}


def test_an_edit_that_is_the_same_for_every_element_is_done_to_the_shard(group: Group) -> None:
    """Schedules of pipelines divide gradients by the number of micro-batches."""
    for stage, (name, edit) in itertools.product((1, 2, 3), EDITS.items()):
        model, optimizer = _partition(group, stage)
        param, shard = model[0].weight, optimizer.param_groups[0]["params"][0]
        expected = shard.grad.as_subclass(Tensor).clone()
        edit(expected)

        edit(param.grad)
        assert equal(shard.grad.as_subclass(Tensor), expected), (stage, name)
        param.grad *= 2
        param.grad /= 4
        assert equal(shard.grad.as_subclass(Tensor), expected / 2), (stage, name)


def test_alone_a_shard_is_the_whole_gradient() -> None:
    """With one rank there is nothing to refuse."""
    model, optimizer = _partition(Group.solo(), 3)

    grads = [param.grad for param in optimizer.param_groups[0]["params"]]
    norm = torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).norm()
    assert_close(clip_grad_norm_(model, 100.0), norm)


# ---- What is parked ----


class _Backup:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def allocate(self, sizes: Mapping[str, int]) -> None:
        pass

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:
        self.kept[key] = source.numpy().tobytes()
        source.fill_(0xFF)

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:
        into.copy_(torch.frombuffer(bytearray(self.kept[key]), dtype=torch.uint8))

    def close(self) -> None:
        self.kept = {}


USES_OF_PARKED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "out": lambda t: torch.add(torch.ones(2, 3), 1, out=t),
    "in place": lambda t: t.mul_(2),
    "index": lambda t: t[0],
    "numpy": lambda t: t.detach().numpy(),
    "data": lambda t: t.data,
    "foreach": lambda t: torch._foreach_norm([t]),
    "copy into another": lambda t: torch.zeros(2, 3).copy_(t),
    "linear": lambda t: nn.functional.linear(torch.ones(1, 3), t),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "to": lambda t: t.to(torch.float64),
    "item": lambda t: t.tolist(),
}


def test_a_parked_tensor_is_itself_and_raises_where_its_values_are_used() -> None:
    """Without it, a read of memory that is gone ends the process, or goes on with NaN.

    Optimizers, schedulers and reports ask for shapes, and look objects up by identity.
    """
    # At stage 0 parameters and momenta have their own shapes.
    model, optimizer = _partition(Group.solo(), 0)
    optimizer.step()
    weight = optimizer.param_groups[0]["params"][0]
    tensors = [weight, optimizer.state[weight]["momentum_buffer"]]
    expected, kinds = [each.detach().clone() for each in tensors], [type(each) for each in tensors]
    known = {tensor: index for index, tensor in enumerate(tensors)}

    offload_states(model, _Backup())
    for index, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        assert known[tensor] == index
        assert isinstance(tensor, kind)
        facts = (tensor.shape, tensor.dtype, tensor.numel(), tensor.nbytes)
        assert facts == (torch.Size([2, 3]), torch.float32, 6, 24)
        assert tensor.untyped_storage().nbytes() == 4
        assert "parked" in repr(tensor)
        for name, use in USES_OF_PARKED.items():
            with pytest.raises(StateError, match=r"reload_states\(model\)"):
                use(tensor)
                raise AssertionError(name)
    reload_states(model)
    assert [type(tensor) for tensor in tensors] == kinds
    assert all(map(equal, tensors, expected))
    assert weight.is_leaf
