"""Whose call it is: by identity, however the library writes the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_numbers import Run, assert_equal, plainly, train
from torch import Tensor, nn
from zero_ckpt import Checkpointer
from zero_ckpt._layers import Layers, module_of


class _Block(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


_FORMS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "module": lambda block: block,
    "method": lambda block: block.forward,
    "partial-of-module": lambda block: partial(block, scale=2.0),
    "partial-of-call": lambda block: partial(block.__call__, scale=2.0),
    "partial-of-function": lambda block: partial(type(block).forward, block, scale=2.0),
    "partial-of-partial": lambda block: partial(partial(type(block).forward, block), scale=2.0),
}


@pytest.mark.parametrize("form", list(_FORMS))
def test_a_block_is_one_layer_in_whatever_form_it_is_called(form: str) -> None:
    """Libraries bind keyword arguments anew for every call."""
    block, layers = _Block(), Layers()

    assert module_of(_FORMS[form](block)) is block
    assert layers.of(_FORMS[form](block)) is layers.of(block)


@pytest.mark.parametrize("form", ["partial-of-module", "partial-of-function"])
def test_buffers_are_written_once_in_whatever_form_it_is_called(form: str) -> None:
    """Batch norm's statistics would move twice a step, and evaluation be off."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, run: Run, scale: float | None = None) -> Tensor:
            if scale is None:
                return run(_FORMS[form](self), x, run)
            return self.norm(x).tanh() * scale

    assert_equal(train(Checkpointer().checkpoint, Normed), train(plainly, Normed))


def test_functions_of_one_name_are_one_layer() -> None:
    """A closure is made anew for every call, and has nothing but its name."""

    def make(scale: float) -> Callable[[Tensor], Tensor]:
        def scaled(x: Tensor) -> Tensor:
            return x * scale

        return scaled

    layers = Layers()

    assert layers.of(make(1.0)) is layers.of(make(2.0))
    assert layers.of(make(1.0)) is not layers.of(torch.sin)


def test_a_module_that_is_gone_is_forgotten() -> None:
    """A name must keep no model alive, nor a new module at its address get its name."""
    layers = Layers()
    for number in range(1, 4):
        suffix = "" if number == 1 else f" {number}"
        assert layers.of(_Block()).name == f"_Block{suffix}"
