"""One partitioned model: its units, their schedule, its gradients and its optimizer."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Exposure, Group, Handle

from ._errors import StateError
from ._late import ModuleTree
from ._outside import OutsideUses
from ._placement import Placement, Placements
from ._places import Place, record_places
from ._reducer import GradientReducer
from ._schedule import Call, Schedule
from ._torch_compat import call_after_backward, is_in_backward, plain_access
from ._unit import Unit


@define(eq=False)
class ShardedModel:
    """What the hooks talk to. The module stays the user's own."""

    model: nn.Module
    group: Group
    placements: Placements
    units: tuple[Unit, ...]
    schedule: Schedule
    reducer: GradientReducer
    optimizer: torch.optim.Optimizer | None
    exposure: Exposure | None  # of sharded parameters, where peers can read them
    gathers_state_dict: bool  # what `model.state_dict()` does while parameters rest sharded
    exports_stand_ins: bool = field(default=False, init=False)  # full_state_dict is collecting
    outside: OutsideUses = field(init=False)  # parameters used outside their unit's forward
    forwards: int = field(default=0, init=False)  # of the model that are running
    gathers: list[str] = field(factory=list, init=False)  # open contexts, by what users call them
    gathered: set[tuple[int, int, int]] = field(factory=set, init=False)  # places, by their keys
    unread: list[Handle[Tensor]] = field(factory=list, init=False)  # sent as an exception passed
    _tree: ModuleTree = field(init=False)
    _backward_is_open: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.outside = OutsideUses(self)
        self._tree = ModuleTree.of(self.model)
        record_places(self)

    @property
    def is_backward_open(self) -> bool:
        """Whether a backward is running, or ended in an exception that nobody has noticed yet."""
        return self._backward_is_open

    @property
    def access_tag(self) -> int:
        """Identity of what gathers of single parameters agree on."""
        return self.reducer.control_tag + 1

    def begin_forward(self) -> None:
        """The model's forward starts: clean up after an exception, take our guards away."""
        if is_in_backward():
            return
        self._tree.check(self.group.rank)
        self._give_up_open_backward()
        self.outside.forget()
        if torch.is_grad_enabled():
            with plain_access():
                self.reducer.before_forward()
        self.schedule.begin_forward()

    def end_forward(self) -> None:
        """The model's forward ended, or an exception ended it."""
        self.forwards = max(0, self.forwards - 1)
        if not self.forwards and not is_in_backward():
            self.outside.forget()

    def before_backward(self, call: Call) -> None:
        """Backward has reached an output of a unit."""
        if torch.is_grad_enabled() and self.placements.params is Placement.SHARDED:
            raise StateError(
                f"unit {call.unit.name!r}: backward with create_graph=True would keep a graph that "
                "reads parameters after they were sharded again; a gradient penalty needs stage 2 "
                "or lower"
            )
        self.open_backward()
        with plain_access():
            self.reducer.before_backward(call.unit)
        self.schedule.before_backward(call)

    def expect_from_outside(self, place: Place) -> None:
        """A gradient is on its way to a parameter, from a use outside its unit."""
        self.open_backward()
        with plain_access():
            self.reducer.before_backward(place.unit)
        self.reducer.expect_from_outside(place.buffer, place.position)

    def open_backward(self) -> None:
        """The first hook of a backward asks for a word at its end."""
        if not self._backward_is_open:
            self._backward_is_open = True
            call_after_backward(self._close_backward)

    def backward_without_batch(self) -> None:
        """What a backward does between ranks, with no gradient of this one."""
        if self._backward_is_open:
            raise StateError(
                "backward_without_batch() during a backward, or after one that an exception ended; "
                "call optimizer.zero_grad() first"
            )
        self.reducer.before_forward()
        self._close_backward()

    def before_step(self, *, has_closure: bool) -> None:
        """What the optimizer reads must be there, and nothing may still read what it writes."""
        if self._backward_is_open:
            raise StateError(
                "optimizer.step() after a backward that an exception ended: its gradients are "
                "incomplete. Call optimizer.zero_grad() and run forward and backward again."
            )
        self.refuse_while_gathered("optimizer.step()")
        self._check_params()
        with plain_access():
            self.reducer.before_step()
        self.begin_write()
        self.reducer.lend(has_closure=has_closure)

    def after_step(self) -> None:
        """Parameters have changed: publish them where they rest replicated."""
        self.reducer.take_back()
        self.end_write()
        if self.placements.optim is Placement.SHARDED:
            handles = [handle for unit in self.units for handle in unit.publish()]
            for handle in handles:
                handle.wait()
        self.schedule.prefetch()

    def begin_write(self) -> None:
        """Wait until nothing reads the shards any more. Collective where they are exposed."""
        self.schedule.settle()
        if self.exposure is not None:
            self.exposure.begin_write()

    def end_write(self, only: Unit | None = None) -> None:
        """Whole copies of a unit's parameters, all units' when None, are out of date.

        So are graphs made with them.
        """
        if self.exposure is not None:
            self.exposure.end_write()
        self.outside.forget()
        for unit in self.units if only is None else (only,):
            unit.version += 1

    def refuse_while_gathered(self, what: str) -> None:
        """Raise StateError inside a context that keeps parameters whole."""
        if self.gathers:
            raise StateError(
                f"{what} inside {self.gathers[-1]}: the parameters that are whole there would be "
                f"out of date or lost; leave the context first (rank {self.group.rank})"
            )

    def drop_gradients(self, *, set_to_none: bool) -> None:
        """What `optimizer.zero_grad()` means for gradients that are on their way."""
        self._give_up_open_backward(is_asked_for=True)
        with plain_access():
            self.reducer.drop(set_to_none=set_to_none)
        self.schedule.settle()  # of a forward whose backward never came

    def release_buffers(self) -> None:
        """Give slots and reduction buffers back until they are needed again."""
        self.refuse_while_gathered("release_buffers()")
        self._give_up_open_backward()
        self.outside.forget()
        self.schedule.settle()
        self.schedule.release()
        self.reducer.release()

    def _close_backward(self) -> None:
        self._backward_is_open = False
        with plain_access():
            self.reducer.end_backward()
        self.outside.forget()
        self.schedule.end_backward()

    def _give_up_open_backward(self, *, is_asked_for: bool = False) -> None:
        if self._backward_is_open and not is_in_backward():
            self._backward_is_open = False
            with plain_access():
                self.reducer.abandon(is_asked_for=is_asked_for)
            self.schedule.reset()

    def _check_params(self) -> None:
        if self.optimizer is None or self.placements.optim is Placement.REPLICATED:
            return
        known = {id(p) for unit in self.units for b in unit.buffers for p in b.shard_params}
        for index, param_group in enumerate(self.optimizer.param_groups):
            for param in param_group["params"]:
                if id(param) not in known:
                    raise StateError(
                        f"param group {index} of the optimizer holds a parameter of shape "
                        f"{tuple(param.shape)} that is no shard of the model: add param groups "
                        "before shard()"
                    )
