"""Optimizers by the names that DeepSpeed's files give them, made of torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, Final, final

import torch
from torch import Tensor
from zero_engine import ConfigError
from zero_engine.checks import check_names
from zero_engine.torch_private import (
    foreach_add_,
    foreach_mul,
    foreach_mul_,
    foreach_sign_,
    foreach_sub_,
)
from zero_offload import CPUAdagrad, CPUAdam, CPULion
from zero_offload import FusedAdam as DeviceAdam
from zero_partition import ChainedOptimizer
from zero_partition.plan import nearest

from .configuration.keys import KEYS

_PATH: Final = "optimizer.params"


@final
class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients; one entry of state per parameter.

    With gradient g and average m: p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g),
    then m = beta2 m + (1 - beta2) g. Elementwise, so that parameters may be cut anywhere.

    Args:
        params: Parameters, or param groups, as of any torch optimizer.
        lr: The size of every element's step; a tenth of what AdamW wants, or less.
        betas: Weights of the average in the update, and in the next average.
        weight_decay: Decoupled, as AdamW's.

    Raises:
        ConfigError: Names the option, what was expected and what came.
    """

    needs_cut = "flat"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as torch does, after its options were checked."""
        options = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay", "betas"):
            if not isinstance(options[name], Tensor):
                KEYS[f"{_PATH}.{name}"].kind.read(f"Lion.{name}", options[name])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads: list[Any] = [param.grad for param in params]
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        averages = [self.state[param]["exp_avg"] for param in params]
        updates = foreach_mul(averages, beta1)
        foreach_add_(updates, grads, alpha=1 - beta1)
        foreach_sign_(updates)
        foreach_mul_(updates, lr)
        if group["weight_decay"]:
            foreach_mul_(params, 1 - lr * group["weight_decay"])
        foreach_sub_(params, updates)
        foreach_mul_(averages, beta2)
        foreach_add_(averages, grads, alpha=1 - beta2)


# Options that are not built; they are refused with the error of their key in a file.
_REFUSED: Final = {"max_grad_norm", "fp32_optimizer_states", "per_head_muon"}
# Option -> the only value that torch's optimizers support, and the reason.
_ONLY: Final = {
    "bias_correction": (True, "Adam without bias correction is not built"),
    "set_grad_none": (True, "gradients are always dropped, not zeroed; leave the key out"),
    "ns_method": ("standard", "torch's Muon has the standard iteration alone"),
}


def make_optimizer(
    params: Iterable[Any],
    type: str,
    given: Mapping[str, Any],
    *,
    state_dtype: torch.dtype | None = None,
    on_host: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer that the section `optimizer` of a configuration file asks for. Local.

    "Adam" is AdamW unless `adam_w_mode` is false, and the default weight decay of both is 0, as
    DeepSpeed has it; with `torch_adam`, torch's own. "Muon" updates matrices by torch's Muon and
    all else by AdamW, chained, with DeepSpeed's defaults; `muon_lr` and `adam_lr` go before `lr`. A
    parameter goes to Muon if its attribute `use_muon` says so; where it has none, if it is a
    matrix, and no embedding or `lm_head` by its name.

    `params` are what torch's optimizers take; options of param groups go before those `given`. With
    a `state_dtype` of torch.float32, Adam keeps fp32 moments of 16-bit parameters without masters;
    the optimizer is one for the CPU, or one for a GPU where not `on_host`.
    """
    name = str(type).lower()
    if name not in _MAKERS:
        near = nearest(type, _MAKERS)
        raise ConfigError(
            f"optimizer.type: expected one of {', '.join(_MAKERS)}, got {type!r}"
            f"{f'; did you mean {near!r}?' if near else ''}. Any other optimizer is passed as an "
            "object: optimizer=..."
        )
    known, make = _MAKERS[name]
    if state_dtype is torch.float32:
        if name not in ("adam", "adamw"):
            raise ConfigError(
                f"bf16.bf16_optimizer_states: expected true with optimizer.type {type!r}, which "
                "keeps its state in the dtype of what it updates, got false; Adam can have it apart"
            )
        known, make = _MIXED_OPTIONS, partial(_make_mixed_adam, name, on_host)
    options = _read_options({key: value for key, value in given.items() if value is not None})
    check_names(_PATH, given.keys() - _REFUSED, known)
    try:
        return make(list(params), **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_PATH}: {type} does not take them: {error}") from error


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are read from a file, without those that have one allowed value.

    Raises:
        ConfigError: An option has another value than the allowed one, or is of another kind.
    """
    options = {}
    for name, value in given.items():
        where, key = f"{_PATH}.{name}", KEYS.get(f"{_PATH}.{name}")
        options[name] = value if key is None else key.kind.read(where, value)
        if name in _REFUSED:
            KEYS[where].check_built(where, options.pop(name))
        elif name in _ONLY:
            (only, why), got = _ONLY[name], options.pop(name)
            if got != only:
                raise ConfigError(f"{where}: expected {only!r}, got {got!r}: {why}")
    return options


class _SteppedOnHost(torch.optim.Optimizer):
    """Optimizer for parameters on any device: `initialize` brings what it steps to the host."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, on any device, as torch does; `step` refuses one not on the CPU."""
        torch.optim.Optimizer.add_param_group(self, param_group)


class DeepSpeedCPUAdam(_SteppedOnHost, CPUAdam):
    """`zero_offload.CPUAdam`, with the arguments in DeepSpeed's order.

    Parameters may be on a GPU until `initialize`, whose `offload_optimizer` moves the values that
    are stepped to the host. 16-bit parameters have no masters in this optimizer: `initialize` keeps
    them. amsgrad works.
    With `adamw_mode` decay shrinks parameters (AdamW); else it is added to gradients. Without
    `fp32_optimizer_states` moments are kept in the parameter's dtype.
    """

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`, with the arguments in DeepSpeed's order. amsgrad works.

    With `adam_w_mode` decay shrinks parameters (AdamW); else it is added to gradients. torch has no
    Adam without `bias_correction`, and gradients are always dropped, not zeroed: False for that, or
    for `set_grad_none`, is a ConfigError.
    """

    # Adam is elementwise. Without this, a subclass of torch's would be tried out.
    needs_cut = "flat"

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError(
                "FusedAdam(bias_correction=False): expected True, as torch's fused Adam has no "
                "other; on the CPU, DeepSpeedCPUAdam has"
            )
        if not set_grad_none:
            raise ConfigError(
                "FusedAdam(set_grad_none=False): expected True, as gradients are always dropped, "
                "not zeroed; leave it out"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            fused=True,
            decoupled_weight_decay=bool(adam_w_mode),
        )


class DeepSpeedCPUAdagrad(_SteppedOnHost, CPUAdagrad):
    """`zero_offload.CPUAdagrad`, with the arguments in DeepSpeed's order, as `DeepSpeedCPUAdam`.

    Raises:
        ConfigError: amsgrad, which has no meaning for Adagrad.
    """

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError(
                "DeepSpeedCPUAdagrad(amsgrad=True): expected False, as Adagrad has no such "
                "variant; leave it out"
            )
        super().__init__(
            model_params,
            lr,
            weight_decay=weight_decay,
            eps=eps,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )


class DeepSpeedCPULion(_SteppedOnHost, CPULion):
    """`zero_offload.CPULion`, with the arguments in DeepSpeed's order, as `DeepSpeedCPUAdam`."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            weight_decay,
            masters=False,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )


def _make_adam(name: str, params: list[Any], **options: Any) -> torch.optim.Optimizer:
    is_decoupled = options.pop("adam_w_mode", True) or name == "adamw"
    if not options.pop("torch_adam", False):
        options.setdefault("weight_decay", 0.0)
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(params, **options)


def _make_mixed_adam(
    name: str, on_host: bool, params: list[Any], **options: Any
) -> torch.optim.Optimizer:
    """Make an Adam with moments in fp32, whatever the dtype of the parameters."""
    is_decoupled = options.pop("adam_w_mode", True) or name == "adamw"
    if on_host:
        return DeepSpeedCPUAdam(params, adamw_mode=is_decoupled, **options)
    options.setdefault("weight_decay", 0.0)
    return DeviceAdam(params, decoupled=is_decoupled, masters=False, **options)


# NOTE(halves): options that only one half knows are passed to it. Both know lr and weight_decay.
_MUON_OPTIONS: Final = {
    *("lr", "weight_decay", "momentum"),
    *("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
}
_ADAM_GROUP_OPTIONS: Final = {"lr", "weight_decay", "betas", "eps"}
_MUON_DEFAULTS: Final = {"lr": 0.02, "weight_decay": 0.0}
_ADAM_GROUP_DEFAULTS: Final = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}


def _make_muon(
    params: list[Any],
    *,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    adam_w_mode: bool = True,
    # Changes nothing: Adam is torch's in any case.
    torch_adam: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    adam = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    is_grouped = bool(params) and isinstance(params[0], dict)
    whole = [
        {**group, "params": members_of(group["params"])}
        for group in (params if is_grouped else [{"params": params}])
    ]
    made: list[torch.optim.Optimizer] = []
    for is_muon, kind, names, defaults, lr in (
        (True, torch.optim.Muon, _MUON_OPTIONS, _MUON_DEFAULTS, muon_lr),
        (False, adam, _ADAM_GROUP_OPTIONS, _ADAM_GROUP_DEFAULTS, adam_lr),
    ):
        groups = list(_half_of(whole, is_muon, (_MUON_OPTIONS | _ADAM_GROUP_OPTIONS) - names))
        mine = defaults | {key: value for key, value in options.items() if key in names}
        if groups:
            of_half: Any = mine if lr is None else mine | {"lr": lr}
            made.append(kind(groups, **of_half))
    if not made:
        raise ConfigError("optimizer.type: Muon got no parameters")
    return ChainedOptimizer(*made) if len(made) > 1 else made[0]


def members_of(params: Any) -> list[Any]:
    """Return the parameters of a param group as a list. Local."""
    return [params] if isinstance(params, Tensor) else list(params)


def _half_of(
    groups: Iterable[dict[str, Any]], is_muon: bool, dropped: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the param groups for one half of the chain: its own parameters and options."""
    for group in groups:
        mine = [each for each in group["params"] if _goes_to_muon(each) is is_muon]
        if mine:
            kept = {key: value for key, value in group.items() if key not in dropped}
            yield {**kept, "params": mine}


def _goes_to_muon(member: Any) -> bool:
    name, param = ("", member) if isinstance(member, Tensor) else member
    wanted = getattr(param, "use_muon", None)
    if wanted is None:
        return param.dim() == 2 and not any(part in name.lower() for part in ("embed", "lm_head"))
    if wanted and param.dim() != 2:
        raise ConfigError(
            f"optimizer.type: Muon updates matrices, got a parameter {name!r} of shape "
            f"{tuple(param.shape)} with use_muon = True; set it to False"
        )
    return bool(wanted)


def _options_of(kind: Callable[..., Any]) -> set[str]:
    return set(signature(kind).parameters) - {"params"}


_ADAM_OPTIONS: Final = {
    *_options_of(torch.optim.AdamW),
    *("adam_w_mode", "torch_adam", "bias_correction", "set_grad_none"),
}
_MIXED_OPTIONS: Final = {
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode"),
    *("bias_correction", "set_grad_none"),
}
# Name -> its options, and a function that makes the optimizer from parameters and options.
_MAKERS: Final[dict[str, tuple[set[str], Callable[..., torch.optim.Optimizer]]]] = {
    "adam": (_ADAM_OPTIONS, partial(_make_adam, "adam")),
    "adamw": (_ADAM_OPTIONS, partial(_make_adam, "adamw")),
    "sgd": (_options_of(torch.optim.SGD), torch.optim.SGD),
    "adagrad": (_options_of(torch.optim.Adagrad), torch.optim.Adagrad),
    "lion": (_options_of(Lion), Lion),
    "muon": (
        _MUON_OPTIONS | _ADAM_GROUP_OPTIONS | _options_of(_make_muon) - {"options"} | {"ns_method"},
        _make_muon,
    ),
}
