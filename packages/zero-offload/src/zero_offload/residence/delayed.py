"""Optimizer steps that run while the model computes; their values are used one step late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from zero_offload.adam.batches import MASTER
from zero_offload.errors import TornStepError
from zero_offload.memory.arena import HostArena
from zero_offload.state.footprint import Footprint
from zero_offload.state.offloaded_state import OffloadedState
from zero_offload.state.template import Attributes

# NOTE(one at a time): two threads must not use `inner` at once. Each method that uses it waits
# first for the update in progress, so that at any time only the update's thread or only the caller
# uses it. `read_ahead`, which is called in backward, does nothing: the update has already begun to
# read.

# NOTE(threads): how many threads torch computes with is set for each thread. The update's thread
# takes the number that is set when it first asks. Setting it there would also set it for threads
# that are made later, and empty caches of other threads. A step's results do not depend on it.

Param = nn.Parameter
Groups = Sequence[dict[str, Any]]


@final
@define(eq=False)
class DelayedState:
    """Offloaded state whose steps run in a thread; `apply_delayed_update` copies their values.

    A copy of each parameter is stepped in its place. An error of a step is raised by the next call
    that needs the outcome. If nothing was stepped, the step begins again then, so that no gradient
    is lost; else the error is a TornStepError, and is raised until state is loaded. Methods that
    are not described here are as in `OffloadedState`.

    Args:
        inner: The state, which it also steps; see NOTE(one at a time).
        arena: Allocates copies of parameters and gradients that are on the host.
        grads_on_host: Copy gradients to the host in any case; else to their parameters' devices.
    """

    inner: OffloadedState
    arena: HostArena
    grads_on_host: bool = field(kw_only=True)
    # Parameter -> copy that is stepped in its place.
    _stepped: dict[Param, Param] = field(factory=dict, init=False)
    # Parameter -> memory for a copy of its gradient, of its master's dtype.
    _grads: dict[Param, Tensor] = field(factory=dict, init=False)
    # Has one thread, which starts with the first update.
    _thread: ThreadPoolExecutor = field(init=False)
    # The last update, until `_finish` has seen that it succeeded.
    _update: Future[None] | None = field(default=None, init=False)
    # What `_update` calls, kept to begin it again after an error.
    _job: Callable[[], None] | None = field(default=None, init=False)
    # The user's param groups, whose numbers are written once the update has ended.
    _groups: Groups = field(default=(), init=False)
    # Parameters of the last update, until its values are copied to them.
    _behind: set[Param] = field(factory=set, init=False)
    # Stream that the thread computes on; None if all parameters are on the CPU.
    _stream: Any = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-delayed-update")

    @property
    def footprint(self) -> Footprint:
        """Footprint of the state, and of the copies of parameters and gradients."""
        return with_delay(self.inner.footprint, self._stepped, grads_on_host=self.grads_on_host)

    def add(self, positions: Mapping[Param, int], groups: Groups) -> None:
        """Plan parameters and allocate for them, as `OffloadedState.add` does. Called once."""
        values = _allocate(self.arena, {param: param for param in positions})
        self._stepped = {param: Param(value) for param, value in values.items()}
        blanks = {param: _blank_gradient(param, self.grads_on_host) for param in positions}
        self._grads = _allocate(self.arena, blanks)
        self.inner.add({self._stepped[param]: at for param, at in positions.items()}, groups)

    # ---- Stepping ----

    def step(
        self, groups: Groups, grads: Mapping[Param, Tensor], *, factor: float, opening: object
    ) -> None:
        """Begin a step with copies of the gradients and of the param groups' current numbers."""
        assert not self.pending_params(), "apply_delayed_update() comes first"
        numbers = copy.deepcopy(self.inner.numbers(groups))
        for param, grad in grads.items():
            self._grads[param].copy_(grad)
        taken = {self._stepped[param]: self._grads[param] for param in grads}
        self._behind = set(grads)
        self._groups = groups
        self._job = partial(self._step, numbers, taken, factor, self.inner.attributes())
        self._begin()

    def write_numbers(self, groups: Groups) -> None:
        """Do nothing yet: the numbers are written once the update has ended."""

    def pending_params(self) -> list[Param]:
        """Return parameters that lack their new values, in order. Blocks until the step ends."""
        self._finish()
        return [param for param in self._stepped if param in self._behind]

    def apply_delayed_update(self, opening: Callable[[Sequence[Param]], None]) -> None:
        """Copy the values of the last step to the parameters that lack them, if any do.

        Args:
            opening: As for `OffloadedState.step`.
        """
        for param in self.pending_params():
            opening([param])
            param.detach().copy_(self._stepped[param].detach())
        opening(())
        self._behind = set()

    def read_ahead(self) -> None:
        """Do nothing; see NOTE(one at a time)."""

    def _begin(self) -> None:
        assert self._job is not None, "step() says what to do"
        device = next((param.device for param in self._stepped if not param.is_cpu), None)
        # Gradients and masters may still be written on the caller's current stream.
        if device is not None:
            self._stream = self._stream or torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        self._update = self._thread.submit(self._job)

    def _step(
        self,
        groups: Groups,
        grads: Mapping[Param, Tensor],
        factor: float,
        attributes: Sequence[Attributes],
    ) -> None:
        """Run a step in the thread, and begin to read ahead for the next."""
        with self._stream or nullcontext():
            try:
                self.inner.step(groups, grads, factor=factor, attributes=attributes)
                self.inner.read_ahead()
            finally:
                if self._stream is not None:
                    self._stream.synchronize()

    def _finish(self) -> None:
        """Block until no update is under way.

        Raises:
            TornStepError: It ended midway.
            Exception: It ended before anything was stepped, StoreError for one; it begins again.
        """
        error = self._wait()
        if isinstance(error, TornStepError):
            # Each caller gets an error of its own: to raise one again extends its traceback.
            raise TornStepError(str(error)) from error
        if error is not None:
            self._begin()
            raise error
        self.inner.write_numbers(self._groups)
        self._update = self._job = None

    def _wait(self) -> BaseException | None:
        """Block until no update is in progress, and return the error of the last one, if any."""
        return None if self._update is None else self._update.exception()

    # ---- State ----

    def started(self, *, besides: Collection[str] = ()) -> list[Param]:
        """Return parameters that have state, besides these entries, once the update has ended.

        After an update that failed these are the parameters that have state now.
        """
        self._wait()
        started = set(self.inner.started(besides=besides))
        return [param for param, stepped in self._stepped.items() if stepped in started]

    def written_only(self) -> list[Param]:
        """Return all parameters: an update writes to them, and their copies are stepped."""
        return list(self._stepped)

    def hides_master(self, param: Param) -> bool:
        """Return whether a parameter's master is hidden; see `OffloadedState.hides_master`."""
        return self.inner.hides_master(self._stepped.get(param, param))

    def read(
        self, params: Iterable[Param], names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """Return copies of state once the update has ended; see `OffloadedState.read`."""
        return self._ask(partial(self.inner.read, names=names), params)

    def describe(self, params: Iterable[Param]) -> dict[Param, dict[str, Any]]:
        """Return blank state once the update has ended; see `OffloadedState.describe`."""
        return self._ask(self.inner.describe, params)

    def _ask(
        self, ask: Callable[[list[Param]], dict[Param, dict[str, Any]]], params: Iterable[Param]
    ) -> dict[Param, dict[str, Any]]:
        self._finish()
        wanted = {param: self._stepped[param] for param in params}
        found = ask(list(wanted.values()))
        return {param: found[stepped] for param, stepped in wanted.items()}

    def mend(self) -> None:
        """Make state writable again after an error; the error of a failed update is dropped.

        See `OffloadedState.mend`.
        """
        self._wait()
        self._update = self._job = None
        self.inner.mend()

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool) -> None:
        """Write state once the update has ended; see `OffloadedState.write`.

        A master is also copied to the stepped copy of its parameter. The caller writes it to the
        parameter itself.
        """
        self._finish()
        stepped = self._stepped
        self.inner.write({stepped[p]: state for p, state in states.items()}, replaces=replaces)
        for param, state in states.items():
            # `apply_delayed_update` may still copy the stepped value to the parameter.
            if MASTER in state:
                value = stepped[param].detach()
                value.copy_(state[MASTER].detach().view(value.shape))

    def drop_views(self) -> None:
        """Do nothing: the stepped copies are no views of the parameters' memory."""

    def close(self, *, keeps_store: bool) -> None:
        """Wait for the update, and release everything as `OffloadedState.close` does.

        Raises:
            Exception: The update that was under way has failed; all is released nevertheless.
        """
        error = self._wait()
        self._update = self._job = None
        self._thread.shutdown()
        self.inner.close(keeps_store=keeps_store)
        self._stepped, self._grads, self._behind = {}, {}, set()
        if error is not None:
            raise error


def with_delay(footprint: Footprint, params: Iterable[Param], *, grads_on_host: bool) -> Footprint:
    """Return a footprint with the copies that delayed steps of these parameters need.

    Arithmetic only.
    """
    held = [each for p in params for each in (p, _blank_gradient(p, grads_on_host))]
    on_host = sum(each.nbytes for each in held if each.is_cpu)
    on_device = sum(each.nbytes for each in held if not each.is_cpu)
    return evolve(
        footprint,
        resident_bytes=footprint.resident_bytes + on_host,
        device_bytes=footprint.device_bytes + on_device,
    )


def _blank_gradient(param: Param, on_host: bool) -> Tensor:
    """Return a tensor like the copy of a parameter's gradient: of its master's dtype, no memory."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    return torch.empty((), dtype=dtype, device="cpu" if on_host else param.device).expand_as(param)


def _allocate(arena: HostArena, blanks: Mapping[Param, Tensor]) -> dict[Param, Tensor]:
    """Allocate memory for each parameter; one piece for all of one dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Param]] = {}
    for param, blank in blanks.items():
        alike.setdefault((blank.dtype, blank.device), []).append(param)
    found = {}
    for (dtype, device), some in alike.items():
        numels = [param.numel() for param in some]
        if device.type == "cpu":
            memory = arena.allocate(sum(numels), dtype=dtype)
        else:
            memory = torch.zeros(sum(numels), dtype=dtype, device=device)
        for param, part in zip(some, memory.split(numels), strict=True):
            found[param] = part.view(param.shape)
    return found
