"""Optimizer state on host and disk: its sub-groups, the memory they use, and visits in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, final

import torch
from attrs import define, field
from torch import Tensor
from torch.optim import Optimizer

from zero_offload.adam.batches import MASTER
from zero_offload.disk.store import AbstractStore
from zero_offload.errors import TornStepError
from zero_offload.memory.arena import HostArena

from .block import SubGroupState
from .footprint import Footprint, plan_state
from .gradients import GradientStream
from .stepper import Stepper
from .subgroups import Residence, Shares, SubGroup, check_sizes
from .swap_window import Pipeline, Swapper, Turn, plan_turns
from .transit import Transit


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


# ---- Optimizer state on host and disk ----


Param: TypeAlias = (
    Any  # a tensor; mappings are invariant in their keys, and callers have Parameters
)


@final
@define(eq=False)
class OffloadedState:
    """Plans sub-groups of parameters, takes room for their state, and steps them where it rests.

    What `OffloadedOptimizer` is made of, for those who have parameters, param groups and gradients
    of their own; `like` makes one. Local, not thread-safe.

    Args:
        stepper: Steps each.
        shares: Of the state, by where it rests.
        store: Needed if `shares.rest` is the disk; the caller's to close.
        grads_leave: Whether gradients go to the host during backward.
        subgroup_bytes: Most that a sub-group holds.
        small_bytes: A sub-group with less stays in memory.
        budget_bytes: Most host memory for all; None: no limit but the process's.
    """

    stepper: Stepper
    shares: Shares
    store: AbstractStore | None
    grads_leave: bool = field(kw_only=True)
    subgroup_bytes: int = field(kw_only=True)
    small_bytes: int = field(kw_only=True)
    budget_bytes: int | None = field(kw_only=True)
    footprint: Footprint = field(factory=Footprint, init=False)
    gradients: GradientStream = field(init=False)
    is_pinned: bool = field(default=True, kw_only=True)
    _visits: Visits = field(init=False)
    _transit: Transit = field(init=False)
    _plans: list[SubGroup] = field(factory=list, init=False)
    _where: dict[Tensor, list[int]] = field(factory=dict, init=False)  # sub-groups of a parameter

    def __attrs_post_init__(self) -> None:
        arena = HostArena("state", is_pinned=self.is_pinned)
        self._visits = Visits(arena, self.store)
        self.gradients = GradientStream(arena)
        self._transit = Transit(arena)

    @classmethod
    def like(
        cls,
        optimizer: Optimizer,
        *,
        state: Literal["host", "disk"],
        fraction: Mapping[str, float] | None = None,
        store: AbstractStore | None = None,
        own_masters: Mapping[torch.dtype, torch.dtype],
        subgroup_bytes: int = 64 * 2**20,
        small_bytes: int = 2**20,
        budget_bytes: int | None = None,
        is_pinned: bool = True,
    ) -> OffloadedState:
        """State such as this optimizer keeps, of no parameters yet.

        Args:
            optimizer: Its class and settings count, its parameters and state do not.
            state: As for `OffloadedOptimizer`, and so below.
            fraction: Shares that rest elsewhere.
            store: Needed with state="disk".
            own_masters: By dtype of parameters that are written only: the dtype of what is stepped,
                a master in the state, as "master". fp32 at least where the optimizer keeps masters.
            subgroup_bytes: Most state that is moved and stepped together.
            small_bytes: A sub-group with less stays in memory.
            budget_bytes: Most host memory to hold.
            is_pinned: Page-lock host memory where there is CUDA.

        Raises:
            UnsupportedOptimizerError: It cannot be stepped sub-group by sub-group.
            ValueError: An argument makes no sense.
        """
        check_sizes(subgroup_bytes, small_bytes)
        shares = Shares.of(state, fraction or {})
        if (store is None) == (shares.rest is Residence.DISK):
            raise ValueError(f"state={state!r}, store={store!r}: a store goes with state='disk'")
        return cls(
            Stepper.like(optimizer, own_masters=own_masters),
            shares,
            store,
            grads_leave=False,
            subgroup_bytes=subgroup_bytes,
            small_bytes=small_bytes,
            budget_bytes=budget_bytes,
            is_pinned=is_pinned,
        )

    # ---- Planning ----

    @staticmethod
    def footprint_like(
        optimizer: Optimizer,
        positions: Mapping[Param, int],
        groups: Sequence[Mapping[str, Any]],
        *,
        state: Literal["host", "disk"],
        fraction: Mapping[str, float] | None = None,
        own_masters: Mapping[torch.dtype, torch.dtype],
        subgroup_bytes: int = 64 * 2**20,
        small_bytes: int = 2**20,
    ) -> Footprint:
        """What one that is `like` this optimizer would hold after `add`. Takes nothing. Local.

        Args:
            optimizer: As for `like`, as are `state` and all that follow.
            positions: As for `add`; parameters need have no memory. On meta they count as on a
                device other than the CPU.
            groups: As for `add`.
            state: See `like`.
            fraction: Likewise.
            own_masters: Likewise.
            subgroup_bytes: Likewise.
            small_bytes: Likewise.

        Raises:
            UnsupportedOptimizerError: It cannot be stepped sub-group by sub-group.
            ValueError: An argument makes no sense.
        """
        check_sizes(subgroup_bytes, small_bytes)
        return plan_state(
            positions,
            groups,
            stepper=Stepper.like(optimizer, own_masters=own_masters),
            shares=Shares.of(state, fraction or {}),
            grads_leave=False,
            subgroup_bytes=subgroup_bytes,
            small_bytes=small_bytes,
        ).footprint

    def add(self, positions: Mapping[Param, int], groups: Sequence[dict[str, Any]]) -> None:
        """Plan further parameters and take their room; nothing is added if that fails.

        Args:
            positions: Of their param groups.
            groups: All param groups.
        """
        if not positions:
            return
        planned = plan_state(
            positions,
            groups,
            stepper=self.stepper,
            shares=self.shares,
            grads_leave=self.grads_leave,
            subgroup_bytes=self.subgroup_bytes,
            small_bytes=self.small_bytes,
        )
        states = [self._state(each, planned.params, positions) for each in planned.subgroups]
        footprint = planned.with_others(
            self._plans,
            gradient_bytes=self.footprint.gradient_bytes,
            room_bytes=self.footprint.transit_bytes // 2,
        )
        footprint.check(self.budget_bytes)
        first = len(self._visits.states)
        self._transit.reserve(footprint.transit_bytes // 2)
        self._visits.add(states)
        self.gradients.add(planned.leaving)
        for number, state in enumerate(states, first):
            for param in dict.fromkeys(state.params):
                self._where.setdefault(param, []).append(number)
        self._plans = [*self._plans, *planned.subgroups]
        self.footprint = footprint

    def _state(
        self, plan: SubGroup, params: Sequence[Any], positions: Mapping[Tensor, int]
    ) -> SubGroupState:
        owners = [params[piece.item] for piece in plan.pieces]
        return SubGroupState(plan, owners, [positions[param] for param in owners], self.stepper)

    # ---- Who has state ----

    def is_planned(self, param: Tensor) -> bool:
        """Whether there is room for its state."""
        return param in self._where

    def started(self, *, besides: Collection[str] = ()) -> list[Param]:
        """Parameters that have state, besides these entries."""
        found = {
            param
            for state in self._visits.states
            for piece, param in enumerate(state.params)
            if state.is_started(piece, besides)
        }
        return [param for param in self._where if param in found]

    def written_only(self) -> list[Param]:
        """Parameters that a step writes and does not read: `own_masters` are stepped, and there."""
        read = {
            param
            for state in self._visits.states
            for piece, param in enumerate(state.params)
            if not state.has_own_master(piece)
        }
        return [param for param in self._where if param not in read]

    def subgroups_of(self, params: Collection[Tensor]) -> list[int]:
        """Those that have a piece of one of these parameters, in order."""
        return sorted({k for param in params for k in self._where.get(param, ())})

    # ---- What is done there ----

    def read_ahead(self) -> None:
        """A step of everything comes next: begin to read what it needs first."""
        self._visits.read_ahead()

    def settle(self) -> None:
        """Block until all state is where it rests; steps return before that.

        Raises:
            TornStepError: Something of it could not be written.
        """
        self._visits.settle()

    def check(self, what: str) -> None:
        """Raise TornStepError if an error has left states of two different steps."""
        self._visits.check(what)

    def mend(self) -> None:
        """All states are going to be replaced: what cannot be read any more is forgotten."""
        self._visits.mend()

    def step(
        self,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[Param, Tensor],
        *,
        factor: float = 1.0,
        opening: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        """Step every parameter that has a gradient. Blocking, but for the last writes of state.

        Args:
            groups: All param groups, for their numbers.
            grads: By parameter, of its shape.
            factor: What they are multiplied by.
            opening: Called with the parameters of each sub-group before they are stepped, so that
                they have memory then; and with none at the end. What it raises is as for a write.

        Raises:
            StoreError: The first read failed; nothing was stepped, and the step can be tried again.
            TornStepError: A later read or write failed, or a sub-group's step did, or this was so
                before.
        """

        def act(turn: Turn) -> None:
            params = self._visits.states[turn.subgroup].params
            if opening is not None:
                opening([param for param in params if param in grads])
            self._step(turn, groups, grads, factor)

        def finish() -> None:
            if opening is not None:
                opening(())

        self._visits.change("step()", self.subgroups_of(grads), act, finish=finish)

    def _step(
        self,
        turn: Turn,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[Param, Tensor],
        factor: float,
    ) -> None:
        state, transit = self._visits.states[turn.subgroup], self._transit
        mine = [grads.get(param) for param in state.params]
        if not state.on_host:
            state.step(groups, mine, factor, fetch=_same, send=_copy, wait=_nothing)
            return
        transit.begin()
        state.step(groups, mine, factor, fetch=transit.fetch, send=transit.send, wait=transit.wait)
        transit.end()
        if turn.slot is not None:  # masters are sent from there, and the next state is read into it
            transit.wait_for_sent()

    def let_go(self) -> None:
        """Keep no view of parameters' memory until the next step."""
        for state in self._visits.states:
            state.let_go()

    def refresh(self) -> None:
        """Set masters from their parameters. Blocking."""

        def act(turn: Turn) -> None:
            state = self._visits.states[turn.subgroup]
            for piece in range(len(state.params)):
                state.refresh(piece)

        self._visits.change("refresh_masters()", self._visits.all_subgroups(), act)

    def read(
        self, params: Iterable[Param], names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """Copies, on the CPU, of the state of some parameters; of these entries only. Blocking.

        Raises:
            StoreError: A read failed; all is as it was.
        """
        self.check("reading state")
        wanted: dict[Param, dict[str, Any]] = {param: {} for param in params}

        def act(turn: Turn) -> None:
            state = self._visits.states[turn.subgroup]
            for piece, param in enumerate(state.params):
                if param in wanted:
                    state.copy_into(piece, wanted[param], names)

        self._visits.look(self.subgroups_of(wanted), act)
        return wanted

    def hides_master(self, param: Tensor) -> bool:
        """Whether its master is no entry that the optimizer would have by itself."""
        return self.stepper.hides_master(param.dtype)

    def describe(self, params: Iterable[Param]) -> dict[Param, dict[str, Any]]:
        """As `read`, but large tensors are blank: of their shape and dtype, and without memory."""
        self.check("describing state")
        wanted: dict[Param, dict[str, Any]] = {param: {} for param in params}
        for k in self.subgroups_of(wanted):
            for piece, param in enumerate(self._visits.states[k].params):
                if param in wanted:
                    self._visits.states[k].describe_into(piece, wanted[param])
        return wanted

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool = True) -> None:
        """Put the state of some parameters in place of what there is. Blocking.

        Args:
            states: By parameter; entries as `read` gives them, of any dtype.
            replaces: Whether entries go for which there is no new one, but for hidden masters.

        Raises:
            TornStepError: A read or write failed, and some states are replaced.
        """

        def act(turn: Turn) -> None:
            state = self._visits.states[turn.subgroup]
            for piece, param in enumerate(state.params):
                if param in states:
                    hidden = (MASTER,) if self.hides_master(param) else ()
                    state.load(piece, states[param], hidden if replaces else None)

        self._visits.change("writing state", self.subgroups_of(states), act)

    def close(self, *, keeps_store: bool) -> None:
        """Release everything; the store's values too where it lives on."""
        self.gradients.close()
        self._visits.close(keeps_store=keeps_store)
        self._where, self._plans = {}, []


def _nothing() -> None:
    return


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
