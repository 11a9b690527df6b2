"""The systems that are compared: functions, and the rows that give them arguments.

A function gets the built model, makes its own optimizer, and returns a step: forward, backward,
update, gradients dropped. Libraries are imported inside functions, so that other systems run where
one is missing; `imports` names the modules to load before memory is measured.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
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
    """Arguments of a system besides the model."""

    rank: int
    world_size: int
    batch: int  # sequences per rank
    lr: float
    window: int | None  # units that may be gathered at a time; None: the default
    path: str  # a folder on a disk; empty: the disk is not used
    subgroup_bytes: int  # optimizer state that is moved and stepped together
    device: str = "cpu"


@dataclass(frozen=True)
class ReportingStep:
    """A step of a system that reports figures which cannot be measured from outside."""

    step: Step
    report: Callable[[], dict[str, Any]]

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Train one step and return the loss."""
        return self.step(tokens, targets)


# ---- Other libraries ----


def _plain(model: GPT, setting: Setting) -> Step:
    return _plain_step(model, AdamW(model.parameters(), lr=setting.lr, fused=True))


def _apart(model: GPT, setting: Setting) -> Step:
    """Update this rank's part of the parameters, and communicate nothing."""
    largest_first = sorted(model.parameters(), key=lambda param: -param.numel())
    mine = largest_first[setting.rank :: setting.world_size]
    return _plain_step(model, AdamW(mine, lr=setting.lr, fused=True), clear=model.zero_grad)


def _ddp(model: GPT, setting: Setting) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    optimizer = AdamW(model.parameters(), lr=setting.lr, fused=True)
    return _plain_step(DistributedDataParallel(model), optimizer)


def _zro(
    model: GPT,
    setting: Setting,
    *,
    library: str = "zero_partition",
    reduces: bool = False,
    overlaps: bool = False,
) -> Step:
    """Stage 1 under DDP, by whole parameters.

    With `reduces`, gradients are reduced by zero_comm too. With `overlaps`, each bucket is updated
    and sent while DDP reduces the next.
    """
    from torch.nn.parallel import DistributedDataParallel

    kind = importlib.import_module(library).ZeroRedundancyOptimizer
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    arguments: dict[str, Any] = {"lr": setting.lr, "fused": True}
    if not overlaps:
        arguments["parameters_as_bucket_view"] = True
    if reduces:
        from zero_comm import Group, ddp_hook

        arguments["group"] = Group.from_process_group()
        replica.register_comm_hook(None, ddp_hook(arguments["group"]))
    optimizer = kind(replica.parameters(), AdamW, **arguments)
    if overlaps:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        optimizer.overlap_with_ddp(replica, allreduce_hook)
    return _plain_step(replica, optimizer)


def _fsdp1(model: GPT, setting: Setting) -> Step:
    """Shard with one flat parameter per block."""
    import torch
    from model import Block
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return _plain_step(sharded, AdamW(sharded.parameters(), lr=setting.lr, fused=True))


def _fsdp2(model: GPT, setting: Setting, *, on_host: bool = False, **arguments: Any) -> Step:
    """Shard every block, then the model; with `on_host`, parameters and state are offloaded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _join_a_group()
    arguments["mesh"] = init_device_mesh(setting.device, (setting.world_size,))
    if on_host:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.device == "cuda")
    for module in (*model.blocks, model):
        fully_shard(module, **arguments)
    return _plain_step(model, AdamW(model.parameters(), lr=setting.lr, fused=True))


def _torchao(model: GPT, setting: Setting) -> Step:
    """Keep state and step on the host; gradients are moved there during backward."""
    from torchao.optim import CPUOffloadOptimizer  # pyrefly: ignore[missing-import]

    arguments: dict[str, Any] = {"offload_gradients": True, "lr": setting.lr, "fused": True}
    return _plain_step(model, CPUOffloadOptimizer(model.parameters(), AdamW, **arguments))


def _deepspeed(
    model: GPT, setting: Setting, *, stage: int, own_adam: bool = False, **zero: Any
) -> Step:
    import deepspeed  # pyrefly: ignore[missing-import]

    _join_a_group()
    optimizer: Any = AdamW(model.parameters(), lr=setting.lr, fused=True)
    if own_adam:  # DeepSpeed's offload requires it
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


def _join_a_group() -> None:
    """Create a process group for a single rank, since some libraries require one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backends = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)


# ---- Ours ----


def our_config(setting: Setting, **arguments: Any) -> ZeroConfig:
    """Return the configuration of one of our systems, from its arguments in `OURS`."""
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


# ---- Parts of a step, and bounds of them ----


def _disk(model: GPT, setting: Setting) -> Step:
    """Read and write, at once, as many bytes as Adam's state has on each rank."""
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


def _compute(model: GPT, setting: Setting) -> Step:
    """Run forward and backward, with everything on the device."""
    del setting

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def _transfer(model: GPT, setting: Setting) -> Step:
    """Copy gradients to the host and parameters back, both at once, in page-locked memory."""
    import torch

    device = torch.device(setting.device)
    numel, done = _numel_of_released(model), torch.zeros(())
    here = [torch.empty(numel, device=device) for _ in range(2)]
    there = [torch.empty(numel, pin_memory=device.type == "cuda") for _ in range(2)]
    moves = (
        (torch.Stream(device), there[0], here[0]),
        (torch.Stream(device), here[1], there[1]),
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        del tokens, targets
        for stream, target, source in moves:
            with stream:
                target.copy_(source, non_blocking=True)
        return done

    return step


def _cpu_step(model: GPT, setting: Setting) -> Step:
    """Run the native step on the host, over as many elements as the model has."""
    import torch
    from torch import nn
    from zero_offload import CPUAdam

    numel, done = _numel_of_released(model), torch.zeros(())
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = CPUAdam([param], lr=setting.lr)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        del tokens, targets
        optimizer.step()
        return done

    return step


def _numel_of_released(model: nn.Module) -> int:
    """Return the number of elements of the parameters, and free their memory."""
    return sum(param.numel() for param in model.to("meta").parameters())


def _plain_step(model: nn.Module, optimizer: Any, clear: Callable[[], None] | None = None) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        (clear or optimizer.zero_grad)()
        return loss.detach()

    return step


# ---- The rows ----


@dataclass(frozen=True)
class System:
    """One row of the table."""

    name: str
    build: Callable[[GPT, Setting], Step]
    imports: tuple[str, ...] = ()
    environment: str = "own"  # or the name of another Python's
    is_alone: bool = False  # one process, whatever the number of ranks
    is_variant: bool = False  # runs only when asked for by name


# By name, and what `_ours` is given: arguments of ZeroConfig.
_BY_MESSAGES: Final[dict[str, Any]] = {"stage": 3, "reads_peers": False}
OURS: Final[dict[str, dict[str, Any]]] = {
    **{f"zero{stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    **{
        f"zero{stage}_{place}": {"stage": stage, "offload": {"optimizer": place}}
        for stage in (1, 2, 3)
        for place in ("host", "disk")
    },
    **{
        f"zero3_{place}_all": {"stage": 3, "offload": {"optimizer": place, "params": place}}
        for place in ("host", "disk")
    },
    "zero3_messages": _BY_MESSAGES,
    "zero3_messages_no_prefetch": {**_BY_MESSAGES, "prefetch_numel": 0},
    "zero3_by_two": {"stage": 3, "wire": {"levels": 2}},
    "zero3_nodes": {"stage": 3, "wire": {}},
    "zero3_nodes_qwz": {"stage": 3, "wire": {"params": "int8"}},
    "zero3_nodes_hpz": {"stage": 3, "wire": {"secondary": True}},
    "zero3_nodes_qgz": {"stage": 3, "wire": {"gradients": "int4"}},
    "zero3_nodes_all": {
        "stage": 3,
        "wire": {"params": "int8", "secondary": True, "gradients": "int4"},
    },
}
_ZRO: Final[dict[str, dict[str, Any]]] = {
    "torch_zro": {"library": "torch.distributed.optim"},
    "zro": {},
    "zro_hook": {"reduces": True},
    "zro_overlap": {"overlaps": True},
}
_DEEPSPEED: Final[dict[str, dict[str, Any]]] = {
    **{f"deepspeed{stage}": {"stage": stage} for stage in (1, 2, 3)},
    "deepspeed2_host": {
        "stage": 2,
        "own_adam": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
    },
    "deepspeed3_host": {"stage": 3, "own_adam": True, "offload_optimizer": {"device": "cpu"}},
}
_ALWAYS: Final = {"torch_zro", *(f"{k}{n}" for k in ("zero", "deepspeed") for n in range(4))}


def _rows() -> Iterator[System]:
    fsdp = ("torch.distributed.fsdp",)
    yield System("alone", _plain, is_alone=True)
    yield System("apart", _apart, is_variant=True)
    yield System("ddp", _ddp)
    for name, given in _ZRO.items():
        library = given.get("library", "zero_partition")
        yield System(name, partial(_zro, **given), (library,), is_variant=name not in _ALWAYS)
    yield System("fsdp1", _fsdp1, fsdp)
    yield System("fsdp2", _fsdp2, fsdp)
    keep = partial(_fsdp2, reshard_after_forward=False)
    yield System("fsdp2_keep", keep, fsdp, is_variant=True)
    yield System("fsdp2_host", partial(_fsdp2, on_host=True), fsdp, is_variant=True)
    yield System("torchao", _torchao, ("torchao.optim",), is_variant=True)
    for name, given in _DEEPSPEED.items():
        build, is_variant = partial(_deepspeed, **given), name not in _ALWAYS
        yield System(name, build, ("deepspeed",), "deepspeed", is_variant=is_variant)
    for name, given in OURS.items():
        is_variant = name not in _ALWAYS
        yield System(name, partial(_ours, **given), ("zero_engine",), is_variant=is_variant)
    yield System("disk", _disk, ("zero_offload",), is_variant=True)
    yield System("compute", _compute, is_variant=True)
    yield System("transfer", _transfer, is_variant=True)
    yield System("cpu_step", _cpu_step, ("zero_offload",), is_variant=True)


SYSTEMS: Final = {system.name: system for system in _rows()}
