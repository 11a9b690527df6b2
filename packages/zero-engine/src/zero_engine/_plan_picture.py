"""Plans as a picture: stacked bars of one rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ._errors import ConfigError, FileError
from ._plan import Plan
from ._plan_options import name_of
from ._plan_table import KINDS

_GREY: Final = "0.5"
_SKIPPED: Final = "scalars_bytes"  # which nobody would see


def save_picture(plans: Sequence[Plan], path: str | Path) -> None:
    """Draw what one rank holds before the step, a bar for each plan; host and disk beside it.

    Args:
        plans: At least one.
        path: Of the picture; its ending says the format, PNG for one.

    Raises:
        ConfigError: matplotlib is missing, or does not know the format.
        FileError: It cannot be written there.
    """
    figure_of = _figure()
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
    size = (2.5 + 0.9 * len(plans), 1.5 + 2.5 * len(panels))
    figure = figure_of(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    names = [name_of(plan.config).replace(" + ", "\n") for plan in plans]
    for axis, (place, kinds) in zip(axes, panels.items(), strict=True):
        _stack(axis, names, kinds)
        axis.set_ylabel(f"{place}, GB a rank")
    axes[0].set_title("Before the optimizer's step, without activations")
    axes[0].legend(frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; use an ending such as .png") from error


def _stack(axis: Any, names: Sequence[str], kinds: dict[str, list[int]]) -> None:
    bottom = [0.0] * len(names)
    for words, sizes in kinds.items():
        if any(sizes):
            heights = [size / 10**9 for size in sizes]
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


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # no dependency of ours
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib: pip install zero-engine[picture], or take the table or "
            "JSON"
        ) from error
    return Figure
