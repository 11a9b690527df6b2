"""16-bit parameters with masters: the arithmetic of mixed precision, written out in plain torch."""

from __future__ import annotations

import copy
import types
from contextlib import nullcontext
from functools import reduce
from typing import Any

import parity
import pytest
import torch
import zero_engine
from attrs import define, field, frozen
from one_dtype import OneDtype
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group, record_traffic
from zero_comm.testing import assert_close, equal
from zero_engine import Precision
from zero_partition import PartitionError, StateError, memory_report
from zero_partition.planning import keeps_free_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@frozen
class _Case:
    precision: Precision
    given: torch.dtype = FP32  # of the model as the user built it
    scale: float = 1.0
    num_micro_batches: int = 1
    reduces_once: bool = False


CASES = {
    "bf16": _Case(Precision(params=BF16)),
    "bf16-given": _Case(Precision(), given=BF16),
    "bf16-reduced-in-fp32": _Case(Precision(params=BF16, reduce=FP32)),
    "bf16-alone": _Case(Precision(params=BF16, masters=None)),
    "bf16-micro-batches": _Case(Precision(params=BF16), num_micro_batches=3),
    "bf16-no-sync": _Case(Precision(params=BF16), num_micro_batches=3, reduces_once=True),
    "fp16-scaled": _Case(Precision(params=FP16), scale=2.0**8),
    "fp32-reduced-in-bf16": _Case(Precision(reduce=BF16)),
    "fp16-predivided": _Case(Precision(params=FP16, predivide_factor=2.0), scale=2.0**8),
    "fp16-prescaled": _Case(Precision(params=FP16, predivide_factor=None), scale=2.0**8),
    "predivided-by-three": _Case(Precision(predivide_factor=3.0)),
    "mean-over-three": _Case(Precision(mean_over=3.0)),
    "fp16-mean-over-three": _Case(
        Precision(params=FP16, mean_over=3.0, predivide_factor=None), scale=2.0**8
    ),
    "mean-over-three-predivided": _Case(Precision(mean_over=3.0, predivide_factor=2.0)),
    "summed-and-predivided": _Case(Precision(reduces_mean=False, predivide_factor=3.0)),
    "summed": _Case(Precision(reduces_mean=False)),
    "fp64-masters": _Case(Precision(masters=torch.float64)),
}


@define
class _Curve:
    losses: list[float] = field(factory=list)
    weights: dict[str, Tensor] = field(factory=dict)
    masters: list[Tensor] = field(factory=list)


def _build(case: _Case) -> nn.Module:
    return parity.build(OneDtype).to(case.given)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def _reference(case: _Case, *, world_size: int, num_steps: int) -> tuple[_Curve, list[list[float]]]:
    """One process, every rank's gradients in turn, and losses; `Precision` says what is rounded."""
    given = _build(case)
    params_dtype = case.precision.params or case.given
    model = copy.deepcopy(given).to(params_dtype)
    trained = [param for param in model.parameters() if param.requires_grad]
    masters_dtype = case.precision.masters or params_dtype
    wire = case.precision.reduce or params_dtype
    masters = [
        nn.Parameter(param.detach().to(masters_dtype).clone())
        for param in given.parameters()
        if param.requires_grad
    ]
    count = case.precision.mean_over or world_size
    factor = case.precision.predivide_factor or count
    optimizer, losses = _adamw(masters), [[] for _ in range(world_size)]
    for step in range(num_steps):
        total: list[Tensor | None] = [None] * len(trained)
        local: list[list[Tensor | None]] = [[None] * len(trained) for _ in range(world_size)]
        for micro in range(case.num_micro_batches):
            for peer in range(world_size):
                loss = parity.loss_of(model, parity.batch(step, micro, peer))
                (loss * case.scale).backward()
                losses[peer].append(loss.item())
                grads = [_to(param.grad, masters_dtype) for param in trained]
                local[peer] = parity.add(local[peer], grads)
                model.zero_grad()
            if case.reduces_once and micro + 1 < case.num_micro_batches:
                continue
            sent = [[_to(grad, wire) for grad in grads] for grads in local]
            over_ranks = _combine(sent, factor, count, is_mean=case.precision.reduces_mean)
            reduced = [_to(grad, masters_dtype) for grad in over_ranks]
            total = parity.add(total, reduced)
            local = [[None] * len(trained) for _ in range(world_size)]
        for master, grad in zip(masters, total, strict=True):
            master.grad = None if grad is None else grad / case.scale
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(trained, masters, strict=True):
                param.copy_(master)
    return _Curve([], model.state_dict(), [master.detach() for master in masters]), losses


def _to(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.detach().to(dtype)


def _combine(
    sent: list[list[Tensor | None]], factor: float, count: float, *, is_mean: bool
) -> list[Tensor | None]:
    """What the ranks' gradients become, as `Precision.predivide_factor` says."""
    if factor == 1.0 and is_mean and count == len(sent):
        return parity.mean(sent)
    divided = [[None if grad is None else grad / factor for grad in grads] for grads in sent]
    after = factor / count if is_mean else factor
    total = reduce(parity.add, divided)
    return total if after == 1.0 else [None if grad is None else grad * after for grad in total]


def _sharded(case: _Case, stage: int, group: Group, *, num_steps: int) -> _Curve:
    model = _build(case)
    optimizer, curve = _adamw([p for p in model.parameters() if p.requires_grad]), _Curve()
    config = ZeroConfig(stage, precision=case.precision)
    zero_engine.shard(model, optimizer, config, group=group)
    for step in range(num_steps):
        for micro in range(case.num_micro_batches):
            waits = case.reduces_once and micro + 1 < case.num_micro_batches
            with zero_engine.no_sync(model) if waits else nullcontext():
                loss = parity.loss_of(model, parity.batch(step, micro, group.rank))
                (loss * case.scale).backward()
            curve.losses.append(loss.item())
        assert zero_engine.unscale_and_clip_(model, scale=case.scale).is_finite
        optimizer.step()
        optimizer.zero_grad()
    trained = [param for param in model.parameters() if param.requires_grad]
    curve.masters = [zero_engine.full_param(param) for param in trained]
    curve.weights = zero_engine.full_state_dict(model)
    return curve


# On two and three ranks by turns; where nobody else has gradients, of each dtype one.
@pytest.mark.parametrize(
    ("group", "case"),
    [(2 + turn % 2, case) for turn, case in enumerate(CASES)]
    + [(1, "bf16"), (1, "fp16-scaled"), (1, "summed-and-predivided")],
    indirect=["group"],
)
def test_every_rounding_is_where_it_is_documented(group: Group, case: str) -> None:
    """Losses, weights and masters, bit for bit: a rounding more or less is another training."""
    chosen = CASES[case]
    size = group.world_size
    expected, losses = parity.by_rank_0(
        group, lambda: _reference(chosen, world_size=size, num_steps=3)
    )
    for stage in (1 + list(CASES).index(case) % 2, 3):
        curve = _sharded(chosen, stage, group, num_steps=3)
        assert curve.losses == losses[group.rank], f"stage {stage}"
        for number, (ours, theirs) in enumerate(zip(curve.masters, expected.masters, strict=True)):
            assert ours.dtype == theirs.dtype
            assert equal(ours, theirs), f"stage {stage}, master {number}"
        if group.rank == 0:
            parity.assert_same_weights(curve.weights, expected.weights, what=f"stage {stage}")


@pytest.mark.parametrize("stage", parity.STAGES)
def test_backwards_that_are_reduced_as_one_give_what_no_sync_gives(
    group: Group, stage: int
) -> None:
    """One reduction for several backwards, without knowing which is the last."""
    curves, sent = [], []
    for how in ("no_sync", "coalesced"):
        model, optimizer = parity.build_sharded(group, ZeroConfig(stage))
        with record_traffic(group) as traffic:
            for step in range(2):
                with zero_engine.coalesce_reduction(model) if how == "coalesced" else nullcontext():
                    for micro in range(3):
                        waits = how == "no_sync" and micro < 2
                        with zero_engine.no_sync(model) if waits else nullcontext():
                            data = parity.batch(step, micro, group.rank)
                            parity.loss_of(model, data).backward()
                optimizer.step()
                optimizer.zero_grad()
        sent.append(traffic.payload_numel("reduce_scatter", "all_reduce"))
        curves.append(parity.run_steps(model, optimizer, range(2, 4), rank=group.rank))

    assert curves[0] == curves[1]
    assert sent[0] == sent[1]
    with (
        pytest.raises(StateError, match=r"coalesce_reduction\(\) inside no_sync"),
        zero_engine.no_sync(model),
        zero_engine.coalesce_reduction(model),
    ):
        pass


class _Returns(nn.Linear):
    def forward(self, x: Tensor, *, opaque: bool = False) -> Any:
        y = super().forward(x)
        more = {"y": y, "more": [y * 2, None, 3], "index": y.argmax()}
        return types.SimpleNamespace(y=y) if opaque else more


@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_are_converted_wherever_they_are(group: Group, stage: int) -> None:
    """A loss of 16 bits loses what the logits had; the user's own code asks for no dtype."""
    plain = parity.build(lambda: _Returns(8, 8)).to(BF16)
    model = parity.build(lambda: _Returns(8, 8))
    precision = Precision(params=BF16, masters=None, outputs=FP32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
    x = torch.ones(2, 8, dtype=BF16)
    expected, output = plain(x), model(x)

    assert output["y"].dtype == output["more"][0].dtype == FP32
    assert output["index"].dtype == torch.int64
    assert output["more"][1:] == [None, 3]
    assert equal(output["y"], expected["y"].float())
    (output["y"].sum() + output["more"][0].sum()).backward()
    (expected["y"].float().sum() + expected["more"][0].float().sum()).backward()
    assert equal(zero_engine.full_grad(model.weight), plain.weight.grad)
    with pytest.raises(StateError, match=r"Precision\.outputs=torch\.float32: .*SimpleNamespace"):
        model(x, opaque=True)


def test_a_norm_beyond_the_range_of_fp16_is_a_norm(group: Group) -> None:
    """Gradients of pure fp16 that are all finite would be taken for an overflow, and skipped."""
    model = nn.Linear(64, 64, bias=False, dtype=FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(
        model, optimizer, ZeroConfig(2, precision=Precision(masters=None)), group=group
    )
    model(torch.full((1, 64), 20_000.0, dtype=FP16)).sum().backward()

    report = zero_engine.unscale_and_clip_(model)

    assert report.is_finite
    assert_close(report.norm, torch.tensor(20_000.0 * 64))


# ---- Values in and out ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_loaded_or_set_is_what_training_goes_on_from(group: Group, stage: int) -> None:
    """Masters that kept their values would bring the old weights back at the next step."""
    config = ZeroConfig(stage, precision=Precision(params=BF16))
    model, optimizer = _build_sharded(group, config)
    other = parity.build(OneDtype, seed=1)
    model.load_state_dict(other.state_dict())
    for name, param in model.named_parameters():
        value = zero_engine.full_param(param)
        expected = other.get_parameter(name)
        if param.requires_grad:  # the masters have every bit that was loaded
            assert equal(value, expected), name
        else:
            assert equal(value, expected.to(BF16)), name

    zero_engine.set_full_param(model.unused, torch.full((5,), 1 + 2**-12))
    assert zero_engine.full_param(model.unused).eq(1 + 2**-12).all()
    with zero_engine.GatheredParameters([model.unused], modifier_rank=0):
        if group.rank == 0:
            model.unused.data.fill_(3.0)
    assert zero_engine.full_param(model.unused).eq(3).all()
    if stage < 3:  # where parameters rest whole, this is allowed, as in plain torch
        with torch.no_grad():
            model.unused.fill_(7.0)
    weights = zero_engine.full_state_dict(model)
    if group.rank == 0:
        expected = torch.full((5,), 3.0 if stage == 3 else 7.0, dtype=BF16)
        assert equal(weights["unused"], expected)

    before = zero_engine.full_param(model.blocks[0].up.weight)
    for group_ in optimizer.param_groups:
        group_["lr"] = group_["weight_decay"] = 0.0
    parity.loss_of(model, parity.batch(0, 0, group.rank)).backward()
    optimizer.step()
    assert equal(zero_engine.full_param(model.blocks[0].up.weight), before)
    assert zero_engine.full_param(model.unused).eq(3 if stage == 3 else 7).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_are_those_of_the_paper(group: Group, stage: int) -> None:
    """ZeRO, arXiv 1910.02054, section 3.1: 2 for parameters, 12 for master and moments.

    At stage 3 on a device the 2 are spared: parameters are rounded from masters where they travel.
    """
    model = parity.build(parity.Chain)
    optimizer = parity.adamw(model)
    config = ZeroConfig(stage, precision=Precision(params=BF16))
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(2):
        parity.finish_step(model(torch.ones(1, 64, dtype=BF16)).sum(), optimizer)
    report, numel = memory_report(model), sum(param.numel() for param in model.parameters())

    in_shards = 2 * numel // 2 if keeps_free_memory(group.device) else 0
    assert report.params_bytes == (in_shards if stage == 3 else 2 * numel)
    assert report.optimizer_bytes == 12 * numel // 2
    assert report.gradients_bytes == 0


# ---- Refused ----


def test_masters_at_stage_0_are_refused_with_what_to_do(group: Group) -> None:
    """Its optimizer updates the user's own parameters."""
    with pytest.raises(PartitionError, match=r"'unused'.*float32 master.*use stage 1"):
        _build_sharded(group, ZeroConfig(0, precision=Precision(params=BF16)))


@pytest.mark.parametrize(
    "options",
    [
        {"params": torch.int32},
        {"masters": "float32"},
        {"reduce": True},
        {"predivide_factor": 0},
        {"reduces_mean": 1},
    ],
    ids=str,
)
def test_what_no_field_can_be_is_refused(options: dict[str, Any]) -> None:
    """By the name of the field."""
    with pytest.raises(PartitionError, match=rf"Precision\.{next(iter(options))}: expected"):
        Precision(**options)


def _build_sharded(group: Group, config: ZeroConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parity.build(OneDtype)
    optimizer = _adamw([param for param in model.parameters() if param.requires_grad])
    return zero_engine.shard(model, optimizer, config, group=group)
