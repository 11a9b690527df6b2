"""Codecs in training: what they send, cost and lose, and where they are refused.

Four ranks are two nodes of two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero_engine
import zero_partition
from parity import Recipe, ZeroConfig
from zero_comm import Group, GroupMismatchError, Loco, Sent, parse_codec, record_traffic
from zero_comm.testing import assert_close, equal
from zero_engine import ConfigError, Offload, Wire
from zero_partition import PartitionError, StateError, memory_report
from zero_partition.seams import find_sharded

BLOCK = 64 * 64
NUM_BLOCKS = 4
CHUNK = BLOCK // 4  # of a block, one rank's
SCALES = CHUNK // 256 * 4  # bytes beside an encoded chunk
NUM_GATHERS = 2 * NUM_BLOCKS - 1  # of a window of one: the last block is still there in backward

WIRES: dict[str, dict[str, Any]] = {
    "exact": {"levels": 2},
    "qwZ": {"levels": 2, "params": "int8"},
    "hpZ": {"levels": 2, "secondary": True},
    "qgZ": {"levels": 2, "gradients": "int4"},
    "all three": {"levels": 2, "params": "int8", "secondary": True, "gradients": "int4"},
}
# Bytes that a rank sends to the other node's two, scales apart: of gathers, and of reductions.
ACROSS: dict[str, tuple[int, int]] = {
    "exact": (NUM_GATHERS * 2 * CHUNK * 4, NUM_BLOCKS * 2 * CHUNK * 4),
    "qwZ": (NUM_GATHERS * 2 * CHUNK, NUM_BLOCKS * 2 * CHUNK * 4),
    "hpZ": (NUM_BLOCKS * 2 * CHUNK * 4, NUM_BLOCKS * 2 * CHUNK * 4),
    "qgZ": (NUM_GATHERS * 2 * CHUNK * 4, NUM_BLOCKS * CHUNK // 2),
    "all three": (NUM_BLOCKS * 2 * CHUNK, NUM_BLOCKS * CHUNK // 2),
}


@pytest.mark.parametrize("wire", WIRES)
def test_what_crosses_between_nodes_is_the_formula(ranks, wire: str) -> None:
    """The reason for all of it: a quarter of the bytes of weights, a sixteenth of those of sums."""
    gathers, reductions = ACROSS[wire]
    settings = WIRES[wire]
    num_gathers = NUM_BLOCKS if "secondary" in settings else NUM_GATHERS
    for found in ranks(4).run(_across_in_a_step, settings=settings):
        assert found["all_gather"].payload_bytes == gathers
        assert found["reduce_scatter"].payload_bytes == reductions
        assert [sent.padding_bytes for sent in found.values()] == [0, 0]
        assert found["all_gather"].scale_bytes == num_gathers * 2 * SCALES * ("params" in settings)
        sums = NUM_BLOCKS * SCALES * ("gradients" in settings)
        assert found["reduce_scatter"].scale_bytes == sums


def _across_in_a_step(group: Group, settings: dict[str, Any]) -> dict[str, Sent]:
    model, optimizer = _chain(group, Wire(**settings))
    for _ in range(2):  # the order is recorded in the first
        _step(model, optimizer)
    with record_traffic(group) as traffic:
        _step(model, optimizer)
    return {name: traffic.across(name) for name in ("all_gather", "reduce_scatter")}


@pytest.mark.ranks(4)
def test_errors_that_are_kept_are_counted(group: Group) -> None:
    """They are as many as the elements of all gradients, on every rank: not small."""
    loco = Loco()
    assert loco.kept is not None
    parity.count_from_here()
    model, optimizer = _chain(group, Wire(gradients="int4", params="int8", levels=2, loco=loco))
    assert memory_report(model).loco_bytes == 0
    for _ in range(2):
        _step(model, optimizer)

    report = memory_report(model)
    # Of the four ranks' chunks in the first hop, and of two nodes' sums of this rank's.
    assert report.loco_bytes == NUM_BLOCKS * (4 + 2) * loco.kept.wire_bytes(CHUNK)
    expected = report.total_bytes - report.scalars_bytes
    found = parity.live_bytes(at_least=CHUNK, at_most=expected)
    assert found == expected, f"{report} {found}"


@pytest.mark.ranks(4)
def test_frozen_parameters_rest_in_a_byte_each(group: Group) -> None:
    """What adapters are trained on is nearly all of a model's memory."""
    parity.count_from_here()
    model = parity.build(parity.Chain)
    for layer in model.layers[1:]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.layers[0].parameters(), fused=True)
    config = ZeroConfig(3, wire=Wire(frozen="int8"), window=1, prefetch_numel=0)
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(2):
        _step(model, optimizer)

    report = memory_report(model)
    assert report.params_bytes == CHUNK * 4 + (NUM_BLOCKS - 1) * (CHUNK + SCALES)
    expected = report.total_bytes - report.scalars_bytes
    assert parity.live_bytes(at_least=CHUNK, at_most=expected) == expected


def test_frozen_parameters_that_are_written_rest_rounded(group: Group) -> None:
    """As do values that a checkpoint has, which are not those of the model that is built."""
    model = parity.build(parity.Chain)
    for layer in model.layers[1:]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.layers[0].parameters(), fused=True)
    zero_engine.shard(model, optimizer, ZeroConfig(3, wire=Wire(frozen="int8")), group=group)
    weight = model.layers[1].weight
    values = torch.linspace(-3, 5, weight.numel(), device=group.device).view(weight.shape)
    zero_engine.set_full_param(weight, values)

    numel = weight.numel() // group.world_size
    rounded = [
        parse_codec("int8").decode(parse_codec("int8").encode(part), torch.empty_like(part))
        for part in values.view(-1).split(numel)
    ]
    found = zero_engine.full_param(weight)
    assert torch.equal(found.view(-1), torch.cat(rounded))
    assert not torch.equal(found, values)


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
@pytest.mark.ranks(4)
def test_what_is_lost_is_told_by_unit(group: Group, codec: str) -> None:
    """Whoever sees a worse loss wants to know which layer is too coarse."""
    model, optimizer = _chain(group, Wire(params=codec, gradients=codec, levels=2))
    shards = {
        f"layers.{index}": zero_engine.local_param(layer.weight)
        for index, layer in enumerate(model.layers)
    }
    with zero_partition.record_codec_errors(model) as errors:
        _step(model, optimizer)
    _step(model, optimizer)
    found = errors.params.relative()

    assert found.keys() == shards.keys() == errors.gradients.relative().keys()
    for name, shard in shards.items():
        expected = parse_codec(codec).relative_error(shard)
        assert_close(torch.tensor(found[name]), expected, rtol=1e-4, atol=0)
    assert all(0 < error < 0.2 for error in errors.gradients.relative().values())


def test_a_padding_that_others_left_is_not_encoded(group: Group) -> None:
    """In one block with values it would make them coarse, or nan."""
    config = ZeroConfig(2, wire=Wire(gradients="int8", levels=2))
    model, optimizer = parity.build_sharded(group, config, "sgd")
    parity.run_steps(model, optimizer, range(1), rank=group.rank)
    for slot in find_sharded(model).reducer.pool.ring:
        if slot.allocated_bytes:
            slot.memory.fill_(255)  # nan in every dtype
    parity.run_steps(model, optimizer, range(1, 2), rank=group.rank)

    state = zero_engine.full_state_dict(model)
    assert all(value.isfinite().all() for value in state.values())


# ---- Files ----


@pytest.mark.ranks(4)
def test_training_goes_on_from_a_file_as_if_it_had_not_ended(group: Group, tmp_path: Path) -> None:
    """What is saved is exact; a file with decoded values would lose small updates."""
    wire = Wire(params="int8", gradients="int4", frozen="int8", levels=2)
    config = ZeroConfig(3, wire=wire)
    model, optimizer = parity.build_sharded(group, config, make=parity.tiny_float32)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(tmp_path, model, optimizer, step=2)
    expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)

    again, optimizer = parity.build_sharded(group, config, make=parity.tiny_float32)
    zero_engine.load(tmp_path, again, optimizer)
    assert parity.run_steps(again, optimizer, range(2, 4), rank=group.rank) == expected
    found, wanted = (zero_engine.full_state_dict(each) for each in (again, model))
    if group.rank == 0:
        parity.assert_same_weights(found, wanted, what="resumed")


@pytest.mark.parametrize("place", ["device", "disk"])
def test_weights_by_request_are_exact(group: Group, place: str, tmp_path: Path) -> None:
    """An export must not be of what happened to travel."""
    folder = tmp_path if place == "disk" else None
    offload = None if folder is None else Offload(params="disk", path=folder)
    config = ZeroConfig(3, wire=Wire(params="int4"), state_dict="gather", offload=offload)
    model = parity.build(parity.tiny_float32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    zero_engine.shard(model, None, config, group=group)
    parity.loss_of(model, parity.batch(0, 0, group.rank))
    gathered = model.state_dict()
    whole = zero_engine.full_state_dict(model)
    plain = parity.build(parity.tiny_float32)
    data = parity.batch(0, 0, group.rank)
    with zero_engine.unsharded(model), torch.no_grad():
        assert equal(parity.loss_of(model, data), parity.loss_of(plain, data))
    for name, param in model.named_parameters():
        value = zero_engine.full_param(param)
        assert equal(gathered[name], expected[name]), name
        assert equal(value, expected[name]), name
        assert group.rank or equal(whole[name], expected[name]), name


# ---- What is refused ----


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Wire(params="int7"), PartitionError, "no codec is called 'int7'"),
    (lambda: Wire(gradients=8), PartitionError, "Wire.gradients: expected a codec .* got 8"),
    (lambda: Wire(loco=Loco()), PartitionError, "say how they are encoded"),
    (
        lambda: Wire(gradients="int4", replicas=True, loco=Loco()),
        PartitionError,
        "leave out loco, or replicas",
    ),
    (lambda: Wire(gradients="int4", loco=True), PartitionError, "expected a zero_comm.Loco"),
    (lambda: ZeroConfig(0, wire=Wire(params="int8")), ConfigError, "use stage 1, 2 or 3"),
    (lambda: ZeroConfig(2, wire=Wire(frozen="int8")), ConfigError, "these are replicated"),
    (lambda: ZeroConfig(0, wire=Wire(gradients="int8")), ConfigError, "use stage 1"),
]


@pytest.mark.parametrize(("make", "error", "text"), REFUSED)
def test_what_cannot_be_is_refused_when_it_is_said(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    """Without ranks, and before a job has waited for its turn."""
    with pytest.raises(error, match=text):
        make()


def test_what_is_seen_when_sharding_is_refused_there(group: Group, tmp_path: Path) -> None:
    """A guess what a node is would be sent over the slowest link."""
    offload = Offload(params="disk", path=tmp_path)
    with pytest.raises(PartitionError, match="leave out frozen"):
        parity.build_sharded(group, ZeroConfig(3, wire=Wire(frozen="int8"), offload=offload))
    with pytest.raises(GroupMismatchError, match="start with torchrun, or pass ranks_per_node"):
        _chain(group, Wire(gradients="int4"))
    with (
        pytest.raises(StateError, match="not"),
        zero_partition.record_codec_errors(torch.nn.Linear(1, 1)),
    ):
        pass


@pytest.mark.ranks(4)
def test_float64_travels_as_it_is(group: Group) -> None:
    """No codec takes it, and one such buffer is no reason to refuse the others."""
    recipe = Recipe(make=lambda: parity.Tiny(torch.float64), num_steps=2)
    wire = Wire(params="fp32", gradients="fp32", levels=4)
    found, expected = (
        parity.train_sharded(group, recipe, ZeroConfig(3, wire=each)) for each in (wire, Wire())
    )

    parity.assert_same(found, expected, rank=group.rank, what="float64")


def _chain(group: Group, wire: Wire) -> Any:
    model = parity.build(parity.Chain)
    config = ZeroConfig(3, wire=wire, window=1, prefetch_numel=0)
    return zero_engine.shard(model, parity.adamw(model), config, group=group)


def _step(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
