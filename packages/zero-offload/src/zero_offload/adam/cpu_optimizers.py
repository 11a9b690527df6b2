"""CPUAdam, CPUAdagrad and CPULion: optimizers whose parameters and state are CPU tensors."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np
import torch
from attrs import fields_dict
from torch import Tensor
from torch.optim import Optimizer

from zero_offload import _native
from zero_offload._native.library import Formula, Rule
from zero_offload.errors import UnsupportedTensorError

from .batches import MASTER, StatePolicy, StepPlan, checked_grad
from .parallel import Team, step_batch

_AT_LEAST_0: Final = {"lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"}


class AbstractCPUOptimizer(Optimizer, ABC):
    """An optimizer over CPU tensors whose step is one pass over memory.

    Not thread-safe: one step at a time. `grad_scale` and `found_inf`, if set, are tensors or
    numbers that the next step divides gradients by, and skips for if not 0, as in torch's fused
    optimizers; `torch.amp.GradScaler` uses them.
    """

    # The formulas are elementwise: a part of a parameter is stepped as in the whole.
    needs_cut = "flat"
    # Names of the state's tensors, in the order of `first` and `second` in `zero_tensor`.
    moments: tuple[str, ...]
    # `torch.amp.GradScaler` and others set these two for a step. They are missing otherwise.
    grad_scale: Tensor | float | None
    found_inf: Tensor | float | None

    def __init__(self, params: Any, defaults: dict[str, Any], **policy: Any) -> None:
        for name in _AT_LEAST_0 & defaults.keys():
            if not float(defaults[name]) >= 0:
                raise ValueError(f"{name}={defaults[name]}: expected at least 0.0")
        betas = defaults.get("betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
            raise ValueError(f"betas={betas}: expected two numbers, each at least 0 and below 1")
        known = [*defaults, *fields_dict(StatePolicy)]
        if unknown := [name for name in policy if name not in known]:
            raise TypeError(
                f"{type(self).__name__}(): expected arguments {', '.join(known)}, got {unknown[0]}"
            )
        self._policy = StatePolicy(**policy)
        self._reset()
        if self._kernels is None:
            _warn_once(_native.native_status().reason)
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True

    @property
    def keeps_masters(self) -> bool:
        """Return whether 16-bit parameters have fp32 masters in the state, as "master"."""
        return self._policy.masters

    @property
    def state_dtype(self) -> torch.dtype | None:
        """Return the dtype of moments; None for each parameter's own."""
        return self._policy.state_dtype

    @abstractmethod
    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        """Return the numbers of a group's step, without `factor` and `seed`."""

    # ---- Stepping ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Local, blocking.

        Args:
            closure: Computes the loss again, as for any optimizer of torch.

        Returns:
            The closure's loss, or None.

        Raises:
            UnsupportedTensorError: A gradient is sparse or not on the CPU.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Set masters from parameters that something else has written, such as loading. Local."""
        for param, entries in self.state.items():
            if MASTER in entries:
                entries[MASTER].copy_(param)

    def _step(self) -> None:
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf) != 0:
            return
        factor = 1.0 if scale is None else 1.0 / float(scale)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        plan, self._plan = self._plan, None
        amsgrad = [group.get("amsgrad") for group in self.param_groups]
        if plan is None or plan.amsgrad != amsgrad or not plan.renew(params, self.state):
            plan = self._make_plan(amsgrad)
        kernels = self._kernels
        if kernels is None:
            for step in plan.steps:
                step.add_(1)
        else:
            addresses = np.array([*map(Tensor.data_ptr, plan.steps)], np.uintp)
            kernels.library.zero_count(addresses.ctypes.data, len(plan.steps))
        for batch in plan.batches.values():
            rule = self._rule(self.param_groups[batch.group], batch.step)
            rule.factor = factor
            if self._policy.rounding == "stochastic":
                rule.stochastic, rule.seed = True, self._policy.seed_of(batch.step)
            step_batch(batch, rule, kernels=kernels, team=self._team)
        for param, copy in plan.copies:
            param.copy_(copy)
        plan.record(params, self.state)
        self._plan = plan
        # Kernels write to memory without torch, so autograd would not notice the change.
        torch.autograd.graph.increment_version(params)

    def use_memory(self, memory: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Make entries of the state in this memory, by parameter and name, when they are new."""
        self._memory = memory

    def _make_plan(self, amsgrad: list[Any]) -> StepPlan:
        """Check and collect what has a gradient; nothing is stepped yet."""
        plan = StepPlan(amsgrad)
        index = 0
        for position, group in enumerate(self.param_groups):
            names = self.moments
            if group.get("amsgrad"):
                names += ("max_exp_avg_sq",)
            first = group.get("initial_accumulator_value", 0.0)
            for param in group["params"]:
                if param.grad is not None:
                    self._policy.check(param, where="step()")
                    grad, entries = checked_grad(param), self.state[param]
                    self._policy.prepare(entries, param, names, first, self._memory.get(param, {}))
                    plan.add(
                        param,
                        grad,
                        entries,
                        index=index,
                        group=position,
                        names=names,
                    )
                index += param.numel()
        return plan

    # ---- State ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does, of dense CPU tensors of fp32, bf16 or fp16.

        Parameters on meta can be planned with, but not stepped.

        Raises:
            UnsupportedTensorError: One is not; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                if not param.is_meta:
                    self._policy.check(param, where=type(self).__name__)
        except UnsupportedTensorError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or torch's optimizer of the same formula saved. Local.

        Moments take the dtype this optimizer keeps them in. Masters that were not saved are made
        from the parameters at the next step: load those first.
        """
        saved = load_by_torch(self, partial(super().load_state_dict, state_dict))
        # torch has cast everything to the parameter's dtype: wrong for state of 16-bit ones.
        for param, entries in saved.items():
            for name, value in entries.items():
                if name != "step" and torch.is_tensor(value) and param.is_cpu:
                    self.state[param][name] = self._policy.shaped(name, value, param)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_policy": self._policy, "_step_supports_amp_scaling": True}
        return super().__getstate__() | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._reset()

    def _reset(self) -> None:
        """Set the attributes that no state dict and no copy has to their initial values."""
        self._kernels = _native.kernels()
        self._team = Team()
        # Parameter -> name of an entry -> memory for it; set by `use_memory`.
        self._memory: Mapping[Tensor, Mapping[str, Tensor]] = {}
        # Plan of the last step, to be used again; None before a first step and after a failed one.
        self._plan: StepPlan | None = None


class StateOptions(TypedDict, total=False):
    """Arguments of every CPU optimizer for its state; `CPUAdam` describes them."""

    masters: bool
    state_dtype: torch.dtype | None
    rounding: Literal["nearest", "stochastic"]
    seed: int


class CPUAdam(AbstractCPUOptimizer):
    """Adam or AdamW over CPU tensors, in one pass over memory by native threads.

    The result is torch's up to the last bits, and the same bits on every processor and for every
    number of threads (`torch.set_num_threads`). State and param groups are torch's: a state dict of
    `torch.optim.AdamW` or `Adam` loads here and one of this there; a 16-bit parameter has an fp32
    "master" besides.

    Args:
        params: Parameters or groups, as torch takes them: dense CPU tensors of fp32, bf16 or fp16,
            of any strides; contiguous ones are stepped where they lie, others by way of a copy.
            Gradients may be of any of the three dtypes.
        lr: Step size; a scheduler may change it.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW, unless the next says otherwise.
        amsgrad: Divide by the largest second moment so far.
        maximize: Step uphill.
        decoupled_weight_decay: False adds weight decay to the gradient, as `torch.optim.Adam`.
        bias_correction: False leaves moments as they are in the first steps.
        masters: Whether 16-bit parameters have an fp32 master that is stepped; without, the
            parameter itself is, and loses what rounding takes.
        state_dtype: Of moments: fp32, bf16 or fp16; None for the parameter's own.
        rounding: Of bf16 parameters: "nearest" (ties to even) or "stochastic", which loses nothing
            on average and so makes up for a missing master.
        seed: Of stochastic rounding; with the step count it gives the random bits.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of these dtypes.
        ValueError: A number is out of range.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(  # noqa: PLR0917 - the order is torch's
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        **kept: Unpack[StateOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, **kept)

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        is_corrected, is_decoupled = group["bias_correction"], group["decoupled_weight_decay"]
        return Rule(
            Formula.ADAM,
            rate=-(lr / (1 - beta1**step) if is_corrected else lr),
            maximize=group["maximize"],
            decoupled=is_decoupled,
            weight_decay=group["weight_decay"],
            shrink=1 - lr * group["weight_decay"] if is_decoupled else 1.0,
            beta1=beta1,
            beta2=beta2,
            unbias=1 / math.sqrt(1 - beta2**step) if is_corrected else 1.0,
            eps=group["eps"],
        )


class CPUAdagrad(AbstractCPUOptimizer):
    """Adagrad over CPU tensors; all else as `CPUAdam`, the state as `torch.optim.Adagrad`'s.

    Args:
        params: As for `CPUAdam`.
        lr: Step size.
        lr_decay: The step size is divided by 1 + lr_decay times the number of earlier steps.
        weight_decay: Added to the gradient times the parameter.
        initial_accumulator_value: What sums of squares begin with.
        eps: Added to their root.
        maximize: Step uphill.
        kept: masters, state_dtype, rounding, seed: as for `CPUAdam`.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of fp32, bf16 or fp16.
        ValueError: A number is out of range.
    """

    moments = ("sum",)

    def __init__(  # noqa: PLR0917 - the order is torch's
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **kept: Unpack[StateOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **kept)

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        return Rule(
            Formula.ADAGRAD,
            rate=-float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]),
            maximize=group["maximize"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


class CPULion(AbstractCPUOptimizer):
    """Lion (arXiv 2302.06675) over CPU tensors; all else as `CPUAdam`.

    The parameter moves by `lr` against the sign of a mean of gradients, and shrinks by
    `lr * weight_decay`. Its state is "exp_avg" and "step".

    Args:
        params: As for `CPUAdam`.
        lr: Step size; usually a third to a tenth of Adam's.
        betas: The gradient's share in the direction, and decay of the mean that is kept.
        weight_decay: Decoupled from the gradient; usually three to ten times Adam's.
        maximize: Step uphill.
        kept: masters, state_dtype, rounding, seed: as for `CPUAdam`.

    Raises:
        UnsupportedTensorError: A parameter is not a dense CPU tensor of fp32, bf16 or fp16.
        ValueError: A number is out of range.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **kept: Unpack[StateOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **kept)

    def _rule(self, group: dict[str, Any], step: int) -> Rule:
        del step
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return Rule(
            Formula.LION,
            rate=-lr,
            maximize=group["maximize"],
            decoupled=True,
            shrink=1 - lr * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
        )


def load_by_torch(
    optimizer: Optimizer, load: Callable[[], None], *, with_state: bool = True
) -> dict[Tensor, dict[str, Any]]:
    """Have torch load a state dict; returns the saved state of each parameter, as it was.

    Args:
        optimizer: The optimizer; its hooks may replace the state dict before.
        load: Calls torch's own method.
        with_state: False has torch load param groups only.
    """
    seen: dict[str, Any] = {}

    def see(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.update(state_dict)
        return state_dict if with_state else {**state_dict, "state": {}}

    # Hooks run in the order of registration: the last one sees what the others have replaced.
    handle = optimizer.register_load_state_dict_pre_hook(see)
    try:
        load()
    finally:
        handle.remove()
    ids = chain.from_iterable(group["params"] for group in seen["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {p: seen["state"].get(saved_id, {}) for saved_id, p in zip(ids, params, strict=True)}


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"zero_offload steps with plain torch, about ten times slower than its kernels: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
