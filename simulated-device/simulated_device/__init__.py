"""A simulated accelerator for torch: device "sim", which runs on the CPU and sees missing waits.

A program launches *tasks* on *streams*: kernels, copies, collectives, marks of events. A task waits
in its stream's queue until somebody must have its result; the mode says how long ("late"), or that
it runs at once ("eager"), or at moments drawn by a seed ("random"). All are allowed by the waits
that the program made, so a program whose results differ between modes lacks a wait. Each task also
notes which bytes it uses, and *clocks* say which tasks have certainly finished before it: two uses
of the same bytes that nothing orders are reported, in whatever order they ran.

Memory of the device has no rights for the host: a value on the wrong side is a crash. Kernels are
torch's own for the CPU, or substitutes for those, over a second mapping of the same memory. Shapes
of results come from meta kernels, so that a launch computes nothing.

Collectives of the backend "simccl" pair by the order of launches, run on a stream of their group,
and do not block the host. They are exchanged over gloo.

Read first: csrc/clocks.h, csrc/streams.h (tasks, and who runs them), csrc/allocator.h, csrc/
kernels.h, csrc/collectives.h. What must never happen: that a task runs before what its stream was
told to wait for; that a kernel reads the host's memory later than a device would; that a tensor of
the device is destroyed under the engine's lock.

With the folder of this package on PYTHONPATH, `import torch` imports it.

Environment: SIM_MODE ("eager", "late" or "random:SEED"), SIM_DEVICES, SIM_GIB (memory of each),
SIM_UNORDERED (of any value: `torch.accelerator.synchronize()` raises for unordered uses).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple


def load() -> None:
    """Do nothing. torch calls this when it is imported, and importing this package did it all."""


# `python -m simulated_device.build` imports this package before there is an extension.
_IS_BUILDING = sys.argv[:1] == ["-m"] and "simulated_device.build" in sys.orig_argv
if _IS_BUILDING:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

# torch's import calls load(), if this package's import comes first.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402

from simulated_device.rates import DEVICES, Rates  # noqa: E402

if not _IS_BUILDING:
    from simulated_device._extension import extension

__all__ = [
    "DEVICES",
    "Rates",
    "Span",
    "default_device",
    "host_seconds",
    "kernels_without_meta",
    "launches",
    "set_memory_limit",
    "set_mode",
    "set_options",
    "set_sync_debug_mode",
    "take_host_waits",
    "take_spans",
    "take_unordered_uses",
    "time_on",
]

_timed_on: Rates | None = None


class Span(NamedTuple):
    """When a task ran, in seconds of the timed mode."""

    name: str  # as in `launches()`
    stream: str
    start: float
    end: float


def time_on(rates: Rates) -> None:
    """Begin the timed mode: from now on nothing computes, and a clock says how long all would take.

    Each task ends at once, at a time that is its own: after the task before it on its stream, what
    that stream waits for, and the host's launch. So streams run beside each other. The host's clock
    goes on by its processor time, and to the end of what it waits for. Memory is only counted:
    values are zeros, or what they were, and a host that decides by them decides so.

    Groups that are made from now on, of "simccl" and of gloo, are this process alone, whatever
    their size: all ranks are taken to do the same at the same time. So
    `init_process_group("cpu:gloo,sim:simccl", store=FakeStore(), rank=0, world_size=64)` needs no
    other process; the store is that of `torch.testing._internal.distributed.fake_pg`.
    """
    global _timed_on  # noqa: PLW0603 - of this process
    _timed_on = rates
    products = {name: rate * rates.efficiency for name, rate in rates.products.items()}
    names = ("launch_s", "host_factor", "kernel_s", "memory", "host_link", "node_link")
    names += ("network", "node_hop_s", "network_hop_s")
    given = {name: float(getattr(rates, name)) for name in names}
    extension.set_rates(given | {"other_products": products["float32"]}, products)
    extension.set_options(False, False, False)
    extension.set_mode("timed", 0, 0.0)
    dist.distributed_c10d.ProcessGroupGloo = _LoneGloo  # type: ignore[misc] - it would find peers


class _IsLone(type):
    def __instancecheck__(cls, made: object) -> bool:
        return isinstance(made, extension.Lone)


class _LoneGloo(metaclass=_IsLone):
    """What torch makes for gloo in the timed mode: no peers are looked for."""

    def __new__(cls, _: Any, rank: int, size: int, **__: Any) -> Any:
        lone = extension.Lone(rank, size)
        if not hasattr(lone, "options"):  # before torch 2.14, which sets fields of them
            lone.options = SimpleNamespace()
        return lone


def host_seconds() -> float:
    """Return how far the host is in the timed mode, in seconds since it began."""
    return extension.host_seconds()


def take_spans() -> list[Span]:
    """Return what has run in the timed mode since the last call, in the order of launches."""
    return [Span(*span) for span in extension.take_spans()]


def set_mode(
    mode: Literal["eager", "late", "random"], *, seed: int = 0, chance: float = 0.3
) -> None:
    """Say when tasks run, from now on; what is queued runs first.

    Args:
        mode: "eager": when they are launched. "late": when the host, or another rank, waits for
            their results. "random": a few of any stream after each launch.
        seed: Of the random mode's moments. In one process, equal seeds give equal runs.
        chance: In random mode, of one more step after a launch; below 1.
    """
    if not 0 <= chance < 1:
        raise ValueError(f"expected a chance from 0 to below 1, got {chance}")
    global _timed_on  # noqa: PLW0603 - of this process
    if _timed_on is not None:
        _timed_on = None
        set_options()
        dist.distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo  # type: ignore[misc]
    extension.set_mode(mode, seed, chance)


def set_options(*, poison: bool = True, orders: bool = True, strict_pageable: bool = False) -> None:
    """Set all options; those that are not named get their defaults.

    Args:
        poison: Overwrite memory by NaN when it is freed and when it is new, in its stream's order.
        orders: Look for unordered uses.
        strict_pageable: Let non-blocking copies to pageable memory run as late as those to pinned
            memory. CUDA's wait for the device, mostly, and promise nothing.
    """
    extension.set_options(poison, orders, strict_pageable)


def set_sync_debug_mode(mode: Literal["default", "warn", "error"]) -> None:
    """Say what happens when the host waits for the device, like torch.cuda.set_sync_debug_mode.

    As with CUDA, synchronize() of a device or an event is asked for, and passes.
    """
    extension.set_sync_debug_mode(mode)


def set_memory_limit(limit_bytes: int) -> None:
    """Let each device allocate at most this many bytes, rounded blocks counted; 0: all it has."""
    extension.set_memory_limit(limit_bytes)


def take_unordered_uses() -> list[str]:
    """Return a line for each pair of uses that nothing orders, found since the last call.

    They are of the same bytes, at least one of them writes, and they are on two streams, or one is
    the host's and the other a copy's. Memory that its stream hands on while another stream uses it
    counts, too.
    """
    return extension.take_unordered_uses()


def take_host_waits() -> dict[str, int]:
    """Return how often the host has waited for a device since the last call, by kind.

    Kinds: "item", "copy D2H", "copy H2D", "copy D2H of pageable memory", "synchronize",
    "event.synchronize", "stream.synchronize", "barrier", "work.wait(timeout)", and operators whose
    results have a shape that depends on values, like "aten::nonzero".
    """
    return extension.take_host_waits()


def launches() -> dict[str, int]:
    """Return how many tasks were launched since the process began, by name.

    Kernels are named by their operator ("aten::addmm"), copies "copy", "copy H2D" and "copy D2H",
    collectives as torch.distributed names them, marks and waits for them "record" and "wait".
    """
    return extension.launches()


def kernels_without_meta() -> dict[str, int]:
    """Return the operators that waited for the device to learn their shapes, and how often.

    torch has no meta kernel for them, so they are host waits that another device would not have.
    """
    return extension.kernels_without_meta()


class default_device(TorchFunctionMode):
    """A context in which tensors that are created without a device are created on "sim".

    Random numbers of a CPU's generator are moved there; tensors that ask for pinned memory stay on
    the host. `default_device().__enter__()` holds for the rest of the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with a device where it creates a tensor and has none."""
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            return func(*args, **kwargs).to("sim")
        kwargs["device"] = "cpu" if kwargs.get("pin_memory") else "sim"
        return func(*args, **kwargs)


def _make_backend(given: Any, _: Any) -> dist.Backend:
    rank, size = given.group_rank, given.group_size
    if _timed_on is None:
        inner = dist.ProcessGroupGloo(given.store, rank, size, given.timeout)
        return extension.SimCCL(rank, size, inner, 1)
    inner = extension.Lone(rank, size)
    members = given.global_ranks_in_group or range(size)
    num_nodes = len({member // _timed_on.ranks_per_node for member in members})
    return extension.SimCCL(rank, size, inner, num_nodes)


def _register() -> None:
    """Make torch know the device, its module and its backend; once in a process."""
    torch.utils.rename_privateuse1_backend("sim")
    from simulated_device import torch_module  # noqa: PLC0415 - it names the device

    torch._register_device_module("sim", torch_module)
    sys.modules["torch.sim"] = torch_module
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simccl", _make_backend, extended_api=True, devices=["sim"])
    # Before the interpreter ends: workers must not run while torch is being destroyed.
    atexit.register(extension.end_process)
    mode, _, seed = os.environ.get("SIM_MODE", "late").partition(":")
    set_mode(mode, seed=int(seed or 0))  # type: ignore[arg-type]


if not _IS_BUILDING:
    _register()
