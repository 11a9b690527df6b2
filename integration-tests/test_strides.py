"""Parameters of any strides train as under DDP, and have their strides again after `unshard`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close, equal
from zero_engine import Offload

pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")  # DDP's

_SIDE: Final = 8


class Block(nn.Module):
    """Kernels of 3 by 3 and 1 by 1, groups, and a transposed convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.up = nn.Conv2d(width, 12, 1)
        self.down = nn.ConvTranspose2d(12, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.down(nn.functional.gelu(self.up(self.norm(self.depthwise(x)))))


class ConvNet(nn.Module):
    """Two blocks after a stem, as a ConvNeXt has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, parity.VOCABULARY)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ByKeyword(ConvNet):
    """Calls a convolution by keyword."""

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        x = self.stem(input=images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Volumes(nn.Module):
    """Convolutions in three dimensions, and a kernel that one input channel makes ambiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv3d(6, 6, k, padding=k // 2) for k in (3, 1))
        self.head = nn.ConvTranspose3d(6, parity.VOCABULARY, 2)

    def forward(self, volumes: Tensor) -> Tensor:  # noqa: D102
        x = self.stem(volumes)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x).mean((2, 3, 4))


def _channels_last() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _by_keyword() -> nn.Module:
    return ByKeyword().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _channels_last_3d() -> nn.Module:
    return Volumes().to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]


def _part_channels_last() -> nn.Module:
    model = ConvNet()
    model.blocks[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _images(step: int, micro: int, rank: int, *, dims: int = 2, given: Any = None) -> Any:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    shape = (4, 5 - dims if dims == 2 else 1, *[_SIDE] * dims)
    images = torch.randn(shape, generator=generator)
    if given is not None:
        images = images.contiguous(memory_format=given)
    return images, torch.randint(parity.VOCABULARY, (4,), generator=generator)


def _loss_of(model: nn.Module, data: parity.Batch) -> Tensor:
    images, targets = data
    return nn.functional.cross_entropy(model(images), targets)


def test_an_image_without_a_batch_gives_what_it_gave(group: Group) -> None:
    """But for rounding: torch computes it in the weight's format, and here in its own."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    image = torch.randn(3, _SIDE, _SIDE)
    expected = conv(image)
    zero_engine.shard(conv, None, ZeroConfig(3), group=group)
    assert_close(conv(image), expected)
    assert_close(conv(input=image), expected)


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (4, 1, 8, 8), (4, 3, 1, 1)], ids=str)
def test_an_output_has_the_format_that_the_weight_gives_it(
    group: Group, shape: tuple[int, ...]
) -> None:
    """Also of inputs whose strides are those of either format: with one channel, or one pixel."""
    torch.manual_seed(0)
    conv = nn.Conv2d(shape[1], 6, 3, padding=1)
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(shape)
    expected = conv(images)
    zero_engine.shard(conv, None, ZeroConfig(3), group=group)
    found = conv(images)
    assert found.stride() == expected.stride()
    assert equal(found, expected)


Case = tuple[Callable[[], nn.Module], Callable[[int, int, int], Any]]
CONVOLUTIONS: Final[dict[str, Case]] = {
    "inputs-too": (_channels_last, partial(_images, given=torch.channels_last)),
    "model-alone": (_channels_last, _images),
    "by-keyword": (_by_keyword, _images),
    "one-block": (_part_channels_last, _images),
    "inputs-alone": (ConvNet, partial(_images, given=torch.channels_last)),
    "3d-inputs-too": (_channels_last_3d, partial(_images, dims=3, given=torch.channels_last_3d)),
    "3d-model-alone": (_channels_last_3d, partial(_images, dims=3)),
}


def _recipe(case: Case, optimizer: str = "adamw") -> parity.Recipe:
    make, batch = case
    return parity.Recipe(
        make=make, batch=batch, loss_of=_loss_of, optimizer=optimizer, num_micro_batches=2
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_channels_last_models_train_as_under_ddp(group: Group, name: str) -> None:
    """To the bit, whether inputs have the format, or the model alone gives it to them."""
    recipe = _recipe(CONVOLUTIONS[name])
    expected = parity.train_ddp(group, recipe)
    for stage in parity.STAGES:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        parity.assert_same(curve, expected, rank=group.rank, what=f"stage {stage}")


@pytest.mark.parametrize(
    "config",
    [
        {"offload": Offload(optimizer="host")},
        {"offload": Offload(optimizer="host", params="host")},
        {"cut": "row"},
        {"cut": "tensor"},
    ],
    ids=["state-on-host", "all-on-host", "row", "tensor"],
)
def test_wherever_they_rest(group: Group, config: dict[str, Any]) -> None:
    """Shards are in the order of the shape, so that a row or a tensor is what its name says."""
    recipe = _recipe(CONVOLUTIONS["inputs-too"], "sgd")  # which the host steps to the bit
    expected = parity.train_ddp(group, recipe)
    curve = parity.train_sharded(group, recipe, ZeroConfig(3, **config))
    parity.assert_same(curve, expected, rank=group.rank, what=str(config))


class Transposed(nn.Module):
    """Weights that are views of others' memory order, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(parity.VOCABULARY, parity.WIDTH)
        self.blocks = nn.ModuleList(parity.Block() for _ in range(2))
        self.head = nn.Linear(parity.WIDTH, parity.VOCABULARY)
        for block in self.blocks:
            block.up.weight.data = block.up.weight.data.t().contiguous().t()
        self.head.weight.data = torch.cat([self.head.weight.data] * 2, dim=1)[:, : parity.WIDTH]

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_weights_of_any_strides_train_as_under_ddp(group: Group) -> None:
    """As what reads a foreign file, or ties a transposed weight, makes them.

    Not bit for bit: of a weight in another order, some processors' kernels add in another order.
    """
    recipe = parity.Recipe(make=Transposed)
    expected = parity.train_ddp(group, recipe)
    for stage in parity.STAGES:
        curve = parity.train_sharded(group, recipe, ZeroConfig(stage))
        assert_close(curve.losses, expected.losses, msg=f"stage {stage}")
        for name, value in expected.weights.items() if group.rank == 0 else ():
            assert_close(curve.weights[name], value, msg=f"stage {stage}, {name}")


def _strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: param.stride() for name, param in model.named_parameters()}


@pytest.mark.parametrize("again", [False, True], ids=["once", "laid-out-anew"])
@pytest.mark.parametrize("name", ["inputs-too", "3d-model-alone"])
def test_unshard_gives_strides_back(group: Group, name: str, again: bool) -> None:
    """And a new layout in between keeps them; optimizer state is as plain torch's then."""
    make, batch = CONVOLUTIONS[name]
    for stage in parity.STAGES:
        model = parity.build(make)
        strides = _strides(model)
        optimizer = torch.optim.AdamW(model.parameters())
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
        for step in range(2):
            if again and step:
                zero_engine.shard(model, optimizer, ZeroConfig(3 - stage), group=group)
            _loss_of(model, batch(step, 0, group.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zero_engine.unshard(model, optimizer)
        assert _strides(model) == strides, stage
        _loss_of(model, batch(2, 0, 0)).backward()
        optimizer.step()


def test_init_shards_them(group: Group) -> None:
    """A model that is built sharded has the strides that its author gave it."""
    with zero_engine.Init(group=group):
        model = parity.build(Transposed)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = parity.build(Transposed)
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    zero_engine.unshard(model, optimizer)
    for (label, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert equal(param, expected), label
        if label != "head.weight":  # gaps are not kept
            assert param.stride() == expected.stride(), label


def test_values_go_in_and_out_in_the_order_of_the_shape(group: Group) -> None:
    """Names map to the same elements whatever the strides of either side."""
    model, plain = parity.build(_channels_last), parity.build(ConvNet)
    optimizer = torch.optim.AdamW(model.parameters())
    zero_engine.shard(model, optimizer, ZeroConfig(3), group=group)
    whole = zero_engine.full_state_dict(model)
    for name, value in plain.state_dict().items() if group.rank == 0 else ():
        assert equal(whole[name], value), name
    value = parity.build(_channels_last).stem.weight.detach() + 1
    zero_engine.set_full_param(model.stem.weight, value)
    assert equal(zero_engine.full_param(model.stem.weight), value)
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last).state_dict()  # type: ignore[call-overload]
    model.load_state_dict(other)
    assert equal(zero_engine.full_param(model.stem.weight), plain.stem.weight)
