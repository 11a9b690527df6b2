"""The table of DeepSpeed's keys: it is whole, and every row does what it says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from zero_engine import ConfigError, EngineConfig, Offload, ZeroConfig
from zero_engine._file_key import Becomes, CannotMatter, FileKey, NotBuilt
from zero_engine._key_table import KEYS, SECTIONS, WRITTEN
from zero_offload import DiskSettings
from zero_partition import Wire

# Keys as DeepSpeed 0.19's documentation and source have them, with their defaults, at stage 3;
# written down from there, so that it is not our table that says what is documented.
DOCUMENTED: Final = json.loads(Path(__file__).with_name("documented.json").read_text())

# One of these asks for another thing than the default, whatever kind of value a key has.
CANDIDATES: Final = (
    *(True, False, 2, 4, 0.5, "cpu", "sum", "fail", "fp16", "fp32", "gram", "linear", "original"),
    *("LRRangeTest", "sgd", [0.5, 0.75], [1, 2, 3], ["name"], "name", {"name": 1}, {"reset_T": 2}),
)
OWNERS: Final = {
    "": EngineConfig,
    "zero": ZeroConfig,
    "zero.offload": Offload,
    "zero.offload.disk": DiskSettings,
    "zero.wire": Wire,
}
BASE: Final[dict[str, Any]] = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"nvme_path": "/local"},  # read only where the device is nvme
        "offload_param": {"nvme_path": "/local"},
    },
    "optimizer": {"type": "adam"},
    "scheduler": {"type": "WarmupLR"},
}


def _with(raw: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {**raw, head: _with(raw.get(head) or {}, rest, value) if rest else value}


def _paths(raw: Mapping[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in raw.items():
        path = prefix + name
        found |= {path} if path in WRITTEN else _paths(value, f"{path}.")
    return found


def _askings(key: FileKey) -> list[Any]:
    """Values that fit the key and ask for something."""
    found = []
    for value in CANDIDATES:
        try:
            if not key.is_neutral(key.kind.read(value)):
                found.append(value)
        except ValueError:
            pass
    return found


def _reading(key: FileKey) -> dict[str, Any]:
    """A file in which the key means something."""
    if key.gate is None:
        return BASE
    gate = key.gate.paths[0]
    return _with(BASE, gate, (*key.gate.values, *_askings(KEYS[gate]))[0])


def _read(raw: Mapping[str, Any]) -> EngineConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineConfig.from_deepspeed(raw)


def _keys(answer: type) -> list[FileKey]:
    return [key for key in KEYS.values() if isinstance(key.answer, answer)]


def test_the_table_has_what_is_documented_and_nothing_else() -> None:
    """A key that is missing would be called unknown to someone who has it from the manual."""
    assert _paths(DOCUMENTED) == KEYS.keys()


def test_a_file_with_every_documented_key_parses_with_one_warning() -> None:
    """People paste the whole template and change three lines."""
    with pytest.warns(UserWarning, match="change nothing here") as caught:
        config = EngineConfig.from_deepspeed(DOCUMENTED)

    assert len(caught) == 1
    assert config.zero.stage == 3
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation_steps) == (
        8,
        4,
        2,
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_defaults_of_stage_3_may_be_spelled_out_below_it(stage: int) -> None:
    """The same template serves all stages."""
    template = _with(DOCUMENTED, "zero_optimization.stage", stage)

    assert _read(template).zero == ZeroConfig(stage=stage)


def test_no_two_keys_share_a_path() -> None:
    """Else one hides the other."""
    assert len(WRITTEN) == sum(len(key.paths) for key in KEYS.values())
    assert not SECTIONS & WRITTEN.keys()


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.path)
def test_every_row_is_well_formed(key: FileKey) -> None:
    """A gate or a field that does not exist turns a key off in silence."""
    for value in (key.default, *key.neutral):
        read = value if value is None else key.kind.read(value)
        assert key.is_neutral(read)
    assert key.gate is None or KEYS.keys() >= set(key.gate.paths)
    if isinstance(key.answer, Becomes):
        owner, _, name = key.answer.field.rpartition(".")
        assert name in {field.name for field in attrs.fields(OWNERS[owner])}


@pytest.mark.parametrize(
    "key",
    [
        key
        for key in _keys(Becomes)
        if not key.path.startswith("bf16.bf16_")  # only together
        and key.path != "data_types.grad_accum_dtype"  # agrees with the masters, or is an error
    ],
    ids=lambda key: key.path,
)
def test_every_honoured_key_changes_the_configuration(key: FileKey) -> None:
    """A key that is read and then dropped is the worst of all: it looks honoured."""
    base = _reading(key)
    before, changed = _read(base), []

    for value in _askings(key):
        try:
            changed.append(_read(_with(base, key.path, value)))
        except ConfigError as error:  # it contradicts the base: another value will not
            assert key.path in str(error) or "train_batch_size" in str(error)

    assert changed
    assert all(after != before for after in changed)


@pytest.mark.parametrize("key", _keys(NotBuilt), ids=lambda key: key.path)
def test_what_is_not_built_is_refused_by_name(key: FileKey) -> None:
    """Training that silently lacks what the file asks for is found out after a week."""
    base, gates = _reading(key), key.gate.paths if key.gate else ()
    refused = next((gate for gate in gates if isinstance(KEYS[gate].answer, NotBuilt)), key.path)

    for value in _askings(key):
        with pytest.raises(ConfigError, match="not built yet") as caught:
            _read(_with(base, key.path, value))
        assert str(caught.value).startswith(f"{refused}: ")


@pytest.mark.parametrize("key", _keys(NotBuilt), ids=lambda key: key.path)
def test_what_is_not_built_may_be_off(key: FileKey) -> None:
    """Templates spell out what they do not use."""
    for value in (key.default, *key.neutral):
        given = list(value) if isinstance(value, tuple) else value
        assert _read(_with(BASE, key.path, given)) == _read(BASE)


@pytest.mark.parametrize("key", _keys(CannotMatter), ids=lambda key: key.path)
def test_what_cannot_matter_is_warned_of_and_changes_nothing(key: FileKey) -> None:
    """Nobody should tune a knob that is not connected."""
    base = _reading(key)
    value = _askings(key)[0]

    with pytest.warns(UserWarning, match=key.path):
        config = EngineConfig.from_deepspeed(_with(base, key.path, value))

    assert config == _read(base)


@pytest.mark.parametrize(
    ("key", "stage"),
    [(key, stage) for key in KEYS.values() for stage in range(key.min_stage)],
    ids=lambda item: item.path if isinstance(item, FileKey) else str(item),
)
def test_keys_of_a_stage_are_errors_below_it(key: FileKey, stage: int) -> None:
    """Who sets them believes that parameters, or optimizer states, are sharded."""
    base = _with(BASE, "zero_optimization.stage", stage)

    with pytest.raises(ConfigError, match=f"at stage {stage}") as caught:
        _read(_with(base, key.path, _askings(key)[0]))

    assert str(caught.value).startswith(f"{key.path}: ")


@pytest.mark.parametrize(
    ("alias", "key"),
    [(alias, key) for key in KEYS.values() for alias in key.aliases],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_an_alias_means_the_same(alias: str, key: FileKey) -> None:
    """DeepSpeed's files of several years use both."""
    base, other = BASE, BASE
    if key.gate is not None:
        base, other = _with(BASE, "bf16.enabled", True), _with(BASE, "bfloat16.enabled", True)
    value = (_askings(key) or [True])[0]
    if alias.startswith("bfloat16.bf16_"):
        value = False

    assert _read(_with(other, alias, value)) == _read(_with(base, key.path, value))
