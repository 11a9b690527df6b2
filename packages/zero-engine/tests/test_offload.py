"""Offload: what may be said of where things rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
import zero_engine
from zero_engine import ConfigError, Offload, Precision, Wire, ZeroConfig
from zero_engine.engine import EngineConfig
from zero_engine.planning import Room
from zero_offload import DiskSettings
from zero_partition import PartitionError
from zero_partition.plan import PartitionConfig

FOLDER: Final = Path("/local_nvme")


@pytest.mark.parametrize(
    ("fields", "name", "part"),
    [
        ({"optimizer": "cpu"}, "optimizer", "'host'"),
        ({"params": None}, "params", "'disk'"),
        ({"optimizer": "host", "fraction": 1.5}, "fraction", "from 0 to 1"),
        ({"optimizer": "host", "fraction": float("nan")}, "fraction", "from 0 to 1"),
        ({"optimizer": "disk", "path": ""}, "path", "a folder"),
        ({"optimizer": "host", "pin": 1}, "pin", "bool"),
        ({"optimizer": "host", "subgroup_bytes": 0}, "subgroup_bytes", "at least 1"),
        ({"params": "disk", "path": FOLDER, "read_ahead": -1}, "read_ahead", "at least 0"),
        ({"optimizer": "disk", "path": FOLDER, "disk": {}}, "disk", "DiskSettings or None"),
        ({"optimizer": "host", "delayed_update": "yes"}, "delayed_update", "bool"),
        # Together.
        ({"optimizer": "disk"}, "path", "optimizer='disk'"),
        ({"params": "disk"}, "path", "params='disk'"),
        ({"optimizer": "host", "params": "host", "path": FOLDER}, "path", "leave it out"),
        ({"optimizer": "host", "disk": DiskSettings()}, "disk", "optimizer='disk' or"),
        ({"params": "host", "max_host_numel": 1}, "max_host_numel", "without params='disk'"),
        ({"params": "host", "fraction": 0.5}, "fraction", "without optimizer='host'"),
        ({"params": "host", "delayed_update": True}, "delayed_update", "set optimizer='host'"),
        (
            {"optimizer": "host", "fraction": 0, "delayed_update": True},
            "delayed_update",
            "fraction above 0",
        ),
    ],
)
def test_a_wrong_value_says_what_was_expected(fields: Any, name: str, part: str) -> None:
    """It is read here, before a model of hours is loaded; and nothing asked for is passed over."""
    with pytest.raises(ConfigError, match=rf"^Offload\.{name}: expected") as caught:
        Offload(**fields)

    assert part in str(caught.value)


def test_deepspeeds_word_for_a_residence_points_to_ours() -> None:
    """Who comes from there writes it, and "cpu" is where a device may be as well."""
    for theirs, ours in (("cpu", "host"), ("nvme", "disk"), ("none", "device")):
        for field in ("optimizer", "params"):
            said = rf"Offload\.{field}: .*got '{theirs}'.*'{ours}' here"
            with pytest.raises(ConfigError, match=said):
                Offload(**{field: theirs})
        with pytest.raises(ConfigError, match=rf"to='disk', got '{theirs}'.*'{ours}' here"):
            zero_engine.offload_states(torch.nn.Linear(1, 1), to=theirs)


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda: ZeroConfig(3, stgae=1), r"ZeroConfig\.stgae: unknown; did you mean 'stage'\?"),
        (lambda: ZeroConfig(ofload=None), r"ZeroConfig\.ofload: .* mean 'offload'\?"),
        (lambda: ZeroConfig(xyz=1), r"ZeroConfig\.xyz: unknown\. Known here: cut, groups, max_li"),
        (lambda: attrs.evolve(ZeroConfig(), windw=1), r"ZeroConfig\.windw: .* mean 'window'\?"),
        (lambda: Offload(optimiser="host"), r"Offload\.optimiser: .* mean 'optimizer'\?"),
        (lambda: EngineConfig(zero_=ZeroConfig()), r"EngineConfig\.zero_: .* mean 'zero'\?"),
        (lambda: Room(devices=1), r"Room\.devices: .* mean 'device'\?"),
        (lambda: Precision(parms=None), r"Precision\.parms: .* mean 'params'\?"),
        (lambda: Wire(gradient="int8"), r"Wire\.gradient: .* mean 'gradients'\?"),
        (lambda: PartitionConfig(unit=()), r"PartitionConfig\.unit: .* mean 'units'\?"),
    ],
)
def test_an_unknown_field_names_the_nearest(make: Callable[[], Any], near: str) -> None:
    """As in a file: a typing error is an error of the configuration, and is found by its name."""
    with pytest.raises((ConfigError, PartitionError), match=near):
        make()
    with pytest.raises(TypeError, match="positional"):
        ZeroConfig(1, 2)  # type: ignore[call-arg]
    assert next(iter(inspect.signature(ZeroConfig).parameters)) == "stage"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_only_what_is_sharded_may_rest_elsewhere(stage: int) -> None:
    """Stage 0 shards nothing, 1 and 2 all but parameters."""
    for name, lowest in (("optimizer", 1), ("params", 3)):
        offload = Offload(**{name: "host"})
        if stage >= lowest:
            assert ZeroConfig(stage=stage, offload=offload).offload is offload
        else:
            with pytest.raises(ConfigError, match=rf"^ZeroConfig\.offload: .*{name}='device' at"):
                ZeroConfig(stage=stage, offload=offload)
    assert ZeroConfig(stage=stage, offload=Offload()).offload == Offload()
    with pytest.raises(ConfigError, match=r"^ZeroConfig\.offload: expected Offload or None"):
        ZeroConfig(offload={"device": "cpu"})  # type: ignore[arg-type]
