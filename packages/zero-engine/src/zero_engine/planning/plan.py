"""plan(): the memory and traffic of a training, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, final

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from zero_comm import Levels
from zero_offload import Footprint, OffloadedState
from zero_offload.residence import (
    COPIES_BEHIND,
    FREE_SHARDS,
    WRITES_BEHIND,
    first_that_fit,
    with_delay,
)
from zero_partition import MemoryReport
from zero_partition.plan import wire_of
from zero_partition.planning import (
    ModelPlan,
    PlannedMemory,
    PlannedOperation,
    PlannedSave,
    keeps_free_memory,
    plan_memory,
    plan_model,
    plan_save,
    plan_traffic,
)
from zero_partition.seams import OffloadAllocation, members_of, plan_allocation

from zero_engine.checks import own_masters
from zero_engine.config import ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.offload import Offload, backends_of, shares_of

from .sources import OptimizerMaker, model_of, optimizer_of


def _plan_elsewhere(
    planned: ModelPlan,
    rank: int,
    offload: Offload | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> tuple[dict[str, Any], int]:
    """Return `plan_memory`'s arguments for this rank's offloaded shards, and bytes in transit."""
    if offload is None:
        return {"offload": None, "params_host_bytes": 0, "params_disk_bytes": 0}, 0
    allocation = plan_allocation(
        planned.units,
        planned.param_placements,
        policy=planned.policy,
        precision=planned.precision,
        rank_of=lambda buffer: planned.routes.of(buffer).shard_rank(rank),
        # This machine may lack the device. Only whether it is the CPU counts, and meta is not.
        device=device if device.type == "cpu" else torch.device("meta"),
        group_of=planned.group_of,
    )
    numel = offload.max_host_numel if offload.params == "disk" else None
    on_host = allocation.shards if numel is None else first_that_fit(allocation.shards, numel)
    on_disk = [shard.nbytes for index, shard in allocation.shards.items() if index not in on_host]
    backends = {
        "offload": _plan_state(planned, allocation, offload, optimizer),
        "params_host_bytes": sum(shard.nbytes for shard in on_host.values()),
        "params_disk_bytes": sum(on_disk),
    }
    return backends, _passing_bytes(on_disk, planned, offload)


def _plan_state(
    planned: ModelPlan,
    allocation: OffloadAllocation,
    offload: Offload,
    optimizer: torch.optim.Optimizer | None,
) -> Footprint | None:
    if optimizer is None or not planned.policy.state:
        return None
    footprint = OffloadedState.footprint_like(
        members_of(optimizer),
        allocation.positions,
        optimizer.param_groups,
        own_masters=allocation.masters,
        **shares_of(offload, offloads_params=planned.policy.params),
    )
    if not planned.policy.is_delayed:
        return footprint
    return with_delay(footprint, allocation.positions, grads_on_host=planned.policy.grads)


def _passing_bytes(sizes: list[int], planned: ModelPlan, offload: Offload) -> int:
    """Return the most host memory that shards on disk take while they are read and written.

    Counted are shards read ahead of their gather, those of the sub-group that is stepped, those
    being copied or written, and free ones for the next read. How many there are at a time depends
    on the speed of disk and device, so this is a bound.
    """
    largest = max(sizes, default=0)
    of_units = sorted(
        (unit.num_bytes // planned.world_size for unit in planned.units), reverse=True
    )
    ahead = sum(of_units[: offload.read_ahead])
    opened = offload.subgroup_bytes + 2 * largest if planned.policy.state else largest
    behind = (WRITES_BEHIND + COPIES_BEHIND + FREE_SHARDS) * largest
    return min(sum(sizes), ahead) + min(sum(sizes), opened) + behind


@final
@frozen(kw_only=True)
class UnitRow:
    """Memory and traffic of one unit, on one rank."""

    name: str
    # Elements of its parameters, those on all ranks together.
    numel: int
    # Its gathered parameters, padding included. Where they are sharded, its slot has this size.
    whole_bytes: int
    # This rank's part of its parameters, padding included.
    shard_bytes: int
    # Number of gathers in a step.
    gathers: int
    # Bytes sent in a step, padding included.
    sent_bytes: int


@final
@frozen(kw_only=True)
class Plan:
    """Memory and traffic of one rank, as training with the same configuration has them.

    Bytes are those of tensors. Activations, the model's buffers and memory of libraries are
    additional. `memory.at_rest` and `memory.before_step` equal what `zero_partition.memory_report`
    says at these moments.
    """

    world_size: int
    # The rank that is planned: the one with the most bytes, if none was given.
    rank: int
    config: ZeroConfig
    # Class name of the optimizer, or "none".
    optimizer: str
    # Dtypes of parameters, and whether 16-bit ones have masters: "bf16, fp32 masters: no".
    dtypes: str
    # Elements of the model's parameters; a tied one counts once.
    numel: int
    # The model's buffers, which are replicated on every rank.
    buffers_bytes: int
    memory: PlannedMemory
    # Upper bound of further host memory, for shards that are read from disk and written to it.
    passing_bytes: int
    # This rank's part of a checkpoint, without the model's buffers.
    save: PlannedSave
    # Operations of a step with one micro-batch.
    traffic: tuple[PlannedOperation, ...]
    units: tuple[UnitRow, ...]

    @property
    def at_rest(self) -> MemoryReport:
        """Return memory between steps."""
        return self.memory.at_rest

    @property
    def payload_bytes(self) -> int:
        """Bytes of values sent in a step, without padding and scales."""
        return sum(each.sent.payload_bytes for each in self.traffic)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in a step, inside the node and across nodes."""
        return sum(each.sent.num_bytes for each in self.traffic)

    @property
    def across_bytes(self) -> int:
        """Bytes sent in a step to ranks of other nodes."""
        return sum(each.across.num_bytes for each in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as JSON has them."""
        plain: dict[str, Any] = _plain(self)
        sums = ("payload_bytes", "sent_bytes", "across_bytes")
        plain |= {name: getattr(self, name) for name in sums}
        for moment in ("at_rest", "before_step"):
            plain["memory"][moment]["total_bytes"] = getattr(self.memory, moment).total_bytes
        return plain


def plan(
    model: Any,
    config: ZeroConfig | None = None,
    *,
    world_size: int | dist.DeviceMesh,
    stage: int | None = None,
    optimizer: str | OptimizerMaker | torch.optim.Optimizer | None = "adamw",
    device: str | torch.device = "cuda",
    rank: int | None = None,
    ranks_per_node: int | None = None,
    reads_peers: bool | None = None,
) -> Plan:
    """Plan the memory and traffic of `shard` with this configuration, for any world size. Local.

    The layouts are those that `shard` allocates. Nothing is allocated, and no other rank takes
    part. The plan assumes that units are used in the order of the model's modules, each once, and
    that all trainable parameters get a gradient.

    Args:
        model: A module, best on meta (`with torch.device("meta")`), a `GPTSize`, or a
            configuration of transformers: object, dict, config.json or a folder with one.
        config: As for `shard`; `ZeroConfig()` when None.
        world_size: Number of ranks; or a DeviceMesh of one dimension or of two, as for `shard`,
            which may be one of a process group that only plays them (torch's "fake").
        stage: In place of a configuration that sets nothing else.
        optimizer: A name as in DeepSpeed's files, a torch optimizer of the model, what makes one of
            its parameters, or None for inference.
        device: Of the model in training: "cuda", or "cpu".
        rank: The rank to plan. When None: with `config.groups`, which are those of this rank, this
            rank; otherwise the rank that keeps the most bytes.
        ranks_per_node: Ranks that share a node, neighbours in rank order; all do when None. Where
            `config.wire` needs nodes it says so itself, or this does.
        reads_peers: Whether ranks read each other's shards, as processes of one host on the CPU do;
            they do on the CPU when None.

    Raises:
        ConfigError: An argument cannot be.
        FileError: There is no such file.
        zero_partition.PartitionError: The model or the optimizer cannot be sharded so.
    """
    if config is not None and stage is not None:
        raise ConfigError(f"plan(): expected config or stage={stage}, got both; set config.stage")
    if config is None:
        config = ZeroConfig() if stage is None else ZeroConfig(stage)
    if isinstance(world_size, dist.DeviceMesh):
        wire = wire_of(world_size, config.wire, config.placements)
        world_size, config = world_size.size(), attrs.evolve(config, wire=wire)
    for name, value, lowest in (
        ("world_size", world_size, 1),
        ("rank", rank, 0),
        ("ranks_per_node", ranks_per_node, 1),
    ):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        if not is_number and not (value is None and name != "world_size"):
            raise ConfigError(f"plan(): expected {name} to be at least {lowest}, got {value!r}")
    if rank is not None and rank >= world_size:
        raise ConfigError(f"plan(): expected a rank below {world_size}, got {rank}")
    if ranks_per_node is not None and world_size % ranks_per_node:
        raise ConfigError(
            f"plan(): expected ranks_per_node to divide world_size={world_size}, got "
            f"{ranks_per_node}"
        )
    # A plan needs only the number of ranks on a node, and cannot print process groups.
    if isinstance(config.wire.levels, Levels):
        wire = attrs.evolve(config.wire, levels=config.wire.levels.inside.world_size)
        config = attrs.evolve(config, wire=wire)
    device = torch.device(device)
    model = model_of(model)
    made = optimizer_of(optimizer, model)
    planned = plan_model(
        model,
        made,
        config.for_partition,
        world_size=world_size,
        policy=backends_of(config.offload, device).policy_on(device),
        ranks_per_node=ranks_per_node,
        reads_peers=device.type == "cpu" if reads_peers is None else reads_peers,
        keeps_free_memory=keeps_free_memory(device),
    )
    own = [set(of.positions) for of in planned.routes.of_groups.values()]
    known = set.intersection(*own) if own else set(range(world_size))
    if rank is not None and rank not in known:
        raise ConfigError(
            f"plan(): expected a rank of the groups in the configuration, of {sorted(known)}, got "
            f"{rank}, which has other parameters; plan it where its groups are known"
        )
    if rank is None and own:
        is_here = dist.is_initialized() and dist.get_rank() in known
        rank = dist.get_rank() if is_here else min(known)
    elif rank is None:
        trained = planned.trained_bytes_per_rank
        rank = max(range(len(trained)), key=lambda each: (trained[each], -each))
    backends, passing_bytes = _plan_elsewhere(planned, rank, config.offload, made, device)
    traffic = plan_traffic(planned, rank)
    return Plan(
        world_size=world_size,
        rank=rank,
        config=config,
        optimizer="none" if made is None else type(made).__name__,
        dtypes=_dtypes(planned, made),
        numel=sum(param.numel() for param in model.parameters()),
        buffers_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        memory=plan_memory(planned, rank, **backends),
        passing_bytes=passing_bytes,
        save=plan_save(planned, rank),
        traffic=traffic,
        units=_rows(planned, rank, traffic),
    )


_WORDS: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def _dtypes(planned: ModelPlan, optimizer: torch.optim.Optimizer | None) -> str:
    """Return dtypes of parameters in words, and whether trained 16-bit ones have masters."""
    buffers = [buffer for unit in planned.units for buffer in unit.buffers]
    sizes = Counter[torch.dtype]()
    for buffer in buffers:
        sizes[buffer.dtype] += buffer.layout.numel
    text = " and ".join(_in_words(dtype) for dtype, _ in sizes.most_common())
    trained = {buffer.dtype for buffer in buffers if buffer.trainable}
    narrow = trained & {torch.bfloat16, torch.float16}
    if optimizer is None or not narrow:
        return text
    masters = {planned.precision.master_of(dtype) for dtype in narrow} - {None}
    if masters:
        return f"{text}, {' and '.join(map(_in_words, masters))} masters: yes"
    owns = any(own_masters(each) for each in members_of(optimizer))
    return f"{text}, fp32 masters: {'in the optimizer' if owns else 'no'}"


def _in_words(dtype: Any) -> str:
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _rows(
    planned: ModelPlan, rank: int, traffic: tuple[PlannedOperation, ...]
) -> tuple[UnitRow, ...]:
    rows = []
    for unit in planned.units:
        mine = [operation for operation in traffic if operation.unit == unit.name]
        gathers = [operation.calls for operation in mine if operation.name == "all_gather"]
        rows.append(
            UnitRow(
                name=unit.name or "(model)",
                numel=unit.extent.numel,
                whole_bytes=unit.num_bytes,
                shard_bytes=sum(
                    buffer.dtype.itemsize
                    * buffer.layout.splits[planned.routes.of(buffer).shard_rank(rank)]
                    for buffer in unit.buffers
                ),
                gathers=max(gathers, default=0),
                sent_bytes=sum(each.sent.num_bytes for each in mine),
            )
        )
    return tuple(rows)


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {each.name: _plain(getattr(value, each.name)) for each in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, bool | int | float | str | None) else str(value)
