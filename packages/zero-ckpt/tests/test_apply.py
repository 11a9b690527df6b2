"""A model's modules are checkpointed where they are, and the model is the same to everyone else."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_numbers import Block, Run, Stack, assert_equal, no_collector, plainly, train
from torch import Tensor, nn
from zero_ckpt import (
    MATMULS,
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
    torch.manual_seed(5)
    loss = model(torch.ones(2, 4, 8), plainly).square().sum()
    loss.backward()
    return loss


def _stack(depth: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(depth)


# ---- The law ----


def _assert_trains_as_plain(
    make: Callable[[], nn.Module], policy: ModulePolicy, keeps: Any
) -> None:
    def applied() -> nn.Module:
        model = make()
        checkpoint_modules(model, policy, checkpointer=Checkpointer(keeps=keeps))
        return model

    assert_equal(train(plainly, applied), train(plainly, make))


@pytest.mark.parametrize(
    ("policy", "keeps"),
    [
        (BLOCKS, None),
        (every_nth(2, BLOCKS), MATMULS),
        (by_name("blocks.1", "blocks.*.attention"), MATMULS),
        (lambda modules: [name for name in modules if name not in ("", "blocks")], None),
        (by_name("", "blocks.*"), MATMULS),
    ],
    ids=["blocks", "every second", "nested", "all", "model"],
)
def test_a_model_trains_the_same_with_and_without(policy: ModulePolicy, keeps: Any) -> None:
    """Also where a module that is selected lies in another. Statistics are written once."""
    _assert_trains_as_plain(Stack, policy, keeps)


class _OfTransformers(nn.Module):
    """Its blocks take keywords, masks and tuples of positions."""

    def __init__(self, name: str, **options: Any) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{name}Config")(vocab_size=8, use_cache=False, **options)
        self.model = getattr(transformers, f"{name}Model")(config)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        return self.model(inputs_embeds=x, attention_mask=mask).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "policy"),
    [
        ("GPT2", {"n_layer": 3, "n_head": 2, "n_embd": 8}, by_name("model.h.*")),
        (
            "Llama",
            {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8,
             "intermediate_size": 24, "attention_dropout": 0.1},
            by_name("model.layers.*", "model.layers.*.mlp"),
        ),
    ],
)  # fmt: skip
def test_models_of_transformers_train_the_same(
    name: str, options: dict[str, Any], policy: ModulePolicy
) -> None:
    """As they are, with their own calls of their blocks."""
    pytest.importorskip("transformers")
    _assert_trains_as_plain(partial(_OfTransformers, name, **options), policy, MATMULS)


def test_selected_modules_run_twice_and_no_others() -> None:
    """That it does nothing would pass every comparison of numbers."""
    model = _stack()
    calls = _calls_of(model)
    applied = checkpoint_modules(model, lambda _: ["blocks.2", "blocks.0"])

    _step(model)

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


def test_hooks_of_a_module_run_once_a_call() -> None:
    """Counters, pruning and spectral norm must not see calls that no one made."""
    plain = _stack(2)
    plain.blocks[0].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    nn.utils.parametrizations.weight_norm(plain.blocks[1].up)
    model = copy.deepcopy(plain)
    before = _calls_of(model, Block)
    checkpoint_modules(model, BLOCKS)
    after = _calls_of(model, Block)

    assert torch.equal(_step(model), _step(plain))
    assert before == after == ["blocks.0", "blocks.1"]


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
    model = _stack()
    before = [set(vars(module)) for module in model.modules()]
    applied = checkpoint_modules(model, BLOCKS)
    loss = model(torch.ones(2, 4, 8), plainly).sum()

    applied.remove()
    applied.remove()

    assert [set(vars(module)) for module in model.modules()] == before
    loss.backward()
    calls = _calls_of(model)
    _step(model)
    assert len(calls) == 3


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("copied", "is_plain"),
    [
        (copy.deepcopy, False),
        # How a model is checkpointed belongs to the run, and so do locks and generators.
        (lambda model: pickle.loads(pickle.dumps(model)), True),
        (_saved_and_loaded, True),
    ],
    ids=["copy", "pickle", "torch.save"],
)
def test_a_copy_has_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], is_plain: bool
) -> None:
    """A bound method in the copy would call the original's. Those that are pickled are plain."""
    model = _stack()
    checkpoint_modules(model, BLOCKS)
    expected = _step(model)
    model.zero_grad()

    other = copied(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    del model
    calls = _calls_of(other)

    assert torch.equal(_step(other), expected)
    assert len(calls) == (3 if is_plain else 6)
    assert all(param.grad is not None for param in other.parameters())
    assert inspect.signature(other.blocks[0].forward) == inspect.signature(Block(8).forward)
    if is_plain:
        checkpoint_modules(other, BLOCKS)
        _step(other)
        assert len(calls) == 3 + 6


def test_copies_of_one_module_call_themselves() -> None:
    """Models are built from a first layer. Replicas share its dict, and have other parameters."""
    block = nn.Linear(2, 2)
    checkpoint_modules(block, by_name(""))
    replica, other = copy.copy(block), copy.deepcopy(block)
    for each in (replica, other):
        each._parameters = {name: nn.Parameter(p * 0) for name, p in block._parameters.items()}

        y = each(torch.ones(1, 2))
        y.sum().backward()

        assert not y.any()
        assert each.weight.grad is not None
        assert block.weight.grad is None


def test_a_model_goes_without_the_garbage_collector() -> None:
    """Its parameters are what memory is full of."""
    model = _stack()
    checkpoint_modules(model, BLOCKS, checkpointer=Checkpointer(keeps=inside(model, BLOCKS)))
    _step(model)
    weight = weakref.ref(model.blocks[0].up.weight)
    with no_collector():
        del model
        assert weight() is None


# ---- A forward that was there before, or came after ----


def test_forwards_of_others_stay_where_they_are() -> None:
    """Libraries patch forward too. Taking ours out from under theirs would undo theirs."""
    block, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(3, 4)
    inner = block.forward
    block.forward = before = lambda x: 2 * inner(x)
    expected = block(x)
    calls = _calls_of(block)
    applied = checkpoint_modules(block, by_name(""))
    ours = block.forward
    block.forward = after = lambda x: 3 * ours(x)

    for is_removed in (False, True):
        if is_removed:
            applied.remove()
        calls.clear()
        y = block(x)
        y.sum().backward()
        assert torch.equal(y, 3 * expected)
        assert len(calls) == (1 if is_removed else 2)
        assert block.forward is after

    block.forward = ours
    applied.remove()
    assert block.forward is before


# ---- Misuse ----


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (by_name("blocks.0", "blocks"), r"'blocks' is a ModuleList, which is never.*'blocks.\*'"),
        # Twice costs a third run, and is a mistake.
        (BLOCKS, r"'blocks.1' is checkpointed already; remove\(\)"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused(policy: ModulePolicy, message: str) -> None:
    """And leaves the model as it was."""
    model = _stack()
    applied = checkpoint_modules(model, by_name("blocks.1"))

    with pytest.raises(CheckpointError, match=message):
        checkpoint_modules(model, policy)

    applied.remove()
    assert all("forward" not in vars(module) for module in model.modules())
    assert checkpoint_modules(model, BLOCKS).names == ("blocks.0", "blocks.1", "blocks.2")
