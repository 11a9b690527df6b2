"""Choice of stage and offloading for a model: a plan of each option, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
from attrs import field, frozen
from zero_partition import PartitionError

from zero_engine.checks import at_least, is_kind, names_fields
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.offload import Offload

from .plan import Plan, plan
from .sources import model_of

# NOTE(cheapest): each row needs less device memory than the rows before it and moves more data:
# gradients and parameters between ranks, then state over the bus, then state from and to a disk.

# Stage, device of the optimizer state, device of the parameters' shards.
_RESTS: Final = (
    (0, "device", "device"),
    (1, "device", "device"),
    (2, "device", "device"),
    (3, "device", "device"),
    (2, "host", "device"),
    (3, "host", "device"),
    (3, "host", "host"),
    (3, "disk", "device"),
    (3, "disk", "host"),
    (3, "disk", "disk"),
)
# A path for an Offload to disk that has none. A plan opens no file, so any path will do.
_ANYWHERE: Final = Path("/")


@final
@names_fields
@frozen(kw_only=True)
class Room:
    """Capacity for training, in bytes. None: no bound.

    Args:
        device: Memory of each device.
        host: Host memory of each machine, for all ranks on it.
        disk: Disk space of each machine, for all ranks on it.
        activations: Memory of each device that activations and other tensors take that a plan does
            not count.
        activations_are_estimated: Whether `activations` comes from `estimate_activations`; tables
            then call it an estimate.
        reserve: Share of each device that is left free, for memory that is neither planned nor in
            `activations`.

    Raises:
        ConfigError: Names the bound, what was expected and what came.
    """

    device: int | None = field(default=None, validator=at_least(1, int))
    host: int | None = field(default=None, validator=at_least(0, int))
    disk: int | None = field(default=None, validator=at_least(0, int))
    activations: int = field(default=0, validator=at_least(0, int))
    activations_are_estimated: bool = field(default=False, validator=is_kind(bool))
    reserve: float = field(default=0.0, validator=at_least(0, (int, float), below=1))

    @property
    def usable(self) -> int | None:
        """Bytes of each device, without the reserve; None: no bound."""
        return None if self.device is None else self.without_reserve(self.device)

    @property
    def is_bounded(self) -> bool:
        """Return whether any memory is bounded, so that an option may not fit."""
        return any(bound is not None for bound in (self.device, self.host, self.disk))

    def without_reserve(self, num_bytes: int) -> int:
        """Return the bytes of a device of this size, without the reserve."""
        return num_bytes - int(num_bytes * self.reserve)


@final
@frozen(kw_only=True)
class Option:
    """One way to train, and the memory that it needs."""

    plan: Plan
    # Peak of a step on each device, the model's buffers and `Room.activations` included.
    device_bytes: int
    # Host memory and disk space of each machine, for all ranks on it.
    host_bytes: int
    disk_bytes: int
    # Whether all three are within the given `Room`, without its reserve.
    fits: bool

    @classmethod
    def of(cls, planned: Plan, room: Room, ranks_per_machine: int) -> Option:
        """Return the option of a plan: the memory it needs, and whether that fits in `room`."""
        needs = {
            "device": planned.memory.step_peak_bytes + planned.buffers_bytes + room.activations,
            "host": (planned.at_rest.host_bytes + planned.passing_bytes) * ranks_per_machine,
            "disk": planned.at_rest.disk_bytes * ranks_per_machine,
        }
        bounds = zip(needs.values(), (room.usable, room.host, room.disk), strict=True)
        fits = all(bound is None or needed <= bound for needed, bound in bounds)
        return cls(plan=planned, fits=fits, **{f"{place}_bytes": n for place, n in needs.items()})

    @property
    def name(self) -> str:
        """Stage of the option, and the states that are offloaded, in words."""
        return name_of(self.plan.config)


def name_of(config: ZeroConfig) -> str:
    """Return the stage of a configuration, and the states that are offloaded, in words."""
    words, offload = [f"stage {int(config.stage)}"], config.offload
    words += ["secondary shards"] * config.wire.secondary + ["replicas"] * config.wire.replicas
    if offload is not None:
        words += [f"{offload.optimizer} optimizer"] * (offload.optimizer != "device")
        words += [f"{offload.params} parameters"] * (offload.params != "device")
    return " + ".join(words)


def plan_options(
    model: Any,
    config: ZeroConfig | None = None,
    *,
    world_size: int,
    room: Room | None = None,
    ranks_per_node: int | None = None,
    progress: Callable[[str], object] | None = None,
    **arguments: Any,
) -> tuple[Option, ...]:
    """Plan every stage and residence that is possible, the cheapest first. Local.

    Args:
        model: As for `plan`.
        config: All settings but stage and offload count.
        world_size: Number of ranks.
        room: Memory and disk space of the machines; no bounds when None.
        ranks_per_node: Ranks that share a machine, its host memory and its disk; all when None.
        progress: Called with the name of each option before it is planned.
        arguments: Further ones of `plan`.

    Raises:
        ConfigError: As for `plan`.
        zero_partition.PartitionError: The model cannot be sharded at any stage.
    """
    config, room, model = config or ZeroConfig(), room or Room(), model_of(model)
    options, problem = [], None
    for stage, *rests in _RESTS:
        offload = offload_at(*rests, like=config.offload or Offload())
        if offload is not None and arguments.get("optimizer", "") is None:
            continue
        try:
            each = attrs.evolve(config, stage=stage, offload=offload)
            if progress is not None:
                progress(name_of(each))
            planned = plan(
                model, each, world_size=world_size, ranks_per_node=ranks_per_node, **arguments
            )
        # Not possible with this configuration, such as stage 0 with masters.
        except (ConfigError, PartitionError) as error:
            problem = error
            continue
        options.append(Option.of(planned, room, ranks_per_node or world_size))
    if not options and problem is not None:
        raise problem
    return tuple(options)


def recommend(options: Sequence[Option]) -> Option | None:
    """Return the cheapest option that fits; None where none does."""
    return next((option for option in options if option.fits), None)


def offload_at(optimizer: Any, params: Any, *, like: Offload) -> Offload | None:
    """Return an Offload to these places, otherwise like another; None: all on the device."""
    if (optimizer, params) == ("device", "device"):
        return None
    return Offload(
        optimizer=optimizer,
        params=params,
        path=(like.path or _ANYWHERE) if "disk" in (optimizer, params) else None,
        subgroup_bytes=like.subgroup_bytes,
        read_ahead=like.read_ahead,
    )
