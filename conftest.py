"""One thread for each process that tests run in, the order of a simulated device, and cases.

Where all tests run, half or a third of the cases of a test with ranks run if it has many. A test
that is marked `drawn(N)` runs one of N instead, and one with a single case in every Nth run.
ZERO_SEED, which the header shows, draws them. All run where a file or a test is named on the
command line, or with `-k`. ZERO_CASES decides it otherwise: "all", as before a release, or "drawn".
With `--only FILE` those run that FILE names, a test or a file a line, as in `hatch run quick`.
"""

import os
import re
import secrets
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

# Before torch is imported. Two workers of two threads each wait for each other at every operation;
# and sums depend on the number of threads, so an oracle must have as many as a rank.
os.environ["OMP_NUM_THREADS"] = "1"

# Programs that tests let fail leave no reports.
os.environ["ZERO_REPORT"] = "off"

# Workers and ranks are children of this process: they draw the same.
os.environ.setdefault("ZERO_SEED", str(secrets.randbelow(10**6)))

MANY_CASES = (4, 12)  # half of the cases run, and a third


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mode`, for `--device sim`, and `--only`."""
    parser.addoption(
        "--mode",
        help="when --device sim runs what is launched: eager, late (default), random, random:SEED",
    )
    parser.addoption("--only", metavar="FILE", help="run tests that FILE names, one a line")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker. Set the mode for this process, and those it starts: workers, ranks."""
    config.addinivalue_line("markers", "drawn(of): one case of so many runs, unless all are asked")
    given, is_simulated = config.getoption("--mode"), config.getoption("--device", "cpu") == "sim"
    if given is not None and not is_simulated:
        raise pytest.UsageError(f"--mode {given} is for --device sim; leave it out, or add that")
    if given is not None and not re.fullmatch(r"eager|late|random(:\d+)?", given):
        raise pytest.UsageError(f"--mode: expected eager, late, random or random:SEED, got {given}")
    if is_simulated and not hasattr(config, "workerinput"):  # which has the mode of its parent
        mode = given or "late"
        os.environ["SIM_MODE"] = f"random:{secrets.randbelow(10**6)}" if mode == "random" else mode


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say the seed and the mode, by which a run can be repeated."""
    is_simulated = config.getoption("--device", "cpu") == "sim"
    mode = [f"simulated device: --mode {os.environ['SIM_MODE']}"] if is_simulated else []
    return [f"ZERO_SEED={os.environ['ZERO_SEED']}", *mode]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases that are not drawn, or, with `--only`, what is not named."""
    if (only := config.getoption("--only")) is not None:
        named = {*Path(only).read_text().splitlines()}
        left_out = {each for each in items if not named & {each.nodeid, _file_of(each)}}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [each for each in items if each not in left_out]
        return
    is_named = config.option.keyword or any(".py" in each for each in config.args)
    wanted = os.environ.get("ZERO_CASES", "all" if is_named else "drawn")
    if wanted not in ("all", "drawn"):
        raise pytest.UsageError(f"ZERO_CASES: expected all or drawn, got {wanted}")
    if wanted == "all":
        return
    by_test = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    dropped = set[pytest.Item]()
    for name, cases in by_test.items():
        mark = cases[0].get_closest_marker("drawn")
        has_ranks = {"ranks", "group"} & {*getattr(cases[0], "fixturenames", ())}
        many = sum(len(cases) >= many for many in MANY_CASES) if has_ranks else 0
        of = mark.args[0] if mark else 1 + many
        draw = Random(f"{os.environ['ZERO_SEED']} {name}")
        kept = int(len(cases) / of + draw.random())  # on average as many as were asked for
        dropped.update(draw.sample(cases, len(cases) - kept))
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [each for each in items if each not in dropped]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
