"""Optimizers that people install, each with a way to make it of a model's parameters."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

_ROOT: Final = importlib.util.find_spec("timm")
for _name in ("timm", "timm.optim", "timm.utils") if _ROOT is not None else ():
    # Without its `__init__`, which loads image libraries that optimizers do not need.
    _package = ModuleType(_name)
    _package.__spec__ = _ROOT
    _places = _ROOT.submodule_search_locations or ()
    _package.__path__ = [str(Path(place, *_name.split(".")[1:])) for place in _places]
    sys.modules.setdefault(_name, _package)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _of(path: str, **options: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        return kind(model.parameters(), **options)

    return make


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices within the model; all else."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    known = {id(p) for p in inner}
    return inner, [p for p in model.parameters() if id(p) not in known]


def _galore(model: nn.Module) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    inner, rest = _split(model)
    low = {"rank": 8, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
    return GaLoreAdamW([{"params": rest}, {"params": inner, **low}], lr=1e-2)


def _apollo(model: nn.Module) -> torch.optim.Optimizer:
    from apollo_torch import APOLLOAdamW

    inner, rest = _split(model)
    low = {"rank": 8, "update_proj_gap": 4, "scale": 1, "proj": "random"}
    low |= {"proj_type": "std", "scale_type": "channel"}
    return APOLLOAdamW([{"params": rest}, {"params": inner, **low}], lr=1e-2)


def _adam_mini(model: nn.Module) -> torch.optim.Optimizer:
    from adam_mini import Adam_mini

    options = {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "verbose": False}
    return Adam_mini(model.named_parameters(), lr=1e-2, **options)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    from muon import SingleDeviceMuonWithAuxAdam

    inner, rest = _split(model)
    return SingleDeviceMuonWithAuxAdam(
        [{"params": inner, "use_muon": True, "lr": 1e-2}, {"params": rest, "use_muon": False}]
    )


def _chained(model: nn.Module) -> torch.optim.Optimizer:
    from zero_engine import ChainedOptimizer

    inner, rest = _split(model)
    return ChainedOptimizer(torch.optim.Muon(inner, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2))


def _prodigy_of_shards(model: nn.Module) -> torch.optim.Optimizer:
    """With sums over ranks, which its author has for shards, on a device of CUDA."""
    from prodigyopt import Prodigy

    class OfShards(Prodigy):
        needs_cut = "flat"

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["fsdp_in_use"] = dist.is_initialized()
            with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
                return super().step(closure)

    return OfShards(model.parameters(), lr=1.0)


def _sam(model: nn.Module) -> torch.optim.Optimizer:
    return SAM(model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412), as its public implementations are."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Climb, evaluate again, return and step."""
        with torch.enable_grad():
            loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm(p=2) for p in params]).norm(p=2)
        for p in params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        with torch.enable_grad():
            self.zero_grad()
            closure()
        for p in params:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        return loss


def _lookahead(model: nn.Module) -> torch.optim.Optimizer:
    from timm.optim.lookahead import Lookahead

    return Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _all_of(module: str) -> list[str]:
    """Names of the optimizers of a package, sorted; none where it is not installed."""
    if importlib.util.find_spec(module) is None:
        return []
    found = vars(importlib.import_module(module))
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type)}
    return sorted(name for name, k in kinds.items() if issubclass(k, torch.optim.Optimizer))


_PO: Final = "pytorch_optimizer"
_ALL: Final = _all_of(_PO)
_NUM_DRAWN: Final = int(os.environ.get("ZERO_DRAWN", "20"))  # of these, by a seed
_OF_TORCH: Final = "Adam AdamW SGD Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD Adafactor"
_OF_TIMM: Final = (
    "adabelief.AdaBelief adafactor.Adafactor adafactor_bv.AdafactorBigVision adahessian.Adahessian "
    "adamp.AdamP adamw.AdamWLegacy adan.Adan adopt.Adopt kron.Kron lamb.Lamb laprop.LaProp "
    "lars.Lars lion.Lion madgrad.MADGRAD mars.Mars muon.Muon nadam.NAdamLegacy nadamw.NAdamW "
    "nvnovograd.NvNovoGrad radam.RAdamLegacy rmsprop_tf.RMSpropTF sgdp.SGDP sgdw.SGDW"
)


def _pytorch_optimizer(names: str, **options: Any) -> dict[str, Make]:
    return {f"{_PO}.{name}": _of(f"{_PO}.{name}", **options) for name in names.split()}


OPTIMIZERS: Final[dict[str, Make]] = {
    "prodigyopt.Prodigy": _of("prodigyopt.Prodigy", lr=1.0),
    "prodigyopt.Prodigy(fsdp_in_use)": _prodigy_of_shards,
    "dadaptation.DAdaptAdam": _of("dadaptation.DAdaptAdam", lr=1.0),
    "dadaptation.DAdaptLion": _of("dadaptation.DAdaptLion", lr=1.0),
    "dadaptation.DAdaptAdaGrad": _of("dadaptation.DAdaptAdaGrad", lr=1.0),
    "dadaptation.DAdaptAdan": _of("dadaptation.DAdaptAdan", lr=1.0),
    "dadaptation.DAdaptSGD": _of("dadaptation.DAdaptSGD", lr=1.0),
    **{
        f"bitsandbytes.{name}": _of(f"bitsandbytes.optim.{name}", lr=1e-2)
        for name in ("Adam8bit", "AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW32bit")
    },
    **{
        f"torchao.{name}": _of(f"torchao.optim.{name}", lr=1e-2)
        for name in ("Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8")
    },
    **{
        f"optimi.{name}": _of(f"optimi.{name}", lr=1e-2)
        for name in ("Adam", "AdamW", "StableAdamW", "Adan", "RAdam", "Ranger", "Lion")
    },
    **{
        f"heavyball.{name}": _of(f"heavyball.{name}", lr=1e-2)
        for name in ("AdamW", "SFAdamW", "SOAP", "PSGDKron")
    },
    "heavyball.ADOPT": _of("heavyball.ADOPT", lr=1e-5),  # plain torch diverges at larger ones
    "lion_pytorch.Lion": _of("lion_pytorch.Lion", lr=1e-3),
    "schedulefree.AdamWScheduleFree": _of("schedulefree.AdamWScheduleFree", lr=1e-2),
    "galore_torch.GaLoreAdamW": _galore,
    "apollo_torch.APOLLOAdamW": _apollo,
    "adam_mini.Adam_mini": _adam_mini,
    "came_pytorch.CAME": _of("came_pytorch.CAME", lr=1e-3),
    "muon": _muon,
    "ChainedOptimizer(Muon, AdamW)": _chained,
    "transformers.Adafactor()": _of("transformers.Adafactor"),
    "transformers.Adafactor(lr)": _of(
        "transformers.Adafactor", lr=1e-3, relative_step=False, scale_parameter=False
    ),
    "SAM": _sam,
    "LBFGS": _of("torch.optim.LBFGS", lr=0.1),
    "torch_optimizer.Shampoo": _of("torch_optimizer.Shampoo", lr=1e-2),
    "torch_optimizer.LAMB": _of("torch_optimizer.Lamb", lr=1e-2),
    **_pytorch_optimizer(
        "Prodigy DAdaptAdam DAdaptLion AdamP SGDP LARS Lamb ADOPT Shampoo SPAM Lion "
        "AdaBelief AdaFactor CAME Adan Tiger SOAP ScalableShampoo",
    ),
    **_pytorch_optimizer(" ".join(random.Random(42).sample(_ALL, min(_NUM_DRAWN, len(_ALL))))),
    **{f"torch.{name}": _of(f"torch.optim.{name}", lr=1e-3) for name in _OF_TORCH.split()},
    **{
        f"timm.{path.rpartition('.')[2]}": _of(f"timm.optim.{path}", lr=1e-3)
        for path in _OF_TIMM.split()
    },
    "timm.Lookahead": _lookahead,
    "pytorch_optimizer.Ranger21": _of("pytorch_optimizer.Ranger21", num_iterations=100),
}
