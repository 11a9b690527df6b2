"""Where a parameter lies, found from the Parameter itself; nothing is set on the user's objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn
from weakref import ReferenceType, ref

from attrs import frozen
from torch import Tensor

from ._at_rest import find_owner, forget_owner, record_owner
from ._errors import StateError

if TYPE_CHECKING:
    from zero_comm import Group

    from ._flat_buffer import FlatBuffer
    from ._layout import Piece
    from ._sharded_model import ShardedModel
    from ._unit import Unit


@frozen
class Place:
    """A position in a flat buffer of a unit of a sharded model.

    Holds nothing alive: the table below would keep every model there ever was.
    """

    _sharded: ReferenceType[ShardedModel]
    name: str  # the first of the parameter's names
    unit_index: int
    buffer_index: int  # among the unit's
    position: int  # among the buffer's parameters

    @property
    def sharded(self) -> ShardedModel:
        """The model it belongs to.

        Raises:
            StateError: The model was deleted.
        """
        sharded = self._sharded()
        if sharded is None:
            raise StateError(
                f"parameter {self.name!r}: the sharded model that kept its values was deleted, and "
                "they went with it; keep the model for as long as its parameters are used"
            )
        return sharded

    @property
    def key(self) -> tuple[int, int, int]:
        """Identity within the model; sorts alike on every rank."""
        return self.unit_index, self.buffer_index, self.position

    @property
    def unit(self) -> Unit:
        """The unit it is unsharded with."""
        return self.sharded.units[self.unit_index]

    @property
    def buffer(self) -> FlatBuffer:
        """The flat buffer it lies in."""
        return self.unit.buffers[self.buffer_index]

    @property
    def group(self) -> Group:
        """The ranks it is sharded over."""
        return self.sharded.group

    @property
    def whole(self) -> Group:
        """All ranks that train it."""
        return self.sharded.whole

    @property
    def piece(self) -> Piece | None:
        """The part of it that this rank keeps, None if there is none."""
        return self.buffer.piece_of(self.position)

    @property
    def is_trainable(self) -> bool:
        """Whether the optimizer steps it."""
        return self.buffer.plan.trainable

    @property
    def is_gathered(self) -> bool:
        """Whether its own memory is whole, for the user."""
        return self.position in self.buffer.held

    @property
    def is_at_rest(self) -> bool:
        """Whether its values are elsewhere."""
        return self.buffer.is_at_rest

    def value(self, tensor: Tensor, what: str, *, needs_grad: bool) -> Tensor:
        """See `OutsideUses.value`."""
        return self.sharded.outside.value(self, tensor, what, needs_grad=needs_grad)

    def refuse_write(self, what: str) -> NoReturn:
        """See `OutsideUses.refuse_write`."""
        self.sharded.outside.refuse_write(self, what)


def record_places(sharded: ShardedModel) -> None:
    """Make the parameters of a model known."""
    owner = ref(sharded)
    for unit in sharded.units:
        for buffer_index, buffer in enumerate(unit.buffers):
            for position, param in enumerate(buffer.params):
                name = buffer.plan.params[position].name
                record_owner(param, Place(owner, name, unit.index, buffer_index, position))


def forget_places(sharded: ShardedModel) -> None:
    """The parameters of a model are ordinary ones again."""
    for unit in sharded.units:
        for buffer in unit.buffers:
            for param in buffer.params:
                forget_owner(param)


def find_place(param: Tensor) -> Place | None:
    """Where this very parameter lies, None if it belongs to no sharded model."""
    place = find_owner(param)
    return place if isinstance(place, Place) else None


def place_of(param: Tensor, *, what: str) -> Place:
    """Where this very parameter lies.

    Raises:
        StateError: It is no tensor, or belongs to no sharded model; `what` was asked.
    """
    place = find_place(param) if isinstance(param, Tensor) else None
    if place is None:
        got = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else f"{param!r}"
        raise StateError(
            f"{what}: expected a Parameter of a sharded model, got a {type(param).__name__} "
            f"({got}) that belongs to none; pass the model's own object, such as "
            "model.layer.weight, not a copy, a view or the optimizer's shard"
        )
    return place


def sort_places(places: Iterable[Place]) -> list[Place]:
    """Each once, in one order on every rank."""
    unique = {(id(place.sharded), place.key): place for place in places}
    return sorted(unique.values(), key=lambda place: (place.buffer.index, place.position))
