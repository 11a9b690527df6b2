"""Whether a state dict fits an optimizer, seen before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._chained import options_of
from ._errors import LoadError
from ._nested_state import map_tensors

Expected = dict[str, tuple[int, ...] | None]  # by entry: a tensor's shape, or that it is none


def check_state(
    given: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    make: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
) -> None:
    """Raise LoadError unless the optimizer can go on from this state. Local, and the same anywhere.

    Which entries a parameter should have, and of what shape, says a trial: another optimizer of the
    same class takes one step on zeros of its shape. Memory for one parameter at a time.

    Args:
        given: What `torch.optim.Optimizer.state_dict()` returns.
        optimizer: Has the parameters and param groups.
        make: The class that makes the state.
        defaults: What it is constructed with, beside param groups.
    """
    kind = getattr(make, "__name__", repr(make))
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise LoadError(
            f"expected a state dict of a {kind} with 'state' and 'param_groups', got "
            f"{sorted(given) if isinstance(given, Mapping) else type(given).__name__}"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given_sizes = [len(group["params"]) for group in given["param_groups"]]
    if sizes != given_sizes:
        raise LoadError(
            f"expected param groups of {sizes} parameters, as this {kind} has, got {given_sizes}"
        )
    names, seen = names_of(optimizer), set()
    known: dict[Any, Expected | None] = {}
    problems: list[str] = []
    position = 0
    for index, (group, given_group) in enumerate(
        zip(optimizer.param_groups, given["param_groups"], strict=True)
    ):
        for param, number in zip(group["params"], given_group["params"], strict=True):
            name, position = names[position], position + 1
            state = given["state"].get(number)
            seen.add(number)
            if not state:
                continue  # no step has had a gradient for it: it begins anew, as in plain torch
            key = (index, param.shape, param.dtype, param.device)
            if key not in known:
                options = {**options_of(group), **options_of(given_group)}
                known[key] = _try(param, options, defaults, make)
            problems += _compare(name, state, known[key])
    extra = [number for number in given["state"] if number not in seen]
    if extra:
        problems.append(f"state of parameters {extra}, which are in no param group")
    if problems:
        raise LoadError(f"cannot load, and nothing was written: {'; '.join(problems)}")


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """What to call each parameter in messages: its name, where the optimizer was given names."""
    names = []
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        for position in range(len(group["params"])):
            where = f"parameter {len(names)} (param group {index}, position {position})"
            names.append(where if known is None else f"parameter {known[position]!r}")
    return names


def _compare(name: str, state: Any, expected: Expected | None) -> list[str]:
    if not isinstance(state, Mapping):
        return [f"{name}: expected a dict of entries, got a {type(state).__name__}"]
    if expected is None:
        return []
    problems = [f"{name}: {key!r} is missing" for key in expected if key not in state]
    problems += [f"{name}: {key!r} is unexpected" for key in state if key not in expected]
    for key, shape in expected.items():
        value = state.get(key)
        if value is None or shape is None:
            continue
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if got != shape and not (shape == () and isinstance(value, int | float)):
            problems.append(f"{name}: expected {key!r} of shape {shape}, got {got}")
    return problems


def _try(
    param: Tensor,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    make: type[torch.optim.Optimizer],
) -> Expected | None:
    """Entries after a step on zeros; None where that cannot be tried, and nothing is known."""
    twin = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    twin.grad = torch.zeros_like(twin)
    devices = [param.device.index] if param.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            other = make([{**map_tensors(options, torch.clone), "params": [twin]}], **defaults)
            other.step()
        except Exception:  # it needs a closure, sparse gradients, a warmed-up model
            return None
    state = other.state.get(twin, {})
    return {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in state.items()}


def own_state(
    given: Mapping[str, Any], is_own: Sequence[bool]
) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The state of a rank's own parameters, in memory of its own, and the param groups.

    Args:
        given: A state dict of all parameters.
        is_own: For each parameter, in the order of the groups.
    """
    groups = [dict(group) for group in given["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    state = {
        number: map_tensors(given["state"][number], torch.clone)
        for number, own in zip(numbers, is_own, strict=True)
        if own and given["state"].get(number)
    }
    return state, groups
