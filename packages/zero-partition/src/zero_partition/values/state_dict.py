"""Weights in and out of a partitioned model, by the names the user knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from attrs import define
from torch import Tensor, nn
from zero_comm import collective

from zero_partition.errors import StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.plan.stages import Placement
from zero_partition.run.hooks import require_sharded
from zero_partition.run.sharded_model import ShardedModel, launch_buffer
from zero_partition.run.unit import ShardState, Unit
from zero_partition.stand_in import Bound, StateKind, end_empty_export, export_empty
from zero_partition.torch_private import checkpoint_call, plain_access

# What torch.distributed.checkpoint was asked for, where that is not the whole.
WITHOUT_FULL: Final = (
    "get_state_dict() of torch.distributed.checkpoint, without "
    "StateDictOptions(full_state_dict=True)"
)

Places = dict[str, tuple[Unit, int, int]]  # attribute of a module: its unit, buffer and position


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
    if any(unit.depth for unit in sharded.units):
        raise StateError("full_state_dict() was called while a forward is running")
    sharded.refuse_parked("full_state_dict()", StateKind.PARAMS)
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
    owned: dict[nn.Module, Places] = {}
    for unit in sharded.units:
        for module, attribute, buffer, position in unit.owners:
            if not _has_exact(unit) or unit.buffers[buffer].has_masters:
                owned.setdefault(module, {})[attribute] = (unit, buffer, position)
    for module, places in owned.items():
        loaded: set[str] = set()
        handles = [
            module.register_load_state_dict_pre_hook(_BeforeLoad(sharded, places, loaded)),
            module.register_load_state_dict_post_hook(_AfterLoad(loaded)),
        ]
        if not all(_has_exact(unit) for unit, _, _ in places.values()):
            exact: dict[str, Tensor] = {}
            handles += [
                module.register_state_dict_pre_hook(_BeforeExport(sharded, places, exact)),
                module.register_state_dict_post_hook(_AfterExport(sharded, places, exact)),
            ]
        sharded.removers += [handle.remove for handle in handles]


def _has_exact(unit: Unit) -> bool:
    """Whether its parameters rest whole, and as they are updated."""
    return unit.placement is Placement.REPLICATED and unit.codec is None


def _is_whole(place: tuple[Unit, int, int]) -> bool:
    unit, buffer_index, position = place
    is_exact = unit.state is ShardState.UNSHARDED and unit.codec is None
    return is_exact or position in unit.buffers[buffer_index].held


def _has_placeholders(sharded: ShardedModel, call: dict[str, Any] | None) -> bool:
    """Whether names are enough: torch.distributed.checkpoint asks for values."""
    return sharded.state_dict == "placeholders" and call is None


def _not_whole(places: Places) -> list[str]:
    """Attributes of what rests sharded, and what no context has gathered."""
    return [
        attribute
        for attribute, (unit, buffer_index, position) in places.items()
        if not _has_exact(unit) and position not in unit.buffers[buffer_index].held
    ]


@define(eq=False, slots=False)  # torch sets an attribute of its own on hooks of state_dict
class _BeforeExport(Bound):
    """Unshard what the module owns, or say what to call instead."""

    sharded: ShardedModel
    places: Places
    exact: dict[str, Tensor]  # by attribute: of units whose slots have what a codec leaves

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        units = {id(unit): unit for unit, _, _ in self.places.values()}.values()
        if self.sharded.exports_stand_ins:
            return
        call = checkpoint_call()
        if _has_placeholders(self.sharded, call):
            export_empty(module, () if keep_vars else _not_whole(self.places))
            return
        if all(map(_is_whole, self.places.values())):
            return
        if not self.sharded.gathers_state_dict and (
            call is None or not call["info"].full_state_dict
        ):
            name = prefix + next(iter(self.places))
            what = "state_dict()" if call is None else WITHOUT_FULL
            raise StateError(
                f"{what}: parameter {name!r}, as it is updated, is sharded over "
                f"{self.sharded.group.world_size} ranks, and gathering it needs all of them. Call "
                "zero_engine.full_state_dict(model) on every rank (rank 0 receives the weights; "
                "save_pretrained() takes them as state_dict=...), or set "
                "ZeroConfig(state_dict='gather') if every rank calls state_dict()."
            )
        self.sharded.refuse_parked("state_dict()", StateKind.PARAMS)
        if not self.sharded.gathers:
            self.sharded.finish_update()  # so that weights and optimizer state are of one step
        for unit in units:
            unit.unshard(self.sharded.schedule.pool)
        encoded = {id(unit): unit for unit in units if unit.codec is not None}
        values = {
            key: [launch_buffer(buffer)() for buffer in unit.buffers]
            for key, unit in encoded.items()
        }
        for attribute, (unit, buffer_index, position) in self.places.items():
            if id(unit) in encoded:
                self.exact[attribute] = values[id(unit)][buffer_index][position]


@define(eq=False, slots=False)
class _AfterExport(Bound):
    """Give the state dict memory of its own, and reshard."""

    sharded: ShardedModel
    places: Places
    exact: dict[str, Tensor]

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        end_empty_export(module)
        if self.sharded.exports_stand_ins:
            return
        call = checkpoint_call()
        goes_to_host = call is not None and call["info"].cpu_offload
        empty = _not_whole(self.places) if _has_placeholders(self.sharded, call) else ()
        for attribute, (unit, _, _) in self.places.items():
            if attribute in empty:
                continue
            value = self.exact.pop(attribute, None)
            if prefix + attribute in state:
                value = state[prefix + attribute].detach() if value is None else value
                device = "cpu" if goes_to_host else value.device
                state[prefix + attribute] = value.to(device, copy=True)
            if not self.sharded.schedule.is_in_use(unit):
                unit.reshard()


@define(eq=False)
class _BeforeLoad(Bound):
    """Write this rank's part of each value given, and leave torch nothing to copy."""

    sharded: ShardedModel
    places: Places
    loaded: set[str]

    def __call__(  # noqa: PLR0917 (torch passes them by position)
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
        self.sharded.refuse_while_gathered("load_state_dict()")
        self.sharded.begin_write()
        for attribute, (unit, buffer_index, position) in self.places.items():
            value = state.pop(prefix + attribute, None)
            if value is None:
                continue
            buffer = unit.buffers[buffer_index]
            expected = buffer.plan.params[position].shape
            if not isinstance(value, Tensor) or value.shape != expected:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                errors.append(
                    f"parameter {prefix + attribute!r}: expected shape {tuple(expected)}, got {got}"
                )
            elif value.is_meta or value.layout is not torch.strided:
                got = "meta tensor" if value.is_meta else f"layout {value.layout}"
                errors.append(
                    f"parameter {prefix + attribute!r}: expected a dense tensor with values, got "
                    f"{got}; convert or load it first"
                )
            else:
                buffer.fill(position, value)
            self.loaded.add(prefix + attribute)
        self.sharded.end_write()


@define(eq=False)
class _AfterLoad(Bound):
    """What was written to shards is not missing."""

    loaded: set[str]

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in self.loaded]
        self.loaded.clear()
