"""Whether an optimizer treats parameters one by one, so that ranks may divide them."""

from __future__ import annotations

import torch

from ._cut import Cut
from ._errors import PartitionError
from ._given_state import names_of
from ._needs import need_of
from ._probe import Sample, find_dependence


def check_params(optimizer: torch.optim.Optimizer) -> None:
    """Raise PartitionError unless every parameter is dense and has values."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name, param in zip(names_of(optimizer), params, strict=True):
        if param.layout is not torch.strided or param.is_meta:
            got = "on the meta device" if param.is_meta else f"of layout {param.layout}"
            raise PartitionError(f"{name}: expected a dense tensor with values, got one {got}")


def check_independence(own: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Raise PartitionError if an update of one parameter depends on others.

    Args:
        own: Is looked at, and tried in a copy; may have some of the parameters only.
        optimizer: Has all of them, in as many param groups.
    """
    kind = type(own).__name__
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(own).items():
        if isinstance(value, list | tuple) and any(id(item) in known for item in value):
            raise PartitionError(
                f"a {kind} keeps parameters in its attribute {name!r}, outside param_groups: it "
                "updates all of them together (one search for the length of the step, say), and "
                "each rank would have only some; use it unsharded, or an optimizer that treats "
                "parameters one by one"
            )
    names = iter(names_of(optimizer))
    samples: list[list[Sample]] = []
    for group in optimizer.param_groups:
        of_group = [Sample(next(names), p.shape, p.device, Cut.TENSOR) for p in group["params"]]
        samples.append(of_group if need_of(own, group) is None else [])
    reason = find_dependence(own, samples, must_be_tried=False) if any(samples) else None
    if reason is not None:
        raise PartitionError(
            f"a {kind} does not treat parameters one by one: {reason}. Use it unsharded; or, if "
            f"you know better, say so by its attribute: {kind}.needs_cut = 'tensor'"
        )
