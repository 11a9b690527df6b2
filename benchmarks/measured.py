"""Write `docs/measured.md` from the files in `results/`: `hatch run measured`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Final

from harness import HERE, Row, Suite, table
from run import SUITES

PAGE: Final = HERE.parent / "docs/measured.md"
HEAD: Final = """# Measured

Every table is written by `hatch run measured` from a file in `benchmarks/results`, which has the
options, the date, the machine, the versions, and the figures of every round. What the columns mean,
and how systems take turns so that a ratio compares figures of the same minutes, is in [the page of
the benchmarks](../benchmarks/README.md). Times of two tables do not compare; ratios do.

A system has the name that `--systems` takes: `zero3` is our stage 3 (`_host` and `_disk` say where
state is kept, with `_all` parameters, too; `_nodes` is two nodes, with `qwz` for weights in int8,
`hpz` for secondary shards, `qgz` for gradients in int4, `all` for all three), `zro` our
ZeroRedundancyOptimizer under DDP, `torch_zro` torch's (`_packed` without
their option `parameters_as_bucket_view`). `alone` is one process, `apart` several that send
nothing. Systems of one `heat` ran side by side, and DDP is in each.

Figures of `device` are simulated, and compare systems on one device
([how far they can be believed](decisions/0065-steps-of-a-cluster-are-simulated.md)). None is of a
GPU: [what a GPU has run](gpu.md).
"""


def page(folder: Path = HERE / "results") -> str:
    """Return the page: a section for each suite, in it a table of each file, long ones first."""
    lines = [HEAD]
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)]
    files.sort(key=lambda record: -len(record["rows"]))
    for name, module in SUITES.items():
        suite: Suite = getattr(importlib.import_module(module), name)
        if found := [record for record in files if record["suite"] == name]:
            lines += [f"## {name}", "", str(suite.measure.__doc__).partition("\n")[0], ""]
        for record in found:
            lines += [*_table(suite, record), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(suite: Suite, record: dict[str, Any]) -> list[str]:
    rows, machine, settings = record["rows"], record["machine"], record["settings"]
    columns = [column for column in suite.columns if _differs(rows, column[1])]
    torch, memory = record["versions"]["torch"], round(machine["memory_bytes"] / 2**30)
    load = f", load before {settings['load_before']:.1f}" if "load_before" in settings else ""
    return [
        f"    {_command(suite, record['suite'], settings)}",
        "",
        f"{record['time'][:10]}, commit {record['commit'][:8]}, {machine['cpu']}, "
        f"{machine['cores']} cores, {memory} GiB, torch {torch}{load}.",
        "",
        table(columns, rows, "github"),
    ]


def _differs(rows: list[Row], key: str) -> bool:
    """Return whether a column has a figure; columns of heats and threads need two values."""
    values = [row.get(key) for row in rows]
    is_same = key in {"heat", "threads"} and len(set(values)) == 1
    return any(value is not None for value in values) and not is_same


def _command(suite: Suite, name: str, settings: dict[str, Any]) -> str:
    """Return the command line, with the options that are not at their defaults."""
    words = [f"hatch run bench {name}"]
    for option, given in suite.options.items():
        default = given.get("default") if isinstance(given, dict) else given[0]
        value = settings.get(option, default)
        if option == "path" and default is str:
            words.append("--path FOLDER")
        elif value != default and value is not None:
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{option.replace('_', '-')}" + ("" if value is True else f" {shown}"))
    return " ".join(words)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
