"""What the pytest plugin adds to a user's own run of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest

def _rank(group):
    return group.rank

def test_a(ranks):
    assert ranks(2).run(_rank) == [0, 1]

@pytest.mark.parametrize("act", [_rank])
def test_a_body(group, tmp_path, act):
    assert (group.world_size, act(group), tmp_path.is_dir()) == (2, group.rank, True)

@pytest.mark.ranks(1, 3, timeout_s=20)
def test_a_body_on_as_many(group):
    assert group.world_size in (1, 3)

@pytest.mark.parametrize(("body", "timeout_s", "kwargs"), [(1, 2, 3)])
def test_a_body_whose_parameters_are_named_as_those_of_run(group, body, timeout_s, kwargs):
    assert (body, timeout_s, kwargs) == (1, 2, 3)

@pytest.mark.xfail(strict=True, raises=RuntimeError)
def test_a_body_that_fails_on_one_rank(group):
    assert group.rank == 0

def test_without_ranks():
    pass
"""


@pytest.mark.slow
def test_ranks_come_with_the_plugin(tmp_path: Path) -> None:
    """Whoever installs zero-comm can test on ranks, also with pytest at its strictest."""
    result = _pytest(tmp_path, "-p", "no:xdist")

    assert "6 passed, 1 xfailed" in result, result


@pytest.mark.slow
def test_a_mark_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    """A test that is thought to run on four ranks would run on two, or on none."""
    tests = "import pytest\n@pytest.mark.ranks(4)\ndef test_alone(ranks):\n    ranks(2)\n"
    result = _pytest(tmp_path, "-p", "no:xdist", tests=tests)

    assert "test_alone: the mark `ranks` says" in result, result
    assert "take the fixture `group`, or leave out the mark" in result, result


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-p", "no:xdist"], []], ids=["without xdist", "with xdist"])
def test_tests_with_ranks_are_one_group(tmp_path: Path, options: list[str]) -> None:
    """Two of them at once would fight for the cores and run into their timeouts."""
    result = _pytest(tmp_path, "--collect-only", "-m", "xdist_group", *options)

    assert "6/7 tests collected (1 deselected)" in result, result
    assert "test_a" in result, result


def test_the_plugin_imports_no_torch() -> None:
    """It is loaded in every run of pytest in this environment, and torch costs seconds."""
    code = "import sys, zero_comm_pytest; assert not {'torch', 'zero_comm'} & sys.modules.keys()"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _pytest(folder: Path, *options: str, tests: str = _TESTS) -> str:
    Path(folder, "test_theirs.py").write_text(tests)
    Path(folder, "pytest.toml").write_text("[pytest]\nstrict = true\nfilterwarnings = ['error']\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return result.stdout + result.stderr
