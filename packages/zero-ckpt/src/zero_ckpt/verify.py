"""Verified recomputation: tensors that backward gets have the bits that they had in forward."""

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

# Number of 8-byte words that are mixed at a time: 4 MiB.
_CHUNK_NUMEL: Final = 1 << 19
# Factors that spread the bits of a word's position. They are odd, so no information is lost.
_ODD: Final = (-0x61C8864680B583EB, -0x3B314601E57A13AD)


# NOTE(verify): gradients depend on the second run through saved tensors and nothing else, so an
# error is raised if and only if one of these has other bits. A counter of batches, or a table that
# only the first run has to make, raises no error.


@final
@frozen
class Verification:
    """Setting for verified recomputation: one of `every` calls of a layer is verified.

    A verified call reads every tensor that autograd saves, in both runs, and keeps 8 bytes for
    each. The host does not wait for a device in forward; in backward it waits for each tensor.

    Args:
        every: Number of calls of a layer of which one is verified. The layer's index shifts which
            one, so that layers take turns.

    Raises:
        CheckpointError: `every` is not a whole number above 0.
    """

    every: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise CheckpointError(
                f"Verification(every=): expected a whole number of calls, 1 or more, got "
                f"{self.every!r}; to verify none, Checkpointer(verifies=None)"
            )

    def picks(self, layer_index: int, num_calls: int) -> bool:
        """Return whether to verify a layer's next call, after `num_calls` calls before it."""
        return (layer_index + num_calls) % self.every == 0


class _SavedMemory(NamedTuple):
    """Memory of a tensor that autograd saved in forward; `Witness` keeps its checksum apart."""

    # The tensor's dimensions, largest stride first; the second run's checksum uses the same order.
    order: tuple[int, ...]
    storage: StorageWeakRef | None
    address: int


class Witness(OperatorMode):
    """Comparison of the tensors that autograd saves in both runs of one call.

    It is active as a dispatch mode during the first run only.
    """

    def __init__(self, layer: str, checksums: Checksums) -> None:
        super().__init__()
        self._layer, self._checksums = layer, checksums
        self._saved: list[_SavedMemory] = []
        # Checksums of saved tensors by index: `_values` has those that were read to the host,
        # `_sums` all later ones, on their devices. None for a tensor that is not compared.
        self._sums: list[Tensor | None] = []
        self._values: list[int | None] = []
        self._blank: dict[int, StorageWeakRef] = {}

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record storages that kernels may not write fully; torch calls this for each operator."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for tensor in tensors_in(result) if "attention" in name or "rnn" in name else ():
            key = storage_of(tensor)
            if key is not None and _is_blank(name, tensor):
                self._blank[key.cdata] = key
        return result

    def note(self, tensor: Tensor, address: int) -> None:
        """Record a tensor that autograd saves in the first run, and its checksum."""
        key, order = storage_of(tensor), order_of(tensor)
        is_blank = key is not None and key.cdata in self._blank
        self._sums.append(None if is_blank else self._checksums.of(tensor, order))
        self._saved.append(_SavedMemory(order, key, address))

    def is_same(self, index: int, tensor: Tensor) -> bool:
        """Return whether `tensor` has the storage of the `index`-th tensor saved in forward.

        A weak reference to that storage is kept, so no other storage can be taken for it.
        """
        old, key = self._saved[index].storage, storage_of(tensor)
        return key is not None and old is not None and key.cdata == old.cdata

    def compare(self, index: int, tensor: Tensor, address: int, facts: str) -> None:
        """Compare the `index`-th tensor that autograd saves in a later run with the first run's.

        Shape and dtype are known to be equal; `facts` has them in words, for the message.

        Raises:
            NondeterminismError: The bits differ.
        """
        old = self._saved[index]
        if self.is_same(index, tensor) and old.address == address:
            # The memory was never freed: backward reads its present value, recomputed or not.
            return
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
    """Return whether a kernel may leave elements of `tensor` unwritten.

    Such are the seed of attention's rng when there is no dropout, and the workspaces of rnns.
    """
    if "attention" in name:
        return not tensor.is_floating_point() and tensor.element_size() == 8 and tensor.numel() <= 2
    return tensor.dtype is torch.uint8


_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)


def _where() -> str:
    """Return a sentence with the innermost module and line being run, or an empty string.

    Lines of torch and of this package are skipped.
    """
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
    """Checksums of tensors; the tables of weights, one per device, are kept for later sums."""

    _weights: dict[torch.device, Tensor] = field(factory=dict, init=False)

    def of(self, tensor: Tensor, order: Sequence[int]) -> Tensor | None:
        """Return a checksum of a tensor's bits that depends on their positions. Waits for nothing.

        It is one int64 on the tensor's device; None for tensors whose bits cannot be read: meta,
        fake and quantized ones, and layouts other than strided (sparse). `order` is `order_of`
        the tensor to compare with.
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
        # Bits are spread first: two flips of the highest bit alone would cancel out in the sum.
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
    """Return the dimensions of size other than 1 and stride other than 0, largest stride first.

    Empty for a tensor that is not plain.
    """
    if not is_plain(tensor):
        return ()
    strides = tensor.stride()
    moving = [i for i, size in enumerate(tensor.shape) if size != 1 and strides[i] != 0]
    return tuple(sorted(moving, key=lambda i: -strides[i]))


def read(sums: Sequence[Tensor | None]) -> list[int | None]:
    """Read sums to the host, with one wait for each device; None remains None."""
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
    """Return the elements as one dimension, in `order`; those of expanded dimensions once.

    A copy only where they are not contiguous in that order, or are lazily conjugated or negated.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    rest = [i for i in range(tensor.dim()) if i not in order]
    # These dimensions have size 1, or stride 0: all their elements are the same memory.
    for dim in rest:
        tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.permute((*rest, *order)).contiguous()
    # The stride is set to 1 since a lone element may have any.
    return tensor.as_strided((tensor.numel(),), (1,))


def _words(flat: Tensor) -> Tensor:
    """Return the bits as int64: a view if aligned to words, else a copy padded with zeros."""
    itemsize = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(torch.int64)
    whole = flat.new_zeros(-(-max(flat.nbytes, 1) // 8), dtype=torch.int64)
    whole.view(torch.uint8)[: flat.nbytes].copy_(flat.view(torch.uint8))
    return whole
