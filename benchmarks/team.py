"""Ranks of one system, as processes that the benchmark starts, sends requests to and ends.

A job is a function that is called on each rank, and returns callables by name, which answer
requests. A rank runs in the environment of its system, so this file imports nothing but torch.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from network import Node


class TeamError(RuntimeError):
    """A rank of a system failed, died or did not answer; the message has its traceback."""


@final
class Team:
    """All ranks of one system. Between requests they block on their pipes and cost no CPU."""

    def __init__(
        self,
        job: str,
        *,
        world_size: int = 1,
        python: str = "",
        environment: Mapping[str, str] | None = None,
        nodes: Sequence[Node] = (),
        timeout_s: float = 600.0,
        **arguments: Any,
    ) -> None:
        """Start one process per rank.

        Args:
            job: As `module:function`.
            world_size: How many ranks. More than one meet in a gloo group.
            python: The interpreter of another environment; PYTHONPATH is not passed to it.
            environment: Changes to the environment of each rank.
            nodes: Nodes to run on, equally many ranks on each, in rank order; when empty, ranks
                run without network namespaces.
            timeout_s: The longest wait for a rank.
            arguments: Arguments of the job; plain values, since they are sent through a pipe.
        """
        self.name = arguments.get("system", job)
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        meeting = Path(self._folder.name, "meeting")
        for rank in range(world_size):
            variables, launcher = _environment(rank, world_size, python), []
            if nodes:
                per_node = world_size // len(nodes)
                node = nodes[rank // per_node]
                launcher = node.launcher
                local = {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
                variables |= node.environment | {k: str(v) for k, v in local.items()}
            variables |= environment or {}
            ours, theirs = Pipe()
            with self._log(rank).open("wb") as output:
                process = subprocess.Popen(
                    [*launcher, python or sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=variables,
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends them
                )
            theirs.close()
            ours.send((job, arguments, str(meeting), timeout_s))
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, verb: str, *arguments: object) -> list[Any]:
        """Send one request to every rank and return the answers in rank order. Blocking.

        Raises:
            TeamError: A rank failed, died, or did not answer in time. The team is ended.
        """
        for pipe in self._pipes:
            try:
                pipe.send((verb, *arguments))
            except OSError:
                continue  # the rank has died; receiving its answer below raises the error
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=deadline_s - time.monotonic())
            if not ready:
                silent = ", ".join(map(str, waiting.values()))
                self._fail(f"no answer from rank {silent} within {self._timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    has_failed, answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._fail(f"rank {rank} {self._last_words(rank)}")
                if has_failed:
                    self._fail(f"rank {rank} raised\n{answers[rank]}")
        return [answers[rank] for rank in sorted(answers)]

    def slowest(self, verb: str, *arguments: object) -> list[Any]:
        """Ask for figures, and return the largest value of each over all ranks."""
        return [max(of_ranks) for of_ranks in zip(*self.ask(verb, *arguments), strict=True)]

    def end(self) -> None:
        """Close the pipes, and kill processes that do not end in time. May be called twice."""
        for pipe in self._pipes:
            pipe.close()
        deadline_s = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        """Return the team, which ends with the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the team."""
        self.end()

    def _fail(self, what: str) -> NoReturn:
        for process in self._processes:
            process.kill()
        self.end()
        raise TeamError(f"{self.name}: {what}")

    def _last_words(self, rank: int) -> str:
        try:
            status = f"died with status {self._processes[rank].wait(5)}"
        except subprocess.TimeoutExpired:
            status = "hung up"
        return "\n".join([status, *self._log(rank).read_text(errors="replace").splitlines()[-15:]])

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.log")


def _environment(rank: int, world_size: int, python: str) -> dict[str, str]:
    """Return torchrun's variables, without an address, for one thread and no GPU."""
    environment = dict(os.environ)
    if python:  # DeepSpeed's environment: its compiler is beside its interpreter
        environment.pop("PYTHONPATH", None)
        environment["DS_ACCELERATOR"] = "cpu"
        environment["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"
    if sys.platform == "linux":
        # Otherwise gloo looks up the host's name.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment | {
        "CUDA_VISIBLE_DEVICES": "",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MKL_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }


def _serve(parent: Connection) -> None:
    """Answer requests, (verb, *arguments), until the parent closes the pipe or one fails."""
    job, arguments, meeting, timeout_s = parent.recv()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_num_interop_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    module, _, function = job.partition(":")
    verbs = getattr(importlib.import_module(module), function)(**arguments)
    while True:
        verb, *given = parent.recv()
        parent.send((False, verbs[verb](*given)))


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    try:
        _serve(pipe)
    except EOFError:
        pass
    except BaseException:  # the parent prints any error
        pipe.send((True, traceback.format_exc()))
    sys.stderr.flush()
    sys.stdout.flush()
    # An ordinary exit would wait for a collective that other ranks have left.
    os._exit(0)
