"""Every torch function that is called on a thread, noticed before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Interception(TorchFunctionMode):
    """Calls something with the arguments of every torch function that may read or write them."""

    def __init__(self, before_call: Callable[[object], None]) -> None:
        super().__init__()
        self._before_call = before_call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _asks_no_values(func):
            self._before_call((args, kwargs))
        return func(*args, **kwargs)


_GIVES_VALUES: Final = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes
_ASKS_NO_VALUES: Final = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.__repr__,  # one rank may print
}


def _asks_no_values(func: Callable[..., Any]) -> bool:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _GIVES_VALUES
    return func in _ASKS_NO_VALUES


def tensors_among(value: object) -> Iterator[Tensor]:
    """Tensors among arguments; long lists of numbers are not read through."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_among(tuple(value.values()))
    elif isinstance(value, tuple) or (isinstance(value, list) and _may_hold_tensors(value)):
        for item in value:
            yield from tensors_among(item)


def _may_hold_tensors(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], Tensor | list | tuple | Mapping)
