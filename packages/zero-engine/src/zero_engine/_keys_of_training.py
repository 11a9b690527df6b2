"""Batch sizes, accumulation, clipping, and the sections `optimizer` and `scheduler`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from ._file_key import Becomes, CannotMatter, FileKey, NotBuilt, section
from ._value_kinds import (
    COUNT,
    FLAG,
    POSITIVE,
    ValueKind,
    choice,
    either,
    integer,
    number,
    several,
)

OPTIMIZERS: Final = ("adam", "adamw", "sgd", "adagrad", "lion", "muon")
SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


def _read_interval(value: Any) -> int | None:
    if isinstance(value, float) and value == math.inf:  # for never, as accelerate writes it
        return None
    try:
        return POSITIVE.read(value)
    except ValueError:
        return 0  # training goes on without


def _idle_interval(value: Callable[[str], Any]) -> str | None:
    is_none = value("steps_per_print") == 0
    return "it is no number of steps, so that nothing is printed" if is_none else None


_OPTIMIZER: Final = Becomes("optimizer")
_SCHEDULER: Final = Becomes("scheduler")
_AT_LEAST_0: Final = number(0)
_RATE: Final = either(_AT_LEAST_0, several(_AT_LEAST_0))  # of all param groups, or of each
_SHARE: Final = number(0, 1)
_BETA: Final = number(0, below=1)
_16_BIT_STATE: Final = NotBuilt("state has the dtype of the masters; leave it at true")
_INTERVAL: Final = ValueKind("a number of steps", _read_interval)
_FACTOR: Final = number(2.0**-126, below=2.0**127)  # its inverse is in the range of fp32 too


def _optimizer_params(**kinds: ValueKind) -> tuple[FileKey, ...]:
    return tuple(FileKey(f"params.{name}", kind, None, _OPTIMIZER) for name, kind in kinds.items())


def _scheduler_params(**kinds: ValueKind) -> tuple[FileKey, ...]:
    return tuple(FileKey(f"params.{name}", kind, None, _SCHEDULER) for name, kind in kinds.items())


TRAINING_KEYS: Final = (
    FileKey("train_batch_size", POSITIVE, None, Becomes("train_batch_size")),
    FileKey("train_micro_batch_size_per_gpu", POSITIVE, None, Becomes("micro_batch_size")),
    FileKey("gradient_accumulation_steps", POSITIVE, None, Becomes("accumulation_steps")),
    FileKey("managed_gradient_accumulation", FLAG, True, Becomes("manages_accumulation")),
    FileKey("gradient_clipping", _AT_LEAST_0, 1.0, Becomes("max_norm", float)),
    FileKey("prescale_gradients", FLAG, False, Becomes("zero.precision")),
    FileKey("gradient_predivide_factor", _FACTOR, 1.0, Becomes("zero.precision")),
    FileKey("gradient_allreduce_op", choice("mean", "sum"), "mean", Becomes("zero.precision")),
    FileKey("sparse_gradients", FLAG, False, NotBuilt("gradients of embeddings are dense")),
    FileKey(
        "steps_per_print", _INTERVAL, None, Becomes("steps_per_print"), (0,), idle=_idle_interval
    ),
    FileKey("dataloader_drop_last", FLAG, False, Becomes("drop_last")),
    FileKey(
        "zero_allow_untested_optimizer",
        FLAG,
        False,
        CannotMatter("any torch optimizer is taken; what it needs of its shards is found by trial"),
    ),
    FileKey(
        "zero_force_ds_cpu_optimizer",
        FLAG,
        True,
        CannotMatter("whatever optimizer is given steps where its state rests"),
    ),
    *section(
        "optimizer",
        FileKey("type", choice(*OPTIMIZERS), None, _OPTIMIZER),
        FileKey("legacy_fusion", FLAG, False, CannotMatter("there is no fused LAMB")),
        FileKey(
            "params.max_grad_norm",
            _AT_LEAST_0,
            None,
            NotBuilt("it is called gradient_clipping"),
            neutral=(0,),
        ),
        FileKey("params.fp32_optimizer_states", FLAG, True, _16_BIT_STATE),
        FileKey("params.per_head_muon", FLAG, False, NotBuilt("Muon takes whole matrices")),
        *_optimizer_params(
            set_grad_none=FLAG,
            lr=_AT_LEAST_0,
            betas=several(_BETA, exactly=2),
            eps=_AT_LEAST_0,
            weight_decay=_AT_LEAST_0,
            bias_correction=FLAG,
            amsgrad=FLAG,
            adam_w_mode=FLAG,
            torch_adam=FLAG,
            decoupled_weight_decay=FLAG,
            momentum=_AT_LEAST_0,
            dampening=number(),
            nesterov=FLAG,
            lr_decay=_AT_LEAST_0,
            initial_accumulator_value=_AT_LEAST_0,
            muon_lr=_AT_LEAST_0,
            adam_lr=_AT_LEAST_0,
            ns_method=choice("standard", "gram"),
            ns_coefficients=several(number(), exactly=3),
            ns_steps=POSITIVE,
            adjust_lr_fn=choice("original", "match_rms_adamw"),
            maximize=FLAG,
            foreach=FLAG,
            fused=FLAG,
            capturable=FLAG,
            differentiable=FLAG,
        ),
    ),
    *section(
        "scheduler",
        FileKey("type", choice(*SCHEDULERS), None, _SCHEDULER),
        *_scheduler_params(
            warmup_min_lr=_RATE,
            warmup_max_lr=_RATE,
            warmup_num_steps=COUNT,
            warmup_type=choice("log", "linear"),
            total_num_steps=POSITIVE,
            warmup_min_ratio=_SHARE,
            cos_min_ratio=_SHARE,
            cycle_min_lr=_RATE,
            cycle_max_lr=_RATE,
            decay_lr_rate=_AT_LEAST_0,
            cycle_first_step_size=POSITIVE,
            cycle_second_step_size=POSITIVE,
            cycle_first_stair_count=COUNT,
            cycle_second_stair_count=COUNT,
            decay_step_size=COUNT,
            cycle_momentum=FLAG,
            cycle_min_mom=_BETA,
            cycle_max_mom=_BETA,
            decay_mom_rate=_AT_LEAST_0,
            lr_range_test_min_lr=_RATE,
            lr_range_test_step_size=POSITIVE,
            lr_range_test_step_rate=_AT_LEAST_0,
            lr_range_test_staircase=FLAG,
            last_batch_iteration=integer(-1),
        ),
    ),
)
