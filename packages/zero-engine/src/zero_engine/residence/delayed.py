"""An updater whose steps go on while the model computes: values are used one step late."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_offload import HostArena, TornStepError
from zero_partition import MASTER
from zero_partition.seams import Opening, OptimizerOffload, UpdaterReport

from .offload import OffloadedUpdater


@final
@define(eq=False)
class HeldBack:
    """For each target a parameter that is stepped in its place, and room for its gradient.

    Both lie where the target does; values are of its dtype, and gradients of the master's.

    Args:
        arena: Whose memory, where that is the host's.
        grads_leave: Gradients lie on the host in any case.
    """

    arena: HostArena
    grads_leave: bool = field(kw_only=True)
    stepped: dict[nn.Parameter, nn.Parameter] = field(factory=dict, init=False)  # by target
    _grads: dict[nn.Parameter, Tensor] = field(factory=dict, init=False)

    def take(self, targets: Collection[nn.Parameter]) -> None:
        """Take the room for these.

        Raises:
            BudgetError: The host does not have it.
        """
        for target, value in self._allocate(targets, widens=False).items():
            self.stepped[target] = nn.Parameter(value)
        self._grads = self._allocate(targets, widens=True)

    def take_gradients(self, grads: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Copy them; by what is stepped."""
        for target, grad in grads.items():
            self._grads[target].copy_(grad)
        return {self.stepped[target]: self._grads[target] for target in grads}

    @property
    def cuda(self) -> torch.device | None:
        """Where targets lie on the device, and that is CUDA's."""
        return next((target.device for target in self.stepped if target.is_cuda), None)

    @property
    def host_bytes(self) -> int:
        """Of host memory."""
        return sum(tensor.nbytes for tensor in self._tensors() if tensor.is_cpu)

    @property
    def device_bytes(self) -> int:
        """Of memory of another device."""
        return sum(tensor.nbytes for tensor in self._tensors() if not tensor.is_cpu)

    def release(self) -> None:
        """Forget all of it."""
        self.stepped, self._grads = {}, {}

    def _tensors(self) -> list[Tensor]:
        return [*self.stepped.values(), *self._grads.values()]

    def _allocate(
        self, targets: Collection[nn.Parameter], *, widens: bool
    ) -> dict[nn.Parameter, Tensor]:
        """A tensor for each, of its shape; those of one dtype and device are one memory."""
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for target in targets:
            place = place_of(target, widens=widens, grads_leave=self.grads_leave)
            alike.setdefault(place, []).append(target)
        found = {}
        for (dtype, device), some in alike.items():
            numels = [target.numel() for target in some]
            if device.type == "cpu":
                memory = self.arena.allocate(sum(numels), dtype=dtype)
            else:
                memory = torch.zeros(sum(numels), dtype=dtype, device=device)
            for target, part in zip(some, memory.split(numels), strict=True):
                found[target] = part.view(target.shape)
        return found


def place_of(
    target: nn.Parameter, *, widens: bool, grads_leave: bool
) -> tuple[torch.dtype, torch.device]:
    """Of what is held back of a target, or with `widens` of its gradient: dtype, and where."""
    dtype = torch.promote_types(target.dtype, torch.float32) if widens else target.dtype
    on_host = widens and grads_leave
    return dtype, torch.device("cpu") if on_host else target.device


def held_back_bytes(targets: Collection[nn.Parameter], *, grads_leave: bool) -> tuple[int, int]:
    """On the device and on the host, as `HeldBack` would take them. Arithmetic only."""
    on_device = on_host = 0
    for target in targets:
        for widens in (False, True):
            dtype, device = place_of(target, widens=widens, grads_leave=grads_leave)
            num_bytes = target.numel() * dtype.itemsize
            on_host += num_bytes if device.type == "cpu" else 0
            on_device += num_bytes if device.type != "cpu" else 0
    return on_device, on_host


# ---- An updater whose steps go on while the model computes: values are used one step late ----


# NOTE(one at a time): state is not made for two threads. Whoever wants it waits for the update that
# is under way, so that at any time either the thread or the caller has it. Nothing is read ahead in
# backward: the update has begun long before.

# NOTE(threads): torch counts threads by thread: this one takes the number that holds when it first
# asks. Setting it here would set it for threads that are made later, and empty caches under those
# that compute. What is stepped does not depend on it.

Groups = list[dict[str, Any]]


@final
@define(eq=False)
class DelayedUpdater(OptimizerOffload):
    """Begins each step and returns; `bring_in` gives targets the values when it has ended.

    An error of the step is raised by whatever needs its outcome next. If nothing was stepped, the
    step begins again then, so that no gradient is lost; else it is a TornStepError until state is
    loaded.

    Args:
        inner: Keeps state and steps; see NOTE(one at a time).
        room: Memory for new values, and for gradients while they are read.
    """

    inner: OffloadedUpdater
    room: HeldBack
    _thread: ThreadPoolExecutor = field(init=False)  # makes its one thread when there is work
    _update: Future[None] | None = field(default=None, init=False)  # under way, or failed
    _job: partial[None] | None = field(default=None, init=False)  # what it does
    _behind: set[nn.Parameter] = field(factory=set, init=False)  # targets of the last update
    _stream: Any = field(default=None, init=False)  # of the thread, where there is CUDA

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-delayed-update")

    @property
    def is_delayed(self) -> bool:
        """See `OptimizerOffload.is_delayed`."""
        return True

    def plan(
        self,
        targets: Mapping[nn.Parameter, int],
        optimizer: torch.optim.Optimizer,
        *,
        masters: Mapping[torch.dtype, torch.dtype],
    ) -> None:
        """See `OptimizerOffload.plan`."""
        self.room.take(targets)
        stepped = {self.room.stepped[target]: at for target, at in targets.items()}
        self.inner.plan(stepped, optimizer, masters=masters)

    # ---- Stepping ----

    def step(
        self, grads: Mapping[nn.Parameter, Tensor], *, factor: float, opening: Opening
    ) -> None:
        """See `OptimizerOffload.step`. Gradients are the caller's again when it returns."""
        assert not self.held_back(), "bring_in() comes first"
        taken = self.room.take_gradients(grads)
        self._behind = set(grads)
        self._job = partial(self._step, _numbers_of(self.inner.groups), taken, factor)
        self._begin()

    def held_back(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.held_back`."""
        self._finish()
        return [target for target in self.room.stepped if target in self._behind]

    def bring_in(self, opening: Opening) -> None:
        """See `OptimizerOffload.bring_in`."""
        for target in self.held_back():
            opening([target])
            target.detach().copy_(self.room.stepped[target].detach())
        opening(())
        self._behind = set()

    def begin_backward(self) -> None:
        """See `OptimizerOffload.begin_backward`, and NOTE(one at a time)."""

    def _begin(self) -> None:
        assert self._job is not None, "step() says what to do"
        device = self.room.cuda
        if device is not None:  # gradients and masters are written on the stream of the caller
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._update = self._thread.submit(self._job)

    def _step(self, groups: Groups, grads: Mapping[nn.Parameter, Tensor], factor: float) -> None:
        """In the thread."""
        with _using(self._stream):
            self.inner.step_with(groups, grads, factor=factor, opening=_is_open)

    def _finish(self) -> None:
        """Block until no update is under way.

        Raises:
            TornStepError: It ended midway.
            Exception: It ended before anything was stepped, StoreError for one; it begins again.
        """
        error = self._wait()
        if error is not None:
            if isinstance(error, TornStepError):
                raise TornStepError(str(error)) from error  # once for each who asks
            self._begin()
            raise error
        self._update = self._job = None

    def _wait(self) -> BaseException | None:
        """Block until no update is under way; what the last one ended with."""
        return None if self._update is None else self._update.exception()

    def _give_up(self) -> None:
        """Block until no update is under way, and ask for nothing of one that has failed."""
        self._wait()
        self._update = self._job = None

    # ---- State ----

    def started(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.started`. After an update that failed: what there is."""
        self._wait()
        started = set(self.inner.started())
        return [target for target, stepped in self.room.stepped.items() if stepped in started]

    def written_only(self) -> Collection[nn.Parameter]:
        """See `OptimizerOffload.written_only`: all are, when values are brought in."""
        return list(self.room.stepped)

    def hides_master(self, target: nn.Parameter) -> bool:
        """See `OptimizerOffload.hides_master`."""
        return self.inner.hides_master(self.room.stepped[target])

    def read(
        self, targets: Iterable[nn.Parameter], names: Collection[str] | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """See `OptimizerOffload.read`."""
        self._finish()
        wanted = {target: self.room.stepped[target] for target in targets}
        found = self.inner.read(wanted.values(), names)
        return {target: found[stepped] for target, stepped in wanted.items()}

    def describe(self, targets: Iterable[nn.Parameter]) -> dict[nn.Parameter, dict[str, Any]]:
        """See `OptimizerOffload.describe`."""
        self._finish()
        wanted = {target: self.room.stepped[target] for target in targets}
        found = self.inner.describe(wanted.values())
        return {target: found[stepped] for target, stepped in wanted.items() if stepped in found}

    def write(self, states: Mapping[nn.Parameter, Mapping[str, Any]], *, replaces: bool) -> None:
        """See `OptimizerOffload.write`. Whoever writes a master has its target hold that too."""
        if replaces:
            self._give_up()
        self._finish()
        stepped = self.room.stepped
        self.inner.write({stepped[t]: state for t, state in states.items()}, replaces=replaces)
        for target, state in states.items():
            if MASTER in state:  # it stands in the place of what was held back
                value = stepped[target].detach()
                value.copy_(state[MASTER].detach().view(value.shape))

    def let_go(self) -> None:
        """See `OptimizerOffload.let_go`: what is stepped lies in memory of our own."""

    @property
    def report(self) -> UpdaterReport:
        """See `OptimizerOffload.report`."""
        inner = self.inner.report
        return UpdaterReport(
            device_bytes=inner.device_bytes + self.room.device_bytes,
            host_bytes=inner.host_bytes + self.room.host_bytes,
            disk_bytes=inner.disk_bytes,
        )

    def end(self) -> None:
        """See `OptimizerOffload.end`.

        Raises:
            Exception: The update that was under way has failed; all is released nevertheless.
        """
        error = self._wait()
        self._give_up()
        self._thread.shutdown()
        self.inner.end()
        self.room.release()
        self._behind = set()
        if error is not None:
            raise error


def _numbers_of(groups: Sequence[Mapping[str, Any]]) -> Groups:
    """What the param groups say now; a scheduler may change them while the step goes on."""
    return [
        {
            name: copy.deepcopy(value)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in groups
    ]


@contextmanager
def _using(stream: Any) -> Iterator[None]:
    """Work on the device goes there, and is done at the end."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def _is_open(_: Sequence[nn.Parameter]) -> None:
    """What is stepped has memory of its own."""
