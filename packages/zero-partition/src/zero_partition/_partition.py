"""partition(): plan, agree, distribute, hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import asdict
from torch import nn
from zero_comm import Group, check_agreement, collective

from ._adopt import check_adoptable, describe_early, release_modules
from ._buffer_plan import UnitPlan
from ._content import check_content, check_not_wrapped
from ._cut import CutChoice
from ._distribute import distribute, expose_shards, first_index, placements_of
from ._errors import PartitionError
from ._gradient_home import AbstractGradientHome
from ._guards import StateDictKind
from ._hooks import find_sharded, install_module_hooks, install_norm_hooks, install_optimizer_hooks
from ._limits import Limits
from ._model_plan import as_they_hold, check_masters, plan_model_units
from ._optimizer import check_optimizer, describe_optimizer, param_group_of, shard_optimizer
from ._placement import STAGES, Placement, Placements, Stage
from ._precision import AS_IT_IS, Precision
from ._purposes import purposes_of
from ._reducer import GradientReducer
from ._residence import Residence
from ._schedule import Schedule
from ._shard_home import AbstractShardHome
from ._sharded_model import ShardedModel
from ._state_dict import install_state_dict_hooks
from ._updated_state import hand_over_state
from ._updater import AbstractUpdater
from ._wire import AS_ONE, Wire

_DEFAULT_LIMITS: Final = Limits()


@collective
def partition(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Group,
    placements: Placements = STAGES[Stage.THREE],
    units: Sequence[str] | None = None,
    max_unit_bytes: int = 512 * 2**20,
    min_unit_bytes: int = 2**16,
    limits: Limits = _DEFAULT_LIMITS,
    small_param_numel: int = 0,
    max_small_numel: int | None = None,
    precision: Precision = AS_IT_IS,
    cut: CutChoice = None,
    state_dict: StateDictKind = "raise",
    home: AbstractShardHome | None = None,
    updater: AbstractUpdater | None = None,
    gradient_home: AbstractGradientHome | None = None,
    wire: Wire = AS_ONE,
    timeout_s: float = 60.0,
) -> ShardedModel:
    """Distribute a model's parameters, gradients and optimizer state over a group. Collective.

    The module and the optimizer stay the user's own objects and are changed in place. All ranks
    take the values of rank 0.

    Args:
        model: On the group's device; its parameters dense and contiguous.
        optimizer: Any torch optimizer built from the model's parameters, new or used. One that
            looks at more than single elements says so by `needs_cut`, is one of torch's, or is
            tried on small tensors.
        group: The ranks that train it.
        placements: What rests sharded; see `STAGES`. On one rank parameters rest whole.
        units: Names of the modules that are unsharded and reduced as one; chosen when None.
        max_unit_bytes: What is larger is split where it can be, when units are chosen.
        min_unit_bytes: Blocks that are smaller stay with what encloses them.
        limits: How much may be whole at a time.
        small_param_numel: Where parameters rest sharded, those of at most this many elements rest
            whole on every rank all the same.
        max_small_numel: Elements of all those together: the first of the model that fit; no bound
            when None.
        precision: Dtypes of parameters, masters and gradients; as they are when left out.
        cut: Where parameters may be cut: a `Cut` or its name, a mapping from names or patterns to
            cuts, or a function of name and parameter. What it leaves open is `cut` in the param
            group, or what the optimizer needs, or anywhere. At stage 0 nothing is cut.
        state_dict: What `state_dict()` does about what is sharded: "raise"; "gather", for model and
            optimizer, which every rank must then call; or "placeholders", empty tensors of the
            model's parameters, as DeepSpeed's has, while the optimizer's raises.
        home: Where shards of parameters that rest sharded are kept; on the device when None. It and
            `updater` are the model's from now on; where this raises, the caller ends them.
        updater: Keeps the optimizer's state and masters, and steps shards in its place; the
            optimizer does, on the device, when None. At stage 0 nothing can rest elsewhere.
        gradient_home: Where reduced gradients wait for the updater; on the device when None.
        wire: Which of the ranks exchange what, and in how many bits; all with all, and exact, when
            left out.
        timeout_s: How long to wait for ranks that do not call this, in seconds.

    Returns:
        What the functions of this package take: `clip_grad_norm_`, `memory_report`, ...

    Raises:
        PartitionError: The model or the optimizer cannot be partitioned as it is.
        zero_comm.AgreementError: Ranks hold different models, optimizers or settings.
        zero_comm.GroupMismatchError: The ranks are no whole number of nodes, and `wire` needs them.
        zero_comm.CommError: A rank did not take part in time.
    """
    check_not_wrapped(model, optimizer)
    wire.check(placements, has_home=home is not None)
    routes = wire.routes(group, timeout_s=timeout_s)
    group = routes.shards
    placements, precision = as_they_hold(
        placements,
        precision,
        world_size=group.world_size,
        has_home=home is not None,
        has_optimizer=optimizer is not None,
    )
    _check(model, optimizer, routes.whole, placements, precision)
    residence = Residence(routes, home, updater, gradient_home, precision)
    residence.check(optimizer, placements)
    plans = plan_model_units(
        model,
        optimizer,
        world_size=group.world_size,
        placements=placements,
        units=units,
        max_unit_bytes=max_unit_bytes,
        min_unit_bytes=min_unit_bytes,
        small_param_numel=small_param_numel,
        max_small_numel=max_small_numel,
        cut=cut,
        precision=precision,
    )
    facts = _describe(plans, placements, limits) | describe_optimizer(optimizer)
    facts |= _describe_buffers(model) | {"state_dict()": state_dict}
    facts["precision"] = str(precision)
    facts["parameters rest elsewhere"] = type(home).__name__
    facts["optimizer state rests elsewhere"] = type(updater).__name__
    facts |= describe_early(model) | wire.facts(routes)
    check_agreement(facts, group=routes.whole, timeout_s=timeout_s)

    resting = placements_of(plans, placements.params)
    residence.prepare(
        plans,
        resting,
        first_index(plans),
        optimizer=optimizer,
        group_of=_group_of_names(model, optimizer),
        timeout_s=timeout_s,
    )
    runtime = distribute(model, plans, routes, resting, residence, wire=wire)
    if optimizer is not None and placements.optim is Placement.SHARDED:
        shard_optimizer(optimizer, runtime)
        if updater is not None:
            hand_over_state(optimizer, updater, runtime)
    sharded = ShardedModel(
        model=model,
        routes=routes,
        placements=placements,
        units=runtime,
        schedule=Schedule.plan(runtime, limits=limits, device=group.device, home=home),
        reducer=GradientReducer.plan(
            runtime,
            routes=routes,
            placement=placements.grads,
            shards_state=placements.optim is Placement.SHARDED,
            precision=precision,
            home=gradient_home,
            wire=wire,
        ),
        residence=residence,
        optimizer=optimizer,
        exposure=expose_shards(runtime, group),
        state_dict=state_dict,
        input_dtype=precision.params if precision.cast_inputs else None,
        output_dtype=precision.outputs,
    )
    tags = {"control_tag": sharded.reducer.control_tag, "access_tag": sharded.access_tag}
    for each in routes.groups:
        each.explain(purposes_of(runtime, **tags))
    release_modules(model)
    install_module_hooks(model, sharded)
    for norm in precision.kept_norms(model):
        sharded.removers += install_norm_hooks(norm)
    install_state_dict_hooks(sharded)
    if optimizer is not None:
        install_optimizer_hooks(optimizer, sharded)
    return sharded


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
    placements: Placements,
    precision: Precision,
) -> None:
    """Raise PartitionError for what can be seen without other ranks."""
    if any(find_sharded(module) is not None for module in model.modules()):
        raise PartitionError(
            f"this {type(model).__name__}, or a module inside it, is sharded already; shard() a "
            "model once, before wrapping or copying it"
        )
    _check_devices(model, group)
    check_adoptable(model, group)
    check_content(model)
    check_masters(model, placements, precision)
    if optimizer is not None:
        check_optimizer(optimizer, model, shards_state=placements.optim is Placement.SHARDED)


def _check_devices(model: nn.Module, group: Group) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_meta_param = tensor.is_meta and isinstance(tensor, nn.Parameter)  # plan_units says
        if tensor.device != group.device and not is_meta_param:
            raise PartitionError(
                f"{name!r} is on {tensor.device}, but the group communicates on {group.device} "
                f"(rank {group.rank}); move the model with model.to({str(group.device)!r}) before "
                "building the optimizer"
            )


def _group_of_names(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Param group by name of the parameter, for each of its names."""
    group_of = param_group_of(optimizer)
    named = model.named_parameters(remove_duplicate=False)
    return {name: group_of[id(param)] for name, param in named if id(param) in group_of}


def _describe_buffers(model: nn.Module) -> dict[str, str]:
    return {
        f"buffer {name!r}": f"shape {tuple(buffer.shape)}, {buffer.dtype}"
        for name, buffer in model.named_buffers()
    }


def _describe(plans: Sequence[UnitPlan], placements: Placements, limits: Limits) -> dict[str, str]:
    facts = {
        "placement of parameters": placements.params.value,
        "placement of gradients": placements.grads.value,
        "placement of optimizer state": placements.optim.value,
    } | {name: str(value) for name, value in asdict(limits).items()}
    for unit in plans:
        for buffer in unit.buffers:
            for param in buffer.params:
                facts[f"parameter {param.name!r}"] = (
                    f"shape {tuple(param.shape)}, {param.dtype}, "
                    f"{'trainable' if param.trainable else 'frozen'}, unit {unit.name!r}, "
                    f"cut {param.cut}"
                )
    return facts
