"""What a configuration says of dtypes and of the loss scale, and where it contradicts itself."""

from __future__ import annotations

import torch
from zero_partition import AS_IT_IS, Precision

from ._errors import ConfigError
from ._loss_scale import DynamicLossScale, StaticLossScale
from ._settings import Settings


def precision_of(settings: Settings) -> Precision | None:
    """Dtypes of training; None where the configuration leaves them as they are.

    Raises:
        ConfigError: Starts with the path of a key that contradicts another, and names that one.
    """
    value = settings.value
    _check_modes(settings)
    params = _mode(settings)
    asked = value("data_types.param_dtype")
    if asked not in (None, params or torch.float32):
        raise ConfigError(
            f"data_types.param_dtype: expected {params or torch.float32}, as fp16.enabled and "
            f"bf16.enabled say, got {asked}; leave it out, or turn the section of its dtype on"
        )
    # Without a 16-bit section a model trains as it is, whatever else is said of its gradients.
    masters = torch.float32 if params and not _has_16_bit_masters(settings) else None
    accumulate, kept = value("data_types.grad_accum_dtype"), masters or params or torch.float32
    if accumulate not in (None, kept):
        raise ConfigError(
            f"data_types.grad_accum_dtype: expected {kept}, in which the optimizer updates and "
            f"gradients are added up, got {accumulate}; leave it out"
        )
    precision = Precision(
        params=params or asked,
        masters=masters,
        reduce=value("communication_data_type"),
        predivide_factor=_predivide_factor(settings),
        reduces_mean=value("gradient_allreduce_op") == "mean",
    )
    return None if precision == AS_IT_IS else precision


def loss_scale_of(settings: Settings) -> StaticLossScale | DynamicLossScale | None:
    """How the loss is scaled: with fp16, and where autocast computes in fp16."""
    value = settings.value
    if value("fp16.enabled"):
        scale = value("fp16.loss_scale")
        if scale != 0:
            return StaticLossScale(float(scale))
        has_patience = settings.idle(settings.by_path["fp16.hysteresis"]) is None
        return DynamicLossScale(
            initial_power=value("fp16.initial_scale_power"),
            window=value("fp16.loss_scale_window"),
            hysteresis=value("fp16.hysteresis") if has_patience else 1,
            consecutive_hysteresis=value("fp16.consecutive_hysteresis") and has_patience,
            minimum=float(value("fp16.min_loss_scale")),
            raises_at_minimum=has_patience,
        )
    if autocast_dtype_of(settings) is torch.float16:
        # What torch.amp.GradScaler starts with, which DeepSpeed uses there.
        return DynamicLossScale(window=2000, hysteresis=1)
    return None


def state_dtype_of(settings: Settings) -> torch.dtype | None:
    """Of moments, where 16-bit parameters have no masters."""
    if not _has_16_bit_masters(settings):
        return None
    return torch.bfloat16 if settings.value("bf16.bf16_optimizer_states") else torch.float32


def autocast_dtype_of(settings: Settings) -> torch.dtype | None:
    """What torch.autocast computes in; None where it is off."""
    if not settings.value("torch_autocast.enabled"):
        return None
    return settings.value("torch_autocast.dtype") or torch.bfloat16


def checks_overflow_of(settings: Settings) -> bool:
    """Whether steps with inf or nan in a gradient are skipped: where the mode is a 16-bit one."""
    if settings.value("bf16.enabled"):
        return settings.value("bf16.check_grad_overflow")
    return loss_scale_of(settings) is not None


def _mode(settings: Settings) -> torch.dtype | None:
    if settings.value("fp16.enabled"):
        return torch.float16
    return torch.bfloat16 if settings.value("bf16.enabled") else None


def _predivide_factor(settings: Settings) -> float | None:
    factor = settings.value("gradient_predivide_factor")
    if not settings.value("prescale_gradients"):
        return float(factor)
    if factor != 1.0:
        raise ConfigError(
            "gradient_predivide_factor: expected 1.0 with prescale_gradients, which divides by the "
            f"world size itself, got {factor}; leave one of them out"
        )
    if settings.value("gradient_allreduce_op") != "mean":
        raise ConfigError(
            'prescale_gradients: expected it with gradient_allreduce_op "mean", whose division it '
            'does first, got "sum"; leave one of them out'
        )
    return None


def _has_16_bit_masters(settings: Settings) -> bool:
    return settings.value("bf16.enabled") and settings.value("bf16.bf16_master_weights_and_grads")


def _check_modes(settings: Settings) -> None:
    value = settings.value
    is_fp16, is_bf16 = value("fp16.enabled"), value("bf16.enabled")
    if is_fp16 and is_bf16:
        raise ConfigError(
            "fp16.enabled: expected at most one of fp16.enabled and bf16.enabled, got both; turn "
            "one off"
        )
    # Read by hand: with fp16 off, "auto" there means nothing.
    scale = settings.by_path["fp16.loss_scale"].value
    if is_bf16 and isinstance(scale, int | float) and scale != 0:
        raise ConfigError(
            f"fp16.loss_scale: expected none with bf16.enabled, as bf16 has the range of fp32, got "
            f"{scale}; leave it out"
        )
    if is_fp16 and value("fp16.min_loss_scale") > 2.0 ** value("fp16.initial_scale_power"):
        raise ConfigError(
            "fp16.min_loss_scale: expected at most the first scale, two to the power of "
            f"fp16.initial_scale_power ({value('fp16.initial_scale_power')}), got "
            f"{value('fp16.min_loss_scale')}"
        )
    masters, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if is_bf16 and value(states) and not value(masters):
        raise ConfigError(
            f"{states}: expected it with {masters}, as an optimizer keeps no less precise state "
            "than what it updates, got true and false; turn both on, or both off"
        )
