"""From the meta device to shards, by the names of what was not filled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from training import assert_weights_of
from zero_comm import AgreementError, Group
from zero_partition import PartitionError
from zoo_of_constructors import assert_built_as


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.listed = nn.ParameterList(torch.empty(3) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("mask", torch.empty(3, 3, dtype=torch.bool))
        self.same = self.frequencies  # an alias that must not stay behind
        self.table = torch.empty(3)


def _init(module: nn.Module) -> None:
    """Parents write to children, out of order; buffers are computed."""
    if isinstance(module, nn.Linear | nn.LayerNorm | nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, nn.ParameterList):
        for param in module:
            nn.init.uniform_(param)
    if isinstance(module, _Model):
        nn.init.normal_(module.embed.weight, std=0.1)
        nn.init.ones_(module.scale)
        module.head.weight.data[1:3] = 4.0
        nn.init.normal_(module.frequencies)
        module.mask.copy_(torch.ones(3, 3).tril())
        module.table = torch.arange(3.0)


def _on_meta(make: Callable[[], nn.Module] = _Model) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.ranks(1, 2)
def test_values_are_those_of_to_empty_and_apply(group: Group) -> None:
    """Torch's own two steps are the oracle; ties, which its to_empty() cuts, are kept."""
    plain = _Model()
    torch.manual_seed(0)
    plain.apply(_init)
    model = _on_meta()
    faces = list(model.parameters())
    torch.manual_seed(group.rank * 7)
    zero_engine.materialise(model, _init, group=group)

    assert all(a is b for a, b in zip(model.parameters(), faces, strict=True))
    assert model.head.weight is model.embed.weight
    assert model.same is model.frequencies
    assert torch.equal(model.frequencies, plain.frequencies)
    assert not model.scale.requires_grad and model.embed.weight.requires_grad
    assert_built_as(model, plain, group=group)


def test_reset_parameters_is_the_default_for_what_has_no_values(group: Group) -> None:
    """Most modules of torch know how to fill themselves; a backbone that exists is kept."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 8), nn.Embedding(5, 8))

    plain, model = make(), _on_meta(make)
    model[0] = copy.deepcopy(plain[0])
    torch.manual_seed(0)
    for module in plain[1:]:
        module.reset_parameters()
    torch.manual_seed(0)
    zero_engine.materialise(model, group=group)
    zero_engine.shard(model, None, ZeroConfig(3), group=group)
    assert_weights_of(model, plain, group=group, what="materialised")


def test_what_was_left_unwritten_is_named(group: Group) -> None:
    """Junk in a table of positions, or in half a matrix, is NaN or nonsense hours later."""

    def leave_out(module: nn.Module) -> None:
        if isinstance(module, _Model):
            with torch.no_grad():
                module.embed.weight[:5] = 0.0  # the rest is the other rank's
        elif not (isinstance(module, nn.Linear) and module.bias is None):
            _init(module)

    with pytest.raises(PartitionError) as caught:
        zero_engine.materialise(_on_meta(), leave_out, group=group)
    found = str(caught.value).split(":")[0]
    assert found == "'scale', 'embed.weight', 'frequencies', 'mask', 'table'"

    model = _on_meta()  # whose own parameters no reset_parameters() fills: said at the beginning
    with pytest.raises(PartitionError, match=r"'scale', 'frequencies', 'mask'.*init=fn"):
        zero_engine.materialise(model, group=group)
    assert all(param.is_meta for param in model.parameters())


def test_ranks_that_materialise_different_models_are_told(group: Group) -> None:
    """Else one waits for what the other never sends."""
    model = nn.Linear(4, 4 + group.rank, device="meta")
    with pytest.raises(AgreementError, match=r"'weight' on the meta device.*\(5, 4\)"):
        zero_engine.materialise(model, group=group)


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.uint8, torch.bool),
)


def test_every_dtype_can_say_that_it_was_not_written(group: Group) -> None:
    """Of each, one element that is left out is found; memory holds anything."""
    for dtype in DTYPES:
        for until in (0, 2, 3):
            model = nn.Linear(3, 1, bias=False, device="meta")
            model.register_buffer("values", torch.empty(3, dtype=dtype, device="meta"))

            @torch.no_grad()
            def write(module: nn.Module, until: int = until) -> None:
                module.weight.zero_()
                module.values[:until] = 1

            says = pytest.raises(PartitionError, match="values") if until < 3 else nullcontext()
            with says:
                zero_engine.materialise(model, init=write, group=group)
        assert model.values.tolist() == [1, 1, 1]
