"""Choice of the optimizer that steps a sub-group, its state's entries, and refused optimizers."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import MethodType
from typing import Any, Final, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_offload.adam.batches import MASTER
from zero_offload.adam.cpu_optimizers import AbstractCPUOptimizer, CPUAdagrad, CPUAdam
from zero_offload.errors import UnsupportedOptimizerError

from .subgroups import Entry

# Name -> value of an optimizer's attributes.
Attributes: TypeAlias = dict[str, Any]
NATIVE: Final[Mapping[type[Optimizer], type[AbstractCPUOptimizer]]] = {
    torch.optim.Adam: CPUAdam,
    torch.optim.AdamW: CPUAdam,
    torch.optim.Adagrad: CPUAdagrad,
}
_REFUSED: Final = {
    ("capturable", True): "a graph of the device cannot contain a step on the host",
    ("differentiable", True): "autograd does not see a step on the host",
    ("rounding", "stochastic"): "its random bits would depend on how sub-groups are cut",
}


@frozen
class OptimizerTemplate:
    """An optimizer, and the one that steps in its place on the host.

    Raises:
        UnsupportedOptimizerError: It cannot be stepped sub-group by sub-group.

    Attributes:
        template: An instance with the user's class and settings; its parameters do not matter.
        own_masters: Dtypes of the masters that the sub-group keeps, by dtype of the parameter.
            None: fp32 masters of 16-bit parameters, where the optimizer keeps none itself.
    """

    template: Optimizer
    own_masters: Mapping[torch.dtype, torch.dtype] | None = None

    def __attrs_post_init__(self) -> None:
        closure = inspect.signature(self.asked.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedOptimizerError(
                f"{self.asked.__name__} evaluates the loss within its step, at points that depend "
                f"on all parameters at once, so it cannot be stepped by sub-groups. Use it without "
                f"offloading its state, or one that steps each parameter by itself"
            )
        _refuse(self.asked, self.template.defaults)

    @classmethod
    def choose(cls, asked: type[Optimizer], arguments: Mapping[str, Any]) -> OptimizerTemplate:
        """Return the template of a class and its arguments, without the user's parameters.

        Raises:
            UnsupportedOptimizerError: An argument is refused; or as for any template.
            ValueError: The class refuses an argument.
        """
        _refuse(asked, arguments)
        return cls(asked([nn.Parameter(torch.zeros(1, 1, device="cpu"))], **arguments))

    @property
    def asked(self) -> type[Optimizer]:
        """The user's class."""
        return type(self.template)

    @property
    def used(self) -> type[Optimizer]:
        """The native optimizer of the same formula, or the user's class as it is."""
        return NATIVE.get(self.asked, self.asked)

    @property
    def is_native(self) -> bool:
        """Return whether kernels step it on the host: each element by itself, with masters."""
        return issubclass(self.used, AbstractCPUOptimizer)

    def used_for(self, dtype: torch.dtype) -> type[Optimizer]:
        """Return the class that steps parameters of this dtype on the host: `used` or the user's.

        With `own_masters`, 16-bit parameters without a master are stepped by the user's class, so
        that results are as without offloading: native classes round once for each element, and keep
        moments in fp32.
        """
        is_plain = self.own_masters is not None and self.used is not self.asked
        stepped = self.own_master(dtype, on_host=True) or dtype
        return self.asked if is_plain and _is_narrow(stepped) else self.used

    def create(
        self, groups: list[dict[str, Any]], *, dtype: torch.dtype, on_host: bool
    ) -> Optimizer:
        """Return an optimizer over pieces of parameters of this dtype, or of those stepped like it.

        Numbers of its param groups are set before each step.
        """
        used = self.used_for(dtype)
        if on_host and used is not self.asked:
            return used(groups)  # type: ignore[call-arg]  (the class has defaults of its own)
        if not on_host and issubclass(self.asked, AbstractCPUOptimizer):
            raise UnsupportedOptimizerError(
                f"{self.asked.__name__} steps tensors of the CPU, and fraction leaves some of the "
                f"state on the device; set fraction['device'] to 0, or use a class of torch.optim"
            )
        return _twin(self.template, groups)

    def own_master(self, dtype: torch.dtype, *, on_host: bool) -> torch.dtype | None:
        """Return the dtype of the master that the sub-group, not the optimizer, keeps; or None."""
        if self.own_masters is None:
            keeps = _is_narrow(dtype) and not (self.is_native and on_host)
            return torch.float32 if keeps else None
        asked = self.own_masters.get(dtype)
        return torch.float32 if asked is not None and self._is_optimizers(asked) else asked

    def hides_master(self, dtype: torch.dtype) -> bool:
        """Return whether a parameter of this dtype has a master that is none of the optimizer's."""
        asked = (self.own_masters or {}).get(dtype)
        return asked is not None and not self._is_optimizers(asked)

    def _is_optimizers(self, asked: torch.dtype) -> bool:
        return (
            _is_narrow(asked) and self.is_native and getattr(self.template, "keeps_masters", False)
        )

    def entries(
        self, shape: tuple[int, ...], dtype: torch.dtype, numbers: dict[str, Any], position: int
    ) -> tuple[Entry, ...]:
        """Return the state tensors that have a parameter's shape, as a trial step of one shows.

        The trial has the parameter's shape, as an optimizer may quantize or factor the state of
        large ones only; for native classes it has two elements. Optimizers of torch step it on
        meta, without memory, unless the step reads a value. Otherwise it has memory until this
        returns.

        Args:
            shape: Shape of the parameter.
            dtype: Dtype of the parameter.
            numbers: Current numbers of its param group.
            position: Position of the param group.

        Raises:
            UnsupportedOptimizerError: The trial step failed, or made state of no parameter.
        """
        masters: tuple[Entry, ...] = ()
        of = dtype
        if (own := self.own_master(dtype, on_host=True)) is not None:
            masters, dtype = (Entry(MASTER, own),), own
        if not math.prod(shape):
            # Without elements, the optimizer's own entries take no memory.
            return masters
        used = self.used_for(of)
        if issubclass(used, AbstractCPUOptimizer):
            # All elements have the same entries. With one, a number would look like an entry.
            shape = (2,)
        is_torchs = used.__module__.startswith("torch.optim.")
        device = "meta" if is_torchs else "cpu"
        while True:
            param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            param.grad = torch.zeros_like(param)
            optimizer = self.create([{"params": [param]}], dtype=of, on_host=True)
            optimizer.param_groups[0].update({k: _own(v) for k, v in numbers.items()})
            optimizer.state[param].update(self._first_state(position))
            try:
                # The trial must not change the user's random numbers.
                with torch.random.fork_rng(devices=[]):
                    # Schedule-free optimizers have modes, and step in training mode only.
                    if callable(getattr(optimizer, "train", None)):
                        optimizer.train()  # type: ignore[attr-defined]
                    optimizer.step()
                    self._try_modes(optimizer, param)
                break
            except Exception as error:
                if not param.is_meta:
                    raise UnsupportedOptimizerError(
                        f"a trial step of a {self.asked.__name__} on a parameter of shape {shape} "
                        f"failed with {type(error).__name__}: {error}, so nothing is known of its "
                        "state; leave that on the device"
                    ) from error
                # The step reads a value, which tensors on meta do not have.
                device = "cpu"
        if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
            raise UnsupportedOptimizerError(
                f"a {self.asked.__name__} keeps state of no parameter, "
                f"{', '.join(map(repr, strange))}, which every sub-group would change; leave its "
                "state on the device"
            )
        return masters + tuple(
            Entry(name, value.dtype)
            for name, value in optimizer.state[param].items()
            # A subclass, such as quantized state, has memory of its own.
            if type(value) is Tensor
            and value.shape == param.shape
            # For a parameter of one element, a number of the state would look like an entry.
            and param.numel() > 1
            and name != "step"
        )

    def attributes(self) -> Attributes:
        """Return copies of the plain attributes of the user's optimizer; see `plain_attributes`."""
        return plain_attributes(self.template)

    def write_attributes(self, changed: Attributes) -> None:
        """Set attributes of the user's optimizer that an optimizer in its place has changed."""
        own = vars(self.template)
        for name, value in changed.items():
            if name not in own or own[name] != value:
                setattr(self.template, name, value)

    def _first_state(self, position: int) -> dict[str, Any]:
        """Return numbers and strings that the constructor has put into the state of a parameter."""
        groups = self.template.param_groups[position : position + 1]
        for param in groups[0]["params"] if groups else ():
            state = self.template.state.get(param) or {}
            return {key: v for key, v in state.items() if type(v) in {int, float, str, bool}}
        return {}

    def _try_modes(self, stepped: Optimizer, param: nn.Parameter) -> None:
        """Call `eval` and `train` as on the user's optimizer, which has made no step itself."""
        if all(callable(getattr(stepped, mode, None)) for mode in ("train", "eval")):
            theirs: Any = _twin(self.template, [{**stepped.param_groups[0]}])
            theirs.state[param] = dict(stepped.state[param])
            theirs.eval()
            theirs.train()


_NO_ATTRIBUTES: Final = {"state", "param_groups", "defaults"}


def plain_attributes(optimizer: Optimizer) -> Attributes:
    """Return copies of an optimizer's attributes: numbers, strings, None, containers of these."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if name not in _NO_ATTRIBUTES and not name.startswith("_optimizer_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in {dict, defaultdict, OrderedDict}:
        value = [*value.keys(), *value.values()]
    if type(value) in {list, tuple, set}:
        return all(map(_is_plain, value))
    return type(value) in {int, float, bool, str, type(None)}


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def _refuse(asked: type[Optimizer], arguments: Mapping[str, Any]) -> None:
    for (name, value), reason in _REFUSED.items():
        if name in arguments and arguments[name] == value:
            raise UnsupportedOptimizerError(
                f"{asked.__name__}({name}={value!r}) cannot be offloaded, as {reason}; leave it out"
            )


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return a copy of an optimizer over other parameters, without their state and its hooks."""
    made = type(optimizer).__new__(type(optimizer))
    kept = optimizer.__getstate__()

    # Schedulers replace methods on the object. A copy has those of its class.
    def is_method(name: str, value: Any) -> bool:
        return callable(value) and callable(getattr(type(optimizer), name, None))

    def own(value: Any) -> Any:
        if isinstance(value, MethodType) and value.__self__ is optimizer:
            return MethodType(value.__func__, made)
        return _own(value)

    attributes = {
        name: own(value)
        for name, value in vars(optimizer).items()
        if name not in kept and not name.startswith("_optimizer_") and not is_method(name, value)
    }
    groups = [{**optimizer.defaults, **group} for group in groups]
    # Copy state that belongs to no parameter, such as a count of the steps of all.
    state = {key: _own(v) for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
    vars(made).update(attributes)
    made.__setstate__({**kept, "state": defaultdict(dict, state), "param_groups": groups})
    return made


def _own(value: Any) -> Any:
    """Return copies of tensors and of the containers around them; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in {list, tuple, set}:
        return type(value)(map(_own, value))
    if type(value) in {dict, defaultdict, OrderedDict}:
        copied = value.copy()
        copied.update({key: _own(item) for key, item in value.items()})
        return copied
    return value
