"""Parameters that are DTensors: their local tensors are planned, sharded and gathered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zero_comm import Group, all_gather_json

from .chained import members_of
from .errors import PartitionError, StateError
from .nested import map_tensors
from .plan.cuts import Cut
from .plan.split import Split
from .torch_private import (
    change_dtype,
    dtensor_over,
    local_part,
    local_tensor_of,
    own_buffers,
    own_parameters,
    set_local_tensor,
    spec_of,
    version_of,
)

# NOTE(local): a DTensor is a wrapper around this rank's local tensor, and operations on it are
# operations on that, below autograd. So the local tensor becomes a parameter of its own, which is
# what is planned, laid out, sharded and gathered: whatever memory it views, the DTensor computes
# with. Modules and autograd know the DTensor only; its gradient is a DTensor around the local one.


class LocalPart(nn.Parameter):
    """This rank's part of a parameter that is a DTensor, whose local tensor it is.

    `grad`, `requires_grad`, the count of writes and the hooks of gradients are those of the
    DTensor, so that there is one of each.
    """

    dtensor: nn.Parameter

    @classmethod
    def of(cls, dtensor: nn.Parameter) -> LocalPart:
        """Make the local tensor of a DTensor a `LocalPart`, and return it."""
        part = cls(local_tensor_of(dtensor).detach(), requires_grad=False)
        part.dtensor = dtensor
        set_local_tensor(dtensor, part)
        return part

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Return the local tensor of the DTensor's gradient; None if it has no gradient."""
        grad = self.dtensor.grad
        return None if grad is None else local_tensor_of(grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.dtensor.grad = None if value is None else dtensor_over(value, self.dtensor)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Return the part without autograd history; setting it also gives the DTensor its dtype."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if value.dtype != self.dtensor.dtype:
            change_dtype(self.dtensor, value)
            set_local_tensor(self.dtensor, self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return `requires_grad` of the DTensor: the part itself is in no graph."""
        return self.dtensor.requires_grad

    @property
    def _version(self) -> int:  # type: ignore[override]
        return version_of(self.dtensor)

    @property
    def tensor_model_parallel(self) -> bool:
        """Return whether ranks of the mesh have other parts, as Megatron marks such parameters."""
        return any(placement.is_shard() for placement in spec_of(self.dtensor).placements)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register the hook as torch does, for gradients that are placed as the parameter is.

        A gradient that autograd has left as partial sums is reduced over the mesh before the hook
        is called, as torch does it where an optimizer reads it.
        """
        # Weak, as Python's garbage collector does not see through such hooks.
        own = ref(self)

        def arrived(dtensor: Tensor) -> None:
            grad: Any = dtensor.grad
            placements = spec_of(dtensor).placements
            if grad is not None and grad.placements != placements:
                dtensor.grad = grad.redistribute(placements=placements)
            if (part := own()) is not None:
                hook(part)

        return self.dtensor.register_post_accumulate_grad_hook(arrived)


def is_dtensor(tensor: object) -> bool:
    """Return whether it is a DTensor, without importing the class, which takes most of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(param: Any) -> Any:
    """Return what is sharded of a module's parameter: a DTensor's local tensor, or itself."""
    return local_tensor_of(param) if is_dtensor(param) else param


def outer_of(param: Any) -> Any:
    """Return the parameter that modules have of a sharded one: the DTensor of a part, or itself."""
    return param.dtensor if isinstance(param, LocalPart) else param


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a local value in the form of `tensor`: a DTensor that is placed likewise, or plain."""
    return dtensor_over(local, tensor) if is_dtensor(tensor) else local


def whole_over_mesh(param: Tensor, local: Tensor) -> Tensor:
    """Return the full value of which `local` is this rank's part. Collective over the mesh."""
    if not isinstance(param, LocalPart):
        return local
    whole: Any = dtensor_over(local, param.dtensor)
    return whole.full_tensor()  # type: ignore[no-any-return]


def part_of_whole(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a full value of a parameter; all of it if it is plain. Local."""
    return local_part(whole, param.dtensor) if isinstance(param, LocalPart) else whole


def plain_of(value: Any) -> Tensor:
    """Return the full tensor of a DTensor, collective over its mesh; other values as they are."""
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[no-any-return]


def split_of(param: Any) -> Split | None:
    """Return how a DTensor, or the DTensor of a part, is split; None where it is not. Local.

    Raises:
        StateError: It is split over several dimensions of a mesh, or into other parts than torch
            makes.
    """
    dtensor = outer_of(param)
    if not is_dtensor(dtensor) or not any(p.is_shard() for p in spec_of(dtensor).placements):
        return None
    mesh, (placement, *others) = spec_of(dtensor).mesh, spec_of(dtensor).placements
    if others or type(placement).__name__ != "Shard":
        raise StateError(
            f"expected a DTensor that is split over a mesh of one dimension, got {mesh} and "
            f"{spec_of(dtensor).placements}; parallelize the model over mesh['tensor'], say"
        )
    side = dtensor.shape[placement.dim]
    most = -(-side // mesh.size())
    sizes = [min(most, max(0, side - most * index)) for index in range(mesh.size())]
    split = Split(dtensor.shape, placement.dim, tuple(sizes))
    shape, expected = local_of(dtensor).shape, split.shape_of(part_index(dtensor))
    if shape != expected:
        raise StateError(
            f"expected a DTensor of shape {tuple(dtensor.shape)} on {mesh} to have a part of shape "
            f"{tuple(expected)} on this rank, as distribute_tensor() makes them, got "
            f"{tuple(shape)}"
        )
    return split


def part_index(param: Any) -> int:
    """Return the index of this rank's part of a DTensor. Local."""
    return spec_of(outer_of(param)).mesh.get_local_rank()  # type: ignore[no-any-return]


def has_parts(model: nn.Module) -> bool:
    """Return whether a model has parts of DTensors, as inside `localized`. Local."""
    return any(isinstance(param, LocalPart) for param in model.parameters())


def refuse_to_cut(model: nn.Module, cuts: Mapping[int, Cut]) -> None:
    """Raise PartitionError where an optimizer needs more of a DTensor than a rank's part. Local.

    Args:
        model: As inside `localized`.
        cuts: By id of the parameter: where its optimizer lets it be cut.
    """
    for name, param in model.named_parameters():
        cut = cuts.get(id(param), Cut.FLAT)
        if cut != Cut.FLAT and isinstance(param, LocalPart) and param.tensor_model_parallel:
            raise PartitionError(
                f"parameter {name!r}: the optimizer looks at more than single elements of it "
                f"({cut}), and ranks of {spec_of(param.dtensor).mesh} have other parts of it. "
                "Take an optimizer that treats each element alone, such as AdamW, or leave the "
                "module as it is in parallelize_module()"
            )


def mesh_group_of(params: Any) -> Group | None:
    """Return the ranks of the mesh that parameters are DTensors on; None where none is a DTensor.

    Raises:
        PartitionError: They are on several meshes, or on one with several dimensions.
    """
    meshes = {
        id(m): m for p in params if isinstance(p, LocalPart) for m in [spec_of(p.dtensor).mesh]
    }
    if not meshes:
        return None
    mesh, *others = meshes.values()
    if mesh.ndim > 1 or any(other != mesh for other in others):
        raise PartitionError(
            "expected all parameters that are DTensors on one mesh of one dimension, got "
            f"{', '.join(map(str, meshes.values()))}; parallelize the model over mesh['tensor'], "
            "say, and pass mesh['data'] as group"
        )
    return Group.from_mesh(mesh)


def grid_of(whole: Group, parts: Group | None) -> Group | None:
    """Return the group of all ranks that have some part of a model; None where `whole` is that.

    Collective over both, and over the ranks of the result the first time.

    Args:
        whole: Ranks that train the same part.
        parts: Ranks that have the other parts; None where there are none.
    """
    if parts is None or parts.world_size == 1:
        return None
    if whole.process_group is None:
        return parts
    mine = [parts.global_rank(rank) for rank in range(parts.world_size)]
    return whole.spanning(chain.from_iterable(all_gather_json(mine, group=whole)))


@contextmanager
def localized(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer | None],
    is_sharded: Callable[[], bool],
) -> Iterator[None]:
    """Give a model and its optimizers the local parts of their DTensors in the context. Local.

    Buffers too, which `parallelize_module` replicates; their local tensors are plain. Afterwards
    modules have their DTensors again. Optimizers have them again unless the model is sharded by
    then, since the optimizer of a sharded model has shards.

    Args:
        model: Any.
        optimizers: Of this model.
        is_sharded: Called at the end; returns whether the model is sharded.
    """
    found = [
        (own, name, tensor)
        for module in model.modules()
        for own in (own_parameters(module), own_buffers(module))
        if isinstance(own, dict)
        for name, tensor in own.items()
        if is_dtensor(tensor)
    ]
    parts: dict[Any, Any] = {}
    for own, name, tensor in found:
        part = local_of(tensor)
        if isinstance(tensor, nn.Parameter):
            part = part if isinstance(part, LocalPart) else LocalPart.of(tensor)
            parts[tensor] = part
        own[name] = part
    for optimizer in optimizers:
        _replace(optimizer, parts, lambda _, value: local_of(value))
    try:
        yield
    finally:
        for own, name, tensor in found:
            own[name] = tensor
        if not is_sharded():
            for param, part in parts.items():
                set_local_tensor(param, part.detach())
            back = {part: param for param, part in parts.items()}
            for optimizer in optimizers:
                _replace(optimizer, back, _as_outer)


def _as_outer(param: Tensor, value: Tensor) -> Tensor:
    is_like = value.shape == local_tensor_of(param).shape and value.dim() > 0
    return dtensor_over(value, param) if is_like else value


def _replace(
    optimizer: torch.optim.Optimizer | None,
    new: Mapping[Any, Any],
    convert: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace parameters in an optimizer's groups, and give the new ones the state of the old."""
    for member in members_of(optimizer) if new else ():
        for group in member.param_groups:
            group["params"][:] = [new.get(param, param) for param in group["params"]]
        for param in [param for param in member.state if param in new]:
            state = member.state.pop(param)
            member.state[new[param]] = {
                key: map_tensors(value, lambda t, to=new[param]: convert(to, t))
                for key, value in state.items()
            }


def check_part(name: str, param: Tensor, ranks: Group) -> None:
    """Raise PartitionError for a DTensor whose parts cannot be sharded over these ranks. Local."""
    if not isinstance(param, LocalPart):
        return
    spec = spec_of(param.dtensor)
    mesh, placements = spec.mesh, spec.placements
    if any(placement.is_partial() for placement in placements):
        raise PartitionError(
            f"parameter {name!r}: expected a DTensor that is sharded or replicated, got one of "
            f"partial sums, {placements}; redistribute it first"
        )
    own, every = {dist.get_rank()}, range(ranks.world_size)
    data = own if ranks.process_group is None else {*map(ranks.global_rank, every)}
    shared = data & {*mesh.mesh.flatten().tolist()}
    if shared != own:
        raise PartitionError(
            f"parameter {name!r} is a DTensor on {mesh}, which fully_shard() or "
            f"parallelize_module() has made, and shard() was given ranks of that mesh, "
            f"{sorted(shared)}: each has another part already. Pass the ranks that have the same "
            "part, as in shard(model, optimizer, group=mesh['data']); zero_comm.Group.solo(device) "
            "where every rank of the job has another one; or the model as it is before "
            "fully_shard()"
        )
