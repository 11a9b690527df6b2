"""What our hooks cost on one rank, where nothing travels: a forward and backward against plain.

    python benchmarks/run.py hooks

Tiny layers show the cost per parameter, and middle ones, each a unit of its own, that per unit. The
same model is built once per system, all in one process and thread, and the systems take turns; the
ratio is that of two turns of one round. What is counted is the processor's time, which a machine
that does other things disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zero_engine
from results import write_results
from torch import Tensor, nn

STAGES = (0, 1, 2, 3)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", type=int, default=2000, help="layers of 16 x 16")
    parser.add_argument("--middle", type=int, default=500, help="layers of 256 x 256")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    rows = []
    for name, num_layers, width in (("tiny", options.tiny, 16), ("middle", options.middle, 256)):
        if num_layers:
            rows += _compare(name, num_layers, width, options.rounds)
    print(write_results("hooks", rows, folder=options.folder, settings={"rounds": options.rounds}))
    return 0


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def _compare(name: str, num_layers: int, width: int, rounds: int) -> list[dict]:
    title = f"{num_layers} {name} layers of {width} x {width}"
    systems = {"plain": _system(num_layers, width, stage=None)}
    systems |= {f"stage {s}": _system(num_layers, width, stage=s) for s in STAGES}
    times: dict[str, list[float]] = {system: [] for system in systems}
    for round_index in range(rounds + 2):
        for system, (forward_backward, drop_gradients) in systems.items():
            start = time.process_time()
            forward_backward()
            if round_index >= 2:
                times[system].append(time.process_time() - start)
            drop_gradients()
    rows = []
    print(f"\n{title:40s} {'median':>8s}    {'/ plain':>7s}   of rounds")
    for system, samples in times.items():
        ratios = sorted(a / b for a, b in zip(samples, times["plain"], strict=True))
        median_ms, ratio = statistics.median(samples) * 1e3, statistics.median(ratios)
        print(
            f"  {system:38s} {median_ms:8.1f} ms {ratio:7.2f}   {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )
        rows.append(
            {"table": title, "system": system, "median_ms": median_ms, "ratio": ratio}
            | {"lowest_ratio": ratios[0], "highest_ratio": ratios[-1]}
            | {"ms_of_rounds": [sample * 1e3 for sample in samples]}
        )
    return rows


def _system(
    num_layers: int, width: int, *, stage: int | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The model plain, or sharded: its forward and backward, and what drops its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(width) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage))
    x = torch.randn(4, width)

    def forward_backward() -> None:
        model(x).sum().backward()

    return forward_backward, optimizer.zero_grad


if __name__ == "__main__":
    raise SystemExit(main())
