"""Models and loops as people write them: the numbers of plain torch, and nothing left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_weights_of, train
from zero_comm import Group
from zero_partition import StateError
from zero_partition.seams import find_sharded

NUM_STEPS = 4
WIDTH = 16


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _mean_square(model: nn.Module, step: int) -> Tensor:
    return model(_x(step)).square().mean()


# ---- Calls ----


class _Loop(_Chain):
    """The first block a number of times that the data decides."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.blocks[0](x)
        return super().forward(x)


class _Keywords(_Chain):
    def forward(self, *, x: Tensor, unused: str = "") -> dict[str, Tensor | None]:
        for block in self.blocks:
            x = block(x=x)
        return {"x": x, "none": None}


class _CollidingBlock(_Block):
    """Attributes of every name that hooks, units or optimizers might want for themselves."""

    id = unit = None

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shard", torch.ones(1))
        for name in ("group", "state", "grad", "rank", "inside", "around", "version", "slot"):
            setattr(self, name, 1)

    def compile(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        assert self.compile() == "mine"
        return super().forward(x) * self.sharded * self.shard * self.state * self.grad


class _Delegating(nn.Module):
    """Hands every attribute that it does not have on to what it wraps."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)


def _wrapped_inside() -> nn.Module:
    model = _Chain()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _Delegating(_Delegating(block))
    return _Delegating(model)


def _colliding() -> nn.Module:
    model = _Chain()
    model.blocks = nn.ModuleList(_CollidingBlock() for _ in range(4))
    model.schedule = model.reducer = model.units = model.unshard = "mine"
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "loop": (_Loop, lambda m, step: m(_x(step), times=(3, 0, 5, 1)[step]).square().mean()),
    "keywords": (_Keywords, lambda m, step: m(x=_x(step), unused="u")["x"].square().mean()),
    "colliding-names": (_colliding, _mean_square),
    "delegating-wrappers": (_wrapped_inside, _mean_square),
    "frozen-first": (_Chain, _mean_square),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_train_as_in_plain_torch(group: Group, name: str) -> None:
    """No surprise for the model's author."""
    make, loss_of = MODELS[name]

    def build() -> nn.Module:
        model = make()
        if name == "frozen-first":  # inputs that need no gradient meet units that have none
            for param in model.blocks[0].parameters():
                param.requires_grad_(False)
        return model

    _assert_as_plain(group, build, _in_steps(loss_of))


def test_a_sharded_model_may_be_wrapped(group: Group) -> None:
    """A wrapper answers for the module inside, and must not be taken for it."""
    plain, model = parity.build(_Chain), parity.build(_Chain)
    expected = _in_steps(_mean_square)(plain, parity.adamw(plain))
    optimizer = parity.adamw(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    wrapped = _Delegating(model)

    assert _in_steps(_mean_square)(wrapped, optimizer) == expected
    assert_weights_of(model, plain, group=group, what="wrapped")
    with pytest.raises(StateError, match="pass the very module"):
        zero_engine.full_state_dict(wrapped)


# ---- Hooks of the user's ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_read_whole_parameters_and_change_outputs(
    group: Group, when: str
) -> None:
    """Also one that was registered after ours, and what it makes of the output is the output."""

    def hook(model: nn.Module) -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: (args[0] * m.linear.weight.sum(),))
            block.register_forward_hook(lambda m, args, out: [out * m.linear.bias.mean()])
            block.register_forward_hook(lambda m, args, out: out[0] + args[0])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        if when == "after":
            hook(model)
        return _in_steps(_mean_square)(model, optimizer)

    def make() -> nn.Module:
        model = _Chain()
        if when == "before":
            hook(model)
        return model

    _assert_as_plain(group, make, train)


# ---- Backwards ----


def _separately(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        middle = model.blocks[1](model.blocks[0](_x(step)))  # without the model's own forward
        end = model(_x(step))
        parts = [middle.mean(), end.square().mean(), end.mean()]
        with _summed_locally(model):
            parts[1].backward(retain_graph=True)
            parts[0].backward()
        parts[2].backward()
        losses += [part.item() for part in parts]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _on_threads(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for threads in (True, False):
        with torch.autograd.set_multithreading_enabled(threads):
            losses += _in_steps(_mean_square)(model, optimizer)
    return losses


def _under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(_x(step))
            assert out.dtype == torch.bfloat16
            loss = out.float().square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        loss = _mean_square(model, step)
        for no_grad in (torch.inference_mode, torch.no_grad):
            model.eval()
            with no_grad():
                losses.append(model(_x(99)).sum().item())
            model.train()
        loss.backward()
        with torch.inference_mode():
            losses.append(model.blocks[2](_x(98)).sum().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


LOOPS = {
    f.__name__.strip("_"): f for f in (_separately, _on_threads, _under_autocast, _with_evaluation)
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_many_kinds_train_as_in_plain_torch(group: Group, loop: str) -> None:
    """What stands between forward, backward and step is the user's own business."""
    _assert_as_plain(group, _Chain, LOOPS[loop])


class _NestedCheckpoints(_Chain):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor, start: int) -> Tensor:
            x = checkpoint(self.blocks[start], x, use_reentrant=self.use_reentrant)
            return self.blocks[start + 1](x)

        x = x + 0 * self.blocks[0](x)  # reentrant recomputation needs an input with a gradient
        for start in (0, 2):
            x = checkpoint(inner, x, start, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_recomputation_inside_recomputation(group: Group, use_reentrant: bool) -> None:
    """A unit is made whole in the middle of another's recomputation, which is in backward."""
    _assert_as_plain(group, lambda: _NestedCheckpoints(use_reentrant), _in_steps(_mean_square))


# ---- Several models ----


def _combined(group: Group, stage: int) -> None:
    def train(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> list[float]:
        losses = []
        for step in range(NUM_STEPS):
            middle = pairs[0][0](_x(step))
            loss = pairs[1][0](middle).square().mean() + middle.mean()
            loss.backward()
            losses.append(loss.item())
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    _assert_pairs_as_plain(group, stage, train)


def _alternating(group: Group, stage: int) -> None:
    def train(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> list[float]:
        (maker, maker_optimizer), (critic, critic_optimizer) = pairs
        losses = []
        for step in range(NUM_STEPS):
            fake = maker(_x(step))
            critic_loss = critic(fake.detach()).mean() - critic(_x(step + 70)).mean()
            critic_loss.backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
            maker_loss = critic(fake).square().mean()
            maker_loss.backward()
            maker_optimizer.step()
            maker_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            losses += [critic_loss.item(), maker_loss.item()]
        return losses

    _assert_pairs_as_plain(group, stage, train)


@pytest.mark.parametrize("how", [_combined, _alternating], ids=lambda f: f.__name__.strip("_"))
def test_two_sharded_models_train_side_by_side(ranks, how: Callable) -> None:
    """One backward through both ends both; a GAN's critic also gets gradients that it drops."""
    for stage in parity.STAGES:
        ranks(2).run(how, stage=stage)


def _assert_pairs_as_plain(group: Group, stage: int, train: Callable) -> None:
    plain = [parity.build(_Chain, seed=seed) for seed in range(2)]
    expected = train([(model, parity.adamw(model)) for model in plain])
    pairs = []
    for seed in range(2):
        model = parity.build(_Chain, seed=seed)
        optimizer = parity.adamw(model)
        pairs.append(zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group))
    assert train(pairs) == expected
    for (model, _), theirs in zip(pairs, plain, strict=True):
        assert_weights_of(model, theirs, group=group, what=f"stage {stage}")
        _assert_at_rest(model)


# ---- Inference ----


def test_inference_needs_no_optimizer(group: Group) -> None:
    """Memory that inference mode made must do for what comes after it, too."""
    plain, model = parity.build(_Chain), parity.build(_Chain)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    model.eval()
    for step, no_grad in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad) * 2):
        with no_grad():
            assert torch.equal(model(_x(step)), plain(_x(step)))
        _assert_at_rest(model)


# ---- What is compared ----


def _in_steps(
    loss_of: Callable[[nn.Module, int], Tensor],
) -> Callable[[nn.Module, torch.optim.Optimizer], list[float]]:
    return partial(train, loss_of=loss_of, num_steps=NUM_STEPS)


@contextlib.contextmanager
def _summed_locally(model: nn.Module) -> Iterator[None]:
    """One reduction per step, so that the result can be compared bit for bit."""
    is_ours = find_sharded(model) is not None
    with zero_engine.no_sync(model) if is_ours else contextlib.nullcontext():
        yield


def _assert_as_plain(
    group: Group,
    make: Callable[[], nn.Module],
    train: Callable[[nn.Module, torch.optim.Optimizer], list[float]],
) -> None:
    """All ranks see one batch, so that the mean of two gradients is either, bit for bit."""
    plain = parity.build(make)
    expected = train(plain, _optimizer(plain))
    for stage in (0, 2, 3):
        model = parity.build(make)
        optimizer = _optimizer(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, window=2), group=group)
        assert train(model, optimizer) == expected, f"stage {stage}"
        assert_weights_of(model, plain, group=group, what=f"stage {stage}")
        _assert_at_rest(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _assert_at_rest(model: nn.Module) -> None:
    for unit in find_sharded(model).units:
        assert unit.depth == 0
        if unit.placement.value == "sharded":
            assert unit.state.name != "UNSHARDED", unit.name
