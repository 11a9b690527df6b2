"""plan(): whatever describes a model is planned, and what cannot be says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zero_engine
from torch import nn
from zero_engine import ConfigError, FileError, Offload, Precision, ZeroConfig
from zero_engine.planning import (
    GPTSize,
    Option,
    Room,
    options_table,
    plan_options,
    recommend,
    save_picture,
)
from zero_partition import PartitionError

GB = 10**9
BF16 = Precision(params=torch.bfloat16)
ON_HOST = ZeroConfig(2, offload=Offload(optimizer="host"))


def _mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def test_a_size_has_as_many_parameters_as_it_says() -> None:
    """12 x layers x hidden^2, and embeddings for the rest: all tables of papers begin there.

    Nothing is allocated: a model of a trillion parameters is planned on a laptop.
    """
    for size, numel in ((GPTSize(128, 25600), 12 * 128 * 25600**2), (GPTSize(3, 8, 5000), 5000)):
        assert zero_engine.plan(size, world_size=512, stage=3).numel == numel
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


def test_what_describes_no_model_says_so(tmp_path: Path) -> None:
    """Else the error is of a library that the user does not know to be involved.

    In a line: what transformers says is its own, and may list all models that there are.
    """
    path = tmp_path / "config.json"
    with pytest.raises(FileError, match="cannot be read"):
        zero_engine.plan(path, world_size=2)
    for content, message in (
        ("{", "expected JSON"),
        ('{"hidden": 3}', "with model_type"),
        ("[]", "with model_type"),
    ):
        path.write_text(content)
        with pytest.raises(FileError, match=message):
            zero_engine.plan(path, world_size=2)
    pytest.importorskip("transformers")
    for config, message in (
        ({"model_type": "gptx"}, "gptx"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "wide"),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, "divisible|multiple"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            zero_engine.plan(config, world_size=2)
        said = str(caught.value)
        assert "transformers" in said and "\n" not in said and len(said) < 500


def test_arguments_that_make_no_sense_are_refused() -> None:
    """A plan of something else than was meant is worse than none; and better here than later."""
    for arguments, message in (
        ({"world_size": 0}, "world_size to be at least 1, got 0"),
        ({"world_size": 4, "rank": 4}, "a rank below 4, got 4"),
        ({"world_size": 4, "ranks_per_node": 3}, "to divide world_size=4, got 3"),
        ({"stage": 2, "config": ZeroConfig(3)}, "got both"),
        ({"optimizer": 3}, "expected optimizer to be a name"),
        ({"optimizer": "adamwho"}, "adamwho"),
    ):
        with pytest.raises(ConfigError, match=message):
            zero_engine.plan(_mlp(), **{"world_size": 2, **arguments})
    for arguments, message in (  # what shard() refuses
        ({"config": ZeroConfig(0, precision=BF16)}, "use stage 1"),
        ({"config": ZeroConfig(2, units=["nowhere"])}, "has no module of this name"),
        ({"config": ON_HOST, "optimizer": None}, "there is no optimizer"),
    ):
        with pytest.raises(PartitionError, match=message):
            zero_engine.plan(_mlp(), **{"world_size": 2, **arguments})


def test_traffic_across_nodes_is_that_to_their_ranks() -> None:
    """It is what a slow network carries: 6 of 7 peers of a rank on 4 nodes of 2 are elsewhere."""
    plan = zero_engine.plan(_mlp(), world_size=8, stage=2, ranks_per_node=2)
    alone = zero_engine.plan(_mlp(), world_size=8, stage=2)

    assert plan.sent_bytes == alone.sent_bytes
    assert plan.across_bytes * 7 == plan.sent_bytes * 6
    assert alone.across_bytes == 0


# ---- What fits ----


def _recommended(size: GPTSize | nn.Module, world_size: int, **room: Any) -> Option | None:
    options = plan_options(size, world_size=world_size, room=Room(**room))
    return recommend(options)


def test_the_cheapest_that_fits_is_recommended() -> None:
    """Each option needs less of the device and moves more: the first that fits is the fastest."""
    size = GPTSize(24, 2048)
    for room_bytes, expected in ((12 * GB, "stage 1"), (6 * GB, "stage 2"), (3 * GB, "stage 3")):
        options = plan_options(size, world_size=64, room=Room(device=room_bytes))
        chosen = recommend(options)

        assert chosen is not None and chosen.name == expected
        assert chosen.device_bytes <= room_bytes
        cheaper = options[: options.index(chosen)]
        assert all(option.device_bytes > room_bytes for option in cheaper)


def test_a_bound_on_the_host_leads_to_the_disk() -> None:
    """Of a machine all ranks share the host: what one of them needs, it needs as often."""
    size = GPTSize(24, 2048)
    least = min(o.device_bytes for o in plan_options(size, world_size=8) if not o.host_bytes)

    chosen = _recommended(size, 8, device=least - 1, host=12 * GB)

    assert chosen is not None and "disk" in chosen.name
    assert chosen.host_bytes <= 12 * GB


def test_what_fits_leaves_the_reserve_free() -> None:
    """What a plan does not know has to fit as well; so of every size that the table names."""
    assert _recommended(_mlp(), 8, device=1000) is None
    small = Room(device=1024)
    said = options_table(plan_options(_mlp(), world_size=8, room=small), small)
    assert "Nothing fits (device memory: 1.00 KiB)." in said
    needed = plan_options(_mlp(), world_size=8)[1].device_bytes
    for reserve, fits in ((0.0, needed), (0.2, needed * 5 // 4 + 1), (0.5, 2 * needed)):
        for device, expected in ((fits, "stage 1"), (fits - 3, "stage 2")):
            chosen = _recommended(_mlp(), 8, device=device, reserve=reserve)
            assert chosen is not None and chosen.name == expected
    said = options_table(plan_options(GPTSize(24, 2048), world_size=64), Room(reserve=0.5))
    assert ", stage 1: 24 GiB," in said  # of 9.28 GiB
    assert "50% of each device is left free" in said
    for wrong in (1, -0.1, "20%", True):
        with pytest.raises(ConfigError, match=r"Room\.reserve: expected int or float of at least"):
            Room(reserve=wrong)  # type: ignore[arg-type]


def test_activations_take_of_the_device() -> None:
    """They are the one large thing that a plan does not know."""
    (plain, *_), (with_them, *_) = (
        plan_options(_mlp(), world_size=2, room=Room(activations=activations))
        for activations in (0, 5 * GB)
    )

    assert with_them.device_bytes == plain.device_bytes + 5 * GB


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no dependency."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    plan = zero_engine.plan(_mlp(), world_size=2)

    with pytest.raises(ConfigError, match="pip install matplotlib"):
        save_picture([plan], tmp_path / "plan.png")


def test_one_option_that_does_not_fit_is_no_verdict_on_the_others() -> None:
    """Who asks for one stage is told of it; other stages may fit."""
    small = Room(device=1024)
    (option, *_) = plan_options(_mlp(), world_size=8, room=small)
    said = options_table([option], small)
    assert f"{option.name} does not fit (device memory: 1.00 KiB): it needs " in said
    assert "Nothing fits (" not in said
