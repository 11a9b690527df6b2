"""GatheredParameters: parameters whole in a context, and changed there by one rank."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, final

from torch import Tensor, nn

from ._construction import CURRENT
from ._early_gather import EarlyGather
from ._early_shard import EarlyShard, find_early
from ._external import register_external_parameter
from ._gather import Gather
from ._places import find_place, sort_places

Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


@final
class GatheredParameters:
    """A context in which parameters are whole, in their own Parameter objects. Collective.

    Every rank enters and leaves it, with the same parameters. `param.data` is then the whole value,
    in memory of its own; modules run as usual. Those that `Init` sharded may be gathered before
    their model is sharded; but inside `Init`, which gathers what is touched, they are left as they
    are. So are other parameters of no sharded model, and those that rest whole, but for what a
    codec has left of them (`Wire(params=...)`).

    - Without `modifier_rank` the values are for reading. A write that autograd counts (any in-place
      function on the parameter), or a new `param.data`, raises LostEditError on every rank at the
      end; a write through `param.data` is looked for where `sanity_checks` asks, and dropped.
    - With `modifier_rank`, what that rank has written is every rank's at the end; what the others
      wrote is dropped. Where parameters rest whole (stages 0 to 2), it is sent to all ranks too.

    An exception inside drops all changes of sharded parameters; the other ranks, at the end of
    theirs, learn of it by a StateError. Inside, `optimizer.step()`, `load_state_dict()` and
    `release_buffers()` raise.

    Args:
        params: A Parameter, a module, or any iterable of Parameters, in any order; each counts
            once.
        modifier_rank: Whose changes are kept, a rank of the group; None keeps nobody's.
        fwd_module: Uses the parameters in its forward: see `register_external_parameter`.
        enabled: Do nothing at all when False.
        sanity_checks: Compare checksums over all bytes, to find what was written through
            `param.data`.

    Raises:
        TypeError: `params` holds something else than Parameters.
        OverlapError: A parameter is gathered already, by an enclosing context.
        LostEditError: On leaving: a rank changed a parameter without being the modifier.
        StateError: `modifier_rank` is no rank of the group; a parameter to be modified is in use by
            a forward or a backward; on leaving: the modifier left another shape or dtype, or a
            peer left with an exception.
        zero_comm.CommError: A rank did not take part in time.
    """

    def __init__(
        self,
        params: Params,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
        *,
        sanity_checks: bool = False,
    ) -> None:
        self._gathers: list[Gather | EarlyGather] = []
        if not enabled:
            return
        chosen = _as_list(params)
        places = [place for param in chosen if (place := find_place(param)) is not None]
        for sharded in {id(place.sharded): place.sharded for place in places}.values():
            mine = sort_places(place for place in places if place.sharded is sharded)
            if not sharded.is_exact or modifier_rank is not None:
                self._gathers.append(
                    Gather(sharded, mine, "GatheredParameters", modifier_rank, sanity_checks)
                )
        for early in _group_early(chosen):
            self._gathers.append(
                EarlyGather(early, "GatheredParameters", modifier_rank, sanity_checks)
            )
        for param in chosen:
            if fwd_module is not None and find_place(param) is not None:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> GatheredParameters:
        opened: list[Gather | EarlyGather] = []
        try:
            for gather in self._gathers:
                gather.check()
                gather.open()
                opened.append(gather)
        except BaseException:
            for gather in reversed(opened):
                gather.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for gather in self._gathers:
                gather.report(has_raised=error is not None)
            if error is None:
                for gather in self._gathers:
                    gather.settle()
        finally:
            for gather in reversed(self._gathers):
                gather.close()


def _group_early(params: Iterable[nn.Parameter]) -> list[list[EarlyShard]]:
    """Of parameters that Init sharded, each once, in one order on every rank; by group.

    None inside Init, which gathers whatever is touched.
    """
    found = {} if CURRENT.get() is not None else {id(e): e for p in params if (e := find_early(p))}
    by_group: dict[int, list[EarlyShard]] = {}
    for early in sorted(found.values(), key=lambda early: early.serial):
        by_group.setdefault(id(early.group), []).append(early)
    return list(by_group.values())


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    chosen = [params] if isinstance(params, Tensor) else list(params)
    for param in chosen:
        if not isinstance(param, Tensor):
            raise TypeError(
                "GatheredParameters: expected a Parameter, a module or an iterable of Parameters, "
                f"got a {type(param).__name__} among them"
            )
    return chosen
