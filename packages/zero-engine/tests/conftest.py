"""The `zero` command in this process; the `ranks` fixture comes with zero-comm."""

import runpy
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`zero("plan", ...)` runs `python -m zero_engine plan ...` and returns its exit status."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["zero", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("zero_engine", run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run
