"""The loss curve with delayed updates beside the exact one: what a step late costs in learning.

    python benchmarks/run.py delayed --steps 200 --seeds 3 --plot curves.svg

A byte-level GPT on real text, two gloo ranks, AdamW, stage 2, optimizer state on the host. Each way
trains the same batches from the same initial weights, with a learning rate that rises for 20 steps
and stays:

- `exact`: every update is used by the next forward;
- `delayed`: Offload(delayed_update=True), from the first step on;
- `delayed later`: the same, but `finish_update` after each of the first 40 steps, which are exact.

Losses are means over the ranks, over the seeds and, in the table, over the last ten steps. `held
out` is that of text that was not trained on, after `finish_update`. `seeds` is how far the seeds of
one way lie apart, which is what a difference between ways has to be compared with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import zero_engine
from matplotlib.figure import Figure
from model import Shape, build_model, model_numel
from results import write_results
from tabulate import tabulate
from text import draw_batch, read_stdlib
from zero_engine import Offload, ZeroConfig

SHAPE: Final = Shape(num_layers=4, width=128, num_heads=4, sequence=64, batch=8)
WAYS: Final = {"exact": None, "delayed": 0, "delayed later": 40}  # the first step that is delayed
TEXT_BYTES: Final = 2**21
HELD_OUT: Final = 8  # batches of each rank, drawn from the last twentieth of the text
WARMUP_STEPS: Final = 20
SMOOTHED: Final = 10  # steps


def main(argv: list[str] | None = None) -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(
        prog="run.py delayed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--plot", type=Path, help="draw the curves into this file, .svg or .png")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    rows = [row for seed in range(options.seeds) for row in _train_all(seed, options)]
    print(_table(rows, options.steps))
    if options.plot is not None:
        _plot(rows, options.plot)
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "plot")}
    settings["numel"] = model_numel(SHAPE)
    print(
        f"\nwritten to {write_results('delayed', rows, folder=options.folder, settings=settings)}"
    )
    return 0


def _train_all(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way with one seed, one after the other, on ranks of their own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, workers = [], []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            work = (rank, seed, options, Path(folder) / "rendezvous", theirs)
            workers.append(context.Process(target=_work, args=work))
            workers[-1].start()
            theirs.close()
            ends.append(ours)
        rows = ends[0].recv()
        for worker in workers:
            worker.join()
    return rows


def _work(
    rank: int, seed: int, options: argparse.Namespace, meeting: Path, answer: Connection
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks
    )
    text = read_stdlib(TEXT_BYTES)
    rows = [_train(way, seed, text, options) for way in WAYS]
    if rank == 0:
        answer.send(rows)
    dist.destroy_process_group()


def _train(way: str, seed: int, text: bytes, options: argparse.Namespace) -> dict[str, Any]:
    rank, delayed_from = dist.get_rank(), WAYS[way]
    model = build_model(SHAPE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    offload = Offload(optimizer="host", delayed_update=delayed_from is not None)
    zero_engine.shard(model, optimizer, ZeroConfig(stage=2, offload=offload))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    cut, losses = len(text) * 19 // 20, []
    for step in range(options.steps):
        tokens, targets = draw_batch(text[:cut], SHAPE, step=step, rank=rank)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if delayed_from is not None and step < delayed_from:
            zero_engine.finish_update(model)
        scheduler.step()
        losses.append(_mean(loss))
    zero_engine.finish_update(model)
    with torch.no_grad():
        batches = [draw_batch(text[cut:], SHAPE, step=k, rank=rank) for k in range(HELD_OUT)]
        held_out = _mean(torch.stack([model(*batch) for batch in batches]).mean())
    zero_engine.unshard(model, optimizer)
    return {"way": way, "seed": seed, "losses": losses, "held_out": held_out}


def _mean(value: torch.Tensor) -> float:
    """Over the ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _curve(rows: list[dict[str, Any]], way: str) -> list[float]:
    """Mean over the seeds, by step."""
    curves = [row["losses"] for row in rows if row["way"] == way]
    return [statistics.mean(of_step) for of_step in zip(*curves, strict=True)]


def _smooth(curve: list[float]) -> list[float]:
    return [statistics.mean(curve[max(0, k + 1 - SMOOTHED) : k + 1]) for k in range(len(curve))]


def _table(rows: list[dict[str, Any]], num_steps: int) -> str:
    marks = [k for k in (1, 5, 10, 20, 40, 60, 80, 100, 150) if k < num_steps] + [num_steps]
    curves = {way: _smooth(_curve(rows, way)) for way in WAYS}
    lines: list[list[Any]] = [[k, *(curves[way][k - 1] for way in WAYS)] for k in marks]
    held_out = {way: [row["held_out"] for row in rows if row["way"] == way] for way in WAYS}
    lines.append(["held out", *(statistics.mean(held_out[way]) for way in WAYS)])
    lines.append(["seeds", *(max(held_out[way]) - min(held_out[way]) for way in WAYS)])
    return tabulate(lines, headers=["step", *WAYS], floatfmt=".4f")


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per byte")
    for way in WAYS:
        axes.plot(_smooth(_curve(rows, way)), label=way, linewidth=1)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
