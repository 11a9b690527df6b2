"""Model state by formula, where the number of parameters is all that is known of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import attrs
import torch
from attrs import frozen
from zero_partition import PartitionError

from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.reports import as_table

from .options import Room
from .plan import Plan, plan
from .sources import GPTSize
from .tables import bounds_of, in_units

# Width of the block of a transformer whose bytes per parameter are counted.
_HIDDEN: Final = 4096


@final
@frozen(kw_only=True)
class StageStates:
    """Parameters, gradients and optimizer state of one rank at one stage.

    Bytes per parameter are per parameter of the whole model. Bytes of the device include
    `Room.activations`. They fit if they are at most `Room.usable`.
    """

    stage: int
    bytes_per_param: float
    device_bytes: int
    fits: bool

    @classmethod
    def of(cls, stage: int, bytes_per_param: float, numel: int, room: Room) -> StageStates:
        """Return the states of a model of `numel` parameters, and whether they fit in `room`."""
        needed = round(bytes_per_param * numel) + room.activations
        fits = room.usable is None or needed <= room.usable
        return cls(stage=stage, bytes_per_param=bytes_per_param, device_bytes=needed, fits=fits)


@final
@frozen(kw_only=True)
class StatesPlan:
    """Model state at each stage by the formulas of docs/memory.md, without their term in U.

    `optimizer` and `dtypes` are words, as those of `Plan`.
    """

    numel: int
    world_size: int
    optimizer: str
    dtypes: str
    room: Room
    stages: tuple[StageStates, ...]

    @property
    def recommended(self) -> int | None:
        """Return the lowest stage that fits; None where none does."""
        return next((each.stage for each in self.stages if each.fits), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as JSON has them."""
        return attrs.asdict(self) | {"recommended": self.recommended}

    def table(self) -> str:
        """Return a table of the stages, which one to take, and what the formulas leave out."""
        device, activations = self.room.device, self.room.activations
        headers = ["", "bytes per parameter", "device"]
        rows = [
            [f"stage {each.stage}", f"{each.bytes_per_param:.2f}", in_units(each.device_bytes)]
            for each in self.stages
        ]
        if device is not None:
            headers.append("fits with activations" if activations else "fits, activations apart")
            for row, each in zip(rows, self.stages, strict=True):
                row.append("yes" if each.fits else "no")
        lines = []
        if device is not None:
            chosen = self.recommended
            found = "None of these fits" if chosen is None else f"stage {chosen} fits"
            apart = "" if activations else ", activations apart"
            lines.append(f"{found} in {in_units(device)}{apart}.")
        given = f", and {in_units(activations)} for activations" if activations else ""
        left = f"; {self.room.reserve:.0%} of each device is left free for that (--reserve)"
        left = "" if device is None else left
        lines.append(
            "By formula, from the number of parameters: parameters, gradients and optimizer state, "
            "each whole or divided evenly over the ranks; at stage 1 a rank has whole gradients "
            f"and its shard of their mean{given}. Not included: units that stages 2 and 3 gather "
            f"or reduce, {'' if activations else 'activations, '}and what the optimizer's step and "
            f"libraries take{left}."
        )
        more = []
        if device is None:
            more.append("--device-memory 80 to see what fits in 80 GiB")
        if self.dtypes == "fp32":
            more.append("--dtype bf16 for 16-bit parameters with fp32 masters")
        more.append("a config.json, or --layers and --hidden, for units, offload and traffic")
        if not activations:
            more.append(
                "with a config.json also --batch-size and --sequence-length, for activations"
            )
        lines.append(f"Add {'; '.join(more)}.")
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size:,} ranks"
        heading = f"{self.numel:,} parameters, {self.optimizer}, {self.dtypes}, {ranks}"
        table = as_table(rows, headers=headers, disable_numparse=True)
        return "\n\n".join((heading + bounds_of(self.room), table, "\n".join(lines)))


def plan_states(
    numel: int,
    config: ZeroConfig,
    *,
    dtype: torch.dtype,
    world_size: int,
    room: Room,
    stages: Sequence[int] = range(4),
    **arguments: Any,
) -> StatesPlan:
    """Plan the model state of each stage that is possible. Local.

    Bytes per parameter are those that a block of a transformer has on one rank.

    Args:
        numel: Number of all parameters.
        config: Its precision counts.
        dtype: Dtype of the parameters.
        world_size: Number of ranks.
        room: Memory of the machines.
        stages: The stages to plan.
        arguments: `optimizer` and `device`, as for `plan`.

    Raises:
        ConfigError: As for `plan`; or only stage 0 was asked for, and there are masters.
    """
    block = GPTSize(1, _HIDDEN, dtype=dtype)
    try:
        plan(block, attrs.evolve(config, stage=0), world_size=world_size, **arguments)
    except PartitionError as error:
        stages = [stage for stage in stages if stage]
        if not stages:
            raise ConfigError(
                "plan(): expected a stage from 1 to 3 for 16-bit parameters with fp32 masters, got "
                "stage 0, where the optimizer updates the parameters themselves; pass --stage 1, "
                "or --no-masters"
            ) from error
    at_one, at_three = (
        plan(block, attrs.evolve(config, stage=stage), world_size=num_ranks, **arguments)
        for stage, num_ranks in ((1, 1), (3, min(world_size, 2)))
    )
    params, grads, state = _bytes_per_param(at_one)
    # At stage 1 a rank has all gradients, until they are reduced at the end of backward.
    sharded = (grads + state) / world_size
    per_param = (
        params + grads + state,
        params + grads + sharded,
        params + sharded,
        # A device may keep masters and no parameters.
        sum(_bytes_per_param(at_three)) / world_size,
    )
    return StatesPlan(
        numel=numel,
        world_size=world_size,
        optimizer=at_one.optimizer,
        dtypes=at_one.dtypes,
        room=room,
        stages=tuple(StageStates.of(stage, per_param[stage], numel, room) for stage in stages),
    )


def _bytes_per_param(planned: Plan) -> tuple[float, ...]:
    """Return bytes of parameters, gradients and optimizer state, of all ranks together."""
    report = planned.memory.before_step
    kinds = report.params_bytes, report.gradients_bytes, report.optimizer_bytes
    return tuple(num_bytes * planned.world_size / planned.numel for num_bytes in kinds)
