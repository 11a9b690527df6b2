"""Steps that go on while the model computes: their values are used one step late."""

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
from zero_offload.state.stepper import Attributes

# NOTE(one at a time): state is not made for two threads. Whoever wants it waits for the update that
# is under way, so that at any time either the thread or the caller has it. Nothing is read ahead in
# backward: the update has begun long before.

# NOTE(threads): torch counts threads by thread: this one takes the number that holds when it first
# asks. Setting it here would set it for threads that are made later, and empty caches under those
# that compute. What is stepped does not depend on it.

Param = nn.Parameter
Groups = Sequence[dict[str, Any]]


@final
@define(eq=False)
class DelayedState:
    """Begins each step and returns; `bring_in` gives parameters the values when it has ended.

    For each parameter another is stepped in its place. An error of the step is raised by whatever
    needs its outcome next. If nothing was stepped, the step begins again then, so that no gradient
    is lost; else it is a TornStepError until state is loaded. For the rest see `OffloadedState`.

    Args:
        inner: Keeps state and steps; see NOTE(one at a time).
        arena: Memory for new values, and for gradients while they are read, where on the host.
        grads_on_host: Gradients are there in any case; else where parameters are.
    """

    inner: OffloadedState
    arena: HostArena
    grads_on_host: bool = field(kw_only=True)
    _stepped: dict[Param, Param] = field(factory=dict, init=False)  # in the place of which
    _grads: dict[Param, Tensor] = field(factory=dict, init=False)  # room, of masters' dtypes
    _thread: ThreadPoolExecutor = field(init=False)  # makes its one thread when there is work
    _update: Future[None] | None = field(default=None, init=False)  # under way, or failed
    _job: Callable[[], None] | None = field(default=None, init=False)  # what it does
    _groups: Groups = field(default=(), init=False)  # the user's, of the last update
    _behind: set[Param] = field(factory=set, init=False)  # parameters of the last update
    _stream: Any = field(default=None, init=False)  # of the thread, where there is CUDA

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-delayed-update")

    @property
    def footprint(self) -> Footprint:
        """What state and values held back take."""
        return with_delay(self.inner.footprint, self._stepped, grads_on_host=self.grads_on_host)

    def add(self, positions: Mapping[Param, int], groups: Groups) -> None:
        """As `OffloadedState.add`, once."""
        values = _allocate(self.arena, {param: param for param in positions})
        self._stepped = {param: Param(value) for param, value in values.items()}
        blanks = {param: _blank_gradient(param, self.grads_on_host) for param in positions}
        self._grads = _allocate(self.arena, blanks)
        self.inner.add({self._stepped[param]: at for param, at in positions.items()}, groups)

    # ---- Stepping ----

    def step(
        self, groups: Groups, grads: Mapping[Param, Tensor], *, factor: float, opening: object
    ) -> None:
        """Begin to step with copies of the gradients, and with the numbers of now."""
        assert not self.held_back(), "bring_in() comes first"
        numbers = copy.deepcopy(self.inner.numbers(groups))
        for param, grad in grads.items():
            self._grads[param].copy_(grad)
        taken = {self._stepped[param]: self._grads[param] for param in grads}
        self._behind = set(grads)
        self._groups = groups
        self._job = partial(self._step, numbers, taken, factor, self.inner.attributes())
        self._begin()

    def write_numbers(self, groups: Groups) -> None:
        """Nothing yet: the update has not ended."""

    def held_back(self) -> list[Param]:
        """Parameters whose new values are held back, in order. Blocks until these are known."""
        self._finish()
        return [param for param in self._stepped if param in self._behind]

    def bring_in(self, opening: Callable[[Sequence[Param]], None]) -> None:
        """Give parameters the values that are held back, if any are.

        Args:
            opening: As for `OffloadedState.step`.
        """
        for param in self.held_back():
            opening([param])
            param.detach().copy_(self._stepped[param].detach())
        opening(())
        self._behind = set()

    def read_ahead(self) -> None:
        """Nothing; see NOTE(one at a time)."""

    def _begin(self) -> None:
        assert self._job is not None, "step() says what to do"
        device = next((param.device for param in self._stepped if not param.is_cpu), None)
        if device is not None:  # gradients and masters are written on the stream of the caller
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
        """In the thread."""
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
            raise TornStepError(str(error)) from error  # once for each who asks
        if error is not None:
            self._begin()
            raise error
        self.inner.write_numbers(self._groups)
        self._update = self._job = None

    def _wait(self) -> BaseException | None:
        """Block until no update is under way; what the last one ended with."""
        return None if self._update is None else self._update.exception()

    # ---- State ----

    def started(self, *, besides: Collection[str] = ()) -> list[Param]:
        """As after the update; after one that failed: what there is."""
        self._wait()
        started = set(self.inner.started(besides=besides))
        return [param for param, stepped in self._stepped.items() if stepped in started]

    def written_only(self) -> list[Param]:
        """All are, when values are brought in."""
        return list(self._stepped)

    def hides_master(self, param: Param) -> bool:
        """As `OffloadedState.hides_master`."""
        return self.inner.hides_master(param)

    def read(
        self, params: Iterable[Param], names: Collection[str] | None = None
    ) -> dict[Param, dict[str, Any]]:
        """As after the update."""
        return self._ask(partial(self.inner.read, names=names), params)

    def describe(self, params: Iterable[Param]) -> dict[Param, dict[str, Any]]:
        """As after the update."""
        return self._ask(self.inner.describe, params)

    def _ask(
        self, ask: Callable[[list[Param]], dict[Param, dict[str, Any]]], params: Iterable[Param]
    ) -> dict[Param, dict[str, Any]]:
        self._finish()
        wanted = {param: self._stepped[param] for param in params}
        found = ask(list(wanted.values()))
        return {param: found[stepped] for param, stepped in wanted.items()}

    def mend(self) -> None:
        """As `OffloadedState.mend`; nothing is asked of an update that has failed."""
        self._wait()
        self._update = self._job = None
        self.inner.mend()

    def write(self, states: Mapping[Param, Mapping[str, Any]], *, replaces: bool) -> None:
        """As `OffloadedState.write`. Whoever writes a master has its parameter hold that too."""
        self._finish()
        stepped = self._stepped
        self.inner.write({stepped[p]: state for p, state in states.items()}, replaces=replaces)
        for param, state in states.items():
            if MASTER in state:  # it stands in the place of what was held back
                value = stepped[param].detach()
                value.copy_(state[MASTER].detach().view(value.shape))

    def let_go(self) -> None:
        """Nothing: what is stepped lies in memory of our own."""

    def close(self, *, keeps_store: bool) -> None:
        """As `OffloadedState.close`.

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
    """That of state whose steps are delayed. Arithmetic only."""
    held = [each for p in params for each in (p, _blank_gradient(p, grads_on_host))]
    on_host = sum(each.nbytes for each in held if each.is_cpu)
    on_device = sum(each.nbytes for each in held if not each.is_cpu)
    return evolve(
        footprint,
        resident_bytes=footprint.resident_bytes + on_host,
        device_bytes=footprint.device_bytes + on_device,
    )


def _blank_gradient(param: Param, on_host: bool) -> Tensor:
    """What is held back of its gradient, without memory: of its master's dtype."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    return torch.empty((), dtype=dtype, device="cpu" if on_host else param.device).expand_as(param)


def _allocate(arena: HostArena, blanks: Mapping[Param, Tensor]) -> dict[Param, Tensor]:
    """Memory for each; those of one dtype and device are one piece."""
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
