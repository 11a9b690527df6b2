"""One partitioned model: its units, their schedule, its gradients and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Exposure, Group, Handle

from ._errors import StateError
from ._flat_buffer import FlatBuffer
from ._guards import StateDictKind
from ._late import ModuleTree
from ._outside import OutsideUses
from ._parked import Parked, StateKind
from ._placement import Placement, Placements
from ._places import Place, record_places
from ._publish import publish
from ._reducer import GradientReducer
from ._residence import Residence
from ._schedule import Call, Schedule
from ._torch_compat import (
    call_after_backward,
    is_in_backward,
    is_in_ddp_forward,
    plain_access,
    will_accumulate,
)
from ._unit import Unit
from ._updated_state import bring_in, step_elsewhere
from ._wire import Routes


@define(eq=False)
class _EndOfBackward:
    """What autograd calls when a backward has ended, and drops when an exception has ended it."""

    sharded: ReferenceType[ShardedModel]
    was_called: bool = False

    def __call__(self) -> None:
        if (sharded := self.sharded()) is not None:
            sharded.close_backward()
        self.was_called = True

    def __del__(self) -> None:
        if not self.was_called and (sharded := self.sharded()) is not None:
            sharded.reshard_after_failure()


@define(eq=False)
class ShardedModel:
    """What the hooks talk to. The module stays the user's own."""

    model: nn.Module
    routes: Routes
    placements: Placements
    units: tuple[Unit, ...]
    schedule: Schedule
    reducer: GradientReducer
    residence: Residence
    optimizer: torch.optim.Optimizer | None
    exposure: Exposure | None  # of sharded parameters, where peers can read them
    state_dict: StateDictKind  # what it does of what is sharded
    input_dtype: torch.dtype | None = None  # of what the model is called with; as it is when None
    output_dtype: torch.dtype | None = None  # of what the model returns; likewise
    exports_stand_ins: bool = field(default=False, init=False)  # full_state_dict is collecting
    outside: OutsideUses = field(init=False)  # parameters used outside their unit's forward
    forwards: int = field(default=0, init=False)  # of the model that are running
    gathers: list[str] = field(factory=list, init=False)  # open contexts, by what users call them
    gathered: set[tuple[int, int, int]] = field(factory=set, init=False)  # places, by their keys
    unread: list[Handle[Tensor]] = field(factory=list, init=False)  # sent as an exception passed
    _tree: ModuleTree = field(init=False)
    _rounded: list[FlatBuffer] = field(init=False)  # that rest whole, and are gathered by a codec
    removers: list[Callable[[], None]] = field(factory=list, init=False)  # of all our hooks
    before_write: list[Callable[[], None]] = field(factory=list, init=False)  # once, whoever writes
    parked: Parked | None = field(default=None, init=False)  # what is elsewhere between phases
    has_stepped: bool = field(default=False, init=False)  # the optimizer, so it has its state
    left_to_step: Tensor | None = field(default=None, init=False)  # see NOTE(in_step)
    _published: list[tuple[int, int]] = field(factory=list, init=False)  # see `_has_written`
    _hidden: list[tuple[nn.Parameter, Tensor]] = field(factory=list, init=False)  # see `update`
    _backward_is_open: bool = field(default=False, init=False)
    _had_guards: bool = field(default=False, init=False)  # when this forward began
    _makes_graph: bool = field(default=False, init=False)  # create_graph=True
    _accumulates: bool = field(default=True, init=False)  # into parameters, unlike autograd.grad()

    def __attrs_post_init__(self) -> None:
        self.outside = OutsideUses(self)
        self._tree = ModuleTree.of(self.model)
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        self._rounded = [buffer for buffer in buffers if buffer.codec is not None]
        record_places(self)

    @property
    def group(self) -> Group:
        """The ranks it is sharded over: all that train it, or those of one replica."""
        return self.routes.shards

    @property
    def whole(self) -> Group:
        """All ranks that train it."""
        return self.routes.whole

    @property
    def is_backward_open(self) -> bool:
        """Whether a backward is running, or ended in an exception that nobody has noticed yet."""
        return self._backward_is_open

    @property
    def gathers_state_dict(self) -> bool:
        """Whether `model.state_dict()` is collective."""
        return self.state_dict == "gather"

    @property
    def is_exact(self) -> bool:
        """Whether this rank has all parameters whole, as they rest: not what a codec leaves."""
        is_whole = self.placements.params is Placement.REPLICATED
        return is_whole and all(unit.codec is None for unit in self.units)

    @property
    def access_tag(self) -> int:
        """Identity of what gathers of single parameters agree on."""
        return self.reducer.control_tag + 1

    def begin_forward(self) -> None:
        """The model's forward starts: clean up after an exception, take our guards away."""
        self.refuse_parked("a forward", StateKind.PARAMS)
        if not is_in_backward():
            self._refuse_callers()
            self._tree.check(self.whole.rank)
            self._give_up_open_backward()
            self.outside.forget()
            with plain_access():
                self._had_guards = self.reducer.before_forward()
            for buffer in self._rounded:
                if buffer.is_unrounded:
                    buffer.round_whole()
            self.schedule.begin_forward()
        self.forwards += 1

    def end_forward(self) -> None:
        """The model's forward has ended, or was given up: guards return unless backward follows."""
        self.forwards = max(0, self.forwards - 1)
        if not self.forwards and not is_in_backward():
            self.outside.forget()
        if self._had_guards and not torch.is_grad_enabled() and not is_in_backward():
            with plain_access():
                self.reducer.keep()

    def before_backward(self, call: Call) -> None:
        """Backward has reached an output of a unit."""
        self.open_backward()
        if torch.is_grad_enabled() and self.placements.params is Placement.SHARDED:
            self.schedule.keep_whole(call.unit)
        with plain_access():
            self.reducer.before_backward(call.unit)
        self.schedule.before_backward(call)

    def expect_from_outside(self, place: Place) -> None:
        """A gradient is on its way to a parameter, from a use outside its unit."""
        self.open_backward()
        with plain_access():
            self.reducer.before_backward(place.unit)
        self.reducer.expect_from_outside(place.buffer, place.position)

    def open_backward(self, *, has_arrived: bool = False) -> None:
        """The first hook of a backward asks for a word at its end.

        Args:
            has_arrived: A gradient has been computed already, which is wrong if this raises.
        """
        if not self._backward_is_open:
            self._backward_is_open = has_arrived
            self.refuse_parked("a backward", StateKind.PARAMS, StateKind.GRADS)
            self._backward_is_open = True
            self._makes_graph = torch.is_grad_enabled()
            with plain_access():
                for unit in self.units:
                    if unit.plan.rests_whole:
                        self.reducer.before_backward(unit)
                self._accumulates = any(
                    will_accumulate(p) for g in self.reducer.gradients for p in g.buffer.params
                )
            call_after_backward(_EndOfBackward(ref(self)))
            if self.residence.updater is not None and self._accumulates:
                self.residence.updater.begin_backward()
            if self._accumulates:
                self.reducer.refuse_to_sum_again()

    def backward_without_batch(self) -> None:
        """What a backward does between ranks, with no gradient of this one."""
        if self._backward_is_open:
            raise StateError(
                "backward_without_batch() during a backward, or after one that an exception ended; "
                "call optimizer.zero_grad() first"
            )
        self.refuse_parked("backward_without_batch()", StateKind.GRADS)
        with plain_access():
            self.reducer.refuse_to_sum_again()
            self.reducer.before_forward()
        self._accumulates, self._makes_graph = True, False
        self.close_backward()

    def before_step(self, *, has_closure: bool) -> None:
        """What the optimizer reads must be there, and nothing may still read what it writes."""
        self.refuse_incomplete_gradients("optimizer.step()")
        self.refuse_while_gathered("optimizer.step()")
        is_running = any(unit.depth for unit in self.units)
        if is_running and self.placements.params is Placement.SHARDED:
            raise StateError(
                "optimizer.step() was called while a forward is running, which would go on with "
                f"parameters as they were (rank {self.whole.rank}); call it when that has ended, "
                "or train at stage 2 or lower"
            )
        self.refuse_parked("optimizer.step()", *StateKind)
        self._check_params()
        with plain_access():
            self.reducer.before_step()
        self.take_gradients()
        self.begin_write()
        self._follow_writes()
        if has_closure:
            self._published = self._shard_versions()
        self.reducer.lend(has_closure=has_closure)

    def around_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure's forward reads what the optimizer has written, and its writes come after."""

        def evaluate() -> Any:
            if self._has_written():
                self._publish()
                self._published = self._shard_versions()
            result = closure()
            self.begin_write()
            self.update()
            return result

        return evaluate

    def take_gradients(self) -> None:
        """Keep this rank's part of whole gradients that the user put into `param.grad`. Local."""
        if not self.reducer.shards_state:
            return
        with plain_access():
            for g in self.reducer.gradients:
                pairs = zip(g.buffer.params, g.buffer.guards, strict=True)
                for position, (param, guard) in enumerate(pairs):
                    if param.grad is not None and param.grad is not guard:
                        g.copy_whole(position, param.grad)

    def update(self) -> None:
        """Step what an updater keeps; the optimizer's own step then finds no gradient."""
        if self.residence.updater is not None:
            self._hidden = step_elsewhere(self.residence, self.reducer.gradients, self.optimizer)

    def after_step(self) -> None:
        """Parameters have changed: publish them where they rest replicated."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        self.reducer.take_back()
        self.has_stepped = True
        self._publish()
        self.routes.log.turn()  # gathers that are launched from here on are the next step's
        self.schedule.step()

    def finish_update(self) -> None:
        """What the public `finish_update` documents."""
        updater = self.residence.updater
        if updater is None or not updater.is_delayed:
            return
        self.refuse_while_gathered("finish_update()")
        self.refuse_parked("finish_update()", StateKind.PARAMS)
        if any(unit.depth for unit in self.units):
            raise StateError(
                "finish_update() was called while a forward is running; call it between steps"
            )
        self.begin_write()
        self._follow_writes()
        bring_in(self.residence, self.reducer.gradients)
        self._publish()

    def _follow_writes(self) -> None:
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.follow_writes()

    def _publish(self) -> None:
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.reclaim()
                buffer.follow_update()
        self.end_write()
        if self.placements.optim is Placement.SHARDED:
            publish(self.units)
        if self.residence.home is not None:
            self.residence.home.settle()

    def _has_written(self) -> bool:
        """Whether the optimizer of any rank has changed its shards since they were published.

        Collective. Some optimizers step aside, look at the gradient there, and step back.
        """
        if self.placements.optim is Placement.REPLICATED:
            return False
        return self.reducer.is_true_anywhere(self._shard_versions() != self._published)

    def _shard_versions(self) -> list[tuple[int, int]]:
        params = (p for unit in self.units for b in unit.buffers for p in b.shard_params)
        return [(param.data_ptr(), param._version) for param in params]

    def begin_write(self) -> None:
        """Wait until nothing reads the shards any more. Collective where they are exposed."""
        self.refuse_parked("a write to parameters", StateKind.PARAMS, StateKind.MASTERS)
        self.await_readers()
        self.schedule.settle()
        if self.exposure is not None:
            self.exposure.begin_write()

    def await_readers(self) -> None:
        """Wait for who copies values and state on this rank meanwhile. Local."""
        while self.before_write:
            self.before_write.pop()()

    def end_write(self, only: Unit | None = None) -> None:
        """Whole copies of a unit's parameters, all units' when None, are out of date.

        So are graphs made with them.
        """
        if self.exposure is not None:
            self.exposure.end_write()
        self.outside.forget()
        for unit in self.units if only is None else (only,):
            unit.version += 1

    def refuse_incomplete_gradients(self, what: str) -> None:
        """Raise StateError after a backward that an exception ended."""
        if self._backward_is_open:
            raise StateError(
                f"{what} after a backward that an exception ended: its gradients are incomplete. "
                "Call optimizer.zero_grad() and run forward and backward again."
            )

    def refuse_while_gathered(self, what: str) -> None:
        """Raise StateError inside a context that keeps parameters whole."""
        if self.gathers:
            raise StateError(
                f"{what} inside {self.gathers[-1]}: the parameters that are whole there would be "
                f"out of date or lost; leave the context first (rank {self.whole.rank})"
            )

    def refuse_parked(self, what: str, *kinds: StateKind) -> None:
        """Raise StateError where something of these kinds is parked."""
        if self.parked is not None:
            self.parked.refuse(what, kinds, rank=self.whole.rank)

    def drop_gradients(self, *, set_to_none: bool) -> None:
        """What `optimizer.zero_grad()` means for gradients that are on their way."""
        if not set_to_none:  # parked ones can be dropped, but not written to
            self.refuse_parked("zero_grad(set_to_none=False)", StateKind.GRADS)
        self._give_up_open_backward(is_asked_for=True)
        with plain_access():
            self.reducer.drop(set_to_none=set_to_none)
        self.schedule.give_up_backward()

    def release_buffers(self) -> None:
        """Give slots and reduction buffers back until they are needed again."""
        self.refuse_while_gathered("release_buffers()")
        self._give_up_open_backward()
        self.outside.forget()
        self.schedule.settle()
        self.schedule.release()
        self.reducer.release()

    def close_backward(self) -> None:
        """The outermost backward has ended."""
        with plain_access():
            self.reducer.collect_waiting()  # which may refuse: then the backward stays open
            self._backward_is_open = False
            if self._accumulates or self.reducer.has_collected:
                self.reducer.end_backward()
            else:  # autograd.grad(): it gives this rank's gradients away; `param.grad` is as before
                self.reducer.keep()
        self.outside.forget()
        if not self._makes_graph:
            self.schedule.keeps_whole = False
        self.schedule.end_backward()

    def reshard_after_failure(self) -> None:
        """An exception ended the backward. Local; what is on its way is left to the next use."""
        self.schedule.abandon_backward()

    def _give_up_open_backward(self, *, is_asked_for: bool = False) -> None:
        if self._backward_is_open and not is_in_backward():
            self._backward_is_open = False
            with plain_access():
                self.reducer.abandon(is_asked_for=is_asked_for)
            self.schedule.reset()

    def _refuse_callers(self) -> None:
        if is_in_ddp_forward():
            raise StateError(
                "a sharded model inside DistributedDataParallel: both would reduce its gradients. "
                "zero_engine.shard() does what the wrapper does, so call the model itself"
            )
        if torch.jit.is_tracing() and self.placements.params is Placement.SHARDED:
            raise StateError(
                "torch.jit.trace() of a model whose parameters rest sharded would record how they "
                "are gathered; trace a plain model with the weights of full_state_dict(), or "
                "zero_engine.unshard() this one first"
            )

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
