"""plan(): whatever describes a model is planned, and what cannot be says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zero_engine
import zero_engine.planning
from torch import nn
from zero_engine import ConfigError, FileError, Offload, Precision, ZeroConfig
from zero_engine.planning import GPTSize, Room
from zero_partition import PartitionError

GB = 10**9
BF16 = Precision(params=torch.bfloat16)
ON_HOST = ZeroConfig(2, offload=Offload(optimizer="host"))


def _mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def test_nothing_is_allocated() -> None:
    """A model of a trillion parameters is planned on a laptop."""
    plan = zero_engine.plan(GPTSize(128, 25600), world_size=512, stage=3)

    assert plan.numel == 12 * 128 * 25600**2


def test_a_size_has_as_many_parameters_as_it_says() -> None:
    """12 x layers x hidden^2, and embeddings for the rest: all tables of papers begin there."""
    plain, more = GPTSize(3, 8), GPTSize(3, 8, 5000)

    numels = [sum(p.numel() for p in size.build().parameters()) for size in (plain, more)]

    assert numels == [12 * 3 * 64, 5000]


def test_too_few_parameters_are_refused() -> None:
    """Blocks that do not fit into the whole would be planned as if they did."""
    with pytest.raises(ConfigError, match=r"expected at least the 2,304 parameters .* got 2,000"):
        GPTSize(3, 8, 2000)


@pytest.mark.slow
def test_a_configuration_of_transformers_is_planned(tmp_path: Path) -> None:
    """That is what a user has of a model that is not downloaded yet."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in transformers.GPT2LMHeadModel(config).parameters())

    for source in (config, config.to_dict(), tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert zero_engine.plan(source, world_size=2, stage=2).numel == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ('{"hidden": 3}', "with model_type"),
        ("[]", "with model_type"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(
    tmp_path: Path, content: str | None, message: str
) -> None:
    """Else the error is of a library that the user does not know to be involved."""
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(FileError, match=message):
        zero_engine.plan(path, world_size=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gptx"}, "gptx"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "wide"),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, "divisible|multiple"),
    ],
)
def test_a_configuration_that_builds_nothing_says_so(config: dict, message: str) -> None:
    """In a line: what transformers says is its own, and may list all models that there are."""
    pytest.importorskip("transformers")

    with pytest.raises(ConfigError, match=message) as caught:
        zero_engine.plan(config, world_size=2)

    assert "transformers" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ConfigError, "world_size to be at least 1, got 0"),
        ({"world_size": 4, "rank": 4}, ConfigError, "a rank below 4, got 4"),
        ({"world_size": 4, "ranks_per_node": 3}, ConfigError, "to divide world_size=4, got 3"),
        ({"stage": 2, "config": ZeroConfig(3)}, ConfigError, "got both"),
        ({"optimizer": 3}, ConfigError, "expected optimizer to be a name"),
        ({"optimizer": "adamwho"}, ConfigError, "adamwho"),
        # What shard() refuses.
        ({"config": ZeroConfig(0, precision=BF16)}, PartitionError, "use stage 1"),
        (
            {"config": ZeroConfig(2, units=["nowhere"])},
            PartitionError,
            "has no module of this name",
        ),
        ({"config": ON_HOST, "optimizer": None}, PartitionError, "there is no optimizer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict, error: type[Exception], message: str
) -> None:
    """A plan of something else than was meant is worse than none; and better here than later."""
    with pytest.raises(error, match=message):
        zero_engine.plan(_mlp(), **{"world_size": 2, **arguments})


def test_traffic_across_nodes_is_that_to_their_ranks() -> None:
    """It is what a slow network carries: 6 of 7 peers of a rank on 4 nodes of 2 are elsewhere."""
    plan = zero_engine.plan(_mlp(), world_size=8, stage=2, ranks_per_node=2)
    alone = zero_engine.plan(_mlp(), world_size=8, stage=2)

    assert plan.sent_bytes == alone.sent_bytes
    assert plan.across_bytes * 7 == plan.sent_bytes * 6
    assert alone.across_bytes == 0


def test_all_of_it_is_plain_values() -> None:
    """Other programs read it."""
    config = ZeroConfig(3, precision=BF16, offload=Offload(optimizer="host"))
    plan = zero_engine.plan(_mlp(), config, world_size=2)

    found = json.loads(json.dumps(plan.to_dict()))

    assert found["memory"]["at_rest"]["total_bytes"] == plan.at_rest.total_bytes
    assert found["config"]["stage"] == 3
    assert found["sent_bytes"] == plan.sent_bytes


# ---- What fits ----


def test_the_cheapest_that_fits_is_recommended() -> None:
    """Each option needs less of the device and moves more: the first that fits is the fastest."""
    size = GPTSize(24, 2048)
    for room_bytes, expected in ((12 * GB, "stage 1"), (6 * GB, "stage 2"), (3 * GB, "stage 3")):
        room = Room(device=room_bytes)
        options = zero_engine.planning.plan_options(size, world_size=64, room=room)

        chosen = zero_engine.planning.recommend(options)

        assert chosen is not None
        assert chosen.name == expected
        assert chosen.device_bytes <= room_bytes
        cheaper = options[: options.index(chosen)]
        assert all(option.device_bytes > room_bytes for option in cheaper)


def test_a_bound_on_the_host_leads_to_the_disk() -> None:
    """Of a machine all ranks share the host: what one of them needs, it needs as often."""
    size = GPTSize(24, 2048)
    least = min(
        o.device_bytes
        for o in zero_engine.planning.plan_options(size, world_size=8)
        if not o.host_bytes
    )
    room = Room(device=least - 1, host=12 * GB)

    chosen = zero_engine.planning.recommend(
        zero_engine.planning.plan_options(size, world_size=8, room=room)
    )

    assert chosen is not None
    assert "disk" in chosen.name
    assert chosen.host_bytes <= 12 * GB


def test_what_fits_leaves_the_reserve_free() -> None:
    """What a plan does not know has to fit as well; so of every size that the table names."""
    needed = zero_engine.planning.plan_options(_mlp(), world_size=8)[1].device_bytes
    for reserve, fits in ((0.0, needed), (0.2, needed * 5 // 4 + 1), (0.5, 2 * needed)):
        for device, expected in ((fits, "stage 1"), (fits - 3, "stage 2")):
            room = Room(device=device, reserve=reserve)
            chosen = zero_engine.planning.recommend(
                zero_engine.planning.plan_options(_mlp(), world_size=8, room=room)
            )
            assert chosen is not None
            assert chosen.name == expected
    large = zero_engine.planning.plan_options(GPTSize(24, 2048), world_size=64)
    said = zero_engine.planning.options_table(large, Room(reserve=0.5))
    assert "stage 1 fits in 24 GB" in said  # of 9.96 GB
    assert "50% of each device is left free" in said
    for wrong in (1, -0.1, "20%", True):
        with pytest.raises(
            ConfigError, match=r"Room\.reserve: expected int or float of at least 0"
        ):
            Room(reserve=wrong)  # type: ignore[arg-type]


def test_nothing_is_recommended_where_nothing_fits() -> None:
    """And the sentence says what comes nearest."""
    room = Room(device=1000)
    options = zero_engine.planning.plan_options(_mlp(), world_size=2, room=room)

    assert zero_engine.planning.recommend(options) is None
    assert "Nothing fits in 1.00 KB of a device." in zero_engine.planning.options_table(
        options, room
    )


def test_activations_take_of_the_device() -> None:
    """They are the one large thing that a plan does not know."""
    (plain, *_), (with_them, *_) = (
        zero_engine.planning.plan_options(_mlp(), world_size=2, room=Room(activations=activations))
        for activations in (0, 5 * GB)
    )

    assert with_them.device_bytes == plain.device_bytes + 5 * GB


@pytest.mark.slow
def test_a_picture_is_a_png(tmp_path: Path) -> None:
    """Bars say at a glance what a column of numbers does not."""
    pytest.importorskip("matplotlib")
    options = zero_engine.planning.plan_options(_mlp(), world_size=2)
    path = tmp_path / "plan.png"

    zero_engine.planning.save_picture([option.plan for option in options], path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no dependency."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    plan = zero_engine.plan(_mlp(), world_size=2)

    with pytest.raises(ConfigError, match=r"zero-engine\[picture\]"):
        zero_engine.planning.save_picture([plan], tmp_path / "plan.png")
