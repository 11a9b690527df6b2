"""Models that we did not write train as under DDP: the mechanism knows no architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import feeds
import parity
import pytest
import torch
import zero_engine
import zoo
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import equal
from zero_partition import memory_report
from zero_partition.seams import find_sharded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning"),  # DDP, of its own
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),  # peft calls transformers
]

_IMPORT_S = 90.0  # transformers takes its time, on the first run of each rank
_EDGES = 1, 3  # where parameters rest whole, and where they rest as shards


def _trains_as_ddp(
    group: Group, recipe: parity.Recipe, stages: Iterable[int], **config: Any
) -> None:
    expected = parity.train_ddp(group, recipe)
    for stage in stages:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage, **config))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


CHOOSE = ("opt", "switch", "bart", "wav2vec2")  # layers by chance, or experts


@pytest.mark.parametrize(("turn", "name"), list(enumerate(zoo.ZOO)))
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_an_architecture_trains_as_under_ddp(group: Group, turn: int, name: str) -> None:
    """Whoever tries us tries a model of their own; no line of ours may know its class."""
    stages = (3,) if turn % 2 else (turn // 2 % 3, 3)
    # Where gathers are collective, a model that chooses among its modules is one unit.
    config = {"units": ()} if group.device.type != "cpu" and name in CHOOSE else {}
    _trains_as_ddp(group, zoo.ZOO[name].recipe(group.rank), stages, **config)


# ---- Models that read parameters around the modules that own them ----


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        pytest.param(2, {}, id="whole-at-rest"),
        pytest.param(3, {"units": ()}, id="one-unit"),  # what the error message advises
        pytest.param(3, {}, id="sharded-at-rest"),
    ],
)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_parameters_used_around_their_modules_train(
    group: Group, stage: int, config: dict[str, Any]
) -> None:
    """SAM never calls its embeddings; Reformer's backward calls parts of layers by hand."""
    _trains_as_ddp(group, zoo.SAM.recipe(group.rank), (stage,), **config)

    recipe = zoo.REFORMER.recipe(group.rank)  # of which DDP says: "ready only once"
    expected = parity.train_alone_by_stage(group, recipe)[stage]
    curve = parity.train_sharded(group, recipe, ZeroConfig(stage, **config))
    parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


# ---- What users switch on ----


def _checkpoints(model: nn.Module, *, use_reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant and hasattr(model, "peft_config"):
        model.enable_input_require_grads()  # else reentrant recomputation has no gradient


def _checkpoints_reentrant(model: nn.Module) -> None:
    _checkpoints(model, use_reentrant=True)


def _returns_attentions(model: nn.Module) -> None:
    model.set_attn_implementation("eager")


def _resizes(model: nn.Module) -> None:
    """Puts new Parameters, tied anew, in place of those that the constructor made."""
    torch.manual_seed(0)  # the new rows are drawn at random
    model.resize_token_embeddings(feeds.VOCABULARY + 6, mean_resizing=False)


CHANGES: dict[Callable[[nn.Module], None], tuple[tuple[str, ...], tuple[int, ...]]] = {
    _checkpoints: (("llama", "qwen2-moe", "vit", "whisper"), (2, 3)),
    _checkpoints_reentrant: (("gpt2", "t5", "lora"), (3,)),
    _returns_attentions: (("llama",), parity.STAGES),
    _resizes: (("gpt2", "llama"), _EDGES),
}


def _loss_of_all_fields(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert output.logits is output["logits"]
    fields = [*output.hidden_states, *output.attentions]
    return output.loss + sum(field.square().mean() for field in fields)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(number, name, id=f"{change.__name__.strip('_')}-{name}")
        for number, (change, (names, _)) in enumerate(CHANGES.items())
        for name in names
    ],
)
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_what_users_switch_on_trains_as_under_ddp(group: Group, number: int, name: str) -> None:
    """Recomputation is the second thing that memory asks for; backward may begin at any field."""
    change, (_, stages) = list(CHANGES.items())[number]

    def make() -> nn.Module:
        model = zoo.ZOO[name].make()
        change(model)
        torch.manual_seed(1000 + group.rank)
        return model

    how = {"loss_of": _loss_of_all_fields} if change is _returns_attentions else {}
    _trains_as_ddp(group, zoo.ZOO[name].recipe(group.rank, make=make, **how), stages)


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
        (3, group.by_messages("this test asks for it"), nullcontext),  # as between hosts
        (3, group, nullcontext),
        (3, group, zero_engine.unsharded),
    ]

    for stage, over, context in ways:
        model, _ = _sharded(over, specimen, stage)
        with context(model):
            logits = _generate(model, specimen, over)
        assert len(logits) == len(expected)
        for ours, theirs in zip(logits, expected, strict=True):
            assert equal(ours, theirs), f"{name}, stage {stage}, {context.__name__}"


def _sharded(
    group: Group, specimen: zoo.Specimen, stage: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(lambda: specimen.build(0))
    return zero_engine.shard(model, parity.adamw(model), ZeroConfig(stage), group=group)


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
        model, optimizer = _sharded(group, specimen, stage)
        assert _names_by_parameter(model) == names
        assert sum(len(entry["params"]) for entry in optimizer.param_groups) == len(names)
        parity.finish_step(zoo.loss_of(model, specimen.batch(0, 0, group.rank)), optimizer)
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


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.ranks(timeout_s=_IMPORT_S)
def test_tables_that_are_not_saved_stay_what_they_are(group: Group, name: str) -> None:
    """RoPE frequencies are buffers outside the state dict: nothing but the model knows them."""
    specimen = zoo.ZOO[name]
    plain = parity.build(lambda: specimen.build(0))
    unsaved = dict(plain.named_buffers()).keys() - plain.state_dict().keys()
    assert unsaved, f"{name} saves all its buffers"

    for stage in _EDGES:
        model, optimizer = _sharded(group, specimen, stage)
        parity.finish_step(zoo.loss_of(model, specimen.batch(0, 0, group.rank)), optimizer)
        for key, table in plain.named_buffers():
            assert equal(dict(model.named_buffers())[key], table), f"stage {stage}: {key}"
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
