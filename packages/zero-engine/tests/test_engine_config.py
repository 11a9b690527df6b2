"""What becomes of DeepSpeed's keys: the configuration that an engine is told."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from zero_engine import ConfigError, ZeroConfig
from zero_engine.deepspeed import DynamicLossScale, EngineConfig, NamedSpec, StaticLossScale
from zero_partition import Precision

FP16: Final = Precision(params=torch.float16)
BF16: Final = Precision(params=torch.bfloat16)


def _read(raw: dict[str, Any], **options: Any) -> EngineConfig:
    return EngineConfig.from_deepspeed({"train_batch_size": 8, **raw}, **options)


def test_nothing_but_a_batch_size_is_plain_data_parallelism_with_clipping() -> None:
    """DeepSpeed's defaults hold for what is absent: stage 0, and a norm of 1."""
    expected = EngineConfig(
        zero=ZeroConfig(stage=0), max_norm=1.0, train_batch_size=8, micro_batch_size=8
    )

    assert _read({}) == expected


def test_a_file_says_what_its_dict_says(tmp_path: Path) -> None:
    """One configuration, two ways to hand it over."""
    raw = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw))

    assert EngineConfig.from_deepspeed(path) == EngineConfig.from_deepspeed(raw)
    assert EngineConfig.from_deepspeed(str(path)).sources == _read(raw).sources


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_says_what_its_dict_says(encode: Callable[[bytes], bytes]) -> None:
    """Launchers put a configuration on the command line, where a dict cannot stand."""
    # Question marks and angles give "/" and "+", or "_" and "-" in the other alphabet.
    raw = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "wandb": {"team": "a??>>>"}}
    encoded = encode(json.dumps(raw).encode()).decode()
    assert ("-" in encoded) == (encode is base64.urlsafe_b64encode)

    assert EngineConfig.from_deepspeed(encoded) == EngineConfig.from_deepspeed(raw)
    assert ZeroConfig.from_deepspeed(encoded) == ZeroConfig.from_deepspeed(raw)


def test_the_schedule_of_stage_3_is_that_of_the_file() -> None:
    """These five bound memory: a number that gets lost is memory that is not there."""
    config = _read(
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e9,
                "stage3_prefetch_bucket_size": 5e7,
                "stage3_max_reuse_distance": 10,
                "stage3_param_persistence_threshold": 20,
                "stage3_model_persistence_threshold": 30,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        }
    )

    assert config.zero == ZeroConfig(
        stage=3,
        max_live_numel=10**9,
        prefetch_numel=5 * 10**7,
        max_reuse_numel=10,
        small_param_numel=20,
        max_small_numel=30,
        state_dict="gather",
    )


def test_absent_keys_of_stage_3_keep_our_defaults() -> None:
    """Our defaults were measured; DeepSpeed's were chosen for other memory."""
    assert _read({"zero_optimization": {"stage": 3}}).zero == ZeroConfig(stage=3)


def test_bounds_that_bound_nothing_are_none() -> None:
    """DeepSpeed spells them sys.maxsize; and 0 live parameters still let a unit run."""
    settings = {
        "stage": 3,
        "stage3_model_persistence_threshold": sys.maxsize,
        "stage3_max_live_parameters": 0,
    }

    zero = _read({"zero_optimization": settings}).zero

    assert zero == ZeroConfig(stage=3, max_live_numel=1)


@pytest.mark.parametrize(
    ("raw", "precision", "loss_scale", "checks_overflow"),
    [
        ({}, None, None, False),
        ({"bf16": {"enabled": True}}, BF16, None, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, BF16, None, False),
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                }
            },
            Precision(params=torch.bfloat16, masters=None),
            None,
            True,
        ),
        (
            {"fp16": {"enabled": True}},
            FP16,
            DynamicLossScale(raises_at_minimum=True),
            True,
        ),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 8,
                    "loss_scale_window": 10,
                    "hysteresis": 3,
                    "consecutive_hysteresis": True,
                    "min_loss_scale": 4,
                }
            },
            FP16,
            DynamicLossScale(
                initial_power=8,
                window=10,
                hysteresis=3,
                consecutive_hysteresis=True,
                minimum=4.0,
                raises_at_minimum=True,
            ),
            True,
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, FP16, StaticLossScale(128.0), True),
        (
            {
                "bf16": {"enabled": True},
                "communication_data_type": "FP32",
                "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bfloat16"},
            },
            Precision(params=torch.bfloat16, reduce=torch.float32),
            None,
            True,
        ),
        # Without a 16-bit section a model trains as it is: no masters.
        (
            {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
            Precision(masters=None, reduce=torch.bfloat16),
            None,
            False,
        ),
        (
            {"gradient_predivide_factor": 4, "gradient_allreduce_op": "sum"},
            Precision(masters=None, predivide_factor=4.0, reduces_mean=False),
            None,
            False,
        ),
        ({"prescale_gradients": True}, Precision(masters=None, predivide_factor=None), None, False),
        # A section that is off means nothing, whatever stands in it.
        ({"fp16": {"enabled": False, "loss_scale": 128}}, None, None, False),
    ],
)
def test_dtypes_and_loss_scale_follow_the_sections(
    raw: dict[str, Any], precision: Any, loss_scale: Any, checks_overflow: bool
) -> None:
    """A run in another precision than the file's is another experiment."""
    config = _read(raw)

    assert config.zero.precision == precision
    assert config.loss_scale == loss_scale
    assert config.checks_overflow is checks_overflow


def test_autocast_in_fp16_scales_the_loss() -> None:
    """Its gradients underflow as those of fp16 parameters do."""
    off, bf16, fp16 = (
        _read({"torch_autocast": {"enabled": enabled, "dtype": dtype}})
        for enabled, dtype in ((False, "float16"), (True, "torch.bfloat16"), (True, "float16"))
    )

    assert (off.autocast_dtype, off.loss_scale) == (None, None)
    assert (bf16.autocast_dtype, bf16.loss_scale) == (torch.bfloat16, None)
    assert (fp16.autocast_dtype, fp16.checks_overflow) == (torch.float16, True)
    assert isinstance(fp16.loss_scale, DynamicLossScale)


def test_optimizer_and_scheduler_go_by_name_with_what_the_file_gives() -> None:
    """Arguments that the file leaves out are the optimizer's to choose."""
    config = _read(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 10}},
        }
    )

    assert config.optimizer == NamedSpec("adamw", {"lr": 1e-4, "betas": (0.9, 0.95)})
    assert config.scheduler == NamedSpec("WarmupLR", {"warmup_num_steps": 10})


def test_zero_config_reads_its_part_and_asks_for_no_batch_size() -> None:
    """A plain loop has a batch size of its own."""
    raw = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"params": {}},
    }

    zero = ZeroConfig.from_deepspeed(raw)

    assert zero == ZeroConfig(stage=2, precision=BF16)
    assert zero == _read(raw).zero


def test_a_file_is_checked_whole_for_zero_config_too() -> None:
    """What it would ignore in silence is what the rest of the file asks for."""
    with pytest.raises(ConfigError, match=r"^elasticity: "):
        ZeroConfig.from_deepspeed({"elasticity": {"enabled": True}})


def test_the_table_says_where_every_value_came_from() -> None:
    """The first thing to look at when two runs differ."""
    raw = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "bfloat16": {"enabled": "auto"},
        "fp16": {"enabled": False, "hysteresis": 4},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "wall_clock_breakdown": False,
    }
    with pytest.warns(UserWarning, match=r"zero_optimization\.overlap_comm: ") as caught:
        config = EngineConfig.from_deepspeed(raw, world_size=2, auto={"bf16.enabled": True})
    rows = {row.key: (row.value, row.origin, row.meaning) for row in config.sources}

    table = config.table()

    assert caught[0].filename == __file__
    assert rows["train_batch_size"] == (16, "file", "train_batch_size")
    assert rows["gradient_accumulation_steps"] == (2, "inferred", "accumulation_steps")
    assert rows["bf16.enabled"] == (True, "auto", "zero.precision")
    assert rows["gradient_clipping"] == (1.0, "default", "max_norm")
    assert rows["fp16.hysteresis"] == (4, "file", "not read: fp16.enabled is off")
    assert rows["zero_optimization.overlap_comm"][2].startswith("none: ")
    assert rows["wall_clock_breakdown"] == (False, "file", "monitoring")
    for row in config.sources:
        (line,) = (line for line in table.splitlines() if line.startswith(f"{row.key} "))
        assert line.split()[-1] == row.meaning.split()[-1]


def test_a_configuration_travels_and_compares() -> None:
    """It goes to other processes, and ranks compare what they were told."""
    config = _read({"optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "bf16": {"enabled": True}})

    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert hash(config) == hash(copy.deepcopy(config))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.max_norm = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero", None),
        ("loss_scale", 128.0),
        ("max_norm", float("nan")),
        ("train_batch_size", 0),
        ("micro_batch_size", True),
        ("accumulation_steps", None),
        ("optimizer", "adam"),
        ("checks_overflow", 1),
        ("autocast_dtype", "fp16"),
    ],
)
def test_fields_are_checked_when_they_are_given_directly(name: str, value: Any) -> None:
    """Not every configuration comes from a file."""
    fields = {"train_batch_size": 8, "micro_batch_size": 8, name: value}

    with pytest.raises(ConfigError, match=rf"^EngineConfig\.{name}: expected"):
        EngineConfig(**fields)


@pytest.mark.parametrize("world_size", [0, True, 2.0, None])
def test_world_size_is_checked(world_size: Any) -> None:
    """A batch divided by a wrong number of ranks is another batch."""
    with pytest.raises(ConfigError, match="world_size"):
        _read({}, world_size=world_size)


def test_what_accelerate_writes_is_read() -> None:
    """Its launcher makes the file for those who never saw one."""
    raw = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }

    with pytest.warns(UserWarning, match="zero_allow_untested_optimizer"):
        config = EngineConfig.from_deepspeed(
            raw, world_size=2, auto={"train_micro_batch_size_per_gpu": 3}
        )

    assert config == EngineConfig(
        zero=ZeroConfig(stage=2, precision=BF16),
        max_norm=1.0,
        train_batch_size=24,
        micro_batch_size=3,
        accumulation_steps=4,
        checks_overflow=True,
    )


# ---- As DeepSpeed reads it ----

MONITORING: Final = {
    "dump_state": [True, [1]],
    "comet": [{"enabled": True, "of_next_year": {}}, "on", True],
    "steps_per_print": [0, -5, "auto", "10", 2.5, True, [1], {}],
}


@pytest.mark.parametrize("index", range(8))
def test_what_is_only_shown_stops_no_training(index: int) -> None:
    """Numbers do not depend on it, and DeepSpeed's own logs are not worth a job."""
    asked = {path: values[index % len(values)] for path, values in MONITORING.items()}
    with pytest.warns(UserWarning, match="change nothing here") as caught:
        config = EngineConfig.from_deepspeed({"train_batch_size": 8, **asked})

    assert len(caught) == 1
    named = {line.split(":")[0].strip() for line in str(caught[0].message).splitlines()[1:]}
    assert named == asked.keys()
    assert config.steps_per_print is None
    assert config == _read({})


def test_monitoring_is_what_the_file_asks_for() -> None:
    """Templates have all sections, turned off; `_read` raises where anything is warned of."""
    off = {"tensorboard": {"enabled": False, "job_name": "x"}, "wandb": {}, "csv_monitor": None}
    asked = {"csv_monitor": {"enabled": True, "job_name": "x"}, "flops_profiler": {"detailed": 0}}

    assert _read({**off, "wall_clock_breakdown": 0, "dump_state": False}) == _read({})
    assert _read({**off, **asked, "memory_breakdown": True}).monitoring == {
        "csv_monitor.enabled": True,
        "csv_monitor.job_name": "x",
        "memory_breakdown": True,
    }
    for path, value in (("output_path", 3), ("of_next_year", {})):
        with pytest.raises(ConfigError, match=rf"^csv_monitor\.{path}: expected"):
            _read({"csv_monitor": {"enabled": True, path: value}})


def test_flags_may_be_zero_and_one() -> None:
    """As JSON written by hand, and by other languages, has them; DeepSpeed reads them so."""
    raw = {
        "bf16": {"enabled": 1},
        "fp16": {"enabled": 0},
        "dataloader_drop_last": 1.0,
        "optimizer": {"type": "sgd", "params": {"nesterov": 1}},
    }
    config = _read(raw)

    assert config.zero.precision == BF16
    assert config.drop_last is True
    assert config.optimizer is not None
    assert config.optimizer.params["nesterov"] is True


@pytest.mark.parametrize("stage", [0, 1])
def test_hysteresis_is_for_zero(stage: int) -> None:
    """DeepSpeed's optimizers of stage 0 halve the scale at once and never give up, and say so.

    Their rule (`runtime/fp16/fused_optimizer.py`) has neither a count nor an error at the minimum.
    """
    raw = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "hysteresis": 4},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale = EngineConfig.from_deepspeed(raw).loss_scale

    own = {} if stage else {"hysteresis": 1, "raises_at_minimum": False}
    assert scale == DynamicLossScale(**{"hysteresis": 4, "raises_at_minimum": True, **own})
    assert ["fp16.hysteresis: at stage 0" in str(each.message) for each in caught] == [True] * (
        1 - stage
    )


# ---- Batch sizes ----


SIZES: Final = (None, 1, 2, 3, 4, 6, 8, 12)
KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inference_agrees_with_trying_all(world_size: int) -> None:
    """A batch of another size trains another model, and nobody sees it."""
    for given in itertools.product(SIZES, repeat=3):
        expected = _by_trying(*given, world_size=world_size)

        raw = {key: size for key, size in zip(KEYS, given, strict=True) if size is not None}

        if expected is None:
            with pytest.raises(ConfigError, match=r"^train_batch_size: "):
                EngineConfig.from_deepspeed(raw, world_size=world_size)
        else:
            found = EngineConfig.from_deepspeed(raw, world_size=world_size)
            sizes = (found.train_batch_size, found.micro_batch_size, found.accumulation_steps)
            assert sizes == expected


def _by_trying(
    train: int | None, micro: int | None, steps: int | None, *, world_size: int
) -> tuple[int, int, int] | None:
    if train is None and micro is None:
        return None
    if steps is None and (train is None or micro is None):
        steps = 1  # where nothing says more
    fits = [
        (micro_ * steps_ * world_size, micro_, steps_)
        for micro_ in range(1, 13)
        for steps_ in range(1, 13)
        if micro in (None, micro_) and steps in (None, steps_)
    ]
    fits = [fit for fit in fits if train in (None, fit[0])]
    assert len(fits) <= 1
    return fits[0] if fits else None
