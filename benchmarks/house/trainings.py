"""What the gate of bits trains: small models, and everything that a rank can tell of a training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen
from names import find, plain
from torch import Tensor, nn

VOCABULARY: Final = 11
WIDTH: Final = 6
Record = dict[str, Any]  # what one rank has to tell, by field


# ---- The model ----


class Block(nn.Module):
    """Odd sizes, and dropout, whose masks tell where random numbers are."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        if self.checkpoints and torch.is_grad_enabled():
            return find("checkpoint")(self._compute, x)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(hidden, 0.1, self.training))


class Tiny(nn.Module):
    """Tied, frozen, unused and one-element parameters, and repeated blocks."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(3))
        self.adapter = nn.Linear(WIDTH, 40, bias=False).requires_grad_(False)
        self.lift = nn.Linear(40, WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)
        self.register_buffer("positions", torch.linspace(-1, 1, 4)[:, None])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.embed(tokens) + self.positions + self.frozen
        for block in self.blocks:
            x = block(x.to(self.lift.weight.dtype))
        x = x + self.lift(self.adapter(x))
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (2, 4), generator=generator)
    return tokens, torch.randint(VOCABULARY, (2, 4), generator=generator)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, interleaved in the model: matrices decay, the rest does not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of those that the gate uses."""
    groups = param_groups(model)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    if name == "fused":
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if name == "cpu_adam":
        return find("CPUAdam")(groups, lr=1e-2)
    assert name == "muon", f"no optimizer is called {name}"
    muon = torch.optim.Muon(groups[0]["params"], lr=1e-2)
    return find("ChainedOptimizer")(muon, torch.optim.AdamW(groups[1]["params"], lr=1e-2))


# ---- One training ----


@frozen(kw_only=True)
class Case:
    """What is trained, and how; plain values, as they cross a pipe."""

    world_size: int = 2
    stage: int = 3
    optimizer_on: str = "device"
    params_on: str = "device"
    codec: str = "none"
    dtype: str = "fp32"
    optimizer: str = "adamw"
    accumulates: str = "no"  # or each micro-batch is reduced, or the sum once
    clips: bool = False
    checkpoints: bool = False
    then: str = "nothing"  # after the last step
    settings: dict[str, Any] = field(factory=dict)  # further ones of ZeroConfig
    offload: dict[str, Any] = field(factory=dict)  # further ones of Offload
    wire: dict[str, Any] = field(factory=dict)  # further ones of Wire
    scenario: str = "train"

    @property
    def name(self) -> str:
        """All that differs from the default."""
        words = [f"{self.world_size} ranks", f"stage {self.stage}"]
        words += [self.scenario] if self.scenario != "train" else []
        for name, value in (("optimizer", self.optimizer_on), ("params", self.params_on)):
            words += [f"{name} on {value}"] if value != "device" else []
        words += [word for word in (self.codec, self.dtype) if word not in ("none", "fp32")]
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [f"accumulates {self.accumulates}"] if self.accumulates != "no" else []
        words += [word for word in ("clips", "checkpoints") if getattr(self, word)]
        words += [self.then] if self.then != "nothing" else []
        for settings in (self.settings, self.offload, self.wire):
            words += [f"{name}={value}" for name, value in settings.items()]
        return ", ".join(words)

    def config(self, folder: str, *, stage: int | None = None) -> Any:
        """As a ZeroConfig; at another stage, with everything on the device and exact."""
        precision = None
        if self.dtype == "masters":  # of which stage 0 has none
            masters = None if 0 in (self.stage, stage) else torch.float32
            precision = find("Precision")(params=torch.bfloat16, masters=masters)
        settings = {"min_unit_bytes": 0, "precision": precision, **self.settings}
        if stage is not None:
            return find("ZeroConfig")(stage, **settings)
        wire = dict(self.wire)
        if self.codec == "int8":
            wire["params"] = "int8:16"
        elif self.codec != "none":
            wire["gradients"] = "int4:16"
        if self.codec == "loco":
            wire["loco"] = find("Loco")()
        if "gradients" in wire:
            wire.setdefault("levels", self.world_size)
        offload = None
        if (self.optimizer_on, self.params_on) != ("device", "device"):
            places = {"optimizer": self.optimizer_on, "params": self.params_on}
            path = folder if "disk" in places.values() else None
            offload = find("Offload")(**places, path=path, subgroup_bytes=512, **self.offload)
        return find("ZeroConfig")(
            self.stage, offload=offload, wire=find("Wire")(**wire), **settings
        )


@define
class Training:
    """A model in training, on one rank, and what was noted of it so far."""

    group: Any
    case: Case
    folder: str
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    record: Record = field(factory=dict)
    step: int = 0

    def build(self, config: Any = None) -> Training:
        """The same model at every call, sharded."""
        torch.manual_seed(0)
        self.model = Tiny(checkpoints=self.case.checkpoints)
        if self.case.dtype == "bf16":
            self.model.to(torch.bfloat16)
        self.optimizer = make_optimizer(self.case.optimizer, self.model)
        config = self.case.config(self.folder) if config is None else config
        find("shard")(self.model, self.optimizer, config, group=self.group)
        torch.manual_seed(1 + self.group.rank)
        return self

    def loss(self, micro: int = 0, *, step: int | None = None) -> Tensor:
        """Of this rank's batch."""
        return self.model(*batch(self.step if step is None else step, micro, self.group.rank))

    def train(self, num_steps: int) -> None:
        """The plain loop; losses, norms and what the step sent are noted."""
        no_sync = find("no_sync")
        for _ in range(num_steps):
            num_micros = 1 if self.case.accumulates == "no" else 2
            for micro in range(num_micros):
                waits = self.case.accumulates == "no_sync" and micro + 1 < num_micros
                with no_sync(self.model) if waits else nullcontext():
                    loss = self.loss(micro)
                    loss.backward()
                self.note(f"loss {self.step}.{micro}", loss.detach())
            self.note_memory(f"memory before step {self.step}")
            if self.case.clips:
                norm = find("clip_grad_norm_")(self.model, 0.5)
                self.note(f"norm {self.step}", norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.note_traffic(f"traffic of step {self.step}")
            self.step += 1

    # ---- What is noted ----

    def note(self, name: str, value: Any) -> None:
        """A value, by its bits."""
        for key, item in _flat(plain(value)):
            if "agree." in key and not key.endswith("calls"):  # texts: of dates and checksums too
                continue
            where = f"{name}.{key}" if key else name
            assert where not in self.record, f"{where} is noted twice"
            self.record[where] = digest(item) if isinstance(item, Tensor) else item

    def note_memory(self, name: str) -> None:
        """Bytes of each kind."""
        report = plain(find("memory_report")(self.model))
        if self.case.params_on == "disk":  # what passes through memory hangs on the disk's speed
            del report["host_bytes"]
        self.note(name, report)

    def note_traffic(self, name: str) -> None:
        """Of each operation and unit; and the words' numbers of what is printed."""
        self.note(name, find("traffic_report")(self.model))
        self.note(f"{name}, printed", _numbers(find("report")(self.model)))

    def note_parts(self, name: str) -> None:
        """What this rank keeps of each parameter. Local."""
        for key, param in self.model.named_parameters():
            self.note(f"{name} {key}", find("local_param")(param))

    def note_whole(self, name: str) -> None:
        """Weights and optimizer state. Collective."""
        self.note(f"{name} weights", find("full_state_dict")(self.model))
        self.note(f"{name} state", find("full_optimizer_state_dict")(self.model))

    def note_files(self, name: str, folder: Path) -> None:
        """Every byte of a folder, on rank 0; of JSON, what it says."""
        if self.group.rank:
            return
        for path in sorted(folder.rglob("*")):
            where = f"{name} {path.relative_to(folder)}"
            if path.suffix == ".json":
                self.note(where, json.loads(path.read_text()))
            elif path.is_file():
                self.note(where, hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def digest(value: Tensor) -> str:
    """Dtype, shape and bits."""
    value = value.detach().cpu().contiguous()
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    content = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    shown = f" {value.item()!r}" if value.numel() == 1 else ""
    return f"{kind} {content[:16]}{shown}"


@contextlib.contextmanager
def recorded(training: Training, name: str) -> Iterator[None]:
    """Note all that a group sends within the context."""
    with find("record_traffic")(training.group) as traffic:
        yield
    training.note(name, traffic)


def _numbers(text: str) -> str:
    return " ".join(re.findall(r"\d[\d,.]*", text))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
        if not value:
            yield prefix, "empty"
    else:
        yield prefix, value
