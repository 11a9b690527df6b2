"""What is whole when, at stage 3: the limits a user sets, and the report of what follows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from unittest import mock

import attrs
import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_comm import Group, all_gather_json, record_traffic
from zero_comm.testing import assert_close
from zero_partition import StateError, memory_report, schedule_report
from zero_partition.plan.slots import choose_slots
from zero_partition.planning import keeps_free_memory
from zero_partition.run import schedule
from zero_partition.seams import find_sharded

WIDTH = 64
BLOCK = WIDTH * WIDTH  # elements of a layer of parity.Chain
NUM_BLOCKS = 4


def _over(group: Group, transport: str) -> Group:
    """The same ranks, in a group whose gathers need every rank if `transport` is messages."""
    return parity.by_messages() if transport == "messages" else group


# ---- Numbers ----


@pytest.mark.parametrize("transport", ["reads", "messages"])
def test_no_limit_changes_a_number(group: Group, transport: str) -> None:
    """They say how much memory may hide how much communication, and nothing else."""
    recipe = parity.Recipe(num_steps=4, num_micro_batches=2)
    expected = parity.train_ddp(group, recipe)
    over = _over(group, transport)

    for options in (
        {"prefetch_numel": 0, "max_live_numel": 10**9},
        {"prefetch_numel": 200},
        {"max_live_numel": 1},
        {"max_live_numel": 500, "max_reuse_numel": 0},
        {"small_param_numel": 10**9},
        {"small_param_numel": 13, "max_small_numel": 20, "prefetch_numel": 100},
    ):
        curve = parity.train_sharded(over, recipe, ZeroConfig(3, **options))
        parity.assert_same(curve, expected, rank=group.rank, what=str(options))


# ---- Gathers ----


@pytest.mark.parametrize("transport", ["reads", "messages"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 3},
        {"window": 3, "prefetch_numel": 0},
        {"window": 3, "prefetch_numel": BLOCK},
        {"max_live_numel": NUM_BLOCKS * BLOCK, "max_reuse_numel": BLOCK},
    ],
    ids=str,
)
def test_what_happens_is_what_the_report_says(
    group: Group, options: dict[str, int], transport: str
) -> None:
    """A table nobody can trust is worse than none: it is compared with the calls themselves."""
    model, optimizer = parity.shard_chain(_over(group, transport), ZeroConfig(3, **options))
    for _ in range(3):
        parity.step_chain(model, optimizer)
        with torch.no_grad():  # has an order of its own
            model(torch.ones(1, WIDTH))
    model(torch.ones(1, WIDTH)).sum().backward()
    happened: list[tuple[str, bool]] = []  # units, and whether they were launched before their use
    units = [unit for unit in find_sharded(model).units if unit.name.startswith("layers.")]

    def look(index: int) -> None:  # right before it is used
        if index < len(units):
            unit = units[index]
            is_ahead = unit.state.name == "GATHERING"
            if is_ahead or not unit.is_resident:  # else it is whole from its use before
                happened.append((unit.name, is_ahead))

    def after_forward(output: Tensor, index: int) -> None:
        look(index + 1)
        output.register_hook(lambda _: look(index))

    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _m, _a, out, own=index: after_forward(out, own))
    optimizer.step()  # the first gathers may be launched as a step ends
    optimizer.zero_grad()
    model.register_forward_pre_hook(lambda *_: look(0))  # after ours, which may launch them too
    model(torch.ones(1, WIDTH)).sum().backward()

    rows = schedule_report(model).rows
    assert happened == [(row.unit, row.gathered.startswith("ahead")) for row in rows]
    by_messages = transport == "messages" or group.device.type != "cpu"
    may_prefetch = by_messages and options.get("prefetch_numel") != 0
    assert any(is_ahead for _, is_ahead in happened) == may_prefetch


def test_an_evaluation_gathers_ahead_from_its_first_unit_on(group: Group) -> None:
    """Between two evaluations training goes on, in an order of its own."""
    model, optimizer = parity.shard_chain(parity.by_messages(), ZeroConfig(3, window=3))
    units = [unit for unit in find_sharded(model).units if unit.name.startswith("layers.")]
    needs_no_wait: list[bool] = []  # as it is on its way, or its slot still has its values

    def look(index: int) -> None:
        if index < len(units):
            unit = units[index]
            needs_no_wait.append(unit.state.name == "GATHERING" or unit.is_resident)

    for evaluation in range(3):
        for _ in range(2):
            parity.step_chain(model, optimizer)
        handles = [model.register_forward_pre_hook(lambda *_: look(0))]
        handles += [
            layer.register_forward_hook(lambda *_, own=index: look(own + 1))
            for index, layer in enumerate(model.layers)
        ]
        with torch.no_grad():
            for _ in range(2):  # before the first, the step has begun to gather what it needs, too
                needs_no_wait.clear()
                model(torch.ones(1, WIDTH))
        for handle in handles:
            handle.remove()
        if evaluation > 0:  # the first has no order to go by
            assert needs_no_wait == [True] * NUM_BLOCKS


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("num_live", [1, 2, 3, 4])
def test_a_limit_decides_what_is_whole_and_what_is_sent_again(group: Group, num_live: int) -> None:
    """3 psi (N-1)/N, less what is still whole when its backward begins; and bytes of slots."""
    for options in ({"max_live_numel": num_live * BLOCK}, {"window": num_live}):
        model, optimizer = parity.shard_chain(group, ZeroConfig(3, **options))
        for _ in range(4):
            with record_traffic(group) as traffic:
                parity.step_chain(model, optimizer)
            slots = 4 * num_live * BLOCK if keeps_free_memory(group.device) else 0
            assert memory_report(model).slots_bytes == slots
        report = schedule_report(model)

        sent = sum(all_gather_json(traffic.payload_numel("all_gather"), group=group))
        assert sent == (2 * NUM_BLOCKS - num_live) * BLOCK * (group.world_size - 1)
        assert report.peak_live_numel == num_live * BLOCK
        assert report.slots_bytes == 4 * num_live * BLOCK


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH, bias=False)
        self.around = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.inside(x))


def test_units_that_enclose_others_share_a_slot_once_their_order_is_known(group: Group) -> None:
    """Two towers, one after the other, need the memory of one and of what prefetch asks for."""
    model = nn.Sequential(_Tower(), _Tower())
    units = ["0", "0.inside", "1", "1.inside"]
    config = ZeroConfig(3, units=units, max_live_numel=2 * BLOCK, prefetch_numel=0)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    slots = []
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).sum()
        slots.append(memory_report(model).slots_bytes)
        loss.backward()
        optimizer.step()

    assert slots == [3 * 4 * BLOCK, 2 * 4 * BLOCK]  # at first, each enclosing unit has its own


def test_slots_are_dealt_once_for_an_order_that_comes_again(group: Group) -> None:
    """Else every step plans anew."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(3, window=2))
    with mock.patch.object(schedule, "choose_slots", wraps=choose_slots) as plans:
        times = []
        for _ in range(5):
            parity.step_chain(model, optimizer)
            times.append(plans.call_count)
    assert times[1:] == [times[1]] * 4 != [0] * 4


def test_a_unit_rests_as_soon_as_backward_is_past_it(group: Group) -> None:
    """Also where no other unit needs its memory."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(3, window=NUM_BLOCKS))
    parity.step_chain(model, optimizer)
    units = [unit for unit in find_sharded(model).units if unit.name]
    states: list[str] = []
    model.layers[0].register_forward_hook(
        lambda _m, _a, output: (
            output.register_hook(lambda _: states.extend(unit.state.name for unit in units))
            and None
        )
    )
    model(torch.ones(1, WIDTH)).sum().backward()
    assert states[2:] == ["SHARDED"] * (NUM_BLOCKS - 2)


class _Around(nn.Module):
    """Computes around what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, inside: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        return self.after(inside(self.before(x)))


class _Through(nn.Module):
    """A layer that is called before another one, or by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Around(), _Around()
        self.is_inside = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x, self.first) if self.is_inside else self.second(self.first(x))


def test_units_of_one_slot_that_are_used_at_once_say_so(group: Group) -> None:
    """One would compute with what the other's gather has left there."""
    plain = _Through()
    model = copy.deepcopy(plain)
    config = ZeroConfig(3, units=["first", "second"], max_live_numel=2 * BLOCK, prefetch_numel=0)
    _, optimizer = zero_engine.shard(model, parity.adamw(model), config, group=group)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
    plain.is_inside = model.is_inside = True
    with pytest.raises(StateError, match="first used one after the other and are now used at once"):
        model(x)
    zero_engine.release_buffers(model)
    assert_close(model(x), plain(x))


# ---- Small parameters ----


def _with_biases() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def test_small_parameters_rest_whole_and_are_not_gathered(group: Group) -> None:
    """Each kind of byte is where the options say, and a step gathers the large ones only."""
    model = parity.build(_with_biases)
    optimizer = torch.optim.Adam(model.parameters())
    config = ZeroConfig(3, small_param_numel=WIDTH, window=3)
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(3):
        parity.step_chain(model, optimizer)
    assert all(layer.bias.isfinite().all() for layer in model)  # whole between steps
    with record_traffic(group) as traffic:
        parity.step_chain(model, optimizer)

    whole, sharded, report = NUM_BLOCKS * WIDTH, NUM_BLOCKS * BLOCK, memory_report(model)
    assert report.params_bytes == 4 * whole + 4 * sharded // 2
    assert report.optimizer_bytes == 8 * (whole + sharded) // 2
    # Large ones: forward, and backward where the window does not hold them. Small ones: once,
    # after the step.
    sent = traffic.payload_numel("all_gather")
    assert sent == sharded // 2 * 2 - 3 * (WIDTH * WIDTH) // 2 + whole // 2


def test_a_small_parameter_with_other_memory_is_refused_by_the_models_call(group: Group) -> None:
    """It is gathered by no call of a module of its own, which would look."""
    model = parity.build(_with_biases)
    zero_engine.shard(model, None, ZeroConfig(3, small_param_numel=WIDTH), group=group)
    x = torch.ones(2, WIDTH)
    model(x)
    model[0].bias.data = torch.zeros(WIDTH, dtype=torch.float64)
    with pytest.raises(StateError, match=r"'0\.bias'"):
        model(x)


def test_small_parameters_are_bounded_together_and_chosen_in_the_models_order(group: Group) -> None:
    """The bound for the model: the first that fit."""
    model = parity.build(_with_biases)
    config = ZeroConfig(3, small_param_numel=WIDTH, max_small_numel=2 * WIDTH + 1)
    zero_engine.shard(model, None, config, group=group)

    whole = [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() > 4]
    assert whole == ["0.bias", "1.bias"]


# ---- The table ----


def test_the_table_names_units_bytes_and_moments(group: Group) -> None:
    """What a user prints to see why a step waits; who never does needs no tabulate."""
    model, optimizer = parity.shard_chain(group, ZeroConfig(3))
    for _ in range(2):
        parity.step_chain(model, optimizer)
    lines = zero_engine.schedule_table(model).splitlines()
    assert lines[0].split() == ["unit", "bytes", "slot", "gathered", "used", "released"]
    gathered = "at its use" if group.device.type == "cpu" else "ahead"
    for text in ("layers.0", f"{4 * BLOCK}", gathered, "forward of layers.0"):
        assert text in lines[2]
    says = r"pip install tabulate"
    no_tabulate = mock.patch.dict(sys.modules, {"tabulate": None})
    with no_tabulate, pytest.raises(zero_engine.ConfigError, match=says):
        zero_engine.schedule_table(model)


@pytest.mark.ranks(1)
def test_there_is_a_table_at_every_stage_and_before_the_first_step(group: Group) -> None:
    """Empty where nothing is ever gathered, or nothing is known yet."""
    for stage in parity.STAGES:
        model, optimizer = parity.shard_chain(group, ZeroConfig(stage))
        assert schedule_report(model).rows == ()
        parity.step_chain(model, optimizer)
        assert attrs.astuple(schedule_report(model)) == ((), 0, 0)


# ---- A backward inside of a unit's ----


class _Shared(nn.Module):
    """One layer, called twice in a unit, each time in a checkpoint with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_unit_stays_whole_until_all_backwards_inside_of_it_have_run(group: Group) -> None:
    """All of its gradients are there after the first, and the second computes it again."""
    found = {}
    for stage in (None, 3):
        model = parity.build(lambda: nn.Sequential(*(_Shared() for _ in range(3))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stage is not None:
            config = ZeroConfig(stage, units=("0", "1", "2"))
            zero_engine.shard(model, optimizer, config, group=group)
        for step in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            with record_traffic(group) as traffic:
                model(x.to(group.device).requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[stage] = model.state_dict() if stage is None else zero_engine.full_state_dict(model)
    for name, value in found[3].items():
        assert_close(value, found[None][name])
    numel = sum(param.numel() for param in model.parameters())
    assert traffic.payload_numel("all_gather") <= 2 * numel // group.world_size  # no weight alone
