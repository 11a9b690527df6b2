"""Whose call it is: by identity, however the library writes the call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zero_ckpt import Checkpointer


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


def _layers(*functions: Callable[..., Any]) -> list[tuple[str, int]]:
    """Names of the layers that were called, and how often."""
    checkpointer = Checkpointer(profiles=True)
    for function in functions:
        checkpointer.checkpoint(function, torch.ones(3, requires_grad=True))
    return [(timing.layer, timing.num_calls) for timing in checkpointer.timings()]


def test_a_block_is_one_layer_in_whatever_form_it_is_called() -> None:
    """Libraries bind keyword arguments anew for every call."""
    block = _Block()

    assert _layers(*(form(block) for form in _FORMS.values())) == [("_Block", len(_FORMS))]


def test_functions_of_one_name_are_one_layer() -> None:
    """A closure is made anew for every call, and has nothing but its name."""

    def make(scale: float) -> Callable[[Tensor], Tensor]:
        def scaled(x: Tensor) -> Tensor:
            return x * scale

        return scaled

    assert [num_calls for _, num_calls in _layers(make(1.0), torch.sin, make(2.0))] == [2, 1]


def test_a_module_that_is_gone_is_forgotten() -> None:
    """A name must keep no model alive, nor a new module at its address get its name."""
    checkpointer = Checkpointer(profiles=True)
    for _ in range(3):
        block = _Block()
        checkpointer.checkpoint(block, torch.ones(3, requires_grad=True))
        seen = weakref.ref(block)
        del block

        assert seen() is None

    names = [timing.layer for timing in checkpointer.timings()]
    assert names == ["_Block", "_Block 2", "_Block 3"]
