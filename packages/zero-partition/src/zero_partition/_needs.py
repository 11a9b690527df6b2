"""Which cut each parameter gets: what the user says, checked against what the optimizer needs."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from ._chained import members_of
from ._cut import Cut, CutChoice
from ._errors import LayoutError, PartitionError
from ._probe import Sample, find_dependence

# NOTE(needs): who knows what an optimizer needs is, in this order: its attribute `needs_cut` (a
# cut, or a method from a param group to a cut), this table for torch's own classes, and a trial of
# a copy of it. Subclasses of torch's are tried: nobody knows what they override.

_NEEDS_OF_TORCH: Final = {
    "ASGD": Cut.FLAT,
    "Adadelta": Cut.FLAT,
    "Adafactor": Cut.TENSOR,
    "Adagrad": Cut.FLAT,
    "Adam": Cut.FLAT,
    "AdamW": Cut.FLAT,
    "Adamax": Cut.FLAT,
    "Muon": Cut.TENSOR,
    "NAdam": Cut.FLAT,
    "RAdam": Cut.FLAT,
    "RMSprop": Cut.FLAT,
    "Rprop": Cut.FLAT,
    "SGD": Cut.FLAT,
}


def choose_cuts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, choice: CutChoice
) -> dict[int, Cut]:
    """Parameter id to its cut, for an optimizer that will work on shards.

    The user's choice counts first, then `cut` in the parameter's param group, then what the
    optimizer needs; without any of them a parameter may be cut anywhere.

    Raises:
        PartitionError: A choice names no parameter or no cut, or the optimizer would train
            differently on shards cut so, or nothing is known of it and it cannot be tried.
    """
    names = {id(param): name for name, param in reversed(list(model.named_parameters()))}
    cuts = _said_by_user(model, choice)
    for member in members_of(optimizer):
        _choose_for(member, names, cuts)
    return cuts


def _choose_for(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], cuts: dict[int, Cut]
) -> None:
    """Add the cuts of its parameters to what the user said, and check those."""
    kind = type(optimizer).__name__
    samples: list[list[Sample]] = []
    for index, group in enumerate(optimizer.param_groups):
        where = f"'cut' in param group {index} of the {kind}"
        said = _parse(group["cut"], where) if group.get("cut") is not None else None
        need = need_of(optimizer, group)
        samples.append([])
        for param in group["params"]:
            cut = cuts.setdefault(id(param), said or need or Cut.FLAT)
            if need is None:
                device = torch.device("cpu") if param.is_meta else param.device  # it has values
                samples[index].append(Sample(names[id(param)], param.shape, device, cut))
            elif not cut.keeps(need, param.shape):
                raise PartitionError(
                    f"parameter {names[id(param)]!r} of shape {tuple(param.shape)}: a {kind} needs "
                    f"the cut {str(need)!r}, and would train differently on shards cut "
                    f"{str(cut)!r}, as was asked for; leave the cut to the optimizer, or ask for "
                    f"{str(need)!r} or 'tensor'"
                )
    reason = find_dependence(optimizer, samples) if any(samples) else None
    if reason is not None:
        raise PartitionError(
            f"a {kind} cannot work on shards like these: {reason}. Keep tensors whole with "
            "cut='tensor' (ZeroConfig.cut, or 'cut' in the param group), or use 'row' or "
            "'block(k)' where that is enough; if you know better, say so by its attribute: "
            f"{kind}.needs_cut = 'flat'. Stage 0 takes any optimizer"
        )


def _said_by_user(model: nn.Module, choice: CutChoice) -> dict[int, Cut]:
    params = list(model.named_parameters(remove_duplicate=False))
    cuts: dict[int, Cut] = {}
    if choice is None:
        return cuts
    if isinstance(choice, Mapping):
        for pattern, value in choice.items():
            matched = [param for name, param in params if fnmatchcase(name, pattern)]
            if not matched:
                raise PartitionError(
                    f"cut: {pattern!r} matches no parameter; see model.named_parameters()"
                )
            for param in matched:
                cuts.setdefault(id(param), _parse(value, f"cut of {pattern!r}"))
        return cuts
    for name, param in params:
        value = choice(name, param) if callable(choice) else choice
        if value is not None:
            cuts.setdefault(id(param), _parse(value, f"cut of {name!r}"))
    return cuts


def need_of(optimizer: Any, group: dict[str, Any]) -> Cut | None:
    """Which cut the optimizer needs for a param group, None if nobody says; see NOTE(needs)."""
    kind = type(optimizer)
    need = getattr(optimizer, "needs_cut", None)
    if callable(need):
        need = need(group)
    if need is not None:
        return _parse(need, f"{kind.__name__}.needs_cut")
    is_of_torch = kind is getattr(torch.optim, kind.__name__, None)
    return _NEEDS_OF_TORCH.get(kind.__name__) if is_of_torch else None


def _parse(value: Any, where: str) -> Cut:
    try:
        return Cut.parse(value)
    except LayoutError as error:
        raise PartitionError(f"{where}: {error}") from error
