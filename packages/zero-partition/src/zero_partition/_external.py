"""Parameters that a module is known to use though it does not own them: gathered ahead of it."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary, finalize

from attrs import define, field
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._errors import StateError
from ._hooks import Bound
from ._placement import Placement
from ._places import Place, place_of
from ._sharded_model import ShardedModel


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Say that `module`'s forward uses `param`, which another module owns. The same on every rank.

    It also works unsaid: a sharded parameter that is used outside its unit is gathered where it is
    used. Said, the gather is launched before the module's forward and travels meanwhile. Where
    parameters rest whole there is nothing to do, and nothing is done.

    Once more is as good as once.

    Args:
        module: A module that runs in the model's forward, or a loss that is called on its output.
        param: The model's own Parameter object.

    Raises:
        StateError: `param` belongs to no sharded model.
    """
    place = place_of(param, what="register_external_parameter()")
    sharded = place.sharded
    of_models = _AHEAD.setdefault(module, WeakKeyDictionary())
    ahead = of_models.get(sharded)
    if ahead is None:
        ahead = of_models[sharded] = _LaunchAhead()
        if place.unit.placement is Placement.SHARDED:
            ahead.handle = module.register_forward_pre_hook(ahead, prepend=True)
            sharded.removers.append(ahead.handle.remove)
            # The module may serve another model when this one was deleted.
            finalize(sharded, ahead.handle.remove).atexit = False  # type: ignore[attr-defined]
    if place not in ahead.places:
        ahead.places.append(place)


def unregister_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Undo `register_external_parameter`. The same on every rank.

    Raises:
        StateError: `param` belongs to no sharded model, or was not registered for the module.
    """
    place = place_of(param, what="unregister_external_parameter()")
    of_models = _AHEAD.get(module, {})
    ahead = of_models.get(place.sharded)
    if ahead is None or place not in ahead.places:
        raise StateError(
            f"unregister_external_parameter(): parameter {place.name!r} is not registered for this "
            f"{type(module).__name__}"
        )
    ahead.places.remove(place)
    if not ahead.places:
        del of_models[place.sharded]
        if ahead.handle is not None:
            ahead.handle.remove()


@define(eq=False)
class _LaunchAhead(Bound):
    """Before the module's forward: its parameters from one sharded model set out."""

    places: list[Place] = field(factory=list)
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        for place in self.places:
            place.sharded.outside.launch(place)


# A model that is sharded again is another ShardedModel, and nothing of the first one is found.
_AHEAD: Final[WeakKeyDictionary[nn.Module, WeakKeyDictionary[ShardedModel, _LaunchAhead]]] = (
    WeakKeyDictionary()
)
