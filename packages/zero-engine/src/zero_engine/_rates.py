"""How fast a machine is, and how long a planned step takes on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import attrs
from attrs import Attribute, field, frozen

from ._errors import ConfigError, FileError
from ._plan import Plan

# NOTE(between): what takes turns adds up, and what overlaps takes as long as the longest. Backward
# hides messages and transfers, and a step hides the disk, but how much of it hangs on the model. So
# an estimate is two numbers: all hidden, and nothing hidden.


def _is_rate(_: Any, attribute: Attribute, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None and attribute.default is None:
        return
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"Rates.{attribute.name}: expected a number above 0, got {value!r}")


@final
@frozen(kw_only=True)
class Rates:
    """What one rank does in a second, all ranks at work. None: not measured, or there is none.

    Args:
        matmul_flops: Of matrix products, a multiplication and an addition each.
        device_bytes: Read and written of the memory of the device.
        host_bytes: Likewise of the host; the device's when None.
        transfer_bytes: Between device and host; where the device is the CPU there is no such.
        send_bytes: To ranks of the same node.
        send_across_bytes: To ranks of other nodes; as to the same when None.
        disk_read_bytes: From disk.
        disk_write_bytes: To disk.

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

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """From what `save`, or `zero probe --json`, wrote.

        Raises:
            FileError: There is no such file, or it is no JSON of rates.
            ConfigError: A rate is no number.
        """
        try:
            found = json.loads(Path(path).read_text())
        except OSError as error:
            raise FileError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise FileError(f"{path}: expected JSON, got something else: {error}") from error
        names = [each.name for each in attrs.fields(cls)]
        if not isinstance(found, Mapping) or not {"matmul_flops", "device_bytes"} <= set(found):
            raise FileError(
                f"{path}: expected the rates that `zero probe --json` prints, matmul_flops and "
                "device_bytes at least"
            )
        if unknown := sorted(set(found) - set(names)):
            raise FileError(f"{path}: expected rates among {', '.join(names)}, got {unknown}")
        return cls(**found)


@final
@frozen(kw_only=True)
class StepEstimate:
    """Seconds of one step, by what takes them; see NOTE(between)."""

    seconds: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def least_s(self) -> float:
        """If the longest hides all else."""
        return max(self.seconds.values())

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
        ConfigError: A rate that is needed is missing.
    """
    offload, report = plan.config.offload, plan.memory.before_step
    steps_elsewhere = offload is not None and offload.optimizer != "device" and offload.fraction > 0
    gathered = sum(row.shard_bytes * row.gathers for row in plan.units)
    shards = sum(row.shard_bytes for row in plan.units)
    params_rest = "device" if offload is None else offload.params
    kept = plan.save.num_bytes - report.loco_bytes  # all is read, and all but gradients written
    stepped = 2 * kept + report.gradients_bytes
    host = rates.host_bytes or rates.device_bytes
    seconds = {
        "computing": flops_per_param * plan.numel * tokens / rates.matmul_flops,
        "stepping": stepped / (host if steps_elsewhere else rates.device_bytes),
    }
    across, inside = plan.across_bytes, plan.sent_bytes - plan.across_bytes
    if inside:
        seconds["sending"] = inside / _needed(rates, "send_bytes")
    if across:
        rate = rates.send_across_bytes or _needed(rates, "send_bytes")
        seconds["sending across nodes"] = across / rate
    moved = (2 * shards if steps_elsewhere else 0) + (gathered if params_rest != "device" else 0)
    if moved and rates.transfer_bytes is not None:
        seconds["transferring"] = moved / rates.transfer_bytes
    on_disk = report.disk_bytes
    if on_disk:
        params = shards if params_rest == "disk" else 0
        read = on_disk - params + (gathered if params_rest == "disk" else 0)
        seconds["reading the disk"] = read / _needed(rates, "disk_read_bytes")
        seconds["writing the disk"] = on_disk / _needed(rates, "disk_write_bytes")
    return StepEstimate(seconds=seconds)


def _needed(rates: Rates, name: str) -> float:
    value = getattr(rates, name)
    if value is None:
        raise ConfigError(
            f"Rates.{name} is needed for this plan and missing; measure it with `zero probe`, "
            "with --path for a disk, under torchrun for what ranks send; or give it"
        )
    return float(value)
