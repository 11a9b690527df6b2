"""The ranks of one system, as processes that the benchmark starts, asks and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from network import Node
    from worker import Assignment

WORKER: Final = Path(__file__).with_name("worker.py")


class TeamError(RuntimeError):
    """A rank of a system failed, died or fell silent; the message carries its traceback."""


@final
class Team:
    """All ranks of one system. Between requests they block on their pipes and cost no CPU."""

    def __init__(
        self,
        assignments: list[Assignment],
        *,
        python: str,
        is_foreign: bool,
        folder: Path,
        nodes: Sequence[Node] = (),
        worker: Path = WORKER,
    ) -> None:
        """Start one process per assignment.

        Args:
            assignments: One per rank, in rank order.
            python: The interpreter of the system's environment.
            is_foreign: Whether that is not ours, so that our paths must not leak into it.
            folder: Where the ranks' output goes, one log each.
            nodes: On which they run, as many on each, in their order; nowhere in particular when
                empty.
            worker: The script that each runs.
        """
        self.name = assignments[0].system
        self._timeout_s = assignments[0].timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._worker = worker
        self._logs = [folder / f"{self.name}-{one.rank}.log" for one in assignments]
        for assignment, log in zip(assignments, self._logs, strict=True):
            environment, launcher = _environment(assignment, is_foreign), []
            if nodes:
                per_node = assignment.world_size // len(nodes)
                node = nodes[assignment.rank // per_node]
                launcher = node.launcher
                local = {"LOCAL_RANK": assignment.rank % per_node, "LOCAL_WORLD_SIZE": per_node}
                environment |= node.environment | {k: str(v) for k, v in local.items()}
            with log.open("wb") as output:
                self._start(assignment, [*launcher, python], environment, output)

    def _start(
        self,
        assignment: Assignment,
        python: Sequence[str],
        environment: dict[str, str],
        output: IO[bytes],
    ) -> None:
        ours, theirs = Pipe()
        self._pipes.append(ours)
        self._processes.append(
            subprocess.Popen(
                [*python, str(self._worker), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends them
            )
        )
        theirs.close()
        ours.send(asdict(assignment))

    def ask(self, verb: str, *arguments: object) -> list[dict[str, Any]]:
        """Send one request to every rank and return the answers in rank order. Blocking.

        Raises:
            TeamError: A rank failed, died, or did not answer in time. The team is ended.
        """
        for pipe in self._pipes:
            try:
                pipe.send((verb, *arguments))
            except OSError:
                continue  # it died meanwhile, as collecting will find
        return self._collect()

    def end(self) -> None:
        """Hang up, and kill what has not left soon after. May be called twice."""
        for pipe in self._pipes:
            pipe.close()
        deadline_s = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _collect(self) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
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
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._fail(f"rank {rank} {self._last_words(rank)}")
                if "error" in answers[rank]:
                    self._fail(f"rank {rank} raised\n{answers[rank]['error']}")
        return [answers[rank] for rank in sorted(answers)]

    def _fail(self, what: str) -> None:
        for process in self._processes:
            process.kill()
        self.end()
        raise TeamError(f"{self.name}: {what}")

    def _last_words(self, rank: int) -> str:
        try:
            status = f"died with status {self._processes[rank].wait(5)}"
        except subprocess.TimeoutExpired:
            status = "hung up"
        log = self._logs[rank].read_text(errors="replace").splitlines()
        return "\n".join([status, *log[-15:]])


def _environment(assignment: Assignment, is_foreign: bool) -> dict[str, str]:
    """What torchrun would set, except that ranks meet at a file; and one thread each."""
    environment = dict(os.environ)
    if is_foreign:
        environment.pop("PYTHONPATH", None)
        environment["DS_ACCELERATOR"] = "cpu"
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it asks what the host name means
    return environment | {
        "CUDA_VISIBLE_DEVICES": "",
        "LOCAL_RANK": str(assignment.rank),
        "LOCAL_WORLD_SIZE": str(assignment.world_size),
        "MKL_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
    }
