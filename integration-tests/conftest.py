"""Makes the oracle importable, and draws cases; the `ranks` fixture comes with zero-comm.

Of a test marked `drawn(N)` one case of N runs where all tests do, drawn by ZERO_SEED, which the
header shows. All run where a file or a test is named on the command line, with `-k`, and with
ZERO_CASES=all, as before a release.
"""

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

# Optimizers load it at their first step: so it is loaded once for all ranks.
import torch._dynamo  # noqa: F401

# Under --import-mode=importlib a test's folder is not importable. Workers add it by themselves.
sys.path.insert(0, str(Path(__file__).parent))

# Workers and ranks are children of this process: they draw the same.
os.environ.setdefault("ZERO_SEED", str(time.time_ns() % 10**6))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "drawn(of): one case of so many runs, unless all are asked")


def pytest_report_header() -> str:
    """Return how to draw the same cases again."""
    return f"ZERO_SEED={os.environ['ZERO_SEED']}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases that are not drawn."""
    is_named = config.option.keyword or any(".py" in each for each in config.args)
    if is_named or os.environ.get("ZERO_CASES") == "all":
        return
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if (mark := item.get_closest_marker("drawn")) is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    dropped = set[pytest.Item]()
    for (name, of), mine in cases.items():
        draw = Random(f"{os.environ['ZERO_SEED']} {name}")
        dropped.update(draw.sample(mine, len(mine) - -(-len(mine) // of)))
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [each for each in items if each not in dropped]
