"""The pytest plugin of zero-comm: tests on several ranks, by the fixtures `group` and `ranks`.

A module of its own, outside the package, so that loading it imports no torch: pytest loads every
plugin in every run, also in those that need no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zero_comm.testing import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    parser.addoption(
        "--device",
        default="cpu",
        metavar="KIND",
        help="kind of device that tests with ranks run on, as torch names it: cpu, cuda, xpu, ...",
    )


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """Worker processes by world size: `ranks(2).run(_body)` returns what each rank returned.

    Their groups are on the device that `--device` names. The workers are started when first asked
    for and kept for the session. See `zero_comm.testing.RankPool.run` for what a body may be.
    """
    from zero_comm.testing import RankPool  # noqa: PLC0415  (imports torch)

    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        device = request.config.getoption("--device")
        return pools.setdefault(world_size, RankPool(world_size, device))

    try:
        yield pool_of
    finally:
        for pool in pools.values():
            pool.close()


@pytest.fixture
def group(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> RankPool:
    """A test that asks for it runs as a body on two ranks, each with its own `zero_comm.Group`.

    Or on as many as `@pytest.mark.ranks(4)` says; for each of several, as `ranks(1, 3)` says.
    `timeout_s` of the mark is that of `zero_comm.testing.RankPool.run`; what the test has of other
    fixtures and parameters is sent by pickle.
    """
    return ranks(getattr(request, "param", _world_sizes(request.node)[0]))


def _world_sizes(node: pytest.Item) -> tuple[int, ...]:
    mark = node.get_closest_marker("ranks")
    return mark.args if mark is not None and mark.args else (2,)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known; that of pytest-xdist, which owns it, where it is absent."""
    line = "ranks(*world_sizes, timeout_s=120.0): on how many ranks a test with a `group` runs"
    config.addinivalue_line("markers", line)
    line = "cpu_only(why): a test with ranks that is skipped with another --device, and the reason"
    config.addinivalue_line("markers", line)
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that share one worker")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each of several world sizes."""
    test, world_sizes = metafunc.definition, _world_sizes(metafunc.definition)
    if "group" not in metafunc.fixturenames:
        if any(mark.name == "ranks" for mark in test.own_markers):
            pytest.fail(
                f"{test.nodeid}: the mark `ranks` says on how many ranks a test with a `group` "
                "runs, and this one has none; take the fixture `group`, or leave out the mark",
                pytrace=False,
            )
    elif len(world_sizes) > 1:
        metafunc.parametrize("group", world_sizes, indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is for the CPU only where ranks are on another device."""
    mark = item.get_closest_marker("cpu_only")
    if mark is not None and item.config.getoption("--device") != "cpu":
        pytest.skip(f"on the CPU only: {mark.args[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on the ranks of its `group`; others may have a fixture of that name, too."""
    if "ranks" not in pyfuncitem.fixturenames or "group" not in pyfuncitem.funcargs:
        return None
    from zero_comm.testing import RankPool  # noqa: PLC0415  (imports torch)

    given: dict[str, Any] = {
        name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames
    }
    pool = given.pop("group", None)
    if not isinstance(pool, RankPool):
        return None
    mark = pyfuncitem.get_closest_marker("ranks")
    pool.run(partial(pyfuncitem.obj, **given), **({} if mark is None else mark.kwargs))
    return True


# Before xdist, which reads the marks in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests with ranks in one xdist worker: two of them would fight for the cores."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
