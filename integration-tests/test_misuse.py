"""What users do that no example shows: it works as in plain torch, or is told by name."""

from __future__ import annotations

import copy
import gc
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from torch import Tensor, nn
from training import Interrupt, assert_weights_of, train
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import ChainedOptimizer, ConfigError
from zero_partition import PartitionError, ShardedParamError, StateError
from zero_partition.seams import find_sharded

WIDTH = 8


def _blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def _loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def _sharded(
    group: Group, stage: int, make: Any = _blocks
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A plain model, the same one sharded, and its optimizer."""
    plain = parity.build(make)
    model = copy.deepcopy(plain)
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    return plain, model, optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_is_built_after_shard_is_told_so(group: Group, stage: int) -> None:
    """FSDP2's habit; here the optimizer steps shards, which `shard` gives it."""
    _, model, _ = _sharded(group, stage)
    late = torch.optim.AdamW(model.parameters(), lr=0.1)
    _loss_of(model, 0).backward()

    with pytest.raises(
        StateError, match=r"^This AdamW was built after shard\(\), .*optimizer\)\. \w+"
    ):
        late.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_closure_does_wrong_is_not_taken_for_a_late_optimizer(
    group: Group, stage: int
) -> None:
    """It runs within the step of the very optimizer that was sharded."""
    _, model, optimizer = _sharded(group, stage)

    def closure() -> Tensor:
        (loss := _loss_of(model, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    with pytest.raises(StateError, match=r"^\w+ was called on the gradient .*\. To clip, call"):
        optimizer.step(closure)


MODEL = r"expected a model, which is a torch.nn.Module, got a value of type AdamW; .* in order"
# Call -> what it says where its arguments are in another order, or of another kind.
MISTAKEN: dict[str, tuple[Any, type[Exception], str]] = {
    "save": (lambda m, o: zero_engine.save("run", o, m, step=1), StateError, MODEL),
    "save-first": (lambda m, o: zero_engine.save(m, o, step=1), StateError, MODEL),
    "load": (lambda m, o: zero_engine.load("run", o, m), StateError, MODEL),
    "load-first": (
        lambda m, o: zero_engine.load(m, "run"),
        ConfigError,
        r"load\(\): expected the path of a folder first, got a value of type Sequential$",
    ),
    "saver": (lambda m, o: zero_engine.Saver("run", o, m), StateError, MODEL),
    "saver-first": (
        zero_engine.Saver,
        ConfigError,
        r"Saver\(\): expected the path of a folder first, got a value of type Sequential$",
    ),
    "unshard": (lambda m, o: zero_engine.unshard(o, m), StateError, MODEL),
    "offload": (lambda m, o: zero_engine.offload_states(o), StateError, MODEL),
    "average": (lambda m, o: zero_engine.ShardedAverage(o, decay=0.9), StateError, MODEL),
    "no_sync": (lambda m, o: zero_engine.no_sync(2).__enter__(), StateError, "got 2; are the arg"),
    "clip": (
        lambda m, o: zero_engine.clip_grad_norm_(1.0, m),
        StateError,
        "expected a sharded model, its optimizer or some of its parameters first, got 1.0",
    ),
    "full_param": (lambda m, o: zero_engine.full_param(m), StateError, "got a value of type Seq"),
    "shard": (
        lambda m, o: zero_engine.shard(o, m),
        ConfigError,
        r"expected model to be a Module, got a value of type AdamW; call shard\(model, optimizer,",
    ),
    "field": (
        lambda m, o: ZeroConfig(3, offload_optimizer=True),
        ConfigError,
        "ZeroConfig.offload_optimizer: unknown; did you mean 'offload'",
    ),
    "dtype": (
        lambda m, o: zero_engine.Precision(params="bf16"),
        PartitionError,
        "expected a floating-point torch.dtype, such as torch.bfloat16, got 'bf16'",
    ),
}


@pytest.mark.parametrize("call", MISTAKEN)
def test_a_mistaken_argument_is_told_before_anything_is_done(call: str) -> None:
    """Also that of the wrong place; the error shows no whole model or configuration."""
    _, model, optimizer = _sharded(Group.solo(), 3)
    act, error, text = MISTAKEN[call]
    with pytest.raises(error, match=text) as caught:
        act(model, optimizer)
    assert len(str(caught.value)) < 400

    _loss_of(model, 0).backward()
    optimizer.step()


# ---- Gradients ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_the_user_dropped_is_not_in_the_norm(group: Group, stage: int) -> None:
    """`param.grad = None` after backward leaves a parameter out of this step, clipping included."""
    plain, model, _ = _sharded(group, stage)
    for each in (plain, model):
        _loss_of(each, 0).backward()
        each[1].weight.grad = None
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    assert_close(zero_engine.clip_grad_norm_(model, 0.1), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameters_grad_says_whether_the_optimizer_has_one(group: Group, stage: int) -> None:
    """A backward that does not reach a parameter leaves what the user did to its gradient."""
    _, model, optimizer = _sharded(group, stage)
    _loss_of(model, 0).backward()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = None
    model[0](torch.ones(2, WIDTH)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


@pytest.mark.parametrize("stage", parity.STAGES)
def test_gradients_made_zero_between_micro_batches_are_not_in_the_sum(
    group: Group, stage: int
) -> None:
    """`zero_grad(set_to_none=False)` inside no_sync(), then a batch that counts."""
    plain, model, optimizer = _sharded(group, stage)
    for step in range(2):
        with zero_engine.no_sync(model):
            _loss_of(model, 2 * step).backward()
        optimizer.zero_grad(set_to_none=False)
        _loss_of(model, 2 * step + 1).backward()
        plain.zero_grad()
        _loss_of(plain, 2 * step + 1).backward()
        for param, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(zero_engine.full_grad(param), its.grad)
        optimizer.zero_grad()


def test_a_gradient_that_is_dropped_while_it_is_reduced_stays_dropped(group: Group) -> None:
    """By a hook, at stage 0, where the next backward adds to what is there."""
    plain, model, _ = _sharded(group, 0)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            last = each[2].weight

            def drop(_: Tensor, last: nn.Parameter = last) -> None:
                last.grad = None

            hook = each[1].weight.register_hook(drop)  # the last layer's is on its way
            _loss_of(each, step).backward()
            hook.remove()
            assert last.grad is None
            _loss_of(each, step).backward()
        for param, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(param.grad, its.grad)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_before", [0, 1])
def test_gradients_that_a_failed_backward_takes_along_are_told_of(
    group: Group, stage: int, num_before: int
) -> None:
    """At stage 0 they stay, as in plain torch. Above it a part may be reduced, and all go."""
    _, model, _ = _sharded(group, stage)
    for step in range(num_before):
        _loss_of(model, step).backward()
    with pytest.raises(KeyError, match="interrupted"):
        model[1:](Interrupt.apply(model[0](torch.ones(4, WIDTH)))).sum().backward()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _loss_of(model, 1)
    told = [each for each in warned if "accumulated since zero_grad()" in str(each.message)]
    assert len(told) == (num_before and stage > 0)


@pytest.mark.parametrize("stage", range(4))
def test_a_frozen_part_is_called_without_a_graph_and_then_in_one(group: Group, stage: int) -> None:
    """As a frozen encoder is, of a batch and of prompts that train: the first call has no graph."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        encoder, prompts, head = model
        return head(encoder(x) + encoder(prompts(x))).square().mean()

    def make() -> nn.Module:
        model = _blocks()
        model[0].requires_grad_(False)
        return model

    plain = parity.build(make)
    expected = train(plain, parity.adamw(plain), loss_of, num_steps=3)
    model = parity.build(make)
    optimizer = parity.adamw(model)
    config = ZeroConfig(stage, min_unit_bytes=0)
    zero_engine.shard(model, optimizer, config, group=group)
    assert train(model, optimizer, loss_of, num_steps=3) == expected


class _Replaces(parity.PerParameter):
    """Plain descent that puts the new values into memory of its own."""

    needs_cut = "flat"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        param.data = param.data - group["lr"] * grad


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_may_put_its_own_memory_in_place(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """The next forward, and what is gathered, have its values."""
    plain = parity.build(_blocks)
    model = copy.deepcopy(plain)
    optimizer = _Replaces(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    expected = train(plain, _Replaces(plain.parameters(), lr=0.1), _loss_of, num_steps=3)
    assert train(model, optimizer, _loss_of, num_steps=3) == expected
    for param, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(zero_engine.full_param(param), its.detach())
    zero_engine.save(tmp_path, model, optimizer, step=3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_is_added_without_a_forward_is_no_shard_yet(
    group: Group, stage: int
) -> None:
    """A step would train it whole, on each rank alone."""
    _, model, optimizer = _sharded(group, stage)
    _loss_of(model, 0).backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(StateError, match=r"param group 1 .* shape \(3,\) that is no shard"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_group_with_a_parameter_of_no_model_is_refused_and_the_model_stays_sharded(
    group: Group, tmp_path: Path, stage: int
) -> None:
    """The next forward finds it, before it shards the model anew."""
    plain, model, optimizer = _sharded(group, stage)
    expected = train(plain, parity.adamw(plain), _loss_of, num_steps=3)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    foreign = r"param group 1 of the AdamW: parameter 0 of shape \(3,\) is not in .*ModuleList"
    for call in (
        lambda: _loss_of(model, 0),
        lambda: _loss_of(model, 1),
        lambda: zero_engine.save(tmp_path, model, optimizer, step=0),
        lambda: zero_engine.full_optimizer_state_dict(model),
        lambda: zero_engine.load_full_optimizer_state_dict(model, {}),
    ):
        with pytest.raises(PartitionError, match=foreign):
            call()
    del optimizer.param_groups[1]
    assert train(model, optimizer, _loss_of, num_steps=3) == expected
    for param, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(zero_engine.full_param(param), its.detach())


def test_trainable_parameters_that_no_optimizer_has_are_named(
    group: Group,
) -> None:
    """DDP gives them gradients, which count in clipping; nothing said that they do not train."""
    model = parity.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters())
    said: list[str] = []
    logger = logging.getLogger("zero_partition")
    logger.addFilter(kept := lambda record: bool(said.append(record.getMessage())) or True)
    try:
        zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)
    finally:
        logger.removeFilter(kept)
    named = [text for text in said if "1 of 3 trainable parameters" in text]
    assert len(named) == (group.rank == 0)
    assert all("no param group of the AdamW: 1.weight." in text for text in named)


class _Pauses(parity.PerParameter):
    """Plain descent that thinks for a while between the closure and the write."""

    needs_cut = "flat"
    pause_s = 0.0

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        time.sleep(self.pause_s)
        param.add_(grad, alpha=-group["lr"])


def test_what_a_closure_reads_is_not_taken_for_what_the_step_writes(group: Group) -> None:
    """Its forward reads the old values; peers that go on must wait for the new ones."""
    plain, model = parity.build(_blocks), parity.build(_blocks)
    for each in (plain, model):
        optimizer = _Pauses(each.parameters(), lr=0.1)
        if each is model:
            zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
            optimizer.pause_s = 0.1 * group.rank

        def closure(each: nn.Module = each) -> Tensor:
            loss = _loss_of(each, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_weights_of(model, plain, group=group, what="after the pause")


# ---- Forward ----


def test_a_forward_that_was_refused_has_ended(group: Group) -> None:
    """Later uses of a parameter outside forward must not wait for ranks that never come."""
    _, model, _ = _sharded(group, 3)
    model.late = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"late\.weight"):
        model(torch.ones(1, WIDTH))
    del model.late
    with pytest.raises(ShardedParamError), torch.no_grad():
        model[0].weight.sum()
    model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with pytest.raises(StateError):
        model(torch.ones(1, WIDTH))
    assert not find_sharded(model).forwards


class _StepsInside(nn.Module):
    """A training step that somebody calls as the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = _blocks()

    def forward(self, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(2):
            loss = self.blocks(x * self.scale).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_that_is_added_after_shard_is_named(group: Group, stage: int) -> None:
    """Its parameter is in the model, and was said to be in none, with advice on two models."""
    _, model, optimizer = _sharded(group, stage)
    model.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": [*model[3].parameters()]})

    with pytest.raises(
        (PartitionError, StateError), match=r"'3\.weight'.* after shard\(\)"
    ) as caught:
        _loss_of(model, 0).backward()
        optimizer.step()
    assert "two models" not in str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_inside_a_forward_is_right_or_refused(group: Group, stage: int) -> None:
    """At stage 3 what is whole meanwhile would stay as it was before the step."""
    plain, model, optimizer = _sharded(group, stage, _StepsInside)
    x = torch.ones(2, WIDTH)
    if stage == 3:
        with pytest.raises(StateError, match="called while a forward is running"):
            model(x, optimizer)
        return
    assert model(x, optimizer).equal(plain(x, parity.adamw(plain)))


class _GivesSparse(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.eye(2).to_sparse()


def test_a_unit_may_return_a_sparse_tensor(group: Group) -> None:
    """Its outputs are looked at for views of parameters, and this one has no memory of its own."""
    _, model, _ = _sharded(group, 3, lambda: _GivesSparse(WIDTH, WIDTH))
    assert equal(model(torch.ones(1, WIDTH))[1].to_dense(), torch.eye(2))


# ---- Loading, sharding, undoing ----


@pytest.mark.parametrize("stage", [0, 3])
def test_a_value_that_cannot_be_read_is_an_error_of_its_own_name(group: Group, stage: int) -> None:
    """As in plain torch, which loads the others and says which failed."""
    _, model, _ = _sharded(group, stage)
    state = parity.build(_blocks, seed=7).state_dict()
    expected = {key: value.clone() for key, value in state.items()}
    state["1.bias"] = state["1.bias"].to("meta")
    expected["1.bias"] = parity.build(_blocks).state_dict()["1.bias"]
    with pytest.raises(RuntimeError, match=r"1\.bias.*meta tensor"):
        model.load_state_dict(state)
    full = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(full, expected, what="all but one")


class _Remembers(parity.PerParameter):
    """Keeps the last two gradients of each parameter in a list."""

    needs_cut = "flat"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        state["history"] = [*state.get("history", ())[-1:], grad.clone()]
        param.add_(sum(state["history"]), alpha=-group["lr"])


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_with_nothing_to_train_is_refused(stage: int) -> None:
    """Its steps would do nothing, and losses that do not fall say so too late."""
    model = _blocks().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(PartitionError, match=r"AdamW over \d+ parameters, none of which requires"):
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=Group.solo())


def test_state_that_hides_tensors_in_a_list_is_refused(group: Group) -> None:
    """Half of it would be a whole tensor's, half a shard's."""
    model = _blocks()
    optimizer = _Remembers(model.parameters(), lr=0.1)
    _loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(PartitionError, match=r"'0\.weight': optimizer state 'history' is a list"):
        zero_engine.shard(model, optimizer, ZeroConfig(2), group=group)


@pytest.mark.parametrize("stage", [1, 3])
def test_chained_optimizers_keep_their_state_when_sharding_is_undone(
    group: Group, stage: int
) -> None:
    """Momentum that starts again from zero is another training."""

    def chained(model: nn.Sequential) -> ChainedOptimizer:
        return ChainedOptimizer(
            torch.optim.AdamW(model[:2].parameters(), lr=1e-2),
            torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9),
        )

    plain, model = parity.build(_blocks), parity.build(_blocks)
    theirs = chained(plain)
    expected = train(plain, theirs, _loss_of, num_steps=2)
    optimizer = chained(model)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    assert train(model, optimizer, _loss_of, num_steps=2) == expected
    zero_engine.unshard(model, optimizer)
    assert train(model, optimizer, _loss_of, num_steps=2) == train(
        plain, theirs, _loss_of, num_steps=2
    )


class _Watched(nn.Module):
    """A loss that uses a parameter of the model."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).square().mean()


def test_what_is_registered_again_after_unshard_is_gathered_ahead_again(group: Group) -> None:
    """Another sharding of the same model is another model; what was known of the first is gone."""
    model, other, loss = _blocks(), _blocks(), _Watched()
    for each in (model, other):
        zero_engine.shard(each, None, ZeroConfig(3), group=group)
    for _ in range(2):
        for each in (model, other):
            zero_partition.register_external_parameter(loss, each[1].weight)
        assert len(loss._forward_pre_hooks) == 2
        zero_engine.unshard(model)
        assert len(loss._forward_pre_hooks) == 1
        zero_engine.shard(model, None, ZeroConfig(3), group=group)
    zero_partition.register_external_parameter(loss, model[1].weight)
    launched = find_sharded(model).outside.num_gathers
    loss(model(torch.ones(1, WIDTH)), model[1].weight)
    assert find_sharded(model).outside.num_gathers == launched + 1
    zero_partition.unregister_external_parameter(loss, model[1].weight)
    zero_partition.unregister_external_parameter(loss, other[1].weight)
    assert not loss._forward_pre_hooks


def test_a_model_that_is_deleted_leaves_no_hook_and_its_parameters_say_so(group: Group) -> None:
    """A loss serves the next model; who kept a parameter alone has a stand-in without values."""
    model, loss = _blocks(), _Watched()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    param = model[1].weight
    zero_partition.register_external_parameter(loss, param)
    del model
    gc.collect()
    assert not loss._forward_pre_hooks
    loss(torch.ones(1, WIDTH), torch.ones(WIDTH, WIDTH))
    for use in (zero_partition.full_param, torch.sum):
        with pytest.raises(StateError, match=r"'1\.weight'.*kept its values was deleted"):
            use(param)
    assert "was deleted" in repr(param)  # a debugger prints it, and must not fail


CALLS: dict[str, Any] = {
    "memory_report": zero_engine.memory_report,
    "no_sync": zero_engine.no_sync,
    "release_buffers": zero_engine.release_buffers,
    "full_state_dict": zero_engine.full_state_dict,
    "clip_grad_norm_": lambda model: zero_engine.clip_grad_norm_(model, 1.0),
    "unshard": zero_engine.unshard,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_plain_model_names_itself(name: str) -> None:
    """A traceback has the line, but a log may have the message alone."""
    with pytest.raises(StateError, match=rf"^{name}\(\): expected a model .* got a Linear"):
        CALLS[name](nn.Linear(2, 2))


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_given_no_values_says_who_has_them(
    group: Group, stage: int, is_strict: bool
) -> None:
    """`full_state_dict` returns them on rank 0; without an error the others kept their shards."""
    _, model, _ = _sharded(group, stage)
    whole = zero_engine.full_state_dict(model)
    if group.rank == 0:
        assert not model.load_state_dict(whole, strict=is_strict).missing_keys
        return
    with pytest.raises(RuntimeError, match=r"rank 1 was given no values; full_state_dict\(\)"):
        model.load_state_dict(whole, strict=is_strict)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_may_be_given_no_values_where_one_rank_writes_them(group: Group, stage: int) -> None:
    """`GatheredParameters` sends what that rank has loaded."""
    _, model, _ = _sharded(group, stage)
    values = {name: torch.full(each.shape, 2.0) for name, each in model.named_parameters()}
    with zero_partition.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict(values if group.rank == 0 else {}, strict=False)
    loaded = zero_engine.full_state_dict(model)
    assert all(equal(loaded[name], values[name]) for name in loaded)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_of_one_module_is_given_its_values(group: Group, stage: int) -> None:
    """All of its parameters are of the module that `load_state_dict` begins with."""
    _, model, _ = _sharded(group, stage, lambda: nn.Linear(WIDTH, WIDTH))
    values = {name: torch.full(each.shape, 2.0) for name, each in model.named_parameters()}
    assert not model.load_state_dict(values).missing_keys
    loaded = zero_engine.full_state_dict(model)
    assert all(equal(loaded[name], values[name]) for name in loaded)
