"""Files of every format, whose values follow from names: what an earlier version wrote must load.

Run as a script, with PYTHONPATH naming the packages of a worktree of the commit that is the
reference in docs/decisions/0043-the-new-house.md, it writes `written-files/` anew. What is
expected of them comes from `value_of` alone.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group, Loco
from zero_comm.testing import RankPool
from zero_engine import Offload, Precision, Wire, ZeroConfig
from zero_offload import DiskStore, OffloadedOptimizer
from zero_partition import ZeroRedundancyOptimizer

FILES: Final = Path(__file__).parent / "written-files"
STEP: Final = 3
EXTRA: Final = {"position": 17, "order": [2, 0, 1], "seen": "é", "seed": torch.arange(3)}
LR: Final = 0.125
RATES: Final = {"matmul_flops": 3e9, "device_bytes": 2e9, "launch_s": 1e-4}


class Model(nn.Module):
    """Tied, frozen and one-element parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.frozen.to(self.embed.weight.dtype)
        return self.head(self.block(x) * self.scale)


def value_of(name: str, shape: torch.Size) -> Tensor:
    """Float32 multiples of 1/64 between 1 and 4, never negative, as moments must be."""
    start = zlib.crc32(name.encode()) % 64
    steps = torch.arange(shape.numel()) % 100
    return 1 + (start + steps).reshape(shape) / 64


def weights() -> dict[str, Tensor]:
    """Of the model, by the names of its state dict."""
    found = {name: value_of(name, value.shape) for name, value in Model().state_dict().items()}
    found["head.weight"] = found["embed.weight"]
    return found


def state_of(name: str, entry: str) -> Tensor:
    """An entry of the optimizer's state of one parameter."""
    return value_of(f"{name}.{entry}", weights()[name].shape)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those with optimizer state."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Before a step of it, at a learning rate of its own."""
    params = trained(model).values()
    if name == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.75)
    return torch.optim.AdamW(params, lr=LR, betas=(0.75, 0.875))


ENTRIES: Final = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}
WIRE: Final = Wire(params="int8:16", gradients="int4:16", levels=2, loco=Loco())

# By folder: the stage, the optimizer, and what else there is to say to ZeroConfig.
CHECKPOINTS: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "stage-0": (0, "adamw", {}),
    "stage-1": (1, "sgd", {}),
    "stage-2-masters": (2, "adamw", {"precision": Precision(params=torch.bfloat16)}),
    "stage-3-row": (3, "adamw", {"cut": "row"}),
    "stage-3-coded": (3, "sgd", {"wire": WIRE}),
    "stage-3-disk": (3, "adamw", {"offload": {"optimizer": "disk", "params": "disk"}}),
}


def build(
    group: Group, folder: Path, stage: int, optimizer: str, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded, after a step, so that all state is there."""
    torch.manual_seed(0)
    model = Model()
    stepper = make_optimizer(optimizer, model)
    if "offload" in settings:
        settings["offload"] = Offload(**settings["offload"], path=folder, subgroup_bytes=128)
    config = ZeroConfig(stage, min_unit_bytes=0, **settings)
    zero_engine.shard(model, stepper, config, group=group)
    for _ in range(STEP):  # Adam's steps are counted
        model(torch.arange(5)).float().square().sum().backward()
        stepper.step()
        stepper.zero_grad()
    return model, stepper


def main() -> None:
    """Write all of it anew."""
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    with RankPool(2) as ranks:
        for name in CHECKPOINTS:
            ranks.run(_save, name=name, timeout_s=120)
        for body in (_save_otherwise, _save_engine, _save_torch_files):
            ranks.run(body, timeout_s=120)
    zero_engine.export(FILES / "stage-1", FILES / "exported")
    zero_engine.export(
        FILES / "stage-2-masters", FILES / "exported-16", dtype=torch.bfloat16, max_shard_bytes=150
    )
    (FILES / "rates.json").write_text(json.dumps(RATES))
    _leave_swap_folder()
    print(f"written with {inspect.getfile(zero_engine)}", file=sys.stderr)


# ---- One rank of who writes ----


def _set_values(model: nn.Module, entries: list[str]) -> None:
    expected = weights()
    with torch.no_grad():
        model.get_buffer("counts").copy_(expected["counts"])
    for name, param in model.named_parameters():
        zero_engine.set_full_param(param, expected[name])
        for entry in entries if param.requires_grad else ():
            zero_engine.set_full_optimizer_state(param, entry, state_of(name, entry))


def _seed(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)


def _save(group: Group, name: str) -> None:
    stage, optimizer, settings = CHECKPOINTS[name]
    model, stepper = build(group, FILES, stage, optimizer, **settings)
    _set_values(model, ENTRIES[optimizer])
    _seed(group.rank)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, step_size=2, gamma=0.5)
    zero_engine.save(
        FILES / name, model, stepper, step=STEP, extra=EXTRA, scheduler=scheduler, tag="it"
    )
    zero_engine.unshard(model, stepper)


def _save_otherwise(group: Group) -> None:
    """In the background, without what is frozen, with an average."""
    model, stepper = build(group, FILES, 3, "adamw")
    average = zero_engine.ShardedAverage(model, decay=0.5)
    _set_values(model, ENTRIES["adamw"])
    average.update()
    options: dict[str, Any] = {"exclude_frozen": True}
    with zero_engine.Saver(FILES / "background", model, stepper, **options) as saver:
        saver.save(step=STEP, average=average)


def engine_config() -> dict[str, Any]:
    """DeepSpeed's shape, with a loss scale."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.75, 0.875]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
    }


def start_engine(group: Group) -> zero_engine.Engine:
    """Before its first step."""
    torch.manual_seed(0)
    model = Model()
    engine, *_ = zero_engine.initialize(model=model, config=engine_config(), group=group)
    return engine


def _save_engine(group: Group) -> None:
    engine = start_engine(group)
    for _ in range(STEP):
        engine.backward(engine(torch.arange(5)).float().square().mean())
        engine.step()
    _set_values(engine.module, ENTRIES["adamw"])
    engine.save_checkpoint(str(FILES / "engine"), client_state={"position": 17})
    engine.save_16bit_model(str(FILES / "engine-16"))
    engine.save_16bit_model(str(FILES / "engine-16"), "model.safetensors")


def _save_torch_files(group: Group) -> None:
    """What users keep by `torch.save`."""
    masters = Precision(params=torch.bfloat16)
    model, _ = build(group, FILES, 3, "adamw", precision=masters)
    _set_values(model, ENTRIES["adamw"])
    weights_of, state = (
        get(model) for get in (zero_engine.full_state_dict, zero_engine.full_optimizer_state_dict)
    )
    plain = Model()
    params = [param for _, param in trained(plain).items()]
    divided = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LR)
    for param in params:
        param.grad = torch.ones_like(param)  # on every rank
    divided.step()
    divided.consolidate_state_dict(to=0)
    offloaded = OffloadedOptimizer(params, torch.optim.SGD, lr=LR, momentum=0.75)
    offloaded.step()
    if group.rank == 0:
        torch.save(weights_of, FILES / "weights.pt")
        torch.save(state, FILES / "optimizer.pt")
        torch.save(divided.state_dict(), FILES / "redundancy.pt")
        torch.save(offloaded.state_dict(), FILES / "offloaded.pt")


def _leave_swap_folder() -> None:
    """As a job does that is killed: nothing removes it, and nobody holds its lock."""
    folder = FILES / "swap"
    folder.mkdir()
    store = DiskStore(folder)
    store.write("0", torch.arange(64, dtype=torch.uint8)).result()
    shutil.copytree(folder, FILES / "swap-left")
    store.close()
    folder.rmdir()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
