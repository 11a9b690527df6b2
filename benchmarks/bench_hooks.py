"""Time of hooks on one rank, where nothing is communicated."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable

import torch
import zero_engine
from harness import Row, ratio, suite, take_turns, timed
from torch import Tensor, nn

Case = Callable[[], float]  # one turn; its seconds


@suite(
    ("table", "table"),
    ("case", "case"),
    ("ms", "median_ms", ".2f"),
    ("/ first", "ratio", ".2f"),
    ("of rounds", "ratio_range", ".2f"),
    rounds=(30, "turns of each"),
    tiny=(2000, "layers of 16 x 16"),
    middle=(500, "layers of 256 x 256"),
)
def hooks(options: Namespace) -> list[Row]:
    """Time of our hooks on one rank, without communication: forward and backward against plain.

    Tiny layers show the cost per parameter, and middle ones, each a unit of its own, that per unit.
    The same model is built once per system, all in one process and thread, and the systems take
    turns; the ratio is that of two turns of one round. What is counted is the processor's time,
    which a machine that does other things disturbs less.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, num_layers, width in (("tiny", options.tiny, 16), ("middle", options.middle, 256)):
        if num_layers:
            cases = {"plain": _sharded(num_layers, width, None)}
            cases |= {f"stage {s}": _sharded(num_layers, width, s) for s in (0, 1, 2, 3)}
            title = f"{num_layers} {name} layers of {width} x {width}"
            found = take_turns(cases, options.rounds, skipped=2)
            rows += [
                {"table": title, "case": case, "median_ms": statistics.median(seconds) * 1e3}
                | {"ms_of_rounds": [each * 1e3 for each in seconds]}
                | ratio(seconds, found["plain"])
                for case, seconds in found.items()
            ]
    return rows


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def _sharded(num_layers: int, width: int, stage: int | None) -> Case:
    """Forward and backward of the model, plain or sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(width) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage))
    x = torch.randn(4, width)
    forward_backward = timed(lambda: model(x).sum().backward(), time.process_time)

    def turn() -> float:
        seconds = forward_backward()
        optimizer.zero_grad()
        return seconds

    return turn
