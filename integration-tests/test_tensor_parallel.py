"""Models that torch has split by DTensor, sharded over the ranks that have the same part."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from io import BytesIO
from typing import Any

import attrs
import pytest
import torch
import zero_ckpt
import zero_engine
from parity import ZeroConfig
from split_models import (
    LENGTH,
    PLANS,
    VOCABULARY,
    Model,
    adamw,
    batch_of,
    build_split,
    loss_of,
    mesh_of,
    train_split,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import ConfigError, Offload, Precision, Wire
from zero_partition import PartitionError, StateError, ZeroRedundancyOptimizer


def _whole(local: Tensor, param: Tensor) -> Tensor:
    """What DistributedDataParallel has left of a DTensor, whole."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(local.detach(), param.device_mesh, param.placements).full_tensor()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_trains_as_under_ddp(group: Group, plan: str, stage: int) -> None:
    """Two ranks have each part: the bits of torch's own two dimensions."""
    mesh = mesh_of(group)
    plain, _ = build_split(plan, mesh)
    ddp = DistributedDataParallel(plain, device_mesh=mesh["data"])  # which has other parameters
    trained = dict(plain.named_parameters())
    expected = train_split(ddp, adamw(ddp), mesh)

    model, optimizer = build_split(plan, mesh)
    params = dict(model.named_parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    assert all(param is params[name] for name, param in model.named_parameters())
    found = train_split(model, optimizer, mesh)
    assert found == expected, f"{found} and not {expected}"
    for name, param in model.named_parameters():
        assert equal(zero_engine.full_param(param), _whole(trained[name], param)), name


# ---- All gradients together ----


def _is_split(param: Tensor) -> bool:
    return isinstance(param, DTensor)


def _multiply_each(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad *= 3.0


IN_PLACE: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "*=": _multiply_each,
    "div_": lambda params: [param.grad.div_(1 / 3) for param in params],  # as pipelines do
    "mul_ by a tensor": lambda params: [param.grad.mul_(torch.tensor(3.0)) for param in params],
    "_foreach_mul_": lambda params: [
        torch._foreach_mul_([param.grad for param in params if _is_split(param) is each], 3.0)
        for each in (True, False)  # which torch does not mix
    ],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("stage", range(4))
def test_all_elements_of_gradients_may_be_multiplied(group: Group, stage: int, how: str) -> None:
    """Refused at stages 1 to 3, as a DTensor calls an operator and not torch's method."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    loss_of(model, batch_of(0, mesh)).backward()
    expected = [3.0 * zero_engine.full_grad(param) for param in model.parameters()]
    IN_PLACE[how]([*model.parameters()])
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert_close(zero_engine.full_grad(param), grad)


def _plain(step: int = 0) -> tuple[nn.Module, list[Tensor]]:
    """The unsplit model, and its gradients of both ranks' batches."""
    torch.manual_seed(0)
    model = Model()
    for data in range(2):
        torch.manual_seed(100 * step + data)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        (loss_of(model, tokens) / 2).backward()
    return model, [param.grad for param in model.parameters()]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_that_of_the_unsplit_model(group: Group, plan: str, stage: int) -> None:
    """Parts are added up over the mesh, and what each of its ranks has counts once."""
    mesh = mesh_of(group)
    model, optimizer = build_split(plan, mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    loss_of(model, batch_of(0, mesh)).backward()
    plain, grads = _plain()
    for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
        assert_close(zero_engine.full_grad(param), grad, msg=name)
    for order in (2.0, 1.0, float("inf")):
        expected = nn.utils.get_total_norm(grads, order)
        assert_close(zero_engine.clip_grad_norm_(model, 1e9, order), expected)
    one = model.blocks[0].up.weight
    alone = zero_engine.full_grad(one).norm()
    assert_close(zero_engine.clip_grad_norm_([one], 1e9), alone)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    zero_engine.clip_grad_norm_(model, 0.1)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(zero_engine.full_grad(param), other.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_on_one_rank_skips_the_step_on_all(group: Group, stage: int) -> None:
    """Else ranks of the mesh go on with other replicated parameters."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    scaler = torch.amp.GradScaler(group.device.type, init_scale=4.0)
    before = zero_engine.full_param(model.blocks[0].up.weight).clone()
    scaler.scale(loss_of(model, batch_of(0, mesh))).backward()
    part = zero_engine.local_grad(model.blocks[0].up.weight)
    # At stage 0 each data-parallel rank has the gradient that was reduced.
    if group.rank in ((1,) if stage else (1, 3)):
        part.view(-1)[0] = float("inf")
    zero_engine.set_local_grad(model.blocks[0].up.weight, part)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert equal(zero_engine.full_param(model.blocks[0].up.weight), before)


# ---- Values ----


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", range(4))
def test_a_state_dict_is_whole_over_both_dimensions(group: Group, plan: str, stage: int) -> None:
    """On the first rank of each data-parallel group, as of any model."""
    mesh = mesh_of(group)
    model, optimizer = build_split(plan, mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    names = model.state_dict()  # at stage 3 no more than that, of the DTensors' shapes
    assert all(names[name].shape == param.shape for name, param in model.named_parameters())
    found = zero_engine.full_state_dict(model)
    torch.manual_seed(0)
    expected = Model().state_dict()
    if mesh.get_local_rank("data"):
        assert found == {}
        return
    assert list(found) == list(expected)
    assert all(type(value) is Tensor for value in found.values())
    assert all(equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_is_a_dtensor_whatever_its_memory(group: Group, stage: int) -> None:
    """Its mesh, placements and shape are those that torch gave it, at rest and in its module."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    weight, seen = model.blocks[0].up.weight, []
    facts = weight.placements, weight.device_mesh, weight.shape, weight.dtype, weight.device
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    model.blocks[0].up.register_forward_hook(lambda up, *_: seen.append(up.weight))
    train_split(model, optimizer, mesh)
    for each in (weight, seen[-1], model.blocks[0].up.weight):
        assert each is weight
        assert isinstance(each, DTensor)
        assert isinstance(each, nn.Parameter)
        assert (each.placements, each.device_mesh, each.shape, each.dtype, each.device) == facts
    part = zero_engine.local_param(weight)
    held = torch.tensor(part.numel())
    torch.distributed.all_reduce(held, group=mesh.get_group("data"))
    assert held == weight.numel() // 2 * (1 if stage else 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_is_used_outside_its_module(group: Group, stage: int) -> None:
    """As losses do; values and gradients are those of the module's own use."""
    mesh = mesh_of(group)

    def penalty(model: nn.Module) -> Tensor:
        square = model.blocks[0].up.weight.square().sum() + model.blocks[1].out.weight.sum()
        return square.full_tensor() if isinstance(square, DTensor) else square

    losses, grads = [], []
    for is_sharded in (False, True):
        model, optimizer = build_split("tensor", mesh)
        if is_sharded:
            zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
        loss = loss_of(model, batch_of(0, mesh)) + penalty(model)
        loss.backward()
        losses.append(loss.item())
        weight = model.blocks[0].up.weight
        if is_sharded:
            grads.append(zero_engine.full_grad(weight))
        else:
            local = weight.grad.to_local()
            torch.distributed.all_reduce(local, group=mesh.get_group("data"))
            mean = DTensor.from_local(local / 2, mesh["tensor"], weight.placements)
            grads.append(mean.full_tensor())
    assert losses[0] == losses[1]
    assert_close(grads[1], grads[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_is_plain_again_after_unshard(group: Group, stage: int) -> None:
    """DTensors and an optimizer over them, as torch's own two dimensions would have them."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    params = [*model.parameters()]
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    train_split(model, optimizer, mesh)
    expected = [zero_engine.full_param(param) for param in model.parameters()]
    zero_engine.unshard(model, optimizer)

    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert optimizer.param_groups[0]["params"] == params
    for param, value in zip(params, expected, strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert equal(whole, value)
        moment = optimizer.state[param]["exp_avg"]
        assert type(moment) is type(param.detach())
        assert moment.shape == param.shape
    loss_of(model, batch_of(0, mesh)).backward()
    optimizer.param_groups[0]["foreach"] = False  # torch's takes no DTensors beside other tensors
    optimizer.step()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_may_be_moved_to_where_it_is(group: Group, stage: int) -> None:
    """As trainers do before each phase; what would convert it is refused."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    twin = build_split("tensor", mesh)
    zero_engine.shard(*twin, ZeroConfig(stage), group=mesh["data"])
    loss_of(model, batch_of(0, mesh)).backward()
    loss_of(twin[0], batch_of(0, mesh)).backward()
    params = [*model.parameters()]
    model.to(group.device).eval()
    with torch.no_grad():
        model(batch_of(1, mesh))
    model.train()
    with pytest.raises(StateError, match="before shard"):
        model.half()
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert train_split(model, optimizer, mesh) == train_split(*twin, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_that_is_deleted_is_gone(group: Group, stage: int) -> None:
    """A part and its DTensor refer to each other."""
    mesh = mesh_of(group)
    model, optimizer = build_split("sequence", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    train_split(model, optimizer, mesh)
    left = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(each() is not None for each in left)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("first", range(4))
def test_a_model_is_sharded_again_at_another_stage(group: Group, first: int) -> None:
    """With its optimizer, whose state goes on: the curve of one stage."""
    mesh = mesh_of(group)
    kept = build_split("tensor", mesh)
    zero_engine.shard(*kept, ZeroConfig(1), group=mesh["data"])
    model, optimizer = build_split("tensor", mesh)
    for stage in (first, 3 - first):
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
        assert train_split(model, optimizer, mesh) == pytest.approx(
            train_split(*kept, mesh), rel=1e-5
        )


# ---- With everything else ----


def _checkpointed(model: nn.Module) -> None:
    """Recompute each block in backward."""
    for block in model.blocks:
        block.forward = partial(zero_ckpt.checkpoint, block.forward)


# Fields of ZeroConfig, and the difference allowed. The first four are for stage 1, too.
BESIDES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32 masters": ({"precision": Precision()}, 0.0),
    "bf16": ({"precision": Precision(params=torch.bfloat16)}, 3e-2),
    "state on the host": ({"offload": Offload(optimizer="host")}, 1e-5),
    "coded gradients": ({"wire": Wire(gradients="int8", levels=2)}, 3e-2),
    "all on the host": ({"offload": Offload(optimizer="host", params="host")}, 1e-5),
    "sanitized": ({"sanitize": True}, 0.0),
    "one unit at a time": ({"window": 1, "prefetch_numel": 0}, 0.0),
    "units of one layer": ({"units": ["blocks.0.up", "blocks.1.up", "head"]}, 0.0),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stage", "name"),
    [*((3, name) for name in BESIDES), *((1, name) for name in [*BESIDES][:4])],
)
@pytest.mark.drawn(2)
def test_options_do_what_they_do_without(group: Group, name: str, stage: int) -> None:
    """No option knows that its parameters are parts."""
    options, difference = BESIDES[name]
    mesh, losses = mesh_of(group), []
    for more in ({}, options):
        model, optimizer = build_split("sequence", mesh)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, **more), group=mesh["data"])
        losses.append(train_split(model, optimizer, mesh, max_norm=1.0))
    assert losses[1] == pytest.approx(losses[0], rel=difference, abs=0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_batches_are_accumulated_and_activations_recomputed(group: Group, stage: int) -> None:
    """Bit for bit what DistributedDataParallel does."""
    mesh, found = mesh_of(group), []
    for is_sharded in (False, True):
        model, optimizer = build_split("tensor", mesh)
        _checkpointed(model)
        called: nn.Module = model
        if is_sharded:
            zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
        else:
            called = DistributedDataParallel(model, device_mesh=mesh["data"])
            optimizer = adamw(called)
        losses = []
        for step in range(4):
            waits = zero_engine.no_sync if is_sharded else DistributedDataParallel.no_sync
            with nullcontext() if step % 2 else waits(called):
                loss = loss_of(called, batch_of(step, mesh))
                loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_an_average_is_whole_over_both_dimensions(group: Group, stage: int) -> None:
    """ShardedAverage follows what rests, whatever it is part of."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    average = zero_engine.ShardedAverage(model, decay=0.5)
    average.update()
    first = zero_engine.full_param(model.blocks[0].up.weight).clone()
    train_split(model, optimizer, mesh)
    last = zero_engine.full_param(model.blocks[0].up.weight)
    average.update()
    found = average.full_state_dict()
    if mesh.get_local_rank("data") == 0:
        assert_close(found["blocks.0.up.weight"], (first + last) / 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_are_read_and_written(group: Group, stage: int) -> None:
    """Each call's shape is that of the DTensor."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    train_split(model, optimizer, mesh)
    for param in (model.blocks[0].up.weight, model.blocks[0].down.weight, model.embed.weight):
        value = torch.arange(float(param.numel())).view(param.shape)
        zero_engine.set_full_param(param, value)
        assert equal(zero_engine.full_param(param), value)
        zero_engine.set_full_optimizer_state(param, "exp_avg", value + 1)
        assert equal(zero_engine.full_optimizer_state(param, "exp_avg"), value + 1)
        with zero_engine.GatheredParameters(param):
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            assert equal(whole, value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_two_batches_may_have_one_backward(group: Group, stage: int) -> None:
    """Nodes of both calls save DTensors; what was forwarded only is dropped."""
    mesh, found = mesh_of(group), []
    for at in (1, stage):
        model, optimizer = build_split("sequence", mesh)
        zero_engine.shard(model, optimizer, ZeroConfig(at), group=mesh["data"])
        loss_of(model, batch_of(0, mesh))
        (loss_of(model, batch_of(1, mesh)) + loss_of(model, batch_of(2, mesh))).backward()
        found.append([zero_engine.full_grad(param) for param in model.parameters()])
    assert all(equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_whole_gradients_of_many_are_updated(group: Group, stage: int) -> None:
    """By a function of the DTensor and the whole gradient."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    loss_of(model, batch_of(0, mesh)).backward()
    before = [zero_engine.full_grad(param).clone() for param in model.parameters()]
    zero_engine.update_full_grads(
        model.parameters(), lambda param, grad: grad.view(param.shape).mul(2)
    )
    after = [zero_engine.full_grad(param) for param in model.parameters()]
    assert all(equal(new, 2 * old) for new, old in zip(after, before, strict=True))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(3))
def test_a_state_dict_is_saved_by_torch(group: Group, stage: int) -> None:
    """As that of the split model: of DTensors, in a file no larger."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    files = [BytesIO(), BytesIO()]
    torch.save(model.state_dict(), files[0])
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    torch.save(model.state_dict(), files[1])
    assert len(files[0].getvalue()) == len(files[1].getvalue())
    files[1].seek(0)
    for name, value in torch.load(files[1], weights_only=False).items():
        param = model.get_parameter(name)
        assert type(value) is (DTensor if isinstance(param, DTensor) else Tensor)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert equal(whole, zero_engine.full_param(param))


# ---- What is refused ----


def _sharded_by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh["data"])


def _over_those_ranks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["data"], {"head": ColwiseParallel()})


def _of_two_meshes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel()})
    other = init_device_mesh(mesh.device_type, (2, 2, 1), mesh_dim_names=("a", "b", "one"))
    return parallelize_module(model, other["one"], {"embed": ColwiseParallel()})


def _of_partial_sums(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    weight = DTensor.from_local(model.head.weight.detach(), mesh["tensor"], [Partial()])
    model.head.weight = nn.Parameter(weight)
    return model


REFUSED: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], str]] = {
    "fully_shard": (_sharded_by_torch, r"as it is before .*fully_shard\(\)"),
    "the ranks to shard over": (_over_those_ranks, r"ranks of that mesh, .*mesh\['data'\]"),
    "two meshes": (_of_two_meshes, "on one mesh of one dimension"),
    "partial sums": (_of_partial_sums, "redistribute it first"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", REFUSED)
def test_a_dtensor_that_cannot_be_sharded_is_refused(group: Group, name: str) -> None:
    """With its name and what would do; the model is as it was."""
    split, says = REFUSED[name]
    mesh = mesh_of(group)
    model = split(Model(), mesh)
    optimizer = adamw(model)
    params = [*model.parameters()]
    with pytest.raises(PartitionError, match=says):
        zero_engine.shard(model, optimizer, ZeroConfig(3), group=mesh["data"])
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert optimizer.param_groups[0]["params"] == params
    assert all(type(p._local_tensor) is Tensor for p in params if isinstance(p, DTensor))


OF_WHOLE_TENSORS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "Muon": (lambda params: torch.optim.Muon(params, lr=1e-2), "other parts of it"),
    "LBFGS": (torch.optim.LBFGS, "outside param_groups.* without DTensors"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", OF_WHOLE_TENSORS)
def test_an_optimizer_of_whole_tensors_is_refused(group: Group, name: str, stage: int) -> None:
    """It would take a part for the whole, which is another step: at stage 0, too."""
    make, says = OF_WHOLE_TENSORS[name]
    mesh = mesh_of(group)
    model, _ = build_split("tensor", mesh)
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    with pytest.raises(PartitionError, match=says):
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])


@pytest.mark.ranks(4)
def test_what_cannot_follow_parts_is_refused_by_name(group: Group) -> None:
    """The compiler, and the comparison with DistributedDataParallel."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    model.blocks[1].compile(backend="eager")
    with pytest.raises(PartitionError, match=r"module 'blocks\.1' was compiled"):
        zero_engine.shard(model, optimizer, ZeroConfig(3), group=mesh["data"])
    with pytest.raises(ConfigError, match="as it is before that"):
        zero_engine.verify(
            lambda: build_split("tensor", mesh)[0],
            adamw,
            [batch_of(0, mesh)],
            ZeroConfig(3),
            loss=loss_of,
            group=mesh["data"],
        )


@pytest.mark.ranks(4)
def test_an_optimizer_alone_that_shards_is_refused(group: Group) -> None:
    """It deals whole parameters, and sends them as plain memory."""
    mesh = mesh_of(group)
    model, _ = build_split("tensor", mesh)
    with pytest.raises(PartitionError, match=r"got a DTensor; shard its model .*stage=1"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group=mesh["data"], lr=1e-2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_own_clipping_says_what_to_call(group: Group, stage: int) -> None:
    """It would find no gradient of a part, and clip nothing."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    loss_of(model, batch_of(0, mesh)).backward()
    with pytest.raises(StateError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    optimizer.step()


@pytest.mark.drawn(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_plan_counts_this_ranks_parts(group: Group, stage: int) -> None:
    """The bytes that a report of the sharded model says."""
    mesh = mesh_of(group)
    model, optimizer = build_split("tensor", mesh)
    planned = zero_engine.plan(
        model,
        ZeroConfig(stage),
        world_size=mesh["data"],
        optimizer=optimizer,
        device=mesh.device_type,
        rank=mesh.get_local_rank("data"),
    )
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mesh["data"])
    train_split(model, optimizer, mesh)
    found = attrs.asdict(zero_engine.memory_report(model))
    assert found == attrs.asdict(planned.memory.at_rest)

    with suppress(PartitionError):  # of what is sharded already; it must change nothing
        zero_engine.plan(model, ZeroConfig(stage), world_size=8, device="cpu")
    twin = build_split("tensor", mesh)
    zero_engine.shard(*twin, ZeroConfig(stage), group=mesh["data"])
    train_split(*twin, mesh)
    assert train_split(model, optimizer, mesh) == train_split(*twin, mesh)
