"""Several optimizers of one model as one: Muon for its matrices and AdamW for the rest, say."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .errors import PartitionError, StateError
from .torch_private import call_hooks_around_step, state_dict_post_hooks

# Keys of a param group that are no options.
_NOT_OPTIONS: Final = frozenset({"params", "param_names"})


class ChainedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers one after the other, as one optimizer.

    Before each step gradients are reduced, and after it parameters are published: once for all of
    them. `param_groups` has the very dicts of the optimizers, in their order, so that schedulers
    of one or of all work; each optimizer keeps its own cuts. Step, drop gradients, save and load
    through this one.

    Args:
        optimizers: At least one; no parameter in two of them.

    Raises:
        PartitionError: No optimizers, or one of them is none.
        ValueError: Two of them update the same parameter.
    """

    _steps_all = True

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
            raise PartitionError(
                "ChainedOptimizer: expected one or more torch optimizers, got "
                f"{[type(o).__name__ for o in optimizers]}"
            )
        self.optimizers = optimizers
        self._is_built = self._is_stepping = False
        params = [param for group in self.param_groups for param in group["params"]]
        if len({*map(id, params)}) < len(params):
            raise ValueError(
                "ChainedOptimizer: a parameter is in param groups of two of these optimizers; "
                "leave it to one of them"
            )
        super().__init__(self.param_groups, {})
        self._is_built = True
        for optimizer in optimizers if self._steps_all else ():
            optimizer.register_step_pre_hook(self._check_step)

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Return each parameter's state from the optimizer that updates it: a new dict, to read."""
        return {key: value for o in self.optimizers for key, value in o.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore what torch's constructor sets: each optimizer has its own state."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the param groups of the optimizers, in their order: a new list of their dicts."""
        return [group for o in self.optimizers for group in o.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Ignore what torch's constructor sets: each optimizer has its own groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise StateError: a group is added to one of the optimizers."""
        if self._is_built:  # torch's constructor gives those that there are
            raise StateError(
                "ChainedOptimizer.add_param_group(): which of its optimizers shall update these "
                "parameters? Call add_param_group() of that one"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Step each, in order; `closure` is evaluated once, before the first. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._is_stepping = True
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            self._is_stepping = False
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the optimizers, in their order. Collective where theirs are."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for as many optimizers. Collective where theirs is.

        Raises:
            StateError: The dict has the states of another number of optimizers, or of none.
        """
        states = state_dict.get("optimizers")
        if not isinstance(states, list | tuple) or len(states) != len(self.optimizers):
            got = f"{len(states)}" if isinstance(states, list | tuple) else f"{sorted(state_dict)}"
            raise StateError(
                f"ChainedOptimizer.load_state_dict(): expected the states of "
                f"{len(self.optimizers)} optimizers, got {got}"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def _check_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called, but this optimizer was chained "
                "with others: call step() of the ChainedOptimizer, which steps them all"
            )


class SeparateOptimizers(ChainedOptimizer):
    """Optimizers of one model that are stepped, zeroed and clipped by themselves, in any order."""

    _steps_all = False


def is_inner(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `value` is an optimizer that `optimizer` wraps: they have the same groups."""
    return (
        isinstance(value, torch.optim.Optimizer)
        and value is not optimizer
        and [*map(id, value.param_groups)] == [*map(id, optimizer.param_groups)]
    )


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that another wraps, as Lookahead and SAM do; itself if it wraps none."""
    inner = next((v for v in vars(optimizer).values() if is_inner(v, optimizer)), None)
    return optimizer if inner is None else inner_of(inner)


def set_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Make a dict the state of an optimizer, and of the one that it wraps."""
    for each in {id(o): o for o in (optimizer, inner_of(optimizer))}.values():
        # A class with a property `state` has the state of another optimizer.
        if not hasattr(type(each), "state"):
            each.state = state


def prepare_wrappers(optimizer: torch.optim.Optimizer | None) -> None:
    """Make a wrapper and the optimizer inside share one state; let the wrapper's step call hooks.

    Entries that both have of a parameter are then saved, cut and loaded together. A wrapper that
    does not call torch's constructor has no hooks around its step.
    """
    for member in members_of(optimizer):
        inner = inner_of(member)
        if inner is member:
            continue
        if member.state is not inner.state:
            for key, state in member.state.items():
                both = isinstance(state, dict) and key in inner.state
                inner.state[key] = {**inner.state[key], **state} if both else state
            set_state(member, inner.state)
        call_hooks_around_step(member)


def with_state_dict_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose `state_dict()` calls hooks: itself, or the one that it wraps."""
    has_hooks = hasattr(optimizer, "_optimizer_state_dict_pre_hooks")
    return optimizer if has_hooks else inner_of(optimizer)


def members_of(optimizer: torch.optim.Optimizer | None) -> Sequence[torch.optim.Optimizer]:
    """Return the chained optimizers, the optimizer alone if it is not chained, none for None."""
    if optimizer is None:
        return ()
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


def shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the entries of an optimizer's state that are of no parameter, such as a step count."""
    state = optimizer.state
    return {key: state[key] for key in state if not isinstance(key, Tensor)}


# In every optimizer's state dict; other entries are extra.
_IN_STATE_DICT: Final = {"state", "param_groups"}


def extra_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries of `state_dict()` beside `state` and `param_groups`. Local.

    Some optimizers count steps, or keep learning rates, in attributes that their own `state_dict()`
    or a hook of it saves.
    """
    saves, hooks = with_state_dict_hooks(optimizer), state_dict_post_hooks
    is_own = type(saves).state_dict is torch.optim.Optimizer.state_dict
    if is_own and all(map(_is_ours, hooks(saves).values())):
        return {}
    twin = _without_params(saves)
    said = {} if twin is None else twin.state_dict()
    return {key: value for key, value in said.items() if key not in _IN_STATE_DICT}


def load_extra_entries(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Load extra entries with the optimizer's own `load_state_dict()`. Local.

    Entries that were not saved, since they do not belong in a file, keep the values that the
    optimizer has now.
    """
    saves = with_state_dict_hooks(optimizer)
    if not extra or (twin := _without_params(saves)) is None:
        return
    before = dict(vars(twin))
    whole = _merged(extra_entries(optimizer), extra)
    twin.load_state_dict({"state": {}, "param_groups": _empty_groups(saves), **whole})
    for name, value in vars(twin).items():
        is_hooks = name.startswith("_optimizer_")
        if name not in _IN_STATE_DICT and not is_hooks and before.get(name) is not value:
            setattr(saves, name, value)


def _without_params(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return a copy without parameters and our hooks; None if its class computes param groups."""
    kind = type(optimizer)
    if any(hasattr(kind, name) for name in _IN_STATE_DICT):
        return None
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))
    vars(twin).update(state=defaultdict(dict), param_groups=_empty_groups(optimizer))
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            others = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
            vars(twin)[name] = OrderedDict(others)
    return twin


def _empty_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{**group, "params": []} for group in optimizer.param_groups]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zero_")


def _merged(own: Any, given: Any) -> Any:
    if isinstance(own, Mapping) and isinstance(given, Mapping):
        return {**own, **{key: _merged(own.get(key), value) for key, value in given.items()}}
    return given


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a param group: all entries but the parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def attribute_with_params(optimizer: torch.optim.Optimizer, ids: Container[int]) -> str | None:
    """Return the name of an attribute that lists some of these parameters; None if none does.

    Args:
        optimizer: Its param groups do not count.
        ids: Ids of the parameters.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, list | tuple) and any(id(item) in ids for item in value):
            return name
    return None
