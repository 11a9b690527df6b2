"""DeepSpeed's keys: each documented one is honoured, warned of or refused, and none in silence."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen
from zero_engine import ConfigError, ZeroConfig
from zero_engine.engine import EngineConfig

# Keys as DeepSpeed 0.19's documentation and source have them, with their defaults, at stage 3;
# written down from there, so that it is not our table that says what is documented.
DOCUMENTED: Final = json.loads(Path(__file__).with_name("documented.json").read_text())
Z: Final = "zero_optimization"

# One of these asks for another thing than the default, whatever kind of value a key has.
CANDIDATES: Final = (
    *(True, False, 2, 4, 0.5, "cpu", "sum", "fail", "fp16", "fp32", "gram", "linear", "original"),
    *("random", "torch.nn.LayerNorm"),
    *("LRRangeTest", "sgd", [0.5, 0.75], [1, 2, 3], ["name"], "name", {"name": 1}, {"reset_T": 2}),
    {"enabled": True, "deepcompile": True},  # what turns on a section that is not looked into
)
BASE: Final[dict[str, Any]] = {
    "train_batch_size": 8,
    Z: {
        "stage": 3,
        "offload_optimizer": {"nvme_path": "/local"},  # read only where the device is nvme
        "offload_param": {"nvme_path": "/local"},
    },
    "optimizer": {"type": "adam"},
    "scheduler": {"type": "WarmupLR"},
}
# Other names of the same: DeepSpeed's files of several years use both.
ALIASES: Final = {
    **{
        f"bfloat16.{name}": f"bf16.{name}"
        for name in ("enabled", "immediate_grad_update", "check_grad_overflow")
    },
    **{
        f"{Z}.{name}": f"{Z}.stage3_{name}"
        for name in (
            *("max_live_parameters", "prefetch_bucket_size", "max_reuse_distance"),
            *("param_persistence_threshold", "model_persistence_threshold"),
            *("gather_16bit_weights_on_model_save", "module_granularity_threshold"),
            *("use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    },
    f"{Z}.stage3_gather_fp16_weights_on_model_save": (
        f"{Z}.stage3_gather_16bit_weights_on_model_save"
    ),
}
# What asks for what is done anyway.
AS_IT_IS: Final = {
    ("data_types.grad_accum_dtype", "fp32"),
    ("data_types.grad_accum_dtype", "all"),  # another contradicts the masters
    ("bf16.bf16_optimizer_states", "all"),  # only together with the masters
    (f"{Z}.cpu_offload_use_pin_memory", True),
    ("aio.intra_op_parallelism", 2),
    ("aio.thread_count", 2),
}


def _with(raw: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {**raw, head: _with(raw.get(head) or {}, rest, value) if rest else value}


@frozen
class _Read:
    """What became of a file."""

    config: EngineConfig | None
    warned: str = ""
    error: str = ""

    def meaning(self, path: str) -> str:
        assert self.config is not None
        return next(row.meaning for row in self.config.sources if row.key == path)


def _read(raw: Mapping[str, Any]) -> _Read:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = EngineConfig.from_deepspeed(raw)
        except ConfigError as error:
            return _Read(None, error=str(error))
    return _Read(config, warned="\n".join(str(each.message) for each in caught))


def _leaves(raw: Mapping[str, Any], keys: set[str], prefix: str = "") -> Iterator[str]:
    for name, value in raw.items():
        path = prefix + name
        if path in keys or not isinstance(value, dict):
            yield path
        else:
            yield from _leaves(value, keys, f"{path}.")


@functools.cache
def _keys() -> tuple[str, ...]:
    """All that is documented."""
    found = _read(DOCUMENTED).config
    assert found is not None
    return tuple(_leaves(DOCUMENTED, {row.key for row in found.sources}))


@functools.cache
def _base() -> EngineConfig | None:
    return _read(BASE).config


def _opened(path: str) -> dict[str, Any]:
    """A file in which the key means something, or in which what turns it on is refused."""
    closed = next(
        (
            match[1]
            for value in (None, *CANDIDATES)
            if (found := _read(_with(BASE, path, value))).config is not None
            and (match := re.match(r"not read: (.*) (is|are) ", found.meaning(path)))
        ),
        None,
    )
    if closed is None:
        return BASE
    gate = closed.split(" and ")[0]
    for value in ("nvme", *CANDIDATES):
        read = _read(raw := _with(BASE, gate, value))
        if "not supported here" in read.error:
            return raw
        if read.config is not None and read.config != _base():
            return raw
    raise AssertionError(f"nothing opens {gate}")


def _default(path: str) -> Any:
    return functools.reduce(lambda section, name: section[name], path.split("."), DOCUMENTED)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[Any, _Read, _Read]]]:
    """By key: values, what became of the file without them, and with them."""
    return {
        path: [(value, before, _read(_with(raw, path, value))) for value in CANDIDATES]
        for path in _keys()
        for raw in [_opened(path)]
        for before in [_read(raw)]
    }


def test_a_file_with_every_documented_key_parses_with_one_warning() -> None:
    """People paste the whole template and change three lines."""
    with pytest.warns(UserWarning, match="change nothing here") as caught:
        config = EngineConfig.from_deepspeed(DOCUMENTED)

    assert len(caught) == 1
    assert {row.key for row in config.sources} == set(_keys())
    sizes = (config.train_batch_size, config.micro_batch_size, config.accumulation_steps)
    assert (config.zero.stage, *sizes) == (3, 8, 4, 2)
    for stage in (0, 1, 2):  # its defaults may be spelled out below stage 3
        below = _read(_with(DOCUMENTED, f"{Z}.stage", stage)).config
        assert below is not None and below.zero == ZeroConfig(stage=stage)


def test_no_key_is_passed_over_in_silence(outcomes) -> None:
    """A key that is read and then dropped is the worst of all: it looks honoured.

    Some value of each changes the configuration, is warned of, or is refused by its name or by that
    of what turns it on. Every error names the key, or what it contradicts.
    """
    passed_over = set()
    for path, reads in outcomes.items():
        ways = set()
        for value, before, after in reads:
            if after.config is None:
                named = path in after.error or "train_batch_size" in after.error
                assert named or before.config is None, (path, value, after.error)
                if "not supported here" in after.error:
                    refused = after.error.split(":")[0]
                    assert refused == path or before.config is None, (path, after.error)
                    ways.add("refused")
            elif path in after.warned:
                assert after.config == before.config, path
                ways.add("warned of")
            elif after.config != before.config:
                ways.add("honoured")
            elif value != _default(path) and value is not False and after.meaning(path) != "off":
                passed_over.add((path, value))
        if not ways:
            passed_over.add((path, "all"))
    assert passed_over == AS_IT_IS


def test_what_is_not_built_may_be_off(outcomes) -> None:
    """Templates spell out what they do not use."""
    base = _read(BASE).config
    refused = {
        path
        for path, reads in outcomes.items()
        if any("not supported" in r[2].error for r in reads)
    }
    assert len(refused) > 30
    for path in refused:
        assert _read(_with(BASE, path, _default(path))).config == base, path


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_keys_of_a_higher_stage_are_named_below_it(outcomes, stage: int) -> None:
    """Who sets them may believe that parameters, or optimizer states, are sharded."""
    base = _with(BASE, f"{Z}.stage", stage)
    before, num_named = _read(base).config, 0
    for path, reads in outcomes.items():
        if not path.startswith(f"{Z}.") or path == f"{Z}.stage":
            continue
        honoured = [v for v, b, a in reads if a.config is not None and a.config != b.config]
        if not honoured or any(b.config is not None and b.config != _base() for _, b, _ in reads):
            continue  # of no consequence at stage 3, or only where another key is set, too
        found = _read(_with(base, path, honoured[0]))
        if found.config == before:
            assert f"{path} (from stage " in found.warned, path
            num_named += 1
    assert num_named >= 5


def test_an_alias_means_the_same(outcomes) -> None:
    """Else one of them is read, and the other is passed over."""
    for alias, path in ALIASES.items():
        bf16 = _with(BASE, "bf16.enabled", True), _with(BASE, "bfloat16.enabled", True)
        base, other = bf16 if alias.startswith("bfloat16.") else (BASE, BASE)
        configs = []
        for value in CANDIDATES:
            theirs, ours = _read(_with(base, path, value)), _read(_with(other, alias, value))
            assert (ours.config, bool(ours.warned)) == (theirs.config, bool(theirs.warned)), alias
            configs.append(ours)
        assert any(each.config is not None for each in configs), alias
        assert any(each.config != _read(other).config or each.warned for each in configs), alias
