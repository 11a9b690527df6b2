"""Saving and loading a sharded training state, against torch's ways and the disk."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero_comm
import zero_engine
from harness import Row, ratio, suite, take_turns
from model import BYTES, SHAPES, build_model
from team import Team
from torch import Tensor, nn
from zero_offload import DiskStore, HostArena

RANKS: Final = 2
WAYS: Final = ("limit", "in place", "save", "saver", "overlap", "torch.save", "dcp")
BLOCK_BYTES: Final = 4 * 2**20  # of the limit
NUM_WRITERS: Final = 4
FIGURES: Final = ("write_s", "blocked_s", "read_s")


@suite(
    ("way", "way"),
    ("write s", "write_s", ".2f"),
    ("GB/s", "write_gb_per_s", ".2f"),
    ("of limit", "write_s limit / it", ".2f"),
    ("torch.save /", "write_s torch.save / it", ".2f"),
    ("blocked s", "blocked_s", ".2f"),
    ("of save", "blocked_of_save", ".2f"),
    ("read s", "read_s", ".2f"),
    ("of limit", "read_s limit / it", ".2f"),
    ("torch.load /", "read_s torch.save / it", ".2f"),
    path=(str, "a folder on the disk"),
    model={"choices": SHAPES, "default": "119m"},
    rounds=(5, "turns of each way"),
)
def saving(options: Namespace) -> list[Row]:
    """Saving and loading a sharded training state, against torch's ways and the disk.

    Two ranks hold a model sharded at stage 3, with Adam's state: 12 bytes a parameter. The same
    tensors go to the disk in turns: by `zero_engine.save`, by `Saver` (how long training is
    blocked, and how long it takes in all), by `Saver(overlap=True)`, by `torch.save` of each rank's
    own part with fsync, by `torch.distributed.checkpoint` of the same parts, and plainly, which is
    the limit: as one new file of each rank, past the page cache, from memory, in blocks of which
    several are on their way. What the disk does where a file lies already (`DiskStore`) is shown
    beside it: a file system has more to do for a new one. Then all is read again, from the disk:
    the kernel is told to forget the files before. A ratio is that of two turns of one round; time
    is that of the slowest rank, from a barrier on. Training is blocked in the call and, with
    overlap, for as long as the step after the next forward and backward takes longer than one that
    has nothing to wait for.
    """
    with (
        tempfile.TemporaryDirectory(dir=options.path) as folder,
        Team(
            "bench_saving:ways", world_size=RANKS, model_name=options.model, folder=folder
        ) as team,
    ):
        options.bytes = sum(team.ask("count"))

        def turn(way: str) -> list[float]:
            return [max(of_ranks) for of_ranks in zip(*team.ask(way), strict=True)]

        turns = {way: functools.partial(turn, way) for way in WAYS}
        found = take_turns(turns, options.rounds)  # the first loads what is loaded on first use
    rows: list[Row] = [{"way": way} for way in WAYS]
    for index, name in enumerate(FIGURES):
        seconds = {way: [each[index] for each in of_rounds] for way, of_rounds in found.items()}
        for row in rows:
            mine = seconds[row["way"]]
            row |= {name: statistics.median(mine), f"{name}_of_rounds": mine}
            if all(mine):  # overlap reads nothing
                for other in ("limit", "torch.save", "save"):
                    row.update(ratio(seconds[other], mine, f"{name} {other} / it"))
    blocked_s = rows[WAYS.index("save")]["blocked_s"]
    for row in rows:
        row["blocked_of_save"] = row["blocked_s"] / blocked_s
        for what in ("write", "read"):
            seconds = row[f"{what}_s"]
            row[f"{what}_gb_per_s"] = options.bytes / seconds / 1e9 if seconds else 0.0
    return rows


# ---- The ranks ----

Figures = tuple[float, float, float]  # seconds of writing, of being blocked, of reading


def ways(model_name: str, folder: str) -> dict[str, Callable[[], Any]]:
    """The job of a rank."""
    model = build_model(SHAPES[model_name], seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(3), group=zero_comm.init())
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    for shard in shards:
        shard.grad = torch.full_like(shard, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    parts = dict(_parts(optimizer))
    place, rank = Path(folder), dist.get_rank()
    make = functools.partial(zero_engine.Saver, place / "saver", model, optimizer)
    saver, overlapped = make(), make(overlap=True)  # with memory from round to round
    tokens = torch.randint(0, BYTES, (1, SHAPES[model_name].sequence))
    return {
        "count": lambda: sum(part.nbytes for part in parts.values()),
        "limit": lambda: _limit(parts, place / f"limit-{rank}"),
        "in place": lambda: _in_place(parts, place),
        "save": lambda: _save(model, optimizer, place / "save"),
        "saver": lambda: _saver(saver, model, optimizer, place / "saver"),
        "overlap": lambda: _overlapped(overlapped, model, optimizer, tokens, place / "saver"),
        "torch.save": lambda: _torch_save(parts, place / f"torch-{rank}.pt"),
        "dcp": lambda: _dcp(parts, place / "dcp"),
    }


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of parameters and moments, as plain tensors."""
    for number, shard in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield f"{number}.param", shard.detach().view(-1)
        for name, value in optimizer.state[shard].items():
            if isinstance(value, Tensor) and value.dim():
                yield f"{number}.{name}", value.view(-1)


def _timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _forget(*paths: Path) -> None:
    """Tell the kernel that what is in these files is not needed in memory."""
    dist.barrier()
    for path in paths:
        for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _remove(place: Path) -> None:
    """What the round before has left: to delete it is not to save."""
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)


def _result(write_s: float, read_s: float, blocked_s: float | None = None) -> Figures:
    return write_s, write_s if blocked_s is None else blocked_s, read_s


def _limit(parts: dict[str, Tensor], path: Path) -> Figures:
    """All of it as one new file, past the page cache."""
    num_bytes = sum(part.nbytes for part in parts.values()) // BLOCK_BYTES * BLOCK_BYTES
    memory = HostArena("limit").allocate(num_bytes).numpy().data

    def move(flags: int, act: Callable[[int, list[memoryview], int], int]) -> None:
        file = os.open(path, flags | os.O_DIRECT, 0o666)
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            starts = range(0, num_bytes, BLOCK_BYTES)
            list(pool.map(lambda at: act(file, [memory[at : at + BLOCK_BYTES]], at), starts))
        os.fsync(file)
        os.close(file)

    path.unlink(missing_ok=True)
    write_s = _timed(lambda: move(os.O_WRONLY | os.O_CREAT, os.pwritev))
    return _result(write_s, _timed(lambda: move(os.O_RDONLY, os.preadv)))


def _in_place(parts: dict[str, Tensor], place: Path) -> Figures:
    """All of it as one value, where it lies already."""
    memory = HostArena("limit").allocate(sum(part.nbytes for part in parts.values()))
    with DiskStore(place) as store:
        store.allocate({"all": memory.nbytes})
        write_s = _timed(lambda: store.write("all", memory).result())
        read_s = _timed(lambda: store.read("all", memory).result())
    return _result(write_s, read_s)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> Figures:
    def save() -> None:
        zero_engine.save(place, model, optimizer, step=1)

    _remove(place)
    write_s = _timed(save)
    _forget(place)
    return _result(write_s, _timed(lambda: zero_engine.load(place, model, optimizer)))


def _saver(
    saver: zero_engine.Saver, model: nn.Module, optimizer: torch.optim.Optimizer, place: Path
) -> Figures:
    blocked: list[float] = []

    def save() -> None:
        start = time.perf_counter()
        saver.save(step=1)
        blocked.append(time.perf_counter() - start)
        saver.wait()

    _remove(place)
    write_s = _timed(save)
    _forget(place)
    read_s = _timed(lambda: zero_engine.load(place, model, optimizer))
    return _result(write_s, read_s, blocked[0])


def _overlapped(
    saver: zero_engine.Saver,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    place: Path,
) -> Figures:
    def step() -> float:
        model(tokens, tokens).backward()
        return _timed(optimizer.step)

    alone = min(step() for _ in range(3))
    blocked: list[float] = []

    def save() -> None:
        start = time.perf_counter()
        saver.save(step=1)
        blocked.append(time.perf_counter() - start)
        blocked.append(max(0.0, step() - alone))
        saver.wait()

    _remove(place)
    return _result(_timed(save), 0.0, sum(blocked))


def _torch_save(parts: dict[str, Tensor], path: Path) -> Figures:
    def save() -> None:
        with path.open("wb") as file:
            torch.save({name: part.clone() for name, part in parts.items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        loaded = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.copy_(loaded[name])

    path.unlink(missing_ok=True)
    write_s = _timed(save)
    _forget(path)
    return _result(write_s, _timed(load))


def _dcp(parts: dict[str, Tensor], place: Path) -> Figures:
    _remove(place)
    state = {f"rank {dist.get_rank()} {name}": part for name, part in parts.items()}
    write_s = _timed(lambda: dcp.save(state, checkpoint_id=place))
    _forget(place)
    return _result(write_s, _timed(lambda: dcp.load(state, checkpoint_id=place)))
