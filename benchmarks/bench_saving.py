"""Saving and loading a sharded training state, against torch's ways and the disk."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero_comm
import zero_engine
from harness import Row, by_figure, check_known, proc_fields, ratio, suite, take_turns, timed
from model import BYTES, SHAPES, build_model
from team import Team
from torch import Tensor
from zero_offload import DiskStore, HostArena

RANKS: Final = 2
WAYS: Final = (
    *("limit", "in place", "save", "saver", "overlap"),
    *("torch.save", "safetensors", "dcp", "dcp async"),
)
BLOCK_BYTES: Final = 4 * 2**20  # of the limit
NUM_WRITERS: Final = 4
FIGURES: Final = ("write_s", "blocked_s", "read_s", "write_peak", "read_peak")


@suite(
    ("way", "way"),
    ("write s", "write_s", ".2f"),
    ("GB/s", "write_gb_per_s", ".2f"),
    ("of limit", "write_s limit / it", ".2f"),
    ("torch.save /", "write_s torch.save / it", ".2f"),
    ("blocked s", "blocked_s", ".2f"),
    ("of save", "blocked_of_save", ".2f"),
    ("peak MB", "write_peak", ".0f", 1e-6),
    ("read s", "read_s", ".2f"),
    ("of limit", "read_s limit / it", ".2f"),
    ("torch.load /", "read_s torch.save / it", ".2f"),
    ("peak MB", "read_peak", ".0f", 1e-6),
    path=(str, "a folder on the disk"),
    model={"choices": SHAPES, "default": "119m"},
    ways=([*WAYS], "in their order; 1b needs 24 GiB for save and dcp"),
    rounds=(5, "turns of each way"),
)
def saving(options: Namespace) -> list[Row]:
    """Saving and loading a sharded training state, against torch's ways and the disk.

    Two ranks have a model sharded at stage 3, with Adam's state: 12 bytes a parameter. The same
    tensors go to the disk in turns: by `zero_engine.save`, by `Saver` (how long training is
    blocked, and how long it takes in all), by `Saver(overlap=True)`, by `torch.save` of each rank's
    own part with fsync, by safetensors likewise, by `torch.distributed.checkpoint` of the same
    parts, also its `async_save`, and plainly, which is the limit: as one new file of each rank,
    past the page cache, from memory, several blocks at a time. Writing to a file that exists
    (`DiskStore`) is shown beside it: a file system has more to do for a new one. Then all is read
    again, from the disk: the kernel drops the files from its page cache before. A ratio is that of
    two turns of one round; time is that of the slowest rank, from a barrier on. Training is blocked
    in the call and, with overlap, for as long as the step after the next forward and backward takes
    longer than one that does not wait. A peak is the largest growth of a rank's memory, without
    buffers kept from the round before.
    """
    check_known("ways", options.ways, WAYS)
    with (
        tempfile.TemporaryDirectory(dir=options.path) as folder,
        Team(
            "bench_saving:ways",
            world_size=RANKS,
            model_name=options.model,
            folder=folder,
            chosen=options.ways,
        ) as team,
    ):
        options.bytes = sum(team.ask("count"))
        turns = {way: partial(team.slowest, way) for way in options.ways}
        found = take_turns(turns, options.rounds)  # the first loads what is loaded on first use
    rows: list[Row] = [{"way": way} for way in options.ways]
    for name, seconds in by_figure(found, *FIGURES).items():
        for row in rows:
            mine = seconds[row["way"]]
            row |= {name: statistics.median(mine), f"{name}_of_rounds": mine}
            if all(mine) and name.endswith("_s"):  # overlap reads nothing
                for other in {"limit", "torch.save", "save"} & {*options.ways}:
                    row.update(ratio(seconds[other], mine, f"{name} {other} / it"))
    blocked_s = [row["blocked_s"] for row in rows if row["way"] == "save"]
    for row in rows:
        if blocked_s:
            row["blocked_of_save"] = row["blocked_s"] / blocked_s[0]
        for what in ("write", "read"):
            seconds = row[f"{what}_s"]
            row[f"{what}_gb_per_s"] = options.bytes / seconds / 1e9 if seconds else 0.0
    return rows


# ---- The ranks ----


@dataclass(frozen=True)
class Way:
    """A way to save a state and to load it again."""

    write: Callable[[], object]  # training waits for it
    read: Callable[[], object] | None = None
    finish: Callable[[], object] | None = None  # waits for writes in the background

    def turn(self, place: Path, parts: Collection[Tensor]) -> tuple[float, ...]:
        """Return seconds of writing, being blocked and reading, and peaks of writing and reading.

        Files of the round before are deleted first, outside the measured time. The kernel drops the
        new files from its page cache before they are read.
        """
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        dist.barrier()
        resting = _begin_peak(parts)
        blocked_s = timed(self.write)()
        finish_s = timed(self.finish)() if self.finish else 0.0
        write_peak = _peak() - resting
        dist.barrier()
        for path in place.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        resting = _begin_peak(parts)
        read_s = timed(self.read)() if self.read else 0.0
        return blocked_s + finish_s, blocked_s, read_s, write_peak, _peak() - resting


def _begin_peak(parts: Collection[Tensor]) -> int:
    """Reset the peak of this process; return its resident bytes.

    Shared memory counts from its first use by this process on, so every page of it is read.
    """
    for part in parts:
        torch.empty(0).set_(part.untyped_storage())[::1024].sum()  # plain: a shard refuses sums
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return 1024 * int(proc_fields("self/status")["VmHWM"].split()[0])


def ways(model_name: str, folder: str, chosen: Collection[str]) -> dict[str, Callable[[], Any]]:
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
    num_bytes = sum(part.nbytes for part in parts.values())
    place, rank = Path(folder), dist.get_rank()
    memory, store = torch.empty(0, dtype=torch.uint8), DiskStore(place)
    if {"limit", "in place"} & {*chosen}:
        memory = HostArena("limit").allocate(num_bytes)
        store.allocate({"all": num_bytes})
    # Kept over all rounds, since a Saver reuses its memory.
    saver = zero_engine.Saver(place / "saver", model, optimizer)
    overlapped = zero_engine.Saver(place / "overlap", model, optimizer, overlap=True)
    tokens = torch.randint(0, BYTES, (1, SHAPES[model_name].sequence))
    limit, own = place / "limit" / str(rank), place / "torch.save" / f"{rank}.pt"
    safe = place / "safetensors" / f"{rank}.safetensors"
    state = {f"rank {rank} {name}": part for name, part in parts.items()}

    def load(way: str) -> Callable[[], object]:
        return partial(zero_engine.load, place / way, model, optimizer)

    def step() -> float:
        model(tokens, tokens).backward()
        dist.barrier()
        return timed(optimizer.step)()

    own_group: Any = dist.new_group(backend="gloo")  # of torch's thread that saves
    pending: list[Any] = []

    def save_async() -> None:
        folder = place / "dcp async"
        pending[:] = [dcp.async_save(state, checkpoint_id=folder, process_group=own_group)]

    def overlap() -> Sequence[float]:
        alone, after = min(step() for _ in range(3)), []
        write = partial(overlapped.save, step=1)

        def finish() -> None:
            after.append(step())
            overlapped.wait()

        write_s, blocked_s, *others = Way(write, finish=finish).turn(
            place / "overlap", parts.values()
        )
        return write_s, blocked_s + max(0.0, after[0] - alone), *others

    found = {
        "limit": Way(
            lambda: _move(memory, limit, os.O_WRONLY | os.O_CREAT, os.pwritev),
            lambda: _move(memory, limit, os.O_RDONLY, os.preadv),
        ),
        "in place": Way(
            lambda: store.write("all", memory).result(),
            lambda: store.read("all", memory).result(),
        ),
        "save": Way(
            lambda: zero_engine.save(place / "save", model, optimizer, step=1), load("save")
        ),
        "saver": Way(partial(saver.save, step=1), load("saver"), saver.wait),
        "torch.save": Way(lambda: _torch_save(parts, own), lambda: _torch_load(parts, own)),
        "safetensors": Way(lambda: _save_safe(parts, safe), lambda: _load_safe(parts, safe)),
        "dcp async": Way(
            save_async,
            lambda: dcp.load(state, checkpoint_id=place / "dcp async"),
            lambda: pending.pop().result(),
        ),
        "dcp": Way(
            lambda: dcp.save(state, checkpoint_id=place / "dcp"),
            lambda: dcp.load(state, checkpoint_id=place / "dcp"),
        ),
    }
    verbs = {name: partial(way.turn, place / name, parts.values()) for name, way in found.items()}
    return {"count": lambda: num_bytes, "overlap": overlap, **verbs}


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of parameters and moments, as plain tensors."""
    for number, shard in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield f"{number}.param", shard.detach().view(-1)
        for name, value in optimizer.state[shard].items():
            if isinstance(value, Tensor) and value.dim():
                yield f"{number}.{name}", value.view(-1)


def _move(
    memory: Tensor, path: Path, flags: int, act: Callable[[int, list[memoryview], int], int]
) -> None:
    """Move all parts as one file, past the page cache, several blocks at a time."""
    num_bytes = memory.nbytes // BLOCK_BYTES * BLOCK_BYTES
    data = memory.numpy().data
    file = os.open(path, flags | os.O_DIRECT, 0o666)
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        starts = range(0, num_bytes, BLOCK_BYTES)
        list(pool.map(lambda at: act(file, [data[at : at + BLOCK_BYTES]], at), starts))
    os.fsync(file)
    os.close(file)


def _torch_save(parts: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save({name: part.clone() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _save_safe(parts: dict[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(parts, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _load_safe(parts: dict[str, Tensor], path: Path) -> None:
    with safetensors.safe_open(path, "pt") as file:
        for name, part in parts.items():
            part.copy_(file.get_tensor(name))


def _torch_load(parts: dict[str, Tensor], path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.copy_(loaded[name])
