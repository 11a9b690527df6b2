"""A model whole for a while: generation, export, anything that visits it often or unevenly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from zero_comm import collective

from ._errors import LostEditError, StateError
from ._gather import Gather
from ._hooks import find_sharded
from ._places import Place, find_place, sort_places
from ._sharded_model import ShardedModel
from ._streamed import streamed

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
@collective
def unsharded(model: Model, modules: Iterable[str] | None = None) -> Iterator[Model]:
    """A context in which the model's parameters are whole. Collective to enter, local to leave.

    Inside, forwards of what is whole communicate nothing, so that ranks may run as many as each
    likes: to generate, say. It costs the bytes of what is whole, and gathers once. Changes of
    sharded parameters inside are dropped. Afterwards, exception or not, training goes on as if
    nothing had been.

    Args:
        model: The very module that was sharded.
        modules: Names of modules, as in `model.named_modules()`: what lies within them becomes
            whole. Everything when None.

    Yields:
        The model.

    Raises:
        StateError: Not sharded, or a name is no module; inside, by `optimizer.step()`,
            `load_state_dict()`, `release_buffers()` and backward of a graph made before.
        OverlapError: A parameter is gathered already.
        LostEditError: On leaving, on this rank: it changed a parameter in place.
        zero_comm.CommError: A rank did not take part in time.
    """
    sharded = find_sharded(model)
    if sharded is None:
        raise StateError(
            f"unsharded(): expected a model that was sharded, got a {type(model).__name__} that "
            "was not; call zero_engine.shard() first, and pass the very module it returned"
        )
    places, home = _places_within(sharded, modules), sharded.residence.home
    gather = Gather(sharded, places, "unsharded()")
    gather.check()
    if home is not None:
        with streamed(sharded, places, home, "unsharded()"):
            yield model
        return
    gather.open()
    try:
        yield model
        edited = gather.edited()
    finally:
        gather.close()
    if edited:
        raise LostEditError(
            f"unsharded(): parameter {edited[0]!r} was changed inside (rank {sharded.whole.rank}), "
            "and the change is dropped; use GatheredParameters(params, modifier_rank=...) to keep "
            "one rank's changes"
        )


def _places_within(sharded: ShardedModel, modules: Iterable[str] | None) -> list[Place]:
    chosen = [sharded.model]
    if modules is not None:
        known = dict(sharded.model.named_modules())
        names = [modules] if isinstance(modules, str) else list(modules)
        for name in names:
            if name not in known:
                raise StateError(
                    "unsharded(): expected names of modules, as in model.named_modules(), got "
                    f"{name!r}"
                )
        chosen = [known[name] for name in names]
    params = [param for module in chosen for param in module.parameters()]
    return sort_places(place for param in params if (place := find_place(param)) is not None)
