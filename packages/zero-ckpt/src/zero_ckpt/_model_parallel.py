"""Where this rank is among those that share its layers, read off whatever the caller has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from ._errors import CheckpointError

if TYPE_CHECKING:
    from zero_comm import Group

# The words in an mpu's getters, those of ranks that split single layers first: Megatron's now,
# DeepSpeed's grid of pipelines, Megatron's before there were pipelines.
_AXES: Final = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_GETTERS: Final = ("get_{}_rank", "get_{}_world_size", "get_{}_group")


@frozen
class ModelParallel:
    """Rank, world size and process group; asked for when needed, since an mpu may start later."""

    rank: Callable[[], int]
    world_size: Callable[[], int]
    process_group: Callable[[], Any]  # torch's

    @classmethod
    def of(cls, mpu: Any) -> ModelParallel:
        """Of an mpu or a DeviceMesh of one dimension; of a rank alone for None. Local.

        Raises:
            CheckpointError: It is none of these.
        """
        if mpu is None:
            return cls(lambda: 0, lambda: 1, lambda: None)
        if _is_mesh(mpu):
            if mpu.ndim != 1:
                raise CheckpointError(
                    f"configure(mpu_=): expected a DeviceMesh of one dimension, got {mpu}; give "
                    "the one that splits layers, as in mesh['tp']"
                )
            return cls(mpu.get_local_rank, mpu.size, mpu.get_group)
        for axis in _AXES:
            getters: list[Any] = [getattr(mpu, name.format(axis), None) for name in _GETTERS]
            if all(map(callable, getters)):
                return cls(*getters)
        wanted = " or ".join(f"get_{axis}_*" for axis in _AXES)
        raise CheckpointError(
            f"configure(mpu_=): expected None, a DeviceMesh of one dimension or an object with "
            f"the getters {wanted} (each of rank, world_size and group), got {mpu!r}"
        )

    def group(self) -> Group | None:
        """The ranks that inputs are split over; None for one. Collective among them.

        Raises:
            CheckpointError: The process group is none of torch's, or has another number of ranks.
        """
        world_size = self.world_size()
        if world_size == 1:
            return None
        from zero_comm import Group  # noqa: PLC0415  (for those who split)

        process_group = self.process_group()
        try:
            group = Group.from_process_group(process_group)
        except (TypeError, ValueError) as error:  # what torch says of a group it does not know
            raise CheckpointError(
                "configure(mpu_=): expected its group to be a process group of torch.distributed, "
                f"got {process_group!r}"
            ) from error
        if group.world_size != world_size:
            raise CheckpointError(
                f"configure(mpu_=): expected a group of as many ranks as its world size says, "
                f"{world_size}, got {group.world_size} ({process_group!r}, rank {group.rank})"
            )
        return group


def _is_mesh(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  (slow to import)

    return isinstance(value, DeviceMesh)
