"""The loss curve with delayed updates beside the exact one: what a step late costs in learning."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import zero_engine
from harness import Row, suite
from matplotlib.figure import Figure
from model import Shape, build_model, draw_batch, model_numel, read_stdlib
from team import Team
from zero_engine import Offload, ZeroConfig

SHAPE: Final = Shape(num_layers=4, width=128, num_heads=4, sequence=64, batch=8)
WAYS: Final = {"exact": None, "delayed": 0, "delayed later": 40}  # the first step that is delayed
TEXT_BYTES: Final = 2**21
HELD_OUT: Final = 8  # batches of each rank, drawn from the last twentieth of the text
WARMUP_STEPS: Final = 20
SMOOTHED: Final = 10  # steps
MARKS: Final = (1, 5, 10, 20, 40, 60, 80, 100, 150)  # steps whose loss the table shows


@suite(
    ("step", "step"),
    *((way, way, ".4f") for way in WAYS),
    steps=(200, "of each way and seed"),
    seeds=(3, "of weights"),
    ranks=(2, "processes"),
    lr=(1e-3, "after the first steps, in which it rises"),
    plot={"type": Path, "help": "draw the curves into this file, .svg or .png"},
)
def delayed(options: Namespace) -> list[Row]:
    """The loss curve with delayed updates beside the exact one: what a step late costs in learning.

    A byte-level GPT on real text, two gloo ranks, AdamW, stage 2, optimizer state on the host. Each
    way trains the same batches from the same initial weights, with a learning rate that rises for
    20 steps and stays:

    - `exact`: every update is used by the next forward;
    - `delayed`: Offload(delayed_update=True), from the first step on;
    - `delayed later`: the same, but `finish_update` after each of the first 40 steps, which are
      exact.

    Losses are means over the ranks, over the seeds and, in the table, over the last ten steps.
    `held out` is that of text that was not trained on, after `finish_update`. `seeds` is how far
    the seeds of one way lie apart, which is what a difference between ways has to be compared with.
    """
    options.numel = model_numel(SHAPE)
    with Team("bench_delayed:training", world_size=options.ranks) as team:
        options.runs = [
            team.ask("train", way, seed, options.steps, options.lr)[0]
            for seed in range(options.seeds)
            for way in WAYS
        ]
    curves = {way: _smooth([run["losses"] for run in _runs(options, way)]) for way in WAYS}
    held_out = {way: [run["held_out"] for run in _runs(options, way)] for way in WAYS}
    if options.plot is not None:
        _plot(curves, options.plot)
    marks = [*(mark for mark in MARKS if mark < options.steps), options.steps]
    return [
        *({"step": str(k)} | {way: curves[way][k - 1] for way in WAYS} for k in marks),
        {"step": "held out"} | {way: statistics.mean(held_out[way]) for way in WAYS},
        {"step": "seeds"} | {way: max(held_out[way]) - min(held_out[way]) for way in WAYS},
    ]


def _runs(options: Namespace, way: str) -> list[Row]:
    return [run for run in options.runs if run["way"] == way]


def _smooth(of_seeds: list[list[float]]) -> list[float]:
    """Means over the seeds and over the last steps, by step."""
    curve = [statistics.mean(of_step) for of_step in zip(*of_seeds, strict=True)]
    return [statistics.mean(curve[max(0, k + 1 - SMOOTHED) : k + 1]) for k in range(len(curve))]


def _plot(curves: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per byte")
    for way, curve in curves.items():
        axes.plot(curve, label=way, linewidth=1)
    axes.legend()
    figure.savefig(path)


# ---- In each rank ----


def training() -> dict[str, Callable[..., Any]]:
    """The job of a rank."""
    text = read_stdlib(TEXT_BYTES)
    cut = len(text) * 19 // 20

    def train(way: str, seed: int, num_steps: int, lr: float) -> Row:
        return _train(way, seed, num_steps, lr, text=text[:cut], unseen=text[cut:])

    return {"train": train}


def _train(
    way: str, seed: int, num_steps: int, lr: float, *, text: bytes, unseen: bytes
) -> dict[str, Any]:
    rank, delayed_from = dist.get_rank(), WAYS[way]
    model = build_model(SHAPE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    offload = Offload(optimizer="host", delayed_update=delayed_from is not None)
    zero_engine.shard(model, optimizer, ZeroConfig(stage=2, offload=offload))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    losses = []
    for step in range(num_steps):
        tokens, targets = draw_batch(text, SHAPE, step=step, rank=rank)
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
        batches = [draw_batch(unseen, SHAPE, step=k, rank=rank) for k in range(HELD_OUT)]
        held_out = _mean(torch.stack([model(*batch) for batch in batches]).mean())
    zero_engine.unshard(model, optimizer)
    return {"way": way, "seed": seed, "losses": losses, "held_out": held_out}


def _mean(value: torch.Tensor) -> float:
    """Over the ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
