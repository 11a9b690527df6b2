"""Checkpointing of an existing model's modules, without editing them: checkpoint_modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MethodType
from typing import Any, final
from weakref import ref

import torch
from attrs import define, field
from torch import nn

from .checkpointer import Checkpointer
from .errors import CheckpointError
from .policies import ModulePolicy, select
from .torch_private import modules_being_called


@define(eq=False)
class _CheckpointedForward:
    """Callable in a module's own dict that replaces its `forward`; hooks run outside of it."""

    # The module whose dict has this object. Weak: in a cycle, the module's parameters would stay
    # allocated until the garbage collector runs.
    _module: ref[nn.Module]
    # The `forward` that the module's dict had before; None if it had none, and its class's is used.
    _own: Callable[..., Any] | None
    checkpointer: Checkpointer
    is_active: bool = field(default=True, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inside = self._inside(self._caller())
        if self.is_active:
            return self.checkpointer.call(inside, args, kwargs)
        return inside(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "it is in the module's own dict"
        return module

    # Libraries inspect which arguments a `forward` takes.
    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._inside(self.module))

    def _caller(self) -> nn.Module:
        """Return the module that is called: ours, or a replica whose dict has this object too."""
        if not torch.compiler.is_compiling():
            module = next(modules_being_called(), None)
            if module is not None and vars(module).get("forward") is self:
                return module
        return self.module

    def _inside(self, module: nn.Module) -> Callable[..., Any]:
        """Return the original `forward` bound to `module`.

        The checkpointer finds the layer's name and buffers by the module of this method.
        """
        own = self._own
        if own is None:
            return MethodType(type(module).forward, module)
        if getattr(own, "__self__", None) is module:
            return own
        return MethodType(lambda _, *args, **kwargs: own(*args, **kwargs), module)

    def remove(self) -> None:
        """Restore the module's previous `forward`.

        Where other code has wrapped this object since, it stays, and only calls the original.
        """
        self.is_active = False
        if vars(self.module).get("forward") is self:
            if self._own is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the replacement for a copy of the module.

        The copy is in `memo` already, since the dict of a module is copied after the module.
        """
        copied = deepcopy(self.module, memo)
        other = _CheckpointedForward(ref(copied), deepcopy(self._own, memo), self.checkpointer)
        other.is_active = self.is_active
        return other

    def __reduce__(self) -> Any:
        """Pickle the original `forward`: a pickled model is plain, as checkpointing is per run."""
        if self._own is None:
            return getattr, (self.module, "forward")
        return _same, (self._own,)


def _same(value: Any) -> Any:
    return value


@final
@define(eq=False)
class CheckpointedModules:
    """Modules of a model that `checkpoint_modules` changed; `remove` undoes the change."""

    _forwards: Mapping[str, _CheckpointedForward]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules that are checkpointed, in the order of `named_modules()`."""
        return tuple(self._forwards)

    def remove(self) -> None:
        """Stop checkpointing calls of the modules. Graphs that exist already still recompute."""
        for forward in self._forwards.values():
            forward.remove()


def checkpoint_modules(
    model: nn.Module, policy: ModulePolicy, *, checkpointer: Checkpointer | None = None
) -> CheckpointedModules:
    """Checkpoint every call of some modules of a model, in place. Local.

    Each module gets a `forward` of its own. Its hooks are outside of that, and so run once per
    call. Names, classes, `state_dict` and hooks do not change; deep copies are checkpointed too,
    pickles are plain. A module may be selected inside another, and is then computed again up to
    twice. The checkpointer decides what is kept inside of the modules:
    `Checkpointer(keeps=inside(model, by_name("layers.*.attention")))`.

    Call it before or after `zero_engine.shard`. Models of transformers must not pass a cache from
    layer to layer: `use_cache=False`.

    Args:
        model: Model that has the modules; its own name is "".
        policy: Modules to checkpoint: `by_type(Block)`, `by_name("layers.*")`,
            `every_nth(2, ...)`, or any function from a dict of modules by name to the names
            selected.
        checkpointer: Checkpointer of the calls; a new `Checkpointer()` when None.

    Raises:
        CheckpointError: The policy selects no module, or one that does not exist, is checkpointed
            already, or is never called. Nothing has changed then.
    """
    checkpointer = Checkpointer() if checkpointer is None else checkpointer
    selected = select(model, policy, "checkpoint_modules()")
    for name, module in selected.items():
        forward = vars(module).get("forward")
        if isinstance(forward, _CheckpointedForward):
            raise CheckpointError(
                f"checkpoint_modules(): {name!r} is checkpointed already; remove() what did it "
                "first, or select it once"
            )
        if forward is None and type(module).forward is nn.Module.forward:
            raise CheckpointError(
                f"checkpoint_modules(): {name!r} is a {type(module).__name__}, which is never "
                f"called, so that nothing would be checkpointed; select its items ({name + '.*'!r})"
            )
    forwards = {}
    for name, module in selected.items():
        checkpointer.name_layer(module, name or type(module).__name__)
        own = vars(module).get("forward")
        forwards[name] = module.__dict__["forward"] = _CheckpointedForward(
            ref(module), own, checkpointer
        )
    return CheckpointedModules(forwards)
