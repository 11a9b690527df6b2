"""Stores of tensors outside the device, and the checks of tensors that all of them make."""

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

    Operations on one key are done in the order of the calls; those on different keys in any order.
    A future's `result()` waits for its operation, and raises the error if that failed. Until then a
    source must not be changed, and an `into` neither read nor changed.
    """

    @abstractmethod
    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Allocate values of these sizes in bytes, so that a lack of space shows at the start.

        Optional: `write` allocates a value that is not. All values are allocated, or none.

        Raises:
            StoreError: A key exists already, or the disk does not have enough space.
            BudgetError: The host does not have enough memory.
        """

    @abstractmethod
    def write(self, key: str, source: Tensor) -> Future[None]:
        """Begin to copy `source` to the value of `key`, which replaces an earlier one.

        Args:
            key: Any text but "".
            source: Contiguous, of any shape and dtype.
        """

    @abstractmethod
    def read(self, key: str, into: Tensor) -> Future[Tensor]:
        """Begin to copy the value of `key` into `into`, which the future returns.

        Args:
            key: Written before; the future raises StoreError if it was not.
            into: Contiguous, of the numel and dtype of what was written. After an error its
                contents are undefined.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a key and free its space, after earlier operations on it are done."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each key's value, allocated or written."""

    @abstractmethod
    def close(self) -> None:
        """Wait for operations in progress, and release everything. Again: nothing happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def form_of(tensor: Tensor) -> str:
    """Return the numel and dtype of a tensor as text, which a value must be read back with."""
    return f"{tensor.numel()} elements of {tensor.dtype}"


def flat_bytes(key: str, tensor: Tensor) -> Tensor:
    """Return a view of a tensor as bytes, 1-D.

    Raises:
        StoreError: The key is empty; or the tensor is not contiguous, or has no plain memory.
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
    """Raise StoreError unless `into` has the numel and dtype that were written."""
    if form_of(into) != wanted:
        raise StoreError(
            f"{key!r}: expected a tensor of {wanted} to read into, as was written, got "
            f"{form_of(into)}; pass a tensor of this numel and dtype",
            key=key,
            path=path,
        )
