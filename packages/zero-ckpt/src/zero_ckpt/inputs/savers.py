"""Savers, which keep a function's inputs until backward needs them: AbstractSaver, KeepSaver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from zero_ckpt.errors import CheckpointError

Measuring = Callable[[], AbstractContextManager[Any]]


class AbstractKept(ABC):
    """The inputs of one call, in whatever form; freed with the graph of its outputs."""

    @abstractmethod
    def restore(self) -> Sequence[Tensor]:
        """Return all inputs, detached, with the values, shapes and order of strides that they had.

        May be called several times (a graph that is retained). Collective where the saver says so.
        """

    def prefetch(self) -> None:  # noqa: B027
        """Start slow copies for a `restore` that comes soon. Local; waits for nothing."""

    def measures_gathers(self, measuring: Measuring) -> None:  # noqa: B027
        """Set a context to be in while ranks exchange inputs; called when calls are profiled."""


class AbstractSaver(ABC):
    """Strategy for keeping inputs between forward and backward."""

    @abstractmethod
    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        """Keep what `restore` needs. Local; the inputs themselves stay untouched.

        Args:
            inputs: Tensors from `detached`, of any shape, dtype, device and layout.
            layer: Name of the layer, for messages.
        """

    def reset(self) -> None:  # noqa: B027
        """Free memory that is kept between calls; its size may be another next time. Local."""


def detached(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without their graphs, with the attribute that `stays_as_it_is` reads."""
    found = [tensor.detach() for tensor in inputs]
    for tensor, plain in zip(inputs, found, strict=True):
        if stays_as_it_is(tensor):
            plain.no_checkpointing = True  # type: ignore[attr-defined]
    return found


def stays_as_it_is(tensor: Tensor) -> bool:
    """Return whether a tensor has DeepSpeed's `no_checkpointing` set; it is not packed then."""
    return getattr(tensor, "no_checkpointing", False)


class _SaveInputs(torch.autograd.Function):
    """Autograd node whose only purpose is to save tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on it")


@final
@frozen(eq=False)
class _SavedInputs(AbstractKept):
    """Inputs saved in an autograd node: writes in place are noticed, saved-tensor hooks apply."""

    # An output of the node. Before torch 2.13 a `grad_fn` of a Python function does not own its
    # C++ node, which frees what it saved as soon as no output refers to it.
    _output: Tensor
    _layer: str

    def restore(self) -> Sequence[Tensor]:
        """Return the tensors themselves, or those that saved-tensor hooks return for them."""
        try:
            return self._output.grad_fn.saved_tensors  # type: ignore[union-attr]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise CheckpointError(
                f"{self._layer}: one of its inputs was written in place after it was called, so it "
                "cannot be computed again; give it a clone, or write to a clone"
            ) from error


@final
@frozen
class KeepSaver(AbstractSaver):
    """Keeps inputs as they are, without a copy.

    An input that the layer before made takes memory that the caller has anyway. All
    `torch.autograd.graph.saved_tensors_hooks` around the call apply to inputs, also those of an
    enclosing checkpoint.
    """

    def save(self, inputs: Sequence[Tensor], layer: str) -> AbstractKept:
        """Keep references to inputs. `restore` notices a write in place before backward."""
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        return _SavedInputs(_SaveInputs.apply(anchor, *inputs), layer)
