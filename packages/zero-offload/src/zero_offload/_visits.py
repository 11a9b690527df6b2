"""Visits to sub-groups in turn: the state of each is in memory meanwhile, wherever it rests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from ._arena import HostArena
from ._errors import TornStepError
from ._pipeline import Pipeline, Turn, plan_turns
from ._store import AbstractStore
from ._subgroup_state import SubGroupState
from ._subgroups import Residence
from ._swapper import Swapper


@define(eq=False)
class Visits:
    """Sub-groups, the memory of those that stay in it, and the pipeline through it of the others.

    Args:
        arena: Of memory on the host.
        store: Of what rests on disk; the caller's to close.
    """

    arena: HostArena
    store: AbstractStore | None
    states: list[SubGroupState] = field(factory=list, init=False)
    _memories: dict[int, Tensor] = field(factory=dict, init=False)  # of those that are not swapped
    _swapper: Swapper | None = field(init=False)
    _pipeline: Pipeline = field(init=False)
    _unusable: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._swapper = None if self.store is None else Swapper(self.store, self.arena)
        self._pipeline = Pipeline(read=self._swap_in, write=self._swap_out)

    def add(self, states: Sequence[SubGroupState]) -> None:
        """Take room for further sub-groups; all of it or none.

        Slots and the store come last: they are what a full disk refuses.
        """
        numbered = list(enumerate(states, len(self.states)))
        resident = {k: s for k, s in numbered if s.plan.residence is Residence.HOST}
        beside = {k: s for k, s in numbered if s.plan.residence is Residence.DEVICE}
        swapped = {k: s for k, s in numbered if s.plan.residence is Residence.DISK}
        memories = _carve(
            self.arena.allocate(sum(s.plan.nbytes for s in resident.values())),
            {k: s.plan.nbytes for k, s in resident.items()},
        )
        for k, state in beside.items():
            device = state.params[0].device
            memories[k] = torch.zeros(state.plan.nbytes, dtype=torch.uint8, device=device)
        if swapped:
            assert self._swapper is not None, "the constructor asked for a store"
            self._swapper.add({k: s.plan.nbytes for k, s in swapped.items()})
        self._memories |= memories
        self.states.extend(states)

    def all_subgroups(self) -> list[int]:
        """Each, in order."""
        return list(range(len(self.states)))

    def look(self, subgroups: Sequence[int], act: Callable[[Turn], None]) -> None:
        """Do something with each sub-group's state in memory that does not change it. Blocking."""
        self._visit(subgroups, act, writes=False)

    def change(
        self,
        what: str,
        subgroups: Sequence[int],
        act: Callable[[Turn], None],
        *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Do something that changes it; after an error midway nothing else is done until a load.

        The last writes are under way when it returns; see `settle`. `finish` belongs to it.
        """
        self.check(what)
        begun: list[int] = []

        def noted(turn: Turn) -> None:
            begun.append(turn.subgroup)
            act(turn)

        try:
            self._visit(subgroups, noted, writes=True)
            if finish is not None:
                finish()
        except BaseException as error:
            if not begun and not self._pipeline.has_failed:
                raise
            where = f"sub-group {len(begun)} of {len(subgroups)}"
            torn = self._tear(what, where, error)
            if isinstance(error, Exception):
                raise torn from error
            raise

    def read_ahead(self) -> None:
        """All are visited next: begin to read what that needs first."""
        self.check("reading ahead")
        try:
            self._pipeline.read_ahead(self._turns(self.all_subgroups()))
        except Exception as error:
            raise self._tear("writing state", "the write of a sub-group", error) from error

    def settle(self) -> None:
        """Block until all state is where it rests.

        Raises:
            TornStepError: Something of it could not be written.
        """
        self.check("settle()")
        try:
            self._pipeline.settle()
        except Exception as error:
            raise self._tear("writing state", "the write of a sub-group", error) from error

    def check(self, what: str) -> None:
        """Raise TornStepError if an error has left states of two different steps."""
        if self._unusable:
            raise TornStepError(f"{what}: {self._unusable}")

    def mend(self) -> None:
        """All states are going to be replaced: what cannot be read any more is forgotten."""
        self._come_to_rest()
        for turn in self._turns(self.all_subgroups()) if self._unusable else ():
            if turn.slot is not None and self._swapper is not None:
                try:
                    self._swap_in(turn).result()
                except Exception:
                    self._swapper.forget(turn.subgroup)
                    self.states[turn.subgroup].forget()
        self._pipeline.has_failed, self._unusable = False, ""

    def close(self, *, keeps_store: bool) -> None:
        """Release everything; the store's values too where it lives on."""
        self._come_to_rest()
        if self._swapper is not None:
            self._swapper.close(deletes=keeps_store)
        self.states, self._memories = [], {}

    def _come_to_rest(self) -> None:
        self._pipeline.forget_reads()
        with contextlib.suppress(Exception):
            self._pipeline.settle()

    def _tear(self, what: str, where: str, error: BaseException) -> TornStepError:
        self._unusable = (
            f"{what} ended in {where}, so parameters and state are of two different steps: "
            f"load_state_dict(), and the model's. It ended with {type(error).__name__}: {error}"
        )
        return TornStepError(self._unusable)

    def _visit(
        self, subgroups: Sequence[int], act: Callable[[Turn], None], *, writes: bool
    ) -> None:
        def attached(turn: Turn) -> None:
            self.states[turn.subgroup].attach(self._memory(turn))
            act(turn)

        self._pipeline.run(self._turns(subgroups), attached, writes=writes)

    def _turns(self, subgroups: Sequence[int]) -> tuple[Turn, ...]:
        return plan_turns(subgroups, lambda k: k not in self._memories)

    def _swap_in(self, turn: Turn) -> Future[Any]:
        assert self._swapper is not None, "something is swapped"
        return self._swapper.swap_in(turn)

    def _swap_out(self, turn: Turn) -> Future[Any]:
        assert self._swapper is not None, "something is swapped"
        return self._swapper.swap_out(turn)

    def _memory(self, turn: Turn) -> Tensor:
        if turn.slot is None:
            return self._memories[turn.subgroup]
        assert self._swapper is not None, "something is swapped"
        return self._swapper.memory(turn)


def _carve(memory: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    parts = memory.split(list(sizes.values())) if sizes else ()
    return dict(zip(sizes, parts, strict=True))
