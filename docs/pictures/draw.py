"""Draw the pictures of these pages from real runs: `hatch run pictures [NAME ...]`.

Ranks of this machine train a small transformer under each configuration; what is drawn is what they
report. The pictures are transparent, in colors that are seen on white and on black.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import matplotlib as mpl
import torch
import zero_engine
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zero_comm.testing import RankPool
from zero_engine import Offload, Wire, ZeroConfig, memory_report, timeline
from zero_engine.observe.timeline import COLORS, class_of
from zero_offload import DiskStore, OffloadedState
from zero_partition import ScheduleReport, schedule_report
from zero_partition.plan import STAGES, BufferPlan, Placement
from zero_partition.planning import plan_model

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER.parents[1] / "benchmarks/results"
NUM_RANKS: Final = 4
NUM_BLOCKS: Final = 6
WIDTH: Final = 512
TOKENS: Final = 32
GRAY: Final = "#7f7f7f"
KINDS: Final = {
    "parameters": "#2a6f97",
    "gradients": "#e07a1f",
    "optimizer state": "#4f772d",
    "slots": "#52b0d8",
    "buffers of reductions": "#f2b880",
}
WIRES: Final = {  # by the name of a system of `bench wire`
    "fsdp2": "FSDP2",
    "zero3_nodes": "stage 3, exact",
    "zero3_nodes_hpz": "secondary shards",
    "zero3_nodes_qgz": "gradients in int4",
    "zero3_nodes_qwz": "weights in int8",
    "zero3_nodes_all": "all three",
}
EVENTS: Final = {kind: COLORS[kind] for kind in COLORS if not kind.endswith("ward")}
CONFIGS: Final[dict[str, dict[str, Any]]] = {  # without what depends on a folder
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, optimizer\non the host": {"stage": 3, "optimizer": "host"},
    "stage 3, all\non disk": {"stage": 3, "optimizer": "disk", "params": "disk"},
}
CUTS: Final = ("flat", "row", "tensor")
NUM_SLOTS: Final = 3  # of the swap window
TRANSFERS: Final = {"read": "#52b0d8", "stepped": "#6a994e", "written": "#f2b880"}
MIB: Final = 2**20


class Transformer(nn.Module):
    """Blocks of attention and feed-forward layers, each a unit, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, WIDTH) to the same shape."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Some steps; the gradients of the last one stay."""
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, TOKENS, WIDTH)).square().mean().backward()
        optimizer.step()


def sharded(config: dict[str, Any], folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer under a row of CONFIGS."""
    model = Transformer()
    optimizer = AdamW(model.parameters())
    path = Path(folder) if "disk" in config.values() else None
    where = {name: value for name, value in config.items() if name != "stage"}
    offload = Offload(**where, path=path) if where else Offload()
    zero_engine.shard(model, optimizer, ZeroConfig(stage=config["stage"], offload=offload))
    return model, optimizer


# -- memory ----------------------------------------------------------------------------------------


def bytes_of_peers(group: Any) -> dict[str, dict[str, int]]:
    """By system and kind: bytes of this rank after a step, with its gradients."""
    found = {}
    for name in ("DDP", "FSDP2"):
        model: Any = Transformer()
        if name == "DDP":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        optimizer = AdamW(model.parameters())
        train(model, optimizer, 3)
        params = list(model.parameters())
        states = [entry for state in optimizer.state.values() for entry in state.values()]
        tensors = {"parameters": params, "gradients": [p.grad for p in params]}
        found[name] = {
            kind: sum(_local(tensor).nbytes for tensor in every)
            for kind, every in (tensors | {"optimizer state": states}).items()
        }
    return found


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of_ours(group: Any, config: dict[str, Any], folder: str) -> dict[str, int]:
    """By kind: bytes of this rank's device after a step, with its gradients."""
    model, optimizer = sharded(config, folder)
    train(model, optimizer, 3)
    report = memory_report(model)
    return {
        "parameters": report.params_bytes,
        "gradients": report.gradients_bytes,
        "optimizer state": report.optimizer_bytes,
        "slots": report.slots_bytes,
        "buffers of reductions": report.reduction_bytes,
    }


def memory(ranks: RankPool, folder: str) -> Figure:
    """Bytes of a rank by kind, against DDP and FSDP2."""
    systems = dict(ranks.run(bytes_of_peers, timeout_s=300)[0])
    for name, config in CONFIGS.items():
        systems[name] = ranks.run(bytes_of_ours, timeout_s=300, config=config, folder=folder)[0]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(systems)
    for kind, color in KINDS.items():
        widths = [found.get(kind, 0) / MIB for found in systems.values()]
        axis.barh(list(systems), widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axis.text(total, row, f" {total:.1f}", va="center")
    axis.invert_yaxis()
    axis.set_xlim(0, 1.08 * max(left))
    axis.set_xlabel(f"MiB on the device of one of {NUM_RANKS} ranks, after a step")
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1))
    return figure


# -- a step ----------------------------------------------------------------------------------------


def events_of_step(
    group: Any, config: dict[str, Any], folder: str
) -> list[tuple[str, float, float]]:
    """Kind, start and length in ms of what rank 0 does in a step."""
    model, optimizer = sharded(config, folder)
    train(model, optimizer, 4)
    with timeline(model) as recorded:
        train(model, optimizer, 1)
    events = recorded.ranks[0]
    return [(class_of(event), event.start_s * 1e3, event.seconds * 1e3) for event in events]


def step(ranks: RankPool, folder: str) -> Figure:
    """One step of rank 0 under each configuration, on a clock of its own."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for row, config in enumerate(CONFIGS.values()):
        given = {"config": config, "folder": folder}
        _draw_events(axis, row, ranks.run(events_of_step, timeout_s=300, **given)[0])
    axis.set_yticks(range(len(CONFIGS)), list(CONFIGS))
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel(f"ms of a step of rank 0; {ranks.world_size} ranks, a thread each")
    return figure


def _draw_events(axis: Any, row: int, events: list[tuple[str, float, float]]) -> None:
    for kind, color in EVENTS.items():
        spans = [(start, length) for found, start, length in events if found == kind]
        axis.broken_barh(spans, (row - 0.4, 0.8), color=color, label=None if row else kind)
    axis.legend(ncols=len(EVENTS), loc="lower center", bbox_to_anchor=(0.4, 1))


def steps_of_all(group: Any) -> list[list[tuple[str, float, float]]]:
    """Kind, start and length in ms, by rank, of two steps; the last rank gets its batches late."""
    model, optimizer = sharded({"stage": 3}, "")
    train(model, optimizer, 3)
    began = time.monotonic()
    train(model, optimizer, 1)
    step_s = time.monotonic() - began
    with timeline(model) as recorded:
        for _ in range(2):
            time.sleep(step_s * group.rank)
            train(model, optimizer, 1)
    return [[(class_of(e), e.start_s * 1e3, e.seconds * 1e3) for e in r] for r in recorded.ranks]


def late(ranks: RankPool, folder: str) -> Figure:
    """Two steps of two ranks, one of which waits for its batches."""
    figure = Figure(figsize=(8, 1.8), layout="constrained")
    axis = figure.subplots()
    for rank, events in enumerate(ranks.run(steps_of_all)[0]):
        _draw_events(axis, rank, events)
    axis.set_yticks(range(ranks.world_size), [f"rank {rank}" for rank in range(ranks.world_size)])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("ms; a thread for each rank")
    return figure


# -- slots -----------------------------------------------------------------------------------------


def turns(group: Any, levels: int | None) -> ScheduleReport:
    """The gathers of a step at stage 3, with so many ranks to a node."""
    model = Transformer()
    optimizer = AdamW(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(stage=3, wire=Wire(levels=levels)))
    train(model, optimizer, 4)
    return schedule_report(model)


def slots(ranks: RankPool, folder: str) -> Figure:
    """Which unit is in which slot over a step: on its way or kept in pale, in use in full color."""
    plan = plan_model(Transformer(), world_size=ranks.world_size)  # says which units are in use
    names = [unit.name or "(model)" for unit in plan.units]
    moments = {f"{use.phase} of {names[use.unit]}": at for at, use in enumerate(plan.uses)}
    moments |= {"before the forward": -1, "at the end": len(plan.uses)}
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    half = len(plan.uses) / 2
    titles = {"ranks that read each other's memory": None, "ranks that gather together": 1}
    for axis, (title, levels) in zip(axes, titles.items(), strict=True):
        for row in ranks.run(turns, timeout_s=300, levels=levels)[0].rows:
            used, released = moments[row.used], moments[row.released]
            start = moments.get(row.gathered.removeprefix("ahead, "), used)
            color = mpl.color_sequences["Set3"][names.index(row.unit)]
            axis.barh(row.slot, released - start, left=start, color=color, alpha=0.4)
            for at in range(used, released):
                if names.index(row.unit) in plan.uses[at].in_use:
                    axis.barh(row.slot, 1, left=at, color=color)
                    if plan.units[plan.uses[at].unit].name in (row.unit, ""):
                        place = {"ha": "center", "va": "center"}
                        axis.text(
                            at + 0.5, row.slot, row.unit, fontsize=6.5, color="black", **place
                        )
        axis.axvline(half, color=GRAY, linestyle="dotted")
        axis.set_title(title, fontsize=9, color=GRAY)
        axis.set_yticks(range(4), [f"slot {number}" for number in range(4)])
        axis.invert_yaxis()
    axes[1].set_xticks((half / 2, 3 * half / 2), ("uses in forward", "uses in backward"))
    axes[1].tick_params(axis="x", length=0)
    return figure


# -- placements ------------------------------------------------------------------------------------


def placements(ranks: RankPool, folder: str) -> Figure:
    """What each rank keeps at each stage."""
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    for axis, (stage, row) in zip(figure.subplots(1, len(STAGES)), STAGES.items(), strict=True):
        for height, (kind, placement) in enumerate(
            zip(list(KINDS)[:3], (row.params, row.grads, row.optim), strict=True)
        ):
            for rank in range(NUM_RANKS):
                axis.barh(height, 0.9, left=rank, height=0.7, color="none", edgecolor=GRAY)
                start, share = 0.0, 0.9
                if placement is Placement.SHARDED:
                    share /= NUM_RANKS
                    start = rank * share
                axis.barh(height, share, left=rank + start, height=0.7, color=KINDS[kind])
        axis.set_title(f"stage {int(stage)}", fontsize=10)
        axis.set_xticks([rank + 0.45 for rank in range(NUM_RANKS)], range(NUM_RANKS))
        axis.set_yticks(range(3), list(KINDS)[:3] if stage == 0 else [""] * 3)
        axis.set_xlabel("rank")
        axis.invert_yaxis()
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    return figure


# -- units -----------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """A unit in which alignment and cuts are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 44), nn.Linear(44, 10)


def laid_out(cut: str) -> BufferPlan:
    """The flat buffer that `partition` makes of it."""
    model = FeedForward()
    plan = plan_model(model, AdamW(model.parameters()), world_size=NUM_RANKS, cut=cut)
    return plan.units[0].buffers[0]


def units(ranks: RankPool, folder: str) -> Figure:
    """One unit's flat buffer under each cut, and which rank keeps what."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axis = figure.subplots()
    names = [name for name, _ in FeedForward().named_parameters()]
    colors = dict(zip(names, mpl.color_sequences["Set2"], strict=False)) | {"padding": GRAY}
    for row, cut in enumerate(CUTS):
        plan = laid_out(cut)
        spans = [
            (param.name, span) for param, span in zip(plan.params, plan.layout.spans, strict=True)
        ]
        for name, span in (*spans, *(("padding", gap) for gap in plan.layout.gaps)):
            axis.barh(row, span.numel, left=span.start, height=0.5, color=colors[name], label=name)
        for rank, shard in enumerate(plan.layout.shards):
            axis.vlines((shard.start, shard.stop), row - 0.45, row + 0.25, color=GRAY)
            said = f"rank {rank}: {shard.numel}" if shard.numel > 99 else str(rank)
            axis.text((shard.start + shard.stop) / 2, row - 0.3, said, ha="center", va="bottom")
    axis.set_yticks(range(len(CUTS)), CUTS)
    axis.invert_yaxis()
    axis.set_xlabel("elements of the flat buffer, fp32")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    handles = [handles[name] for name in colors]
    axis.legend(handles, list(colors), ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1))
    return figure


# -- a step from disk ------------------------------------------------------------------------------


def transfers(
    group: Any, folder: str
) -> tuple[list[tuple[str, float, float]], list[tuple[int, str, int, float, float]]]:
    """Of two steps: phases, and what became of which sub-group in which slot; start and stop, ms.

    A slot has state from when its read begins until it is written.
    """
    offload = {"optimizer": "disk", "subgroup_bytes": 12 * MIB}
    model, optimizer = sharded({"stage": 3, **offload}, folder)
    train(model, optimizer, 2)
    phases, found, opened = [], [], []
    began = time.monotonic()

    def now() -> float:
        return (time.monotonic() - began) * 1e3

    def noted(verb: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: DiskStore, key: str, tensor: Tensor) -> Any:
            k, start = int(key.rpartition(".")[2]), now()
            if verb == "written":
                found.append((k % NUM_SLOTS, "stepped", k, opened[-1], start))
            future = plain(store, key, tensor)
            future.add_done_callback(lambda _: found.append((k % NUM_SLOTS, verb, k, start, now())))
            return future

        return call

    plain_step = OffloadedState.step

    def step(state: OffloadedState, *args: Any, opening: Callable[..., Any], **kwargs: Any) -> None:
        def opened_one(targets: Any) -> None:
            opened.append(now())
            opening(targets)

        plain_step(state, *args, opening=opened_one, **kwargs)

    def phase(name: str, act: Callable[..., Any], *args: Any) -> Any:
        start, result = now(), act(*args)
        phases.append((name, start, now()))
        return result

    with (
        mock.patch.object(DiskStore, "read", noted("read", DiskStore.read)),
        mock.patch.object(DiskStore, "write", noted("written", DiskStore.write)),
        mock.patch.object(OffloadedState, "step", step),
    ):
        for _ in range(2):
            output = phase("forward", model, torch.randn(1, 4, WIDTH))
            phase("backward", output.square().mean().backward)
            phase("step", optimizer.step)
            optimizer.zero_grad()
        zero_engine.full_optimizer_state_dict(model)  # all is written before it is read
    return phases, found


def swap(ranks: RankPool, folder: str) -> Figure:
    """What each slot holds of the optimizer's state on disk, around a step."""
    phases, found = ranks.run(transfers, timeout_s=300, folder=folder)[0]
    (_, begin, end), (_, _, last) = phases[2:4]  # the first step, and the forward after it
    right = min(last, max(stop for *_, start, stop in found if start < last)) - begin
    left = (begin - end) / 3
    figure = Figure(figsize=(6.4, 2.4), layout="constrained")
    axis = figure.subplots()
    place = {"ha": "center", "va": "center", "color": "black", "clip_on": True}
    for name, start, stop in ((name, start - begin, stop - begin) for name, start, stop in phases):
        axis.barh(0, stop - start, left=start, color=COLORS[name], edgecolor=GRAY)
        axis.text((max(start, left) + min(stop, right)) / 2, 0, name, **place)
    for slot, verb, k, start, stop in found:
        color = TRANSFERS[verb]
        axis.barh(1 + slot, stop - start, left=start - begin, color=color, label=verb)
        axis.text((start + stop) / 2 - begin, 1 + slot, k, **place)
    axis.set_yticks(range(1 + NUM_SLOTS), ["rank 0", *(f"slot {at}" for at in range(NUM_SLOTS))])
    axis.invert_yaxis()
    axis.set_xlim(left, right)
    axis.set_xlabel("ms since optimizer.step() was called; numbers are those of sub-groups")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    handles = [handles[verb] for verb in TRANSFERS]
    axis.legend(handles, list(TRANSFERS), ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1))
    return figure


# -- a checkpoint ----------------------------------------------------------------------------------


def save(group: Any, folder: str) -> None:
    """Save a checkpoint after a few steps."""
    model, optimizer = sharded({"stage": 3}, "")
    train(model, optimizer, 2)
    zero_engine.save(f"{folder}/checkpoint", model, optimizer, step=2)


def checkpoint(ranks: RankPool, folder: str) -> Figure:
    """The files of a checkpoint of four ranks, by size."""
    ranks.run(save, folder=folder)
    root = Path(folder) / "checkpoint"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = [str(path.relative_to(root)) for path in files]
    sizes = [path.stat().st_size for path in files]
    figure = Figure(figsize=(8, 0.6 + 0.3 * len(files)), layout="constrained")
    axis = figure.subplots()
    axis.barh(names, [size / MIB for size in sizes], color=KINDS["parameters"])
    for row, size in enumerate(sizes):
        said = f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 1024:.1f} KiB"
        axis.text(size / MIB, row, f" {said}", va="center")
    axis.set_xlim(0, 1.15 * max(sizes) / MIB)
    axis.invert_yaxis()
    axis.set_xlabel("MiB")
    return figure


# -- the wire --------------------------------------------------------------------------------------


def wire(ranks: RankPool, folder: str) -> Figure:
    """Time of a step on two nodes against the rate of the network between them, for each wire.

    From the files of `hatch run bench wire --model 25m --gbit RATE`. Dotted: how long the bytes
    that a node sends take at that rate.
    """
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for path in sorted(RESULTS.glob("*-wire*.json")):
        record = json.loads(path.read_text())
        for row in record["rows"] if record["settings"]["model"] == "25m" else ():
            title = WIRES[row["system"]]
            figures = row["ms"] / 1e3, row["cable_s"]
            found.setdefault(title, {})[record["settings"]["gbit"]] = figures
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    for (title, by_rate), color in zip(found.items(), mpl.color_sequences["tab10"], strict=False):
        rates = sorted(by_rate)
        steps, cables = zip(*(by_rate[rate] for rate in rates), strict=True)
        axis.loglog(rates, steps, "o-", color=color, label=title)
        axis.loglog(rates, cables, ":", color=color)
    measured = sorted({rate for by_rate in found.values() for rate in by_rate})
    axis.set_xticks(measured, [f"{rate:g}" for rate in measured], minor=False)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("Gbit/s between the nodes")
    axis.set_ylabel("seconds of a step")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


PICTURES: Final[dict[str, tuple[int, Callable[[RankPool, str], Figure]]]] = {  # and their ranks
    "memory": (NUM_RANKS, memory),
    "step": (2, step),  # one for each core, as times are drawn
    "late": (2, late),
    "slots": (NUM_RANKS, slots),
    "placements": (NUM_RANKS, placements),
    "units": (1, units),
    "swap": (2, swap),
    "checkpoint": (NUM_RANKS, checkpoint),
    "wire": (1, wire),
}
STYLE: Final = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "zero",  # the same file from the same values
    "savefig.transparent": True,
    "legend.frameon": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY
    ),
}


def draw(names: list[str]) -> Iterator[Path]:
    """Draw them, all where none is named; yields each file."""
    for name in names or PICTURES:
        num_ranks, picture = PICTURES[name]
        path = FOLDER / f"{name}.svg"
        with (
            mpl.rc_context(STYLE),
            tempfile.TemporaryDirectory() as folder,
            RankPool(num_ranks) as ranks,
        ):
            picture(ranks, folder).savefig(path, metadata={"Date": None})
        yield path


if __name__ == "__main__":
    for written in draw(sys.argv[1:]):
        print(written)
