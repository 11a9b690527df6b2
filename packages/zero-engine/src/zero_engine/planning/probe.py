"""probe(): a few seconds of measuring how fast this machine is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from zero_comm import Group, Levels, all_gather_flat, all_gather_json
from zero_offload import DiskStore, HostArena

from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.sharding import shard

from .estimate import Rates
from .sources import has_own_params

_COPIED_BYTES: Final = 64 * 2**20  # far more than a cache
_SENT_BYTES: Final = 16 * 2**20
_DISK_BYTES: Final = 64 * 2**20
_BLOCKS: Final = 6
_LEAST: Final = 0.01  # a share of what was measured, where two measurements say less than nothing
_WIDTH: Final = {"cpu": 1024, "cuda": 8192}
_RUNS: Final = 5


def probe(
    group: Group,
    *,
    path: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    levels: Levels | None = None,
) -> Rates:
    """Measure this machine with all ranks of a group at work. Collective; takes a few seconds.

    Args:
        group: Ranks that work at once, and send to each other.
        path: A folder on the disk to measure; no disk when None.
        dtype: Of the matrices that are multiplied.
        size: Of what is moved, in place of 64 MiB: less is quicker, and less exact.
        levels: Of the group, if its ranks are of several nodes: what they send inside a node and
            across is then measured apart.

    Returns:
        The same on every rank: those of the slowest.

    Raises:
        ConfigError: `size` is not above 0, or `levels` are those of other ranks.
        zero_offload.StoreError: The folder is missing, or has no room.
    """
    if not 0 < size <= 16:
        raise ConfigError(f"probe(): expected a size above 0 and of at most 16, got {size!r}")
    if levels is not None and levels.whole.world_size != group.world_size:
        raise ConfigError(
            f"probe(): expected levels of the {group.world_size} ranks of the group, got those of "
            f"{levels.whole.world_size}"
        )
    device = group.device
    mine = {"matmul_flops": _matmul(device, dtype, size), "device_bytes": _copy(device, size)}
    if device.type != "cpu":
        mine["host_bytes"] = _copy(torch.device("cpu"), size)
        mine["transfer_bytes"] = _transfer(device, size)
    mine |= _small(group)
    inside = group if levels is None else levels.inside
    if inside.world_size > 1:
        mine["send_bytes"] = _send(inside, size)
    if levels is not None and levels.across.world_size > 1:
        mine["send_across_bytes"] = _send(levels.across, size)
    if path is not None:
        mine |= _disk(Path(path), size)
    everyone = all_gather_json(mine, group=group)
    return Rates(**{name: _slowest(name, [said[name] for said in everyone]) for name in mine})


def _slowest(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_s") else min(values)


def _median_s(action: Callable[[], object], device: torch.device) -> float:
    """Of some runs, the first of which warms up and does not count."""
    times = []
    for _ in range(_RUNS + 1):
        _wait_for(device)
        begun = time.perf_counter()
        action()
        _wait_for(device)
        times.append(time.perf_counter() - begun)
    return max(statistics.median(times[1:]), 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(device: torch.device, dtype: torch.dtype, size: float) -> float:
    width = max(64, int(_WIDTH.get(device.type, 4096) * min(size, 1.0)))
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / _median_s(lambda: torch.mm(a, b, out=out), device)


def _copy(device: torch.device, size: float) -> float:
    num_bytes = max(4096, int(_COPIED_BYTES * size))
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)  # read and written


def _transfer(device: torch.device, size: float) -> float:
    host = HostArena("probe").allocate(int(_COPIED_BYTES * size))
    target = torch.zeros_like(host, device=device)
    return host.nbytes / _median_s(lambda: target.copy_(host, non_blocking=True), device)


def _small(group: Group) -> dict[str, float]:
    """What layers and collectives cost besides arithmetic and bytes, as in training.

    The same tiny blocks are trained as one unit, and as a unit for each layer: these differ in
    collectives.
    """
    layers = [name for name, module in _blocks(group).named_modules() if has_own_params(module)]
    one_s, each_s = (_step_s(group, units) for units in ([], layers))
    if group.world_size == 1:
        return {"layer_s": one_s / len(layers)}
    # Of a unit at stage 2: a reduction and a gather. On a busy machine times differ by chance.
    launch_s = max(each_s - one_s, _LEAST * one_s) / (2 * (len(layers) - 1))
    layer_s = max(one_s - 2 * launch_s, _LEAST * one_s) / len(layers)
    return {"layer_s": layer_s, "launch_s": launch_s}


def _blocks(group: Group) -> nn.Module:
    """With what comes between layers with parameters: attention, activations, sums."""
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(8, 1, 8, dropout=0.0, batch_first=True, device=group.device)
            for _ in range(_BLOCKS)
        )
    )


def _step_s(group: Group, units: list[str]) -> float:
    blocks, x = _blocks(group), torch.ones(1, 2, 8, device=group.device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.0)
    shard(blocks, optimizer, ZeroConfig(2, units=units), group=group)

    def step() -> None:
        blocks(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _median_s(step, group.device)


def _send(group: Group, size: float) -> float:
    numel = max(1024, int(_SENT_BYTES * size) // 4)
    splits = [numel] * group.world_size
    out = torch.zeros(numel * group.world_size, device=group.device)

    def gather() -> None:
        all_gather_flat(out, splits=splits, group=group).wait()

    sent_bytes = numel * 4 * (group.world_size - 1)
    return sent_bytes / _median_s(gather, group.device)


def _disk(path: Path, size: float) -> dict[str, float]:
    memory = HostArena("probe").allocate(max(4096, int(_DISK_BYTES * size)))
    host = torch.device("cpu")
    store = DiskStore(path)
    try:
        write_s = _median_s(lambda: store.write("probe", memory).result(), host)
        read_s = _median_s(lambda: store.read("probe", memory).result(), host)
    finally:
        store.close()
    return {"disk_write_bytes": memory.nbytes / write_s, "disk_read_bytes": memory.nbytes / read_s}
