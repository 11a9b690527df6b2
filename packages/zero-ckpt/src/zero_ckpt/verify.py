"""Verified recomputation: what backward gets has the bits that it had in forward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero_ckpt.inputs.memory import tensors_in

from .call import Call
from .errors import CheckpointError, NondeterminismError
from .torch_private import (
    OperatorMode,
    inner_tensors,
    is_plain,
    modules_being_called,
    storage_of,
    untraced,
    without_modes,
)

_CHUNK_NUMEL: Final = 1 << 19  # words of 8 bytes that are mixed at a time, in 4 MiB
_ODD: Final = (-0x61C8864680B583EB, -0x3B314601E57A13AD)  # they spread bits, and are invertible


# NOTE(verify): gradients depend on the second run through saved tensors and nothing else, so an
# error is raised if and only if one of these has other bits. A counter of batches, or a table that
# only the first run has to make, disturbs nobody.


@final
@frozen
class Verification:
    """How often recomputation is verified.

    A verified call reads every tensor that autograd saves, in both runs, and keeps 8 bytes for
    each of those; no host waits for a device before backward. In backward it waits for each.

    Args:
        every: Of how many calls of a layer one is verified. Layers take turns, so that calls of a
            different layer each are verified one after the other.

    Raises:
        CheckpointError: It is not a whole number above 0.
    """

    every: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise CheckpointError(
                f"Verification(every=): expected a whole number of calls, 1 or more, got "
                f"{self.every!r}; to verify none, Checkpointer(verifies=None)"
            )

    def picks(self, layer_index: int, num_calls: int) -> bool:
        """Whether a layer is to be verified that was called so often before."""
        return (layer_index + num_calls) % self.every == 0


class _Saved(NamedTuple):
    """Of a tensor that autograd saved in forward; its sum is kept beside it."""

    order: tuple[int, ...]  # of its dimensions in memory; a later sum follows the same
    storage: StorageWeakRef | None
    address: int


class Witness(OperatorMode):
    """Compares what autograd saves in both runs of one call: around the first, a dispatch mode."""

    def __init__(self, layer: str, checksums: Checksums) -> None:
        super().__init__()
        self._layer, self._checksums = layer, checksums
        self._saved: list[_Saved] = []
        self._sums: list[Tensor | None] = []  # of the last ones; of the others, on the host:
        self._values: list[int | None] = []
        self._blank: dict[int, StorageWeakRef] = {}

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note memory that kernels leave blank in part; called by torch for each operator."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for tensor in tensors_in(result) if "attention" in name or "rnn" in name else ():
            key = storage_of(tensor)
            if key is not None and _is_blank(name, tensor):
                self._blank[key.cdata] = key
        return result

    def note(self, tensor: Tensor, address: int) -> None:
        """Autograd saves it, in the first run."""
        key, order = storage_of(tensor), order_of(tensor)
        is_blank = key is not None and key.cdata in self._blank
        self._sums.append(None if is_blank else self._checksums.of(tensor, order))
        self._saved.append(_Saved(order, key, address))

    def is_same(self, index: int, tensor: Tensor) -> bool:
        """Whether the `index`-th has the memory of forward, which was nobody else's meanwhile."""
        old, key = self._saved[index].storage, storage_of(tensor)
        return key is not None and old is not None and key.cdata == old.cdata

    def compare(self, index: int, tensor: Tensor, address: int, facts: str) -> None:
        """Autograd saves it, in a later run; NondeterminismError if its bits are others now.

        It is the `index`-th, of the shape and dtype that it had, which `facts` say in words.
        """
        old = self._saved[index]
        if self.is_same(index, tensor) and old.address == address:
            return  # it has been there all the time: backward has its value of now anyway
        self._values += read(self._sums)
        self._sums.clear()
        if self._values[index] is None:
            return
        if read([self._checksums.of(tensor, old.order)]) != [self._values[index]]:
            raise NondeterminismError(
                f"{self._layer}: saved tensor {index} of {len(self._saved)}, {facts}, has "
                f"other values than in forward. {_where()}What the function computes must depend "
                "on its arguments, its modules and tracked randomness alone (a counter, a cache, "
                "numpy's or Python's random, a generator= or a seed of its own?); weights, buffers "
                "and inputs must have the values of forward (written in place since? by forward "
                "itself? changed by a saver?), and kernels be deterministic: "
                "torch.use_deterministic_algorithms(True) finds those that are not"
            )


def _is_blank(name: str, tensor: Tensor) -> bool:
    """Whether a kernel may not write all of it: its rng's seed without dropout; workspaces."""
    if "attention" in name:
        return not tensor.is_floating_point() and tensor.element_size() == 8 and tensor.numel() <= 2
    return tensor.dtype is torch.uint8


_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)


def _where() -> str:
    """The innermost line of the function being run that is neither torch's nor ours."""
    found = [f"in a {type(module).__name__}" for module in modules_being_called()][:1]
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Call.again.__code__:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OURS, "<frozen")):
            name = Path(code.co_filename).name
            found.append(f"at {name}:{frame.f_lineno} in {code.co_qualname}")
            break
        frame = frame.f_back
    return f"It is saved {', '.join(found)}. " if found else ""


@final
@define(eq=False)
class Checksums:
    """Makes sums, with tables that are kept for the next."""

    _weights: dict[torch.device, Tensor] = field(factory=dict, init=False)

    def of(self, tensor: Tensor, order: Sequence[int]) -> Tensor | None:
        """A sum over the bits of a tensor, which depends on where each bit is. Waits for nothing.

        One int64 on the tensor's device; None for what has no bits to look at: meta tensors, and
        layouts other than strided (sparse). The order is that of the tensor to compare with.
        """
        with without_modes(), torch.no_grad():
            parts = inner_tensors(tensor)
            if parts is not None:
                sums = [self.of(part, order_of(part)) for part in parts]
                present = [one for one in sums if one is not None]
                return self._mixed(torch.stack(present)) if present else None
            if not is_plain(tensor):
                return None
            return self._mixed(_words(_dense(tensor, order)))

    def _mixed(self, words: Tensor) -> Tensor:
        weights = self._weights_on(words.device)
        # A flip of the highest bit alone would vanish with the next such flip: it is spread first.
        sums = [
            (chunk.bitwise_xor(chunk >> 32).mul_(weights[: chunk.numel()])).sum()
            for chunk in words.split(_CHUNK_NUMEL)
        ]
        return sums[0] if len(sums) == 1 else self._mixed(torch.stack(sums))

    def _weights_on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            weights = torch.arange(1, _CHUNK_NUMEL + 1, device=device)
            for factor in _ODD:
                weights.mul_(factor)
                weights.bitwise_xor_(weights >> 31)
            self._weights[device] = weights.bitwise_or_(1)
        return self._weights[device]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions along which memory moves, the slowest first."""
    if not is_plain(tensor):
        return ()
    strides = tensor.stride()
    moving = [i for i, size in enumerate(tensor.shape) if size != 1 and strides[i] != 0]
    return tuple(sorted(moving, key=lambda i: -strides[i]))


def read(sums: Sequence[Tensor | None]) -> list[int | None]:
    """All of them on the host, with one wait for each device."""
    values: list[int | None] = [None] * len(sums)
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for index, one in enumerate(sums):
        if one is not None:
            by_device.setdefault(one.device, {})[index] = one
    with without_modes():
        for present in by_device.values():
            found = torch.stack(list(present.values())).tolist()
            for index, value in zip(present, found, strict=True):
                values[index] = value
    return values


def _dense(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Its elements as one dimension; a copy only where memory has gaps."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    rest = [i for i in range(tensor.dim()) if i not in order]
    for dim in rest:  # of size 1, or all along it is the same memory
        tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.permute((*rest, *order)).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # a lone element may have any stride


def _words(flat: Tensor) -> Tensor:
    """The same bits as int64; zeros are added where they end within a word."""
    itemsize = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(torch.int64)
    whole = flat.new_zeros(-(-max(flat.nbytes, 1) // 8), dtype=torch.int64)
    whole.view(torch.uint8)[: flat.nbytes].copy_(flat.view(torch.uint8))
    return whole
