"""Tensors whose memory was given back: stand-ins of their shape that raise when they are used."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NoReturn

import torch
from attrs import frozen
from torch import Tensor

from ._at_rest import looks_at_no_element, names_of
from ._errors import StateError
from ._guards import placeholder
from ._torch_compat import plain_call

# NOTE(stand-ins): a storage of no bytes under tensors that have some would do as well, and every
# view would be right again by itself. But torch checks it in few of its functions: the others read
# address 0, which ends the process, where a graph or `param.data` somebody kept is enough. So the
# tensors we know are made to view one NaN each, and are of a class that raises; and a storage that
# somebody else still views is not given back
# (docs/decisions/0030-parked-tensors-keep-their-identity.md).


class ParkedTensor:
    """Mixed into the class of a tensor for as long as its values are parked."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape; refuse everything that would read or write values."""
        name, attribute = names_of(func)
        if looks_at_no_element(name, attribute):
            return plain_call(func, args, kwargs or {})
        return _refuse(attribute or name)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}: parked)"  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


def _refuse(name: str) -> NoReturn:
    raise StateError(
        f"{name} was called on a tensor whose values offload_states() has parked; call "
        "zero_engine.reload_states(model) on every rank first"
    )


@functools.cache
def parked_type(cls: type[Tensor]) -> type[Tensor]:
    """What a tensor of this class is while it is parked. Named like it."""
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (ParkedTensor, cls), names)


@frozen
class View:
    """How one tensor saw its storage, and of which class it was."""

    tensor: Tensor
    whole_type: type[Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """As it is now."""
        size, stride = tensor.size(), tensor.stride()
        return cls(tensor, type(tensor), size, stride, int(tensor.storage_offset()))

    def take_away(self) -> None:
        """Let go of the memory. The object, its shape and its place in `grad` or state stay."""
        tensor = self.tensor
        tensor.data = placeholder(self.size, tensor.dtype, tensor.device)
        with contextlib.suppress(TypeError):  # where Python cannot, NaN is all that says it
            tensor.__class__ = parked_type(self.whole_type)  # type: ignore[assignment]

    def put_back(self, storage: torch.UntypedStorage) -> None:
        """See this storage as the one before."""
        tensor = self.tensor
        tensor.__class__ = self.whole_type
        blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = blank.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
