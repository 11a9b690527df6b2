"""Storages of tensors, and the count of their bytes that a checkpointer keeps: Ledger."""

from __future__ import annotations

from collections import Counter, deque
from threading import Lock
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from zero_ckpt.call import replace_in
from zero_ckpt.torch_private import inner_tensors


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, wherever `replace_in` looks."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace_in(value, Tensor, find)
    return found


# (device, address) of a storage -> its bytes.
Storages = dict[tuple[torch.device, int], int]


def storages_in(value: Any) -> Storages:
    """Return the storages of all tensors in a value, without those that are not known."""
    found: Storages = {}
    for tensor in tensors_in(value):
        for part in _parts_of(tensor) or ():
            storage = part.untyped_storage()
            if not part.is_meta and storage.nbytes():
                found[part.device, storage.data_ptr()] = storage.nbytes()
    return found


def is_known(tensor: Tensor) -> bool:
    """Return whether all storages of a tensor are known, and writes to them are counted."""
    return not tensor.is_inference() and _parts_of(tensor) is not None


def _parts_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the strided tensors that a tensor consists of; None where they are not known."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor] if tensor.layout is torch.strided else None
    inner_ones = inner_tensors(tensor)
    if inner_ones is None:
        return None
    found: list[Tensor] = []
    for inner in inner_ones:
        parts = _parts_of(inner)
        if parts is None:
            return None
        found += parts
    return found


@define(eq=False)
class Ledger:
    """Count of the bytes that a checkpointer keeps; a storage that is kept twice counts once."""

    _lock: Lock = field(factory=Lock, init=False)
    _holders: Counter[tuple[torch.device, int]] = field(factory=Counter, init=False)
    _num_bytes: int = field(default=0, init=False)
    # Storages to subtract from the count. Finalizers append to it without the lock, since they may
    # run anywhere, also where this thread has the lock.
    _given_up: deque[Storages] = field(factory=deque, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            self._subtract_pending()
            return self._num_bytes

    def count(self, storages: Storages) -> None:
        """Count storages that are kept from now on, once more for each call."""
        with self._lock:
            self._subtract_pending()
            for key, num_bytes in storages.items():
                self._num_bytes += 0 if self._holders[key] else num_bytes
                self._holders[key] += 1

    def give_up(self, storages: Storages) -> None:
        """Undo one `count` of these storages, at the next use. Takes no lock, for finalizers."""
        self._given_up.append(storages)

    def _subtract_pending(self) -> None:
        while self._given_up:
            for key, num_bytes in self._given_up.popleft().items():
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
                    self._num_bytes -= num_bytes
