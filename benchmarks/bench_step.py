"""One training step: the same model under every system, in turns. Four suites ask for it."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Final

from harness import OptionError, Row, check_known, proc_fields, ratio, say, suite
from network import two_nodes, why_not
from systems import SYSTEMS
from training import Entry, check_options, run_heat, training_options

REFERENCE: Final = "ddp"
# Most memory that a system takes on a rank, for the number of systems that fit at a time.
BYTES_PER_PARAM: Final = 28
BYTES_PER_PROCESS: Final = 400 * 2**20


# ---- step ----


@suite(
    ("system", "system"),
    ("heat", "heat"),
    ("ms", "ms", ".1f"),
    ("/ DDP", "ratio", ".3f"),
    ("rounds", "ratio_range", ".2f"),
    ("peak MB", "peak_bytes", ".0f", 1e-6),
    ("idle B/param", "idle_bytes_per_param", ".2f"),
    ("last loss", "last_loss", ".6f"),
    ("losses", "losses_to_ddp"),
    at_once=(0, "systems side by side, DDP among them; else as many as fit"),
    **training_options(rounds=8),
)
def step(options: Namespace) -> list[Row]:
    """Time and memory of one training step: the same model under every system, in turns."""
    check_options(options, list(SYSTEMS))
    names = options.systems or [
        name
        for name, system in SYSTEMS.items()
        if system.environment in options.pythons and not system.is_variant
    ]
    others = [name for name in dict.fromkeys(names) if name != REFERENCE]
    seats = max(1, (options.at_once or _fitting(options)) - 1)
    heats = [others[i : i + seats] for i in range(0, len(others), seats)] or [[]]
    rows = []
    for number, chosen in enumerate(heats, start=1):
        entries = [Entry(SYSTEMS[name], number) for name in (REFERENCE, *chosen)]
        run_heat(entries, options)
        rows += [_step_row(entry, entries[0], options.numel) for entry in entries]
    return rows


def _fitting(options: Namespace) -> int:
    available_bytes = int(proc_fields("meminfo")["MemAvailable"].split()[0]) * 1024
    return available_bytes // (
        options.ranks * (BYTES_PER_PARAM * options.numel + BYTES_PER_PROCESS)
    )


def _step_row(entry: Entry, reference: Entry, numel: int) -> Row:
    row = entry.figures() | entry.ratio(reference)
    if entry.error:
        return row
    row |= {
        "setup_peak_bytes": max(rank["setup_peak_bytes"] for rank in entry.setup),
        "idle_resident_bytes": max(report["idle_resident_bytes"] for report in entry.reports),
        "idle_bytes_per_param": max(r["idle_tensor_bytes"] for r in entry.reports) / numel,
    }
    # A process alone sees the data of the first rank only, so its losses are others.
    if not (reference.error or entry is reference or entry.system.is_alone):
        row["first_other_loss"] = first = _first_difference(row["losses"], reference.reports)
        row["same_losses"] = first is None  # in every step, on every rank, in every bit
        row["losses_to_ddp"] = "= DDP" if first is None else f"differ from step {first}"
    return row


def _first_difference(losses: list[list[float]], reports: list[Row]) -> int | None:
    """The first step in which any rank's loss differs from those of the reports, if one does."""
    others = zip(*(report["losses"] for report in reports), strict=True)
    by_step = zip(zip(*losses, strict=True), others, strict=True)
    return next((number for number, (own, other) in enumerate(by_step) if own != other), None)


# ---- residence ----

RESIDENCES: Final[dict[int, tuple[str, ...]]] = {
    1: ("zero1", "zero1_host", "zero1_disk"),
    2: ("zero2", "zero2_host", "zero2_disk"),
    3: ("zero3", "zero3_host", "zero3_host_all", "zero3_disk", "zero3_disk_all"),
}
PEERS: Final = ("deepspeed3", "deepspeed3_host")


@suite(
    ("system", "system"),
    ("ms", "ms", ".1f"),
    ("/ without", "ratio", ".3f"),
    ("rounds", "ratio_range", ".2f"),
    ("/ DDP", "ratio_to_ddp", ".2f"),
    ("device MB", "device_bytes", ".0f", 1e-6),
    ("host MB", "host_bytes", ".0f", 1e-6),
    ("disk MB", "disk_bytes", ".0f", 1e-6),
    ("moved MB", "moved_bytes", ".0f", 1e-6),
    ("disk GB/s", "rate", ".2f", 1e-9),
    ("bound ms", "bound_ms", ".1f"),
    ("/ bound", "of_bound", ".2f"),
    ("rounds", "of_bound_range", ".2f"),
    **training_options(rounds=8),
    path=(str, "a folder on the disk"),
    stages=([1, 2, 3], "of each a heat"),
)
def residence(options: Namespace) -> list[Row]:
    """One training step with optimizer state and parameters on host or disk, against one without.

    For every stage a heat: the systems of that stage, DDP and the disk by itself take turns, so
    that each ratio compares figures of one round. The bound of a step that uses the disk is the
    larger of two times of the same round: the step without offload, and the bytes that it moved at
    the rate at which the disk alone, read and written at once by as many ranks, moved its own.
    """
    check_known("stages", options.stages, RESIDENCES)
    groups = [*(RESIDENCES[stage] for stage in options.stages)]
    asked = options.systems
    check_options(options, [name for group in (*RESIDENCES.values(), PEERS) for name in group])
    if "deepspeed" in options.pythons:
        groups.append(PEERS)
    rows = []
    for heat, (without, *others) in enumerate(groups, start=1):
        chosen = [name for name in others if not asked or name in asked]
        entries = [Entry(SYSTEMS[n], heat) for n in (REFERENCE, "disk", without, *chosen)]
        run_heat(entries, options)
        rows += [_residence_row(entry, *entries[:3]) for entry in entries]
    return rows


def _residence_row(entry: Entry, ddp: Entry, disk: Entry, without: Entry) -> Row:
    row = entry.figures()
    if entry.error:
        return row
    row["round_disk_bytes"] = entry.round_disk_bytes  # of all ranks
    # Bytes between steps, on the rank that has most.
    for kind in ("device_bytes", "host_bytes", "disk_bytes"):
        if kind in entry.reports[0]:
            row[kind] = max(report[kind] for report in entry.reports)
    if entry is disk:
        return row | {"rate": statistics.median(_rates(disk))}
    row["ratio_to_ddp"] = entry.ratio(ddp).get("ratio")
    if entry is not ddp:
        row |= entry.ratio(without)
    if row.get("disk_bytes") and not disk.error and not without.error:
        rates = _rates(disk)
        bounds = [
            max(theirs, 1000 * moved / rate)
            for moved, theirs, rate in zip(
                entry.round_disk_bytes, without.median_ms, rates, strict=True
            )
        ]
        row |= {
            "moved_bytes": statistics.median(entry.round_disk_bytes) / len(entry.reports),
            "rate": statistics.median(rates),
            "bound_ms": statistics.median(bounds),
            **ratio(_mean_ms(entry), bounds, "of_bound"),
        }
    return row


def _mean_ms(entry: Entry) -> list[float]:
    """Return the mean of each round, since a step may wait for writes of the one before it."""
    return [statistics.fmean(each) for each in entry.round_ms]


def _rates(disk: Entry) -> list[float]:
    """Return the bytes per second of each round, all ranks together."""
    moved = zip(disk.round_disk_bytes, disk.median_ms, strict=True)
    return [1000 * num_bytes / ms for num_bytes, ms in moved]


# ---- wire ----

EXACT: Final = "zero3_nodes"
ON_NODES: Final = (EXACT, *(f"{EXACT}_{way}" for way in ("qwz", "hpz", "qgz", "all")), "fsdp2")


@suite(
    ("system", "system"),
    ("ms", "ms", ".0f"),
    ("exact / it", "speed", ".2f"),
    ("rounds", "speed_range", ".2f"),
    ("node MB", "node_bytes", ".0f", 1e-6),
    ("bytes of exact / its", "byte_ratio", ".2f"),
    ("cable s", "cable_s", ".2f"),
    ("last loss", "last_loss", ".4f"),
    **training_options(
        rounds=3,
        model="119m",
        ranks=(4, "half of them on each node"),
        steps_per_round=(1, "that count; one more runs before them"),
        warmup=(2, "steps before the first round"),
        systems=([], "the first is compared with"),
    ),
    gbit=(1.0, "per second, in each direction"),
)
def wire(options: Namespace) -> list[Row]:
    """One training step on two nodes with a slow network, exact and with ZeRO++'s ways.

    Each of two network namespaces, joined by a pair of virtual interfaces with a limited rate, has
    half of the ranks. Stage 3 exact, with each of ZeRO++'s ways of sending less (arXiv 2306.10209),
    and with all of them, and FSDP2, take turns. `node MB` are the bytes that a node sent to the
    other in one step, as the kernel counts them; where the network is the slowest part, time should
    follow them. Linux, root.
    """
    if problem := why_not():
        say(f"skipped: {problem}")
        return []
    check_options(options, list(SYSTEMS), ON_NODES)
    if options.ranks % 2:
        raise OptionError("--ranks must be even: two nodes have half of them each")
    entries = [Entry(SYSTEMS[name]) for name in options.systems]
    with two_nodes(options.gbit) as nodes:
        run_heat(entries, options, nodes)
    return [_wire_row(entry, entries[0], options.gbit) for entry in entries]


def _wire_row(entry: Entry, reference: Entry, gbit: float) -> Row:
    row = entry.figures()
    if entry.error or reference.error:
        return row
    node_bytes = statistics.median(entry.round_sent_bytes)
    return row | {
        **reference.ratio(entry, "speed"),
        "node_bytes": node_bytes,
        "byte_ratio": statistics.median(reference.round_sent_bytes) / node_bytes,
        "cable_s": node_bytes * 8 / gbit / 1e9,
    }
