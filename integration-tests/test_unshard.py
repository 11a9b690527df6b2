"""What is left of us when we are done: nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import ConfigError
from zero_partition import StateError
from zero_partition.seams import find_sharded

NUM_STEPS = 2


@pytest.mark.parametrize("name", ["adamw", "adagrad", "sgd"])
def test_unshard_gives_back_what_plain_training_would_have_made(group: Group, name: str) -> None:
    """Weights, moments, param groups: the run goes on as if it had never been sharded."""
    plain, plain_optimizer = parity.build_with_optimizer(name)
    losses = parity.run_steps(
        parity.as_ddp(plain, group), plain_optimizer, range(NUM_STEPS), rank=group.rank
    )
    for stage in parity.STAGES:
        model, optimizer = parity.build_with_optimizer(name)
        before = _traces(model, optimizer)
        ids = [id(param) for param in model.parameters()]
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        assert losses == parity.run_steps(model, optimizer, range(NUM_STEPS), rank=group.rank)

        assert zero_engine.unshard(model, optimizer) == (model, optimizer)

        assert find_sharded(model) is None
        assert _traces(model, optimizer) == before, f"stage {stage}"
        assert [id(param) for param in model.parameters()] == ids
        parity.assert_same_weights(model.state_dict(), plain.state_dict(), what=f"stage {stage}")
        _assert_same_state(optimizer, plain_optimizer)
        pickle.dumps(model)
        again, _ = zero_engine.shard(copy.deepcopy(model), None, ZeroConfig(3), group=group)
        assert equal(
            parity.loss_of(again, parity.batch(9, 0, 0)),
            parity.loss_of(plain, parity.batch(9, 0, 0)),
        )


def _traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """How many hooks of every kind there are, and what stands in the objects' own dicts."""
    traces: dict[str, object] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            traces[f"{name}.{key}"] = len(value) if "_hooks" in key else key
    for name, param in model.named_parameters():
        traces[name] = (
            len(param._backward_hooks or ()),
            len(param._post_accumulate_grad_hooks or ()),
            param.is_contiguous(),
            param.untyped_storage().nbytes() == param.nbytes,
            sorted(vars(param)),
        )
    for key, value in vars(optimizer).items():
        traces[f"optimizer.{key}"] = len(value) if "_hooks" in key else key
    return traces


def _assert_same_state(optimizer: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert equal(ours["state"][index][key], value), f"{index} {key}"
            else:
                assert ours["state"][index][key] == value, f"{index} {key}"


def test_unshard_at_a_wrong_moment_is_refused(group: Group) -> None:
    """Graphs in the middle of a step have no place in a plain model."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    hook = model.blocks[1].register_forward_hook(lambda *_: zero_engine.unshard(model) and None)
    with pytest.raises(StateError, match=r"while the forward of unit.*between steps"):
        parity.loss_of(model, parity.batch(0, 0, group.rank))
    hook.remove()
    with pytest.raises(ConfigError, match="pass what shard"):
        zero_engine.unshard(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    parity.run_steps(model, optimizer, [1], rank=group.rank)
    loss = parity.loss_of(model, parity.batch(2, 0, group.rank))
    zero_engine.unshard(model, optimizer)
    with pytest.raises(StateError, match="run the forward again"):
        loss.backward()


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_gradients_that_wait_come_back_whole(group: Group, stage: int, in_no_sync: bool) -> None:
    """Or a step after `unshard()` would be one without them."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage), make=parity.tiny_float32)
    plain = parity.as_ddp(parity.build(parity.tiny_float32), group)
    with zero_engine.no_sync(model) if in_no_sync else nullcontext():
        parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    parity.loss_of(plain, parity.batch(0, 0, group.rank)).backward()
    zero_engine.unshard(model, optimizer)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None or not param.grad.any(), name
        else:
            assert type(param.grad) is torch.Tensor
            assert_close(param.grad, other.grad)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_deleted_model_leaves_nothing_of_ours_alive(group: Group, stage: int) -> None:
    """Our memory hangs on hooks and hooks on the model, in cycles that must be seen through."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.run_steps(model, optimizer, range(NUM_STEPS), rank=group.rank)
    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    traces = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(find_sharded(model))]
    del model, optimizer, loss
    gc.collect()
    assert [trace() for trace in traces] == [None] * 3
