"""Which optimizer steps a sub-group, what its state consists of, and which are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from ._cpu_adagrad import CPUAdagrad
from ._cpu_adam import CPUAdam
from ._cpu_optimizer import AbstractCPUOptimizer
from ._errors import UnsupportedOptimizerError
from ._host_state import MASTER
from ._subgroups import Entry

NATIVE: Final[Mapping[type[Optimizer], type[AbstractCPUOptimizer]]] = {
    torch.optim.Adam: CPUAdam,
    torch.optim.AdamW: CPUAdam,
    torch.optim.Adagrad: CPUAdagrad,
}
_REFUSED: Final = {
    ("capturable", True): "a graph of the device cannot hold a step on the host",
    ("differentiable", True): "autograd does not see a step on the host",
    ("keeps_last_step", True): "it would keep all of the state in memory",
    ("rounding", "stochastic"): "its random bits would depend on how sub-groups are cut",
}
_TENSORS: Final = ("params", "param_names")
_SIDES: Final = (3, 5, 7, 2, 2, 2, 2, 2)  # of the parameters that are tried


@frozen
class Stepper:
    """An optimizer class with its arguments, and what steps in its place on the host.

    Attributes:
        asked: The user's class.
        arguments: The user's, without parameters.
        used: The native optimizer of the same formula, or the user's class as it is.
        defaults: What a param group has that sets nothing else.
    """

    asked: type[Optimizer]
    arguments: Mapping[str, Any]
    used: type[Optimizer]
    defaults: dict[str, Any] = field(eq=False)

    @classmethod
    def choose(cls, asked: type[Optimizer], arguments: Mapping[str, Any]) -> Stepper:
        """Look at the class.

        Raises:
            UnsupportedOptimizerError: It cannot be stepped sub-group by sub-group, or not with one
                of the arguments.
            ValueError: The class refuses an argument.
        """
        closure = inspect.signature(asked.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedOptimizerError(
                f"{asked.__name__} evaluates the loss within its step, at points that depend on "
                f"all parameters at once, so it cannot be stepped by sub-groups. Use it without "
                f"OffloadedOptimizer, or one that steps each parameter by itself"
            )
        for (name, value), reason in _REFUSED.items():
            if name in arguments and arguments[name] == value:
                raise UnsupportedOptimizerError(
                    f"{asked.__name__}({name}={value!r}) cannot be offloaded, as {reason}; "
                    f"leave it out"
                )
        template = asked([_blank((1, 1), torch.float32)], **arguments)
        return cls(asked, arguments, NATIVE.get(asked, asked), dict(template.defaults))

    @property
    def is_native(self) -> bool:
        """Whether each element is stepped by itself, with masters, by kernels."""
        return issubclass(self.used, AbstractCPUOptimizer)

    def make(self, groups: list[dict[str, Any]], *, on_host: bool) -> Optimizer:
        """An optimizer over pieces; its groups' numbers are set before each step."""
        if on_host and self.used is not self.asked:
            return self.used(groups)  # type: ignore[call-arg]  (the class has defaults of its own)
        if not on_host and issubclass(self.asked, AbstractCPUOptimizer):
            raise UnsupportedOptimizerError(
                f"{self.asked.__name__} steps tensors of the CPU, and fraction leaves some of the "
                f"state on the device; set fraction['device'] to 0, or use a class of torch.optim"
            )
        return self.asked(groups, **self.arguments)

    def has_own_master(self, dtype: torch.dtype, *, on_host: bool) -> bool:
        """Whether such a parameter has a master that the sub-group, not the optimizer, keeps."""
        is_native = self.is_native and on_host
        return not is_native and dtype.is_floating_point and dtype.itemsize < 4

    def entries(self, ndim: int, dtype: torch.dtype, group: dict[str, Any]) -> tuple[Entry, ...]:
        """What the state of such a parameter consists of, as a step of a tiny one shows."""
        masters: tuple[Entry, ...] = ()
        if self.has_own_master(dtype, on_host=True):
            masters, dtype = (Entry(MASTER, torch.float32),), torch.float32
        param = _blank(_SIDES[:ndim], dtype)
        param.grad = torch.zeros_like(param)
        with torch.random.fork_rng(devices=[]):  # the user's numbers must not change for our trial
            optimizer = self.make([{"params": [param]}], on_host=True)
            set_numbers(optimizer.param_groups[0], group)
            optimizer.step()
        return masters + tuple(
            Entry(name, value.dtype)
            for name, value in optimizer.state[param].items()
            if isinstance(value, Tensor) and value.numel() == param.numel() and name != "step"
        )


def set_numbers(inner: dict[str, Any], outer: Mapping[str, Any]) -> None:
    """Give a group of an inner optimizer the numbers that schedulers have set."""
    inner.update({name: value for name, value in outer.items() if name not in _TENSORS})


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))
