"""Without the extension, all tests of this folder are one skipped line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported. Sums depend on the number of threads, and ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]

try:
    import simulated_device  # noqa: F401 - whether it can be
except ImportError as error:
    if "is not built" not in str(error):
        raise
    _NOT_BUILT = str(error)
else:
    _NOT_BUILT = ""


class _SkippedFolder(pytest.Directory):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(_NOT_BUILT)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip the folder of tests where there is nothing to test."""
    if path != HERE / "tests" or not _NOT_BUILT:
        return None
    return _SkippedFolder.from_parent(parent, path=path)
