"""The memory that tensors lie in, and how much of it a checkpointer keeps: Ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from zero_ckpt.call import replace_in


def tensors_in(value: Any) -> list[Tensor]:
    """Wherever `replace_in` looks."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace_in(value, Tensor, find)
    return found


def storages_in(value: Any) -> dict[int, int]:
    """Sizes of the memory of all tensors in it in bytes, by address; of what is known of them."""
    found: dict[int, int] = {}
    for tensor in tensors_in(value):
        for part in _parts_of(tensor) or ():
            storage = part.untyped_storage()
            if not part.is_meta and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def is_known(tensor: Tensor) -> bool:
    """Whether all of its memory can be told, and writes to it are counted."""
    return not tensor.is_inference() and _parts_of(tensor) is not None


def _parts_of(tensor: Tensor) -> list[Tensor] | None:
    """The plain tensors that it is made of; None where there is no saying."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor] if tensor.layout is torch.strided else None
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    found: list[Tensor] = []
    for name in tensor.__tensor_flatten__()[0]:
        parts = _parts_of(getattr(tensor, name))
        if parts is None:
            return None
        found += parts
    return found


@define(eq=False)
class Ledger:
    """How many bytes a checkpointer keeps: each piece of memory once, however many keep it."""

    _lock: Lock = field(factory=Lock, init=False)
    _holders: dict[int, int] = field(factory=dict, init=False)  # by address
    _num_bytes: int = field(default=0, init=False)
    # Memory is given up in finalizers, which may run anywhere, also inside our lock.
    _given_up: deque[Mapping[int, int]] = field(factory=deque, init=False)

    @property
    def num_bytes(self) -> int:
        """Now."""
        with self._lock:
            self._settle()
            return self._num_bytes

    def enter(self, storages: Mapping[int, int]) -> None:
        """Someone keeps these: sizes in bytes, by address."""
        with self._lock:
            self._settle()
            for address, num_bytes in storages.items():
                holders = self._holders.get(address, 0)
                self._holders[address] = holders + 1
                self._num_bytes += 0 if holders else num_bytes

    def give_up(self, storages: Mapping[int, int]) -> None:
        """He keeps them no more. Takes no lock."""
        self._given_up.append(storages)

    def _settle(self) -> None:
        while self._given_up:
            for address, num_bytes in self._given_up.popleft().items():
                self._holders[address] -= 1
                if not self._holders[address]:
                    del self._holders[address]
                    self._num_bytes -= num_bytes
