"""The systems that are compared. Adding one is one function under `@system`.

Its name is the function's. It gets the built model, makes its own optimizer, and returns a step:
forward, backward, update, gradients dropped. Imports stay inside, so that a system whose library
is missing costs the others nothing; `imports` names what to load before memory is measured.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch.optim import AdamW

if TYPE_CHECKING:
    from model import GPT
    from torch import Tensor, nn
    from zero_engine import ZeroConfig

Step = Callable[["Tensor", "Tensor"], "Tensor"]  # tokens, targets -> loss


@dataclass(frozen=True)
class Setting:
    """What a system may want to know besides the model."""

    rank: int
    world_size: int
    batch: int  # sequences per rank
    lr: float
    window: int | None  # units our prefetch may hold ahead; None leaves the default
    path: str  # a folder on a disk; empty: nothing may go there
    subgroup_bytes: int  # of optimizer state that is moved and stepped together


@dataclass(frozen=True)
class ReportingStep:
    """A step of a system that can say more of itself than can be seen from outside."""

    step: Step
    report: Callable[[], dict[str, Any]]

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As any step."""
        return self.step(tokens, targets)


@dataclass(frozen=True)
class System:
    """One row of the table."""

    name: str
    title: str
    build: Callable[[GPT, Setting], Step]
    imports: tuple[str, ...] = ()
    environment: str = "own"  # or the name of another Python's
    is_alone: bool = False  # one process, whatever the number of ranks
    is_variant: bool = False  # runs only when asked for by name


SYSTEMS: Final[dict[str, System]] = {}


def system(title: str, *, name: str = "", **traits: Any) -> Callable[[Any], Any]:
    """Register a function that builds a system. `traits` are fields of `System`."""

    def register(build: Any) -> Any:
        key = name or build.__name__
        SYSTEMS[key] = System(key, title, build, **traits)
        return build

    return register


@system("one process, no communication", is_alone=True)
def alone(model: GPT, setting: Setting) -> Step:
    """What the arithmetic costs by itself."""
    return _plain_step(model, AdamW(model.parameters(), lr=setting.lr, fused=True))


@system("DDP")
def ddp(model: GPT, setting: Setting) -> Step:
    """Replicas and an all-reduce: the reference of every ratio."""
    from torch.nn.parallel import DistributedDataParallel

    optimizer = AdamW(model.parameters(), lr=setting.lr, fused=True)
    return _plain_step(DistributedDataParallel(model), optimizer)


def _zro(model: GPT, setting: Setting, *, library: str, in_place: bool) -> Step:
    """Stage 1 under DDP, by whole parameters."""
    import importlib

    from torch.nn.parallel import DistributedDataParallel

    kind = importlib.import_module(library).ZeroRedundancyOptimizer
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = kind(
        replica.parameters(), AdamW, parameters_as_bucket_view=in_place, lr=setting.lr, fused=True
    )
    return _plain_step(replica, optimizer)


for _name, _library, _title in (
    ("torch_zro", "torch.distributed.optim", "DDP + torch ZeroRedundancyOptimizer"),
    ("zro", "zero_partition", "DDP + our ZeroRedundancyOptimizer"),
):
    system(_title, name=_name, imports=(_library,), is_variant=_name == "zro")(
        partial(_zro, library=_library, in_place=True)
    )
    system(f"{_title}, no views", name=f"{_name}_packed", imports=(_library,), is_variant=True)(
        partial(_zro, library=_library, in_place=False)
    )


@system("DDP + ours, with our reduction", imports=("zero_partition",), is_variant=True)
def zro_hook(model: GPT, setting: Setting) -> Step:
    """The same, and gradients are reduced by zero_comm too."""
    from torch.nn.parallel import DistributedDataParallel
    from zero_comm import Group, ddp_hook
    from zero_partition import ZeroRedundancyOptimizer

    group = Group.from_process_group()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, ddp_hook(group))
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(),
        AdamW,
        group,
        parameters_as_bucket_view=True,
        lr=setting.lr,
        fused=True,
    )
    return _plain_step(replica, optimizer)


@system("DDP + ours, within backward", imports=("zero_partition",), is_variant=True)
def zro_overlap(model: GPT, setting: Setting) -> Step:
    """Each bucket is updated and sent while DDP reduces the next."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from zero_partition import ZeroRedundancyOptimizer

    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), AdamW, lr=setting.lr, fused=True)
    optimizer.overlap_with_ddp(replica, allreduce_hook)
    return _plain_step(replica, optimizer)


@system("FSDP1 full shard", imports=("torch.distributed.fsdp",))
def fsdp1(model: GPT, setting: Setting) -> Step:
    """One flat parameter per block."""
    import torch
    from model import Block
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return _plain_step(sharded, AdamW(sharded.parameters(), lr=setting.lr, fused=True))


@system("FSDP2 per block", imports=("torch.distributed.fsdp",))
def fsdp2(model: GPT, setting: Setting) -> Step:
    """`fully_shard` on every block and on the rest."""
    return _fsdp2(model, setting, reshards=None)


@system("FSDP2, no reshard after forward", imports=("torch.distributed.fsdp",), is_variant=True)
def fsdp2_keep(model: GPT, setting: Setting) -> Step:
    """The same, but blocks stay whole from forward to backward."""
    return _fsdp2(model, setting, reshards=False)


def _fsdp2(model: GPT, setting: Setting, *, reshards: bool | None) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (setting.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return _plain_step(model, AdamW(model.parameters(), lr=setting.lr, fused=True))


def _deepspeed(
    model: GPT, setting: Setting, *, stage: int, own_adam: bool = False, **zero: Any
) -> Step:
    import deepspeed  # pyrefly: ignore[missing-import]

    optimizer: Any = AdamW(model.parameters(), lr=setting.lr, fused=True)
    if own_adam:  # what its offload asks for
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyrefly: ignore[missing-import]

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=setting.lr, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_clipping": 0.0,  # else it clips at 1.0, which no other system does here
            "zero_optimization": {"stage": stage, **zero},
            "steps_per_print": 10**9,
        },
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


_of_deepspeed: Final = partial(system, imports=("deepspeed",), environment="deepspeed")
for _stage in (1, 2, 3):
    _of_deepspeed(f"DeepSpeed stage {_stage}", name=f"deepspeed{_stage}")(
        partial(_deepspeed, stage=_stage)
    )
_of_deepspeed("DeepSpeed stage 3, optimizer on the host", name="deepspeed3_host", is_variant=True)(
    partial(_deepspeed, stage=3, own_adam=True, offload_optimizer={"device": "cpu"})
)
_of_deepspeed("DeepSpeed stage 3, buckets of 1e7", name="deepspeed3_1e7", is_variant=True)(
    partial(
        _deepspeed,
        stage=3,
        reduce_bucket_size=10**7,
        stage3_prefetch_bucket_size=10**7,
        stage3_max_live_parameters=10**7,
    )
)


def our_config(setting: Setting, **arguments: Any) -> ZeroConfig:
    """Of one of ours, from its arguments in `OURS`."""
    import zero_engine

    wire, offload = arguments.pop("wire", None), arguments.pop("offload", None)
    if wire is not None:
        how: dict[str, Any] = {"levels": int(os.environ.get("LOCAL_WORLD_SIZE", "1")), **wire}
        arguments["wire"] = zero_engine.Wire(**how)
    if offload is not None:
        further: dict[str, Any] = {"path": setting.path} if "disk" in offload.values() else {}
        arguments["offload"] = zero_engine.Offload(
            **offload, **further, subgroup_bytes=setting.subgroup_bytes
        )
    if setting.window is not None:
        arguments["window"] = setting.window
    return zero_engine.ZeroConfig(**arguments)


def _ours(model: GPT, setting: Setting, *, reads_peers: bool = True, **arguments: Any) -> Step:
    import zero_engine

    if not reads_peers:  # as between hosts: every gather needs every rank
        os.environ["ZERO_COMM_PEER_MEMORY"] = "0"
    config = our_config(setting, **arguments)
    optimizer = AdamW(model.parameters(), lr=setting.lr, fused=True)
    sharded, sharded_optimizer = zero_engine.shard(model, optimizer, config)
    return ReportingStep(_plain_step(sharded, sharded_optimizer), partial(_bytes_of, sharded))


def _bytes_of(sharded: Any) -> dict[str, Any]:
    from zero_partition import memory_report

    report = memory_report(sharded)
    return {
        "device_bytes": report.total_bytes,
        "host_bytes": report.host_bytes,
        "disk_bytes": report.disk_bytes,
    }


OURS: Final[dict[str, dict[str, Any]]] = {}  # what `_ours` is given, by name


def _register(name: str, title: str, *, is_variant: bool = True, **arguments: Any) -> None:
    OURS[name] = arguments
    register = system(title, name=name, imports=("zero_engine",), is_variant=is_variant)
    register(partial(_ours, **arguments))


for _stage in (0, 1, 2, 3):
    _register(f"zero{_stage}", f"ours, stage {_stage}", stage=_stage, is_variant=False)
for _stage in (1, 2, 3):
    for _place in ("host", "disk"):
        _register(
            f"zero{_stage}_{_place}",
            f"ours, stage {_stage}, optimizer on {_place}",
            stage=_stage,
            offload={"optimizer": _place},
        )
for _place in ("host", "disk"):
    _register(
        f"zero3_{_place}_all",
        f"ours, stage 3, optimizer and parameters on {_place}",
        stage=3,
        offload={"optimizer": _place, "params": _place},
    )
_register("zero3_messages", "ours, stage 3 by messages", stage=3, reads_peers=False)
_register(
    "zero3_messages_no_prefetch",
    "ours, stage 3 by messages, no prefetch",
    stage=3,
    reads_peers=False,
    prefetch_numel=0,
)
_register("zero3_by_two", "ours, stage 3 on nodes of two ranks", stage=3, wire={"levels": 2})
for _suffix, _title, _wire in (
    ("", "exact", {}),
    ("_qwz", "weights in int8", {"params": "int8"}),
    ("_hpz", "secondary shards", {"secondary": True}),
    ("_qgz", "gradients in int4", {"gradients": "int4"}),
    ("_all", "all three", {"params": "int8", "secondary": True, "gradients": "int4"}),
):
    _register(f"zero3_nodes{_suffix}", f"ours, stage 3 on nodes, {_title}", stage=3, wire=_wire)


@system("no training: the disk by itself", imports=("zero_offload",), is_variant=True)
def disk(model: GPT, setting: Setting) -> Step:
    """Reads and writes, at once, as many bytes as Adam's state has on each rank."""
    import torch
    from zero_offload import DiskStore, HostArena

    numel = sum(param.numel() for param in model.parameters())
    total, each = 8 * numel // setting.world_size, setting.subgroup_bytes
    sizes = [min(each, total - start) for start in range(0, total, each)]
    store, arena = DiskStore(setting.path), HostArena("benchmark")
    slots = [arena.allocate(min(each, total)).random_(0, 256) for _ in range(4)]
    for key, size in enumerate(sizes):
        store.write(str(key), slots[0][:size]).result()
    under_way: list[Any] = [None] * len(slots)
    done = torch.zeros(())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        del tokens, targets
        num = len(sizes)
        for k in range(2 * num):
            # Writes are half a round behind reads, and use slots of their own.
            is_write, key = k % 2, (k // 2 + k % 2 * (num // 2)) % num
            if under_way[k % 4] is not None:
                under_way[k % 4].result()
            move, memory = (store.write if is_write else store.read), slots[k % 4][: sizes[key]]
            under_way[k % 4] = move(str(key), memory)
        for future in under_way:
            if future is not None:
                future.result()
        return done

    return step


@system("no training: the rates of the machine", imports=("zero_engine",), is_variant=True)
def probe(model: GPT, setting: Setting) -> Step:
    """What `zero probe` measures, once a step."""
    import attrs
    import torch
    import zero_engine
    from zero_comm import Group

    del model
    group, path, done = Group.from_process_group(), setting.path or None, torch.zeros(())
    found: list[dict[str, Any]] = []

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        del tokens, targets
        found.append(attrs.asdict(zero_engine.planning.probe(group, path=path)))
        return done

    return ReportingStep(step, lambda: {"rates": found})


def _plain_step(model: nn.Module, optimizer: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
