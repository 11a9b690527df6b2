"""In which dtypes parameters, gradients and outputs are."""

from __future__ import annotations

from typing import Any

import torch
from attrs import Attribute, field, frozen

from ._errors import PartitionError


def _is_floating(_: Precision, attribute: Attribute, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise PartitionError(
            f"Precision.{attribute.name}: expected a floating-point torch.dtype, got {value!r}"
        )


@frozen(kw_only=True)
class Precision:
    """Dtypes of training; 16-bit parameters have fp32 masters (arXiv 1710.03740, section 3.1).

    Args:
        params: Floating-point parameters are converted to it; as they are when None.
        masters: The optimizer updates shards of this dtype, from which parameters are rounded; it
            updates the parameters themselves when None, or where they are of this dtype.
        reduce: Gradients travel between ranks in it; in that of their parameter when None.
        accumulate: Gradients of several backwards are added up in it; in that of the masters when
            None.
        outputs: Floating-point tensors that the model returns are converted to it; as they are when
            None.

    Raises:
        PartitionError: Names the field, what was expected and what came.
    """

    params: torch.dtype | None = field(default=None, validator=_is_floating)
    masters: torch.dtype | None = field(default=torch.float32, validator=_is_floating)
    reduce: torch.dtype | None = field(default=None, validator=_is_floating)
    accumulate: torch.dtype | None = field(default=None, validator=_is_floating)
    outputs: torch.dtype | None = field(default=None, validator=_is_floating)
