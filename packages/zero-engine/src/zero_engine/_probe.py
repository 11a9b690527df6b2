"""probe(): a few seconds of measuring how fast this machine is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from zero_comm import Group, Levels, all_gather_flat, all_gather_json
from zero_offload import DiskStore, HostArena

from ._errors import ConfigError
from ._rates import Rates

_COPIED_BYTES: Final = 64 * 2**20  # far more than a cache
_SENT_BYTES: Final = 16 * 2**20
_DISK_BYTES: Final = 64 * 2**20
_LAYERS: Final = 64
_LAUNCHES: Final = 32
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
    mine["layer_s"] = _layer_s(device, dtype)
    if group.world_size > 1:
        mine["launch_s"] = _launch_s(group)
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


def _bytes(num_bytes: int, size: float, device: torch.device) -> Tensor:
    return torch.zeros(max(4096, int(num_bytes * size)), dtype=torch.uint8, device=device)


def _matmul(device: torch.device, dtype: torch.dtype, size: float) -> float:
    width = max(64, int(_WIDTH.get(device.type, 4096) * min(size, 1.0)))
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / _median_s(lambda: torch.mm(a, b, out=out), device)


def _copy(device: torch.device, size: float) -> float:
    source = _bytes(_COPIED_BYTES, size, device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)  # read and written


def _transfer(device: torch.device, size: float) -> float:
    host = HostArena("probe").allocate(int(_COPIED_BYTES * size))
    target = torch.zeros_like(host, device=device)
    return host.nbytes / _median_s(lambda: target.copy_(host, non_blocking=True), device)


def _layer_s(device: torch.device, dtype: torch.dtype) -> float:
    layers = nn.Sequential(*(nn.Linear(8, 8, device=device, dtype=dtype) for _ in range(_LAYERS)))
    x = torch.ones(1, 8, device=device, dtype=dtype)

    def step() -> None:
        layers(x).sum().backward()
        layers.zero_grad()

    return _median_s(step, device) / _LAYERS


def _launch_s(group: Group) -> float:
    out, splits = torch.zeros(group.world_size, device=group.device), [1] * group.world_size

    def gather() -> None:
        for _ in range(_LAUNCHES):
            all_gather_flat(out, splits=splits, group=group).wait()

    return _median_s(gather, group.device) / _LAUNCHES


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
