"""The sections fp16, bf16, torch_autocast, amp and data_types, and what gradients travel in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ._file_key import Becomes, CannotMatter, FileKey, NotBuilt, section
from ._value_kinds import (
    DTYPE,
    FLAG,
    NAMES,
    OBJECT,
    POSITIVE,
    TEXT,
    ValueKind,
    choice,
    either,
    integer,
    number,
)

_PRECISION: Final = Becomes("zero.precision")
_SCALE: Final = Becomes("loss_scale")
_ANY_SCALE: Final = either(
    number(2.0**-126, below=2.0**128), integer(0, 0)
)  # the loss is scaled in fp32
_LOSS_SCALE: Final = ValueKind(
    "0, for a scale that changes by itself, or a scale in the range of fp32", _ANY_SCALE.read
)


def _idle_without_zero(value: Callable[[str], Any]) -> str | None:
    if value("zero_optimization.stage") != 0 or value("optimizer.type") is None:
        return None
    return "at stage 0, DeepSpeed's own optimizers halve the scale at every overflow"


PRECISION_KEYS: Final = (
    *section(
        "fp16",
        FileKey("enabled", FLAG, False, _PRECISION),
        FileKey(
            "auto_cast",
            FLAG,
            False,
            NotBuilt("give the model fp16 inputs, or turn torch_autocast on in place of fp16"),
        ),
        FileKey("loss_scale", _LOSS_SCALE, 0, _SCALE),
        FileKey("initial_scale_power", integer(0, 127), 16, _SCALE),
        FileKey("loss_scale_window", POSITIVE, 1000, _SCALE),
        FileKey("hysteresis", POSITIVE, 2, _SCALE, idle=_idle_without_zero),
        FileKey("consecutive_hysteresis", FLAG, False, _SCALE, idle=_idle_without_zero),
        FileKey("min_loss_scale", number(0, below=2.0**128), 1, _SCALE),
        FileKey(
            "fp16_master_weights_and_grads",
            FLAG,
            False,
            NotBuilt("master weights are fp32 with fp16; DeepSpeed has it with CPU offload only"),
        ),
        gate="enabled",
    ),
    *section(
        "bf16",
        FileKey("enabled", FLAG, False, _PRECISION),
        FileKey(
            "immediate_grad_update",
            FLAG,
            False,
            CannotMatter("gradients are accumulated as they arrive"),
        ),
        FileKey("check_grad_overflow", FLAG, True, Becomes("checks_overflow")),
        FileKey("bf16_master_weights_and_grads", FLAG, False, _PRECISION),
        FileKey("bf16_optimizer_states", FLAG, False, _PRECISION),
        gate="enabled",
        alias="bfloat16",
    ),
    *section(
        "torch_autocast",
        FileKey("enabled", FLAG, False, Becomes("autocast_dtype")),
        FileKey("dtype", DTYPE, None, Becomes("autocast_dtype")),
        FileKey(
            "lower_precision_safe_modules",
            NAMES,
            None,
            NotBuilt("torch.autocast chooses by operation; leave it out"),
        ),
        gate="enabled",
    ),
    *section(
        "amp",
        FileKey("enabled", FLAG, False, NotBuilt("apex is no more; use torch_autocast")),
        FileKey("opt_level", TEXT, None, NotBuilt("apex is no more; use torch_autocast")),
        FileKey(
            "loss_scale",
            either(number(), TEXT),
            None,
            NotBuilt("apex is no more; use torch_autocast"),
        ),
        gate="enabled",
    ),
    *section(
        "data_types",
        FileKey("grad_accum_dtype", DTYPE, None, Becomes("zero.precision")),
        FileKey("param_dtype", DTYPE, None, Becomes("zero.precision")),
        FileKey(
            "buffer_dtype", DTYPE, None, NotBuilt("buffers keep their dtype; cast them yourself")
        ),
        FileKey(
            "keep_in_fp32_modules",
            either(choice("auto"), NAMES),
            (),
            NotBuilt("all parameters of a model get one dtype; give an empty list"),
        ),
    ),
    FileKey("communication_data_type", DTYPE, None, _PRECISION),
    FileKey(
        "seq_parallel_communication_data_type",
        DTYPE,
        None,
        CannotMatter("there is no sequence-parallel group"),
    ),
    FileKey("weight_quantization", OBJECT, None, NotBuilt("quantized weights"), neutral=({},)),
    FileKey("quantize_training", OBJECT, None, NotBuilt("quantized training"), neutral=({},)),
)
