"""Optimizer state on host and disk: its sub-groups, their memory and their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias, Unpack, final

import torch
from attrs import define, field
from torch import Tensor
from torch.optim import Optimizer

from zero_offload.adam.cpu_optimizers import AbstractCPUOptimizer
from zero_offload.disk.host_store import HostStore
from zero_offload.disk.store import AbstractStore
from zero_offload.errors import TornStepError, UnsupportedOptimizerError
from zero_offload.memory.arena import HostArena

from .block import SubGroupState
from .footprint import Footprint
from .gradients import GradientStream, bytes_of
from .staging import Staging, is_on_host, staging_bytes_of
from .subgroups import Item, Residence, ResidenceOptions, Shares, SubGroup, plan_subgroups
from .swap_window import SwapWindow
from .template import Attributes, OptimizerTemplate

# A tensor. Not typed as one: mappings are invariant in their keys, and callers have Parameters.
Param: TypeAlias = Any
# Position of a param group -> key -> number.
Written: TypeAlias = dict[int, dict[str, Any]]


@final
@define(eq=False)
class OffloadedState:
    """Optimizer state of sub-groups of parameters, which this plans, allocates and steps.

    `OffloadedOptimizer` is made of one. Others use it who have parameters, param groups and
    gradients of their own; `like` makes one. Local, not thread-safe.

    Args:
        templates: One for all param groups, or one for each of several optimizers, in the order of
            their param groups.
        shares: Fractions of the state on the device, on the host and on disk.
        store: Needed if `shares.rest` is the disk; the caller's to close.
        grads_leave: Whether gradients go to the host during backward.
        budget_bytes: Most host memory for all; None: no limit but the process's.
        is_pinned: Page-lock host memory where there is an accelerator.
    """

    templates: Sequence[OptimizerTemplate]
    shares: Shares
    store: AbstractStore | None
    grads_leave: bool = field(default=False, kw_only=True)
    budget_bytes: int | None = field(default=None, kw_only=True)
    is_pinned: bool = field(default=True, kw_only=True)
    footprint: Footprint = field(factory=Footprint, init=False)
    gradients: GradientStream = field(init=False)
    _arena: HostArena = field(init=False)
    _window: SwapWindow = field(init=False)
    _staging: Staging = field(init=False)
    _states: list[SubGroupState] = field(factory=list, init=False)
    # Parameter -> numbers of the sub-groups that have a piece of it, in order.
    _where: dict[Tensor, list[int]] = field(factory=dict, init=False)
    # Positions of param groups whose state was planned without amsgrad.
    _plain: set[int] = field(factory=set, init=False)
    # Numbers of param groups that the last step has changed, until `write_numbers`.
    _written: Written = field(factory=dict, init=False)
    # Id of a template -> last sub-group that it stepped, and its attributes before the step.
    _stepped: dict[int, tuple[SubGroupState, Attributes]] = field(factory=dict, init=False)
    # Text of the error that has left states of two different steps; empty without one.
    _torn: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._arena = HostArena("state", is_pinned=self.is_pinned)
        self._window = SwapWindow(self.store or HostStore(self._arena), self._arena)
        self.gradients = GradientStream(self._arena)
        self._staging = Staging(self._arena)

    @classmethod
    def like(
        cls,
        optimizers: Sequence[Optimizer],
        *,
        own_masters: Mapping[torch.dtype, torch.dtype],
        store: AbstractStore | None = None,
        budget_bytes: int | None = None,
        is_pinned: bool = True,
        **residence: Unpack[ResidenceOptions],
    ) -> OffloadedState:
        """Return state such as these optimizers keep, of no parameters yet.

        Args:
            optimizers: Their classes and settings count, their parameters and state do not. Param
                groups are numbered through all of them.
            own_masters: Dtypes of masters by dtype of the parameter. A master is stepped in the
                place of its parameter, which is written only, and is the state's entry "master".
                Where the optimizer keeps masters itself, fp32 at least.
            store: Needed with state="disk".
            budget_bytes: Most host memory to allocate.
            is_pinned: Page-lock host memory where there is an accelerator.
            residence: `state`, `fraction`, `subgroup_bytes`, `small_bytes`: as for
                `OffloadedOptimizer`.

        Raises:
            UnsupportedOptimizerError: One cannot be stepped sub-group by sub-group.
            ValueError: An argument makes no sense.
        """
        shares = Shares.of(**residence)
        if (store is None) == (shares.rest is Residence.DISK):
            raise ValueError(
                f"state={residence['state']!r}, store={store!r}: a store goes with state='disk'"
            )
        templates = [OptimizerTemplate(optimizer, own_masters) for optimizer in optimizers]
        return cls(templates, shares, store, budget_bytes=budget_bytes, is_pinned=is_pinned)

    # ---- Planning ----

    @classmethod
    def footprint_like(
        cls,
        optimizers: Sequence[Optimizer],
        positions: Mapping[Param, int],
        groups: Sequence[Mapping[str, Any]],
        *,
        own_masters: Mapping[torch.dtype, torch.dtype],
        **residence: Unpack[ResidenceOptions],
    ) -> Footprint:
        """Return the footprint that `add` would give state `like` these optimizers.

        Local. Allocates nothing.

        Args:
            optimizers: As for `like`, as are `own_masters` and `residence`.
            positions: As for `add`; parameters need have no memory. On meta they count as on a
                device other than the CPU.
            groups: As for `add`.
            own_masters: See `like`.
            residence: See `like`.

        Raises:
            UnsupportedOptimizerError: It cannot be stepped sub-group by sub-group.
            ValueError: An argument makes no sense.
        """
        templates = [OptimizerTemplate(optimizer, own_masters) for optimizer in optimizers]
        return cls(templates, Shares.of(**residence), None)._plan(positions, groups)[2]

    def add(self, positions: Mapping[Param, int], groups: Sequence[dict[str, Any]]) -> None:
        """Plan and allocate state of further parameters; nothing is added if that fails.

        Args:
            positions: Positions of their param groups.
            groups: All param groups.
        """
        if not positions:
            return
        subgroups, leaving, footprint = self._plan(positions, groups)
        params, first, states = list(positions), len(self._states), []
        for plan in subgroups:
            owners = [params[piece.item] for piece in plan.pieces]
            at = [positions[param] for param in owners]
            states.append(SubGroupState(plan, owners, at, self._template_of(at[0])[1]))
        footprint.check(self.budget_bytes)
        self._staging.reserve(footprint.staging_bytes // 2)
        self._take_memory(dict(enumerate(states, first)))
        self._states += states
        self._plain |= {at for at in positions.values() if not groups[at].get("amsgrad")}
        self.gradients.add(leaving)
        for number, state in enumerate(states, first):
            for param in dict.fromkeys(state.params):
                self._where.setdefault(param, []).append(number)
        self.footprint = footprint

    def _plan(
        self, positions: Mapping[Param, int], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[SubGroup, ...], list[Param], Footprint]:
        """Return sub-groups, parameters whose gradients are offloaded, and the footprint.

        Sub-groups are those of the new parameters. The footprint is that of all parameters, earlier
        ones included.
        """
        params, kinds, items = list(positions), {}, []
        for param, at in positions.items():
            number, template, own_at = self._template_of(at)
            kind = tuple(param.shape), param.dtype, at
            if kind not in kinds:
                options = options_of(groups[at])
                kinds[kind] = template.entries(kind[0], param.dtype, options, own_at)
            used = template.used_for(param.dtype)
            is_divisible = issubclass(used, AbstractCPUOptimizer) and _is_dense(param)
            place = f"{param.device}, {used.__name__} of optimizer {number}"
            items.append(Item(param.numel(), kinds[kind], is_divisible, place))
        subgroups = plan_subgroups(items, self.shares)
        # `beside`: parameters with state on the device. `passing`: pieces, with their parameters,
        # of each sub-group that is copied to the host for its step.
        beside, passing = set(), []
        for subgroup in subgroups:
            owners = [params[piece.item] for piece in subgroup.pieces]
            if subgroup.residence is Residence.DEVICE:
                beside.update(owners)
            elif not is_on_host(owners[0]):
                passing.append([*zip(subgroup.pieces, owners, strict=True)])
        leaving = dict.fromkeys(
            p for p in params if self.grads_leave and not is_on_host(p) and p not in beside
        )
        staging_sizes = [
            sum(staging_bytes_of(piece.numel, p, p in leaving) for piece, p in each)
            for each in passing
        ]
        footprint = Footprint.of(
            [*(state.plan for state in self._states), *subgroups],
            gradient_bytes=self.footprint.gradient_bytes + bytes_of(leaving),
            staging_bytes=max(self.footprint.staging_bytes, 2 * max(staging_sizes, default=0)),
        )
        return subgroups, list(leaving), footprint

    def _template_of(self, position: int) -> tuple[int, OptimizerTemplate, int]:
        """Return a param group's template: its number, itself, and the group's position in it."""
        # A single template serves all param groups, including those that were added later.
        if len(self.templates) == 1:
            return 0, self.templates[0], position
        for number, template in enumerate(self.templates):
            num_groups = len(template.template.param_groups)
            if position < num_groups:
                return number, template, position
            position -= num_groups
        raise IndexError("a param group of none of the optimizers")

    def _take_memory(self, states: Mapping[int, SubGroupState]) -> None:
        """Allocate memory and files of all states, or none.

        Slots and the store come last, since a full disk refuses them.
        """
        sizes = {where: {} for where in Residence}
        for k, state in states.items():
            sizes[state.plan.residence][k] = state.plan.nbytes
        on_host = sizes[Residence.HOST]
        memory = self._arena.allocate(sum(on_host.values()))
        for k, part in zip(on_host, memory.split([*on_host.values()]), strict=True):
            states[k].attach(part)
        for k, nbytes in sizes[Residence.DEVICE].items():
            device = states[k].params[0].device
            states[k].attach(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        self._window.add(sizes[Residence.DISK])

    # ---- Parameters with state ----

    def unplanned(self, params: Iterable[Param]) -> list[Param]:
        """Return the given parameters that have not been added yet."""
        return [param for param in params if param not in self._where]

    def started(self, *, besides: Collection[str] = ()) -> list[Param]:
        """Return parameters that have state besides these entries, in order."""
        found = {param for state in self._states for param in state.started(besides)}
        return [param for param in self._where if param in found]

    def written_only(self) -> list[Param]:
        """Return parameters that a step writes and does not read: their own masters are stepped.

        Parameters whose master is not made yet are read.
        """
        read = {param for state in self._states for param in state.read_by_step()}
        return [param for param in self._where if param not in read]

    def subgroups_of(self, params: Collection[Tensor]) -> list[int]:
        """Return the numbers of sub-groups with a piece of one of these parameters, in order."""
        found: set[int] = set()
        for param in params:
            found.update(self._where.get(param, ()))
        return sorted(found)

    # ---- Steps, reads and writes ----

    def read_ahead(self) -> None:
        """Begin to read the state that the next step needs first, if it is of all parameters."""
        self.check("reading ahead")
        self._window.expect(self._swapped(range(len(self._states))))

    def flush(self) -> None:
        """Block until all state is written to the store; steps return before that.

        Raises:
            TornStepError: Some state could not be written.
        """
        self.check("flush()")
        # Without a store, all state is in memory.
        if self.store is None:
            return
        try:
            self._window.flush()
        except Exception as error:
            raise self._tear("writing state", self._window.failed or 0, error) from error

    def check(self, what: str) -> None:
        """Raise TornStepError if an error has left states of two different steps."""
        if self._torn:
            raise TornStepError(f"{what}: {self._torn}")

    def mend(self) -> None:
        """Make state writable again after an error; state that cannot be read any more is dropped.

        Call it before all states are replaced.
        """
        self._give_up_window()
        for k in self._swapped(range(len(self._states))) if self._torn else ():
            self._window.expect([k])
            try:
                self._window.open(k)
            except Exception:
                self._window.lose(k)
                self._states[k].forget()
            self._window.forget()
        self._window.forget_failure()
        self._torn = ""

    def step(
        self,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[Param, Tensor],
        *,
        factor: float = 1.0,
        opening: Callable[[Sequence[Any]], None] | None = None,
        attributes: Sequence[Attributes] | None = None,
    ) -> None:
        """Step every parameter that has a gradient. Blocking, but for the last writes of state.

        Args:
            groups: All param groups, for their numbers.
            grads: By parameter, of its shape.
            factor: Number that gradients are multiplied by.
            opening: Called with the parameters of each sub-group before they are stepped, so that
                they have memory then; and with none at the end. Its errors are treated as those of
                a write.
            attributes: Earlier result of `attributes`; None: the current attributes.

        Raises:
            StoreError: The first read failed; nothing was stepped, and the step can be tried again.
            TornStepError: A later read or write failed, or a sub-group's step did, or this was so
                before.
            UnsupportedOptimizerError: As by `numbers`; nothing was stepped.
        """
        numbers = self.numbers(groups)
        given = self.attributes() if attributes is None else attributes
        of_template = dict(zip(map(id, self.templates), given, strict=True))
        self._written = written = {}

        def step(state: SubGroupState) -> None:
            if opening is not None:
                opening([param for param in state.params if param in grads])
            # Each sub-group begins with the numbers of before the step, as the optimizer would.
            own = of_template[id(state.template)]
            for at, changed in state.step(numbers, grads, factor, self._staging, own).items():
                written.setdefault(at, {}).update(changed)
            self._stepped[id(state.template)] = state, own

        at_end = None if opening is None else partial(opening, ())
        self._visit("step()", self.subgroups_of(grads), step, at_end=at_end)

    def write_numbers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set what the last step has changed: numbers of groups, attributes of optimizers. Local.

        If an optimizer's own step runs as well, and finds no gradients, it may or may not count.
        """
        for at, changed in self._written.items():
            for key, value in changed.items():
                held = groups[at].get(key)
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    held.copy_(value)
                else:
                    groups[at][key] = value
        for state, before in self._stepped.values():
            found = state.attributes().items()
            changed = {k: v for k, v in found if k not in before or before[k] != v}
            state.template.write_attributes(changed)
        self._written, self._stepped = {}, {}

    def attributes(self) -> list[Attributes]:
        """Return plain attributes of each optimizer, in the order of the templates."""
        return [template.attributes() for template in self.templates]

    def numbers(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the current numbers of all param groups.

        Raises:
            UnsupportedOptimizerError: One asks for state that was not allocated.
        """
        for at in self._plain:
            if groups[at].get("amsgrad"):
                raise UnsupportedOptimizerError(
                    f"param_groups[{at}]['amsgrad'] was turned on after memory was allocated for "
                    "state without 'max_exp_avg_sq'; turn it off, or make the optimizer with "
                    "amsgrad=True and load the state dict of this one"
                )
        return [options_of(group) for group in groups]

    def drop_views(self) -> None:
        """Keep no view of parameters' memory until the next step."""
        for state in self._states:
            state.drop_views()

    def refresh(self) -> None:
        """Set masters from their parameters. Blocking."""
        self._visit("refresh_masters()", range(len(self._states)), SubGroupState.refresh)

    def read(
        self, params: Iterable[Param], names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """Return copies, on the CPU, of the state of some parameters. Blocking.

        Args:
            params: Parameters to read the state of.
            names: Read these entries only; None: all.

        Raises:
            StoreError: A read failed; nothing was changed.
            TornStepError: The last step could not be written.
        """
        wanted: dict[Param, dict[str, Any]] = {param: {} for param in params}
        read = methodcaller("read_into", wanted, names)
        self._visit("reading state", self.subgroups_of(wanted), read, writes=False)
        return wanted

    def hides_master(self, param: Tensor) -> bool:
        """Return whether a parameter has a master that is none of the optimizer's own entries."""
        # A parameter that nothing steps is in no sub-group.
        numbers = self._where.get(param)
        template = self.templates[0] if numbers is None else self._states[numbers[0]].template
        return template.hides_master(param.dtype)

    def describe(self, params: Iterable[Param]) -> dict[Param, dict[str, Any]]:
        """Return state as `read` does, but with blank large tensors: shape and dtype, no memory."""
        self.check("describing state")
        wanted: dict[Param, dict[str, Any]] = {param: {} for param in params}
        for k in self.subgroups_of(wanted):
            self._states[k].read_into(wanted, is_blank=True)
        return wanted

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool = True) -> None:
        """Replace the state of some parameters. Blocking.

        Args:
            states: By parameter; entries as `read` gives them, of any dtype.
            replaces: Whether to delete entries that have no new one, except hidden masters.

        Raises:
            TornStepError: A read or write failed, and some states are replaced.
        """
        load = methodcaller("load", states, replaces=replaces)
        self._visit("writing state", self.subgroups_of(states), load)

    def close(self, *, keeps_store: bool) -> None:
        """Release everything; with `keeps_store`, delete the values from the store too."""
        self.gradients.close()
        self._give_up_window()
        self._window.end(deletes=keeps_store)
        self._states, self._where = [], {}

    # ---- Each sub-group in turn ----

    def _swapped(self, numbers: Iterable[int]) -> list[int]:
        return [k for k in numbers if self._states[k].plan.residence is Residence.DISK]

    def _visit(
        self,
        what: str,
        numbers: Sequence[int],
        act: Callable[[SubGroupState], object],
        *,
        writes: bool = True,
        at_end: Callable[[], object] | None = None,
    ) -> None:
        """Call `act` for each sub-group with its state in memory; the last writes end later.

        With `writes`, an error after the first `act` has begun leaves the state torn, as does a
        failed write in any case: calls then raise TornStepError until `mend`.
        """
        self.check(what)
        k, has_started = 0, False
        try:
            if swapped := self._swapped(numbers):
                self._window.expect(swapped)
            for k in numbers:
                state = self._states[k]
                is_swapped = state.plan.residence is Residence.DISK
                if is_swapped:
                    state.attach(self._window.open(k))
                has_started = True
                act(state)
                if is_swapped:
                    self._window.close(k, dirty=writes)
            if at_end is not None:
                at_end()
        except BaseException as error:
            self._give_up_window()
            # Sub-group whose write has failed; it may have been written in the step before.
            failed = self._window.failed
            if failed is None and not (writes and has_started):
                raise
            at = k if failed is None else failed
            torn = self._tear(what if writes else "writing state", at, error)
            if isinstance(error, Exception):
                raise torn from error
            raise

    def _give_up_window(self) -> None:
        self._window.forget()
        with contextlib.suppress(Exception):
            self._window.flush()

    def _tear(self, what: str, at: int, error: BaseException) -> TornStepError:
        self._torn = (
            f"{what} ended in sub-group {at + 1} of {len(self._states)}, so parameters and state "
            "are of two different steps: load_state_dict(), and the model's. It ended with "
            f"{type(error).__name__}: {error}"
        )
        return TornStepError(self._torn)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries of a param group but its parameters; schedulers change them."""
    return {k: value for k, value in group.items() if k not in ("params", "param_names")}


def _is_dense(param: Tensor) -> bool:
    """Return whether a parameter is contiguous, or will be once it has memory.

    A parameter without memory is an element that is expanded, with strides of zero.
    """
    return param.is_contiguous() or not any(param.stride())
