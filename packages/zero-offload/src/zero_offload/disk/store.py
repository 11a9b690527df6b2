"""Where tensors rest outside the device, and what all such stores ask of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Self

import torch
from torch import Tensor

from zero_offload.errors import StoreError


class AbstractStore(ABC):
    """Tensors by key. Local; safe to use from several threads.

    Operations on one key happen in the order in which they were asked for; those on different keys
    in any. A future's `result()` waits and raises what went wrong. Memory handed in is borrowed
    until then: a source must not change, an `into` not be read or changed.
    """

    @abstractmethod
    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Take the room for values of so many bytes now, so that a lack of it shows at the start.

        Optional: `write` takes it where it was not. All of it is taken, or none.

        Raises:
            StoreError: A key is there already, or the disk has not enough room.
            BudgetError: The memory is not there.
        """

    @abstractmethod
    def write(self, key: str, source: Tensor) -> Future[None]:
        """Keep a copy of `source` under `key`, in place of an earlier value.

        Args:
            key: Any text but "".
            source: Contiguous, of any shape and dtype.
        """

    @abstractmethod
    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """Copy the value of `key` into `into`, which the future gives back.

        Args:
            key: Written before; the future raises StoreError if it was not.
            into: Contiguous, of the numel and dtype of what was written. After an error its
                contents are undefined.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget a key and release its room, after what was asked of it before is done."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each key's value, allocated or written."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and release everything. Again: nothing happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def form_of(tensor: Tensor) -> str:
    """What a value must be read back as."""
    return f"{tensor.numel()} elements of {tensor.dtype}"


def flat_bytes(key: str, tensor: Tensor) -> Tensor:
    """The same memory, 1-D, as bytes.

    Raises:
        StoreError: The key is empty; or it is not contiguous, or has no plain memory.
    """
    if not key:
        raise StoreError("a key must not be empty")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise StoreError(
            f"{key!r}: a store moves contiguous tensors, got shape {tuple(tensor.shape)} with "
            f"layout {tensor.layout}; pass tensor.contiguous()",
            key=key,
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def check_form(key: str, wanted: str, into: Tensor, path: str = "") -> None:
    """Raises StoreError unless `into` is what was written."""
    if form_of(into) != wanted:
        raise StoreError(
            f"{key!r} holds {wanted}, and is to be read into {form_of(into)}; pass a tensor of "
            "what was written",
            key=key,
            path=path,
        )
