"""Modules attached after sharding: noticed before they train on each rank by themselves."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from attrs import define
from torch import nn

from ._errors import StateError


@define(eq=False)
class ModuleTree:
    """Which modules and parameters a model has, and whether that changed.

    Comparing identities costs a fraction of a microsecond per module and forward.
    """

    model: nn.Module
    params: frozenset[int]  # those that were sharded; the units keep them alive
    _contents: list[dict]  # every module's dictionaries of parameters and of children
    _seen: list[Any]  # what was in them; the objects, since an identity may be given twice

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        """As it is now."""
        tree = cls(model, frozenset(id(param) for param in model.parameters()), [], [])
        tree._look()
        return tree

    def check(self, rank: int) -> None:
        """Raise StateError where a parameter was added since. Local.

        Modules without parameters of their own come and go as they please, and so do further uses
        of parameters that were sharded.
        """
        found = self._members()
        if len(found) == len(self._seen) and all(map(is_, found, self._seen)):
            return
        for name, param in self.model.named_parameters():
            if id(param) not in self.params:
                raise StateError(
                    f"parameter {name!r}: expected one that was sharded, got another Parameter "
                    f"object of shape {tuple(param.shape)}, attached after shard() (rank {rank}); "
                    "each rank would train its own. Build the model anew with all its modules, "
                    "load zero_engine.full_state_dict() of this one into it, and shard that"
                )
        self._look()

    def _look(self) -> None:
        modules = list(self.model.modules())
        contents = (content for m in modules for content in (m._parameters, m._modules))
        self._contents = [found for found in contents if isinstance(found, dict)]  # not scripted
        self._seen = self._members()

    def _members(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._contents)))
