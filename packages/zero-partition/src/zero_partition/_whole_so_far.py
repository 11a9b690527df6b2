"""Parameters that are whole while a model is built, until they are no longer in use."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._construction import module_under_construction
from ._early_guards import guard_module
from ._early_shard import find_early
from ._torch_compat import is_viewed


@define(eq=False)
class WholeSoFar:
    """What is to be sharded soon, and whether it can be by now."""

    num_bytes: int = field(default=0, init=False)  # at most, of what could be sharded
    # Held alive until they are sharded: when garbage goes must not decide what ranks agree on.
    _modules: dict[int, nn.Module] = field(factory=dict, init=False)
    _touched: list[tuple[str, nn.Parameter]] = field(factory=list, init=False)  # whole again

    def expect_own(self, module: nn.Module) -> None:
        """All that a module owns, unless it is known already."""
        whole = [] if id(module) in self._modules else list(_whole_of(module).values())
        if whole:
            self.expect(module, whole)

    def expect(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        """These, which a module owns."""
        self._modules[id(module)] = module
        self.num_bytes += sum(_bytes_of(param) for param in params)

    def touch(self, label: str, param: nn.Parameter) -> None:
        """One that was sharded, and was made whole to be used."""
        self._touched.append((label, param))
        self.num_bytes += _bytes_of(param)

    def take_ready(self, *, keep: Sequence[Tensor], at_end: bool) -> list[tuple[str, nn.Parameter]]:
        """Labels and parameters that can be sharded now; the others stay.

        Args:
            keep: What is about to be used.
            at_end: Nothing is in use any more.
        """
        ready: dict[int, tuple[str, nn.Parameter]] = {}
        building = None if at_end else module_under_construction()
        modules, self._modules = self._modules, {}
        touched, self._touched = self._touched, []
        self.num_bytes = 0
        for module in modules.values():
            left = []
            for name, param in _whole_of(module).items():
                if (
                    module is not building
                    and (at_end or _is_unused(param, keep))
                    and can_be_sharded(param)
                ):
                    ready.setdefault(id(param), (f"{type(module).__name__}.{name}", param))
                    guard_module(module)
                else:
                    left.append(param)
            if left:
                self.expect(module, left)
        for label, param in touched:
            if not can_be_sharded(param):
                continue
            if at_end or _is_unused(param, keep):
                ready.setdefault(id(param), (label, param))
            else:
                self.touch(label, param)
        return list(ready.values())

    def clear(self) -> None:
        """Forget them; they stay as they are."""
        self._modules.clear()
        self._touched.clear()
        self.num_bytes = 0


def can_be_sharded(param: nn.Parameter) -> bool:
    """On the meta device, and in lazy modules, there is nothing yet."""
    return not param.is_meta and not is_lazy(param) and find_early(param) is None


def _is_unused(param: nn.Parameter, keep: Sequence[Tensor]) -> bool:
    return not any(param is kept for kept in keep) and not is_viewed(param)


def _whole_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: param
        for name, param in module._parameters.items()
        if param is not None and find_early(param) is None
    }


def _bytes_of(param: nn.Parameter) -> int:
    return 0 if param.is_meta or is_lazy(param) else param.nbytes
