"""The script of docs/guides/lost-hosts.md goes on when a rank, then a host is lost and comes back.

Hosts are agents of torchrun on this machine, with one rank each.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

PAGE: Final = (Path(__file__).parents[1] / "docs/guides/lost-hosts.md").read_text()
BEGIN: Final = re.compile(r"^ *world size (\d+): begin at step (\d+)$", re.M)
SAVED: Final = re.compile(r"^ *step (\d+): loss (\S+), checkpoint in run/step-\1$", re.M)
LIMIT_S: Final = 60  # of the start of all ranks: imports, two rendezvous
OF_ONE_MACHINE: Final = {  # what stands in the page's command, and what a test needs
    "torchrun": f"{sys.executable} -m torch.distributed.run",
    "--nnodes=1:4": "--nnodes=1:2 --local-addr=127.0.0.1 --monitor-interval=0.1",
    "--nproc-per-node=8": "--nproc-per-node=1",
    "last_call_timeout=10": "last_call_timeout=1,keep_alive_interval=1",
}


class _Host:
    """An agent and its rank, which print to a file."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self.log = folder / f"{name}.txt"
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ZERO_REPORT": "off"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the page says
        with self.log.open("wb") as out:
            self._agent = subprocess.Popen(
                command, env=os.environ | env, cwd=folder, stdout=out, stderr=out
            )

    def lose_rank(self) -> None:
        """Kill the rank; the agent goes on."""
        pid = self._agent.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def lose(self) -> None:
        """Kill the agent and its rank, none of which can say anything."""
        self._agent.send_signal(signal.SIGSTOP)  # so that it starts no other rank
        self.lose_rank()
        self._agent.kill()
        self._agent.wait()

    def end(self) -> None:
        """Let the agent end its rank, and kill both after a while."""
        self._agent.terminate()
        try:
            self._agent.wait(20)
        except subprocess.TimeoutExpired:
            self.lose()


class _Job:
    """Hosts of one job, and what all of their ranks have printed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts = folder, list[_Host]()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{found.getsockname()[1]}"
        [script] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
        (folder / "train.py").write_text(script)
        [command] = re.findall(r"^(torchrun .*?)\n```", PAGE, re.M | re.S)
        for there, here in {**OF_ONE_MACHINE, "node0:29500": endpoint}.items():
            assert command.count(there) == 1, there
            command = command.replace(there, here)
        self._command = shlex.split(command.replace("\\\n", " "))

    def start_host(self) -> _Host:
        is_first = not self.hosts  # where agents meet, as node0 is: it must be the one that stays
        command = [w + f",is_host={is_first:d}" * ("=last_call" in w) for w in self._command]
        host = _Host(command, self.folder, f"host-{len(self.hosts)}")
        self.hosts.append(host)
        return host

    def printed(self) -> str:
        return "".join(host.log.read_text() for host in self.hosts)

    def begins(self, size: int) -> list[int]:
        """First steps of ranks of this number, in no order."""
        return [int(step) for found, step in BEGIN.findall(self.printed()) if int(found) == size]

    def last_saved(self) -> int:
        return max((int(step) for step, _ in SAVED.findall(self.printed())), default=0)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < until, f"not in {LIMIT_S} s: {what}\n{self.printed()[-9000:]}"
            time.sleep(0.05)

    def go_on(self, after: Callable[[], object], size: int) -> None:
        """Wait until ranks of this number go on from what was saved, and have saved twice.

        Others may begin in between: an agent that is fast does not wait long for the other.
        """
        num, saved = len(self.begins(size)), self.last_saved()
        after()
        self.wait_until(lambda: len(self.begins(size)) > num, f"a start of {size} ranks")
        first = max(self.begins(size))
        assert first >= saved
        self.wait_until(lambda: self.last_saved() >= first + 20, "two more checkpoints")


@contextmanager
def _job(folder: Path) -> Iterator[_Job]:
    job = _Job(folder)
    try:
        yield job
    finally:
        for host in job.hosts:
            host.end()


def _plain_losses(num_steps: int) -> list[float]:
    """Of each step of the script's model, in one process by plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(num_steps):
        x = torch.randn(96, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.drawn(3)
@pytest.mark.slow
@pytest.mark.cpu_only("agents of torchrun start ranks of their own")
def test_training_goes_on_with_the_hosts_that_there_are(tmp_path: Path) -> None:
    """Each start takes what was saved last, and losses are those of plain torch in one process."""
    with _job(tmp_path) as job:
        job.start_host()
        job.go_on(job.start_host, size=2)
        job.go_on(job.hosts[1].lose_rank, size=2)
        job.go_on(job.hosts[1].lose, size=1)
        job.go_on(job.start_host, size=2)

    seen = SAVED.findall(job.printed()) + SAVED.findall(PAGE)
    plain = _plain_losses(max(int(step) for step, _ in seen))
    for step, loss in seen:
        assert float(loss) == pytest.approx(plain[int(step) - 1], rel=1e-3, abs=2e-4), step
    assert len(seen) >= 8
