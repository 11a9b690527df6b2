"""What a plan says is what is then allocated and sent: computed without the model's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import attrs
import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from residences import Cell, cells, host_adam, resting_as
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_comm import Group, Loco, record_traffic
from zero_engine import ModulePrecision, Precision, Wire
from zero_engine.planning import Plan
from zero_partition import PartitionError, memory_report
from zero_partition.planning import keeps_free_memory
from zero_partition.seams import find_sharded, loco_state, plan_parts

OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    **parity.OPTIMIZERS,
    "sgd-plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "cpu-adam": host_adam,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Mixed(parity.Tiny):
    """Of the oracle's model what is used, in whatever dtype."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused, self.scale
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.head.bias = nn.Parameter(torch.zeros(parity.VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + (self.positions + self.frozen).to(self.embed.weight.dtype)
        for part in (*self.blocks, *self.gates):
            x = part(x)
        x = x + self.lift(self.adapter(x.to(self.lift.weight.dtype))).to(x.dtype)
        return self.head(x).float() * self.factor


def _groups(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parity.param_groups(model))


def _plan(make: Callable[[], nn.Module], name: str, config: ZeroConfig, **how: Any) -> Plan:
    """From a model that has no memory at all."""
    with torch.device("meta"):
        model = make()
    optimizer = _groups(model, name)
    return zero_engine.plan(
        model, config, optimizer=optimizer, device=torch.get_default_device(), **how
    )


class Nested(nn.Module):
    """Blocks with units inside them, and some before them that train nothing."""

    def __init__(self, make_block: Callable[[], nn.Module], num_frozen: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.first = nn.ModuleList(parity.Block() for _ in range(num_frozen))
        self.blocks = nn.ModuleList(make_block() for _ in range(3 if num_frozen else 2))
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY)
        for module in (self.embed, self.first) if num_frozen else ():
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for part in (*self.first, *self.blocks):
            x = part(x)
        return self.head(x)


class Around(nn.Module):
    """Parameters around units."""

    def __init__(self, first: nn.Module, *inside: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = x + self.first(x).mean()
        for part in self.inside:
            y = part(y)
        return x + y


def _narrow() -> nn.Module:
    return Nested(lambda: Around(nn.LayerNorm(parity.WIDTH), parity.Block(), parity.Block()), 2)


def _wide() -> nn.Module:
    """More parameters around a unit than in it, twice."""

    def wide(inside: nn.Module) -> nn.Module:
        return Around(nn.Linear(parity.WIDTH, 500), inside)

    return Nested(lambda: wide(wide(parity.Block())))


# ---- What rests on the device ----


@pytest.mark.ranks(1, 3, timeout_s=60)
def test_a_plan_is_what_the_memory_report_then_says(group: Group) -> None:
    """A plan that is off by a buffer sends its reader to the wrong machine."""
    for stage in parity.STAGES:
        for window in (1, 3) if stage == 3 else (3,):
            assert_planned(group, ZeroConfig(stage, window=window))
    if group.world_size > 1:
        assert_planned(parity.by_messages(), ZeroConfig(3, window=2))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_any_optimizers_state_is_planned(group: Group, name: str) -> None:
    """What it keeps is asked of the optimizer itself, so one that nobody knows is planned too."""
    for stage in (0, 3) if name in ("adafactor", "cpu-adam") else (3,):
        assert_planned(group, ZeroConfig(stage), name=name)


class _QuantizesLarge(parity.PerParameter):
    """As 8-bit optimizers: codes and scales in a dict, of 4,096 elements or more only."""

    needs_cut = "block(256)"

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if param.numel() < 4096:
            state.setdefault("momentum", torch.zeros_like(param))
        elif not state:
            codes = torch.zeros(param.numel(), dtype=torch.uint8)
            state["large"] = {"codes": codes, "scales": torch.zeros(-(-param.numel() // 256))}
        self.state["num_steps"] = self.state.get("num_steps", 0) + 1
        param.sub_(grad * group["lr"])


class _Wide(nn.Module):
    """One matrix of 32,768 elements, which ranks cut between blocks, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(parity.WIDTH, 128), nn.Linear(128, 256)])
        self.head = nn.Linear(256, parity.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def test_state_that_depends_on_the_size_is_planned(group: Group) -> None:
    """A toy would keep it in fp32, and a plan would be four times as large."""
    OPTIMIZERS["quantizes large"] = lambda params: _QuantizesLarge(params, lr=0.1)
    for stage in (1, 3):
        assert_planned(group, ZeroConfig(stage), name="quantizes large", make=_Wide)


BF16: Final = Precision(params=torch.bfloat16)
TRAVELS: Final = Precision(masters=None, keep={nn.Linear: ModulePrecision(travel=torch.bfloat16)})
OUTER: Final = [f"blocks.{block}{inside}" for block in (0, 1) for inside in ("", ".inside.0")]
INNER: Final = [f"{outer}.inside.0" for outer in OUTER[1::2]]
SETTINGS: Final[dict[str, list[dict[str, Any]]]] = {
    "masters": [{"stage": 1, "precision": BF16}, {"precision": BF16}],
    "other dtypes": [
        {"stage": 1, "precision": attrs.evolve(BF16, masters=None)},
        {"precision": attrs.evolve(BF16, masters=None)},
        {"stage": 2, "precision": attrs.evolve(BF16, reduce=torch.float32)},
        {"precision": attrs.evolve(BF16, reduce=torch.float32)},
    ],
    "other dtypes on the way": [
        *({"make": _narrow, "stage": stage, "precision": TRAVELS} for stage in (1, 2, 3)),
        {"make": _narrow, "precision": TRAVELS, "wire": Wire(levels=1, params="int8")},
    ],
    "small parameters": [
        {"small_param_numel": 13},
        {"small_param_numel": 40, "max_small_numel": 60},
    ],
    "limits": [
        {"max_live_numel": 400},
        {"max_live_numel": 4000, "prefetch_numel": 100, "max_reuse_numel": 1000},
    ],
    "cuts": [{"cut": "row"}, {"cut": "tensor"}],
    "units": [{"units": ["blocks.1", "blocks.0"]}, {"units": []}],
    # What encloses others is whole as long as they are; frozen first layers see no backward.
    "nested": [
        {"make": _narrow, "max_unit_bytes": 1000},
        {"make": _narrow, "max_unit_bytes": 1000, "window": 1},
        {"make": _narrow, "max_unit_bytes": 1000, "window": 2, "prefetch_numel": 200},
        {"make": _narrow, "max_unit_bytes": 1000, "stage": 2},
    ],
    # Two that enclose each other follow each other in backward: each needs memory of its own.
    "of one size": [{"make": _wide, "stage": stage, "units": OUTER + INNER} for stage in (2, 3)],
}


@pytest.mark.parametrize("what", SETTINGS)
def test_every_setting_that_moves_a_byte_moves_it_in_the_plan(group: Group, what: str) -> None:
    """Where ranks read each other's memory, and where they send messages."""
    for on in (group, parity.by_messages()):
        for settings in SETTINGS[what]:
            options = {"stage": 3, **settings}
            make = options.pop("make", Mixed)
            assert_planned(on, ZeroConfig(**options), make=make)


WIRES: Final = {
    "near": Wire(levels=2, secondary=True),
    "replicas of one": Wire(levels=1, replicas=True),
    "one node": Wire(levels=4, secondary=True),
    "levels alone": Wire(levels=2),
    "int4 gradients": Wire(levels=2, gradients="int4"),
    "all of ZeRO++": Wire(
        levels=2, secondary=True, params="int8:128", gradients="int4", loco=Loco()
    ),
    "replicas": Wire(levels=2, replicas=True, params="bf16", gradients="int8"),
    "frozen and int4": Wire(levels=2, params="int4", frozen="int8:128"),
    "exact errors": Wire(levels=4, gradients="int8", loco=Loco(kept=None)),
}


@pytest.mark.parametrize(("turn", "how"), list(enumerate(WIRES)))
@pytest.mark.ranks(4, timeout_s=60)
def test_what_travels_to_whom_is_planned(group: Group, turn: int, how: str) -> None:
    """Integers, scales, padding, memory on the way; and what crosses the network."""
    wire = WIRES[how]
    is_at_stage_3 = wire.secondary or wire.frozen
    for stage, window in ((3, 1), (3, 3)) if is_at_stage_3 else ((1 + turn % 2, 3), (3, 1)):
        make = _narrow if wire.frozen else Mixed
        assert_planned(group, ZeroConfig(stage, window=window, wire=wire), make=make)
    if how == "near":  # and where every unit has a slot to itself
        assert_planned(group, ZeroConfig(3, window=16, prefetch_numel=0, wire=wire))


def test_nodes_must_be_known_to_be_planned() -> None:
    """A plan for one node would show nothing that crosses, and be believed."""
    secondary = ZeroConfig(3, wire=Wire(secondary=True))
    plan = _plan(Mixed, "adamw", secondary, world_size=16, ranks_per_node=8)
    assert plan.config is secondary
    for config, how, text in (
        (secondary, {}, "needs to know how many ranks make a node"),
        (secondary, {"ranks_per_node": 1}, "one rank to a node.*use stage 2"),
        (ZeroConfig(3, wire=Wire(levels=4)), {"ranks_per_node": 8}, "nodes of 4 ranks, as Wire"),
        (ZeroConfig(3, wire=Wire(levels=3)), {}, "nodes of 3 ranks to divide 16 ranks"),
    ):
        with pytest.raises(PartitionError, match=text):
            _plan(Mixed, "adamw", config, world_size=16, **how)


def assert_planned(
    group: Group,
    config: ZeroConfig,
    *,
    name: str = "adamw",
    make: Callable[[], nn.Module] = Mixed,
    cell: Cell | None = None,
) -> None:
    """Train a real one for some steps, and compare with the plan at each moment."""
    what = f"{config}, {name}, {cell}, rank {group.rank}"
    reads_peers = group.exchanges.reads_peers
    with nullcontext() if cell is None else resting_as(cell):
        how = {"world_size": group.world_size, "rank": group.rank, "reads_peers": reads_peers}
        plan = _plan(make, name, config, **how)
        parity.count_from_here()
        model = parity.build(make)
        optimizer = _groups(model, name)
        zero_engine.shard(model, optimizer, config, group=group)
    parity.run_steps(model, optimizer, range(3), rank=group.rank)

    is_saved = find_sharded(model).routes.is_first_replica
    assert (_given_bytes(model) if is_saved else 0) == plan.save.num_bytes, what
    report = memory_report(model)
    if cell is not None:
        passing = report.host_bytes - plan.at_rest.host_bytes if cell.params == "disk" else 0
        assert 0 <= passing <= plan.passing_bytes, what
        report = attrs.evolve(report, host_bytes=report.host_bytes - passing)
        _assert_equal(report, plan.at_rest, what)
        zero_engine.unshard(model, optimizer)
        return
    _assert_equal(report, plan.at_rest, what)
    buffers = sum(buffer.nbytes for buffer in model.buffers())  # which are counted apart
    alive = parity.live_bytes(at_most=plan.at_rest.total_bytes + buffers) - buffers
    assert alive == plan.at_rest.total_bytes, f"{what}: {alive} bytes alive, {plan.at_rest}"

    with record_traffic(group) as traffic:
        parity.loss_of(model, parity.batch(3, 0, group.rank)).backward()
        _assert_equal(memory_report(model), plan.memory.before_step, f"{what}, before the step")
        optimizer.step()
    optimizer.zero_grad()
    sent, planned = _sent(traffic), _planned(plan)
    assert sent == planned, f"{what}: sent {sent}, planned {planned}"
    del model, optimizer


def _assert_equal(report: Any, planned: Any, what: str) -> None:
    found, expected = attrs.asdict(report), attrs.asdict(planned)
    different = {key: (found[key], expected[key]) for key in found if found[key] != expected[key]}
    assert not different, f"{what}: (allocated, planned) of what differs: {different}"


def _given_bytes(model: nn.Module) -> int:
    """What this rank writes when all is saved."""
    sharded = find_sharded(model)
    parts = plan_parts(sharded, has_state=True)
    errors = sum(tensor.nbytes for tensor in loco_state(sharded).values())
    return errors + sum(part.num_bytes for batch in parts.batches for part in batch.parts)


def _sent(traffic: Any) -> dict[str, tuple[int, ...]]:
    found = {name: (of.calls, of, of.across) for name, of in traffic.operations.items()}
    return {name: _numbers(*row) for name, row in found.items() if name != "agree"}


def _planned(plan: Plan) -> dict[str, tuple[int, ...]]:
    sums: dict[str, tuple[int, ...]] = {}
    for each in plan.traffic:
        numbers = _numbers(each.calls, each.sent, each.across)
        total = sums.get(each.name, (0,) * len(numbers))
        sums[each.name] = tuple(map(sum, zip(total, numbers, strict=True)))
    return sums


def _numbers(calls: int, sent: Any, across: Any) -> tuple[int, ...]:
    payload = (sent.payload_numel, sent.payload_bytes, sent.padding_bytes, sent.scale_bytes)
    return (calls, *payload, across.num_bytes)


# ---- Peaks ----


def test_the_peak_of_a_step_is_planned(group: Group) -> None:
    """It is what decides whether a step fits; activations apart, which here are small."""
    samples: list[int] = []
    block_bytes = 4 * 64 * 64

    def sample(*_: object) -> None:
        samples.append(parity.live_bytes(at_least=block_bytes // 2))

    for stage in parity.STAGES:
        parity.count_from_here()
        model = parity.build(parity.Chain)
        optimizer = parity.adamw(model)
        config = ZeroConfig(stage)
        plan = zero_engine.plan(
            parity.Chain(), config, world_size=2, device=torch.get_default_device(), rank=group.rank
        )
        zero_engine.shard(model, optimizer, config, group=group)
        _chain_step(model, optimizer)
        samples.clear()
        for param in model.parameters():
            param.register_hook(sample)
            param.register_post_accumulate_grad_hook(sample)
        optimizer.register_step_pre_hook(sample)
        _chain_step(model, optimizer)

        peak = plan.memory.step_peak_bytes - plan.memory.before_step.scalars_bytes
        # Elsewhere memory of the last gradient comes between the samples.
        least = peak if keeps_free_memory(group.device) else peak - block_bytes
        assert least <= max(samples) <= peak, f"stage {stage}"
        del model, optimizer


def _chain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Sampling(TorchDispatchMode):
    """Looks at what is alive after every operation, which is to be so much at most."""

    def __init__(self, at_most: int) -> None:
        super().__init__()
        self.at_most, self.peak = at_most, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, parity.live_bytes(at_least=256, at_most=self.at_most))
        return result


def test_the_peak_of_sharding_is_planned(group: Group) -> None:
    """A model that trains but cannot be sharded is found out only when all ranks have started."""
    for stage, precision in ((2, None), (2, BF16), (3, None), (3, BF16)):
        config = ZeroConfig(stage, precision=precision)
        plan = zero_engine.plan(
            parity.Chain(), config, world_size=2, device=torch.get_default_device()
        )
        parity.count_from_here()
        model = parity.build(parity.Chain)
        optimizer = parity.adamw(model)
        with _Sampling(plan.memory.init_peak_bytes) as sampling:
            zero_engine.shard(model, optimizer, config, group=group)

        difference = plan.memory.init_peak_bytes - sampling.peak
        assert 0 <= difference <= 64, (stage, precision, difference)
        del model, optimizer


# ---- What rests elsewhere ----


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.ranks(timeout_s=60)
def test_what_rests_elsewhere_is_planned(group: Group, tmp_path: Path, stage: int) -> None:
    """Which memory is short decides what goes where: host and disk count as the device does."""
    chosen = [cell for cell in cells(stage) if cell.residence == "engine"][stage % 2 :: 2]
    for number, cell in enumerate(chosen):
        offload, precision = cell.offload(tmp_path), BF16 if number % 2 else None
        config = ZeroConfig(stage, offload=offload, precision=precision)
        assert_planned(group, config, name="cpu-adam", cell=cell)


@pytest.mark.ranks(2, 4, timeout_s=60)
def test_settings_of_offload_are_planned(group: Group, tmp_path: Path) -> None:
    """A delayed update takes memory twice over; a bound on the host moves shards there.

    Shards of four ranks are uneven where those of two are not.
    """
    for cell, changes in (
        (Cell(3, "disk", "disk"), {"max_host_numel": 100}),
        (Cell(2, "host"), {"delayed_update": True}),
        (Cell(3, "disk", "host"), {"delayed_update": True, "subgroup_bytes": 4096}),
        (Cell(3, "host", "host", 0.3), {}),
    ):
        offload = attrs.evolve(cell.offload(tmp_path), **changes)
        config = ZeroConfig(cell.stage, offload=offload)
        assert_planned(group, config, name="cpu-adam", cell=cell)
