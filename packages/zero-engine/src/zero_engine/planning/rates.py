"""How fast a machine is, as told or measured, and how long a planned step takes on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
from attrs import Attribute, field, frozen
from torch import nn
from zero_comm import Group, Levels, all_gather_flat, all_gather_json
from zero_offload import DiskStore, HostArena
from zero_partition import partition

from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError, FileError

from .plan import Plan
from .sources import has_own_params, read_json


def _is_rate(_: Any, attribute: Attribute, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None and attribute.default is None:
        return
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"Rates.{attribute.name}: expected a number above 0, got {value!r}")


@final
@frozen(kw_only=True)
class Rates:
    """What one rank does in a second, and how long it takes over what is smallest, all at work.

    None: not measured, or there is none.

    Args:
        matmul_flops: Of matrix products, a multiplication and an addition each.
        device_bytes: Read and written of the memory of the device.
        host_bytes: Likewise of the host; the device's when None.
        transfer_bytes: Between device and host; where the device is the CPU there is no such.
        send_bytes: To ranks of the same node.
        send_across_bytes: To ranks of other nodes; as to the same when None.
        disk_read_bytes: From disk.
        disk_write_bytes: To disk.
        layer_s: Seconds for a forward and backward of a layer too small for its arithmetic to
            count; no time when None.
        launch_s: Seconds for a collective too small for its bytes to count; no time when None.

    Raises:
        ConfigError: Names the rate, what was expected and what came.
    """

    matmul_flops: float = field(validator=_is_rate)
    device_bytes: float = field(validator=_is_rate)
    host_bytes: float | None = field(default=None, validator=_is_rate)
    transfer_bytes: float | None = field(default=None, validator=_is_rate)
    send_bytes: float | None = field(default=None, validator=_is_rate)
    send_across_bytes: float | None = field(default=None, validator=_is_rate)
    disk_read_bytes: float | None = field(default=None, validator=_is_rate)
    disk_write_bytes: float | None = field(default=None, validator=_is_rate)
    layer_s: float | None = field(default=None, validator=_is_rate)
    launch_s: float | None = field(default=None, validator=_is_rate)

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """From what `save`, or `zero probe --json`, wrote.

        Raises:
            FileError: There is no such file, or it is no JSON of rates.
            ConfigError: A rate is no number.
        """
        found = read_json(Path(path))
        names = [each.name for each in attrs.fields(cls)]
        if not isinstance(found, Mapping) or not {"matmul_flops", "device_bytes"} <= set(found):
            raise FileError(
                f"{path}: expected the rates that `zero probe --json` prints, matmul_flops and "
                "device_bytes at least"
            )
        if unknown := sorted(set(found) - set(names)):
            raise FileError(f"{path}: expected rates among {', '.join(names)}, got {unknown}")
        return cls(**found)


# NOTE(between): what takes turns adds up, and what overlaps takes as long as the longest. Backward
# hides messages and transfers, and a step hides the disk, but how much of it hangs on the model. So
# an estimate is two numbers: all hidden that can be, and nothing hidden.

_CONTROL: Final = 1  # collectives of a step besides those planned: which gradients have come


@final
@frozen(kw_only=True)
class StepEstimate:
    """Seconds of one step, by what takes them; see NOTE(between)."""

    seconds: Mapping[str, float]
    in_turns: frozenset[str]  # of these, what never overlaps with one another

    @property
    def bottleneck(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def least_s(self) -> float:
        """If all is hidden that can be."""
        in_turns = sum(self.seconds[name] for name in self.in_turns)
        return max(in_turns, *self.seconds.values())

    @property
    def most_s(self) -> float:
        """If nothing is hidden."""
        return sum(self.seconds.values())


def estimate_step(
    plan: Plan, rates: Rates, *, tokens: int, flops_per_param: float = 6.0
) -> StepEstimate:
    """How long one step of one micro-batch takes on a rank. Arithmetic only.

    Args:
        plan: Of the training.
        rates: Of the machine.
        tokens: That one rank computes with in a step.
        flops_per_param: For each token and parameter: 2 forward and 4 backward; 8 where all is
            recomputed.

    Raises:
        ConfigError: A rate that is needed is missing, or a number is none.
    """
    for name, value in (("tokens", tokens), ("flops_per_param", flops_per_param)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"estimate_step(): expected {name} to be above 0, got {value!r}")
    offload, share = plan.config.offload, 0.0  # of what is stepped, how much on the host
    if offload is not None and offload.optimizer != "device":
        share = float(offload.fraction) if offload.params == "device" else 1.0
    host = rates.host_bytes or rates.device_bytes
    stepped = plan.step.num_bytes
    seconds = {
        "computing": flops_per_param * plan.numel * tokens / rates.matmul_flops,
        "calling layers": plan.num_layers * (rates.layer_s or 0.0),
        "stepping": stepped * ((1 - share) / rates.device_bytes + share / host),
    }
    launches = sum(each.calls for each in plan.traffic)
    if plan.world_size > 1:
        seconds["launching collectives"] = (launches + _CONTROL) * (rates.launch_s or 0.0)
    across, inside = plan.across_bytes, plan.sent_bytes - plan.across_bytes
    if inside:
        seconds["sending"] = inside / _needed(rates, "send_bytes")
    if across:
        rate = rates.send_across_bytes or _needed(rates, "send_bytes")
        seconds["sending across nodes"] = across / rate
    moved = _moved_bytes(plan, share)
    if moved and rates.transfer_bytes is not None:
        seconds["transferring"] = moved / rates.transfer_bytes
    read, written = _disk_bytes(plan)
    if read:
        seconds["reading the disk"] = read / _needed(rates, "disk_read_bytes")
    if written:
        seconds["writing the disk"] = written / _needed(rates, "disk_write_bytes")
    seconds = {name: value for name, value in seconds.items() if value}
    in_turns = {"computing"}
    if offload is None or not offload.delayed_update:  # then a step follows the backward
        in_turns.add("stepping")
    if rates.transfer_bytes is None:  # the device is the CPU: it calls a layer, then computes it
        in_turns.add("calling layers")
    return StepEstimate(seconds=seconds, in_turns=frozenset(in_turns & seconds.keys()))


def _gathered_bytes(plan: Plan) -> int:
    """Of this rank's shards, read for the gathers of a step."""
    return sum(row.shard_bytes * row.gathers for row in plan.units)


def _moved_bytes(plan: Plan, share: float) -> float:
    """Between device and host: gradients to where they are stepped, parameters to where they rest.

    Shards that rest elsewhere come to the device for each gather.
    """
    offload = plan.config.offload
    if offload is None:
        return 0.0
    rest_here = offload.params == "device"
    returning = plan.step.params_bytes * (share if rest_here else 1 - share)
    return share * plan.step.grads_bytes + returning + (not rest_here) * _gathered_bytes(plan)


def _disk_bytes(plan: Plan) -> tuple[float, float]:
    """Read from disk and written to it: state once, shards at each gather and when stepped."""
    shards = sum(row.shard_bytes for row in plan.units)
    share = plan.shards_on_disk_bytes / shards if shards else 0.0
    state = plan.memory.before_step.disk_bytes - plan.shards_on_disk_bytes
    return state + share * _gathered_bytes(plan), state + share * plan.step.params_bytes


def _needed(rates: Rates, name: str) -> float:
    value = getattr(rates, name)
    if value is None:
        raise ConfigError(
            f"Rates.{name} is needed for this plan and missing; measure it with `zero probe`, "
            "with --path for a disk, under torchrun for what ranks send; or give it"
        )
    return float(value)


# ---- Measured ----

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
    partition(blocks, optimizer, ZeroConfig(2, units=units).for_partition, group=group)

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
