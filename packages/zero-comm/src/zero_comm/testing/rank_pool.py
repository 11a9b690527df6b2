"""Several ranks on one machine, for tests: workers that stay, and bodies that are sent to them.

Importing torch costs seconds, so it happens once, in a fork server that all workers of a session
come from, and the workers of a `RankPool` are kept. Each run gets a process group of its own, which
costs milliseconds, so that a message that one body forgot cannot arrive in the next. Ranks meet at
a file, never at a port.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib.util
import inspect
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field, frozen, validators
from torch import Tensor

from zero_comm.errors import RankFailedError
from zero_comm.group import Group
from zero_comm.torch_private import DefaultDeviceMode, accelerator, creates_tensor

# Importing torch takes long on a busy machine with two cores.
_START_TIMEOUT_S: Final = 180.0
# How long to wait for the original error after one that looks like its consequence.
_ECHO_S: Final = 2.0
# How long a worker waits for a request before it collects what the last run has left.
_IDLE_S: Final = 0.5
# Process groups of gloo have three threads each, one of which wakes up 100 times a second. Groups
# that bodies keep, in a cache for example, stay until a worker ends: sixty of them on four ranks
# take a fifth of two cores. Starting workers takes a tenth of a second.
_MOST_THREADS: Final = 64
# Longer than any run, so that a hang is reported by the pool, which knows every rank.
_GROUP_MARGIN_S: Final = 60.0

# First parts of names of modules that take long to load and may be loaded before a fork.
_LOADED_ONCE: Final = (
    "zero_",
    "torch",
    "numpy",
    "pytest",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
)

_ECHO: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out|did not finish", re.IGNORECASE
)


@frozen
class _Request:
    """A body for a worker to run, with its arguments."""

    file: str
    name: str
    kwargs: dict[str, Any]
    rendezvous: str  # path of a file that does not exist yet
    timeout_s: float
    # Those of the caller, so that a warning is an error in a rank where it is one in the caller.
    warning_filters: list[Any]


@frozen
class _Global:
    """A function that the body's file knows by this name, sent as the body is."""

    name: str


@frozen
class _Reply:
    """A worker's answer: a pickled value, or the text of a traceback."""

    value: bytes = b""
    error: str = ""
    is_echo: bool = False  # whether it looks like the consequence of another rank's failure


@frozen(eq=False)
class _Worker:
    """One rank, seen from the parent."""

    process: BaseProcess
    link: Connection
    stack_file: Path


@define(eq=False)
class RankPool:
    """Worker processes, one per rank, that run the same function side by side.

    The workers start with the first `run` and stay until `close`, or until a rank fails: a worker
    whose peers failed cannot be trusted, so all are killed and the next `run` starts new ones. It
    starts new ones also where process groups that earlier bodies kept have left a worker with many
    threads.
    """

    world_size: int = field(validator=validators.ge(1))
    device: str = "cpu"  # type of device of the ranks' groups
    _workers: list[_Worker] = field(factory=list, init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)
    _num_runs: int = field(default=0, init=False)

    def run(
        self, body: Callable[..., Any], *, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call `body(group, **kwargs)` on every rank; block until all have returned.

        Every rank gets a new group (a solo group when the world size is 1), one thread, the same
        seed and the caller's warning filters. The group is of gloo on the CPU; on another device it
        has gloo for tensors on the CPU, and the backend that torch takes by default for the device.
        What `body` creates without naming a device is created on that one.

        Args:
            body: A top-level function. It is sent as (file, name), because a test module has no
                importable name, and its file is imported in the worker, where it may import its
                neighbours. Or a `functools.partial` of one: its keywords may have any name.
            timeout_s: How long to wait for the slowest rank, in seconds, once the workers stand.
            **kwargs: Sent by pickle, as the results are: values of classes that both sides can
                import, tensors included; functions of the body's file as the body is.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailedError: A rank raised (its traceback is in the message), died, or did not
                answer in time (its Python stack is in the message).
            ValueError: `body` is not a top-level function of a file.
        """
        if isinstance(body, functools.partial) and not body.args:
            body, kwargs = body.func, {**body.keywords, **kwargs}
        file, name = _address(body)
        if max(map(_num_threads, self.pids), default=0) > _MOST_THREADS:
            self.close()
        if not self._workers:
            self._start()
        assert self._folder is not None, "a pool with workers has a folder"
        self._num_runs += 1
        known = {id(of): name for name, of in body.__globals__.items() if inspect.isfunction(of)}
        sent = {
            key: _Global(known[id(value)]) if id(value) in known else value
            for key, value in kwargs.items()
        }
        request = _Request(
            file=file,
            name=name,
            kwargs=sent,
            rendezvous=str(Path(self._folder.name, f"run-{self._num_runs}")),
            timeout_s=timeout_s,
            warning_filters=list(warnings.filters),
        )
        message = pickle.dumps(request)
        try:
            for worker in self._workers:
                # A worker that has died is noticed by `_listen`.
                with contextlib.suppress(BrokenPipeError):
                    worker.link.send_bytes(message)
            replies = self._listen(timeout_s, doing=f"running {name}()")
        except BaseException:
            # After Ctrl-C too, as ranks may still run the body.
            self.close()
            raise
        return [pickle.loads(reply.value) for reply in replies]

    def close(self) -> None:
        """Kill the workers. The next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.link.close()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __attrs_post_init__(self) -> None:
        if self.device == "cpu":
            return
        found = accelerator()
        if found is None or found.type != self.device:
            others = "no accelerator" if found is None else repr(found.type)
            raise ValueError(
                f"expected a kind of device that this process has, 'cpu' or {others}, got "
                f"{self.device!r}; import the package that brings it, or leave out device= "
                "(pytest: --device)"
            )

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty before the first run and after a failure."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = get_context("forkserver")
        # The fork server only imports these, so it has no thread and no CUDA context when it forks.
        context.set_forkserver_preload(_worth_loading_once())
        for rank in range(self.world_size):
            stack_file = Path(self._folder.name, f"stack-{rank}")
            stack_file.touch()
            link, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, self.device, str(stack_file)),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            # With this end closed here, the link ends when the worker dies.
            theirs.close()
            self._workers.append(_Worker(process, link, stack_file))
        try:
            self._listen(_START_TIMEOUT_S, doing="starting")
        except BaseException:
            self.close()
            raise

    def _listen(self, timeout_s: float, *, doing: str) -> list[_Reply]:
        """One reply per rank, or the error of the rank that failed first of its own accord."""
        deadline = time.monotonic() + timeout_s
        replies: dict[int, _Reply] = {}
        failed: list[int] = []
        while len(replies) < self.world_size:
            silent = [rank for rank in range(self.world_size) if rank not in replies]
            # An end of the worker ends its link too, so the link is all there is to watch.
            links = [self._workers[rank].link for rank in silent]
            ready = connection.wait(links, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in silent:
                if self._workers[rank].link not in ready:
                    continue
                replies[rank] = self._receive(rank, doing)
                if replies[rank].error:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _ECHO_S)
            if any(not replies[rank].is_echo for rank in failed):
                break

        if failed:
            first = min(failed, key=lambda rank: replies[rank].is_echo)
            raise RankFailedError(
                f"rank {first} of {self.world_size} failed while {doing}:\n{replies[first].error}"
            )
        if len(replies) < self.world_size:
            silent = [rank for rank in range(self.world_size) if rank not in replies]
            raise RankFailedError(
                f"no answer within {timeout_s:g} s while {doing}: ranks {silent} of "
                f"{self.world_size} did not return. A rank that leaves a collective out leaves its "
                f"peers waiting.\n{self._stacks(silent)}"
            )
        return [replies[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, doing: str) -> _Reply:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.link.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5.0)
            code = worker.process.exitcode
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
            return _Reply(
                error=f"the process ended {how or f'with exit code {code}'} while {doing}"
            )

    def _stacks(self, ranks: list[int]) -> str:
        """Return the current Python stack of each of these ranks, as text."""
        pids = self.pids
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        files = [self._workers[rank].stack_file for rank in ranks]
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files):
            time.sleep(0.05)
        # The last lines may still be missing.
        time.sleep(0.05)
        return "\n".join(
            f"rank {rank} is at\n{file.read_text()}"
            for rank, file in zip(ranks, files, strict=True)
        )


def _worth_loading_once() -> list[str]:
    """Return names of modules that the fork server loads once for all ranks, as torch's and ours.

    Only those that this session has loaded. Its other modules are left out: they may start threads.
    """
    found = [name for name in sys.modules if name.split(".")[0].startswith(_LOADED_ONCE)]
    return [__name__, *sorted(found)]


def _num_threads(pid: int) -> int:
    """Return the number of a process's threads; 0 where the system does not say."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0


def _address(body: Callable[..., Any]) -> tuple[str, str]:
    name = getattr(body, "__qualname__", repr(body))
    file = inspect.getsourcefile(inspect.unwrap(body)) if inspect.isfunction(body) else None
    if file is None or not name.isidentifier():
        raise ValueError(
            f"expected a top-level function of a file, got {name}; a rank imports the body by its "
            "name, so pass what it closes over as keyword arguments"
        )
    return str(Path(file).resolve()), name


def _serve(link: Connection, rank: int, world_size: int, device: str, stack_file: str) -> None:
    """Answer requests until the parent ends."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # gloo would look up the host's name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Collections, which tests ask for often, are faster without the objects of loaded modules.
    gc.freeze()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        link.send_bytes(pickle.dumps(_Reply()))
        while True:
            try:
                if not link.poll(_IDLE_S):
                    # Threads of the last run's groups and models end when these are collected.
                    gc.collect()
                message = link.recv_bytes()
            except EOFError:
                return
            link.send_bytes(pickle.dumps(_answer(message, rank, world_size, device)))


def _die_with_parent() -> None:
    """End this process when its parent has ended, even while the rank waits for a peer."""
    parent = parent_process()
    assert parent is not None, "workers are started by a RankPool"
    connection.wait([parent.sentinel])
    os._exit(1)


def _answer(message: bytes, rank: int, world_size: int, device: str) -> _Reply:
    try:
        request = pickle.loads(message)
        importable = _importable(Path(request.file).parent)
        with _fresh_state(request), importable, _on(device):
            module = _load(request.file)
            kwargs = {
                key: getattr(module, value.name) if isinstance(value, _Global) else value
                for key, value in request.kwargs.items()
            }
            group = _join(request, rank, world_size, device)
            body = getattr(module, request.name)
            if device == "cpu":
                return _Reply(value=pickle.dumps(body(group, **kwargs)))
            with _raising_what_finalizers_raise():
                result = body(group, **kwargs)
                # An error of work that the body left on the device is raised here.
                torch.accelerator.synchronize()
            return _Reply(value=pickle.dumps(result))
    except BaseException as error:
        # pytest.fail() and sys.exit() raise no Exception.
        is_echo = isinstance(error, RuntimeError) and _ECHO.search(str(error)) is not None
        return _Reply(error=traceback.format_exc(), is_echo=is_echo)


@contextlib.contextmanager
def _raising_what_finalizers_raise() -> Iterator[None]:
    """Raise at the end the first error of a finalizer, which Python prints and ignores.

    A finalizer that waits for the device, as that of pinned memory, also gets earlier errors.
    """
    lost: list[BaseException] = []
    hook = sys.unraisablehook

    def keep(unraisable: Any) -> None:
        hook(unraisable)
        lost.append(unraisable.exc_value)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = hook
    if lost:
        raise lost[0]


def _join(request: _Request, rank: int, world_size: int, device: str) -> Group:
    _leave()
    backend = "gloo"
    if device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        backend = f"cpu:gloo,{device}:{dist.Backend.default_device_backend_map[device]}"
    if world_size == 1:
        return Group.solo(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(request.rendezvous, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=request.timeout_s + _GROUP_MARGIN_S),
    )
    return Group.from_process_group()


def _leave() -> None:
    """Destroy the last run's group: all ranks have answered, none needs it."""
    if dist.is_initialized():
        last = [dist.group.WORLD]
        dist.destroy_process_group()
        # Dropping the last reference waits for the group's threads, which wake up every 10 ms: so
        # another thread does it.
        threading.Thread(target=last.clear).start()


@contextlib.contextmanager
def _fresh_state(request: _Request) -> Iterator[None]:
    """Start every run alike, and leave no mark of it: seed, defaults of torch, environment."""
    environment, folder = dict(os.environ), Path.cwd()
    random.seed(0)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.filters = request.warning_filters
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


class _DefaultDevice(DefaultDeviceMode):
    """Creates tensors on a device where a call names none.

    torch's mode refuses random values of a CPU's generator, and pinned memory. Here such values are
    drawn on the CPU and copied, so that a test has the same on every device, and pinned memory is
    the host's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        generator = kwargs.get("generator")
        draws_on_cpu = generator is not None and generator.device.type == "cpu"
        if creates_tensor(func) and kwargs.get("device") is None:
            if draws_on_cpu:
                return func(*args, **kwargs).to(self.device)
            if kwargs.get("pin_memory"):
                return func(*args, **kwargs)
        elif draws_on_cpu and args and isinstance(args[0], Tensor) and not args[0].is_cpu:
            # A method such as `normal_`, or a function such as `bernoulli`.
            drawn = func(args[0].cpu(), *args[1:], **kwargs)
            is_in_place = getattr(func, "__name__", "").endswith("_")
            return args[0].copy_(drawn) if is_in_place else drawn.to(self.device)
        elif draws_on_cpu and isinstance(kwargs.get("tensor"), Tensor):
            # A function of `torch.nn.init`.
            target = kwargs["tensor"]
            with torch.no_grad():
                return target.copy_(func(**{**kwargs, "tensor": target.cpu()}))
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Create on a device what is created inside without naming one; "cpu" changes nothing."""
    if device == "cpu":
        yield
        return
    mode = _DefaultDevice(torch.device(device))
    _DEFAULT_DEVICES.append(mode)
    try:
        with mode:
            yield
    finally:
        _DEFAULT_DEVICES.pop()


# Default devices that the body in this process runs under, outermost first.
_DEFAULT_DEVICES: Final[list[_DefaultDevice]] = []


@contextlib.contextmanager
def without_default_device() -> Iterator[None]:
    """Inside, a rank creates tensors where the programs of users do: on the CPU. Local."""
    modes = list(_DEFAULT_DEVICES)
    for mode in modes:
        mode.__exit__(None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            mode.__enter__()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _load(file: str) -> ModuleType:
    """The module of a file, under a name of our own, loaded once."""
    name = f"_ranks_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, f"{file} is no Python file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
