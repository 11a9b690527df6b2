"""Modules of every kind that torch has and people write: the numbers of plain torch.

All ranks see one batch, so that the mean of two gradients is either, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from training import assert_trains_as_plain, assert_weights_of
from zero_comm import Group
from zero_partition import StateError
from zero_partition.seams import find_sharded

WIDTH = 16
NUM_STEPS = 3


class _Of(nn.Module):
    """Parts and a forward that uses them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _param(*shape: int, **how: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, **how) / 4)


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _in_turn(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def _blocks(
    make: Callable[[], nn.Module], num: int = 4, run: Callable[..., Any] = _in_turn, **more: Any
) -> nn.Module:
    return _Of(run, blocks=nn.ModuleList(make() for _ in range(num)), **more)


def _tanh(make: Callable[[], nn.Module] = _linear) -> nn.Module:
    return _Of(lambda module, x: torch.tanh(module.inner(x)), inner=make())


def _tanh_blocks(make: Callable[[], nn.Module] = _linear, **how: Any) -> nn.Module:
    return _blocks(lambda: _tanh(make), **how)


# ---- Weights that are computed ----


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def _parametrized() -> nn.Module:
    linear = _linear()
    scaled = [_Of(lambda m, weight: weight * m.gain, gain=_param(WIDTH, 1)) for _ in range(2)]
    for parametrization in (_Symmetric(), *scaled):
        parametrize.register_parametrization(linear, "weight", parametrization)
    return linear


def _hypernetwork(module: nn.Module, x: Tensor) -> Tensor:
    for maker, code in zip(module.makers, module.codes, strict=True):
        x = torch.tanh(functional.linear(x, maker(code).view(WIDTH, WIDTH)))
    return x


def _turned_round(model: nn.Module, x: Tensor) -> Tensor:
    """A decoder that is the encoder turned round, and so reads weights of other units."""
    x = _in_turn(model, x)
    for block in reversed(model.blocks):
        x = torch.tanh(functional.linear(x, block.inner.weight.t()))
    return x


# ---- Torch's own of unusual structure ----


def _encode(model: nn.Module, x: Tensor) -> Tensor:
    """In evaluation torch's fast path reads the weights of children, and nests the batch."""
    x = x.view(2, 2, WIDTH).repeat(1, 2, 1)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[0, 2:] = True
    return model.encoder(x, src_key_padding_mask=mask).masked_fill(mask[..., None], 0)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
    return _Of(_encode, encoder=nn.TransformerEncoder(layer, 3))


def _bags() -> nn.Module:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        ids = (x[:, :3].abs() * 3).long().clamp(max=9)
        return module.linear(module.bag(ids) + module.table(ids).sum(1))

    bag, table = nn.EmbeddingBag(10, WIDTH, mode="sum"), nn.Embedding(10, WIDTH, padding_idx=0)
    return _Of(run, bag=bag, table=table, linear=_linear())


def _lists() -> nn.Module:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        for gain in module.gains:
            x = x * gain
        for inner in module.nested:
            x = x + inner[0]
        return torch.tanh(x @ module.named["b"]) + module.named["a"]

    return _Of(
        run,
        gains=nn.ParameterList([torch.randn(WIDTH) for _ in range(5)]),
        named=nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH, WIDTH)}),
        nested=nn.ModuleList(nn.ParameterList([torch.randn(WIDTH)]) for _ in range(2)),
    )


# ---- Dtypes and shapes ----


def _complex() -> nn.Module:
    return _Of(
        lambda m, x: (x.to(torch.complex64) @ m.weight).abs() + m.bias.abs().sum().float(),
        weight=_param(WIDTH, WIDTH, dtype=torch.complex64),
        bias=_param(7, dtype=torch.complex128),
    )


def _quantised() -> nn.Module:
    """Frozen bytes, eight-bit floats and a zero point under trained scales."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        weight = (module.codes.float() - module.zero) / 255 + module.small.float()
        x = torch.tanh(x @ weight * module.scale) * module.table.float().sum()
        return x + module.wide.float()[0]

    module = _Of(
        run,
        codes=_frozen(torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)),
        small=_frozen(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)),
        wide=_frozen(torch.randint(0, 999, (5,)).to(torch.uint16)),
        zero=_frozen(torch.tensor(7, dtype=torch.int32)),
        scale=_param(WIDTH),
    )
    module.register_buffer("table", torch.randn(4).to(torch.float8_e5m2))
    return module


def _experts() -> nn.Module:
    """All experts in one parameter, of which views are taken in forward; and one of no dim."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        first, second, *_ = module.weights.unbind(0)
        x = torch.tanh(x @ first + x @ second + x @ module.weights[3])
        return x * module.temperature.exp()

    return _Of(run, weights=_param(4, WIDTH, WIDTH), temperature=_param())


def _huge() -> nn.Module:
    """One parameter larger than all others together, and very many of a few elements."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        rows = module.table((x[:, 0].abs() * 1000).long())
        return torch.tanh(x + rows) * torch.cat(list(module.tiny)).mean()

    tiny = nn.ParameterList([torch.rand(1 + index % 3) for index in range(100)])
    return _Of(run, table=nn.Embedding(5000, WIDTH), tiny=tiny)


# ---- Forwards of unusual kind ----


def _generates(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Returns before it has begun."""
    yield torch.tanh(module.first(x))
    yield torch.tanh(module.second(x) * module.first.weight.sum())


def _summed_generators() -> nn.Module:
    def block() -> nn.Module:
        generator = _Of(_generates, first=_linear(), second=_linear())
        return _Of(lambda m, x: torch.stack(list(m.inner(x))).sum(0), inner=generator)

    return _blocks(block, 3)


class _OwnCall(nn.Linear):
    """Goes past torch's way from a call to a forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.Linear.forward(self, x)) * self.bias

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError(x)


def _calls_forward(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block.forward(x)
    return x


def _varying(model: nn.Module, x: Tensor) -> Tensor:
    """The first block a number of times that differs from call to call."""
    model.calls += 1
    for _ in range((3, 0, 5, 1)[model.calls % 4]):
        x = model.blocks[0](x)
    return _in_turn(model, x)


def _by_keyword() -> nn.Module:
    def run(block: nn.Module, *, x: Tensor, unused: str = "") -> dict[str, Tensor | None]:
        return {"x": torch.tanh(block.inner(input=x)), "none": None}

    def call(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x=x, unused="u")["x"]
        return x

    return _blocks(lambda: _Of(run, inner=_linear()), run=call)


class _Multiply(torch.autograd.Function):
    """Keeps the weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight.t(), x.t() @ grad


def _own_function() -> nn.Module:
    return _Of(lambda m, x: torch.tanh(_Multiply.apply(x, m.weight)), weight=_param(WIDTH, WIDTH))


def _remembers() -> nn.Module:
    """Keeps its parameters in a list of its own, and its last output."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(x @ module.mine[0]) + module.linear.bias
        y = y if module.last is None else y + module.last
        module.last = y.detach()
        return y

    linear = _linear()
    return _Of(run, linear=linear, mine=[linear.weight], last=None)


class _Colliding(nn.Linear):
    """Attributes of every name that hooks, units or optimizers might want for themselves."""

    id = unit = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.sharded = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shard", torch.ones(1))
        self.units = self.schedule = self.reducer = self.unshard = "mine"
        for name in ("group", "state", "grad", "rank", "inside", "around", "version", "slot"):
            setattr(self, name, 1)

    def compile(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        assert {self.compile(), self.units, self.schedule} == {"mine"}
        return torch.tanh(super().forward(x)) * self.sharded * self.shard * self.state * self.grad


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


def _add_hooks(model: nn.Module) -> nn.Module:
    """Which read whole parameters, and change what goes in and comes out."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args: (args[0] * m.inner.weight.sum(),))
        block.register_forward_hook(lambda m, args, out: [out * m.inner.bias.mean()])
        block.register_forward_hook(lambda m, args, out: out[0] + args[0])
    return model


def _recomputed_in_recomputed(use_reentrant: bool) -> nn.Module:
    """A unit is made whole in the middle of another's recomputation, which is in backward."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        if not model.training:
            return _in_turn(model, x)

        def inner(x: Tensor, start: int) -> Tensor:
            x = checkpoint(model.blocks[start], x, use_reentrant=use_reentrant)
            return model.blocks[start + 1](x)

        x = x + 0 * model.blocks[0](x)  # reentrant recomputation needs an input with a gradient
        for start in (0, 2):
            x = checkpoint(inner, x, start, use_reentrant=use_reentrant)
        return x

    return _tanh_blocks(run=run)


def _each_twice() -> nn.Module:
    first, second = _tanh(), _tanh()
    return nn.Sequential(first, nn.Sequential(second, first), second, nn.Sequential(first, first))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "each-block-twice": _each_twice,  # and so under two names
    "weight-norm": lambda: _tanh_blocks(lambda: parametrizations.weight_norm(_linear())),
    "spectral-norm": lambda: _tanh_blocks(lambda: parametrizations.spectral_norm(_linear())),
    "orthogonal": lambda: _tanh_blocks(lambda: parametrizations.orthogonal(_linear())),
    "parametrized": lambda: _tanh_blocks(_parametrized),
    "pruned": lambda: _tanh_blocks(lambda: prune.random_unstructured(_linear(), "weight", 0.3)),
    "hypernetwork": lambda: _Of(
        _hypernetwork,
        makers=nn.ModuleList(nn.Linear(4, WIDTH * WIDTH) for _ in range(3)),
        codes=_param(3, 4),
    ),
    "transposed-ties": lambda: _tanh_blocks(run=_turned_round),
    "lstm": lambda: _blocks(
        lambda: _Of(
            lambda m, x: m.rnn(x[None])[0][0],
            rnn=nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
        )
    ),
    "attention": lambda: _blocks(
        lambda: _Of(
            lambda m, x: m.attention(x[None], x[None], x[None])[0][0],
            attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        )
    ),
    "encoder": _encoder,
    "embedding-bags": lambda: _blocks(_bags),
    "parameter-lists": lambda: _blocks(_lists),
    "complex": lambda: _blocks(_complex),
    "quantised": lambda: _blocks(_quantised),
    "stacked-experts": lambda: _blocks(_experts),
    "one-huge-many-tiny": lambda: _blocks(_huge, 2),
    "generators": _summed_generators,
    "own-call": lambda: _blocks(lambda: _OwnCall(WIDTH, WIDTH)),
    "forward-called-by-hand": lambda: _tanh_blocks(run=_calls_forward),
    "varying-loop": lambda: _tanh_blocks(run=_varying, calls=0),
    "keywords": _by_keyword,
    "own-autograd-function": lambda: _blocks(_own_function),
    "remembers": lambda: _blocks(_remembers),
    "colliding-names": lambda: _blocks(_Colliding),
    "delegating-wrappers": lambda: _Delegating(_blocks(lambda: _Delegating(_Delegating(_tanh())))),
    "hooks": lambda: _add_hooks(_tanh_blocks()),
    "recomputed-in-recomputed": lambda: _recomputed_in_recomputed(False),
    "recomputed-in-recomputed-reentrant": lambda: _recomputed_in_recomputed(True),
}
# In evaluation torch takes its fused kernel for plain parameters only.
_ROUNDED = {"encoder"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("turn", "kind"), list(enumerate(KINDS)))
def test_modules_of_every_kind_train_as_in_plain_torch(group: Group, turn: int, kind: str) -> None:
    """What a module does between its call and its return is its author's business."""
    configs = [ZeroConfig(stage, window=2) for stage in (turn % 2 * 2, 3)]
    how: Any = {"make_optimizer": _adamw, "tolerance": 1e-5 if kind in _ROUNDED else 0.0}
    for model, _ in assert_trains_as_plain(group, KINDS[kind], _train, *configs, **how):
        _assert_at_rest(model)


def test_a_sharded_model_may_be_wrapped_and_given_hooks(group: Group) -> None:
    """A wrapper answers for the module inside; a hook of the user's may come after ours."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return _train(_Delegating(_add_hooks(model)), optimizer)

    configs = [ZeroConfig(stage, window=2) for stage in (0, 2, 3)]
    for model, _ in assert_trains_as_plain(group, _tanh_blocks, run, *configs):
        with pytest.raises(StateError, match="pass the model that it was given"):
            zero_engine.full_state_dict(_Delegating(model))


@pytest.mark.parametrize("stage", parity.STAGES)
def test_two_sharded_models_train_side_by_side(group: Group, stage: int) -> None:
    """One backward through both ends both; a GAN's critic also gets gradients that it drops."""

    def train(pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> list[float]:
        (maker, maker_optimizer), (critic, critic_optimizer) = pairs
        losses = []
        for step in range(NUM_STEPS):
            fake = maker(_x(step))
            critic_loss = critic(fake.detach()).mean() - critic(_x(step + 70)).mean()
            parity.finish_step(critic_loss, critic_optimizer)
            maker_loss = critic(fake).square().mean() + fake.mean()
            parity.finish_step(maker_loss, maker_optimizer)
            if step == 1:
                critic_optimizer.step()
            critic_optimizer.zero_grad()
            losses += [critic_loss.item(), maker_loss.item()]
        return losses

    plain = [parity.build(_tanh_blocks, seed=seed) for seed in range(2)]
    expected = train([(model, _adamw(model)) for model in plain])
    pairs = [_sharded(group, _tanh_blocks, stage, seed=seed) for seed in range(2)]

    assert train(pairs) == expected
    for (model, _), theirs in zip(pairs, plain, strict=True):
        assert_weights_of(model, theirs, group=group, what=f"stage {stage}")
        _assert_at_rest(model)


def _sharded(
    group: Group, make: Callable[[], nn.Module], stage: int, *, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(make, seed=seed)
    return zero_engine.shard(model, _adamw(model), ZeroConfig(stage, window=2), group=group)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses, and what it gives in evaluation."""
    found: list[float] = []
    for step in range(NUM_STEPS):
        with torch.autograd.set_multithreading_enabled(step != 1):
            loss = model(_x(step)).square().mean()
            found.append(loss.item())
            parity.finish_step(loss, optimizer)
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            found += model(_x(50)).flatten().tolist()
        model.train()
    return found


def _assert_at_rest(model: nn.Module) -> None:
    for unit in find_sharded(model).units:
        assert unit.depth == 0
        if unit.placement.value == "sharded":
            assert unit.state.name != "UNSHARDED", unit.name


def _x(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class _Sharing(nn.Module):
    """Its second part is that of other blocks, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared, self.last = _linear(), shared, _linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.shared(self.own(x)).tanh())


def _sharing(shared: nn.Module, **before: nn.Module) -> nn.Module:
    blocks = nn.ModuleList(_Sharing(shared) for _ in range(6))
    return _Of(_in_turn, **before, blocks=blocks)


def _beside() -> nn.Module:
    shared = _linear()
    return _sharing(shared, part=shared)


SHARED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "in blocks": (lambda: _sharing(_linear()), "blocks.0.shared"),
    "beside blocks": (_beside, "part"),
    "with a unit inside": (
        lambda: _sharing(nn.Sequential(_linear(), nn.Tanh(), _linear())),
        "blocks.0.shared.0",
    ),
}


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("kind", SHARED)
def test_a_module_of_many_units_may_be_a_unit(group: Group, kind: str, window: int) -> None:
    """Its memory went to a later block, while the blocks between still needed it."""
    make, name = SHARED[kind]
    units = [name, *(f"blocks.{index}" for index in range(6))]
    plain, model = parity.build(make), parity.build(make)
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ZeroConfig(3, min_unit_bytes=0, window=window, units=units)
    zero_engine.shard(model, optimizer, config, group=group)
    for step in range(NUM_STEPS):
        for each, by in ((plain, its_optimizer), (model, optimizer)):
            parity.finish_step(each(torch.ones(2, WIDTH) * (step + 1)).square().mean(), by)
    assert_weights_of(model, plain, group=group, what=kind)
