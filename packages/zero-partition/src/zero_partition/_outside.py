"""Parameters that are used outside their unit's forward: their values, gathered one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from attrs import define, field
from torch import Tensor

from ._at_rest import AtRestData
from ._errors import AtRestError, StateError
from ._parked import StateKind
from ._places import Place
from ._shard_state import ShardState
from ._torch_compat import is_in_backward, modules_being_called
from ._whole import as_computed, launch_whole

if TYPE_CHECKING:
    from ._sharded_model import ShardedModel
    from ._unit import Unit

# NOTE(outside): what is used outside its unit does not go into the unit's slot, which the unit's
# forward and backward take and leave by their own rules. It gets memory of its own, which autograd
# keeps for as long as a graph needs it, and it enters the graph through a node of ours: the
# operation saves that memory and never the Parameter, whose values are elsewhere in backward.

# NOTE(parts): `generate()` of an encoder-decoder model calls the encoder alone, `peft` calls the
# model inside, CLIP's `get_image_features` one tower. Such a call is a forward as much as the
# model's: all ranks make it, or units inside would have nobody to gather with. Hooks on every
# module that is no unit would cost each of their calls; here the stack is asked instead, and only
# when the answer would be an error. Nothing is kept: no hook of ours says when such a call ends.

_PATIENCE_S: Final = 60.0  # outside forward, some ranks alone may have got here


@define(eq=False)
class OutsideUses:
    """Whole values that were gathered for such uses, until nobody can ask for them again."""

    sharded: ShardedModel
    num_gathers: int = field(default=0, init=False)
    _values: dict[tuple[int, int, int], Tensor] = field(factory=dict, init=False)
    _in_flight: dict[tuple[int, int, int], Callable[..., Tensor]] = field(factory=dict, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that are kept here."""
        return sum(value.nbytes for value in self._values.values())

    def launch(self, place: Place) -> None:
        """Launch the gather ahead of the use. Collective."""
        self.sharded.refuse_parked("a gather ahead of a forward", StateKind.PARAMS)
        is_whole = place.unit.state is ShardState.UNSHARDED or place.position in place.buffer.held
        if not is_whole and place.key not in self._values and place.key not in self._in_flight:
            self.num_gathers += 1
            self._in_flight[place.key] = launch_whole(place, as_computed(place))

    def value(self, place: Place, tensor: Tensor, what: str, *, needs_grad: bool) -> Tensor:
        """What stands in for a parameter at rest, or its `data`, in a call of `what`. Collective.

        Args:
            place: Which parameter.
            tensor: The object that was used.
            what: The function that is called with it.
            needs_grad: The call is recorded by autograd.
        """
        whole = self._whole(place, what, needs_grad=needs_grad)
        if isinstance(tensor, AtRestData) or not (needs_grad and tensor.requires_grad):
            return whole
        return _Enter.apply(tensor, whole, place, place.unit.version)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop the values; graphs keep what they need. Waits for gathers nobody needed."""
        while self._in_flight:  # one at a time: what fails is not waited for again
            self._in_flight.popitem()[1]()
        self._values.clear()

    def refuse_write(self, place: Place, what: str) -> NoReturn:
        """A parameter at rest was to be written."""
        rank = self.sharded.whole.rank
        raise AtRestError(
            f"{what}() would write to parameter {place.name!r} while it rests sharded, and the "
            f"change would be lost (rank {rank}). On every rank: `with GatheredParameters(param, "
            "modifier_rank=0): ...`, set_full_param(param, value), or load_state_dict()"
        )

    def _whole(self, place: Place, what: str, *, needs_grad: bool) -> Tensor:
        self.sharded.refuse_parked(f"{what}() of parameter {place.name!r}", StateKind.PARAMS)
        held = place.buffer.held.get(place.position)
        if held is not None:
            return held
        key, is_inside = place.key, self.sharded.forwards > 0 or is_in_backward()
        is_inside = is_inside or any(unit.depth for unit in self.sharded.units)
        if key in self._values:
            return self._values[key]
        is_kept = is_inside or needs_grad
        is_alone = self.sharded.group.world_size == 1 or place.unit.copies is not None
        if not is_kept and not is_alone and not self._is_called_in_part():
            self._refuse_read(place, what)
        if key not in self._in_flight:
            self.num_gathers += 1
            self._in_flight[key] = launch_whole(place, as_computed(place))
        wait = self._in_flight.pop(key)
        value = wait() if is_inside else wait(timeout_s=_PATIENCE_S)
        if is_kept:
            self._values[key] = value
        return value

    def _is_called_in_part(self) -> bool:
        """Whether some module of the model runs, called by hand: see NOTE(parts)."""
        own = set(map(id, self.sharded.model.modules()))
        return any(id(module) in own for module in modules_being_called())

    def _refuse_read(self, place: Place, what: str) -> NoReturn:
        group = self.sharded.group
        raise AtRestError(
            f"{what}() would read parameter {place.name!r} while it rests sharded over "
            f"{group.world_size} ranks (rank {group.rank}); nothing but a call of the model or of "
            "a module in it, and what autograd records, gathers it by itself, because every rank "
            "has to take part. On every rank: full_param(param), or `with "
            "GatheredParameters(param): ...`; of this rank's part alone: local_param(param); of "
            "all at once: `with unsharded(model): ...`. To convert or move a model, do it before "
            "shard()"
        )


class _Enter(torch.autograd.Function):
    """Whole values of a parameter enter a graph; their gradient leaves to the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, whole: Tensor, place: Place, version: int) -> Tensor:
        ctx.place, ctx.version = place, version
        return whole.detach()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        place = ctx.place
        if place.unit.version != ctx.version:
            raise StateError(
                f"parameter {place.name!r}, used outside its unit {place.unit.name!r}: it was "
                "changed between this graph's forward and its backward (by optimizer.step() or "
                "load_state_dict()), so the gradient would be wrong; run the forward again"
            )
        place.sharded.expect_from_outside(place)
        return grad, None, None, None


def keep_views(unit: Unit, outputs: Iterable[Tensor]) -> None:
    """Give views of the unit's parameters among its forward's outputs memory of their own.

    Whoever reads them may do so when the slot holds other values. The objects, and their place in
    the graph, stay.
    """
    if unit.slot is None or unit.slot.memory is None:
        return
    address = unit.slot.memory.data_ptr()
    for tensor in outputs:
        if type(tensor) is not Tensor:
            continue
        try:
            memory = tensor.untyped_storage()
        except NotImplementedError:  # sparse and opaque ones have none, and view nothing
            continue
        if memory.data_ptr() == address:
            tensor.data = tensor.data.clone()
