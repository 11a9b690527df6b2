"""Training that is killed and started again for minutes, its losses those of plain torch.

    hatch run crash --minutes 5      # kills at drawn moments; other ranks, stages, places go on
    hatch run soak --minutes 5       # many steps, saves and loads in one process: nothing grows
    hatch run elastic --minutes 5    # torchrun starts ranks again; a node leaves and comes back

The first line has the seed (`--seed`), the last one counts. A law that does not hold ends the run
with its seed, the life that broke it, and what its ranks printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import parity
import torch

# Optimizers load it at their first step: here it is loaded once for all ranks.
import torch._dynamo
import torch.distributed as dist
import zero_comm
import zero_engine
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import CommError, Group
from zero_engine import FileError, Offload, Saver

NUM_PARTS: Final = 6  # of a step's batch; the ranks share them equally
SAVE_EVERY: Final = 4  # steps
TOLERANCE: Final = 1e-5  # sums over other numbers of ranks round otherwise
PATIENCE_S: Final = 0.5
TIMEOUT_S: Final = 20  # of torchrun's ranks: how long one waits for a node that is cut off
SURVIVOR_S: Final = 40  # in which ranks that are left must end: a background save takes 10
ENDED: Final = 7  # exit status of a rank that was told of another's death


# ---- What is trained ----


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer at every call."""
    model = parity.build(parity.tiny_float32)
    groups = parity.param_groups(model)
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """The mean loss of this rank's parts of the batch of `step`."""
    mine = range(rank * NUM_PARTS // size, (rank + 1) * NUM_PARTS // size)
    parts = [parity.batch(step, 0, part) for part in mine]
    tokens, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    return parity.loss_of(model, (tokens, targets))


def plain_losses() -> Iterator[float]:
    """The loss of each step by plain torch in one process."""
    model, optimizer = build()
    for step in itertools.count():
        loss = loss_of(model, step, 0, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@frozen
class Life:
    """How a job trains until it is killed; the next may differ in all of it."""

    size: int  # ranks
    stage: int
    optimizer_on: str
    params_on: str
    in_background: bool

    @classmethod
    def draw(cls, draw: random.Random, sizes: Sequence[int] = (1, 2, 3)) -> Life:
        """Any that there is."""
        stage = draw.randrange(4)
        optimizer_on = draw.choice(("device", "host", "disk")) if stage else "device"
        params_on = draw.choice(("device", optimizer_on)) if stage == 3 else "device"
        return cls(draw.choice(sizes), stage, optimizer_on, params_on, draw.random() < 0.5)

    def shard(self, group: Group, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and optimizer, sharded so."""
        model, optimizer = build()
        swap = folder / "swap" if self.optimizer_on == "disk" else None
        offload = Offload(optimizer=self.optimizer_on, params=self.params_on, path=swap)
        zero_engine.shard(
            model, optimizer, parity.ZeroConfig(self.stage, offload=offload), group=group
        )
        return model, optimizer


Say = Callable[..., None]  # writes a line of words that the driver reads


def train(folder: Path, life: Life, group: Group, say: Say) -> None:
    """Begin or go on, and train until killed."""
    model, optimizer = life.shard(group, folder)
    say("load")
    report = zero_engine.load(folder / "run", model, optimizer, missing_ok=True)
    first = 0 if report is None else report.step
    say("loaded", first)
    with Saver(folder / "run", model, optimizer, keep=2) as saver:
        for step in itertools.count(first):
            mean = train_step(group, model, optimizer, step)
            say("step", step, mean.hex(), group.world_size)
            if (step + 1) % SAVE_EVERY == 0:
                say("save", step + 1)
                if life.in_background:
                    saver.save(step=step + 1)
                else:
                    zero_engine.save(folder / "run", model, optimizer, step=step + 1, keep=2)
                    say("saved", step + 1)


def train_step(
    group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> float:
    """The loss of all ranks."""
    loss = loss_of(model, step, group.rank, group.world_size)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().reshape(1)
    zero_comm.all_reduce_coalesced([mean], group=group).wait()
    return mean.item()


# ---- Ranks ----


@define
class Ranks:
    """Forked processes of a job, and what they say."""

    folder: Path
    life: Life
    pids: list[int] = field(factory=list)  # that were not waited for; position: rank
    _pipe: int = -1
    _rest: bytes = b""

    @classmethod
    def start(cls, folder: Path, life: Life, body: Callable[..., None] = train) -> Ranks:
        """Run `body` on each rank."""
        (folder / "swap").mkdir(parents=True, exist_ok=True)
        meeting = folder / f"meeting-{time.monotonic_ns()}"
        reading, writing = os.pipe()
        ranks = cls(folder, life, pipe=reading)
        for rank in range(life.size):
            if pid := os.fork():
                ranks.pids.append(pid)
                continue
            os.close(reading)
            output = os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run = partial(body, folder, life)
            os._exit(_be_rank(rank, life, meeting, writing, run))
        os.close(writing)
        return ranks

    def lines(self, until: float) -> Iterator[list[str]]:
        """Rank and words of each line, until all ranks have ended or that time."""
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], left)[0]:
                return
            if not (read := os.read(self._pipe, 65536)):
                return
            *lines, self._rest = (self._rest + read).split(b"\n")
            yield from (line.decode().split(" ") for line in lines)

    def kill(self, rank: int) -> None:
        """At once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self, limit_s: float) -> list[int]:
        """Wait for all; exit statuses, negative for signals. Who takes longer is killed: -9."""
        until = time.monotonic() + limit_s
        statuses = []
        for rank, pid in enumerate(self.pids):
            while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    self.kill(rank)
                time.sleep(0.005)
            statuses.append(os.waitstatus_to_exitcode(ended[1]))
        os.close(self._pipe)
        return statuses

    def printed(self) -> str:
        """What ranks wrote to stdout and stderr."""
        files = [self.folder / f"rank-{rank}.txt" for rank in range(self.life.size)]
        return "\n".join(f"-- {each.name}\n{each.read_text()}" for each in files)


def _be_rank(
    rank: int, life: Life, meeting: Path, pipe: int, body: Callable[[Group, Say], None]
) -> int:
    """Run `body`; the exit status."""

    def say(*words: object) -> None:
        os.write(pipe, f"{rank} {' '.join(map(str, words))}\n".encode())

    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=life.size
        )
        body(Group.from_process_group(patience_s=PATIENCE_S), say)
    except (CommError, FileError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return ENDED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


class LawError(Exception):
    """What does not hold."""


@define
class Losses:
    """Losses that were seen against those of plain torch."""

    largest: float = 0.0
    _plain: Iterator[float] = field(factory=plain_losses)
    _known: list[float] = field(factory=list)
    _same_job: dict[int, str] = field(factory=dict)  # step -> loss, of ranks of one number

    def check(self, step: int, loss: str) -> None:
        """Raise LawError if it is another."""
        while len(self._known) <= step:
            self._known.append(next(self._plain))
        found = float.fromhex(loss)
        difference = abs(found - self._known[step])
        self.largest = max(self.largest, difference)
        if not difference <= TOLERANCE:  # nan too
            raise LawError(f"step {step}: plain torch has {self._known[step]}, ranks have {found}")

    def check_again(self, step: int, loss: str) -> None:
        """As `check`; a step of this job that is trained again has the bits of before."""
        if self._same_job.setdefault(step, loss) != loss:
            raise LawError(f"step {step}: {self._same_job[step]} before the restart, {loss} after")
        self.check(step, loss)

    def begin_job(self) -> None:
        """With another number of ranks."""
        self._same_job.clear()


# ---- Kills ----


@define
class Heard:
    """What the lives of one folder have said."""

    losses: Losses = field(factory=Losses)
    counts: Counter[str] = field(factory=Counter)
    saved: int = 0  # the last step of which a save in the foreground has ended
    last: dict[int, str] = field(factory=dict)  # rank -> what it said last; of this life

    def hear(self, rank: str, said: str, *values: str) -> None:
        """Check a line."""
        self.last[int(rank)] = said
        if rank != "0":
            return
        self.counts["steps"] += said == "step"
        self.counts["restarts"] += said == "loaded"
        if said == "step":
            self.losses.check(int(values[0]), values[1])
        elif said == "saved":
            self.saved = int(values[0])
        elif said == "loaded" and int(values[0]) < self.saved:
            raise LawError(f"began at step {values[0]}, and {self.saved} had been saved")


def crash(until: float, draw: random.Random) -> str:
    """Kill a rank or all of a job at drawn moments; others go on from its folder."""
    heard, slowest = Heard(), 0.0
    counts = heard.counts
    with tempfile.TemporaryDirectory() as made:
        while time.monotonic() < until:
            life = Life.draw(draw)
            ranks = Ranks.start(Path(made, "job"), life)
            heard.last.clear()
            with _explained(life, ranks):
                _await_moment(ranks, heard, draw)
                of_all = life.size == 1 or draw.random() < 0.5
                victims = range(life.size) if of_all else [draw.randrange(life.size)]
                for victim in victims:
                    ranks.kill(victim)
                began = time.monotonic()
                for line in ranks.lines(began + SURVIVOR_S):
                    heard.hear(*line)
                statuses = ranks.end(max(0.0, began + SURVIVOR_S - time.monotonic()))
                counts["kills"] += len(victims)
                for name in ("save", "load"):
                    counts[f"within a {name}"] += sum(heard.last.get(v) == name for v in victims)
                for rank, status in enumerate(statuses):
                    if rank in victims:
                        continue
                    if status != ENDED:
                        raise LawError(f"rank {rank}, left by {victims}, ended with {status}")
                    counts["survivors told"] += 1
                    slowest = max(slowest, time.monotonic() - began)
    return (
        f"{_list(counts)}; slowest survivor {slowest:.1f} s; largest difference "
        f"of a loss to plain torch {heard.losses.largest:.1e}"
    )


def _await_moment(ranks: Ranks, heard: Heard, draw: random.Random) -> None:
    """Read lines until a drawn one of rank 0, and a little longer."""
    word = draw.choice(("load", "loaded", "step", "save", "save"))
    countdown = draw.randint(1, 8) if word in {"step", "save"} else 1
    for line in ranks.lines(time.monotonic() + 60):
        heard.hear(*line)
        countdown -= line[:2] == ["0", word]
        if not countdown:
            time.sleep(draw.uniform(0, 0.03))
            return
    raise LawError(f"rank 0 has not said {word!r} for a minute, or ended; last: {heard.last}")


@contextlib.contextmanager
def _explained(life: Life, ranks: Ranks) -> Iterator[None]:
    """Say what broke a law."""
    try:
        yield
    except LawError as error:
        for rank in range(life.size):
            ranks.kill(rank)
        raise LawError(f"{error}\n{life}\n{ranks.printed()}") from None


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


# ---- Growth ----


def soak(until: float, draw: random.Random) -> str:
    """Two ranks train, save, load and evaluate, an equal time in each of four lives."""
    counts: Counter[str] = Counter()
    losses = Losses()
    lives = [
        Life(2, 1, "device", "device", True),
        Life(2, 2, "host", "device", True),
        Life(2, 3, "disk", "disk", False),
        Life(2, 3, "device", "device", True),
    ]
    draw.shuffle(lives)
    for index, life in enumerate(lives):
        ends = time.monotonic() + (until - time.monotonic()) / (len(lives) - index)
        with tempfile.TemporaryDirectory() as made:
            ranks = Ranks.start(Path(made), life, partial(_soak_rank, ends))
            looks: dict[str, list[dict[str, int]]] = {}
            with _explained(life, ranks):
                for rank, said, *values in ranks.lines(ends + 60):
                    if said == "step" and rank == "0":
                        losses.check(int(values[0]), values[1])
                    if said == "look":
                        names = attrs.fields_dict(Look)
                        look = dict(zip(names, map(int, values), strict=True))
                        looks.setdefault(rank, []).append(look)
                    elif rank == "0":
                        counts[said] += 1
                if any(statuses := ranks.end(60)):
                    raise LawError(f"ranks ended with {statuses}")
                for rank, found in looks.items():
                    _check_growth(f"rank {rank}", found)
    return f"{_list(counts)}; nothing grew; largest difference {losses.largest:.1e}"


@frozen
class Look:
    """What must not grow in a process, and in its folder."""

    rss_kib: int
    descriptors: int
    threads: int
    objects: int
    mappings: int
    files: int

    @classmethod
    def now(cls, folder: Path) -> Look:
        """Of this process."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * 4,
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
            sum(1 for _ in Path("/proc/self/task").iterdir()),
            len(gc.get_objects()),
            Path("/proc/self/maps").read_text().count("\n"),
            sum(len(files) for _, _, files in os.walk(folder)),
        )


# What may come and go between two looks.
ALLOWED: Final = Look(4096, 4, 2, 400, 12, 24)


def _check_growth(who: str, looks: list[dict[str, int]]) -> None:
    """Compare the last third with the second."""
    third = len(looks) // 3
    if third < 2:
        raise LawError(f"{who}: {len(looks)} looks are too few; give more --minutes")
    for name, allowed in attrs.asdict(ALLOWED).items():
        before, after = (
            max(look[name] for look in part) for part in (looks[third:-third], looks[-third:])
        )
        least = min(look[name] for look in looks[-third:])
        if least > before + allowed:
            raise LawError(f"{who}: {name} grew from {before} to {least}-{after}")


def _soak_rank(ends: float, folder: Path, life: Life, group: Group, say: Say) -> None:
    model, optimizer = life.shard(group, folder)
    step, next_look = 0, time.monotonic()
    pause_s = (ends - next_look) / 30
    with Saver(folder / "run", model, optimizer, keep=2) as saver:
        while True:
            say("step", step, train_step(group, model, optimizer, step).hex())
            step += 1
            if step % SAVE_EVERY == 0:
                saver.save(step=step)
                say("save")
            if step % 7 == 0:
                with torch.no_grad():
                    model.eval()
                    loss_of(model, step, group.rank, group.world_size)
                    model.train()
            if step % 13 == 0:  # an overflow: the step is skipped
                loss_of(model, step, group.rank, group.world_size).backward()
                optimizer.zero_grad()
            if step % 31 == 0:
                zero_engine.full_state_dict(model)
            if step % 37 == 0:
                saver.save(step=step)
                saver.wait()
                step = zero_engine.load(folder / "run", model, optimizer).step
                say("load")
            if time.monotonic() > next_look:
                say("look", *attrs.astuple(Look.now(folder)))
                next_look += pause_s
            over = torch.tensor([float(time.monotonic() > ends)])
            zero_comm.all_reduce_coalesced([over], group=group).wait()
            if over.item():
                break


# ---- Torchrun ----


@define
class Job:
    """Agents of torchrun, and what their ranks say in a file."""

    folder: Path
    life: Life
    agents: list[subprocess.Popen[bytes]] = field(factory=list)
    _read: int = field(init=False)  # bytes of the file; those of jobs before are not of this one

    def __attrs_post_init__(self) -> None:
        said = self.folder / "said"
        self._read = said.stat().st_size if said.exists() else 0

    def start(self, *options: str, before: Sequence[str] = (), network: str = "lo") -> None:
        """An agent, here or by `before` elsewhere."""
        (self.folder / "swap").mkdir(parents=True, exist_ok=True)
        script = [__file__, "rank", str(self.folder), *map(str, attrs.astuple(self.life))]
        command = [*before, sys.executable, "-m", "torch.distributed.run", "--max-restarts=100"]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": network, "ZERO_REPORT": "off"}
        # Without it restarted ranks meet in a store that ends with rank 0's process.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / "rank-0.txt").open("ab") as output:
            agent = subprocess.Popen(
                [*command, "--monitor-interval=0.1", *options, *script],
                env=os.environ | env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.agents.append(agent)

    def lines(self, until: float) -> Iterator[list[str]]:
        """Rank and words of each line, until that time."""
        said = self.folder / "said"
        while time.monotonic() < until:
            if said.exists():
                with said.open("rb") as file:
                    file.seek(self._read)
                    whole = file.read().rpartition(b"\n")[0]
                self._read += len(whole) + bool(whole)
                yield from (line.decode().split(" ") for line in whole.splitlines())
            time.sleep(0.01)

    def end(self) -> None:
        """All agents and their ranks."""
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its node may be cut off
                agent.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        self.agents.clear()

    def printed(self) -> str:
        """The end of what ranks and agents wrote."""
        return (self.folder / "rank-0.txt").read_text()[-20_000:]

    def steps(self, num: int, size: int, losses: Losses, limit_s: float) -> dict[str, int]:
        """Wait for `num` steps of `size` ranks, whose losses are checked; the ranks' processes."""
        pids: dict[str, int] = {}
        for rank, said, *values in self.lines(time.monotonic() + limit_s):
            if said == "pid":
                pids[rank] = int(values[0])
            elif said == "step" and rank == "0":
                check = losses.check_again if int(values[2]) == self.life.size else losses.check
                check(int(values[0]), values[1])
                # Those that were said before the restart are not of it.
                num -= int(values[2]) == size and len(pids) >= size
                if num <= 0:
                    return pids
        raise LawError(f"{size} ranks have not trained {num} more steps in {limit_s:.0f} s")


def elastic(until: float, draw: random.Random) -> str:
    """Kill ranks that torchrun starts again, and jobs that go on with another number of ranks."""
    counts: Counter[str] = Counter()
    losses = Losses()
    nodes = "two nodes: not in less than two minutes"
    if until - time.monotonic() > 120:
        with tempfile.TemporaryDirectory() as made:
            nodes = _leave_and_come_back(Path(made), draw, losses)
    losses = Losses(losses.largest)
    with tempfile.TemporaryDirectory() as made:
        while time.monotonic() < until:
            job = Job(Path(made, "job"), Life.draw(draw))
            losses.begin_job()
            with _ended(job):
                size = job.life.size
                job.start("--standalone", f"--nproc-per-node={size}")
                counts["jobs"] += 1
                pids = job.steps(draw.randint(1, 6), size, losses, 60)
                for _ in range(draw.randint(1, 2)):
                    time.sleep(draw.uniform(0, 0.03))
                    for pid in draw.sample([*pids.values()], len(pids)):
                        with contextlib.suppress(ProcessLookupError):  # it ends already
                            os.kill(pid, signal.SIGKILL)
                            break
                    pids = job.steps(draw.randint(1, 6), size, losses, 60)
                    counts["restarts"] += 1
    return f"{_list(counts)}; largest difference {losses.largest:.1e}; {nodes}"


@contextlib.contextmanager
def _ended(job: Job) -> Iterator[None]:
    """End it; say what broke a law."""
    try:
        yield
    except LawError as error:
        raise LawError(f"{error}\n{job.life}\n{job.printed()}") from None
    finally:
        job.end()


def _leave_and_come_back(folder: Path, draw: random.Random, losses: Losses) -> str:
    """Two nodes, in network namespaces: one loses its link, and has it again."""
    names = [f"zero-{os.getpid()}-{node}" for node in "ab"]
    links = [f"zr{os.getpid()}{node}" for node in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def inside(node: int) -> list[str]:
        return ["ip", "netns", "exec", names[node]]

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for node, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            for words in (
                ("addr", "add", f"10.90.0.{node + 1}/24", "dev", link),
                ("link", "set", link, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *words)
        return _train_on_nodes(Job(folder / "job", Life.draw(draw, (1,))), inside, links, losses)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"two nodes: skipped, {getattr(error, 'stderr', '') or error}".strip()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _train_on_nodes(
    job: Job, inside: Callable[[int], list[str]], links: Sequence[str], losses: Losses
) -> str:
    """Seconds until one rank trains alone, and until two train again."""
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=zero"]
    options += ["--rdzv-endpoint=10.90.0.1:29400"]

    def start(node: int) -> None:
        own = [f"--local-addr=10.90.0.{node + 1}"]
        own += [f"--rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}"]
        job.start(*options, *own, before=inside(node), network=links[node])

    with _ended(job):
        start(0)
        start(1)
        job.steps(3, 2, losses, 120)
        subprocess.run([*inside(0), "ip", "link", "set", links[0], "down"], check=True)
        began = time.monotonic()
        job.steps(1, 1, losses, 180)
        alone_s, began = time.monotonic() - began, time.monotonic()
        subprocess.run([*inside(0), "ip", "link", "set", links[0], "up"], check=True)
        if job.agents[1].poll() is not None:  # it could not reach the store
            start(1)
        job.steps(1, 2, losses, 180)
        again_s = time.monotonic() - began
    return f"two nodes: one alone after {alone_s:.0f} s, both again after {again_s:.0f} s"


def _rank_of_torchrun(folder: Path, *words: str) -> int:
    """Train as torchrun's environment says."""
    size, stage, *places, in_background = words
    life = Life(int(size), int(stage), *places, in_background == "True")
    rank = os.environ["RANK"]
    out = os.open(folder / "said", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(*values: object) -> None:
        os.write(out, f"{rank} {' '.join(map(str, values))}\n".encode())

    say("pid", os.getpid())
    group = zero_comm.init(timeout_s=TIMEOUT_S)
    train(folder, life, group, say)
    return 0


def main() -> None:
    """Run one of them."""
    if sys.argv[1] == "rank":
        sys.exit(_rank_of_torchrun(Path(sys.argv[2]), *sys.argv[3:]))
    runs = {"crash": crash, "soak": soak, "elastic": elastic}
    asked = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    asked.add_argument("run", choices=runs)
    asked.add_argument("--minutes", type=float, default=5)
    asked.add_argument("--seed", type=int, default=int(time.time()))
    args = asked.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported, so that ranks collect and count their own
    os.environ.update(ZERO_REPORT="off", GLOO_SOCKET_IFNAME="lo")
    print(f"{args.run}: seed {args.seed}", flush=True)
    try:
        said = runs[args.run](time.monotonic() + 60 * args.minutes, random.Random(args.seed))
    except LawError as error:
        sys.exit(f"{args.run}: seed {args.seed}: {error}")
    print(f"{args.run}: {said}")


if __name__ == "__main__":
    main()
