"""What a user finds in a sharded model: never wrong numbers, and words where there is no number."""

from __future__ import annotations

import copy
import io
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import parity
import parking
import pytest
import safetensors.torch
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import assert_weights_of
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_partition import ShardedParamError, StateError


def _with_gradients(group: Group, stage: int, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    """A model after a backward, its optimizer, and what that one steps."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage), **options)
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    return model, optimizer, [p for entry in optimizer.param_groups for p in entry["params"]]


# ---- Parameters and gradients ----


def test_a_parameter_at_rest_keeps_its_face_and_holds_no_memory(group: Group) -> None:
    """Counters, printers and detectors of ties look at every parameter between steps."""
    plain = parity.build()
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)

    faces = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        for what in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(param, what) == getattr(faces[name], what), (name, what)
        assert param.numel() == faces[name].numel() and isinstance(param, nn.Parameter), name
        assert param.untyped_storage().nbytes() == param.element_size(), name
        with (
            torch.no_grad(),
            pytest.raises(ShardedParamError, match=rf"(?s)isnan\(\).*'{name}'.*full_param"),
        ):
            torch.isnan(param)
        assert f"{name!r}, shape {tuple(param.shape)}" in repr(param), name
        assert "sharded over" in repr(param)
    addresses = [param.data_ptr() for param in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert model.head.weight is model.embed.weight
    assert repr(model) == repr(plain)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_gradient_is_whole_or_refuses_every_use(group: Group, stage: int) -> None:
    """A gradient at stage 0; at the others a guard, never a silent None, nor one rank's part."""
    model, optimizer, shards = _with_gradients(group, stage)
    assert model.unused.grad is None
    assert model.frozen.grad is None
    weight = model.blocks[0].up.weight
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    if stage == 0:
        assert not torch.isnan(weight.grad).any()
        return
    given = [shard for shard in shards if shard.grad is not None]
    assert all(shard.grad.shape == shard.shape and shard.dim() == 1 for shard in given)
    assert len(given) == sum(p.requires_grad for p in model.parameters()) - 1  # all but `unused`
    sharded, clip = r"gradient is sharded.*optimizer\.param_groups", r"zero_engine\.clip_grad_norm_"
    for use, words in (
        (lambda: weight.grad + 1, sharded),
        (weight.grad.norm, clip),
        (lambda: weight.grad.mul_(weight), sharded),
        (weight.grad.tolist, sharded),
        (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), clip),
        (lambda: nn.utils.clip_grad_norm_(shards, 1.0), clip),
        (lambda: nn.utils.get_total_norm([shard.grad for shard in given]), clip),
        (lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1), r"or clip_grad_value_\(model"),
    ):
        with pytest.raises(StateError, match=words):
            use()
    nn.utils.clip_grad_value_(shards, 0.1)  # elementwise: right on shards
    assert all(s.grad.abs().max() <= 0.1 for s in given if s.numel())
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in (*model.parameters(), *shards))


@pytest.mark.ranks(1)
def test_torchs_clip_works_where_the_shard_is_everything(group: Group) -> None:
    """One rank is not a special case that has to be refused."""
    model, _, shards = _with_gradients(group, 2, make=parity.tiny_float32)

    theirs = nn.utils.clip_grad_norm_(shards, 1e9)

    ours = zero_engine.clip_grad_norm_(model, 1e9)
    assert_close(torch.as_tensor(theirs).float(), ours)


PARTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a group's": lambda _, optimizer: optimizer.param_groups[0]["params"],
    "the model's": lambda model, _: [model.blocks[0].up.weight, model.blocks[1].down.bias],
    "as they come": lambda model, _: model.blocks[1].parameters(),
    "a module": lambda model, _: model.blocks[2],
    "one": lambda model, _: model.blocks[2].up.weight,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_some_gradients_are_clipped_as_torchs_function_clips_them(group: Group, stage: int) -> None:
    """Each group with a norm of its own, or a part alone: the whole model's is another number."""
    for name, part in PARTS.items():
        model, optimizer, _ = _with_gradients(group, stage, make=parity.tiny_float32)
        expected = {n: zero_engine.full_grad(p) for n, p in model.named_parameters()}
        plain, its_optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
        for key, param in plain.named_parameters():
            param.grad = expected[key]
        chosen = part(plain, its_optimizer)
        chosen = chosen.parameters() if isinstance(chosen, nn.Module) else chosen
        theirs = nn.utils.clip_grad_norm_(chosen, 1e-3)

        ours = zero_engine.clip_grad_norm_(part(model, optimizer), 1e-3)

        assert_close(ours, theirs, msg=lambda m: f"{name}: {m}")  # noqa: B023
        for key, param in model.named_parameters():
            if (grad := zero_engine.full_grad(param)) is not None:
                assert_close(grad, plain.get_parameter(key).grad)
        zero_engine.clip_grad_value_(part(model, optimizer), 1e-5)
    with pytest.raises(StateError, match="expected parameters of one sharded model, got 0 of 0"):
        zero_engine.clip_grad_norm_([], 1.0)
    with pytest.raises(StateError, match="belongs to none"):
        zero_engine.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0)


def test_either_object_finds_the_gradients_to_clip(group: Group) -> None:
    """A trainer often has the optimizer and not the model."""
    for stage in parity.STAGES:
        model, optimizer, _ = _with_gradients(group, stage)
        whole = [zero_engine.full_grad(param) for param in model.parameters()]
        given = [grad.double() for grad in whole if grad is not None]
        for norm_type in (2.0, math.inf, 1, 3, 0.5, -1, -math.inf):
            expected = nn.utils.get_total_norm(given, norm_type)
            for either in (model, optimizer):
                norm = zero_engine.clip_grad_norm_(either, 1e9, norm_type=norm_type)
                assert_close(norm.double(), expected)
        for wrong in (0, math.nan):
            with pytest.raises(StateError, match="norm_type to be the order of a norm, such as 2"):
                zero_engine.clip_grad_norm_(model, 1.0, norm_type=wrong)


def test_an_optimizer_built_after_shard_is_told_apart(group: Group) -> None:
    """Adagrad allocates state in its constructor; a step would write it to nowhere."""
    model = parity.build()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    late = torch.optim.Adagrad(p for p in model.parameters() if p.requires_grad)
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()

    with pytest.raises(StateError, match=r"gradient is sharded"):
        late.step()


# ---- Weights in and out ----


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: operator.attrgetter(name) for name in ("shape", "dtype", "device", "layout", "nbytes")
    },
    **{name: operator.attrgetter(name) for name in ("ndim", "is_meta", "is_cpu", "requires_grad")},
    **{name: operator.methodcaller(name) for name in ("numel", "size", "dim", "stride")},
    **{name: operator.methodcaller(name) for name in ("is_contiguous", "element_size")},
    "len": len,
    "is a tensor": torch.is_tensor,
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda value: value.new_zeros(3),
    "on another device": lambda value: torch.ones_like(value, device="meta").shape,
}
USES: dict[str, Callable[[Tensor], Any]] = {
    **{name: operator.methodcaller(name) for name in ("clone", "detach", "cpu", "float", "numpy")},
    **{name: operator.methodcaller(name) for name in ("tolist", "sum", "isnan", "contiguous")},
    **{name: operator.methodcaller(name) for name in ("data_ptr", "untyped_storage", "zero_")},
    **{name: operator.attrgetter(name) for name in ("data", "T")},
    "add": lambda value: value + 1,
    "to": lambda value: value.to("meta"),
    "an element": lambda value: value[0],
    "a write": lambda value: value.__setitem__(0, 1.0),
    "an array": np.asarray,
    "copy_": lambda value: torch.empty(value.shape).copy_(value),
    "equal": lambda value: equal(value, value),
    "foreach": lambda value: torch._foreach_norm([value]),
    "out": lambda value: torch.add(torch.ones(()), 1, out=value),
    "a parameter": nn.Parameter,
    "broadcast": lambda value: torch.distributed.broadcast(value, 0),
    "copy.copy": copy.copy,
    "copy.deepcopy": lambda value: copy.deepcopy({"a": value}),
    "pickle": lambda value: pickle.dumps([value]),
    "torch.save": lambda value: torch.save({"a": value}, io.BytesIO()),
    "safetensors": lambda value: safetensors.torch.save({"a": value}),
}


def test_state_dict_has_names_of_what_is_sharded(group: Group) -> None:
    """Libraries ask it for names, on one rank; NaN in a checkpoint is found out weeks later."""
    expected = parity.build().state_dict()
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    if group.rank == 0:
        found = model.state_dict()
        assert list(found) == list(expected)
        assert list(model.blocks.state_dict(prefix="a.")) == [
            f"a.{name}" for name in parity.build().blocks.state_dict()
        ]
        named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for (name, value), (what, ask) in itertools.product(found.items(), QUESTIONS.items()):
            if value.dim():
                answer = ask(expected[name])
                same = torch.equal if isinstance(answer, Tensor) else operator.eq
                assert same(ask(value), answer), f"{name}: {what}"
        for name, (what, use) in itertools.product(named, USES.items()):
            with pytest.raises(
                StateError, match=rf"'{name}'.*2 ranks.*\n.*full_state_dict\(model\)"
            ):
                use(found[name]), what
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"full_state_dict\(model\) on every rank"):
                parity.build().load_state_dict(found, assign=assign)
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            parity.build().embed.weight.data = found["embed.weight"]
        assert "NameOnly" in f"{found['embed.weight']} {found['embed.weight']!r}"
    model.load_state_dict(model.state_dict())  # its own: nothing changes, as in torch
    edited = {name: torch.full((11, 6), 0.5) for name in ("embed.weight", "head.weight")}  # tied
    model.load_state_dict(model.state_dict() | edited)
    full = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(full, expected | edited, what="one edited")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_of_a_model_may_rename_what_is_whole(group: Group, stage: int) -> None:
    """Models that changed keep old names in their files by such hooks."""

    def rename(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        state[f"{prefix}old"] = state.pop(f"{prefix}weight")

    def build() -> nn.Module:
        model = parity.build(parity.tiny_float32)
        for block in model.blocks:
            block.up.register_state_dict_post_hook(rename)
        return model

    expected, model = build().state_dict(), build()
    zero_engine.shard(model, None, ZeroConfig(stage), group=group)
    full = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(full, expected, what=f"stage {stage}")


def test_weights_come_out_as_the_models_own(group: Group) -> None:
    """Keys, order, ties, buffers: what is saved loads into the plain model, and stays as it was."""
    plain, its = parity.build_with_optimizer()
    parity.run_steps(parity.as_ddp(plain, group), its, range(2), rank=group.rank)
    expected = plain.state_dict()

    for stage in parity.STAGES:
        config = ZeroConfig(stage, state_dict="gather")
        model, optimizer = parity.build_sharded(group, config)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        gathered, full = model.state_dict(), zero_engine.full_state_dict(model)
        if stage == 3:  # in memory of its own
            parity.run_steps(model, optimizer, range(1), rank=group.rank)

        parity.assert_same_weights(gathered, expected, what=f"stage {stage}, everywhere")
        if group.rank:
            assert full == {}
            continue
        parity.assert_same_weights(full, expected, what=f"stage {stage}, on rank 0")
        assert full["head.weight"].data_ptr() == full["embed.weight"].data_ptr()
        assert parity.Tiny().load_state_dict(full).missing_keys == []


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_train_on_as_under_ddp(group: Group, assign: bool) -> None:
    """Resuming at another stage is loading a plain state dict, whose memory no shard can be."""
    state = parity.build(seed=7).state_dict()
    plain, plain_optimizer = parity.build_with_optimizer()
    plain.load_state_dict(state)
    wrapped = parity.as_ddp(plain, group)
    expected = parity.run_steps(wrapped, plain_optimizer, range(3), rank=group.rank)

    for stage in (3,) if assign else parity.STAGES:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        model(parity.batch(0, 0, group.rank)[0])  # slots hold the old values
        answer = model.load_state_dict(state, assign=assign)
        assert str(answer) == "<All keys matched successfully>"
        assert parity.run_steps(model, optimizer, range(3), rank=group.rank) == expected
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")


@pytest.mark.parametrize("stage", parity.STAGES)
def test_load_state_dict_is_as_strict_as_torchs(group: Group, stage: int) -> None:
    """A key that is missing, unexpected or of another shape is an error in plain torch too."""
    model, _ = parity.build_sharded(group, ZeroConfig(stage))
    good = parity.build(seed=7).state_dict()
    without = {key: value for key, value in good.items() if key != "blocks.1.up.bias"}
    with_more = good | {"blocks.1.extra": torch.zeros(1)}

    for state, words in (
        (without, r'Missing key.*"blocks\.1\.up\.bias"'),
        (with_more, r'Unexpected key.*"blocks\.1\.extra"'),
        (good | {"blocks.1.up.bias": torch.zeros(14)}, r"blocks\.1\.up\.bias"),
    ):
        with pytest.raises(RuntimeError, match=words):
            model.load_state_dict(state)
    assert model.load_state_dict(without, strict=False).missing_keys == ["blocks.1.up.bias"]
    assert model.load_state_dict(with_more, strict=False).unexpected_keys == ["blocks.1.extra"]


# ---- What cannot follow a sharded model ----


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_sharded_model_cannot_be_copied_or_pickled(group: Group, stage: int) -> None:
    """The copy would share our buffers and train on its own."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))

    with pytest.raises(StateError, match=r"deepcopy.*full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises(StateError, match=r"pickling.*full_state_dict"):
        pickle.dumps(model)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


@pytest.mark.parametrize("change", ["data", "replaced"])
def test_a_change_that_we_cannot_follow_is_named_at_the_next_forward(
    group: Group, change: str
) -> None:
    """Else the change is lost, or the gradient is."""
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    name = r"'blocks\.0\.up\.weight'"
    up = model.blocks[0].up
    match change:
        case "data":
            up.weight.data = torch.zeros(13, 6)
            reason = "its memory was replaced"
        case "replaced":
            up.weight = nn.Parameter(torch.zeros(13, 6))
            reason = "another Parameter object"

    with pytest.raises(StateError, match=rf"parameter {name}: .*{reason}.*\(rank {group.rank}\)"):
        parity.loss_of(model, parity.batch(0, 0, group.rank))


def test_a_change_of_a_parameter_at_rest_raises_at_once(group: Group) -> None:
    """Where it is made, the user can see what is wrong; the values rest elsewhere."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    up = model.blocks[0].up.weight
    other = torch.zeros(13, 6)

    @torch.no_grad()
    def scale_in_place() -> None:
        weight = up
        weight *= 2

    for change in (
        lambda: nn.init.normal_(up),
        lambda: nn.init.ones_(up),
        up.data.zero_,
        lambda: up.data.copy_(other),
        lambda: torch.add(other, 1, out=up.data),
        lambda: torch._foreach_zero_([up]),
        lambda: up.data.__setitem__(0, 1.0),
        scale_in_place,
    ):
        with pytest.raises(
            ShardedParamError, match=r"write to parameter 'blocks\.0\.up\.weight'.*lost"
        ):
            change()
    model.requires_grad_(True)  # as it is already
    model.frozen.requires_grad_(False)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_conversion_that_changes_nothing_passes_at_any_moment(group: Group, stage: int) -> None:
    """Trainers move a model to its device before each phase; a loop may between backwards."""

    def convert(model: Any) -> None:
        for module in (model, model.blocks[1].up, model.blocks):
            assert module.to(group.device) is module.to(str(group.device)) is module.float()
            assert group.device.type != "cpu" or module.cpu() is module.to("cpu:0")
            module.to(group.device, torch.float32, non_blocking=True).type(torch.float32).train()
            module.to(memory_format=torch.contiguous_format)
        for change in (
            model.half,
            model.blocks.double,
            lambda: model.to(torch.bfloat16),
            lambda: model.to("meta"),
        ):
            with pytest.raises(StateError, match=r"half\(\) or the like.*before shard\(\)"):
                change()

    build = partial(parity.build_sharded, group, ZeroConfig(stage), make=parity.tiny_float32)
    parking.assert_same_bits(group, build, convert)
    model, optimizer = build()
    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    convert(model)
    parity.finish_step(loss, optimizer)
    zero_engine.unshard(model, optimizer)
    assert model.half().embed.weight.dtype == torch.float16  # as any model
