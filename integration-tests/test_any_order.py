"""Calls in any order: after each, a sharded training is where a plain one is.

A walk draws calls that users make around a training, and makes each in plain torch and on every
rank. All ranks see one batch, so that the mean of their gradients is any of them. Values are
float64, as gradients that wait are added up in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from attrs import define, field
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from training import Interrupt
from walks import assert_same, calls_of, saves_at_any_time, walk
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Offload, Precision, Wire, ZeroConfig
from zero_engine.testing import host_apart
from zero_partition import StateError
from zero_partition.plan import slots
from zero_partition.run import hooks
from zero_partition.seams import find_sharded

WIDTH: Final = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Net(nn.Module):
    """Blocks, of which one's bias is used outside, and parameters of the model's own.

    One is frozen, and one has no use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        # The optimizer gets it later.
        self.late = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = x + self.blocks[0].down.bias / 2
        return x * self.gain * self.late + self.shift


@define(eq=False)
class _Run:
    """A training; `group` is None for the plain one."""

    group: Group | None
    folder: Path
    offload: Offload | None
    stage: int
    is_chained: bool
    wire: Wire
    model: Any = field(init=False)
    optimizer: Any = field(init=False)
    number: int = 0  # of the call
    saved: Any = None
    is_complete: bool = False
    average: Any = None

    def __attrs_post_init__(self) -> None:
        self.model = parity.build(_Net).double()
        # Ours on the host has no float64.
        make = torch.optim.AdamW if self.offload is None else torch.optim.NAdam
        params = [param for param in self.model.parameters() if param is not self.model.late]
        if self.is_chained:
            made = make(params[:5], lr=1e-2), torch.optim.RAdam(params[5:], lr=1e-2)
            self.optimizer = zero_engine.ChainedOptimizer(*made)
        else:
            self.optimizer = make(params, lr=1e-2)
        self.shard()

    def shard(self) -> None:
        if self.group is not None:
            options: dict[str, Any] = {"offload": self.offload, "wire": self.wire}
            config = ZeroConfig(self.stage, min_unit_bytes=0, window=2, **options)
            zero_engine.shard(self.model, self.optimizer, config, group=self.group)

    def x(self, more: int = 0) -> Tensor:
        return torch.randn(
            2, WIDTH, generator=torch.Generator().manual_seed(9 * self.number + more)
        ).double()

    def loss(self, more: int = 0) -> Tensor:
        return self.model(self.x(more)).square().mean()

    @property
    def chosen(self) -> nn.Parameter:
        """A parameter that trains and has state, another in each call."""
        of_blocks = [param for block in self.model.blocks for param in block.parameters()]
        return (*of_blocks, self.model.gain)[self.number % 13]

    def read(self, param: nn.Parameter) -> Tensor:
        if self.group is None:
            return param.detach().clone()
        return zero_engine.full_param(param)

    def no_sync(self) -> Any:
        return nullcontext() if self.group is None else zero_engine.no_sync(self.model)


# ---- Calls ----


def _train(run: _Run) -> Any:
    loss = run.loss()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def _accumulate(run: _Run) -> Any:
    with run.no_sync():
        run.loss(1).backward()
    run.loss(2).backward()
    run.loss(3).backward()
    run.optimizer.step()
    run.model.zero_grad()


def _end_in_no_sync(run: _Run) -> Any:
    with run.no_sync():
        run.loss(1).backward()
        run.loss(2).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _keep_gradients(run: _Run) -> Any:
    """They are there in the next call, whatever that is."""
    run.loss().backward()


def _step(run: _Run) -> Any:
    """With what gradients there are."""
    try:
        run.optimizer.step()
    except StateError as error:
        assert "call the model before this step" in str(error)  # after add_param_group
        run.loss()
        run.optimizer.step()


def _zero(run: _Run) -> Any:
    run.optimizer.zero_grad(set_to_none=False)


def _drop(run: _Run) -> Any:
    run.model.zero_grad()


def _evaluate(run: _Run) -> Any:
    run.model.eval()
    with torch.inference_mode() if run.number % 2 else torch.no_grad():
        found = run.model(run.x()).clone()
    run.model.train()
    return found


def _call_part(run: _Run) -> Any:
    with torch.no_grad():
        return run.model.blocks[run.number % 3](run.x())


def _train_part(run: _Run) -> Any:
    loss = run.model.blocks[run.number % 3](run.x()).square().mean()
    if loss.requires_grad:
        loss.backward()
    return loss


def _fail_in_forward(run: _Run) -> Any:
    def fail(*_: Any) -> None:
        raise KeyError("interrupted")

    hook = run.model.blocks[run.number % 3].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="interrupted"):
        run.loss()
    hook.remove()


def _fail_in_backward(run: _Run) -> Any:
    def fail(_: Any, args: Any) -> Any:
        return (Interrupt.apply(args[0]),)

    hook = run.model.blocks[1 + run.number % 2].register_forward_pre_hook(fail)
    with suppress(KeyError):  # none, where the blocks before it are frozen
        run.loss().backward()
    hook.remove()
    run.optimizer.zero_grad()


def _two_forwards(run: _Run) -> Any:
    loss = run.loss(1) + run.loss(2)
    loss.backward()
    return loss


def _retain(run: _Run) -> Any:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def _closure(run: _Run) -> Any:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    return run.optimizer.step(closure)


def _clip(run: _Run) -> Any:
    loss, norm_type = run.loss(), (2.0, float("inf"), 1.0)[run.number % 3]
    loss.backward()
    if run.group is None:
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, norm_type)
    else:
        norm = zero_engine.clip_grad_norm_(run.model, 0.1, norm_type)
    run.optimizer.step()
    return norm.float()


def _clip_value(run: _Run) -> Any:
    run.loss().backward()
    if run.group is None:
        nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
    else:
        zero_engine.clip_grad_value_(run.model, 0.01)


def _unscale(run: _Run) -> Any:
    run.optimizer.zero_grad()
    (run.loss() * 8).backward()
    if run.group is None:
        for param in run.model.parameters():
            if param.grad is not None:
                param.grad /= 8
    else:
        assert zero_engine.unscale_and_clip_(run.model, scale=8.0).is_finite
    run.optimizer.step()


def _edit_gradients(run: _Run) -> Any:
    """Of all parameters, as a loop of gradient noise does."""
    run.loss().backward()
    if run.group is None:
        for param in run.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5).add_(0.125)
    else:
        zero_engine.update_full_grads(
            run.model.parameters(), lambda _, grad: grad.mul_(0.5).add_(0.125)
        )


def _freeze(run: _Run) -> Any:
    """What is frozen keeps its state, and is thawed by the next such call of it."""
    run.optimizer.zero_grad()
    run.average = None
    block = run.model.blocks[run.number % 3]
    block.requires_grad_(not block.up.weight.requires_grad)


def _take_gradients(run: _Run) -> Any:
    """By autograd.grad, which accumulates nowhere."""
    x = run.x().requires_grad_()
    return torch.autograd.grad(run.model(x).square().mean(), x)[0]


def _read_in_context(run: _Run) -> Any:
    given = nullcontext()
    if run.group is not None:
        given = zero_engine.GatheredParameters(run.model)
    with given:
        return torch.cat([param.detach().flatten() for param in run.model.parameters()])


def _recompute(run: _Run) -> Any:
    run.model.recomputes = not run.model.recomputes


def _read(run: _Run) -> Any:
    return run.read(run.chosen)


def _read_all(run: _Run) -> Any:
    if run.group is None:
        return copy.deepcopy(run.model.state_dict())
    found = zero_engine.full_state_dict(run.model)
    return found if run.group.rank == 0 else None


def _read_gradient(run: _Run) -> Any:
    try:
        grad = run.chosen.grad if run.group is None else zero_engine.full_grad(run.chosen)
    except StateError as error:  # where plain torch has None
        assert "there are no gradients now" in str(error)
        return None
    return None if grad is None else grad.clone()


def _read_state(run: _Run) -> Any:
    if run.group is None:
        state = run.optimizer.state.get(run.chosen, {})
        return state["exp_avg"].clone() if "exp_avg" in state else None
    try:
        return zero_engine.full_optimizer_state(run.chosen, "exp_avg")
    except StateError as error:
        assert "no step has had a gradient for it yet" in str(error)
        return None


def _write(run: _Run) -> Any:
    value = run.read(run.chosen) * 0.5
    if run.group is None:
        run.chosen.data.copy_(value)
    else:
        zero_engine.set_full_param(run.chosen, value)


def _write_gathered(run: _Run) -> Any:
    given = nullcontext()
    if run.group is not None:
        given = zero_engine.GatheredParameters([run.chosen, run.model.gain], modifier_rank=0)
    with given, torch.no_grad():
        run.chosen.mul_(0.9)
        run.model.gain.add_(0.1)


def _write_gradient(run: _Run) -> Any:
    run.loss().backward()
    if not run.chosen.requires_grad:
        return
    value = torch.full_like(run.read(run.chosen), 0.25)
    if run.group is None:
        run.chosen.grad = value
    else:
        zero_engine.set_full_grad(run.chosen, value)


def _write_state(run: _Run) -> Any:
    before = _read_state(run)
    if before is None:
        return
    if run.group is None:
        run.optimizer.state[run.chosen]["exp_avg"].copy_(before * 2)
    else:
        zero_engine.set_full_optimizer_state(run.chosen, "exp_avg", before * 2)


def _write_shards(run: _Run) -> Any:
    """Weight decay by hand, of what the optimizer has; a shard learns of a freeze later."""
    is_device = torch.get_default_device().type not in slots._KEEPERS
    is_elsewhere = run.offload is not None and is_device
    if is_elsewhere or not all(param.requires_grad for param in run.model.blocks.parameters()):
        return  # the error for offloaded values has a test of its own
    with torch.no_grad():
        for group in run.optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.mul_(0.99)


def _load_weights(run: _Run) -> Any:
    state = {
        name: value * 0.9
        for name, value in parity.build(_Net, seed=run.number).state_dict().items()
    }
    run.model.load_state_dict(state)


def _change_lr(run: _Run) -> Any:
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-2 if group["lr"] < 1e-2 else 5e-3


def _add_group(run: _Run) -> Any:
    """Once; what was saved before has a group less."""
    if not run.is_complete:
        run.is_complete, run.saved, run.average = True, None, None
        run.model.late.requires_grad_()
        optimizer = run.optimizer.optimizers[0] if run.is_chained else run.optimizer
        optimizer.add_param_group({"params": [run.model.late], "lr": 2e-3})


def _start_average(run: _Run) -> Any:
    if run.group is None:
        run.average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    else:
        run.average = zero_engine.ShardedAverage(run.model, decay=0.75)


def _update_average(run: _Run) -> Any:
    if run.average is None:
        return None
    if run.group is None:
        run.average.update_parameters(run.model)
        return run.average.module.state_dict()
    run.average.update()
    return run.average.full_state_dict() or None


def _evaluate_average(run: _Run) -> Any:
    if run.average is None:
        return None
    with torch.no_grad():
        if run.group is None:
            return run.average.module(run.x())
        with run.average.swap():
            return run.model(run.x())


def _save(run: _Run) -> Any:
    if run.group is None:
        run.saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    else:
        with saves_at_any_time():
            zero_engine.save(run.folder, run.model, run.optimizer, step=run.number)
        run.saved = True


def _export(run: _Run) -> Any:
    if run.group is None:
        return copy.deepcopy(run.model.state_dict())
    saved = run.folder.with_name(f"weights-{run.number}")
    zero_engine.save(saved, run.model, step=run.number)
    if run.group.rank:
        return None
    out = saved / "weights"
    zero_engine.export(saved, out, max_shard_bytes=4096 if run.number % 2 else 10**9)
    return {
        name: value for path in out.glob("*.safetensors") for name, value in load_file(path).items()
    }


def _load(run: _Run) -> Any:
    run.optimizer.zero_grad()
    if run.saved is None:
        return
    if run.group is None:
        model, optimizer = copy.deepcopy(run.saved)
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
    else:
        report = zero_engine.load(run.folder, run.model, run.optimizer)
        assert report.num_tensors == report.num_tensors_saved


def _shard_anew(run: _Run) -> Any:
    run.optimizer.zero_grad()
    run.average = None
    if run.group is not None:
        zero_engine.unshard(run.model, run.optimizer)
        if run.number % 2:
            _train(run)
        run.shard()
    elif run.number % 2:
        _train(run)


def _park(run: _Run) -> Any:
    if run.group is not None:
        zero_engine.offload_states(run.model)
        zero_engine.reload_states(run.model)


def _release(run: _Run) -> Any:
    if run.number % 2:
        run.optimizer.zero_grad()
        run.model.zero_grad()
    if run.group is not None:
        zero_engine.release_buffers(run.model)
        report = zero_engine.memory_report(run.model)
        assert not report.slots_bytes + report.reduction_bytes * (run.number % 2)
        assert not report.gradients_bytes * (run.number % 2)


def _convert(run: _Run) -> Any:
    run.model.to(torch.get_default_device()).double().train()


def _save_in_background(run: _Run) -> Any:
    """And train meanwhile."""
    if run.group is None:
        run.saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        _train(run)
        return
    with zero_engine.Saver(run.folder, run.model, run.optimizer) as saver:
        with saves_at_any_time():
            saver.save(step=run.number)
        _train(run)
    run.saved = True


def _train_parked(run: _Run) -> Any:
    """Forward and backward need no optimizer state."""
    if run.group is not None:
        zero_engine.offload_states(run.model, {"optim"})
    loss = run.loss()
    loss.backward()
    if run.group is not None:
        zero_engine.reload_states(run.model)
    run.optimizer.step()
    return loss


def _reload_state(run: _Run) -> Any:
    run.optimizer.zero_grad()
    if run.group is None:
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    else:
        zero_engine.load_full_optimizer_state_dict(
            run.model, zero_engine.full_optimizer_state_dict(run.model)
        )


def _coalesce(run: _Run) -> Any:
    given = nullcontext() if run.group is None else zero_engine.coalesce_reduction(run.model)
    with given:
        run.loss(1).backward()
        run.loss(2).backward()


def _generate(run: _Run) -> Any:
    given = nullcontext() if run.group is None else zero_engine.unsharded(run.model)
    with given, torch.no_grad():
        return run.model(run.model(run.x()))


def _fail_in_no_sync(run: _Run) -> Any:
    with suppress(KeyError), run.no_sync():
        run.loss(1).backward()
        raise KeyError
    run.optimizer.zero_grad()


def _drop_one(run: _Run) -> Any:
    run.loss().backward()
    run.chosen.grad = None


def _use_one_block(run: _Run) -> Any:
    """The others have no part in the loss."""
    loss = (run.model.blocks[0](run.x()) * run.model.gain).sum()
    loss.backward()


def _write_local(run: _Run) -> Any:
    if run.group is None:
        run.chosen.data.mul_(0.5)
    elif run.stage:
        local = zero_engine.local_param(run.chosen)
        zero_engine.set_local_param(run.chosen, local * 0.5)
    else:
        zero_engine.set_full_param(run.chosen, run.read(run.chosen) * 0.5)


def _read_many(run: _Run) -> Any:
    return torch.cat([run.read(p).flatten() for p in run.model.parameters()])


CALLS: Final = calls_of(globals())


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    """Memory and gradients move as they do where the host has other memory."""
    with (
        mock.patch.object(slots, "_KEEPERS", set()),
        mock.patch.object(hooks, "SMALL_BYTES", 256),
        host_apart(has_gradients=True),
    ):
        yield


RESIDENCES: Final[dict[str, dict[str, Any] | None]] = {
    "device": None,
    "as on a device": None,
    "host of a device": {"optimizer": "host"},
    "host-params of a device": {"optimizer": "host", "params": "host"},
    "chained": None,
    "host": {"optimizer": "host"},
    "host-params": {"optimizer": "host", "params": "host"},
    "disk": {"optimizer": "disk"},
}


@pytest.mark.parametrize(
    ("stage", "residence"),
    [
        *((stage, "device") for stage in range(4)),
        *((stage, "host") for stage in (1, 2, 3)),
        *((2, "disk"), (3, "disk"), (3, "host-params")),
        *((2, "as on a device"), (3, "as on a device"), (2, "chained"), (3, "chained")),
        *((1, "host of a device"), (3, "host of a device"), (3, "host-params of a device")),
    ],
)
@pytest.mark.drawn(2)
def test_calls_in_any_order_do_what_they_do_in_plain_torch(
    group: Group, tmp_path: Path, stage: int, residence: str
) -> None:
    """Other tests make each call by itself. Here it meets what the calls before it left behind."""
    _compare(group, tmp_path, stage, residence)


@pytest.mark.cpu_only("the same over gloo's messages, where ranks do not read memory")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.drawn(1)
def test_calls_in_any_order_over_messages(group: Group, tmp_path: Path, stage: int) -> None:
    """Gathers are collectives there, which a call might launch on one rank alone."""
    _compare(parity.by_messages(), tmp_path, stage, "device")


@pytest.mark.parametrize(
    ("stage", "wire", "residence"),
    [
        (3, Wire(levels=2, secondary=True), "device"),
        (3, Wire(levels=2, secondary=True), "host-params"),
        (1, Wire(levels=2, replicas=True), "device"),
        (3, Wire(levels=2, replicas=True), "host"),
    ],
    ids=["secondary", "secondary-host", "replicas-1", "replicas-3-host"],
)
@pytest.mark.ranks(4)
@pytest.mark.drawn(1)
def test_calls_in_any_order_on_two_nodes(
    group: Group, tmp_path: Path, stage: int, wire: Wire, residence: str
) -> None:
    """Copies of shards have to follow every change."""
    _compare(group, tmp_path, stage, residence, wire)


def _compare(
    group: Group, tmp_path: Path, stage: int, residence: str, wire: Wire | None = None
) -> None:
    offload = RESIDENCES[residence]
    if offload is not None:
        path = {"path": tmp_path / f"{group.rank}"} if residence == "disk" else {}
        for each in path.values():
            each.mkdir()
        offload = Offload(**offload, **path)
    is_chained = residence == "chained"
    plain, run = (
        _Run(of, tmp_path / "run", offload, stage, is_chained, wire or Wire())
        for of in (None, group)
    )
    with _as_on_a_device() if "a device" in residence else nullcontext():
        for number, name, what in walk(CALLS, plain, run, 50):
            sharded = find_sharded(run.model)
            assert sharded is not None
            assert not sharded.outside.num_bytes, what
            if name == "train" and not slots._KEEPERS:
                report = zero_engine.memory_report(run.model)
                freed = report.slots_bytes + report.reduction_bytes + report.gradients_bytes
                assert not freed, what
            if number % 10 == 9:
                assert_same(_read_all(run), _read_all(plain), f"{what}: weights")


@pytest.mark.cpu_only("a device gives memory back in any case")
@pytest.mark.parametrize("stage", [2, 3])
def test_where_memory_is_given_back_16_bits_train_as_where_it_is_kept(
    group: Group, stage: int
) -> None:
    """A gather rounds the masters then, and no 16-bit shard is kept."""
    found, params_bytes = [], []
    for context in (nullcontext, _as_on_a_device):
        with context():
            model = parity.build(_Net)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            precision = Precision(params=torch.bfloat16)
            config = ZeroConfig(stage, min_unit_bytes=0, precision=precision)
            zero_engine.shard(model, optimizer, config, group=group)
            for step in range(3):
                model(torch.full((2, WIDTH), 0.1 * step + group.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            report = zero_engine.memory_report(model)
            assert bool(report.slots_bytes + report.reduction_bytes) == (context is nullcontext)
            found.append(zero_engine.full_state_dict(model))
            params_bytes.append(report.params_bytes)
    assert (params_bytes[1] < params_bytes[0]) == (stage == 3)
    for name, value in found[0].items():
        assert equal(value, found[1][name]), name
