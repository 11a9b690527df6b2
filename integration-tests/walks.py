"""Walks over an API: drawn calls, each made in plain torch and on every rank, and compared.

ZERO_WALK is a seed, which a failure prints; ZERO_WALK_CALLS is the number of calls.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest
from torch import Tensor
from zero_comm.testing import assert_close

Calls = Mapping[str, Callable[[Any], Any]]
SEED: Final = int(os.environ.get("ZERO_WALK", "0"))


def calls_of(namespace: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """The functions of a file that take a `_Run`, by their names without the underscore."""
    return {
        name[1:]: call
        for name, call in namespace.items()
        if name[:1] == "_" and getattr(call, "__annotations__", {}).get("run") == "_Run"
    }


def walk(calls: Calls, plain: Any, run: Any, num_calls: int) -> Iterator[tuple[int, str, str]]:
    """Make drawn calls on both, and compare what they return.

    Yields the number of each call, its name, and where it is in the walk, for what else is compared
    there.
    """
    draw = random.Random(SEED)
    num_calls = int(os.environ.get("ZERO_WALK_CALLS", num_calls))
    names = [draw.choice([*calls]) for _ in range(num_calls)]
    for number, name in enumerate(names):
        before = names[max(0, number - 6) : number]
        what = f"ZERO_WALK={SEED}: call {number}, {name}, after {before}"
        for each in (plain, run):
            each.number = number
        expected = calls[name](plain)
        try:
            found = calls[name](run)
        except Exception as error:
            raise AssertionError(what) from error
        assert_same(found, expected, what)
        yield number, name, what


@contextmanager
def saves_at_any_time() -> Iterator[None]:
    """A context without the warning that gradients are not saved."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "saved between a backward and its step")
        yield


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Compare what two calls return: tensors, numbers, and dicts of these, which rank 0 has."""
    if found is None and isinstance(expected, dict):
        return
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name, value in expected.items():
            assert_same(found[name], value, f"{what}: {name}")
    elif isinstance(expected, Tensor):
        assert found is not None, what
        assert_close(
            found.detach().cpu(),
            expected.detach().cpu(),
            rtol=1e-7,
            atol=1e-7,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )
    elif isinstance(expected, float | list):
        assert found == pytest.approx(expected, nan_ok=True), what
    else:
        assert found == expected, what
