"""Rates and what follows from them: the time of a step, and what takes longest."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import zero_engine
from zero_comm import Group
from zero_engine import ConfigError, FileError, GPTSize, Offload, Rates, ZeroConfig
from zero_engine._cli import main

RATES = Rates(
    matmul_flops=1e14,
    device_bytes=1e12,
    host_bytes=1e11,
    transfer_bytes=2e10,
    send_bytes=1e11,
    send_across_bytes=1e10,
    disk_read_bytes=5e9,
    disk_write_bytes=2e9,
)
SIZE = GPTSize(24, 2048)


def _estimate(config: ZeroConfig, *, tokens: int = 4096, rates: Rates = RATES, **how: int):
    plan = zero_engine.plan(SIZE, config, world_size=8, **how)
    return plan, zero_engine.estimate_step(plan, rates, tokens=tokens)


def test_computing_is_six_operations_a_token_and_parameter() -> None:
    """Two forward and four backward: what everybody estimates a training run with."""
    plan, estimate = _estimate(ZeroConfig(2))

    assert estimate.seconds["computing"] == 6 * plan.numel * 4096 / RATES.matmul_flops


def test_sending_is_bytes_over_the_rate_of_each_level() -> None:
    """Across nodes is where the time goes."""
    plan, estimate = _estimate(ZeroConfig(3), ranks_per_node=2)

    inside = plan.sent_bytes - plan.across_bytes
    assert estimate.seconds["sending"] == inside / 1e11
    assert estimate.seconds["sending across nodes"] == plan.across_bytes / 1e10
    assert _estimate(ZeroConfig(3))[1].seconds["sending"] == plan.sent_bytes / 1e11


def test_what_rests_on_disk_is_read_and_written_once() -> None:
    """Of state; parameters are read at each gather."""
    offload = Offload(optimizer="disk", path="/")
    plan, estimate = _estimate(ZeroConfig(3, offload=offload))

    assert estimate.seconds["reading the disk"] == plan.at_rest.disk_bytes / 5e9
    assert estimate.seconds["writing the disk"] == plan.at_rest.disk_bytes / 2e9
    assert estimate.bottleneck == "writing the disk"


def test_what_overlaps_takes_as_long_as_the_longest() -> None:
    """Two bounds: all hidden, and nothing hidden."""
    _, estimate = _estimate(ZeroConfig(3))

    assert estimate.least_s == max(estimate.seconds.values())
    assert estimate.most_s == sum(estimate.seconds.values())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"matmul_flops": 1e12}, "computing"),
        ({"send_bytes": 1e8}, "sending"),
        ({"device_bytes": 1e8}, "stepping"),
    ],
)
def test_the_bottleneck_is_what_is_slow(change: dict[str, float], expected: str) -> None:
    """It says what to buy, or what to change."""
    _, estimate = _estimate(ZeroConfig(2), rates=attrs.evolve(RATES, **change))

    assert estimate.bottleneck == expected


def test_a_rate_that_is_missing_is_named() -> None:
    """Else time that nobody measured would count as none."""
    with pytest.raises(ConfigError, match=r"Rates\.send_bytes is needed .*zero probe"):
        _estimate(ZeroConfig(2), rates=Rates(matmul_flops=1.0, device_bytes=1.0))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "fast", True])
def test_a_rate_that_is_none_is_refused(value: object) -> None:
    """A step would take no time, or all of it."""
    with pytest.raises(ConfigError, match=r"Rates\.device_bytes: expected a number above 0"):
        Rates(matmul_flops=1.0, device_bytes=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "expected JSON"), ("{}", "at least"), (None, "cannot be read")],
)
def test_a_file_of_rates_that_is_none_is_named(
    tmp_path: Path, content: str | None, message: str
) -> None:
    """As other files are."""
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(FileError, match=message):
        Rates.load(path)


def test_unknown_rates_are_refused(tmp_path: Path) -> None:
    """A misspelt one would be passed over."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"matmul_flops": 1, "device_bytes": 1, "disk_bytes": 1}))

    with pytest.raises(FileError, match=r"got \['disk_bytes'\]"):
        Rates.load(path)


def test_what_probe_prints_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One command's output is the other's input."""
    assert main(["probe", "--size", "0.01", "--path", str(tmp_path), "--json"]) == 0
    path = tmp_path / "rates.json"
    path.write_text(capsys.readouterr().out)
    size = ["--layers", "2", "--hidden", "64", "--world-size", "1", "--stage", "1"]

    status = main(["plan", *size, "--rates", str(path), "--tokens", "512"])

    assert status == 0
    assert "computing" in capsys.readouterr().out
    assert Rates.load(path).disk_read_bytes is not None


def test_rates_without_tokens_are_refused(capsys: pytest.CaptureFixture) -> None:
    """How long is a step of how much?"""
    assert main(["plan", "--layers", "2", "--hidden", "64", "--world-size", "1", "--tokens", "9"])
    assert "expected --rates and --tokens" in capsys.readouterr().err


def test_ranks_agree_on_their_rates(ranks) -> None:
    """A step waits for the slowest."""
    first, second = ranks(2).run(_probe)

    assert first == second
    assert first["send_bytes"] > 0


def _probe(group: Group) -> dict[str, float | None]:
    return attrs.asdict(zero_engine.probe(group, size=0.02))
