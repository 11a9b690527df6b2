"""Where in the user's code an operator is called, and what they call a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from ._layers import module_of
from ._torch_compat import storage_of

_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)


@frozen
class Line:
    """Of source code, and the module whose forward led there."""

    file: str
    number: int
    function: str
    module: str | None

    def __str__(self) -> str:
        where = f"{self.file}:{self.number} in {self.function}"
        return where if self.module is None else f"in a {self.module}, {where}"


def line_of_now() -> Line | None:
    """The innermost line being run that is neither torch's nor ours; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    module = None
    while frame is not None:
        code = frame.f_code
        if module is None and code.co_name == "_call_impl":
            module = type(frame.f_locals.get("self")).__name__
        if not code.co_filename.startswith((_TORCH, _OURS, "<frozen")):
            return Line(Path(code.co_filename).name, frame.f_lineno, code.co_qualname, module)
        frame = frame.f_back
    return None


def name_in_module(function: Callable[..., Any], tensor: Tensor) -> str | None:
    """Such as "weight 'fc.weight'", if it lies in the memory of one of the module's tensors."""
    module, key = module_of(function), storage_of(tensor)
    if module is None or key is None:
        return None
    for kind, named in (
        ("weight", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, one in named:
            other = storage_of(one)
            if other is not None and other.cdata == key.cdata:
                return f"{kind} {name!r}"
    return None
