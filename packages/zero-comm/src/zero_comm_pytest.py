"""The pytest plugin of zero-comm: the `ranks` fixture.

A module of its own, outside the package, so that loading it imports no torch: pytest loads every
plugin in every run, also in those that need no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from zero_comm.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Worker processes by world size: `ranks(2).run(_body)` returns what each rank returned.

    The workers are started when first asked for and kept for the session. See
    `zero_comm.testing.RankPool.run` for what a body may be.
    """
    from zero_comm.testing import RankPool  # noqa: PLC0415  (imports torch)

    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known where pytest-xdist, which owns it, is absent."""
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that share one worker")


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests with ranks in one xdist worker: two of them would fight for the cores."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
