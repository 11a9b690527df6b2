"""The tensors in a call's arguments, apart from everything else in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import field, frozen
from torch import Tensor, nn

from .errors import CheckpointError
from .nested import replace_in
from .torch_private import version_of

_NO_DISPATCH: Final = Tensor.__torch_dispatch__


@frozen
class _Place:
    """Where an input was."""

    index: int


@frozen(eq=False)
class _Subclass:
    """What Python alone knows of a tensor, which autograd does not save: its class, attributes."""

    kind: type[Tensor]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> _Subclass | None:
        """None for what has none, or puts it on itself as a wrapper of other tensors does."""
        kind = type(tensor)
        if kind in (Tensor, nn.Parameter) or kind.__torch_dispatch__ is not _NO_DISPATCH:
            return None
        return cls(kind, dict(vars(tensor)))


def _as(tensor: Tensor, subclass: _Subclass | None) -> Tensor:
    if subclass is None:
        return tensor
    other = tensor.as_subclass(subclass.kind)
    vars(other).update(subclass.attributes)
    return other


@frozen(eq=False)
class Call:
    """A function and its arguments, with numbers in place of tensors."""

    function: Callable[..., Any]
    _arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    _requires_grad: tuple[bool, ...]
    _versions: tuple[int, ...] = field(repr=False)
    _subclasses: tuple[_Subclass | None, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, list[Tensor]]:
        """The call, and its inputs: each tensor once, in the order of the arguments. Local."""
        numbers: dict[int, int] = {}
        inputs: list[Tensor] = []

        def number(tensor: Tensor) -> _Place:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(inputs)
                inputs.append(tensor)
            return _Place(numbers[id(tensor)])

        arguments = replace_in((args, kwargs), Tensor, number)
        flags = tuple(tensor.requires_grad for tensor in inputs)
        versions, subclasses = tuple(map(version_of, inputs)), tuple(map(_Subclass.of, inputs))
        return cls(function, arguments, flags, versions, subclasses), inputs

    def again(self, inputs: Sequence[Tensor]) -> Any:
        """Call it with these inputs, detached ones."""
        fresh = [
            _as(tensor.detach(), subclass).requires_grad_(flag)
            for tensor, flag, subclass in zip(
                inputs, self._requires_grad, self._subclasses, strict=True
            )
        ]
        args, kwargs = replace_in(self._arguments, _Place, lambda place: fresh[place.index])
        return self.function(*args, **kwargs)

    def check_unwritten(self, inputs: Sequence[Tensor], layer: str) -> None:
        """Raise CheckpointError if the function wrote to an input: it could not begin again."""
        for index, (tensor, version) in enumerate(zip(inputs, self._versions, strict=True)):
            if version_of(tensor) != version:
                raise CheckpointError(
                    f"{layer}: it wrote in place to its input {index}, of shape "
                    f"{tuple(tensor.shape)}, so it could not be computed again from the values it "
                    "was given; let it write to a clone"
                )
