"""A model's modules are checkpointed where they are, and the model is the same to everyone else."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_numbers import Block, Stack, assert_equal, plainly, train
from torch import Tensor, nn
from zero_ckpt import (
    MATMULS,
    CheckpointedModules,
    Checkpointer,
    CheckpointError,
    ModulePolicy,
    by_name,
    by_type,
    checkpoint_modules,
    every_nth,
    inside,
)

BLOCKS = by_type(Block)


def _calls_of(model: nn.Module, kind: type[nn.Module] = nn.LayerNorm) -> list[str]:
    """Grows by a name whenever a module of a kind is called."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def _step(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4, 8), plainly).square().sum()


def _stack(depth: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(depth)


# ---- The law ----


def _applied(policy: ModulePolicy, **options: Any) -> Stack:
    model = Stack()
    checkpoint_modules(model, policy, checkpointer=Checkpointer(**options))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps", [None, MATMULS])
@pytest.mark.parametrize(
    "policy",
    [
        BLOCKS,
        every_nth(2, BLOCKS),
        by_name("blocks.1", "blocks.*.attention"),
        by_name("**.*"),
        by_name("", "blocks.*"),
    ],
    ids=["blocks", "every second", "nested", "all", "model"],
)
def test_a_model_trains_the_same_with_and_without(
    policy: ModulePolicy, keeps: Any, dtype: torch.dtype
) -> None:
    """Also where a module that is selected lies in another."""

    def chosen(modules: Any) -> list[str]:  # of containers there are no calls
        return [name for name in policy(modules) if name != "blocks"]

    expected = train(plainly, Stack, dtype=dtype)

    assert_equal(train(plainly, partial(_applied, chosen, keeps=keeps), dtype=dtype), expected)


def test_selected_modules_run_twice_and_no_others() -> None:
    """That it does nothing would pass every comparison of numbers."""
    model = _stack()
    calls = _calls_of(model)
    applied = checkpoint_modules(model, every_nth(2, BLOCKS))

    _step(model).backward()

    assert applied.names == ("blocks.0", "blocks.2")
    again = ["blocks.2.norm", "blocks.0.norm"]
    assert calls == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", *again]


def test_what_checkpoint_takes_for_itself_a_modules_call_may_have_too() -> None:
    """A model that is not edited calls its layers as it always did."""

    class Layer(nn.Module):
        def forward(self, causal: bool, x: Tensor, *, debug: bool, context_fn: str) -> Tensor:
            assert (causal, debug, context_fn) == (True, True, "own")
            return x.sin()

    model = nn.ModuleList([Layer()])
    x = torch.ones(2, requires_grad=True)

    checkpoint_modules(model, by_type(Layer))

    assert torch.equal(model[0](True, x, debug=True, context_fn="own"), x.sin())


@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_of_a_module_run_once_a_call(order: str) -> None:
    """Counters, pruning and spectral norm must not see calls that no one made."""
    model = _stack(2)
    if order == "after":
        checkpoint_modules(model, BLOCKS)
    calls = _calls_of(model, Block)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    plain = copy.deepcopy(model) if order == "before" else None
    if order == "before":
        checkpoint_modules(model, BLOCKS)

    torch.manual_seed(1)
    loss = _step(model)
    loss.backward()

    assert calls == ["blocks.0", "blocks.1"]
    if plain is not None:
        torch.manual_seed(1)
        assert torch.equal(_step(plain), loss)


# ---- What others see ----


def test_names_keys_and_classes_stay() -> None:
    """Checkpoints on disk, optimizers and libraries go by them."""
    plain, model = _stack(), _stack()
    checkpoint_modules(model, BLOCKS)

    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert all(type(block) is Block for block in model.blocks)
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    assert not model.load_state_dict(plain.state_dict()).missing_keys


def test_undone_it_is_as_it_was() -> None:
    """Down to the instance's dict; and graphs from before can still go backward."""
    plain, model = _stack(), _stack()
    before = [set(vars(module)) for module in model.modules()]
    applied = checkpoint_modules(model, BLOCKS)
    loss = _step(model)

    applied.remove()
    applied.remove()

    assert [set(vars(module)) for module in model.modules()] == before
    torch.manual_seed(0)
    loss.backward()
    calls = _calls_of(model)
    _step(model).backward()
    assert len(calls) == 3
    assert plain.blocks[0].forward.__func__ is model.blocks[0].forward.__func__


def test_a_deep_copy_is_checkpointed_with_its_own_weights() -> None:
    """A bound method in the copy would call the original's."""
    model = _stack()
    checkpoint_modules(model, BLOCKS)
    expected = _step_with_seed(model)

    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    del model
    gc.collect()
    calls = _calls_of(other)

    loss = _step_with_seed(other)
    loss.backward()

    assert torch.equal(loss, expected)
    assert len(calls) == 6
    assert all(param.grad is not None for param in other.parameters())


def _step_with_seed(model: nn.Module) -> Tensor:
    torch.manual_seed(5)
    return _step(model)


def test_a_copy_of_a_block_alone_is_one_too() -> None:
    """Models of transformers are built that way, from a first layer."""
    model = _stack(1)
    checkpoint_modules(model, BLOCKS)

    other = copy.deepcopy(model.blocks[0])

    assert other.forward.module is other  # type: ignore[attr-defined]


def test_a_shallow_copy_calls_itself() -> None:
    """Replicas of a module share its dict, and have other parameters."""
    block = nn.Linear(2, 2)
    checkpoint_modules(block, by_name(""))
    other = copy.copy(block)
    other._parameters = {name: nn.Parameter(p * 0) for name, p in block._parameters.items()}

    y = other(torch.ones(1, 2))
    y.sum().backward()

    assert not y.any()
    assert other.weight.grad is not None
    assert block.weight.grad is None


@pytest.mark.parametrize("save", [pickle.dumps, None], ids=["pickle", "torch"])
def test_a_pickled_model_is_the_plain_one(save: Callable[[Any], bytes] | None) -> None:
    """How it is checkpointed belongs to the run, and so do locks and generators."""
    model = _stack()
    checkpoint_modules(model, BLOCKS)
    expected = _step_with_seed(model)

    if save is None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = pickle.loads(save(model))

    calls = _calls_of(other)
    loss = _step_with_seed(other)
    loss.backward()
    assert torch.equal(loss, expected)
    assert len(calls) == 3
    assert other.blocks[0].forward.__self__ is other.blocks[0]
    checkpoint_modules(other, BLOCKS)
    _step(other).backward()
    assert len(calls) == 3 + 6


def test_a_model_goes_without_the_garbage_collector() -> None:
    """Its parameters are what memory is full of."""
    model = _stack()
    checkpoint_modules(model, BLOCKS, checkpointer=Checkpointer(keeps=inside(model, BLOCKS)))
    _step(model).backward()
    weight = weakref.ref(model.blocks[0].up.weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


# ---- A forward that was there before, or came after ----


def test_a_forward_of_the_instance_is_what_is_checkpointed() -> None:
    """Libraries patch forward too, and theirs goes on."""
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    inner = block.forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * inner(x)

    x = torch.randn(3, 4)
    expected = 2 * block(x)
    block.forward = doubled
    calls = _calls_of(block)
    applied = checkpoint_modules(block, by_name(""))
    y = block(x)
    y.sum().backward()

    assert torch.equal(y, expected)
    assert len(calls) == 2
    applied.remove()
    assert block.forward is doubled


def test_inside_of_a_later_patch_it_goes_idle() -> None:
    """Taking it out from under another would undo what is not ours."""
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    applied = checkpoint_modules(block, by_name(""))
    inner = block.forward
    block.forward = patched = lambda x: 2 * inner(x)
    calls = _calls_of(block)

    applied.remove()
    block(torch.randn(3, 4)).sum().backward()

    assert block.forward is patched
    assert len(calls) == 1


def test_statistics_are_written_once() -> None:
    """The checkpointer must find the module, to know its buffers."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = copy.deepcopy(plain)
    checkpoint_modules(model, by_name("1"))
    x = torch.randn(8, 4)
    for each in (plain, model):
        each(x).sum().backward()

    assert_equal(list(model.state_dict().values()), list(plain.state_dict().values()))


# ---- Misuse ----


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (by_name("layers.*"), r"selects no module; the model has .*'blocks.0' \(Block\)"),
        (by_name("blocks.0", "blocks"), r"'blocks' is a ModuleList, which is never.*'blocks.\*'"),
    ],
)
def test_a_selection_of_nothing_to_call_is_refused(policy: ModulePolicy, message: str) -> None:
    """And leaves the model as it was."""
    model = _stack()
    with pytest.raises(CheckpointError, match=message):
        checkpoint_modules(model, policy)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_module_is_checkpointed_once() -> None:
    """Twice costs a third run, and is a mistake."""
    model = _stack()
    applied = checkpoint_modules(model, by_name("blocks.1"))

    with pytest.raises(CheckpointError, match=r"'blocks.1' is checkpointed already; remove\(\)"):
        checkpoint_modules(model, BLOCKS)

    assert "forward" not in vars(model.blocks[0])
    applied.remove()
    assert checkpoint_modules(model, BLOCKS).names == ("blocks.0", "blocks.1", "blocks.2")


# ---- Models of others ----


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=32, n_layer=3, n_head=2, n_embd=16, n_positions=16, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).train()


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=16, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "policy", "keeps"),
    [
        (_gpt2, by_name("transformer.h.*"), MATMULS),
        (_llama, every_nth(2, by_name("model.layers.*")), None),
        (_llama, by_name("model.layers.*", "model.layers.*.mlp"), MATMULS),
    ],
    ids=["gpt2", "llama", "llama nested"],
)
def test_models_of_transformers_train_the_same(
    make: Callable[[], nn.Module], policy: ModulePolicy, keeps: Any
) -> None:
    """Their blocks take keywords, masks and tuples of positions."""
    pytest.importorskip("transformers")

    def numbers(apply: Callable[[nn.Module], CheckpointedModules | None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        for step in range(2):
            ids = torch.arange(12).reshape(2, 6) + step
            mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward()
            found += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, torch.get_rng_state()]

    checkpointer = Checkpointer(keeps=keeps)
    apply = partial(checkpoint_modules, policy=policy, checkpointer=checkpointer)

    assert_equal(numbers(apply), numbers(lambda model: None))
