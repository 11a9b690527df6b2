"""Models that we did not write train as under DDP: the mechanism knows no architecture."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs
import feeds
import parity
import pytest
import torch
import zero_engine
import zoo
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import StateError, memory_report
from zero_partition.seams import find_sharded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning"),  # DDP, of its own
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # peft calls transformers
]

_IMPORT_S = 90.0  # transformers takes its time, on the first run of each rank
_STAGES = 2, 3  # 0 and 1 have fewer of their hooks and none of their own: test_stages_agree.py
_EDGES = 1, 3  # where parameters rest whole, and where they rest as shards


@pytest.mark.parametrize(("turn", "name"), list(enumerate(zoo.ZOO)))
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_an_architecture_trains_as_under_ddp(group: Group, turn: int, name: str) -> None:
    """Whoever tries us tries a model of their own; no line of ours may know its class."""
    recipe = zoo.ZOO[name].recipe(group.rank)
    expected = parity.train_ddp(group, recipe)

    for stage in (3,) if turn % 2 else (turn // 2 % 3, 3):
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        parity.assert_same(curve, expected, rank=group.rank, what=f"{name}, stage {stage}")


# ---- Models that read parameters around the modules that own them ----

_AROUND = pytest.mark.parametrize(
    ("stages", "config"),
    [
        pytest.param((2,), {}, id="whole-at-rest"),
        pytest.param((3,), {"units": ()}, id="one-unit"),  # what the error message advises
        pytest.param((3,), {}, id="sharded-at-rest"),
    ],
)


@_AROUND
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_embeddings_that_are_never_called_train(
    group: Group, stages: tuple[int, ...], config: dict[str, Any]
) -> None:
    """SAM adds `embedding.weight` of a list of embeddings, whose forward never runs."""
    recipe = zoo.SAM.recipe(group.rank)
    expected = parity.train_ddp(group, recipe)

    for stage in stages:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage, **config))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


@_AROUND
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_reversible_layers_train_as_one_process_does(
    group: Group, stages: tuple[int, ...], config: dict[str, Any]
) -> None:
    """Reformer's backward calls the parts of each layer by hand; DDP: "ready only once"."""
    recipe = zoo.REFORMER.recipe(group.rank)
    expected = parity.train_alone_by_stage(group, recipe)

    for stage in stages:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage, **config))
        parity.assert_same(curve, expected[stage], rank=group.rank, what=f"stage {stage}")


# ---- What users switch on ----


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [(name, False) for name in ("llama", "qwen2-moe", "vit", "whisper")]
    + [(name, True) for name in ("gpt2", "t5", "lora")],
)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_checkpointed_activations_change_no_number(
    group: Group, name: str, use_reentrant: bool
) -> None:
    """`gradient_checkpointing_enable()` is the second thing, after ZeRO, that memory asks for."""
    specimen = zoo.ZOO[name]

    def make() -> nn.Module:
        model = specimen.build(group.rank)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        if use_reentrant and name == "lora":
            model.enable_input_require_grads()  # else reentrant recomputation has no gradient
        return model

    recipe = specimen.recipe(group.rank, num_steps=3, make=make)
    expected = parity.train_ddp(group, recipe)
    for stage in (3,) if use_reentrant else _STAGES:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        parity.assert_same(curve, expected, rank=group.rank, what=f"{name}, stage {stage}")


def _loss_of_all_fields(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert output.logits is output["logits"]
    fields = [*output.hidden_states, *output.attentions]
    return output.loss + sum(field.square().mean() for field in fields)


@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_a_loss_over_every_field_of_the_output_trains(group: Group) -> None:
    """Hidden states and attentions leave the model too, and backward may begin at any of them."""

    def make() -> nn.Module:
        model = zoo.ZOO["llama"].build(group.rank)
        model.set_attn_implementation("eager")  # the one that returns attentions
        return model

    recipe = zoo.ZOO["llama"].recipe(
        group.rank, num_steps=3, make=make, loss_of=_loss_of_all_fields
    )
    expected = parity.train_ddp(group, recipe)
    for stage in parity.STAGES:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gemma3", "deepseek-v3", "mamba", "jamba"),
        *("t5", "whisper", "lora"),  # generate() calls an inner model by hand
    ],
)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_generation_gives_the_logits_of_plain_torch(group: Group, name: str) -> None:
    """A sample between steps: many forwards of one model, and of parts of it, in eval."""
    specimen = zoo.ZOO[name]
    expected = _generate(parity.build(lambda: specimen.build(0)), specimen, group)
    ways = [
        (3, attrs.evolve(group, peers=None), nullcontext),  # as between hosts
        (3, group, nullcontext),
        (3, group, zero_engine.unsharded),
    ]

    for stage, over, context in ways:
        model = parity.build(lambda: specimen.build(0))
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=over)
        with context(model):
            logits = _generate(model, specimen, over)
        assert len(logits) == len(expected)
        for ours, theirs in zip(logits, expected, strict=True):
            assert torch.equal(ours, theirs), f"{name}, stage {stage}, {context.__name__}"


def _generate(model: nn.Module, specimen: zoo.Specimen, group: Group) -> tuple[Tensor, ...]:
    inputs = specimen.batch(0, 0, group.rank)
    del inputs["labels"]
    model.eval()
    return model.generate(
        **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    ).logits  # fmt: skip


# ---- Tied weights and vocabularies ----


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "whisper"])
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_tied_weights_are_one_parameter_under_several_names(group: Group, name: str) -> None:
    """Sharded once, saved once, restored under each name; a second copy would drift away."""
    specimen = zoo.ZOO[name]
    plain = parity.build(lambda: specimen.build(0))
    names = _names_by_parameter(plain)
    assert any(len(tied) > 1 for tied in names), f"{name} ties nothing"

    for stage in _EDGES:
        model = parity.build(lambda: specimen.build(0))
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        assert _names_by_parameter(model) == names
        assert sum(len(entry["params"]) for entry in optimizer.param_groups) == len(names)
        if stage == 3:
            layouts = [
                (buffer.plan.layout, buffer.plan.dtype.itemsize)
                for unit in find_sharded(model).units
                for buffer in unit.buffers
            ]
            elements = sum(layout.payload_numel for layout, _ in layouts)
            assert elements == sum(param.numel() for param in plain.parameters())
            held = sum(layout.payload_splits[group.rank] * size for layout, size in layouts)
            assert memory_report(model).params_bytes == held

        zoo.loss_of(model, specimen.batch(0, 0, group.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = zero_engine.full_state_dict(model)
        if group.rank == 0:
            _assert_tied(saved, names)
        trained = parity.build(lambda: specimen.build(0))
        zero_engine.shard(trained, None, ZeroConfig(stage), group=group)
        trained.load_state_dict(_on_every_rank(saved, group))
        restored = zero_engine.full_state_dict(trained)
        if group.rank == 0:
            parity.assert_same_weights(restored, saved, what=f"stage {stage}")
            _assert_tied(restored, names)


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return list(names.values())


def _assert_tied(state: dict[str, Tensor], names: list[list[str]]) -> None:
    for tied in names:
        present = [name for name in tied if name in state]
        addresses = {state[name].data_ptr() for name in present}
        assert len(addresses) == 1, f"{present} were saved as {len(addresses)} tensors"


def _on_every_rank(state: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    carried = [state]
    torch.distributed.broadcast_object_list(carried, src=0, group=group.process_group)
    return carried[0]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_a_resized_vocabulary_trains_as_under_ddp(group: Group, name: str) -> None:
    """It puts new Parameters, tied anew, in place of those that the constructor made."""

    def make() -> nn.Module:
        model = zoo.ZOO[name].build(group.rank)
        torch.manual_seed(0)  # the new rows are drawn at random
        model.resize_token_embeddings(feeds.VOCABULARY + 6, mean_resizing=False)
        torch.manual_seed(1000 + group.rank)
        return model

    recipe = zoo.ZOO[name].recipe(group.rank, num_steps=3, make=make)
    expected = parity.train_ddp(group, recipe)
    for stage in _EDGES:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


@pytest.mark.parametrize("stage", parity.STAGES)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_resizing_after_shard_is_named(group: Group, stage: int) -> None:
    """The new embedding would be nobody's shard, and full of what a parameter reads as at rest."""
    specimen = zoo.ZOO["gpt2"]
    model = parity.build(lambda: specimen.build(0))
    zero_engine.shard(model, parity.adamw(model), ZeroConfig(stage), group=group)
    with pytest.raises(StateError, match=r"wte\.weight.*before shard\(\)"):
        model.resize_token_embeddings(feeds.VOCABULARY + 6, mean_resizing=False)
        zoo.loss_of(model, specimen.batch(0, 0, group.rank))


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_tables_that_are_not_saved_stay_what_they_are(group: Group, name: str) -> None:
    """RoPE frequencies are buffers outside the state dict: nothing but the model knows them."""
    specimen = zoo.ZOO[name]
    plain = parity.build(lambda: specimen.build(0))
    unsaved = dict(plain.named_buffers()).keys() - plain.state_dict().keys()
    assert unsaved, f"{name} saves all its buffers"

    for stage in _EDGES:
        model = parity.build(lambda: specimen.build(0))
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        zoo.loss_of(model, specimen.batch(0, 0, group.rank)).backward()
        optimizer.step()
        for key, table in plain.named_buffers():
            assert torch.equal(dict(model.named_buffers())[key], table), f"stage {stage}: {key}"
        state = zero_engine.full_state_dict(model)
        if group.rank == 0:
            assert list(state) == list(plain.state_dict())


# ---- Frozen parameters ----


@pytest.mark.parametrize("name", zoo.LORA)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_what_is_frozen_costs_no_gradient_and_no_optimizer_state(group: Group, name: str) -> None:
    """Adapters of one per cent are why a base model fits at all."""
    specimen = zoo.ZOO[name]
    for stage in (0, 1, 3):
        model = parity.build(lambda: specimen.build(0))
        numels = [param.numel() for param in model.parameters() if param.requires_grad]
        assert 0 < sum(numels) < sum(param.numel() for param in model.parameters()) / 4
        optimizer = parity.adamw(model)  # of all parameters, the frozen ones too
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)

        zoo.loss_of(model, specimen.batch(0, 0, group.rank)).backward()
        before = memory_report(model)
        optimizer.step()
        after = memory_report(model)

        plans = [buffer.plan for unit in find_sharded(model).units for buffer in unit.buffers]
        trained = [plan for plan in plans if plan.trainable]
        assert sum(plan.layout.payload_numel for plan in trained) == sum(numels)
        payload = sum(
            4 * (plan.layout.payload_splits[group.rank] if stage else plan.layout.payload_numel)
            for plan in trained
        )
        assert before.gradients_bytes == payload, f"stage {stage}"
        assert after.optimizer_bytes == 2 * payload, f"stage {stage}"
        whole = sum(plan.num_bytes for plan in trained)
        # Whole buffers or slots, and nothing for what is frozen, which is much larger.
        assert before.reduction_bytes <= whole, f"stage {stage}: {before}"
