"""Plans as tables and sentences to print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import zero_comm
import zero_offload
from attrs import evolve
from torch import nn
from zero_comm import Group
from zero_partition import PartitionError

from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.reports import as_table, new_figure, save_figure

from .options import Option, Room, name_of, recommend
from .plan import Plan, UnitRow, plan

_UNITS: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# Fields of `MemoryReport` that are on the device -> their names in tables.
KINDS: Final = {
    "params_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "padding_bytes": "padding",
    "slots_bytes": "slots",
    "secondary_bytes": "secondary shards",
    "reduction_bytes": "reduction",
    "encoded_bytes": "encoded",
    "loco_bytes": "LoCo",
    "scalars_bytes": "scalars",
}


def plan_table(plan: Plan) -> str:
    """Return memory and traffic of one rank and of each unit; units that are alike share a line."""
    at_rest, before_step = plan.at_rest, plan.memory.before_step
    places = {"total_bytes": "device", "host_bytes": "host", "disk_bytes": "disk"}
    words_of = KINDS | places
    if plan.dtypes.endswith("masters: yes"):
        words_of["optimizer_bytes"] += ", with masters"
    rows = [
        [words, *map(in_units, found)]
        for kind, words in words_of.items()
        if any(found := [getattr(report, kind) for report in (at_rest, before_step)])
    ]
    memory = as_table(rows, headers=["", "at rest", "before the step"], colalign=_RIGHT)
    units = as_table(
        list(_unit_rows(plan.units)),
        headers=["unit", "count", "parameters", "whole", "shard", "gathers", "each sends"],
        disable_numparse=True,
    )
    across = f", {in_units(plan.across_bytes)} of it to other nodes" if plan.across_bytes else ""
    passing = f" (and at most {in_units(plan.passing_bytes)} in transit)" * bool(plan.passing_bytes)
    return (
        f"{name_of(plan.config)}, {_what(plan)}, rank {plan.rank} of {plan.world_size}\n\n"
        f"{memory}\n\n"
        f"peak of a step   {in_units(plan.memory.step_peak_bytes)}, without activations{passing}\n"
        f"peak of shard()  {in_units(plan.memory.init_peak_bytes)}, of a model that is whole on "
        "the device\n"
        f"a checkpoint     {in_units(plan.save.num_bytes)} written by this rank; save() needs "
        f"{in_units(plan.save.batch_bytes)} of host memory for it, a Saver all of it\n"
        f"sent in a step   {in_units(plan.sent_bytes)}{across}\n\n{units}"
    )


def line_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig, group: Group
) -> str:
    """Return a line for the log: bytes of this rank as planned, backend and kernels. Local.

    Args:
        model: The model, before it is sharded.
        optimizer: Its optimizer.
        config: As for `shard`.
        group: The ranks that shard it.
    """
    try:
        # Without groups: parameters with groups of their own are planned as if all ranks had them.
        planned = plan(
            model,
            evolve(config, groups={}),
            world_size=group.world_size,
            optimizer=optimizer,
            device=group.device,
            rank=group.rank,
            reads_peers=group.exchanges.reads_peers,
        )
        line = _line(planned)
    # Logging must not end a training that works.
    except (ConfigError, PartitionError) as error:
        line = f"{name_of(config)}; bytes cannot be planned ({error})"
    kernels = f"{zero_offload.native_status().isa or 'plain torch'} steps on the host"
    # CUDA kernels are compiled on first use, so only the CPU's are known here.
    if group.device.type == "cpu":
        kernels += f", {'plain torch' if zero_comm.native_status() else 'compiled code'} encodes"
    return f"{line}; {group.backend.name}: {group.transport}; {kernels}"


def _line(plan: Plan) -> str:
    moments = ("at rest", plan.at_rest), ("before a step", plan.memory.before_step)
    bytes_then = "; ".join(
        f"{moment} {in_units(report.total_bytes)} ("
        + ", ".join(
            f"{words} {in_units(getattr(report, kind))}"
            for kind, words in KINDS.items()
            if getattr(report, kind)
        )
        + ")"
        for moment, report in moments
    )
    places = ("host", plan.at_rest.host_bytes), ("disk", plan.at_rest.disk_bytes)
    elsewhere = "".join(f"; on the {place} {in_units(taken)}" for place, taken in places if taken)
    return (
        f"{name_of(plan.config)}, {len(plan.units)} units, {plan.numel:,} parameters, "
        f"{plan.optimizer}; a rank of {plan.world_size} has {bytes_then}{elsewhere}; "
        f"at most {in_units(plan.memory.step_peak_bytes)}, activations apart"
    )


def options_table(options: Sequence[Option], room: Room) -> str:
    """Return a table of all options, a line each, and which one to take."""
    rows = [
        [
            option.name,
            *map(in_units, (option.device_bytes, option.host_bytes, option.disk_bytes)),
            in_units(option.plan.sent_bytes),
            *(["yes" if option.fits else "no"] if room.is_bounded else []),
        ]
        for option in options
    ]
    headers = ["", "device", "host of a machine", "disk of a machine", "sent in a step"]
    estimated = "estimated " * room.activations_are_estimated
    with_or_apart = f"fits with {estimated}activations"
    if room.is_bounded:
        headers.append(with_or_apart if room.activations else "fits, activations apart")
    table = as_table(rows, headers=headers, disable_numparse=True)
    first = options[0].plan
    ranks = "1 rank" if first.world_size == 1 else f"{first.world_size:,} ranks"
    heading = f"{_what(first)}, {ranks}{bounds_of(room)}"
    return f"{heading}\n\n{table}\n\n{recommendation(options, room)}"


def recommendation(options: Sequence[Option], room: Room) -> str:
    """Name the cheapest option that fits, or the nearest; and those for smaller devices."""
    lines, chosen = [], recommend(options)
    if room.is_bounded:
        if chosen is None and len(options) == 1:
            (least,) = options
            lines.append(
                f"{least.name} does not fit ({_sizes_of(room)}): it needs {_needs(least)}."
            )
        elif chosen is None:
            least = min(options, key=lambda option: option.device_bytes)
            lines.append(
                f"Nothing fits ({_sizes_of(room)}). {least.name} needs least of a device: "
                f"{in_units(least.device_bytes)}, {in_units(least.host_bytes)} of each machine's "
                f"host memory and {in_units(least.disk_bytes)} of its disk."
            )
        else:
            where = "" if room.device is None else f" in {in_units(room.device)}"
            lines.append(f"{chosen.name} fits{where}: {_needs(chosen)}.")
            if room.device is not None and chosen.plan.memory.init_peak_bytes > room.device:
                lines.append(
                    "Build the model under zero_engine.Init: whole on one device, it would not fit."
                )
    lines.append(_smallest(options, room))
    plans = [option.plan for option in options]
    if any(each.dtypes.endswith("masters: no") and each.config.precision is None for each in plans):
        lines.append(
            "Planned without fp32 masters, as shard() trains a 16-bit model without a Precision; "
            "--dtype bf16 or fp16 plans them."
        )
    estimated = " (an estimate)" if room.activations_are_estimated else ""
    apart = f"Included: {in_units(room.activations)} for activations{estimated}. Not included: what"
    apart = apart if room.activations else "Not included: activations, and what"
    lines.append(
        f"{apart} the optimizer's step and libraries take; {room.reserve:.0%} of each device is "
        "left free for that (--reserve, Room.reserve)."
    )
    return "\n".join(lines)


def in_units(num_bytes: int) -> str:
    """Return a size in binary units, with three digits or more."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            digits = 2 if num_bytes < 10 * size else 1 if num_bytes < 100 * size else 0
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"


_RIGHT: Final = ("left", "right", "right")
# Memory of common devices, in GiB.
_SIZES: Final = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 140, 192)


def _smallest(options: Sequence[Option], room: Room) -> str:
    """Name each option that fits in a smaller device than those before it, and that device."""
    said, smallest = [], None
    for option in options:
        needed = option.device_bytes
        fitting = next(
            (size for size in _SIZES if needed <= room.without_reserve(size * 2**30)), None
        )
        if fitting is not None and (smallest is None or fitting < smallest):
            said.append(f"{option.name}: {fitting} GiB")
            smallest = fitting
    if not said:
        return f"Nothing fits in {_SIZES[-1]} GiB."
    return f"Smallest device that is enough for {', '.join(said)}."


def bounds_of(room: Room) -> str:
    """Return the bounds of memory as the end of a heading; an empty string if there are none."""
    sizes = _sizes_of(room)
    return f"; {sizes}" * bool(sizes)


def _sizes_of(room: Room) -> str:
    sizes = {"device memory": room.device, "host memory": room.host, "disk": room.disk}
    return ", ".join(
        f"{what}: {in_units(size)}" for what, size in sizes.items() if size is not None
    )


def _what(plan: Plan) -> str:
    return f"{plan.numel:,} parameters, {plan.optimizer}, {plan.dtypes}"


def _needs(option: Option) -> str:
    needs = [f"{in_units(option.device_bytes)} of a device"]
    needs += [f"{in_units(option.host_bytes)} of a machine's host"] * bool(option.host_bytes)
    needs += [f"{in_units(option.disk_bytes)} of its disk"] * bool(option.disk_bytes)
    return ", ".join(needs)


def _unit_rows(units: Sequence[UnitRow]) -> Iterator[list[object]]:
    """Yield one row for all units that differ only in the numbers in their names."""
    alike: dict[tuple[object, ...], list[UnitRow]] = {}
    for row in units:
        pattern = re.sub(r"\d+", "*", row.name)
        key = (pattern, row.numel, row.whole_bytes, row.shard_bytes, row.gathers, row.sent_bytes)
        alike.setdefault(key, []).append(row)
    for (pattern, *_), rows in alike.items():
        first = rows[0]
        yield [
            first.name if len(rows) == 1 else pattern,
            len(rows),
            f"{first.numel:,}",
            in_units(first.whole_bytes),
            in_units(first.shard_bytes),
            first.gathers,
            in_units(first.sent_bytes),
        ]


_GREY: Final = "0.5"
# A few bytes: too small to be visible as a bar.
_SKIPPED: Final = "scalars_bytes"


def save_picture(plans: Sequence[Plan], path: str | Path) -> None:
    """Draw the memory of one rank before the step, a bar for each plan; host and disk below it.

    Args:
        plans: At least one.
        path: File to write; its suffix sets the format, such as ".png".

    Raises:
        ConfigError: matplotlib is missing, or does not know the format.
        FileError: It cannot be written there.
    """
    reports = [plan.memory.before_step for plan in plans]
    device: dict[str, list[int]] = {
        words: [getattr(report, kind) for report in reports]
        for kind, words in KINDS.items()
        if kind != _SKIPPED
    }
    panels = {"device": device}
    for place in ("host", "disk"):
        sizes = [getattr(report, f"{place}_bytes") for report in reports]
        if any(sizes):
            panels[place] = {place: sizes}
    figure = new_figure(2.5 + 0.9 * len(plans), 1.5 + 2.5 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    names = [name_of(plan.config).replace(" + ", "\n") for plan in plans]
    for axis, (place, kinds) in zip(axes, panels.items(), strict=True):
        _stack(axis, names, kinds)
        axis.set_ylabel(f"{place}, GiB a rank")
    axes[0].set_title("Before the optimizer's step, without activations")
    axes[0].legend(frameon=False)
    save_figure(figure, path)


def _stack(axis: Any, names: Sequence[str], kinds: dict[str, list[int]]) -> None:
    bottom = [0.0] * len(names)
    for words, sizes in kinds.items():
        if any(sizes):
            heights = [size / 2**30 for size in sizes]
            axis.bar(
                range(len(names)),
                heights,
                bottom=bottom,
                label=words,
                width=0.7,
                color=_GREY if len(kinds) == 1 else None,
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
