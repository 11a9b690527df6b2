"""What a user finds in a sharded model: never wrong numbers, and words where there is no number."""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from training import assert_weights_of, scaled_step
from zero_comm import Group
from zero_partition import AtRestError, StateError

SHARDED_STAGES = (1, 2, 3)


# ---- Parameters ----


def test_a_parameter_at_rest_keeps_its_face_and_holds_no_memory(group: Group) -> None:
    """Counters, printers and detectors of ties look at every parameter between steps."""
    plain = parity.build()
    model, optimizer = parity.build_sharded(group, ZeroConfig(3))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)

    faces = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert param.shape == faces[name].shape, name
        assert param.dtype == faces[name].dtype, name
        assert param.device == faces[name].device, name
        assert param.numel() == faces[name].numel(), name
        assert param.requires_grad == faces[name].requires_grad, name
        assert isinstance(param, nn.Parameter), name
        assert param.untyped_storage().nbytes() == param.element_size(), name
        with torch.no_grad(), pytest.raises(AtRestError, match=rf"isnan\(\).*'{name}'.*full_param"):
            torch.isnan(param)
        assert "nan" in repr(param), name
    addresses = [param.data_ptr() for param in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert model.head.weight is model.embed.weight
    assert repr(model) == repr(plain)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_p_grad_is_what_the_table_says(group: Group, stage: int) -> None:
    """A gradient at stage 0; at the others a guard that refuses, never a silent None."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()

    assert model.unused.grad is None
    assert model.frozen.grad is None
    weight = model.blocks[0].up.weight
    if stage == 0:
        assert weight.grad.shape == weight.shape
        assert not torch.isnan(weight.grad).any()
        return
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == weight.dtype
    for use in (lambda g: g + 1, lambda g: g.norm(), lambda g: g.zero_(), lambda g: g.tolist()):
        with pytest.raises(StateError, match=r"gradient is sharded.*optimizer\.param_groups"):
            use(weight.grad)
    shards = [param for entry in optimizer.param_groups for param in entry["params"]]
    assert all(shard.dim() == 1 for shard in shards)
    given = [shard for shard in shards if shard.grad is not None]
    assert all(shard.grad.shape == shard.shape for shard in given)
    assert len(given) == sum(p.requires_grad for p in model.parameters()) - 1  # all but `unused`
    optimizer.zero_grad()
    assert all(param.grad is None for param in (*model.parameters(), *shards))


@pytest.mark.parametrize("stage", SHARDED_STAGES)
def test_model_zero_grad_to_zero_names_the_optimizers(group: Group, stage: int) -> None:
    """There is nothing whole to set to zero, and doing nothing would keep the gradient."""
    model, _ = parity.build_sharded(group, ZeroConfig(stage))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()

    with pytest.raises(StateError, match=r"optimizer\.zero_grad\(\)"):
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("stage", SHARDED_STAGES)
def test_torchs_clip_refuses_what_it_could_only_get_wrong(group: Group, stage: int) -> None:
    """It would find no gradients, or the norm of one rank's part, and say nothing."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    shards = [param for entry in optimizer.param_groups for param in entry["params"]]

    for params in (model.parameters(), shards):
        with pytest.raises(StateError, match=r"zero_engine\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(params, 1.0)
    with pytest.raises(StateError, match=r"zero_engine\.clip_grad_norm_"):
        nn.utils.get_total_norm([shard.grad for shard in shards if shard.grad is not None])
    with pytest.raises(StateError, match=r"or clip_grad_value_\(model, value\)"):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(shards, 0.1)  # elementwise: right on shards
    assert all(s.grad.abs().max() <= 0.1 for s in shards if s.grad is not None and s.numel())
    optimizer.step()


@pytest.mark.ranks(1)
def test_torchs_clip_works_where_the_shard_is_everything(group: Group) -> None:
    """One rank is not a special case that has to be refused."""
    model, optimizer = parity.build_sharded(group, ZeroConfig(2), make=parity.tiny_float32)
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    shards = [param for entry in optimizer.param_groups for param in entry["params"]]

    theirs = nn.utils.clip_grad_norm_(shards, 1e9)

    ours = zero_engine.clip_grad_norm_(model, 1e9)
    torch.testing.assert_close(torch.as_tensor(theirs).float(), ours)


def test_either_object_finds_the_gradients_to_clip(group: Group) -> None:
    """A trainer often has the optimizer and not the model."""
    for stage in parity.STAGES:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
        by_model = zero_engine.clip_grad_norm_(model, 1e9)
        by_optimizer = zero_engine.clip_grad_norm_(optimizer, 1e9)
        largest = zero_engine.clip_grad_norm_(optimizer, 1e9, norm_type=float("inf"))

        assert torch.equal(by_model, by_optimizer)
        assert 0 < largest <= by_model
        with pytest.raises(StateError, match="expected norm_type 2 or inf, got 1"):
            zero_engine.clip_grad_norm_(model, 1.0, norm_type=1.0)


# ---- Weights in and out ----


def test_state_dict_names_what_to_call_instead(group: Group) -> None:
    """NaN in a checkpoint is found out weeks later."""
    model, _ = parity.build_sharded(group, ZeroConfig(3))

    with pytest.raises(StateError, match=r"'unused'|'frozen'.*full_state_dict\(model\)"):
        model.state_dict()
    with pytest.raises(StateError, match=r"'blocks\.0\.norm\.weight'.*2 ranks.*full_state_dict"):
        model.blocks.state_dict(prefix="blocks.")


def test_state_dict_gathers_where_configured(group: Group) -> None:
    """Every rank gets everything, in memory of its own."""
    expected = parity.build().state_dict()
    for stage in parity.STAGES:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage, state_dict="gather"))

        state = model.state_dict()

        parity.assert_same_weights(state, expected, what=f"stage {stage}")
        if stage == 3:
            parity.run_steps(model, optimizer, range(1), rank=group.rank)
            parity.assert_same_weights(state, expected, what="after a step")


def test_the_full_state_dict_is_the_models_own(group: Group) -> None:
    """Keys, order, ties, buffers: what is saved loads into the plain model."""
    plain, plain_optimizer = parity.build_with_optimizer()
    parity.run_steps(parity.as_ddp(plain, group), plain_optimizer, range(2), rank=group.rank)

    for stage in parity.STAGES:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        state = zero_engine.full_state_dict(model)

        if group.rank:
            assert state == {}
            continue
        parity.assert_same_weights(state, plain.state_dict(), what=f"stage {stage}")
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert parity.Tiny().load_state_dict(state).missing_keys == []


def test_loaded_weights_train_on_as_under_ddp(group: Group) -> None:
    """Resuming at another stage, or for the first time, is loading a plain state dict."""
    state = parity.build(seed=7).state_dict()
    plain, plain_optimizer = parity.build_with_optimizer()
    plain.load_state_dict(state)
    wrapped = parity.as_ddp(plain, group)
    expected = parity.run_steps(wrapped, plain_optimizer, range(3), rank=group.rank)

    for stage in parity.STAGES:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        model(parity.batch(0, 0, group.rank)[0])  # slots hold the old values
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert parity.run_steps(model, optimizer, range(3), rank=group.rank) == expected
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")


@pytest.mark.parametrize("stage", parity.STAGES)
def test_load_state_dict_is_as_strict_as_torchs(group: Group, stage: int) -> None:
    """A key that is missing, unexpected or of another shape is an error in plain torch too."""
    model, _ = parity.build_sharded(group, ZeroConfig(stage))
    good = parity.build(seed=7).state_dict()
    without = {key: value for key, value in good.items() if key != "blocks.1.up.bias"}
    with_more = good | {"blocks.1.extra": torch.zeros(1)}
    wrong_shape = good | {"blocks.1.up.bias": torch.zeros(14)}

    with pytest.raises(RuntimeError, match=r'Missing key.*"blocks\.1\.up\.bias"'):
        model.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"blocks\.1\.extra"'):
        model.load_state_dict(with_more)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.bias"):
        model.load_state_dict(wrong_shape)
    assert model.load_state_dict(without, strict=False).missing_keys == ["blocks.1.up.bias"]
    assert model.load_state_dict(with_more, strict=False).unexpected_keys == ["blocks.1.extra"]
    model.load_state_dict(good)
    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(weights, good, what=f"stage {stage}")


@pytest.mark.ranks(timeout_s=90.0)
def test_transformers_saves_the_full_state_dict(group: Group, tmp_path: Path) -> None:
    """save_pretrained() takes it, and from_pretrained() gives the trained model back."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=13, n_positions=8)
    model = parity.build(lambda: GPT2LMHeadModel(shape))
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    state = zero_engine.full_state_dict(model)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    if group.rank == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=tokens).logits, expected)


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


@pytest.mark.parametrize("change", ["data", "replaced", "unfrozen"])
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
        case _:
            model.frozen.requires_grad_()
            name, reason = "'frozen'", "now requires a gradient"

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
        with pytest.raises(AtRestError, match=r"write to parameter 'blocks\.0\.up\.weight'.*lost"):
            change()
    for convert in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(AtRestError, match=r"(?s)half|to\(\)|double.*before shard\(\)"):
            convert()
    model.to("cpu").requires_grad_(True)  # as it is already
    model.frozen.requires_grad_(False)
    parity.run_steps(model, optimizer, range(1), rank=group.rank)


@pytest.mark.parametrize("stage", parity.STAGES)
def test_a_conversion_that_changes_nothing_passes_at_any_moment(group: Group, stage: int) -> None:
    """Trainers move a model to its device before each phase; so may a loop between backwards."""
    recipe = parity.Recipe(num_steps=2, num_micro_batches=2, make=parity.tiny_float32)
    expected = parity.train_ddp(group, recipe)
    model, optimizer = parity.build_sharded(group, ZeroConfig(stage), make=parity.tiny_float32)
    scheduler = parity.scheduler_for(optimizer)

    def convert() -> None:
        for module in (model, model.blocks[1].up, model.blocks):
            assert module.to(group.device) is module.cpu() is module.to("cpu:0") is module.float()
            module.to("cpu", torch.float32, non_blocking=True).type(torch.float32).train()
            module.to(memory_format=torch.contiguous_format)

    losses = []
    for step in range(2):
        for micro in range(2):
            with zero_engine.no_sync(model) if micro == 0 else nullcontext():
                convert()
                loss = parity.loss_of(model, parity.batch(step, micro, group.rank))
                convert()
                loss.backward()
            losses.append(loss.item())
        convert()
        for change in (model.half, model.blocks.double, lambda: model.to("meta")):
            with pytest.raises(StateError, match=r"half\(\) or the like.*before shard\(\)"):
                change()
        optimizer.step()
        convert()
        optimizer.zero_grad()
        scheduler.step()

    assert losses == expected.losses
    assert_weights_of(model, _model_with(expected.weights), group=group, what=f"stage {stage}")
    zero_engine.unshard(model, optimizer)
    assert model.half().embed.weight.dtype == torch.float16  # as any model


def _model_with(weights: dict[str, Tensor]) -> nn.Module:
    model = parity.tiny_float32()
    model.load_state_dict(weights)
    return model


def test_loading_with_assign_still_fills_the_shards(group: Group) -> None:
    """`assign=True` asks for the state dict's own memory, which a shard cannot be."""
    model, _ = parity.build_sharded(group, ZeroConfig(3))
    state = parity.build(seed=7).state_dict()

    model.load_state_dict(state, assign=True)

    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        parity.assert_same_weights(weights, state, what="assigned")
    parity.loss_of(model, parity.batch(0, 0, group.rank))


def test_an_optimizer_built_after_shard_is_told_apart(group: Group) -> None:
    """Adagrad allocates state in its constructor; a step would write it to nowhere."""
    model = parity.build()
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    late = torch.optim.Adagrad(p for p in model.parameters() if p.requires_grad)
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()

    with pytest.raises(StateError, match=r"gradient is sharded"):
        late.step()


@pytest.mark.parametrize("stage", parity.STAGES)
def test_adagrads_state_is_sharded_as_it_was_built(group: Group, stage: int) -> None:
    """The initial accumulator is not zero, and the unused parameter has one as well."""
    model = parity.build()
    optimizer = torch.optim.Adagrad(parity.param_groups(model), initial_accumulator_value=0.5)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)

    params = [param for entry in optimizer.param_groups for param in entry["params"]]
    assert set(optimizer.state) == set(params)
    for param in params:
        assert optimizer.state[param]["sum"].shape == param.shape
        assert (optimizer.state[param]["sum"] == 0.5).all()


# ---- Loss scaling ----


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [*itertools.product(["adamw-fused"], ["loss", "shard", "nowhere"]), ("sgd", "loss")],
)
def test_grad_scaler_skips_a_step_on_every_rank_or_on_none(
    ranks, optimizer: str, where: str
) -> None:
    """An inf that one rank sees and another does not would let the ranks drift apart."""
    for stage in parity.STAGES:
        if where == "shard" and stage == 0:
            continue  # no shards
        results = ranks(2).run(_scale, stage=stage, optimizer=optimizer, where=where)

        scales = [scale for scale, _ in results]
        assert scales == [2.0**15 if where == "nowhere" else 2.0**14] * 2, f"stage {stage}"
        assert results[0][1] == (where == "nowhere"), f"stage {stage}: weights changed or not"


def _scale(group: Group, stage: int, optimizer: str, where: str) -> tuple[float, bool]:
    model, chosen = parity.build_sharded(
        group, ZeroConfig(stage), optimizer, make=parity.tiny_float32
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=100)
    before = zero_engine.full_state_dict(model)
    loss = parity.loss_of(model, parity.batch(0, 0, group.rank))
    if where == "loss" and group.rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if where == "shard" and group.rank == 1:
        _first_shard_with_elements(chosen).grad[0] = float("inf")

    scaler.step(chosen)
    scaler.update()

    after = zero_engine.full_state_dict(model)
    changed = any(not torch.equal(after[key], value) for key, value in before.items())
    return scaler.get_scale(), changed


def _first_shard_with_elements(optimizer: torch.optim.Optimizer) -> Tensor:
    return next(
        param
        for entry in optimizer.param_groups
        for param in entry["params"]
        if param.numel() and param.grad is not None
    )


def test_unscaling_then_clipping_then_stepping(group: Group) -> None:
    """The usual loop of mixed precision: scaled gradients must give the unscaled curve."""

    def train(scaler: Any, stage: int) -> list[float]:
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage), "adamw")
        losses = []
        for step in range(3):
            loss = parity.loss_of(model, parity.batch(step, 0, group.rank))
            scaled_step(scaler, model, optimizer, loss, max_norm=0.5)
            losses.append(loss.item())
        return losses

    for stage in parity.STAGES:
        scaled = train(torch.amp.GradScaler("cpu", init_scale=2.0**8), stage)
        plain = train(torch.amp.GradScaler("cpu", enabled=False), stage)
        assert scaled == plain, f"stage {stage}"  # a power of two changes no bit
