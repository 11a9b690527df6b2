"""Give a model on the meta device its memory, a part on each rank, and its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from zero_comm import AnyRanks, Group, all_gather_flat, broadcast_flat, check_agreement, collective

from zero_partition.errors import PartitionError
from zero_partition.plan.wire import whole_of
from zero_partition.torch_private import plainly, swap_memory

from .context import Init, guard_module
from .early_shard import early_shard_of, fill_blank, find_early, has_blank


@collective
def materialise(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    *,
    group: AnyRanks,
    timeout_s: float = 60.0,
) -> None:
    """Give a model on the meta device memory and values; each rank keeps its part. Collective.

    Values are those of `model.to_empty(device=...)` followed by `model.apply(init)` on rank 0, bit
    for bit. Each parameter is whole only while `init` touches it, in whatever order it does. Tied
    parameters stay tied, and every Parameter stays the same object. Afterwards the model is as
    `Init` leaves it: `partition` adopts the shards.

    Args:
        model: Built under `torch.device("meta")`, wholly or in part, or inside `Init` with
            `skip_init` or `device="meta"`. What has values keeps them.
        init: Called with every module, children before parents, as `module.apply` does. It writes
            what is there, or puts other parameters and buffers in their place. When None,
            `reset_parameters()` of each module that owns something on the meta device.
        group: The ranks to distribute over, as for `partition`.
        timeout_s: How long to wait for ranks that do not call this, in seconds.

    Raises:
        PartitionError: Names every parameter and buffer that `init` left unwritten, even in part,
            or that has no `reset_parameters()`, and every attribute that is a tensor on the meta
            device but no parameter or buffer and was not replaced.
        zero_comm.AgreementError: Ranks have different models.
        zero_comm.CommError: A rank did not take part in time.
    """
    group, empty = whole_of(group), _on_meta(model)
    if init is None:
        _check_resettable(model)
    facts = {f"{name!r} on the meta device": _describe(tensor) for name, tensor in empty}
    check_agreement(facts, group=group, timeout_s=timeout_s)
    owners = {id(module) for module in model.modules() if _on_meta(module, recurse=False)}
    for name, tensor in empty:
        allocate_blank(tensor, name, group=group)
    for module in model.modules():
        guard_module(module)
    with Init(group=group, timeout_s=timeout_s):
        for module in _bottom_up(model):
            if init is not None:
                init(module)
            elif id(module) in owners:
                module.reset_parameters()  # type: ignore[operator]
    # `init` may have put other tensors in their place, as `self.cos, self.sin = table()` does.
    params = dict(model.named_parameters(remove_duplicate=False))
    now = params | dict(model.named_buffers(remove_duplicate=False))
    found = [(name, now[name], tensor) for name, tensor in empty if name in now]
    unsure = [(name, here) for name, here, old in found if here is old or here.is_meta]
    check_filled(model, unsure, group=group)
    for _, tensor, _ in found:
        if not isinstance(tensor, nn.Parameter) and tensor.numel():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
            broadcast_flat(tensor.view(-1).view(torch.uint8), src=0, group=group).wait()


def allocate_blank(tensor: Tensor, name: str, *, group: Group) -> None:
    """Give a tensor on the meta device memory that is marked as unwritten. Local.

    A buffer gets memory for all elements, a parameter for this rank's part.
    """
    if not isinstance(tensor, nn.Parameter):
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.device)
        fill_blank(memory)
        swap_memory(tensor, memory)
        return
    early = early_shard_of(tensor, name, group=group)
    early.mark_blank()
    first = torch.empty((), dtype=tensor.dtype, device=group.device).expand(tensor.shape)
    swap_memory(tensor, nn.Parameter(first, requires_grad=tensor.requires_grad))
    early.install(tensor)


def plain_on_meta(model: nn.Module) -> list[str]:
    """Attributes that are tensors on the meta device, but neither parameters nor buffers."""
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def check_filled(model: nn.Module, tensors: Sequence[tuple[str, Tensor]], *, group: Group) -> None:
    """Raise PartitionError on all ranks if one finds an unwritten element. Collective."""
    flags = torch.zeros(len(tensors), dtype=torch.uint8, device=group.device)
    with plainly():
        for index, (_, tensor) in enumerate(tensors):
            early = find_early(tensor)
            here = tensor if early is None else early.payload
            is_blank = early is not None and early.is_blank
            flags[index] = is_blank or here.is_meta or has_blank(here)
    found = flags
    if group.world_size > 1 and len(tensors):
        every = flags.new_empty(group.world_size * flags.numel())
        splits = [flags.numel()] * group.world_size
        all_gather_flat(every, splits=splits, group=group, shard=flags, control=True).wait()
        found = every.view(group.world_size, -1).amax(dim=0)
    names = [name for (name, _), flag in zip(tensors, found.tolist(), strict=True) if flag]
    names += plain_on_meta(model)
    if names:
        raise PartitionError(
            f"{', '.join(map(repr, names))}: not, or not wholly, initialised by init() (seen on "
            f"rank {group.rank}); let it write every parameter and buffer (also those that are not "
            "persistent: the file of the weights does not have them), or build the model inside "
            "`with Init(...):` instead of on the meta device"
        )


def _on_meta(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters and buffers without memory, each once, by their first name."""
    params = module.named_parameters(recurse=recurse)
    buffers = module.named_buffers(recurse=recurse)
    return [(name, tensor) for name, tensor in (*params, *buffers) if tensor.is_meta]


def _check_resettable(model: nn.Module) -> None:
    helpless = [
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if not callable(getattr(module, "reset_parameters", None))
        for own, _ in _on_meta(module, recurse=False)
    ]
    if helpless:
        raise PartitionError(
            f"{', '.join(map(repr, helpless))}: on the meta device, in modules without a "
            "reset_parameters(); pass materialise(model, init=fn), where fn(module) writes what "
            "the module owns, or build the model inside `with Init(...):`"
        )


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules in the order of `module.apply`: children first."""
    for child in module.children():
        yield from _bottom_up(child)
    yield module


def _describe(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} of shape {tuple(tensor.shape)}, {tensor.dtype}"
