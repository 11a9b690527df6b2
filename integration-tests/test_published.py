"""Tables that others have published come out of the same layouts, to their printed precision."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import nn
from zero_engine import Precision, Wire, ZeroConfig
from zero_engine.planning import GPTSize
from zero_partition.plan import STAGES, Placement, Stage
from zero_partition.planning import ModelPlan, plan_model

GB: Final = 10**9
GIB, TIB = 2**30, 2**40
ZERO_PAPER: Final = (2, 2, 12)  # bytes of parameters, gradients and optimizer state, a parameter
MODELS: Final = {  # layers and width are made up: the tables say how many parameters only
    7.5e9: GPTSize(32, 4096, int(7.5e9)),
    128e9: GPTSize(80, 11264, int(128e9)),
    1e12: GPTSize(128, 25088, int(1e12)),
}


@cache
def _planned(size: GPTSize, world_size: int, stage: int) -> ModelPlan:
    placements = STAGES[Stage(stage)]
    return plan_model(
        size.build(), world_size=world_size, placements=placements, max_unit_bytes=2**60
    )


def _states_bytes(plan: ModelPlan, bytes_per_param: tuple[float, float, float]) -> float:
    """Of one rank, when a parameter, its gradient and its optimizer state have so many bytes."""
    layouts = [buffer.layout for unit in plan.units for buffer in unit.buffers]
    whole = sum(layout.payload_numel for layout in layouts)
    mine = max(sum(layout.payload_splits[rank] for layout in layouts) for rank in (0, -1))
    placements = plan.placements
    return sum(
        each * (mine if placement is Placement.SHARDED else whole)
        for each, placement in zip(
            bytes_per_param, (placements.params, placements.grads, placements.optim), strict=True
        )
    )


# ---- ZeRO (arXiv 1910.02054) ----


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [
        (7.5e9, 1, "120 / 120 / 120"),
        (7.5e9, 4, "52.5 / 41.25 / 30"),
        (7.5e9, 16, "35.63 / 21.56 / 7.5"),
        (7.5e9, 64, "31.41 / 16.64 / 1.88"),
        (7.5e9, 256, "30.35 / 15.41 / 0.47"),
        (7.5e9, 1024, "30.09 / 15.10 / 0.12"),
        (128e9, 1, "2048 / 2048 / 2048"),
        (128e9, 4, "896 / 704 / 512"),
        (128e9, 16, "608 / 368 / 128"),
        (128e9, 64, "536 / 284 / 32"),
        (128e9, 256, "518 / 263 / 8"),
        (128e9, 1024, "513.5 / 257.75 / 2"),
        (1e12, 1, "16000 / 16000 / 16000"),
        (1e12, 4, "7000 / 5500 / 4000"),
        (1e12, 16, "4750 / 2875 / 1000"),
        (1e12, 64, "4187.5 / 2218.75 / 250"),
        (1e12, 256, "4046.9 / 2054.7 / 62.5"),
        (1e12, 1024, "4011.7 / 2013.7 / 15.6"),
    ],
)
def test_model_states_of_zero(numel: float, world_size: int, expected: str) -> None:
    """The table that everyone plans with: a layout that disagrees with it would be wrong."""
    for stage, printed in zip((1, 2, 3), expected.split(" / "), strict=True):
        found = _states_bytes(_planned(MODELS[numel], world_size, stage), ZERO_PAPER) / GB

        assert found == as_printed(printed), f"stage {stage}"


def as_printed(number: str) -> Any:
    """Whatever rounds to this, or nearly: halves have gone either way."""
    digits = len(number.partition(".")[2])
    return pytest.approx(float(number), abs=0.501 * 10**-digits)


@pytest.mark.parametrize(("stage", "expected"), [(0, 2), (1, 7.64), (2, 14.4), (3, 128)])
def test_the_largest_model_in_32_gb_on_64_ranks(stage: int, expected: float) -> None:
    """What the paper promises of each stage, in parameters; model parallelism multiplies it."""
    plan = _planned(MODELS[7.5e9], 64, stage)
    bytes_per_param = _states_bytes(plan, ZERO_PAPER) / 7.5e9

    billions = 32 * GB / bytes_per_param / 1e9

    assert billions == pytest.approx(expected, rel=0.005)
    for parallel, printed in ((2, 2), (4, 4), (8, 8), (16, 16)):
        assert billions * parallel == pytest.approx(expected * printed, rel=0.005)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_our_own_bytes_follow_the_same_table(stage: int) -> None:
    """With what we keep in place of the paper's: gradients that have masters add up in fp32.

    At stage 3 on a device parameters rest as their masters alone, which spares the paper's 2.
    """
    config = ZeroConfig(stage, precision=Precision(params=torch.bfloat16))
    plan = zero_engine.plan(MODELS[7.5e9], config, world_size=64, rank=0)

    shards = plan.memory.before_step
    replicated = 2 * 7.5 if stage < 3 else 0
    sharded = 4 + 12

    assert shards.model_state_bytes / GB == pytest.approx(replicated + sharded * 7.5 / 64, rel=1e-6)


# ---- Traffic ----


class Uneven(nn.Module):
    """Blocks in a row, of which the last, where the turn is, is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        widths = [*[2048] * 31, 8]
        self.blocks = nn.Sequential(*(nn.Linear(w, w, bias=False) for w in widths))


def _traffic(world_size: int, stage: int) -> float:
    """Sent by one rank in a step, in units of the model's elements."""
    with torch.device("meta"):
        model = Uneven()
    config = ZeroConfig(stage, window=1, prefetch_numel=0, max_reuse_numel=0, min_unit_bytes=0)
    last = world_size - 1  # the small block is not its
    plan = zero_engine.plan(model, config, world_size=world_size, rank=last, reads_peers=False)
    return plan.payload_bytes / 4 / plan.numel


@pytest.mark.parametrize(("stage", "expected"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("world_size", [2, 8, 64, 512])
def test_traffic_of_the_stages(stage: int, expected: int, world_size: int) -> None:
    """2 M for DDP and stages 1 and 2, 3 M for stage 3: the price of each, on so many ranks."""
    assert _traffic(world_size, stage) == pytest.approx(
        expected * (world_size - 1) / world_size, rel=1e-5
    )


def test_traffic_across_hosts_at_512_ranks() -> None:
    """Of arXiv 2304.11277: DDP, full sharding, and sharding inside hosts of 8 with replicas."""
    ddp, full = _traffic(512, 0), _traffic(512, 3)
    inside_hosts = ddp / 8  # an all-reduce, as DDP's, of what is left of M after a reduction inside

    assert f"{ddp:.3f} {inside_hosts:.4f} {full:.3f}" == "1.996 0.2495 2.994"


def test_traffic_of_zeropp_across_nodes() -> None:
    """Of arXiv 2306.10209: int8 gathers, none in backward, int4 gradients: 3 M become 0.75 M.

    The paper counts integers against bf16, apart from scales, and all that leaves a rank: a second
    hop of gradients, between nodes alone, sends an eighth of that across them.
    """
    exact = _across_nodes(Wire())
    near = _across_nodes(Wire(secondary=True))
    coded = _across_nodes(Wire(secondary=True, params="int8", gradients="int4"))

    assert exact == pytest.approx({"all_gather": 2, "reduce_scatter": 1}, rel=1e-4)
    assert near == pytest.approx({"all_gather": 1, "reduce_scatter": 1}, rel=1e-4)
    assert coded == pytest.approx({"all_gather": 0.5, "reduce_scatter": 0.25 / 8}, rel=1e-4)
    assert coded["all_gather"] + 8 * coded["reduce_scatter"] == pytest.approx(0.75, rel=1e-4)


def _across_nodes(wire: Wire) -> dict[str, float]:
    """By operation, in units of the model's bytes in bf16, of which 63/64 are other nodes'."""
    with torch.device("meta"):
        model = Uneven().to(torch.bfloat16)
    config = ZeroConfig(
        3, window=1, prefetch_numel=0, max_reuse_numel=0, min_unit_bytes=0, wire=wire
    )
    plan = zero_engine.plan(
        model, config, world_size=512, ranks_per_node=8, rank=511, reads_peers=False
    )
    sums: dict[str, float] = {}
    for each in plan.traffic:
        sums.setdefault(each.name, 0.0)
        sums[each.name] += each.across.payload_bytes / plan.numel / 2 * 64 / 63
    return sums


# ---- Megatron, DeepSpeed, ZeRO-Infinity ----


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize(
    ("per_param", "replicated", "sharded"),
    [((2, 2, 16), 4, 16), ((2, 4, 12), 6, 12), ((4, 4, 8), 8, 8)],
)
def test_bytes_per_parameter_of_megatron(
    per_param: tuple[int, int, int], replicated: int, sharded: int, num_ranks: int
) -> None:
    """Its distributed optimizer is stage 1: fp16 with fp16 gradients, bf16 with fp32, and fp32."""
    plan = _planned(MODELS[7.5e9], num_ranks, 1)

    found = _states_bytes(plan, per_param) / 7.5e9

    assert found == pytest.approx(replicated + sharded / num_ranks, rel=1e-6)


def test_the_estimators_of_deepspeed() -> None:
    """What its users have planned with: t5-3b on 8 devices, in GB of 2^30, device and host."""
    num_params, largest, num_ranks, buffer = int(2851e6), int(32e6), 8, 1.5
    size = GPTSize(24, 2048, num_params)
    alone, two, three = (_planned(size, *at) for at in ((1, 0), (num_ranks, 2), (num_ranks, 3)))
    of_layer = 4 * largest

    found = {
        "stage 2": _states_bytes(two, (4, 0, 16)),  # gradients of fp32 stay whole there
        "stage 2, host optimizer": _states_bytes(two, (2, 0, 0)),
        "its host": _states_bytes(alone, (0, 0, max(4 * num_ranks, 16))) * buffer,
        "stage 3": of_layer + _states_bytes(three, (2, 4, 12)),
        "stage 3, host optimizer": of_layer + _states_bytes(three, (2, 0, 0)),
        "stage 3, all on the host": of_layer,
        "host of stage 3": of_layer * num_ranks * buffer,
        "host of stage 3, host optimizer": _states_bytes(alone, (0, 4, 12)) * buffer,
        "host of stage 3, all on the host": _states_bytes(alone, (2, 4, 12)) * buffer,
    }

    printed = ("15.93", "5.31", "127.45", "6.09", "0.78", "0.12", "1.43", "63.72", "71.69")
    assert [of / GIB for of in found.values()] == list(map(as_printed, printed))


@pytest.mark.parametrize(
    ("layers", "hidden", "printed"),
    [  # parameters in T, states in TiB, the largest linear in GiB, activations in TiB
        (80, 10240, "0.101 / 1.83 / 1.56 / 0.049"),
        (100, 20480, "0.503 / 9.16 / 6.25 / 0.122"),
        (128, 25600, "1.007 / 18.31 / 9.77 / 0.195"),
        (195, 65536, "10.05 / 182.81 / 64.0 / 0.762"),
        (315, 163840, "101.5 / 1845.7 / 400 / 3.076"),
    ],
)
def test_rows_of_zero_infinity(layers: int, hidden: int, printed: str) -> None:
    """Of arXiv 2104.07857: 100 trillion parameters are planned as quickly as a hundred million."""
    plan = _planned(GPTSize(layers, hidden), 1, 3)
    params = [param for unit in plan.units for buffer in unit.buffers for param in buffer.params]
    numels = [param.shape.numel() for param in params]
    activations = 2 * 32 * 1024 * hidden * layers  # of 32 sequences of 1024, one a layer

    found = (
        sum(numels) / 1e12,
        _states_bytes(plan, (4, 4, 12)) / TIB,
        max(numels) * (2 + 2) / GIB,
        activations / TIB,
    )

    assert found == tuple(map(as_printed, printed.split(" / ")))


def test_a_model_of_7b_on_4096_ranks_is_planned_in_seconds() -> None:
    """Or nobody would ask."""
    plan = zero_engine.plan(MODELS[7.5e9], world_size=4096, stage=3)

    report = plan.memory.before_step

    assert plan.numel == 7.5e9
    assert report.model_state_bytes == pytest.approx(16 * 7.5e9 / 4096, rel=1e-3)
