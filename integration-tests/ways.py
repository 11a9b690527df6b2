"""Ways into a model, drops of gradients and their moments: the choices of test_ways_in.py.

A cell is one choice of each. Its oracle is plain torch: a replica for each rank, whose gradients
are averaged before the optimizers step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group

WIDTH: Final = 6
NUM_STEPS: Final = 3


class Block(nn.Module):
    """A unit with modules in it that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # one element: a stand-in that can be written to

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) to the same."""
        return x + self.up(x).tanh() * self.scale


class Model(nn.Module):
    """Blocks between parameters of its own, and methods that use them without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        """All but the head."""
        for block in self.blocks:
            x = block(x)
        return x + self.bias

    def forward(self, x: Tensor, how: Callable[[Model, Tensor], Tensor] | None = None) -> Tensor:
        """The head's outputs; or what another function makes of the model."""
        return self.head(self.encode(x)) if how is None else how(self, x)

    def loss(self, x: Tensor) -> Tensor:
        """A scalar."""
        return self(x).square().mean()


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _reentrant(model: Model, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def _penalty(model: Model, x: Tensor) -> Tensor:
    return _loss(model(x)) + sum(p.square().sum() + p.abs().sum() for p in model.parameters())


class _Chunks(torch.autograd.Function):
    """A loss whose backward runs one of its own for each chunk, as memory-efficient losses do."""

    @staticmethod
    def forward(ctx: Any, model: Model, hidden: Tensor) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return sum(_loss(model.head(part)) for part in hidden.chunk(2))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        grads = []
        for part in hidden.detach().chunk(2):
            part.requires_grad_()
            with torch.enable_grad():
                _loss(ctx.model.head(part)).backward(grad)
            grads.append(part.grad)
        return None, torch.cat(grads)  # type: ignore[arg-type]


def _two_checkpoints(model: Model, x: Tensor) -> Tensor:
    return _loss(_reentrant(model, x)) + _loss(_reentrant(model, 2 * x))


def _chunks(model: Model, x: Tensor) -> Tensor:
    return _Chunks.apply(model, model.encode(x))  # type: ignore[no-any-return]


# What a loss is made of; each gives one, to run backward from.
WAYS: Final[dict[str, Callable[[Model, Tensor], Tensor]]] = {
    "model(x)": lambda m, x: _loss(m(x)),
    "model.forward(x)": lambda m, x: _loss(m.forward(x)),
    "model.loss(x)": lambda m, x: m.loss(x),
    "model.encode(x)": lambda m, x: _loss(m.encode(x)),
    "unit(x)": lambda m, x: _loss(m.blocks[1](x)),
    "unit.part(x)": lambda m, x: _loss(m.blocks[1].up(x)),
    "head(x)": lambda m, x: _loss(m.head(x)),
    "linear(x, head.weight)": lambda m, x: _loss(nn.functional.linear(x, m.head.weight)),
    "penalty on weights": lambda m, x: sum(p.square().sum() for p in m.parameters()),  # type: ignore[return-value]
    "model(x) and a penalty": _penalty,
    "reentrant checkpoints": lambda m, x: _loss(_reentrant(m, x)),
    "in two checkpoints": _two_checkpoints,
    "model(x) in two checkpoints": lambda m, x: m(x, _two_checkpoints),
    "chunks in a Function": _chunks,
    "model(x) and chunks in it": lambda m, x: m(x, _chunks),
    "two losses of model(x)": lambda m, x: _loss(m(x)) + m(2 * x).mean(),
}


def _drop_grads(params: Iterator[nn.Parameter], *, in_place: bool) -> None:
    for param in params:
        if not in_place:
            param.grad = None
        elif param.grad is not None:
            param.grad.zero_()


DROPS: Final[dict[str, Callable[[Model, torch.optim.Optimizer], object]]] = {
    "optimizer.zero_grad()": lambda _, o: o.zero_grad(),
    "model.zero_grad()": lambda m, _: m.zero_grad(),
    "a submodule's": lambda m, _: m.blocks[1].zero_grad(),
    "p.grad = None": lambda m, _: _drop_grads(m.parameters(), in_place=False),
    "p.grad.zero_()": lambda m, _: _drop_grads(m.parameters(), in_place=True),
    "model.zero_grad(set_to_none=False)": lambda m, _: m.zero_grad(set_to_none=False),
    "optimizer.zero_grad(set_to_none=False)": lambda _, o: o.zero_grad(set_to_none=False),
}
MOMENTS: Final = ("before forward", "between forward and backward", "after the step")


class Cell(NamedTuple):
    """One choice of each."""

    way: str
    stage: int
    num_backwards: int
    drop: str
    moment: str


CHOICES: Final[tuple[Sequence[Any], ...]] = (
    tuple(WAYS),
    (0, 1, 2, 3),
    (1, 2, 3),
    tuple(DROPS),
    MOMENTS,
)


def all_cells() -> list[Cell]:
    """Return every combination."""
    return [Cell(*chosen) for chosen in itertools.product(*CHOICES)]


def cells_with_every_pair() -> list[Cell]:
    """Return few cells in which every two choices of different kinds come together."""
    kinds = list(itertools.combinations(range(len(CHOICES)), 2))
    missing = {(a, x, b, y) for a, b in kinds for x, y in itertools.product(CHOICES[a], CHOICES[b])}
    found = []

    def covers(cell: Cell) -> set[tuple[int, Any, int, Any]]:
        return {(a, cell[a], b, cell[b]) for a, b in kinds} & missing

    for way, stage in itertools.product(*CHOICES[:2]):  # the largest two kinds
        rest = (Cell(way, stage, *chosen) for chosen in itertools.product(*CHOICES[2:]))
        best = max(rest, key=lambda cell: len(covers(cell)))
        missing -= covers(best)
        found.append(best)
    for cell in all_cells():
        if covers(cell):
            missing -= covers(cell)
            found.append(cell)
    return found


# ---- A cell is run ----


def batch(step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def _steps(cell: Cell, model: Model, optimizer: torch.optim.Optimizer, rank: int) -> Iterator[None]:
    """The loop; gives way to whoever averages gradients before each step."""
    way, drop = WAYS[cell.way], DROPS[cell.drop]
    for step in range(NUM_STEPS):
        if cell.moment == "before forward":
            drop(model, optimizer)
        for number in range(cell.num_backwards):
            loss = way(model, batch(step, number, rank))
            if number == 0 and cell.moment == "between forward and backward":
                drop(model, optimizer)
            loss.backward()
        yield
        optimizer.step()
        if cell.moment == "after the step":
            drop(model, optimizer)
    yield


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def expected(cell: Cell, world_size: int) -> dict[str, Tensor]:
    """Return the weights of plain torch: gradients of all ranks averaged before each step."""
    replicas = [build() for _ in range(world_size)]
    loops = [_steps(cell, *replica, rank) for rank, replica in enumerate(replicas)]
    for _ in zip(*loops, strict=True):
        average([model for model, _ in replicas])
    return replicas[0][0].state_dict()


def average(replicas: Sequence[nn.Module]) -> None:
    """Give each replica the mean of their gradients."""
    for params in zip(*(model.parameters() for model in replicas), strict=True):
        grads = [param.grad for param in params if param.grad is not None]
        if grads:
            mean = sum(grads) / len(replicas)
            for grad in grads:
                grad.copy_(mean)


def found(cell: Cell, group: Group, **options: Any) -> dict[str, Tensor]:
    """Return the weights of the same loop over a sharded model; {} but on rank 0. Collective."""
    model, optimizer = build()
    config = ZeroConfig(cell.stage, min_unit_bytes=0, **options)
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in _steps(cell, model, optimizer, group.rank):
        pass
    return zero_engine.full_state_dict(model)
