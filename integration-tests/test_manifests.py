"""Manifests that are sealed and say anything at all: a FileError names file and field."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from zero_comm import Group
from zero_engine import ConfigError, FileError, ZeroConfig
from zero_engine.checkpoint.folder import Checkpoint
from zero_engine.checkpoint.limits import MOST_NESTED
from zero_engine.testing import MANIFEST, unsealed, write_manifest
from zero_partition import LoadError

NUM_DRAWN: Final = int(os.environ.get("ZERO_MANIFESTS", "150"))
MOST_BYTES: Final = 64 * 2**20
LIMIT_S: Final = 5
TAG: Final = "step-2"


class Keeping(torch.optim.SGD):
    """State of each kind: tensors, numbers, dicts, and a list, which has no whole."""

    def step(self, closure: Any = None) -> None:  # noqa: D102
        super().step(closure)
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            state["count"] = state.get("count", 0) + 1
            state["nested"] = {"sum": torch.ones_like(param), 3: "word"}
            state["list"] = [torch.zeros(2), {"x": (1, 2.5)}]


@cache
def _saved() -> tuple[Path, nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A checkpoint with something in every section, and what its manifest says."""
    model = parity.build(parity.tiny_float32)
    optimizer = Keeping(model.parameters(), 0.1, 0.9)
    zero_engine.shard(model, optimizer, parity.ZeroConfig(1))
    average = zero_engine.ShardedAverage(model, decay=0.9)
    parity.run_steps(model, optimizer, range(2), rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    folder, extra = Path(mkdtemp()), {"t": torch.ones(3), "at": (1, {2, 3}), "by": {1: None}}
    more = {"extra": extra, "average": average, "scheduler": scheduler}
    zero_engine.save(folder, model, optimizer, step=1, **more)
    zero_engine.save(folder, model, optimizer, step=2, **more)
    said = unsealed(folder / TAG / MANIFEST)
    # As of a DTensor that is split by rows, whose parts are what comes in order anyway.
    weight = next(each for each in said["params"].values() if len(each["shape"]) == 2)
    sizes = [1, weight["shape"][0] - 1]
    weight["parts"] = {"dim": 0, "sizes": sizes, "pieces": weight.pop("pieces")}
    return folder, model, optimizer, said


def _places(said: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in it, by the keys that lead there."""
    if not isinstance(said, dict | list):
        return
    for key, value in said.items() if isinstance(said, dict) else enumerate(said):
        yield (*path, key)
        yield from _places(value, (*path, key))


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = st.sampled_from(
    [-1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e308, True, False]
)
WORDS = st.sampled_from(
    ["", ".", "..", "../x", "/dev/zero", "a\0b", "manifest.json", "float32", "load", "$", "\ud800"]
)
KINDS = st.sampled_from(["tuple", "set", "dict", "tensor", "dtype", "object", 3, None, [], {}])
TENSORS = st.fixed_dictionaries(
    {
        "$": st.just("tensor"),
        "dtype": st.sampled_from(["float32", "uint8", "quint8", "bits8", "x", 1]),
        "shape": st.lists(NUMBERS, max_size=4),
        "data": st.sampled_from(["", "AAAA", "AAAAAAAAAAA=", "!", None]),
    }
)
JUNK = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS, TENSORS, st.sampled_from([50, 90, 150, 400]).map(_deep)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(WORDS, inner, max_size=3),
        st.fixed_dictionaries({"$": KINDS, "items": inner}),
        st.fixed_dictionaries(
            {"dtype": WORDS, "shape": st.lists(NUMBERS, max_size=3), "pieces": inner}
        ),
    ),
    max_leaves=6,
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "drop", "add"]), JUNK),
    min_size=1,
    max_size=3,
)


def _changed(said: dict[str, Any], changes: list[tuple[int, str, Any]]) -> dict[str, Any]:
    said = json.loads(json.dumps(said))
    for number, how, junk in changes:
        # Each section as often as others, however much it holds.
        section = list(said)[number % len(said)]
        places = [(section,), *_places(said[section], (section,))]
        *path, last = places[number // len(said) % len(places)]
        inside: Any = said
        for key in path:
            inside = inside[key]
        if how == "drop":
            del inside[last]
        elif how == "add" and isinstance(inside, dict):
            inside[f"{last}{number}"] = junk
        else:
            inside[last] = junk
        if not said:
            break
    return said


@contextmanager
def _limited() -> Iterator[None]:
    """No more memory than that, and no more time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not over within {LIMIT_S} s")

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    before, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGALRM, stop)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=NUM_DRAWN,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(CHANGES)
def test_any_manifest_is_loaded_or_refused_by_name(changes: list[tuple[int, str, Any]]) -> None:
    """TypeError, KeyError, OverflowError, RecursionError, and 4 TB for a tensor without data."""
    folder, model, optimizer, said = _saved()
    write_manifest(folder / TAG, _changed(said, changes))

    with _limited():
        try:
            Checkpoint.open(folder, TAG)
            zero_engine.load(folder, model, optimizer, tag=TAG)
        except FileError as error:
            assert MANIFEST in str(error) or str(folder) in str(error), error
        except LoadError:
            pass  # it names what does not fit the model


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"key": x}],
    ids=["list", "tuple", "dict"],
)
def test_values_in_values_are_saved_to_a_depth_and_no_further(
    tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    """Without a limit Python's own would be reached, by a reader if not by the writer."""
    _, model, optimizer, _ = _saved()
    extra: Any = 1
    for _ in range(MOST_NESTED):
        extra = wrap(extra)
    path = zero_engine.save(tmp_path, model, optimizer, step=1, extra=extra).path
    assert zero_engine.load(tmp_path, model, optimizer).extra == extra
    with pytest.raises(ConfigError, match=f"at most {MOST_NESTED} values in values"):
        zero_engine.save(tmp_path, model, optimizer, step=2, extra=wrap(extra))
    assert path.exists()


@pytest.mark.parametrize("serial", ["x", -1, 1.5, [], 2**70, {"$": "tensor"}])
def test_a_manifest_that_says_nonsense_stops_no_save(serial: Any) -> None:
    """One with a bad serial stopped every later one."""
    folder, model, optimizer, said = _saved()
    write_manifest(folder / TAG, {**said, "serial": serial})

    path = zero_engine.save(folder, model, optimizer, step=3).path

    assert zero_engine.load(folder, model, optimizer).path == path
    with pytest.raises(FileError, match=rf"{MANIFEST}: serial: expected a number.*load another"):
        zero_engine.load(folder, model, optimizer, tag=TAG)


def test_a_manifest_says_at_which_stage_it_was_saved(group: Group, tmp_path: Path) -> None:
    for stage in range(4):
        model, _ = zero_engine.shard(nn.Linear(4, 4), None, ZeroConfig(stage), group=group)
        path = zero_engine.save(tmp_path, model, step=stage).path
        assert unsealed(path / MANIFEST)["stage"] == stage
