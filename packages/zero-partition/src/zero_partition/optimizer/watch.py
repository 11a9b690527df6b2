"""A watch over the operators of a step: which elements they combine.

An optimizer may work on shards if each element of its update comes from elements of the same shard.
Values of a few steps cannot prove that: a branch may not be taken, and a factor may be small. The
operators show it whatever their results are: a sum over a whole tensor needs the whole tensor,
wherever its value goes. Kernels of other libraries cannot be seen through, and are judged by values
alone; so is what Python computes with numbers that it has read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero_partition.stand_in import tensors_among
from zero_partition.torch_private import DispatchMode

_FACTORIES: Final = ("empty", "zeros", "ones", "full", "rand", "new_", "scalar_tensor")
# Elementwise operators that torch does not tag as pointwise.
_COPIES: Final = {
    *("clone", "copy", "copy_", "_to_copy", "detach", "alias", "lift_fresh", "fill_", "zero_"),
    *("where", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),
}
_RESHAPES: Final = {"view", "reshape", "_unsafe_view", "_reshape_alias", "unflatten", "flatten"}
_KEEP_DIM_0: Final = {"unsqueeze", "squeeze", "expand", "slice", "select", "split", "unbind"}
_TRANSPOSES: Final = {"t", "transpose", "permute", "movedim", "as_strided"}
# Operators whose answer is the same for nearly every step; their use is judged by values.
_CHECKS: Final = {"any", "all", "equal", "is_nonzero", "_local_scalar_dense", "allclose"}


@frozen
class Reach:
    """Origin of a tensor: the samples, and how many of their elements, it was computed from."""

    samples: frozenset[int]
    numel: int
    # Elements of the sample behind one index along dim 0; None: they are in no order.
    grain: int | None
    # Samples by index along dim 0, if several are stacked.
    rows: tuple[frozenset[int], ...] | None = None


@final
@define(eq=False)
class StepWatch(DispatchMode):
    """Records what the operators of a step need. Enter it around `optimizer.step()`.

    Attributes:
        grains: Sample -> elements that must stay together: 1, or absent, where a step is
            elementwise.
        mixed: What combined values of several samples, as an error says it; "" if nothing did.
    """

    grains: dict[int, int] = field(factory=dict)
    mixed: str = ""
    _reaches: WeakTensorKeyDictionary = field(factory=WeakTensorKeyDictionary)
    # Address -> reach of a sample, since `param.data` is a new object each time.
    _by_address: dict[int, Reach] = field(factory=dict)
    # Kept alive, or other tensors would get their addresses.
    _samples: list[Tensor] = field(factory=list)

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def follow(self, sample: int, tensor: Tensor) -> None:
        """A tensor has the elements of a sample, in order."""
        grain = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.numel() else 1
        reach = Reach(frozenset({sample}), tensor.numel(), grain)
        self._reaches[tensor] = reach
        self._samples.append(tensor)
        if tensor.numel():
            self._by_address[tensor.data_ptr()] = reach

    def _reach_of(self, tensor: Tensor) -> Reach | None:
        if tensor in self._reaches:
            return self._reaches[tensor]
        if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
            return None
        reach = self._by_address.get(tensor.data_ptr())
        return reach if reach is not None and reach.numel == tensor.numel() else None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operator, and note what it needed."""
        out = func(*args, **(kwargs or {}))
        name, space = func.overloadpacket.__name__, func.namespace
        if space in {"aten", "prims"} and not name.startswith(_FACTORIES):
            if name.startswith("_foreach_"):
                self._note_lists(name, func, args, kwargs or {}, out)
            else:
                self._note(name, func, args, kwargs or {}, out)
        return out

    def _note_lists(self, name: str, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Note each item of an operator over lists."""
        lists = [a for a in args if isinstance(a, list | tuple) and tensors_among(a)]
        rest = [a for a in args if not any(a is each for each in lists)]
        for index in range(len(lists[0]) if lists else 0):
            each = tuple(a[index] for a in lists if index < len(a))
            result = out[index] if isinstance(out, list | tuple) and out else each[0]
            self._note(name.removeprefix("_foreach_"), func, (*each, *rest), kwargs, result)

    def _note(self, name: str, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        given = tensors_among((args[1:] if name == "copy_" else args, list(kwargs.values())))
        found = [(t, reach) for t in given if (reach := self._reach_of(t)) is not None]
        if not found or name in _CHECKS:
            return
        inputs, reaches = [t for t, _ in found], [reach for _, reach in found]
        samples = frozenset().union(*(reach.samples for reach in reaches))
        largest = max(range(len(inputs)), key=lambda index: inputs[index].numel())
        source, reach = inputs[largest], reaches[largest]
        is_foreach = func.overloadpacket.__name__.startswith("_foreach_")
        is_pointwise = torch.Tag.pointwise in func.tags or name in _COPIES
        is_pointwise |= is_foreach and name not in {"norm", "max"}
        outputs = tensors_among(out) or ([args[0]] if name.endswith("_") else [])
        is_batch = name in {"stack", "cat"} and not kwargs.get("dim", (*args, 0, 0)[1])
        # It may be a cat of tensors of length 1.
        if is_batch and len(inputs) == len(outputs[0]):
            rows = tuple(reach.samples for reach in reaches)
            self._reaches[outputs[0]] = Reach(samples, reach.numel, None, rows)
            return
        is_stacked = any(reach.rows is not None for reach in reaches)
        if is_stacked and self._note_stacked(
            name, args, kwargs, reaches, outputs, is_pointwise=is_pointwise
        ):
            return
        if len(samples) > 1 and not self.mixed:
            self.mixed = f"torch.{name} combines values of several parameters"
        for output in outputs:
            grain = reach.grain
            if name in _RESHAPES:
                grain = self._regrain(source, reach, output)
            elif name in _TRANSPOSES:
                grain = None
            elif name in _KEEP_DIM_0:
                same = output.ndim and source.ndim and output.shape[0] == source.shape[0]
                grain = grain if same else None
            elif not is_pointwise:
                grain = self._reduce(_dims_of(name, args, kwargs, source), source, reach, samples)
            self._reaches[output] = Reach(samples, reach.numel, grain)

    def _note_stacked(
        self,
        name: str,
        args: tuple,
        kwargs: dict,
        reaches: Sequence[Reach],
        outputs: Sequence[Tensor],
        *,
        is_pointwise: bool,
    ) -> bool:
        """Follow numbers of several parameters that lie in one tensor, each at its index."""
        stacked = [reach.rows for reach in reaches if reach.rows is not None]
        length = len(stacked[0])
        if is_pointwise and all(len(each) == length for each in (*stacked, *outputs)):
            alone = [reach.samples for reach in reaches if reach.rows is None]
            rows = tuple(frozenset().union(*each, *alone) for each in zip(*stacked, strict=True))
            for output in outputs:
                samples = frozenset().union(*rows)
                self._reaches[output] = Reach(samples, reaches[0].numel, None, rows)
            return not alone
        if name in _RESHAPES and (rows := _regrouped(stacked[0], outputs[0])) is not None:
            samples = frozenset().union(*rows)
            self._reaches[outputs[0]] = Reach(samples, reaches[0].numel, None, rows)
            return True
        picked = _picked(name, args, kwargs, outputs, length)
        for output, indices in zip(outputs, picked, strict=False):
            rows = tuple(stacked[0][index] for index in indices)
            samples = frozenset().union(*rows)
            self._reaches[output] = Reach(
                samples, reaches[0].numel, None, rows if rows[1:] else None
            )
        if picked:
            return True
        batched = [t for t in outputs if t.ndim and len(t) == length]
        dims = _dims_of(name, args, {}, args[0]) if isinstance(args[0], Tensor) else []
        if len(batched) == len(outputs) and 0 not in dims and not (name in _BY_DIMS and not dims):
            # Each index is a parameter of its own, as in a batch of matrices.
            for output in outputs:
                samples = frozenset().union(*stacked[0])
                self._reaches[output] = Reach(samples, reaches[0].numel, None, stacked[0])
                for sample in samples:
                    self.grains[sample] = max(self.grains.get(sample, 1), reaches[0].numel)
            return True
        return False

    @staticmethod
    def _regrain(source: Tensor, reach: Reach, output: Tensor) -> int | None:
        """Return the grain of an output with a new shape; None if elements are in no order."""
        if reach.grain is None or not output.ndim or not output.shape[0]:
            return None
        if source.numel() == reach.numel and reach.numel % output.shape[0] == 0:
            return reach.numel // output.shape[0]
        return reach.grain if output.shape[0] == source.shape[0] else None

    def _reduce(
        self, dims: Sequence[int], source: Tensor, reach: Reach, samples: Iterable[int]
    ) -> int | None:
        """Note that elements along dims, or all of a tensor, are combined."""
        is_within = reach.grain is not None and bool(dims) and 0 not in dims
        if source.numel() > 1 or reach.numel == 1:
            needed = reach.grain if is_within and reach.grain is not None else reach.numel
            for sample in samples:
                self.grains[sample] = max(self.grains.get(sample, 1), needed)
        return reach.grain if is_within else None


def _regrouped(
    rows: tuple[frozenset[int], ...], output: Tensor
) -> tuple[frozenset[int], ...] | None:
    """Return the samples by index along dim 0 of a new shape; None if one index has several."""
    length = len(output) if output.ndim else 0
    if length and length % len(rows) == 0:
        return tuple(samples for samples in rows for _ in range(length // len(rows)))
    if not length or len(rows) % length:
        return None
    size = len(rows) // length
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return tuple(group[0] for group in groups) if all(len({*g}) == 1 for g in groups) else None


def _picked(
    name: str, args: tuple, kwargs: dict, outputs: Sequence[Tensor], length: int
) -> list[Sequence[int]]:
    """Return the indices along dim 0 that each output has; empty where others are picked."""
    if name not in {"select", "slice", "unbind", "split", "split_with_sizes"}:
        return []
    if kwargs.get("dim", (*args, 0, 0)[2 if name.startswith("split") else 1]):
        return []
    if name == "select":
        return [[args[2]]]
    if name == "slice":
        start, stop, step = (*args[2:5], None, None, None)[:3]  # torch leaves defaults out
        return [range(length)[start:stop:step]]
    sizes = [1 if name == "unbind" else len(output) for output in outputs]
    return [range(*each) for each in pairwise(accumulate(sizes, initial=0))]


_BY_DIMS: Final = {
    *("sum", "mean", "amax", "amin", "norm", "linalg_vector_norm", "max", "min", "argmax", "std"),
    *("argmin", "var", "var_mean", "logsumexp", "prod", "median", "cumsum", "softmax", "_softmax"),
    *("sort", "topk", "cumprod", "std_mean", "aminmax"),
}


def _dims_of(name: str, args: tuple, kwargs: dict, source: Tensor) -> list[int]:
    """Return the dims that an operator combines elements along, none where it is not known."""
    if name not in _BY_DIMS or not source.ndim:
        return []
    at = 2 if name in {"norm", "linalg_vector_norm", "topk"} else 1
    given = kwargs.get("dim", args[at] if len(args) > at else None)
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in listed):
        return []
    return [dim % source.ndim for dim in listed]


def cut_grain(grain: int, shape: Sequence[int]) -> str:
    """Return the smallest cut, as users write it, that keeps so many elements together."""
    numel = math.prod(shape)
    if grain <= 1 or numel <= 1:
        return "flat"
    if grain >= numel:
        return "tensor"
    return "row" if shape and grain == numel // shape[0] else f"block({grain})"
