"""One thread for each process that tests run in, and the order of a simulated device's streams."""

import os
import re
import secrets

import pytest

# Before torch is imported. Two workers of two threads each wait for each other at every operation;
# and sums depend on the number of threads, so an oracle must have as many as a rank.
os.environ["OMP_NUM_THREADS"] = "1"

# Programs that tests let fail leave no reports.
os.environ["ZERO_REPORT"] = "off"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mode`, for `--device sim`."""
    parser.addoption(
        "--mode",
        help="when --device sim runs what is launched: eager, late (default), random, random:SEED",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the mode for this process, and those that it starts: workers, and ranks."""
    given, is_simulated = config.getoption("--mode"), config.getoption("--device", "cpu") == "sim"
    if given is not None and not is_simulated:
        raise pytest.UsageError(f"--mode {given} is for --device sim; leave it out, or add that")
    if given is not None and not re.fullmatch(r"eager|late|random(:\d+)?", given):
        raise pytest.UsageError(f"--mode: expected eager, late, random or random:SEED, got {given}")
    if is_simulated and not hasattr(config, "workerinput"):  # which has the mode of its parent
        mode = given or "late"
        os.environ["SIM_MODE"] = f"random:{secrets.randbelow(10**6)}" if mode == "random" else mode


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say the mode, by which a run can be repeated."""
    if config.getoption("--device", "cpu") != "sim":
        return None
    return f"simulated device: --mode {os.environ['SIM_MODE']}"
