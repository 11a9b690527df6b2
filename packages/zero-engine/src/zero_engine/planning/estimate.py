"""How long a planned step takes on a machine of known rates. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
from attrs import Attribute, field, frozen

from zero_engine.errors import ConfigError, FileError

from .plan import Plan
from .sources import read_json


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
        share = float(offload.fraction)
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
