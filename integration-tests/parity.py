"""Oracles: one small model with every difficulty, trained by us, by DDP, and by one process.

Three ways through the same recipe. `train_ddp` is torch's own. `train_alone` needs no other rank:
it takes every rank's gradients in turn, by plain autograd, and does the arithmetic that
zero_comm's and zero_partition's docstrings promise. `train_sharded` is what is tested.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_engine
import zero_partition
import zero_partition.seams
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zero_comm import AnyRanks, Group
from zero_comm.testing import equal, on_cpu
from zero_partition import Cut
from zero_partition.plan import BufferPlan
from zero_partition.planning import choose_units, plan_units

VOCABULARY: Final = 11
WIDTH: Final = 6
STAGES: Final = (0, 1, 2, 3)


def in_turn(*choices: Iterable[Any]) -> list[Any]:
    """All cases of these choices, each with stage 3 and in turn one of the others."""
    return [
        pytest.param(*case, ((turn + turn // 3) % 3, 3), id="-".join(map(str, case)))
        for turn, case in enumerate(itertools.product(*choices))
    ]


Batch = tuple[Tensor, Tensor]

# Blocks of test models are tiny, and must be units all the same.
ZeroConfig: Final = partial(zero_engine.ZeroConfig, min_unit_bytes=0)


# ---- The model ----


class Block(nn.Module):
    """A unit with an odd number of elements, and parameters no vector width divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gate(nn.Module):
    """A unit smaller than one shard: every rank but the first holds only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.factor.repeat(2)


class Tiny(nn.Module):
    """Tied, frozen, unused, odd, one-element, fp32 and bf16 parameters, and repeated blocks."""

    def __init__(self, adapter_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gates = nn.ModuleList(Gate() for _ in range(2))
        self.adapter = nn.Linear(WIDTH, 5, bias=False, dtype=adapter_dtype)
        self.lift = nn.Linear(5, WIDTH, bias=False, dtype=adapter_dtype)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.ones(1))  # fewer elements than ranks
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)
        self.register_buffer("positions", torch.linspace(-1, 1, 4)[:, None])

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.positions + self.frozen
        for block in self.blocks:
            x = block(x)
        for gate in self.gates:
            x = gate(x)
        x = x + self.lift(self.adapter(x.to(self.lift.weight.dtype))).float()
        return self.head(x) * self.scale


def tiny_float32() -> Tiny:
    """Without bf16, whose last bit is larger than any tolerance."""
    return Tiny(torch.float32)


def seed_all(seed: int) -> None:
    """Seed the CPU and the default device; torch.manual_seed() notes a stack for each kind."""
    torch.default_generator.manual_seed(seed)
    if (device := torch.get_default_device()).type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def build(make: Callable[[], nn.Module] = Tiny, *, seed: int = 0) -> nn.Module:
    """The same model at every call, on the default device, whatever its own code asks for."""
    seed_all(seed)
    return make().to(torch.get_default_device())


def batch(step: int, micro: int, rank: int) -> Batch:
    """Tokens and targets, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (2, 4), generator=generator)
    return tokens, torch.randint(VOCABULARY, (2, 4), generator=generator)


def loss_of(model: nn.Module, data: Batch) -> Tensor:
    """Cross entropy."""
    tokens, targets = data
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# ---- The optimizers ----


class PerParameter(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient, as plain torch does."""

    def __init__(self, params: Any, *, lr: float, **options: float) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # noqa: D102
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        """Change `param` in place."""
        raise NotImplementedError


class Lion(PerParameter):
    """An optimizer that torch does not know: what users write themselves."""

    def update(self, param: Tensor, grad: Tensor, state: dict, group: dict) -> None:  # noqa: D102
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        update = state["exp_avg"].mul(0.9).add(grad, alpha=0.1).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"])
        state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),  # state in its constructor
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.0),
}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, interleaved in the model: matrices decay, the rest does not."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trainable if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trainable if param.dim() <= 1], "weight_decay": 0.0},
    ]


def scheduler_for(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that differs in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


# ---- The recipe ----


@frozen
class Recipe:
    """What is trained, and how: the same for us and for both oracles."""

    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw"
    num_steps: int = 3
    num_micro_batches: int = 1
    reduces_once: bool = True  # no_sync for all micro-batches but the last
    max_norm: float | None = None
    scheduler: Literal["none", "before", "after"] = "before"  # built before or after shard()
    finds_unused: bool = True  # what DDP is told
    make: Callable[[], nn.Module] = Tiny
    batch: Callable[[int, int, int], Batch] = batch
    loss_of: Callable[[nn.Module, Batch], Tensor] = loss_of


@define
class Curve:
    """How a training went, as one rank saw it."""

    losses: list[float] = field(factory=list)
    weights: dict[str, Tensor] = field(factory=dict)  # rank 0 only
    first_grads: list[Tensor | None] = field(factory=list)  # if asked for; before clipping


# ---- Three ways to train ----


def train_sharded(
    group: AnyRanks,
    recipe: Recipe,
    config: ZeroConfig,
    *,
    keeps_grads: bool = False,
    rank: int | None = None,
) -> Curve:
    """Ours, through the front door; `rank` is that of the job, where the group is none of ours."""
    model, rank = build(recipe.make), group.rank if isinstance(group, Group) else rank
    optimizer = _optimizer_of(recipe, model)
    scheduler = scheduler_for(optimizer) if recipe.scheduler == "before" else None
    zero_engine.shard(model, optimizer, config, group=group)
    if recipe.scheduler == "after":
        scheduler = scheduler_for(optimizer)
    curve = Curve()
    for step in range(recipe.num_steps):
        for micro in range(recipe.num_micro_batches):
            waits = recipe.reduces_once and micro + 1 < recipe.num_micro_batches
            with zero_engine.no_sync(model) if waits else nullcontext():
                loss = recipe.loss_of(model, recipe.batch(step, micro, rank))
                loss.backward()
            curve.losses.append(loss.item())
        if not step and keeps_grads:
            curve.first_grads = whole_gradients(model, optimizer, group)
        if recipe.max_norm is not None:
            zero_engine.clip_grad_norm_(model, recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    curve.weights = zero_engine.full_state_dict(model)
    return curve


def train_ddp(group: Group, recipe: Recipe, *, keeps_grads: bool = False) -> Curve:
    """The same with torch's DistributedDataParallel over the same ranks; plain torch if alone."""
    model = build(recipe.make)
    optimizer = _optimizer_of(recipe, model)
    scheduler = scheduler_for(optimizer) if recipe.scheduler != "none" else None
    wrapped = as_ddp(model, group, finds_unused=recipe.finds_unused)
    curve = Curve()
    for step in range(recipe.num_steps):
        for micro in range(recipe.num_micro_batches):
            waits = recipe.reduces_once and micro + 1 < recipe.num_micro_batches
            waits = waits and group.world_size > 1
            with wrapped.no_sync() if waits else nullcontext():
                loss = recipe.loss_of(wrapped, recipe.batch(step, micro, group.rank))
                loss.backward()
            curve.losses.append(loss.item())
        if not step and keeps_grads:
            curve.first_grads = [_clone(param.grad) for param in _trained(optimizer)]
        if recipe.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    curve.weights = model.state_dict()
    return curve


def as_ddp(model: nn.Module, group: Group, *, finds_unused: bool = True) -> nn.Module:
    """DistributedDataParallel, or the model itself where there is one rank."""
    if group.world_size == 1:
        return model
    return DistributedDataParallel(
        model, process_group=group.process_group, find_unused_parameters=finds_unused
    )


def by_rank_0(group: Group, work: Callable[[], Any]) -> Any:
    """What an oracle works out, by one rank for all. Collective."""
    found = [work() if group.rank == 0 else None]
    if group.world_size > 1:
        dist.broadcast_object_list(found, src=0, group=group.process_group)
    return found[0]


def train_alone_by_stage(
    group: Group, recipe: Recipe, *, cut: Cut = Cut.FLAT, ranks_per_node: int | None = None
) -> list[Curve]:
    """What `train_alone` says for this rank at each stage; worked out once for all. Collective."""
    size = group.world_size
    curves: dict[int, list[Curve]] = {
        stage: train_alone(
            recipe, world_size=size, stage=stage, cut=cut, ranks_per_node=ranks_per_node
        )
        for stage in (0, 1)  # the arithmetic of 2 and 3 is that of 1
        if stage % size == group.rank
    }
    if size > 1:
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, curves, group=group.process_group)
        curves = {stage: found for each in everyone for stage, found in each.items()}
    return [curves[min(stage, 1)][group.rank] for stage in STAGES]


def train_alone(
    recipe: Recipe,
    *,
    world_size: int,
    stage: int,
    cut: Cut = Cut.FLAT,
    ranks_per_node: int | None = None,
) -> list[Curve]:
    """One process: every rank's gradients in turn, combined in the order that is documented.

    As each rank sees it: the losses are its own.

    - A reduction is ((g0 + g1) + g2 + ...) / N, in rank order.
    - Under `no_sync` each rank adds its micro-batches first, and the sum is reduced.
    - Otherwise, at stages 1 to 3, reduced gradients are added in order of micro-batches. Stage 0
      does as DDP: each rank adds to the gradient that is already reduced, and reduces the sum.
    - With replicas of so many ranks each, it is the mean over the replicas of their means.
    """
    size = world_size if ranks_per_node is None else ranks_per_node
    model = build(recipe.make)
    optimizer = _optimizer_of(recipe, model)
    scheduler = scheduler_for(optimizer) if recipe.scheduler != "none" else None
    params = _trained(optimizer)
    curves = [Curve() for _ in range(world_size)]
    for step in range(recipe.num_steps):
        reduced: list[Tensor | None] = [None] * len(params)
        local: list[list[Tensor | None]] = [[None] * len(params) for _ in range(world_size)]
        for micro in range(recipe.num_micro_batches):
            for peer in range(world_size):
                loss = recipe.loss_of(model, recipe.batch(step, micro, peer))
                loss.backward()
                curves[peer].losses.append(loss.item())
                local[peer] = add(local[peer], [_clone(param.grad) for param in params])
                model.zero_grad()
            if recipe.reduces_once and micro + 1 < recipe.num_micro_batches:
                continue
            if stage == 0:
                carried = [add(mine, reduced) for mine in local]
                reduced = mean(carried)
            else:
                nodes = [mean(local[first : first + size]) for first in range(0, world_size, size)]
                reduced = add(reduced, mean(nodes))
            local = [[None] * len(params) for _ in range(world_size)]
        for param, grad in zip(params, reduced, strict=True):
            param.grad = grad
        if recipe.max_norm is not None:
            _clip(model, optimizer, recipe.max_norm, world_size=size, stage=stage, cut=cut)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    curves[0].weights = model.state_dict()
    return curves


def whole_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> list[Tensor | None]:
    """What the optimizer is about to read, put together from all ranks. Collective.

    Flattened; in the optimizer's order. A parameter's parts lie on the ranks in order, so that
    they need only be laid end to end.
    """
    mine = [
        None if param.grad is None else param.grad.detach().as_subclass(Tensor).flatten().clone()
        for param in _trained(optimizer)
    ]
    sharded = zero_partition.seams.find_sharded(model)
    if group.world_size == 1 or not sharded.reducer.shards_state:
        return mine
    group = sharded.group  # with replicas, those of one
    if group.world_size == 1:
        return mine
    everyone: list[list[Tensor | None]] = [[] for _ in range(group.world_size)]
    dist.all_gather_object(everyone, on_cpu(mine), group=group.process_group)
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*everyone, strict=True)]


def run_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], *, rank: int
) -> list[float]:
    """The plain loop, for what needs no recipe: one micro-batch per step. Returns the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, 0, rank))
        losses.append(loss.item())
        finish_step(loss, optimizer)
    return losses


def finish_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """What follows a forward in the plain loop of one micro-batch per step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def build_with_optimizer(
    name: str = "adamw", make: Callable[[], nn.Module] = Tiny
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and the optimizer of its two param groups."""
    model = build(make)
    return model, OPTIMIZERS[name](param_groups(model))


def build_sharded(
    group: Group, config: ZeroConfig, name: str = "adamw", make: Callable[[], nn.Module] = Tiny
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same, sharded."""
    model, optimizer = build_with_optimizer(name, make)
    return zero_engine.shard(model, optimizer, config, group=group)


def by_messages(*, patience_s: float | None = None) -> Group:
    """All ranks of the run, which may not read each other's memory: proven. Collective.

    On a device other than the CPU no rank does, and the group is returned that there is.
    """
    if torch.get_default_device().type != "cpu":
        return Group.from_process_group(patience_s=patience_s)
    with mock.patch.dict(os.environ, {"ZERO_COMM_PEER_MEMORY": "0"}):
        group = Group.from_process_group(dist.new_group(), patience_s=patience_s)
    assert not group.exchanges.reads_peers
    assert group.transport.startswith("messages")
    return group


class Chain(nn.Module):
    """Equal blocks in a row and nothing else; every parameter trains, and activations are small.

    A block's elements divide by every world size that tests use, so there is no padding.
    """

    def __init__(self, num_blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(num_blocks))
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.layers(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """One param group, the usual optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def shard_chain(
    group: Group, config: ZeroConfig, num_blocks: int = 4
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A `Chain`, and the usual optimizer."""
    model = build(partial(Chain, num_blocks))
    return zero_engine.shard(model, adamw(model), config, group=group)


def step_chain(model: nn.Module, optimizer: torch.optim.Optimizer, num_micro: int = 1) -> None:
    """On ones."""
    for _ in range(num_micro):
        model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def count_from_here() -> None:
    """Let `live_bytes` overlook what is alive already, for good, which also makes it fast."""
    global _counted  # noqa: PLW0603 (of this process)
    # Hooks in backward, and modes, would be told that the CPU is the default device, and so would
    # an import of this file for what a worker is sent before it has one.
    _counted = torch.get_default_device().type
    gc.collect()
    gc.freeze()


_counted = torch.get_default_device().type  # kind of device whose memory is counted


def live_bytes(*, at_least: int = 0, at_most: int | None = None) -> int:
    """Bytes of all memory of the device that some new tensor in Python keeps alive.

    Of an accelerator, with step counters, which torch's optimizers keep on the host.

    Args:
        at_least: Overlook pieces of memory smaller than this, in bytes.
        at_most: What is expected, and waited for, for two seconds: gloo's threads let go of what
            they have sent a moment after its collective is over. What is kept is kept longer.
    """
    deadline = time.monotonic() + 2.0
    found = _live_bytes(at_least)
    while at_most is not None and found > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
        found = _live_bytes(at_least)
    return found


def _live_bytes(at_least: int) -> int:
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        is_counted = issubclass(type(value), Tensor) and (
            value.device.type == _counted or (value.device.type == "cpu" and not value.dim())
        )
        if is_counted:
            with contextlib.suppress(zero_partition.StateError):  # guards share their stand-in's
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(num_bytes for num_bytes in storages.values() if num_bytes >= at_least)


# ---- Comparing ----


def assert_same(curve: Curve, expected: Curve, *, rank: int, what: str) -> None:
    """Losses and weights agree bit for bit."""
    assert curve.losses == expected.losses, f"{what}: losses {curve.losses} != {expected.losses}"
    if rank == 0:
        assert_same_weights(curve.weights, expected.weights, what=what)


def assert_same_weights(weights: dict[str, Any], expected: dict[str, Any], *, what: str) -> None:
    """The same keys in the same order, and every tensor equal bit for bit."""
    assert list(weights) == list(expected), f"{what}: keys {list(weights)} != {list(expected)}"
    different = {
        key: (on_cpu(weights[key]).float() - on_cpu(value).float()).abs().max().item()
        for key, value in expected.items()
        if weights[key].dtype != value.dtype or not equal(weights[key], value)
    }
    assert not different, f"{what}: largest difference of what differs: {different}"


def assert_close(curve: Curve, expected: Curve, *, what: str) -> None:
    """Losses, and the gradients of the first step, agree within 1e-5."""
    torch.testing.assert_close(
        curve.losses, expected.losses, rtol=0, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )
    pairs = list(zip(curve.first_grads, expected.first_grads, strict=True))
    largest = max(theirs.abs().max().item() for _, theirs in pairs if theirs is not None)
    for index, (ours, theirs) in enumerate(pairs):
        assert (ours is None) == (theirs is None), f"{what}: gradient {index}: {ours} != {theirs}"
        if ours is None:
            continue
        difference = (on_cpu(ours).flatten() - on_cpu(theirs).flatten()).abs().max().item()
        assert difference <= 1e-5 * largest, f"{what}: gradient {index} is off {difference}"


# ---- The oracle's arithmetic ----


def _optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(recipe.optimizer, str):
        return OPTIMIZERS[recipe.optimizer](param_groups(model))
    return recipe.optimizer(model)


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _clone(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def add(total: Sequence[Tensor | None], extra: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        theirs if ours is None else ours if theirs is None else ours + theirs
        for ours, theirs in zip(total, extra, strict=True)
    ]


def mean(local: Iterable[Sequence[Tensor | None]]) -> list[Tensor | None]:
    return [_mean_of_one(grads) for grads in zip(*local, strict=True)]


def _mean_of_one(grads: Sequence[Tensor | None]) -> Tensor | None:
    """A rank without a gradient counts as zero, unless none has one."""
    some = next((grad for grad in grads if grad is not None), None)
    if some is None:
        return None
    dense = [torch.zeros_like(some) if grad is None else grad for grad in grads]
    total = dense[0]
    for grad in dense[1:]:
        total = total + grad
    return total / len(dense) if len(dense) > 1 else total


def _clip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    *,
    world_size: int,
    stage: int,
    cut: Cut,
) -> None:
    """As the docstring of zero_partition.clip_grad_norm_ says."""
    params = dict(model.named_parameters())
    buffers = _buffers(model, optimizer, world_size, cut if stage else Cut.FLAT)
    sums = []
    for rank in range(world_size if stage else 1):
        norms = [
            torch.linalg.vector_norm(part.float()).to(torch.float64)
            for buffer in buffers
            for part in _parts(buffer, params, rank if stage else None)
        ]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    scale = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for param in params.values():
        if param.grad is not None:
            param.grad.mul_(scale)


def _buffers(
    model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int, cut: Cut
) -> list[BufferPlan]:
    group_of = {
        id(param): index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    names = choose_units(model, max_unit_bytes=ZeroConfig().max_unit_bytes)
    cuts = {id(param): cut for param in model.parameters()}
    units = plan_units(model, names, world_size=world_size, cuts=cuts, group_of=group_of)
    return [buffer for unit in units for buffer in unit.buffers if buffer.trainable]


def _parts(
    buffer: BufferPlan, params: dict[str, nn.Parameter], rank: int | None
) -> Iterable[Tensor]:
    """The gradients of a flat buffer, or what one rank keeps of them."""
    grads = [params[plan.name].grad for plan in buffer.params]
    if rank is None:
        yield from (grad for grad in grads if grad is not None)
        return
    for piece in buffer.layout.pieces(rank):
        grad = grads[piece.index]
        if grad is not None:
            yield grad.flatten()[piece.in_tensor.as_slice()]
