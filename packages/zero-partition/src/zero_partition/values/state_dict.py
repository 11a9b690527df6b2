"""Weights in and out of a partitioned model, by the names the user knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import collective

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.plan.stages import Placement
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import (
    ModelState,
    ParamRef,
    ShardedModel,
    launch_buffer,
    place_of,
)
from zero_partition.run.unit import ShardState, Unit
from zero_partition.stand_in import Bound, StateKind, end_empty_export, export_empty
from zero_partition.torch_private import checkpoint_call, plain_access

# What torch.distributed.checkpoint was asked for, where that is not the whole.
WITHOUT_FULL: Final = (
    "get_state_dict() of torch.distributed.checkpoint, without "
    "StateDictOptions(full_state_dict=True)"
)


@collective
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole model's `state_dict`, on rank 0, in host memory. Collective.

    At most one unit is whole at a time on the other ranks. Keys, buffers and extra state are what
    the model's own `state_dict` gives; tied parameters share one tensor. A delayed update comes in
    first, as by `finish_update`, so that weights and optimizer state are of one step.

    Returns:
        The state dict on rank 0, an empty dict elsewhere.

    Raises:
        StateError: Not sharded, a forward is running, or at stage 3 a state_dict hook of the model
            adds a tensor that is no parameter or buffer.
    """
    return gather_state_dict(require_sharded(model))


def gather_state_dict(
    sharded: ShardedModel, shards: Mapping[FlatBuffer, Tensor] | None = None
) -> dict[str, Any]:
    """As `full_state_dict`, with `shards` of some buffers in place of what rests. Collective."""
    sharded.require("full_state_dict()", StateKind.PARAMS, no=(ModelState.FORWARD,))
    sharded.finish_update()  # so that weights and optimizer state are of one step
    is_first = sharded.whole.rank == 0
    if sharded.is_exact and shards is None:
        state = sharded.model.state_dict() if is_first else {}
        copies: dict[Any, Tensor] = {}
        return {key: _to_host(value, copies) for key, value in state.items()}
    sharded.schedule.settle()
    sharded.exports_stand_ins = True
    try:
        with plain_access():
            state = sharded.model.state_dict()
    finally:
        sharded.exports_stand_ins = False
    values: dict[int, Tensor] = {}  # by the parameter's id; in host memory
    for unit in sharded.units:
        if not is_first and unit.exposure is not None and shards is None:
            continue  # rank 0 reads what it needs
        for param, value in _exact_values(unit, sharded, shards or {}):
            if is_first:
                values[id(param)] = value.detach().to("cpu", copy=True)
        unit.reshard()
    if sharded.exposure is not None:  # nobody leaves before rank 0 has read
        sharded.exposure.begin_write()
        sharded.exposure.end_write()
    if not is_first:
        return {}
    whole = {
        name: buffer.detach().to("cpu", copy=True)
        for name, buffer in sharded.model.named_buffers(remove_duplicate=False)
    }
    for name, param in sharded.model.named_parameters(remove_duplicate=False):
        if id(param) in values:  # by object: modules may have moved since they were sharded
            whole[name] = values[id(param)]
    return {key: _find(key, value, whole) for key, value in state.items()}


def _exact_values(
    unit: Unit, sharded: ShardedModel, shards: Mapping[FlatBuffer, Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Whole, as they rest: not what a codec leaves of them, which is what slots get. Collective."""
    if unit.codec is None:
        unit.unshard(sharded.schedule.pool)
    for buffer in unit.buffers:
        values: Iterable[Tensor] = buffer.params
        if buffer in shards:
            values = launch_buffer(buffer, shards[buffer].to(sharded.group.device))()
        elif unit.codec is not None:
            values = launch_buffer(buffer)()
        yield from zip(buffer.params, values, strict=True)


def _find(key: str, value: Any, whole: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Tensor) or key.endswith("_extra_state"):
        return value
    if key not in whole:
        raise StateError(
            f"full_state_dict(): {key!r} is neither a parameter nor a buffer of the model, so a "
            "state_dict hook of the model made it, possibly from sharded parameters; compute it "
            "from the result, or train at stage 2 or lower"
        )
    return whole[key]


def _to_host(value: Any, copies: dict[Any, Tensor]) -> Any:
    """A copy in host memory; one for all tensors that are the same memory, such as tied ones."""
    if not isinstance(value, Tensor):
        return value
    key = (value.data_ptr(), value.shape, value.stride()) if value.numel() else id(value)
    if key not in copies:
        copies[key] = value.detach().to("cpu", copy=True)
    return copies[key]


def install_state_dict_hooks(sharded: ShardedModel) -> None:
    """Give `state_dict` and `load_state_dict` a meaning where parameters rest sharded.

    Also where they rest whole, but as a codec leaves them. Where they have masters, what is loaded
    goes to both.
    """
    owned: dict[nn.Module, _ModuleHooks] = {}
    for unit in sharded.units:
        for module, attribute, index, position in unit.owners:
            place = place_of(unit.buffers[index].params[position], what="state_dict()")
            if not _has_exact(place) or place.buffer.has_masters:
                owned.setdefault(module, _ModuleHooks(sharded)).places[attribute] = place
    for module, hooks in owned.items():
        handles = [
            module.register_load_state_dict_pre_hook(hooks.before_load),
            module.register_load_state_dict_post_hook(hooks.after_load),
        ]
        if not all(map(_has_exact, hooks.places.values())):
            handles += [
                module.register_state_dict_pre_hook(hooks.before_export),
                module.register_state_dict_post_hook(hooks),
            ]
        sharded.removers += [handle.remove for handle in handles]


def _has_exact(place: ParamRef) -> bool:
    """Whether its unit's parameters rest whole, and as they are updated."""
    return place.unit.placement is Placement.REPLICATED and place.unit.codec is None


def _is_whole(place: ParamRef) -> bool:
    is_exact = place.unit.state is ShardState.UNSHARDED and place.unit.codec is None
    return is_exact or place.is_gathered


@define(eq=False, slots=False)  # torch sets an attribute of its own on hooks of state_dict
class _ModuleHooks(Bound):
    """Of a module that owns some parameters."""

    sharded: ShardedModel
    places: dict[str, ParamRef] = field(factory=dict, init=False)  # of those, by attribute
    _exact: dict[str, Tensor] = field(factory=dict, init=False)  # where slots have what is rounded
    _loaded: set[str] = field(factory=set, init=False)

    def before_export(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Unshard what the module owns, or say what to call instead."""
        sharded, call = self.sharded, checkpoint_call()
        if sharded.exports_stand_ins:
            return
        if sharded.state_dict == "placeholders" and call is None:
            export_empty(module, () if keep_vars else self._left_out(call))
            return
        if all(map(_is_whole, self.places.values())):
            return
        if not sharded.gathers_state_dict and (call is None or not call["info"].full_state_dict):
            name = prefix + next(iter(self.places))
            what = "state_dict()" if call is None else WITHOUT_FULL
            raise StateError(
                f"{what}: parameter {name!r}, as it is updated, is sharded over "
                f"{sharded.group.world_size} ranks, and gathering it needs all of them. Call "
                "zero_engine.full_state_dict(model) on every rank (rank 0 receives the weights; "
                "save_pretrained() takes them as state_dict=...), or set "
                "ZeroConfig(state_dict='gather') if every rank calls state_dict()."
            )
        sharded.require("state_dict()", StateKind.PARAMS)
        if not sharded.gathers:
            sharded.finish_update()  # so that weights and optimizer state are of one step
        units = dict.fromkeys(place.unit for place in self.places.values())
        for unit in units:
            unit.unshard(sharded.schedule.pool)
        rounded = [buffer for unit in units if unit.codec is not None for buffer in unit.buffers]
        values = {buffer: launch_buffer(buffer)() for buffer in rounded}
        for attribute, place in self.places.items():
            if place.buffer in values:
                self._exact[attribute] = values[place.buffer][place.position]

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        """Give the state dict memory of its own, and reshard."""
        end_empty_export(module)
        if self.sharded.exports_stand_ins:
            return
        call = checkpoint_call()
        goes_to_host = call is not None and call["info"].cpu_offload
        left_out = self._left_out(call)
        for attribute, place in self.places.items():
            if attribute in left_out:
                continue
            name = prefix + attribute
            exact = self._exact.pop(attribute, None)
            if name in state:
                value = state[name].detach() if exact is None else exact
                state[name] = value.to("cpu" if goes_to_host else value.device, copy=True)
            if not self.sharded.schedule.is_in_use(place.unit):
                place.unit.reshard()

    def before_load(  # noqa: PLR0917 (torch passes them by position)
        self,
        module: nn.Module,
        state: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Write this rank's part of each value given, and leave torch nothing to copy."""
        self.sharded.require("load_state_dict()", no=(ModelState.GATHERED,))
        self.sharded.begin_write()
        for attribute, place in self.places.items():
            name, expected = prefix + attribute, place.plan.shape
            value = state.pop(name, None)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != expected:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                errors.append(f"parameter {name!r}: expected shape {tuple(expected)}, got {got}")
            elif value.is_meta or value.layout is not torch.strided:
                got = "meta tensor" if value.is_meta else f"layout {value.layout}"
                errors.append(
                    f"parameter {name!r}: expected a dense tensor with values, got {got}; convert "
                    "or load it first"
                )
            else:
                place.buffer.fill(place.position, value)
            self._loaded.add(name)
        self.sharded.end_write()

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        """What was written to shards is not missing."""
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in self._loaded]
        self._loaded.clear()

    def _left_out(self, call: dict[str, Any] | None) -> set[str]:
        """Names of which placeholders are enough; torch.distributed.checkpoint asks for values."""
        if self.sharded.state_dict != "placeholders" or call is not None:
            return set()
        return {n for n, p in self.places.items() if not _has_exact(p) and not p.is_gathered}
