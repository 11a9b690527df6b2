"""torch's own samples of each of its modules, and of each of its optimizers, over shards.

`torch.testing._internal` ships them: how to build a module or an optimizer, and what to call it
with. A step over two ranks that see the same data is a step of plain torch.
"""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import ZeroConfig
from zero_partition import PartitionError, ZeroRedundancyOptimizer

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

with warnings.catch_warnings(action="ignore"):  # of packages that some of its tests use
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(2, timeout_s=300)]

MODULES: Final = {info.name: info for info in module_db}
OPTIMIZERS: Final = {info.optim_cls.__name__: info for info in optim_db}

# What is refused before the first step, and the words.
REFUSED: Final[dict[str, str]] = {
    **{
        f"nn.LazyConv{kind}{dims}d": "of a lazy module has no shape yet; run one forward"
        for kind in ("", "Transpose")
        for dims in (1, 2, 3)
    },
    "LBFGS": "keeps parameters in its attribute '_params'",
    "SparseAdam": "SparseAdam does not support dense gradients",
}


def _refused(name: str) -> AbstractContextManager[Any]:
    if name not in REFUSED:
        return nullcontext()
    return pytest.raises(PartitionError, match=re.escape(REFUSED[name]))


def _tensors(value: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _step(module: nn.Module, sample: Any) -> list[Tensor]:
    """Run forward and backward; returns outputs, and gradients of the inputs."""
    args, kwargs = torch.utils._pytree.tree_map_only(
        Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (sample.args, sample.kwargs),
    )
    inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
    torch.manual_seed(1)  # of dropout
    outputs = [t for t in _tensors(module(*args, **kwargs)) if t.is_floating_point()]
    if any(output.requires_grad for output in outputs):
        torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
    return [*outputs, *(t.grad for t in inputs if t.grad is not None)]


_MOST_SAMPLES = 64  # of a module, evenly among all


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.drawn(4)
def test_a_module_computes_and_learns_as_it_does_plain(group: Group, name: str) -> None:
    info = MODULES[name]
    torch.manual_seed(0)
    options = {
        "device": torch.get_default_device(),
        "dtype": torch.float32,
        "requires_grad": True,
        "training": True,
    }
    samples = [*info.module_inputs_func(info, **options)]
    # LinearCrossEntropyLoss has some hundreds, of every combination of its options.
    for sample in samples[:: -(-len(samples) // _MOST_SAMPLES)]:
        made = sample.constructor_input
        torch.manual_seed(0)
        plain = info.module_cls(*made.args, **made.kwargs)
        params = [param for param in plain.parameters() if param.requires_grad]
        if not params:
            continue
        models = [copy.deepcopy(plain) for _ in (1, 3)]
        optimizer = torch.optim.SGD(params, lr=0.1)
        expected = _step(plain, sample.forward_input)
        optimizer.step()
        for stage, model in zip((1, 3), models, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            config = ZeroConfig(stage, min_unit_bytes=0, small_param_numel=0)
            with _refused(name):
                zero_engine.shard(model, optimizer, config, group=group)
            if name in REFUSED:
                continue
            found = _step(model, sample.forward_input)
            optimizer.step()
            where = f"{sample.desc} at stage {stage}: {made}"
            assert_close(found, expected, equal_nan=True, msg=where)
            zero_engine.unshard(model, optimizer)
            assert_close(
                dict(model.state_dict()), dict(plain.state_dict()), equal_nan=True, msg=where
            )
            assert type(model) is type(plain)


def _train(model: nn.Module, optimizer: Any, *, is_sparse: bool) -> None:
    for step in range(3):
        x = torch.arange(4) if is_sparse else torch.ones(3, 4) * (step + 1) / 5

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        if type(optimizer).__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "SparseAdam":
        return nn.Embedding(6, 4, sparse=True)
    if name == "Muon":  # which is for matrices
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_over_shards_as_over_whole_parameters(group: Group, name: str) -> None:
    info, is_sparse = OPTIMIZERS[name], name == "SparseAdam"
    for sample in info.optim_inputs_func(device="cpu"):
        plain = _model(name)
        options = {key: value for key, value in sample.kwargs.items() if key != "params"}
        optimizer = info.optim_cls(plain.parameters(), **options)
        _train(plain, optimizer, is_sparse=is_sparse)
        for way in (1, 3, "torch's class"):
            model = _model(name)
            is_refused = name in REFUSED and (name, way) != ("SparseAdam", "torch's class")
            with _refused(name if is_refused else ""):
                if way == "torch's class":
                    optimizer = ZeroRedundancyOptimizer(
                        model.parameters(), info.optim_cls, group=group, **options
                    )
                else:
                    optimizer = info.optim_cls(model.parameters(), **options)
                    config = ZeroConfig(way, min_unit_bytes=0, small_param_numel=0)
                    zero_engine.shard(model, optimizer, config, group=group)
                _train(model, optimizer, is_sparse=is_sparse)
            if is_refused:
                continue
            found = zero_engine.full_state_dict(model) if way in (1, 3) else model.state_dict()
            if group.rank == 0 or way == "torch's class":
                assert_close(
                    dict(found), dict(plain.state_dict()), msg=f"{way}: {sample.desc} {options}"
                )
