"""The sub-groups of one offloaded optimizer, the memory they use, and visits to them in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor

from ._arena import HostArena
from ._footprint import Footprint
from ._gradient_stream import GradientStream, bytes_of
from ._pipeline import Turn, plan_turns, run_pipeline
from ._stepper import Stepper
from ._store import AbstractStore
from ._subgroup_state import SubGroupState
from ._subgroups import Item, Residence, Shares, SubGroup, plan_subgroups
from ._swapper import Swapper
from ._transit import Transit, is_here, room_of


@final
@define(eq=False)
class Residents:
    """Plans sub-groups, takes room for them, and visits them where they rest.

    Args:
        stepper: Steps each.
        shares: Of the state, by where it rests.
        store: Needed if `shares.rest` is the disk.
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
    _arena: HostArena = field(factory=lambda: HostArena("state"), init=False)
    _swapper: Swapper | None = field(init=False)
    _transit: Transit = field(init=False)
    _plans: list[SubGroup] = field(factory=list, init=False)
    _states: list[SubGroupState] = field(factory=list, init=False)
    _memories: dict[int, Tensor] = field(factory=dict, init=False)  # of those that are not swapped
    _where: dict[Tensor, list[int]] = field(factory=dict, init=False)  # sub-groups of a parameter

    def __attrs_post_init__(self) -> None:
        self.gradients = GradientStream(self._arena)
        self._swapper = None if self.store is None else Swapper(self.store, self._arena)
        self._transit = Transit(self._arena)

    # ---- Planning ----

    def add(self, positions: Mapping[Tensor, int], groups: Sequence[dict[str, Any]]) -> None:
        """Plan further parameters and take their room; nothing is added if that fails.

        Args:
            positions: Of their param groups.
            groups: All param groups.
        """
        if not positions:
            return
        params = list(positions)
        kinds: dict[Any, Any] = {}
        for param, at in positions.items():
            if (param.ndim, param.dtype, at) not in kinds:
                entries = self.stepper.entries(param.ndim, param.dtype, groups[at])
                kinds[param.ndim, param.dtype, at] = entries
        items = [
            Item(
                numel=param.numel(),
                entries=kinds[param.ndim, param.dtype, at],
                is_divisible=self.stepper.is_native and param.is_contiguous(),
                place=str(param.device),
            )
            for param, at in positions.items()
        ]
        plans = plan_subgroups(
            items,
            shares=self.shares,
            subgroup_bytes=self.subgroup_bytes,
            small_bytes=self.small_bytes,
        )
        states = [self._state(plan, params, positions) for plan in plans]
        all_plans = [*self._plans, *plans]
        on_device = {param for state in states if not state.on_host for param in state.params}
        leaving = [p for p in params if self.grads_leave and not is_here(p) and p not in on_device]
        room = max(_room(state, set(leaving)) for state in states)
        room = max(room, self.footprint.transit_bytes // 2)
        footprint = Footprint.of(
            all_plans,
            gradient_bytes=self.footprint.gradient_bytes + bytes_of(leaving),
            transit_bytes=2 * room,
        )
        footprint.check(self.budget_bytes)
        self._take_room(states, room)
        self.gradients.add(leaving)
        for state in states:
            for param in state.params:
                at = self._where.setdefault(param, [])
                if len(self._states) not in at:
                    at.append(len(self._states))
            self._states.append(state)
            self._plans.append(state.plan)
        self.footprint = footprint

    def _state(
        self, plan: SubGroup, params: Sequence[Any], positions: Mapping[Tensor, int]
    ) -> SubGroupState:
        owners = [params[piece.item] for piece in plan.pieces]
        return SubGroupState(plan, owners, [positions[param] for param in owners], self.stepper)

    def _take_room(self, states: Sequence[SubGroupState], room: int) -> None:
        """Slots and the store last: they are what a full disk refuses, and it takes all or none."""
        first = len(self._states)
        numbered = list(enumerate(states, first))
        resident = {k: s for k, s in numbered if s.plan.residence is Residence.HOST}
        beside = {k: s for k, s in numbered if s.plan.residence is Residence.DEVICE}
        swapped = {k: s for k, s in numbered if s.plan.residence is Residence.DISK}
        memories = _carve(
            self._arena.allocate(sum(s.plan.nbytes for s in resident.values())),
            {k: s.plan.nbytes for k, s in resident.items()},
        )
        for k, state in beside.items():
            device = state.params[0].device
            memories[k] = torch.zeros(state.plan.nbytes, dtype=torch.uint8, device=device)
        self._transit.reserve(room)
        if swapped:
            assert self._swapper is not None, "the constructor asked for a store"
            self._swapper.add({k: s.plan.nbytes for k, s in swapped.items()})
        self._memories |= memories

    # ---- Visiting ----

    def is_planned(self, param: Tensor) -> bool:
        """Whether there is room for its state."""
        return param in self._where

    def started(self) -> list[Tensor]:
        """Parameters that have state."""
        return [
            param
            for param, at in self._where.items()
            if any(
                self._states[k].is_started(piece)
                for k in at
                for piece, owner in enumerate(self._states[k].params)
                if owner is param
            )
        ]

    def all_subgroups(self) -> list[int]:
        """Each, in order."""
        return list(range(len(self._states)))

    def subgroups_of(self, params: Collection[Tensor]) -> list[int]:
        """Those that have a piece of one of these parameters, in order."""
        return sorted({k for param in params for k in self._where.get(param, ())})

    def visit(
        self, subgroups: Sequence[int], act: Callable[[Turn], None], *, writes: bool = True
    ) -> None:
        """Do something with each sub-group's state in memory, by the pipeline. Local, blocking."""
        turns = plan_turns(subgroups, lambda k: k not in self._memories)

        def attached(turn: Turn) -> None:
            self._states[turn.subgroup].attach(self._memory(turn))
            act(turn)

        run_pipeline(turns, read=self._swap_in, step=attached, write=self._swap_out(writes))

    def _swap_in(self, turn: Turn) -> Future[Any]:
        assert self._swapper is not None, "something is swapped"
        return self._swapper.swap_in(turn)

    def _swap_out(self, writes: bool) -> Callable[[Turn], Future[Any]]:
        def write(turn: Turn) -> Future[Any]:
            assert self._swapper is not None, "something is swapped"
            if writes:
                return self._swapper.swap_out(turn)
            done: Future[Any] = Future()
            done.set_result(None)
            return done

        return write

    def _memory(self, turn: Turn) -> Tensor:
        if turn.slot is None:
            return self._memories[turn.subgroup]
        assert self._swapper is not None, "something is swapped"
        return self._swapper.memory(turn)

    # ---- What is done there ----

    def step(
        self,
        turn: Turn,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[Tensor, Tensor],
        factor: float,
    ) -> None:
        """Step one sub-group."""
        state, transit = self._states[turn.subgroup], self._transit
        mine = [grads.get(param) for param in state.params]
        if not state.on_host:
            state.step(groups, mine, factor, fetch=_same, send=_copy, wait=_nothing)
            return
        transit.begin()
        state.step(groups, mine, factor, fetch=transit.fetch, send=transit.send, wait=transit.wait)
        transit.end()

    def refresh(self, turn: Turn) -> None:
        """Set a sub-group's masters from its parameters."""
        state = self._states[turn.subgroup]
        for piece in range(len(state.params)):
            state.refresh(piece)

    def gather(self, turn: Turn, wanted: Mapping[Tensor, dict[str, Any]]) -> None:
        """Add copies of a sub-group's state to the entries of whole parameters."""
        state = self._states[turn.subgroup]
        for index, param in enumerate(state.params):
            if param in wanted:
                state.copy_into(index, wanted[param])

    def scatter(self, turn: Turn, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Put entries of whole parameters into a sub-group."""
        state = self._states[turn.subgroup]
        for index, param in enumerate(state.params):
            if param in states:
                state.load(index, states[param])

    def close(self, *, keeps_store: bool) -> None:
        """Release everything; the store's values too where it lives on."""
        self.gradients.close()
        if self._swapper is not None:
            self._swapper.close(deletes=keeps_store)
        self._states, self._memories, self._where, self._plans = [], {}, {}, []


def _carve(memory: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    parts = memory.split(list(sizes.values())) if sizes else ()
    return dict(zip(sizes, parts, strict=True))


def _room(state: SubGroupState, leaving: Collection[Tensor]) -> int:
    """In transit, while it is stepped; gradients that have left their device are here already."""
    if not state.on_host or is_here(state.params[0]):
        return 0
    return sum(
        room_of(
            piece.numel,
            param.element_size(),
            0 if param in leaving else max(4, param.element_size()),  # masters take fp32
        )
        for piece, param in zip(state.plan.pieces, state.params, strict=True)
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    return
