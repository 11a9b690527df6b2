"""Policies for what to keep and what to recompute, over operators and over modules. All pure."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final
from weakref import ref

import torch
from attrs import frozen
from torch import nn

from zero_ckpt.inputs.memory import storages_in

from .errors import CheckpointError
from .torch_private import (
    OpOverload,
    OpOverloadPacket,
    can_be_kept,
    is_made_of_others,
    modules_being_called,
    overload_name,
    schema_of,
)


@frozen(eq=False)
class OperatorCall:
    """One call of an operator inside a checkpointed function, the argument of a policy."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    # Bytes of outputs that the checkpointer keeps already, those of other functions included.
    kept_bytes: int

    @property
    def name(self) -> str:
        """Name of the operator without its overload, such as "aten::mm"."""
        return _names_of(self.operator)[0]

    @property
    def output_bytes(self) -> int:
        """Bytes of the storages that would be kept."""
        return sum(storages_in(self.output).values())


OperatorPolicy = Callable[[OperatorCall], bool]
ModulePolicy = Callable[[Mapping[str, nn.Module]], Iterable[str]]


@frozen
class _ByOperator:
    """Policy by operators' names: "aten::mm", or "aten::mm.default" for one overload."""

    names: frozenset[str]

    def __call__(self, call: OperatorCall) -> bool:
        name, full_name = _names_of(call.operator)
        return name in self.names or full_name in self.names


@frozen
class _WithinBytes:
    limit_bytes: int
    policy: OperatorPolicy

    def __call__(self, call: OperatorCall) -> bool:
        return self.policy(call) and call.kept_bytes + call.output_bytes <= self.limit_bytes


@frozen
class _Inside:
    modules: frozenset[ref[nn.Module]]

    def __call__(self, call: OperatorCall) -> bool:
        return any(ref(module) in self.modules for module in modules_being_called())


def by_operator(*operators: str | OpOverload | OpOverloadPacket) -> OperatorPolicy:
    """Return a policy that keeps the outputs of these operators.

    Args:
        *operators: Operators, or their names in `torch.ops`: "mm", "aten.mm", "mylib::attention",
            `torch.ops.aten.mm`, or one overload of it.

    Raises:
        CheckpointError: An operator does not exist; it returns views, returns no tensor, writes to
            its arguments, or casts; or it is made of other operators (matmul, linear), which are
            called in its place.
    """
    return _ByOperator(frozenset(map(_checked_name, operators)))


def within_bytes(limit_bytes: int, policy: OperatorPolicy) -> OperatorPolicy:
    """Return a policy that keeps what `policy` keeps, while the total stays within a limit.

    Outputs are kept in the order of forward until the limit is reached: those of early layers,
    which are the last to be recomputed. Their bytes count no longer once backward has used them,
    or once their graph is freed.

    Args:
        limit_bytes: Limit for all outputs that the checkpointer keeps, on all devices together.
        policy: Outputs to keep within the limit; `lambda call: True` keeps any.

    Raises:
        CheckpointError: The limit is no int of 0 or more, or `policy` is no policy over operators.
    """
    if not isinstance(limit_bytes, int) or limit_bytes < 0:
        raise CheckpointError(
            f"within_bytes(): expected an int of 0 or more bytes, got {limit_bytes!r}"
        )
    check_operator_policy(policy, "within_bytes(policy)")
    return _WithinBytes(limit_bytes, policy)


def inside(model: nn.Module, policy: ModulePolicy) -> OperatorPolicy:
    """Return a policy that keeps all that is computed in calls of some modules.

    Use it for a part of a checkpointed block that is expensive to compute again. A call is
    `module(...)`; `module.forward(...)` is not noticed, nor is a call inside compiled code.

    Args:
        model: Model that has the modules; the policy's names are looked up in it now, not later.
        policy: Modules of the model: `by_name("layers.*.attention")`.

    Raises:
        CheckpointError: The policy selects no module, or one that does not exist.
    """
    return _Inside(frozenset(ref(module) for module in select(model, policy, "inside()").values()))


_OPERATOR_POLICIES: Final = (_ByOperator, _WithinBytes, _Inside)

# Operators that matrix units compute. They take long, and their outputs are small compared with
# those of the operators between them.
MATMULS: Final[OperatorPolicy] = _ByOperator(
    frozenset(
        f"aten::{name}"
        for name in (
            "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear",
            "_addmm_activation", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
            "convolution", "_convolution", "convolution_overrideable",
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
            "_flash_attention_forward", "_efficient_attention_forward",
        )
    )
)  # fmt: skip


def check_operator_policy(policy: Any, what: str) -> None:
    """Raise CheckpointError if `policy` is no policy over operators."""
    if not callable(policy) or isinstance(policy, _MODULE_POLICIES):
        raise CheckpointError(
            f"{what}: expected a policy over operators (MATMULS, by_operator(...), "
            f"inside(model, by_name(...)), a function of an OperatorCall), got {policy!r}"
        )


@functools.cache
def _names_of(operator: OpOverload) -> tuple[str, str]:
    """Return an operator's name without its overload, and with it."""
    name = schema_of(operator).name
    return name, f"{name}.{overload_name(operator)}"


def _checked_name(operator: Any) -> str:
    if isinstance(operator, OpOverload):
        overloads, name = [operator], _names_of(operator)[1]
    elif isinstance(operator, OpOverloadPacket | str):
        packet = _packet_of(operator) if isinstance(operator, str) else operator
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        name = schema_of(overloads[0]).name
    else:
        raise CheckpointError(
            f"by_operator(): expected names or operators of torch.ops, got {operator!r}"
        )
    if not any(map(can_be_kept, overloads)):
        raise CheckpointError(
            f"by_operator({name!r}): it writes to its arguments, returns views of them, returns no "
            "tensor, or casts (of which autocast remembers some), so its output is not kept; name "
            "another"
        )
    if all(map(is_made_of_others, filter(can_be_kept, overloads))):
        raise CheckpointError(
            f"by_operator({name!r}): it is made of other operators, and they are what is called "
            "(addmm by linear, _softmax by softmax); name those, or use MATMULS"
        )
    return name


def _packet_of(text: str) -> OpOverloadPacket:
    namespace, _, name = text.replace("::", ".").rpartition(".")
    found = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if isinstance(found, OpOverloadPacket):
        return found
    known = (name for name in dir(torch.ops.aten) if not name.startswith("__"))
    close = difflib.get_close_matches(name, sorted({*known, *dir(torch)}), n=3)
    raise CheckpointError(
        f"by_operator({text!r}): there is no such operator (close: {', '.join(close) or 'none'}); "
        'expected "mm", "aten.mm" or "mylib::name", without the overload'
    )


@frozen
class _ByName:
    patterns: tuple[str, ...]

    def __call__(self, modules: Mapping[str, nn.Module]) -> list[str]:
        patterns = [pattern.split(".") for pattern in self.patterns]
        return [name for name in modules if any(_match(name.split("."), p) for p in patterns)]


@frozen
class _ByType:
    kinds: tuple[type[nn.Module], ...]

    def __call__(self, modules: Mapping[str, nn.Module]) -> list[str]:
        return [name for name, module in modules.items() if isinstance(module, self.kinds)]


@frozen
class _EveryNth:
    n: int
    policy: ModulePolicy

    def __call__(self, modules: Mapping[str, nn.Module]) -> list[str]:
        return list(self.policy(modules))[:: self.n]


_MODULE_POLICIES: Final = (_ByName, _ByType, _EveryNth)


def by_name(*patterns: str) -> ModulePolicy:
    """Return a policy that selects modules by name: `layers.3`, `layers.*`, `**.attention`.

    Args:
        *patterns: Names, in which `*`, `?` and `[...]` match characters of one part, between two
            dots, and a part `**` matches any number of parts.
    """
    return _ByName(patterns)


def by_type(*kinds: type[nn.Module]) -> ModulePolicy:
    """Return a policy that selects modules of these classes and of their subclasses.

    Raises:
        CheckpointError: One is no class of modules.
    """
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise CheckpointError(f"by_type(): expected classes of modules, got {kind!r}")
    return _ByType(kinds)


def every_nth(n: int, policy: ModulePolicy) -> ModulePolicy:
    """Return a policy that selects the first and each n-th after it of what `policy` selects.

    The order is that of `policy`.

    Raises:
        CheckpointError: `n` is no int of 1 or more.
    """
    if not isinstance(n, int) or n < 1:
        raise CheckpointError(f"every_nth(): expected an int of 1 or more, got {n!r}")
    return _EveryNth(n, policy)


def select(model: nn.Module, policy: ModulePolicy, what: str) -> dict[str, nn.Module]:
    """Return the modules that a policy selects, by name, in the order of `named_modules()`."""
    modules = dict(model.named_modules())
    if not callable(policy) or isinstance(policy, _OPERATOR_POLICIES):
        raise CheckpointError(f"{what}: {_EXPECTED}, got {policy!r}")
    found = policy(modules)
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise CheckpointError(f"{what}: {_EXPECTED}, and {policy!r} returned {found!r}")
    names = set(found)
    unknown = sorted(map(repr, names - modules.keys()))
    if unknown:
        raise CheckpointError(
            f"{what}: {policy!r} selects {', '.join(unknown)}, which {_contents(modules)}"
        )
    if not names:
        raise CheckpointError(
            f"{what}: {policy!r} selects no module; the model {_contents(modules)}"
        )
    return {name: module for name, module in modules.items() if name in names}


_EXPECTED: Final = (
    "expected a policy over modules (by_name(...), by_type(...), a function from a dict of modules "
    "by name to the names selected)"
)
_NUM_SHOWN: Final = 20


def _contents(modules: Mapping[str, nn.Module]) -> str:
    shown = [f"{name!r} ({type(module).__name__})" for name, module in modules.items()]
    rest = f" and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    return f"has {', '.join(shown[:_NUM_SHOWN])}{rest}"


def _match(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _match(parts[1:], patterns[1:])
