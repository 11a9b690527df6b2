"""The `zero` command in this process; the `ranks` fixture comes with zero-comm."""

import runpy
import sys
from collections.abc import Callable, Mapping
from typing import Any

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


@pytest.fixture(scope="session")
def nested() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`nested({".stage": 3, "fp16.enabled": True})` is DeepSpeed's file of these paths.

    What begins with a dot is of zero_optimization.
    """

    def nest(values: Mapping[str, Any]) -> dict[str, Any]:
        file: dict[str, Any] = {}
        for path, value in values.items():
            *sections, name = (f"zero_optimization{path}" if path[:1] == "." else path).split(".")
            place = file
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return file

    return nest
