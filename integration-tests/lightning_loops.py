"""Lightning's side of its tests: one module with every way to a parameter, and trainers for it.

Imported in ranks only: Lightning takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning
import parity
import torch
import torch.distributed as dist
import zero_engine
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zero_comm import Group
from zero_engine.integrations.lightning import ZeroStrategy

WIDTH = 6
Optimizers = Callable[[nn.Module], Any]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Unlike AdamW, it shows by how much gradients were clipped."""
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def chained(module: nn.Module) -> torch.optim.Optimizer:
    """Momentum for matrices, AdamW for the rest."""
    params = list(module.parameters())
    return zero_engine.ChainedOptimizer(
        torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.05, momentum=0.9),
        torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
    )


class LooksAhead(torch.optim.SGD):
    """Steps from where it was along the gradient of where a step would lead."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Evaluate it twice."""
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [param.clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=-0.1)
        with torch.enable_grad():
            closure()
        for param, value in zip(params, before, strict=True):
            param.copy_(value).add_(param.grad, alpha=-0.1)
        return loss


def looks_ahead(module: nn.Module) -> torch.optim.Optimizer:
    return LooksAhead(module.parameters(), lr=0.1)


class Module(lightning.LightningModule):
    """Blocks, a head that is called by itself, and a parameter of the LightningModule's own."""

    def __init__(self, optimizers: Optimizers = adamw) -> None:
        super().__init__()
        parity.seed_all(0)
        self.optimizers_of = optimizers
        self.losses: list[float] = []
        self.seen: list[Any] = []  # batches of training
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.net: nn.Module | None = None
        self.build()

    def build(self) -> None:
        """All of it; see `BuiltLater`."""
        blocks = [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in "abc"]
        self.net = nn.ModuleDict({"blocks": nn.Sequential(*blocks), "head": nn.Linear(WIDTH, 3)})

    def forward(self, x: Tensor) -> Tensor:
        """The head of the blocks."""
        assert self.net is not None
        return self.net["head"](self.net["blocks"](x + self.shift))

    def loss_of(self, batch: Any) -> Tensor:
        """In fp32, whatever the model computes in."""
        x, y = batch
        return nn.functional.mse_loss(self(x).float(), y.float())

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Note the batch and the loss."""
        self.seen.append(batch)
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the mean over ranks."""
        self.log("loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        """Outputs."""
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        """Look what has been built."""
        optimizer = self.optimizers_of(self)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Manual(Module):
    """Which optimizes by hand, and calls its parts past its own forward."""

    def __init__(self, optimizers: Optimizers = adamw) -> None:
        super().__init__(optimizers)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        """All of a step."""
        x, y = batch
        assert self.net is not None
        loss = nn.functional.mse_loss(self.net["head"](self.net["blocks"](x + self.shift)), y)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        optimizer.step()
        self.losses.append(loss.item())


class BuiltLater(Module):
    """Which builds its layers in `configure_model`."""

    def build(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        """Once."""
        if self.net is None:
            super().build()

    def configure_optimizers(self) -> Any:
        """Look what has been built."""
        assert self.net is not None
        params = [*self.net.parameters()]
        self.is_whole = any(p.untyped_storage().nbytes() > p.element_size() for p in params)
        return super().configure_optimizers()


def batches(num: int = 16) -> DataLoader:
    """Of two samples; Lightning gives each rank its own."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(num, WIDTH, generator=generator), torch.randn(num, 3, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=2)


def join(group: Group) -> None:
    """The environment of torchrun, so that Lightning starts no process and no group."""
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests")
    if not dist.is_initialized():
        backend, kind = "gloo", group.device.type
        if kind != "cpu":
            backend = f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class _DDPStrategy(DDPStrategy):
    def determine_ddp_device_ids(self) -> list[int] | None:
        return None  # with any, Lightning asks for a stream of CUDA


def strategy_of(stage: int | None, **fields: Any) -> Any:
    """Lightning's own DDP when None."""
    return _DDPStrategy() if stage is None else ZeroStrategy(stage, min_unit_bytes=0, **fields)


class _Device(Accelerator):
    """An accelerator of the kind that ranks are on, of which Lightning has none."""

    def setup_device(self, device: torch.device) -> None:
        """Make it the current one."""
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Take their number."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the device of each rank."""
        kind, count = torch.get_default_device().type, torch.accelerator.device_count()
        return [torch.device(kind, rank % count) for rank in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return how many there are."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Return whether there is one."""
        return True

    @staticmethod
    def name() -> str:
        """Return the kind."""
        return torch.get_default_device().type


def trainer_of(group: Group, strategy: Any, **options: Any) -> lightning.Trainer:
    join(group)
    defaults = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    is_cpu = torch.get_default_device().type == "cpu"
    defaults |= {"num_sanity_val_steps": 0, "enable_model_summary": False}
    defaults |= {"accelerator": "cpu" if is_cpu else _Device()}
    return lightning.Trainer(
        devices=group.world_size,
        strategy=strategy,
        enable_progress_bar=False,
        **defaults | options,
    )


def fit(
    group: Group, stage: int | None, module: Module, *, ckpt_path: Any = None, **options: Any
) -> tuple[list[float], dict[str, Tensor], lightning.Trainer]:
    """Train; the losses of this rank, and the weights on rank 0."""
    fields = options.pop("fields", {})
    trainer = trainer_of(group, strategy_of(stage, **fields), **options)
    trainer.fit(module, batches(), batches(8), ckpt_path=ckpt_path)
    is_plain = stage is None or group.world_size == 1
    weights = module.state_dict() if is_plain else zero_engine.full_state_dict(module)
    return list(module.losses), {k: v.clone() for k, v in weights.items()}, trainer


def assert_same(ours: Any, theirs: Any, *, group: Group, what: str) -> None:
    """Losses and weights of two runs of `fit`, bit for bit."""
    assert ours[0] == theirs[0], what
    if group.rank == 0:
        parity.assert_same_weights(ours[1], theirs[1], what=what)
