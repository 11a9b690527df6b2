"""Rates and what follows from them: the time of a step, and what takes longest."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import zero_engine
from zero_comm import Group, Levels
from zero_engine import ConfigError, FileError, Offload, ZeroConfig
from zero_engine.planning import GPTSize, Rates, estimate_step, probe

RATES = Rates(
    matmul_flops=1e14,
    device_bytes=1e12,
    host_bytes=1e11,
    transfer_bytes=2e10,
    send_bytes=1e11,
    send_across_bytes=1e10,
    disk_read_bytes=5e9,
    disk_write_bytes=2e9,
    layer_s=1e-4,
    launch_s=1e-3,
)
ON_CPU = attrs.evolve(RATES, transfer_bytes=None, host_bytes=None)
SIZE = GPTSize(24, 2048)


def _estimate(config: ZeroConfig, *, tokens: int = 4096, rates: Rates = RATES, **how: int):
    plan = zero_engine.plan(SIZE, config, world_size=8, **how)
    return plan, estimate_step(plan, rates, tokens=tokens)


def test_time_is_bytes_or_operations_over_their_rate() -> None:
    """Two operations forward and four backward of each token and parameter; and who sends where.

    Of what rests on disk, state is read and written once, and parameters are read at each gather.
    """
    plan, estimate = _estimate(ZeroConfig(3), ranks_per_node=2)
    assert estimate.seconds["computing"] == 6 * plan.numel * 4096 / RATES.matmul_flops
    assert estimate.seconds["sending"] == (plan.sent_bytes - plan.across_bytes) / 1e11
    assert estimate.seconds["sending across nodes"] == plan.across_bytes / 1e10
    assert _estimate(ZeroConfig(3))[1].seconds["sending"] == plan.sent_bytes / 1e11

    plan, estimate = _estimate(ZeroConfig(3, offload=Offload(optimizer="disk", path="/")))
    assert estimate.seconds["reading the disk"] == plan.at_rest.disk_bytes / 5e9
    assert estimate.seconds["writing the disk"] == plan.at_rest.disk_bytes / 2e9
    assert estimate.bottleneck == "writing the disk"
    _, estimate = _estimate(ZeroConfig(2), rates=attrs.evolve(RATES, send_bytes=1e8))
    assert estimate.bottleneck == "sending"


def test_adam_goes_through_28_bytes_of_each_parameter() -> None:
    """Four tensors of 4 bytes read, three written; at stage 0 every rank does so with all."""
    for stage, share in ((0, 1), (3, 8)):
        plan, estimate = _estimate(ZeroConfig(stage))

        scalars = 2 * 4 * 4 * SIZE.layers  # how many steps each of 4 parameters of a block has had
        assert estimate.seconds["stepping"] * 1e12 == pytest.approx(
            28 * plan.numel / share + scalars
        )


def test_a_frozen_parameter_is_not_stepped_moved_or_written() -> None:
    """Of a model that is trained by adapters, nearly nothing is."""
    model = SIZE.build()
    for block in list(model.blocks)[1:]:  # type: ignore[arg-type]
        block.requires_grad_(False)
    trained = 12 * 2048**2 // 8  # of a rank
    offload = Offload(optimizer="disk", params="disk", path="/")
    plan = zero_engine.plan(model, ZeroConfig(3, offload=offload), world_size=8)

    seconds = estimate_step(plan, RATES, tokens=1).seconds

    assert plan.step.params_bytes == plan.step.grads_bytes == 4 * trained
    written = 16 * trained  # values, their masters, two moments
    assert seconds["writing the disk"] == pytest.approx(written / 2e9, rel=1e-3)


def test_what_is_small_takes_its_time_all_the_same() -> None:
    """A model of small layers waits for calls and for launches, not for arithmetic."""
    plan, estimate = _estimate(ZeroConfig(2))

    assert plan.num_layers == 4 * SIZE.layers
    assert estimate.seconds["calling layers"] == plan.num_layers * 1e-4
    calls = sum(each.calls for each in plan.traffic) + 1  # and one of control
    assert estimate.seconds["launching collectives"] == calls * 1e-3
    alone = zero_engine.plan(SIZE, ZeroConfig(2), world_size=1)
    seconds = estimate_step(alone, RATES, tokens=1).seconds
    assert seconds.keys() == {"computing", "calling layers", "stepping"}


@pytest.mark.parametrize(
    ("offload", "moved"),
    [
        (Offload(optimizer="host"), 4 + 4),  # gradients there, parameters back
        (Offload(optimizer="host", fraction=0.25), (4 + 4) / 4),
        (Offload(optimizer="host", params="host"), 4 + 4 + 4),  # gradients, and two gathers
        (Offload(params="host"), 4 + 4 + 4),  # two gathers, and parameters when stepped
    ],
)
def test_what_moves_between_device_and_host_is_a_share_of_a_rank(
    offload: Offload, moved: float
) -> None:
    """Over a slow bus it is what a step waits for."""
    size = attrs.evolve(SIZE, params=SIZE.blocks_numel)
    plan = zero_engine.plan(size, ZeroConfig(3, offload=offload), world_size=8, reads_peers=False)
    seconds = estimate_step(plan, RATES, tokens=1).seconds

    gathers = sum(row.shard_bytes * (row.gathers - 2) for row in plan.units)  # but those of two
    gathers *= offload.params == "host"
    assert seconds["transferring"] * 2e10 == pytest.approx(moved * plan.numel / 8 + gathers)


def test_what_overlaps_takes_as_long_as_the_longest() -> None:
    """Two bounds: all hidden that can be, and nothing hidden. A step follows its backward."""
    _, estimate = _estimate(ZeroConfig(3))
    _, on_cpu = _estimate(ZeroConfig(3), rates=ON_CPU)
    offload = Offload(optimizer="host", delayed_update=True)
    _, delayed = _estimate(ZeroConfig(3, offload=offload))

    for each, in_turns in (
        (estimate, ("computing", "stepping")),
        (on_cpu, ("computing", "stepping", "calling layers")),
        (delayed, ("computing",)),
    ):
        seconds = each.seconds
        alone = (value for name, value in seconds.items() if name not in in_turns)
        assert each.least_s == max(sum(seconds[name] for name in in_turns), *alone)
        assert each.most_s == sum(seconds.values())


def test_what_is_no_rate_or_number_of_tokens_is_refused(tmp_path: Path, zero, capsys) -> None:
    """A step would take no time, or all of it; and what is not measured none."""
    plan = zero_engine.plan(SIZE, world_size=2)
    for tokens in (0, True, "many", float("nan")):
        with pytest.raises(ConfigError, match=r"expected tokens to be above 0"):
            estimate_step(plan, RATES, tokens=tokens)  # type: ignore[arg-type]
    for value in (0, float("inf"), "fast", True):
        with pytest.raises(ConfigError, match=r"Rates\.device_bytes: expected a number above 0"):
            Rates(matmul_flops=1.0, device_bytes=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Rates\.send_bytes is needed .*zero probe"):
        _estimate(ZeroConfig(2), rates=Rates(matmul_flops=1.0, device_bytes=1.0))
    path = tmp_path / "rates.json"
    with pytest.raises(FileError, match="cannot be read"):
        Rates.load(path)
    for content, message in (
        ("{", "expected JSON"),
        ("{}", "at least"),
        # A misspelt one would be passed over.
        ('{"matmul_flops": 1, "device_bytes": 1, "disk_bytes": 1}', r"got \['disk_bytes'\]"),
    ):
        path.write_text(content)
        with pytest.raises(FileError, match=message):
            Rates.load(path)
    assert zero("plan", "--layers", "2", "--hidden", "64", "--world-size", "1", "--tokens", "9")
    assert "expected --rates and --tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_what_probe_prints_plan_reads(zero, tmp_path: Path, capsys) -> None:
    """One command's output is the other's input."""
    assert zero("probe", "--size", "0.01", "--path", tmp_path, "--json") == 0
    path = tmp_path / "rates.json"
    path.write_text(capsys.readouterr().out)
    size = ["--layers", "2", "--hidden", "64", "--world-size", "1", "--stage", "1"]

    status = zero("plan", *size, "--rates", path, "--tokens", "512")

    assert status == 0
    assert "s a step at least" in capsys.readouterr().out
    assert Rates.load(path).disk_read_bytes is not None


def test_ranks_agree_on_their_rates(ranks) -> None:
    """A step waits for the slowest."""
    first, second = ranks(2).run(_probe)

    assert first == second
    assert first["send_bytes"] > 0
    assert first["launch_s"] > 0
    assert first["send_across_bytes"] is None


def _probe(group: Group, *, ranks_per_node: int | None = None) -> dict[str, float | None]:
    levels = None if ranks_per_node is None else Levels.of_nodes(group, ranks_per_node)
    return attrs.asdict(probe(group, size=0.02, levels=levels))


@pytest.mark.slow
def test_what_is_sent_across_nodes_is_measured_apart(ranks) -> None:
    """The network between nodes is what a step on several waits for."""
    for per_node, has_inside in ((2, True), (1, False)):
        (found, *_) = ranks(4).run(_probe, ranks_per_node=per_node)

        assert (found["send_bytes"] is not None) is has_inside
        assert found["send_across_bytes"] > 0
