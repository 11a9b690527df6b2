"""Dtypes in which a model is kept, computes and communicates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, final

import torch
from attrs import evolve, field, frozen
from torch import nn
from zero_comm import Reduction

from zero_partition.errors import PartitionError
from zero_partition.torch_private import NormBase

from .layout import BufferPlan
from .stages import expects, names_fields, nearest


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_FLOATING: Final = expects(
    "a floating-point torch.dtype, such as torch.bfloat16",
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
)
_FACTOR: Final = expects(
    "a finite number above 0, or None for the number of ranks",
    lambda value: value is None or _is_factor(value),
)
_BOOL: Final = expects("a bool", lambda value: isinstance(value, bool))


@final
@frozen
class Scaling:
    """One reduction of gradients: divide, combine the ranks' by `op`, multiply."""

    divisor_before: float
    op: Reduction
    after: float


@names_fields
@frozen
class ModulePrecision:
    """Dtypes of some modules, where they differ from the model's; see `Precision.keep`.

    FSDP2's users wrap such modules by themselves, with a `MixedPrecisionPolicy` of these fields.

    Args:
        params: Floating-point parameters inside are converted to it; `Precision.params` when None.
        outputs: Floating-point tensors that the module returns are converted to it; as they come
            when None.
        cast_inputs: Floating-point tensors with which the module is called are converted to
            `params`.
        restores: What the module returns has the dtype of the first floating-point tensor that it
            was called with (that of the model's parameters where there is none), unless `outputs`
            says another: the modules around need not know.
        travel: At stages 1 to 3, gradients of floating-point parameters inside travel between ranks
            in it, and at stage 3 the parameters themselves: for modules that compute in it under an
            autocast. It counts before `Precision.reduce`, and where `Wire.params` says no codec;
            for a tied parameter, if any of its modules says so. Where nothing else is said, calls
            of the module are left alone.
    """

    params: torch.dtype | None = field(default=None, validator=_FLOATING)
    outputs: torch.dtype | None = field(default=None, validator=_FLOATING)
    cast_inputs: bool = field(default=True, validator=_BOOL)
    restores: bool = field(default=False, validator=_BOOL)
    travel: torch.dtype | None = field(
        default=None,
        validator=expects(
            "torch.bfloat16, torch.float16, torch.float32, or None",
            lambda value: value in (None, torch.bfloat16, torch.float16, torch.float32),
        ),
    )

    @property
    def has_hooks(self) -> bool:
        """Return whether calls of the module convert its inputs or outputs."""
        return self.travel is None or bool(self.params or self.outputs or self.restores)


def _as_policies(keep: Any) -> Any:
    """Return `keep` with each bare dtype as a policy whose outputs return to the caller's dtype."""
    if not isinstance(keep, Mapping):
        return keep
    return {
        pattern: ModulePrecision(said, restores=True) if isinstance(said, torch.dtype) else said
        for pattern, said in keep.items()
    }


def _are_policies(keep: Any) -> bool:
    return isinstance(keep, dict) and all(
        isinstance(pattern, str | type) and isinstance(said, ModulePrecision)
        for pattern, said in keep.items()
    )


def _matches(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return type(module) is pattern


@names_fields
@frozen(kw_only=True)
class Precision:
    """Dtypes and scaling in training; 16-bit parameters have fp32 masters (arXiv 1710.03740).

    Norm layers with running statistics (batch norm, and instance norm that tracks them) stay as
    they are, parameters and buffers, and compute so: their input is converted to the dtype of the
    statistics, and their output back, unless `keep` says otherwise. Other buffers stay as they are,
    and so does what they meet.

    Args:
        params: Floating-point parameters are converted to it; as they are when None.
        masters: The optimizer updates shards of this dtype, from which trainable parameters are
            rounded after each step, and gradients are added up in it. It updates the parameters
            themselves when None, or where they are of this dtype.
        reduce: Gradients travel between ranks, and are averaged, in it; in that of their parameter
            when None.
        outputs: Floating-point tensors that the model returns are converted to it; as they are when
            None.
        cast_inputs: Floating-point tensors with which the model is called, in tuples, lists, dicts
            and what torch's pytrees know, are converted to `params`, where that is given. So does
            FSDP2's `cast_forward_inputs`, and so is a call of a part of the model left alone.
        keep: By patterns of module names, as `fnmatch` reads them, or by classes (not subclasses;
            there need be no such module), what differs from `params` in the modules that match and
            all inside them: `{"*norm*": torch.float32}`. A dtype is `ModulePrecision(dtype,
            restores=True)`. Of several that match, the last counts.
        predivide_factor: Gradients are divided by it before ranks are added up: what keeps a sum
            over many ranks within fp16. The sum is multiplied by it over the number of ranks for a
            mean. The number of ranks itself when None: a mean is not rounded again afterwards.
        mean_over: A mean is the sum over the ranks divided by it; by the number of ranks when None.
            For losses that are a mean over fewer ranks, as where ranks share a sequence. (FSDP2
            calls it the gradient divide factor.)
        reduces_mean: Gradients are averaged over the ranks; added up when False. Stage 0
            does that once per step: all micro-batches but the last must be inside `no_sync`.

    Raises:
        PartitionError: Names the field, what was expected and what came.
    """

    params: torch.dtype | None = field(default=None, validator=_FLOATING)
    masters: torch.dtype | None = field(default=torch.float32, validator=_FLOATING)
    reduce: torch.dtype | None = field(default=None, validator=_FLOATING)
    outputs: torch.dtype | None = field(default=None, validator=_FLOATING)
    cast_inputs: bool = field(default=True, validator=_BOOL)
    keep: Mapping[str | type[nn.Module], ModulePrecision] = field(
        factory=dict,
        converter=_as_policies,
        hash=False,
        validator=expects(
            "patterns of module names, or classes, each with a torch.dtype or ModulePrecision",
            _are_policies,
        ),
    )
    predivide_factor: float | None = field(default=1.0, validator=_FACTOR)
    reduces_mean: bool = field(default=True, validator=_BOOL)
    mean_over: float | None = field(default=None, validator=_FACTOR)

    def dtypes_of(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return the dtype that the model computes with, by id of the parameter.

        Raises:
            PartitionError: A pattern matches no module, or a parameter is tied between modules that
                keep it in different dtypes.
        """
        found, names = dict[int, torch.dtype](), dict[int, str]()
        for name, param, policy in self._with_policies(model):
            dtype = (None if policy is None else policy.params) or self.params
            if dtype is None or not param.is_floating_point():
                dtype = param.dtype
            first = names.setdefault(id(param), name)
            if found.setdefault(id(param), dtype) != dtype:
                raise PartitionError(
                    f"Precision.keep: parameter {first!r} would be {found[id(param)]}, and it is "
                    f"tied to {name!r}, which would be {dtype}; match the modules of both, or none"
                )
        return found

    def travels_of(self, model: nn.Module) -> dict[int, torch.dtype]:
        """Return the dtype in which parameters travel, by id, of those for which `keep` has one.

        Raises:
            PartitionError: As `dtypes_of` does.
        """
        found = dict[int, torch.dtype]()
        for name, param, policy in self._with_policies(model):
            if policy is None or policy.travel is None or not param.is_floating_point():
                continue
            if found.setdefault(id(param), policy.travel) != policy.travel:
                raise PartitionError(
                    f"Precision.keep: parameter {name!r} would travel in {policy.travel}, and it "
                    f"is tied to one that would in {found[id(param)]}; say one for both modules"
                )
        return found

    def _with_policies(
        self, model: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter, ModulePrecision | None]]:
        """Yield parameters in all their names, each with the policy of the module around it."""
        kept = self.kept_modules(model)
        for name, param in model.named_parameters(remove_duplicate=False):
            around = name.rpartition(".")[0]
            while around and around not in kept:
                around = around.rpartition(".")[0]
            yield name, param, kept[around][1] if around else None

    def kept_modules(self, model: nn.Module) -> dict[str, tuple[nn.Module, ModulePrecision]]:
        """Return modules that differ from `params`, and how, by name; outer ones come first.

        A module inside one of these is here only if a later pattern matches it.

        Raises:
            PartitionError: A pattern matches no module.
        """
        kept: dict[str, tuple[nn.Module, ModulePrecision]] = {}
        patterns, used = [*self.keep], set[str | type[nn.Module]]()
        # Name -> index of the last pattern that matches it or what is around it.
        chosen = {"": -1}
        for name, module in model.named_modules(remove_duplicate=False):
            if not name:
                continue
            stats = module.running_mean if isinstance(module, NormBase) else None
            around = chosen[name.rpartition(".")[0]]
            matching = [each for each in patterns if _matches(each, name, module)]
            used.update(matching)
            own = patterns.index(matching[-1]) if matching else -1
            chosen[name] = max(around, own)
            if own > around:
                kept[name] = module, self.keep[patterns[own]]
            elif chosen[name] < 0 and self.params and stats is not None:
                kept[name] = module, ModulePrecision(stats.dtype, restores=True)
        for pattern in patterns:
            if isinstance(pattern, str) and pattern not in used:
                near = nearest(pattern, (name for name in chosen if name))
                hint = f"; did you mean {near!r}?" if near else ""
                raise PartitionError(f"Precision.keep: {pattern!r} matches no module{hint}")
        return kept

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of masters of trainable parameters of this dtype; None without any."""
        return self.masters if dtype.is_floating_point and dtype != self.masters else None

    def wire_of(self, buffer: BufferPlan) -> torch.dtype:
        """Return the dtype in which gradients of a buffer travel."""
        reduce = self.reduce if buffer.dtype.is_floating_point else None
        return buffer.travel or reduce or buffer.dtype

    def over(self, world_size: int) -> Precision:
        """Return it with means over so many ranks, unless `mean_over` is set already."""
        return self if self.mean_over is not None else evolve(self, mean_over=float(world_size))

    def keeps_equal(self, world_size: int) -> bool:
        """Return whether a reduction leaves a value as it is that is equal on so many ranks."""
        return self.mean_over in (None, world_size) if self.reduces_mean else world_size == 1

    def scaling_of(self, world_size: int) -> Scaling:
        """Return the scaling of gradients for a reduction over so many ranks. Arithmetic only."""
        count = float(world_size) if self.mean_over is None else self.mean_over
        divisor = count if self.predivide_factor is None else self.predivide_factor
        if divisor == 1.0 and (count == world_size or not self.reduces_mean):
            return Scaling(1.0, Reduction.MEAN if self.reduces_mean else Reduction.SUM, 1.0)
        after = divisor / count if self.reduces_mean else divisor
        return Scaling(divisor, Reduction.SUM, after)


AS_IT_IS: Final = Precision(masters=None)
