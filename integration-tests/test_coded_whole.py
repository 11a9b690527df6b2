"""Codecs of parameters that rest whole: at stages 1 and 2 a step's updates are gathered encoded.

That training has the bits of one process is seen in `test_coded_training`.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import coded
import delayed
import parity
import pytest
import residences
import torch
import zero_engine
import zero_partition
from delayed import Case, Late
from one_dtype import OneDtype
from parity import Recipe, ZeroConfig
from parking import offload_and_reload
from residences import Cell, is_same, resting_as
from torch import Tensor, nn
from zero_comm import Group, Handle, parse_codec, record_traffic
from zero_comm.testing import equal
from zero_engine import Offload, Precision, Wire
from zero_partition import LostEditError, StateError, StateKind, memory_report
from zero_partition.seams import find_sharded

pytestmark = pytest.mark.xdist_group("ranks")

CODED = Wire(params="int8:16")
CODEC = parse_codec("int8:16")
MASTERS = Precision(params=torch.bfloat16)
Masters = Precision | None
PRECISIONS = {"masters": MASTERS, "none": None}
BOTH_PRECISIONS = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=[*PRECISIONS])


class Trained(OneDtype):
    """All is used, and nothing is frozen: at stage 3 that would be rounded too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_()

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return super().forward(tokens) + self.unused.float().sum()


def build(
    group: Group,
    stage: int,
    precision: Masters,
    make: Callable[[], nn.Module] = Trained,
    **more: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that computes in one dtype."""
    config = ZeroConfig(stage, wire=CODED, precision=precision, **more)
    return parity.build_sharded(group, config, make=make)


# ---- However it is stepped ----


@BOTH_PRECISIONS
def test_where_state_rests_changes_no_bit(group: Group, precision: Masters, tmp_path: Path) -> None:
    """Who steps a shard elsewhere writes it back piece by piece; what is sent is all of it."""
    recipe = Recipe(make=OneDtype, optimizer="sgd")
    dtype = None if precision is None else precision.params
    expected = coded.train_coded(
        recipe, stage=2, params=CODEC, world_size=2, ranks_per_node=2, dtype=dtype
    )
    for cell in (Cell(2, "host"), Cell(1, "disk"), Cell(2, "disk", fraction=0.3)):
        offload = cell.offload(tmp_path)
        config = ZeroConfig(cell.stage, wire=CODED, precision=precision, offload=offload)
        with resting_as(cell):
            found = parity.train_sharded(group, recipe, config)

        assert found.losses == expected[group.rank].losses, cell
        if group.rank == 0:
            parity.assert_same_weights(found.weights, expected[0].weights, what=str(cell))


@attrs.define(eq=False)
class CodedLate(Late):
    """The model computes with what shards of the other copy decode to."""

    exact: nn.Module

    @classmethod
    def of(cls, case: Case) -> CodedLate:
        """Before the first step."""
        exact = parity.build(OneDtype)
        trained = delayed.trainable(exact)
        model = copy.deepcopy(exact).to(torch.bfloat16 if case.is_bf16 else torch.float32)
        late = cls(model, trained, case.make(trained), exact)
        late.take_over()
        return late

    def take_over(self) -> None:
        """As a gather does."""
        coded.round_params(self.model, self.exact, self.optimizer, CODEC, 2)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_a_delayed_update_is_gathered_when_it_is_brought_in(group: Group, is_bf16: bool) -> None:
    """The model must not compute with values that are held back, nor round them twice."""
    case = Case(delayed.on_host(), 2, is_bf16, wire=CODED)
    expected = delayed.train_alone(case, rank=group.rank, world_size=2, late=CodedLate.of(case))
    found = delayed.train_sharded(case, group)

    assert is_same(found.losses, expected.losses)
    assert is_same(found.trained, expected.trained)


@BOTH_PRECISIONS
def test_shards_that_are_not_stepped_are_rounded_once(group: Group, precision: Masters) -> None:
    """An expert that is seldom used would walk away with each step of its neighbours in a block."""
    model, optimizer = build(group, 2, precision, OneDtype)
    parity.run_steps(model, optimizer, range(3), rank=group.rank)
    twin = copy.deepcopy(parity.build(OneDtype)).to(model.unused.dtype)
    exact = parity.build(OneDtype)
    for name, param in model.named_parameters():
        exact.get_parameter(name).data = zero_engine.full_param(param).float()
    assert equal(exact.unused, parity.build(OneDtype).unused)  # nothing has stepped it

    stepper = parity.OPTIMIZERS["sgd"](parity.param_groups(exact))
    coded.round_params(twin, exact, stepper, CODEC, 2)
    for name, value in twin.named_parameters():
        if value.requires_grad:
            assert equal(model.get_parameter(name), value), name
    assert equal(model.frozen.float(), exact.frozen)  # nobody gathers it


# ---- What is asked for, and what is written ----


@BOTH_PRECISIONS
def test_weights_by_request_are_exact(group: Group, precision: Masters) -> None:
    """An export must not be of what happened to travel, at no stage."""
    model, optimizer = build(group, 2, precision, state_dict="gather")
    at_rest, _ = build(group, 3, precision, state_dict="gather")  # the same, by an older way
    data = parity.batch(0, 0, group.rank)
    assert equal(parity.loss_of(model, data), parity.loss_of(at_rest, data))
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    at_rest.load_state_dict(model.state_dict())
    expected = at_rest.state_dict()

    whole, gathered, exact = zero_engine.full_state_dict(model), model.state_dict(), []
    for name, param in model.named_parameters():
        assert equal(gathered[name], expected[name]), name
        assert group.rank or equal(whole[name], expected[name]), name
        full = zero_engine.full_param(param)
        assert equal(full.to(param.dtype), expected[name]), name
        with zero_engine.GatheredParameters(param):
            assert equal(param, expected[name]), name
        if param.requires_grad and equal(param, expected[name]):
            exact.append(name)
    assert len(exact) <= (group.device.type != "cpu"), exact  # others train other values
    with zero_engine.unsharded(model), zero_engine.unsharded(at_rest), torch.no_grad():
        assert equal(parity.loss_of(model, data), parity.loss_of(at_rest, data))

    zero_engine.unshard(model, optimizer)
    for name, param in model.named_parameters():
        assert equal(param.to(expected[name].dtype), expected[name]), name


def test_what_would_be_of_rounded_weights_is_refused(group: Group) -> None:
    """They would be saved for good by who does not know."""
    model, _ = build(group, 2, MASTERS)
    with pytest.raises(StateError, match=r"full_state_dict\(model\) on every rank"):
        torch.save(model.state_dict(), io.BytesIO())
    with pytest.raises(LostEditError), zero_engine.unsharded(model), torch.no_grad():
        model.unused.add_(1)
    zero_engine.offload_states(model, [StateKind.MASTERS])
    with pytest.raises(StateError, match="reload_states"):
        zero_engine.full_state_dict(model)


def _write(model: nn.Module) -> None:
    weight = model.blocks[1].up.weight
    with zero_engine.GatheredParameters([weight, model.unused], modifier_rank=1):
        if torch.distributed.get_rank() == 1:
            weight.data.fill_(0.3)
    zero_engine.set_full_param(model.blocks[0].up.weight, torch.full(weight.shape, 0.7))
    state = parity.build(Trained).state_dict()
    model.load_state_dict({name: value * 1.1 for name, value in state.items()})


BETWEEN: dict[str, Callable[[nn.Module], None]] = {
    "written": _write,
    "all parked": offload_and_reload(*StateKind),
    "parameters parked": offload_and_reload(StateKind.PARAMS),
    "masters parked": offload_and_reload(StateKind.MASTERS),
}


@BOTH_PRECISIONS
def test_what_happens_between_steps_counts_as_at_stage_3(group: Group, precision: Masters) -> None:
    """There are two sets of values now; code that edits weights is not to know the stage."""
    for what, disturb in BETWEEN.items():
        curves: dict[int, parity.Curve] = {}
        for stage in (3, 1, 2):
            model, optimizer = build(group, stage, precision)
            losses = parity.run_steps(model, optimizer, range(1), rank=group.rank)
            disturb(model)
            losses += parity.run_steps(model, optimizer, range(1, 3), rank=group.rank)
            curves[stage] = parity.Curve(losses, zero_engine.full_state_dict(model))
            parity.assert_same(curves[stage], curves[3], rank=group.rank, what=what)


@BOTH_PRECISIONS
def test_what_lies_beside_a_written_parameter_stays_exact(group: Group, precision: Masters) -> None:
    """Rounding it to what travelled would undo small updates, without a word."""
    model, optimizer = build(group, 2, precision)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    exact = {name: zero_engine.local_param(param) for name, param in model.named_parameters()}
    with torch.no_grad():
        model.unused.mul_(2)  # in place, by every rank
    written = model.unused.detach().float()
    zero_engine.set_full_param(model.blocks[0].up.bias, torch.ones(13))
    optimizer.step()  # without a gradient

    for name, param in model.named_parameters():
        if name not in ("unused", "blocks.0.up.bias"):
            assert equal(zero_engine.local_param(param), exact[name]), name
    assert equal(zero_engine.full_param(model.unused).float(), written)


@BOTH_PRECISIONS
def test_training_goes_on_from_a_file_as_if_it_had_not_ended(
    group: Group, precision: Masters, tmp_path: Path
) -> None:
    """What is saved is exact, and what is loaded is rounded before it is computed with."""
    model, optimizer = build(group, 2, precision)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    zero_engine.save(tmp_path / "saved", model, optimizer, step=2)
    saved = zero_engine.full_state_dict(model)
    expected = parity.run_steps(model, optimizer, range(2, 4), rank=group.rank)
    swap = Offload(optimizer="disk", path=tmp_path, subgroup_bytes=1000)
    for stage, offload in ((1, None), (2, None), (3, None), (2, swap)):
        again, stepper = build(group, stage, precision, offload=offload)
        parity.run_steps(again, stepper, range(7, 8), rank=group.rank)
        zero_engine.load(tmp_path / "saved", again, stepper)
        loaded = zero_engine.full_state_dict(again)
        assert all(equal(loaded[key], value) for key, value in saved.items()), stage
        found = parity.run_steps(again, stepper, range(2, 4), rank=group.rank)
        # Torch's AdamW and the host's kernels agree to the last bits.
        close = pytest.approx(expected, rel=1e-6 if offload else 0, abs=0)
        assert found == close, (stage, offload)


# ---- What it costs ----


def test_a_quarter_of_the_bytes_travels_two_units_at_a_time(group: Group) -> None:
    """All at once would be a second model, in bytes, at the moment when memory is scarcest."""
    samples: list[int] = []
    wait, codec = Handle.wait, parse_codec("int8")
    wire_bytes = codec.wire_bytes(64 * 64 // 2)

    def sample(handle: Handle[Any], **how: Any) -> Any:
        samples.append(parity.live_bytes(at_least=2048))
        return wait(handle, **how)

    parity.count_from_here()
    model, optimizer = parity.shard_chain(group, ZeroConfig(2, wire=Wire(params="int8")))
    parity.step_chain(model, optimizer)
    model(torch.ones(1, 64)).sum().backward()
    before = parity.live_bytes(at_least=2048)
    with (
        mock.patch.object(Handle, "wait", sample),
        record_traffic(group) as traffic,
        zero_partition.record_codec_errors(model) as errors,
    ):
        optimizer.step()

    assert max(samples) == before + 2 * 2 * wire_bytes
    sent = traffic.operations["all_gather"]
    assert sent.payload_bytes == 4 * 64 * 64 // 2  # a byte for each element of a rank's part
    assert sent.payload_bytes + sent.scale_bytes == 4 * wire_bytes
    assert not sent.padding_bytes
    lost = codec.relative_error(zero_engine.local_param(model.layers[3].weight)).item()
    assert errors.params.relative()["layers.3"] == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize("place", ["device", "host", "disk", "delayed"])
@pytest.mark.ranks(timeout_s=60)
def test_a_plan_knows_the_shard_that_rests_beside(group: Group, place: str, tmp_path: Path) -> None:
    """With masters on the device it is nothing, and else as large as a rank's part."""
    offload = {
        "host": Offload(optimizer="host", subgroup_bytes=1000),
        "disk": Offload(optimizer="disk", path=tmp_path, subgroup_bytes=1000),
        "delayed": delayed.on_host(),
    }.get(place)
    for precision in PRECISIONS.values():
        config = ZeroConfig(2, wire=CODED, precision=precision, offload=offload)
        with torch.device("meta"):
            model = Trained()
        optimizer, of_rank = residences.cpu_adam(model), {"world_size": 2, "rank": group.rank}
        planned = zero_engine.plan(
            model, config, optimizer=optimizer, device=group.device, **of_rank
        )
        parity.count_from_here()
        model = parity.build(Trained)
        optimizer = residences.cpu_adam(model)
        zero_engine.shard(model, optimizer, config, group=group)
        parity.run_steps(model, optimizer, range(2), rank=group.rank)
        assert attrs.asdict(memory_report(model)) == attrs.asdict(planned.at_rest), precision
        if offload is None:
            assert parity.live_bytes() == planned.at_rest.total_bytes, precision
        params = list(model.parameters())
        whole = sum(param.nbytes for param in params)
        shard = sum(zero_engine.local_param(p).numel() * p.itemsize for p in params)
        has_masters = offload is None and precision is not None
        assert planned.at_rest.params_bytes == whole + (0 if has_masters else shard)
        zero_engine.unshard(model, optimizer)


def test_small_parameters_at_stage_3_travel_as_they_are(group: Group) -> None:
    """They are kept whole as they are few and matter: norms and biases."""
    model, optimizer = build(group, 3, MASTERS, small_param_numel=13)
    parity.run_steps(model, optimizer, range(2), rank=group.rank)
    assert {unit.codec for unit in find_sharded(model).units} == {CODEC, None}

    small = [param for param in model.parameters() if param.requires_grad and param.numel() <= 13]
    assert small
    for param in small:
        assert equal(param.detach(), zero_engine.full_param(param).to(param.dtype))


@pytest.mark.ranks(1)
def test_one_rank_rounds_nothing(group: Group) -> None:
    """As at stage 3: nothing travels."""
    recipe = Recipe(make=OneDtype, num_steps=2)
    found, expected = (
        parity.train_sharded(group, recipe, ZeroConfig(2, wire=wire)) for wire in (CODED, Wire())
    )
    parity.assert_same(found, expected, rank=0, what="one rank")
