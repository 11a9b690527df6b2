"""`Precision(keep=...)`: some modules in another dtype than the model, as FSDP2's policies do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import zero_engine
from residences import is_same
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zero_comm import Group, all_gather_json, record_traffic
from zero_comm.testing import assert_close, equal
from zero_engine import ModulePrecision, Precision, Wire, ZeroConfig
from zero_partition import PartitionError

WIDTH: Final = 8
BF16, FP32 = torch.bfloat16, torch.float32
REDUCTIONS: Final = ("reduce_scatter", "all_reduce")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)[..., :1]
        return x + self.linear(self.norm(x)) * weights.to(x.dtype)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# What to keep; names of modules in which dtype; which of these return what dtype.
Rule = tuple[str, torch.dtype, str]  # end of the name, dtype, "restored" or "as it comes"
KEPT: Final[dict[str, tuple[dict[str, Any], list[Rule]]]] = {
    "norms": ({"*norm": FP32}, [("norm", FP32, "restored")]),
    "head": ({"head": ModulePrecision(FP32)}, [("head", FP32, "as it comes")]),
    "routers": (
        {"*.router": ModulePrecision(FP32), "head": ModulePrecision(outputs=FP32)},
        [("router", FP32, "as it comes"), ("head", BF16, "float32")],
    ),
    "an embedding": ({"embed": FP32}, [("embed", FP32, "restored")]),
    "a block, but for its linear": (
        {"blocks.0": FP32, "blocks.0.linear": BF16},
        [("blocks.0", FP32, "restored"), ("blocks.0.linear", BF16, "restored")],
    ),
}


def _convert(model: nn.Module, rules: list[Rule]) -> nn.Module:
    """Plain torch that computes so, by casts of its own."""
    model = model.to(BF16)
    for end, dtype, returns in rules:
        for name, module in model.named_modules():
            if name.endswith(end):
                module.to(dtype)
                module.forward = _casting(module.forward, dtype, returns)  # type: ignore[method-assign]
    return model


def _casting(forward: Callable, dtype: torch.dtype, returns: str) -> Callable:
    def cast(x: Tensor) -> Tensor:
        given = x.dtype if x.is_floating_point() else BF16
        y = forward(x.to(dtype) if x.is_floating_point() else x)
        if returns == "float32":
            return y.float()
        return y.to(given) if returns == "restored" else y

    return cast


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 10, (4, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def _expected(model: nn.Module, rules: list[Rule]) -> list[float]:
    """Masters in float32 beside a copy that computes, in one process."""
    computes = _convert(copy.deepcopy(model), rules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pairs = list(zip(model.parameters(), computes.parameters(), strict=True))
    losses = []
    for step in range(4):
        with torch.no_grad():
            for master, param in pairs:
                param.copy_(master)
        loss = _loss(computes, step)
        loss.backward()
        for master, param in pairs:
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kept", KEPT)
def test_a_module_computes_in_its_own_dtype(group: Group, kept: str) -> None:
    keep, rules = KEPT[kept]
    torch.manual_seed(0)
    plain = _Model()
    expected = _expected(copy.deepcopy(plain), rules)
    for stage in (1, 2, 3):
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = Precision(params=BF16, keep=keep)
        config = ZeroConfig(stage, precision=precision, min_unit_bytes=0)
        zero_engine.shard(model, optimizer, config, group=group)
        losses = []
        for step in range(4):
            loss = _loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == expected, stage
        dtypes = {name: param.dtype for name, param in model.named_parameters()}
        computes = _convert(copy.deepcopy(plain), rules)
        assert dtypes == {name: param.dtype for name, param in computes.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_policies_are_those_of_fsdp2(group: Group) -> None:
    """Weights are equal bit for bit where FSDP2 wraps these modules with such policies.

    Since torch 2.15 it rounds averages of 16-bit gradients otherwise, with any policy.
    """
    keep = {
        "*norm": FP32,
        "*.router": ModulePrecision(FP32),
        "head": ModulePrecision(FP32, outputs=torch.float64),
    }
    torch.manual_seed(0)
    plain = _Model()
    theirs = copy.deepcopy(plain)
    policies = {
        "norm": MixedPrecisionPolicy(FP32, output_dtype=BF16),
        "router": MixedPrecisionPolicy(FP32),
        "head": MixedPrecisionPolicy(FP32, output_dtype=torch.float64),
    }
    for name, module in theirs.named_modules():
        if policy := policies.get(name.rpartition(".")[2]):
            fully_shard(module, mp_policy=policy)
    fully_shard(theirs, mp_policy=MixedPrecisionPolicy(BF16))
    config = ZeroConfig(3, precision=Precision(params=BF16, keep=keep), min_unit_bytes=0)
    weights, losses = [], []
    for model in (plain, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if model is plain:
            zero_engine.shard(model, optimizer, config, group=group)
        for step in range(3):
            loss = _loss(model, 2 * step + group.rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    zero_engine.unshard(plain)
    weights = {name: param.full_tensor() for name, param in theirs.named_parameters()}
    is_exact = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
    atol = 0.0 if is_exact else 1e-3
    assert_close(dict(plain.named_parameters()), weights, rtol=0, atol=atol)
    assert losses[:3] == pytest.approx(losses[3:], rel=0, abs=atol)


def test_stage_0_and_a_model_of_16_bits(group: Group) -> None:
    """Without `params`, what is kept is all that is converted."""
    torch.manual_seed(0)
    model = _Model().to(BF16)
    plain = copy.deepcopy(model)
    config = ZeroConfig(0, precision=Precision(masters=None, keep={"*norm": FP32}))
    zero_engine.shard(model, None, config, group=group)
    expected = _loss(_convert(plain, [("norm", FP32, "restored")]), 0)
    assert equal(_loss(model, 0), expected)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def test_a_pattern_comes_before_what_is_so_of_batch_norms(group: Group) -> None:
    """By default they return what they were given; a policy for them may say otherwise."""
    for keep, dtype in (({}, BF16), ({"norm": ModulePrecision(FP32)}, FP32)):
        model = _Normed()
        config = ZeroConfig(1, precision=Precision(params=BF16, keep=keep))
        zero_engine.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), config, group=group)
        assert model(torch.ones(3, WIDTH)).dtype == dtype
        assert {name: p.dtype for name, p in model.named_parameters()} == {
            "first.weight": BF16,
            "first.bias": BF16,
            "norm.weight": FP32,
            "norm.bias": FP32,
        }


class _Tied(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_what_cannot_be_is_said(group: Group) -> None:
    def shard(model: nn.Module, keep: Any) -> None:
        config = ZeroConfig(3, precision=Precision(params=BF16, keep=keep))
        zero_engine.shard(model, None, config, group=group)

    with pytest.raises(PartitionError, match=r"keep: 'hed' matches no module; did you mean 'head'"):
        shard(_Model(), {"hed": FP32})
    with pytest.raises(PartitionError, match=r"'embed.weight' would be .*tied to 'head.weight'"):
        shard(_Tied(), {"head": FP32})
    shard(_Tied(), {"head": FP32, "embed": FP32})
    for keep in ({"head": "float32"}, {3: FP32}, [("head", FP32)], FP32):
        with pytest.raises(PartitionError, match=r"Precision.keep: expected patterns"):
            Precision(keep=keep)  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match=r"ModulePrecision.params: expected a floating"):
        ModulePrecision(torch.int64)


# ---- What travels in another dtype than it rests in ----


def _build_plain() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _loss(model: nn.Module, rank: int) -> Tensor:
    tokens = torch.randint(10, (2, 4), generator=torch.Generator().manual_seed(rank))
    with torch.autocast(tokens.device.type, BF16):
        return model(tokens).float().square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_modules_of_an_autocast_travel_in_its_dtype(group: Group, stage: int) -> None:
    """Their products are of bf16 anyway: half of the bytes, and the same loss.

    Gradients are what the sum of bf16 gradients is; those of other modules are exact.
    """
    keep = {nn.Linear: ModulePrecision(travel=BF16)}
    sent, model = {}, _build_plain()
    for what, kept in (("all", {}), ("kept", keep)):
        model = _build_plain()
        config = ZeroConfig(stage, precision=Precision(masters=None, keep=kept), min_unit_bytes=0)
        zero_engine.shard(model, torch.optim.SGD(model.parameters(), 0.1), config, group=group)
        with record_traffic(group) as traffic:
            loss = _loss(model, group.rank)
            loss.backward()
        sent[what] = [
            sum(all_gather_json(each.payload_bytes, group=group))
            for each in (traffic.inside(*REDUCTIONS), traffic.inside("all_gather"))
        ]
    plain, grads = _build_plain(), []
    for rank in range(group.world_size):
        its_loss = _loss(plain, rank)
        grads.append(torch.autograd.grad(its_loss, list(plain.parameters())))
        assert rank != group.rank or is_same(loss, its_loss)

    numels = [sum(p.numel() for p in plain.parameters())]
    linear = [m for m in plain.modules() if type(m) is nn.Linear]
    numels.append(sum(p.numel() for m in linear for p in m.parameters()))
    assert sent["all"][0] - sent["kept"][0] == 2 * numels[1]
    gathered = sent["all"][1] - sent["kept"][1]
    assert (gathered >= 2 * numels[1]) if stage == 3 else gathered == 0, (sent, numels)
    of_linear = {id(p) for m in linear for p in m.parameters()}
    for mine, param, of_ranks in zip(
        model.parameters(), plain.parameters(), zip(*grads, strict=True), strict=True
    ):
        found, mean = zero_engine.full_grad(mine), sum(of_ranks) / len(of_ranks)
        if id(param) in of_linear:
            assert equal(found, found.bfloat16().float())
            assert_close(found, mean, rtol=0.02, atol=1e-3)
        else:
            assert equal(found, mean)


def test_a_dtype_to_travel_in_is_checked() -> None:
    """Integers would lose everything, in silence."""
    with pytest.raises(PartitionError, match=r"ModulePrecision.travel: expected torch.bfloat16"):
        ModulePrecision(travel=torch.int8)


def test_tied_parameters_travel_one_way(group: Group) -> None:
    """As any of their modules says; not as two say."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    kinds = {nn.Linear: ModulePrecision(travel=BF16)}

    assert Precision(keep=kinds).travels_of(model)[id(model[0].weight)] is BF16
    kinds[nn.Embedding] = ModulePrecision(travel=torch.float16)
    with pytest.raises(PartitionError, match=r"'1.weight' would travel in torch.bfloat16"):
        zero_engine.shard(model, None, ZeroConfig(3, precision=Precision(keep=kinds)), group=group)


def test_a_codec_counts_before_a_dtype_to_travel_in(group: Group) -> None:
    """Whoever asks for fewer bits gets them."""
    sent = []
    for keep in ({}, {nn.Linear: ModulePrecision(travel=BF16)}):
        model, precision = _build_plain(), Precision(masters=None, keep=keep)
        config = ZeroConfig(3, precision=precision, wire=Wire(params="int8", levels=1))
        zero_engine.shard(model, None, config, group=group)
        with torch.no_grad(), record_traffic(group) as traffic:
            model(torch.zeros(1, 2, dtype=torch.long))
        sent.append(traffic.inside("all_gather").payload_bytes)

    assert sent[0] == sent[1]
