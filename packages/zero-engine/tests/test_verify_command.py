"""`zero verify`: its exit status says whether a configuration trains as it should."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

MODULE = """
import os, time, torch

seed = 3

def same(seed=0):
    def build():
        torch.manual_seed(seed)
        return torch.nn.Linear(4, 1)
    return {
        "build_model": build,
        "build_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [torch.ones(1, 4)] * 2,
    }

def other():
    def build():
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        return torch.nn.Linear(4, 1)
    return same() | {"build_model": build}

def lacking():
    given = same()
    del given["batches"], given["build_optimizer"]
    return given

def misspelt():
    return same() | {"batch": []}

def grouped():
    return same() | {"group": None}

def slow():
    given = same()
    build = given["build_model"]
    def build_slowly():
        time.sleep(0.8)
        return build()
    return given | {"build_model": build_slowly}

def fails():
    raise AttributeError("of the user's")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("mine:same", 0, "2 steps beside DistributedDataParallel: losses, gradients and weights"),
        ("mine:other", 1, "step 0, initial weight of 'weight'"),
        ("mine:nothing", 1, "expected MODULE:FUNCTION to call, got 'mine:nothing'"),
        ("mine:seed", 1, "expected a function that returns a dict or tuple of what"),
        ("mine:lacking", 1, "missing 'build_optimizer', 'batches'; got 'build_model'"),
        ("mine:misspelt", 1, "got an unexpected keyword argument 'batch'; got 'build_model', "),
        ("mine:grouped", 1, "got multiple values for keyword argument 'group'"),
        ("nothing:same", 1, "No module named 'nothing'"),
        ("tests/nothing.py:same", 1, "did you mean tests.nothing:same?"),
    ],
)
def test_the_status_says_what_differs(zero, function: str, status: int, said: str, capsys) -> None:
    """A script that starts a training can stop at it."""
    assert zero("verify", function) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.usefixtures("mine")
def test_a_terminal_is_told_what_takes_long(zero, capsys, monkeypatch) -> None:
    """A log is not: it would have a line for each change."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal := _Terminal())
        assert zero("verify", "mine:slow") == 0
    shown = terminal.getvalue()
    assert "\rzero: verify(): building models\x1b[K" in shown
    assert shown.endswith("\r\x1b[K")  # erased
    assert "are equal in every bit" in capsys.readouterr().out

    assert zero("verify", "mine:slow") == 0
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("mine")
def test_an_error_of_the_function_is_its_own(zero) -> None:
    """With its traceback, which says where."""
    with pytest.raises(AttributeError, match="of the user's"):
        zero("verify", "mine:fails")
