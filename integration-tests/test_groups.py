"""Parameters with ranks of their own: experts over ranks train as in one process."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
import zero_engine
from expert_models import (
    ExpertRanks,
    build_mixture,
    expert_ranks,
    loss_on,
    nadamw,
    parameters_by_expert,
    train_alone,
)
from parity import ZeroConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_comm import DivergenceError, Group, all_gather_json, record_traffic
from zero_comm.testing import equal, rely_on
from zero_engine import ConfigError, FileError, Offload, Precision, Wire
from zero_engine.checkpoint.folder import Checkpoint
from zero_partition import LoadError, PartitionError, StateError
from zero_partition.seams import find_sharded

STEPS = 3
EXPERTS = "*.experts.*"


def _sharded(
    group: Group, num_parts: int, config: ZeroConfig, **how: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    ranks = expert_ranks(dist.group.WORLD, num_parts)
    model = build_mixture(ranks, **how).to(group.device)
    optimizer = nadamw(model)
    config = attrs.evolve(config, groups={EXPERTS: ranks.same})
    zero_engine.shard(model, optimizer, config, group=group)
    return model, optimizer


def _check_trained(model: nn.Module, alone: nn.Module) -> None:
    expected = dict(alone.named_parameters())
    for name, param in parameters_by_expert(model).items():
        found = zero_engine.full_param(param).cpu()
        torch.testing.assert_close(found, expected[name].detach().cpu(), rtol=1e-9, atol=1e-12)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole tensors": {"cut": "tensor"},
    "state on the host": {"offload": Offload(optimizer="host")},
    "sums": {"precision": Precision(masters=None, predivide_factor=2.0)},
    "sanitized": {"sanitize": True},
    "all on the host": {"offload": Offload(optimizer="host", params="host")},
    "small ones whole": {"small_param_numel": 8},
}
# Stage, name of the options, whether experts have names of their own, whether all are called.
CASES = [(stage, "plain", own, called) for stage in range(4) for own in (0, 1) for called in (0, 1)]
CASES += [(1, name, 1, 1) for name in ("whole tensors", "state on the host", "sums", "sanitized")]
CASES += [(3, name, number % 2, 1) for number, name in enumerate(OPTIONS) if name != "plain"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("stage", "name", "is_numbered", "calls_all"), CASES)
@pytest.mark.drawn(3)
def test_experts_over_ranks_train_as_in_one_process(
    group: Group, stage: int, name: str, is_numbered: int, calls_all: int
) -> None:
    """All values after steps with clipping; an expert that no row reaches does not move."""
    how = {"is_numbered": bool(is_numbered), "calls_all": bool(calls_all)}
    alone, norms = train_alone(4, STEPS, calls_all=bool(calls_all))
    for num_parts in (2, 4) if name == "plain" and calls_all else (2,):
        config = ZeroConfig(stage, **OPTIONS[name])
        model, optimizer = _sharded(group, num_parts, config, **how)
        for step in range(STEPS):
            loss_on(model, step, group.rank).backward()
            norm = zero_engine.clip_grad_norm_(model, 0.5)
            assert abs(norm.item() - norms[step].item()) < 1e-6 * norms[step].item()
            optimizer.step()
            optimizer.zero_grad()
        _check_trained(model, alone)


class _Mpu:
    """Megatron's parallel_state, as far as it is asked."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self.ranks = ranks

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_expert_data_parallel_group(self) -> Any:
        return self.ranks.same


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_numbered", [False, True], ids=["same-names", "own-names"])
@pytest.mark.parametrize(("stage", "mark"), [(1, "allreduce"), (3, "allreduce"), (2, "moe")])
def test_marked_experts_have_the_ranks_that_an_mpu_says(
    group: Group, stage: int, mark: str, is_numbered: bool
) -> None:
    """In DeepSpeed's shape, by `allreduce` = False alone, or by `moe` in a param group."""
    alone, _ = train_alone(4, STEPS)
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = _marked(ranks, is_numbered=is_numbered).to(group.device)
    optimizer = nadamw(model)
    if mark == "moe":
        everything = [*model.parameters()]
        experts = [param for param in everything if not param.allreduce]
        for param in experts:
            del param.allreduce
        dense = [param for param in everything if all(param is not each for each in experts)]
        of_dense = optimizer.param_groups[0] | {"params": dense}
        optimizer.param_groups[:] = [of_dense, of_dense | {"params": experts, "moe": True}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zero_engine.initialize(
        model=model, optimizer=optimizer, config=config, mpu=_Mpu(ranks)
    )
    for step in range(STEPS):
        engine.backward(loss_on(engine, step, group.rank))
        engine.step()
    _check_trained(model, alone)
    buffers = [b.plan.ranks for b in find_sharded(model).buffers if b.plan.ranks]
    assert len({*buffers}) == 1  # all patterns of the same ranks share one name


@pytest.mark.ranks(2)
def test_a_moe_param_group_without_ranks_is_refused(group: Group) -> None:
    """All ranks would get the values of the first."""
    model = torch.nn.Linear(2, 2).to(group.device)
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "moe": True}], lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match=r"param group with moe=True.*groups="):
        zero_engine.initialize(model=model, optimizer=optimizer, config=config)
    with pytest.raises(PartitionError, match=r"moe=True in its param group.*groups="):
        zero_engine.shard(model, optimizer, ZeroConfig(1), group=group)


# Fields of ZeroConfig, and how near values stay.
NEARLY: dict[str, tuple[dict[str, Any], float]] = {
    "masters": ({"precision": Precision(params=torch.bfloat16)}, 0.05),
    "codecs": ({"wire": Wire(params="int8", gradients="int8", levels=2)}, 0.05),
    "rows": ({"cut": "row"}, 1e-9),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", NEARLY)
def test_experts_accumulate_in_other_dtypes_as_well(group: Group, name: str, stage: int) -> None:
    """Two micro-batches a step, of which the first is not reduced."""
    fields, near = NEARLY[name]
    alone = build_mixture(None)
    plain = nadamw(alone)
    model, optimizer = _sharded(group, 2, ZeroConfig(stage, **fields))
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(4):
                (loss_on(alone, 2 * step + micro, rank) / 4).backward()
            with zero_engine.no_sync(model) if micro == 0 else contextlib.nullcontext():
                loss_on(model, 2 * step + micro, group.rank).backward()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    expected = dict(alone.named_parameters())
    for of_expert, param in parameters_by_expert(model).items():
        found, value = (
            zero_engine.full_param(param).cpu().double(),
            expected[of_expert].detach().cpu(),
        )
        assert (found - value).norm() <= near * value.norm(), of_expert


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss_on(model, step, rank).backward()
        zero_engine.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Values and state of this rank's parameters, whole, by the names that one process has."""
    found = {}
    for name, param in parameters_by_expert(model).items():
        found[name] = zero_engine.full_param(param).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}: {key}"] = zero_engine.full_optimizer_state(param, key).clone()
        found[f"{name}: step"] = torch.as_tensor(zero_engine.full_optimizer_state(param, "step"))
    return found


def _check_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = _whole(model)
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        assert equal(value, expected[name]), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.drawn(2)
def test_experts_with_numbers_of_their_own_go_on_however_they_are_spread(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """All values and state, over other ranks, at other stages, and where each rank has them all."""
    model, optimizer = _sharded(group, 2, ZeroConfig(stage), is_numbered=True)
    _train(model, optimizer, group.rank, range(STEPS))
    zero_engine.save(tmp_path, model, optimizer, step=STEPS)
    every: list[Any] = [None] * group.world_size
    dist.all_gather_object(every, {k: v.cpu() for k, v in _whole(model).items()})
    expected = {k: v.to(group.device) for of_rank in every for k, v in of_rank.items()}
    for parts, other in ((2, 3 - stage), (4, stage), (1, 3 - stage)):
        found, its_optimizer = _sharded(group, parts, ZeroConfig(other), is_numbered=True)
        _spoil(found)
        report = zero_engine.load(tmp_path, found, its_optimizer)
        assert report is not None
        assert (report.missing, report.unexpected) == ((), ())
        assert report.num_tensors == report.num_tensors_saved
        _check_equal(found, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_experts_of_the_same_names_go_on_in_as_many_groups(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """Each group of ranks has its own again; in other groups nobody could say whose they are."""
    model, optimizer = _sharded(group, 2, ZeroConfig(stage))
    _train(model, optimizer, group.rank, range(STEPS))
    zero_engine.save(tmp_path, model, optimizer, step=STEPS)
    expected = _whole(model)
    found, its_optimizer = _sharded(group, 2, ZeroConfig(3 - stage))
    _spoil(found)
    report = zero_engine.load(tmp_path, found, its_optimizer)
    assert report.num_tensors == report.num_tensors_saved
    _check_equal(found, expected)
    other, its_optimizer = _sharded(group, 4, ZeroConfig(stage))
    with pytest.raises(LoadError, match="another one in each of the 4 groups"):
        zero_engine.load(tmp_path, other, its_optimizer)


def _spoil(model: nn.Module) -> None:
    for param in model.parameters():
        zero_engine.set_full_param(param, torch.zeros_like(zero_engine.full_param(param)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_numbered", [False, True], ids=["same-names", "own-names"])
@pytest.mark.parametrize("calls_all", [True, False], ids=["all-called", "chosen-called"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.drawn(3)
def test_a_second_training_of_experts_goes_on(
    group: Group, stage: int, calls_all: bool, is_numbered: bool
) -> None:
    """Sharded again, and made plain and sharded again, they train as if they had never been."""
    how = {"is_numbered": is_numbered, "calls_all": calls_all}
    alone, _ = train_alone(4, 3, calls_all=calls_all)
    model, optimizer = _sharded(group, 2, ZeroConfig(stage), **how)
    config = ZeroConfig(stage, groups={EXPERTS: expert_ranks(dist.group.WORLD, 2).same})
    _train(model, optimizer, group.rank, range(1))
    zero_engine.shard(model, optimizer, config, group=group)
    _train(model, optimizer, group.rank, range(1, 2))
    zero_engine.unshard(model, optimizer)
    zero_engine.shard(model, optimizer, config, group=group)
    _train(model, optimizer, group.rank, range(2, 3))
    _check_trained(model, alone)


# ---- What is refused, or said ----


@pytest.mark.ranks(2)
def test_parameters_that_differ_by_rank_are_named_as_they_are_replaced(group: Group) -> None:
    """Experts without groups became rank 0's on every rank, and nothing said so."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    for groups, expected in (({}, 16), ({EXPERTS: ranks.same}, 0)):
        model = build_mixture(ranks).to(group.device)
        with mock.patch.object(logging.getLogger("zero_partition"), "warning") as warning:
            zero_engine.shard(model, nadamw(model), ZeroConfig(2, groups=groups), group=group)
        said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        assert len(said) == (expected > 0 and group.rank == 1)
        for text in said:
            assert f"{expected} of 24 parameters" in text
            assert "0.experts.0.0.weight" in text


def _marked(ranks: ExpertRanks, **how: Any) -> nn.Module:
    model = build_mixture(ranks, **how)
    for name, param in model.named_parameters():
        param.allreduce = "experts" not in name  # as Megatron and DeepSpeed mark them
    return model


def _mixed_names(ranks: ExpertRanks) -> nn.Module:
    model = build_mixture(ranks, is_numbered=True)
    if ranks.index:
        model[0].experts["0"] = model[0].experts.pop(str(ranks.numbers[0]))
    return model


def _three_and_one() -> Any:
    made = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3])]
    return made[dist.get_rank() == 3]


# What is wrong: the model, fields of ZeroConfig, and words of the error.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "marked, and no group": (_marked, lambda _: {}, "groups={'\\*.experts.\\*': group}"),
    "a pattern of nothing": (
        build_mixture,
        lambda ranks: {"groups": {"*.expert.*": ranks.same}},
        "matches no parameter",
    ),
    "ranks that do not divide": (
        build_mixture,
        lambda _: {"groups": {EXPERTS: _three_and_one()}},
        "divide the 4 ranks",
    ),
    "names that some groups share": (
        _mixed_names,
        lambda ranks: {"groups": {EXPERTS: ranks.same}},
        "or of other names in each",
    ),
    "replicas": (
        build_mixture,
        lambda ranks: {"groups": {EXPERTS: ranks.same}, "wire": Wire(replicas=True, levels=2)},
        "got both",
    ),
    "no group": (build_mixture, lambda _: {"groups": {EXPERTS: 4}}, "a zero_comm.Group"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", REFUSED)
def test_groups_that_cannot_be_are_refused_on_every_rank(group: Group, case: str) -> None:
    """By name, before anything is changed."""
    build, fields, words = REFUSED[case]
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = build(ranks).to(group.device)
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises((PartitionError, ConfigError), match=words):
        zero_engine.shard(model, nadamw(model), ZeroConfig(1, **fields(ranks)), group=group)
    assert [param.data_ptr() for param in model.parameters()] == before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_would_give_rank_0s_experts_for_all_is_refused(group: Group, stage: int) -> None:
    """It says how to get at them."""
    model, optimizer = _sharded(group, 2, ZeroConfig(stage))
    _train(model, optimizer, group.rank, range(1))
    config = ZeroConfig(stage, groups={EXPERTS: expert_ranks(dist.group.WORLD, 2).same})
    loss_on(model, 1, group.rank).backward()
    own = [param for of_group in optimizer.param_groups for param in of_group["params"]]
    with pytest.raises(StateError, match=r"zero_engine\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(own, 1.0)
    optimizer.zero_grad()
    calls = (
        lambda: zero_engine.full_state_dict(model),
        lambda: zero_engine.full_optimizer_state_dict(model),
        lambda: zero_engine.load_full_optimizer_state_dict(model, {}),
        lambda: zero_engine.GatheredParameters(model, modifier_rank=0).__enter__(),
    )
    for call in calls:
        with pytest.raises(StateError, match="differ from rank to rank"):
            call()
    with pytest.raises(ConfigError, match="one process that has all"):
        zero_engine.verify(lambda: build_mixture(None), nadamw, [0], config, group=group)


PLANNED: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "masters": (2, {"precision": Precision(params=torch.bfloat16)}),
    "host": (3, {"offload": Offload(optimizer="host", params="host")}),
    "whole tensors": (1, {"cut": "tensor"}),
    "codecs": (3, {"wire": Wire(params="int8")}),
    "encoded gradients": (2, {"wire": Wire(gradients="int8", levels=2)}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", PLANNED)
@pytest.mark.parametrize("is_mesh", [False, True], ids=["group", "mesh"])
def test_a_plan_counts_the_ranks_of_experts(group: Group, case: str, is_mesh: bool) -> None:
    """The bytes that a report of the sharded model says, and those that a step sends."""
    stage, options = PLANNED[case]
    ranks = expert_ranks(dist.group.WORLD, 2)
    same: Any = ranks.same
    if is_mesh:
        kind, names = group.device.type, ("same", "expert")
        same = init_device_mesh(kind, (2, 2), mesh_dim_names=names)["same"]
    config = ZeroConfig(stage, groups={EXPERTS: same}, **options)
    model = build_mixture(ranks).to(group.device)
    optimizer = nadamw(model)
    how: dict[str, Any] = {"world_size": 4, "optimizer": optimizer, "device": group.device}
    planned = zero_engine.plan(model, config, **how)
    assert planned.rank == group.rank
    with pytest.raises(ConfigError, match="which has other parameters"):
        zero_engine.plan(model, config, rank=group.rank ^ 1, **how)
    zero_engine.shard(model, optimizer, config, group=group)
    _train(model, optimizer, group.rank, range(2))
    found = attrs.asdict(zero_engine.memory_report(model))
    assert found == attrs.asdict(planned.memory.at_rest)
    with record_traffic(group) as traffic:
        _train(model, optimizer, group.rank, range(2, 3))
    counted = traffic.operations.items()
    sent = {name: (of.calls, of.sent.num_bytes) for name, of in counted if name != "agree"}
    expected: dict[str, tuple[int, int]] = {}
    for each in planned.traffic:
        calls, num_bytes = expected.get(each.name, (0, 0))
        expected[each.name] = calls + each.calls, num_bytes + each.sent.num_bytes
    assert sent == expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_numbered", [False, True], ids=["same-names", "own-names"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_average_of_experts_goes_on(
    group: Group, stage: int, is_numbered: bool, tmp_path: Path
) -> None:
    """Each rank's is of its own experts, saved and loaded with them."""
    how = {"is_numbered": is_numbered}
    model, optimizer = _sharded(group, 2, ZeroConfig(stage), **how)
    average = zero_engine.ShardedAverage(model, decay=0.5)
    plain: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        _train(model, optimizer, group.rank, range(step, step + 1))
        average.update()
        for name, param in model.named_parameters():
            value = zero_engine.full_param(param)
            plain[name] = value.clone().lerp_(plain.get(name, value), 0.5)
    zero_engine.save(tmp_path, model, optimizer, step=STEPS, average=average)
    found, its_optimizer = _sharded(group, 2, ZeroConfig(3 - stage), **how)
    its_average = zero_engine.ShardedAverage(found, decay=0.5)
    zero_engine.load(tmp_path, found, its_optimizer, average=its_average)
    same = expert_ranks(dist.group.WORLD, 2).same
    zero_engine.shard(found, its_optimizer, ZeroConfig(stage, groups={EXPERTS: same}), group=group)
    with its_average.swap():
        for name, param in found.named_parameters():
            torch.testing.assert_close(zero_engine.full_param(param), plain[name])


@pytest.mark.ranks(4)
def test_a_group_of_all_ranks_is_as_none(group: Group) -> None:
    """Experts that are spread over one rank are like everything else, marked or not."""
    model = _marked(expert_ranks(dist.group.WORLD, 1)).to(group.device)
    config = ZeroConfig(3, groups={EXPERTS: dist.group.WORLD})
    zero_engine.shard(model, nadamw(model), config, group=group)
    state = zero_engine.full_state_dict(model)
    assert len(state) == (40 if group.rank == 0 else 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_report_counts_the_bytes_of_this_ranks_experts(group: Group, stage: int) -> None:
    """Over all ranks, each element of each expert is counted as often as it rests."""
    model, _ = _sharded(group, 2, ZeroConfig(stage))
    held: list[Any] = [None] * group.world_size
    dist.all_gather_object(held, zero_engine.memory_report(model).params_bytes)
    whole = 8 * sum(param.numel() for param in build_mixture(None).parameters())
    own = 8 * sum(param.numel() for param in model.parameters())
    assert sum(held) == (whole if stage == 3 else 4 * own)


@pytest.mark.ranks(2)
def test_one_rank_that_is_wrong_stops_all(group: Group) -> None:
    """At once, with the words of its error."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = build_mixture(ranks).to(group.device)
    groups = {EXPERTS if group.rank else "*.expert.*": ranks.same}
    began = time.monotonic()
    with pytest.raises(PartitionError, match="matches no parameter"):
        zero_engine.shard(model, nadamw(model), ZeroConfig(1, groups=groups), group=group)
    with pytest.raises(PartitionError, match="the same patterns on every rank"):
        groups = {EXPERTS: ranks.same} if group.rank else {}
        zero_engine.shard(model, nadamw(model), ZeroConfig(1, groups=groups), group=group)
    assert time.monotonic() - began < 20


@pytest.mark.ranks(4)
def test_what_a_second_call_would_get_wrong_is_refused(group: Group) -> None:
    """Other groups than before, and gradients that would be summed once more."""
    model, optimizer = _sharded(group, 2, ZeroConfig(0))
    loss_on(model, 0, group.rank).backward()
    with pytest.raises(StateError, match=r"ranks of their own \(ZeroConfig\.groups\)"):
        loss_on(model, 1, group.rank).backward()
    optimizer.zero_grad()
    other = expert_ranks(dist.group.WORLD, 4).same
    for groups in ({}, {EXPERTS: other}):
        with pytest.raises(PartitionError, match=r"unshard\(\) it first"):
            zero_engine.shard(model, optimizer, ZeroConfig(1, groups=groups), group=group)
    _train(model, optimizer, group.rank, range(1))


@pytest.mark.ranks(2)
def test_a_checkpoint_has_no_place_for_buffers_of_experts(group: Group, tmp_path: Path) -> None:
    """Nor do files of weights for several of one name."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = build_mixture(ranks)
    model[0].experts[0].register_buffer("seen", torch.zeros(2))
    model.to(group.device)
    optimizer = nadamw(model)
    config = ZeroConfig(1, groups={EXPERTS: ranks.same})
    zero_engine.shard(model, optimizer, config, group=group)
    with pytest.raises(StateError, match="persistent=False"):
        zero_engine.save(tmp_path, model, optimizer, step=0)
    del model[0].experts[0].seen
    hook = model[1].register_state_dict_post_hook(lambda module, state, *_: state.update(more=1))
    with pytest.raises(StateError, match=r"modules change what state_dict\(\) gives"):
        zero_engine.save(tmp_path, model, optimizer, step=0)
    hook.remove()
    zero_engine.save(tmp_path, model, optimizer, step=0)
    with pytest.raises(FileError, match="its number among all"):
        zero_engine.export(tmp_path, tmp_path / "weights")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_of_one_expert_skips_the_step_on_every_rank(group: Group, stage: int) -> None:
    """torch.amp.GradScaler looks at a rank's own gradients, of which one expert's is infinite."""
    model, optimizer = _sharded(group, 2, ZeroConfig(stage))
    scaler = torch.amp.GradScaler(group.device.type, init_scale=4.0)
    scaler.scale(loss_on(model, 0, group.rank)).backward()
    targets = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if group.rank == 3:  # this rank's part of the last of its gradients
        last = next(p.grad for p in reversed(targets) if p.grad.numel())
        last.as_subclass(torch.Tensor).view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not any(optimizer.state.values())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_says_what_a_parameter_is_for_those_that_have_it(group: Group, stage: int) -> None:
    """Values, gradients and state, given by the second of its ranks and to the first alone."""
    model, optimizer = _sharded(group, 2, ZeroConfig(stage))
    _train(model, optimizer, group.rank, range(1))
    loss_on(model, 1, group.rank).backward()
    own = expert_ranks(dist.group.WORLD, 2)
    position = dist.get_rank(own.same)
    for param in model[0].experts.parameters():
        value = torch.full_like(zero_engine.full_param(param), 10.0 * own.index + position)
        given = value if position == 1 else None
        zero_engine.set_full_param(param, given, from_rank=1)
        zero_engine.set_full_grad(param, given, from_rank=1)
        zero_engine.set_full_optimizer_state(param, "exp_avg", given, from_rank=1)
        found = (
            zero_engine.full_param(param, to_rank=0),
            zero_engine.full_grad(param, to_rank=0),
            zero_engine.full_optimizer_state(param, "exp_avg", to_rank=0),
        )
        for each in found:
            assert (each is None) == (position == 1)
            assert each is None or (each == 10.0 * own.index + 1).all()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_says_of_all_experts_what_one_process_would(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """Which are frozen and which are tied, also of those that rank 0 has not."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    models = [build_mixture(ranks, is_numbered=True), build_mixture(None, is_numbered=True)]
    for model in models:
        for name, expert in model[0].experts.items():
            expert[0].bias.requires_grad_(int(name) % 2 == 0)
            model[1].experts[name][2].weight = expert[2].weight
    found = []
    for model, groups in zip(models, ({EXPERTS: ranks.same}, {}), strict=True):
        optimizer = nadamw(model.to(group.device))
        zero_engine.shard(model, optimizer, ZeroConfig(stage, groups=groups), group=group)
        folder = tmp_path / str(len(found))
        zero_engine.save(folder, model, optimizer, step=0)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint is not None
        found.append((checkpoint.frozen, checkpoint.source.ties, {*checkpoint.source.params}))
        trained = checkpoint.source.param_groups[0]["params"]
        assert sorted(trained) == sorted({*trained})
        found[-1] += ({*trained},)
    assert found[0] == found[1]


@pytest.mark.ranks(4)
def test_buffers_of_experts_are_those_of_the_first_of_their_ranks(group: Group) -> None:
    """Others are the first rank's, as without groups."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = build_mixture(ranks)
    model[0].register_buffer("seen", torch.tensor(1.0 + group.rank))
    model[0].experts[0].register_buffer("seen", torch.tensor(1.0 + group.rank))
    model.to(group.device)
    config = ZeroConfig(1, groups={EXPERTS: ranks.same})
    zero_engine.shard(model, nadamw(model), config, group=group)
    assert model[0].seen.item() == 1.0
    assert model[0].experts[0].seen.item() == 1.0 + ranks.index


@pytest.mark.cpu_only("where launches meet in order, circles through several groups are not seen")
@pytest.mark.ranks(4)
def test_ranks_that_wait_for_each_other_in_both_kinds_of_groups_are_told(group: Group) -> None:
    """One of them in a collective of all ranks, the other in one of those with its experts."""
    ranks = expert_ranks(dist.group.WORLD, 2)
    model = build_mixture(ranks).to(group.device)
    config = ZeroConfig(1, groups={EXPERTS: ranks.same})
    zero_engine.shard(model, nadamw(model), config, group=group)
    routes = find_sharded(model).routes
    where = routes.of_groups[EXPERTS].whole if group.rank == 2 else routes.whole
    with pytest.raises(DivergenceError):
        all_gather_json(group.rank, group=where)
        rely_on(where)
