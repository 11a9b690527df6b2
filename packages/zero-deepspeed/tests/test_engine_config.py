"""What DeepSpeed's keys become: the configuration that an engine is told."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from torch import nn
from zero_deepspeed.engine_config import NamedOptimizer, NamedScheduler
from zero_deepspeed.leaf_modules import LEAF_CLASSES
from zero_deepspeed.monitor import Monitoring
from zero_engine import ConfigError, Loco, Offload, Wire, ZeroConfig
from zero_engine.engine import DynamicLossScale, EngineConfig, StaticLossScale
from zero_offload import DiskSettings
from zero_partition import ModulePrecision, Precision

FP16: Final = Precision(params=torch.float16)
BF16: Final = Precision(params=torch.bfloat16)
SCALED: Final = {"precision": FP16, "checks_overflow": True, "needs_scaled_loss": True}

OPTIMIZER: Final = ".offload_optimizer"
PARAM: Final = ".offload_param"
FOLDER: Final = Path("/local")
STATE_ON_CPU: Final = {f"{OPTIMIZER}.device": "cpu"}
STATE_ON_DISK: Final = {f"{OPTIMIZER}.device": "nvme", f"{OPTIMIZER}.nvme_path": "/local"}
PARAMS_ON_CPU: Final = {f"{PARAM}.device": "cpu"}
PARAMS_ON_DISK: Final = {f"{PARAM}.device": "nvme", f"{PARAM}.nvme_path": "/local"}


def _on_host(**fields: Any) -> dict[str, Offload]:
    return {"offload": Offload(optimizer="host", **fields)}


def _params_on_disk(**disk: Any) -> dict[str, Offload]:
    return {
        "offload": Offload(params="disk", path=FOLDER, disk=DiskSettings(**disk) if disk else None)
    }


def _wire(**fields: Any) -> dict[str, Wire]:
    return {"wire": Wire(**fields)}


def _travelling(dtype: torch.dtype, *kinds: type[nn.Module]) -> dict[str, Precision]:
    kinds = kinds or (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    keep = {kind: ModulePrecision(travel=dtype) for kind in kinds}
    return {"precision": Precision(masters=None, keep=keep)}


MEANINGS: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    # What is off means nothing, whatever else stands in its section, nor does a null.
    ({"fp16.enabled": False, "fp16.loss_scale": 128}, {}),
    ({"torch_autocast.enabled": False, "torch_autocast.dtype": "float16"}, {}),
    (
        {f"{OPTIMIZER}.device": "none", f"{OPTIMIZER}.pin_memory": False, f"{OPTIMIZER}.ratio": 0.1}
        | {f"{PARAM}.device": "none", ".cpu_offload": None, ".sub_group_size": 1000},
        {},
    ),
    (
        {".zero_hpz_partition_size": 1, ".mics_shard_size": -1, ".zero_quantized_weights": False}
        | {".zero_quantized_gradients": False, ".zeropp_loco_param": {"err_beta": 0.5}},
        {},
    ),
    # The schedule of stage 3. Without bounds our defaults hold, and what bounds nothing is absent.
    (
        {
            ".stage3_max_live_parameters": 1e9,
            ".stage3_prefetch_bucket_size": 5e7,
            ".stage3_max_reuse_distance": 10,
            ".stage3_param_persistence_threshold": 20,
            ".stage3_model_persistence_threshold": 30,
            ".stage3_gather_16bit_weights_on_model_save": True,
        },
        {
            "max_live_numel": 10**9,
            "prefetch_numel": 5 * 10**7,
            "max_reuse_numel": 10,
            "small_param_numel": 20,
            "max_small_numel": 30,
            "state_dict": "gather",
        },
    ),
    (
        {".stage3_model_persistence_threshold": sys.maxsize, ".stage3_max_live_parameters": 0},
        {"max_live_numel": 1},
    ),
    # Dtypes and the scale of the loss.
    ({"bf16.enabled": True}, {"precision": BF16, "checks_overflow": True}),
    ({"bf16.enabled": True, "bf16.check_grad_overflow": False}, {"precision": BF16}),
    (
        {
            "bf16.enabled": True,
            "bf16.bf16_master_weights_and_grads": True,
            "bf16.bf16_optimizer_states": True,
        },
        {
            "precision": Precision(params=torch.bfloat16, masters=None),
            "checks_overflow": True,
            "state_dtype": torch.bfloat16,
        },
    ),
    ({"fp16.enabled": True}, SCALED | {"loss_scale": DynamicLossScale(raises_at_minimum=True)}),
    (
        {
            "fp16.enabled": True,
            "fp16.loss_scale": 0,
            "fp16.initial_scale_power": 8,
            "fp16.loss_scale_window": 10,
            "fp16.hysteresis": 3,
            "fp16.consecutive_hysteresis": True,
            "fp16.min_loss_scale": 4,
        },
        SCALED
        | {
            "loss_scale": DynamicLossScale(
                initial_power=8,
                window=10,
                hysteresis=3,
                consecutive_hysteresis=True,
                minimum=4.0,
                raises_at_minimum=True,
            )
        },
    ),
    (
        {"fp16.enabled": True, "fp16.loss_scale": 128},
        {"precision": FP16, "checks_overflow": True, "loss_scale": StaticLossScale(128.0)},
    ),
    (
        {
            "bf16.enabled": True,
            "communication_data_type": "FP32",
            "data_types.grad_accum_dtype": "fp32",
            "data_types.param_dtype": "bfloat16",
        },
        {
            "precision": Precision(params=torch.bfloat16, reduce=torch.float32),
            "checks_overflow": True,
        },
    ),
    # Without a 16-bit section a model trains as it is: no masters.
    (
        {"communication_data_type": "bf16", "data_types.grad_accum_dtype": "fp32"},
        {"precision": Precision(masters=None, reduce=torch.bfloat16)},
    ),
    (
        {"gradient_predivide_factor": 4, "gradient_allreduce_op": "sum"},
        {"precision": Precision(masters=None, predivide_factor=4.0, reduces_mean=False)},
    ),
    ({"prescale_gradients": True}, {"precision": Precision(masters=None, predivide_factor=None)}),
    (
        {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.bfloat16"},
        _travelling(torch.bfloat16) | {"autocast_dtype": torch.bfloat16},
    ),
    (
        {
            "torch_autocast.enabled": True,
            "torch_autocast.lower_precision_safe_modules": ["torch.nn.Embedding"],
        },
        _travelling(torch.bfloat16, nn.Embedding) | {"autocast_dtype": torch.bfloat16},
    ),
    (  # gradients underflow as those of fp16 parameters do: scaled as GradScaler does
        {"torch_autocast.enabled": True, "torch_autocast.dtype": "float16"},
        _travelling(torch.float16)
        | {
            "autocast_dtype": torch.float16,
            "loss_scale": DynamicLossScale(window=2000, hysteresis=1),
            "checks_overflow": True,
            "needs_scaled_loss": True,
        },
    ),
    # Optimizer and scheduler by name, with what the file gives; and clipping, 1 by default.
    (
        {"optimizer.type": "AdamW", "optimizer.params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        {"optimizer": NamedOptimizer("adamw", {"lr": 1e-4, "betas": (0.9, 0.95)})},
    ),
    (
        {"scheduler.type": "warmuplr", "scheduler.params.warmup_num_steps": 10},
        {"scheduler": NamedScheduler("WarmupLR", {"warmup_num_steps": 10})},
    ),
    ({"gradient_clipping": 0.5, "steps_per_print": float("inf")}, {"max_norm": 0.5}),
    # Where things rest.
    (STATE_ON_CPU, _on_host()),
    (STATE_ON_CPU | {".stage": 1}, _on_host()),
    (STATE_ON_DISK, {"offload": Offload(optimizer="disk", path=FOLDER)}),
    (PARAMS_ON_DISK, _params_on_disk()),
    (
        STATE_ON_DISK | PARAMS_ON_CPU,
        {"offload": Offload(optimizer="disk", params="host", path=FOLDER)},
    ),
    (
        {f"{OPTIMIZER}.device": "nvme"} | PARAMS_ON_DISK,  # one folder for both
        {"offload": Offload(optimizer="disk", params="disk", path=FOLDER)},
    ),
    (
        STATE_ON_CPU | {f"{OPTIMIZER}.nvme_path": "/a"} | PARAMS_ON_DISK,
        {"offload": Offload(optimizer="host", params="disk", path=FOLDER)},
    ),
    ({".stage": 2, f"{PARAM}.device": "auto", f"{PARAM}.pin_memory": False}, {}),
    (  # as Lightning's, which spells out NVMe, and Accelerate's, which writes nulls
        STATE_ON_CPU
        | PARAMS_ON_CPU
        | {f"{OPTIMIZER}.nvme_path": "/local", f"{PARAM}.nvme_path": None, ".cpu_offload": None}
        | {f"{PARAM}.max_in_cpu": 1e9, ".overlap_comm": True, "aio.queue_depth": 16}
        | {".stage3_max_live_parameters": None, "zero_allow_untested_optimizer": True},
        {"offload": Offload(optimizer="host", params="host")},
    ),
    ({".cpu_offload": True, ".cpu_offload_use_pin_memory": False}, _on_host(pin=False)),
    (
        {".cpu_offload": True, ".cpu_offload_param": True},
        {"offload": Offload(optimizer="host", params="host")},
    ),
    (STATE_ON_CPU | {f"{OPTIMIZER}.pin_memory": False}, _on_host(pin=False)),
    (STATE_ON_CPU | {f"{OPTIMIZER}.ratio": 0.3}, _on_host(fraction=0.3)),
    (
        PARAMS_ON_DISK | {f"{PARAM}.max_in_cpu": 1e9},
        {"offload": Offload(params="disk", path=FOLDER, max_host_numel=10**9)},
    ),
    # Elements of a sub-group, of 12 bytes each; but neither 8 nor, by habit, a billion of them.
    (STATE_ON_CPU | {".sub_group_size": 1e6}, _on_host(subgroup_bytes=12 * 10**6)),
    (STATE_ON_CPU | {".sub_group_size": 8}, _on_host(subgroup_bytes=2**20)),
    (STATE_ON_CPU | {".sub_group_size": 1e9}, _on_host(subgroup_bytes=64 * 2**20)),
    # How a disk is used: in whole pages, and no more than its requests may have.
    (
        PARAMS_ON_DISK | {"aio.block_size": 2**20, "aio.queue_depth": 16},
        _params_on_disk(block_bytes=2**20, queue_depth=16),
    ),
    (PARAMS_ON_DISK | {"aio.thread_count": 4}, _params_on_disk(num_workers=4)),
    (PARAMS_ON_DISK | {"aio.block_size": 4097}, _params_on_disk(block_bytes=8192)),
    (PARAMS_ON_DISK | {"aio.block_size": 1e12}, _params_on_disk(block_bytes=2**30)),
    # ZeRO++ and MiCS: over a replica of one rank, nothing is sharded.
    ({".zero_hpz_partition_size": 8}, _wire(levels=8, secondary=True)),
    ({".mics_shard_size": 1}, _wire(levels=1, replicas=True)),
    (
        {
            ".mics_shard_size": 8,
            ".mics_hierarchical_params_gather": True,
            ".zero_hpz_partition_size": 1,
            ".zero_quantized_gradients": True,
        },
        _wire(levels=8, replicas=True, gradients="int4"),
    ),
    (
        {
            ".zero_quantized_weights": True,
            ".zero_hpz_partition_size": 8,
            ".zero_quantized_gradients": True,
        },
        _wire(params="int8", gradients="int4", levels=8, secondary=True),
    ),
    ({".zero_quantized_nontrainable_weights": True}, _wire(frozen="int8")),
    (
        {".zero_quantized_gradients": True, ".zeropp_loco_param": {"err_beta": 0.5, "reset_T": 16}},
        _wire(gradients="int4", loco=Loco(err_beta=0.5, reset_T=16)),
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("keys", "expected"), MEANINGS, ids=[f"{i}-{min(keys)}" for i, (keys, _) in enumerate(MEANINGS)]
)
def test_a_key_means_what_deepspeed_says_of_it(nested, keys: Any, expected: Any) -> None:
    """At stage 3; beside that it changes nothing, for an engine and for a plain loop alike."""
    stage = keys.get(".stage", 3)
    raw = nested({"train_batch_size": 8, ".stage": stage, **keys})

    found = EngineConfig.from_deepspeed(raw)

    engine = {name: value for name, value in expected.items() if hasattr(found, name)}
    zero = {name: value for name, value in expected.items() if name not in engine}
    plain = EngineConfig.from_deepspeed(nested({"train_batch_size": 8, ".stage": stage}))
    assert plain.zero == ZeroConfig(stage)
    assert found == attrs.evolve(plain, **engine, zero=attrs.evolve(plain.zero, **zero))
    raw.pop("train_batch_size")
    assert ZeroConfig.from_deepspeed(raw) == found.zero


def test_without_a_section_it_is_plain_data_parallelism_with_clipping() -> None:
    """DeepSpeed's defaults hold for what is absent: stage 0, and a norm of 1."""
    expected = EngineConfig(
        zero=ZeroConfig(0), max_norm=1.0, train_batch_size=8, micro_batch_size=8
    )

    assert EngineConfig.from_deepspeed({"train_batch_size": 8}) == expected


def test_flags_may_be_zero_and_one() -> None:
    """As JSON written by hand, and by other languages, has them; DeepSpeed reads them so."""
    options = {"type": "sgd", "params": {"nesterov": 1}}
    raw = {"train_batch_size": 8, "bf16": {"enabled": 1}, "fp16": {"enabled": 0}}
    config = EngineConfig.from_deepspeed(raw | {"dataloader_drop_last": 1.0, "optimizer": options})

    assert config.zero.precision == BF16
    assert config.drop_last is True
    assert config.optimizer is not None and config.optimizer.params["nesterov"] is True


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_file_and_base64_say_what_their_dict_says(tmp_path: Path, encode: Any) -> None:
    """Launchers put a configuration on the command line, where a dict cannot stand."""
    # Question marks and angles give "/" and "+", or "_" and "-" in the other alphabet.
    raw = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "wandb": {"team": "a??>>>"}}
    (path := tmp_path / "ds.json").write_text(json.dumps(raw))
    encoded = encode(json.dumps(raw).encode()).decode()
    assert ("-" in encoded) == (encode is base64.urlsafe_b64encode)

    expected = EngineConfig.from_deepspeed(raw)
    for source in (path, str(path), encoded):
        found = EngineConfig.from_deepspeed(source)
        assert (found, found.sources) == (expected, expected.sources)
        assert ZeroConfig.from_deepspeed(source) == expected.zero


def test_the_table_says_where_every_value_came_from() -> None:
    """The first thing to look at when two runs differ."""
    offload = {"device": "cpu", "nvme_path": "/a", "ratio": 0.5}
    raw = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "bfloat16": {"enabled": "auto"},
        "fp16": {"enabled": False, "hysteresis": 4},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": offload},
        "wall_clock_breakdown": False,
    }
    with pytest.warns(UserWarning, match=r"here: zero_optimization\.overlap_comm$") as caught:
        config = EngineConfig.from_deepspeed(raw, world_size=2, auto={"bf16.enabled": True})
    rows = {row.key: (row.value, row.origin, row.meaning) for row in config.sources}

    table = config.table()

    assert max(map(len, table.splitlines())) <= 100
    assert caught[0].filename == __file__
    assert rows["train_batch_size"] == (16, "file", "train_batch_size")
    assert rows["gradient_accumulation_steps"] == (2, "inferred", "accumulation_steps")
    assert rows["bf16.enabled"] == (True, "auto", "zero.precision")
    assert rows["gradient_clipping"] == (1.0, "default", "max_norm")
    assert rows["fp16.hysteresis"] == (4, "file", "not read: fp16.enabled is off")
    assert rows["zero_optimization.overlap_comm"] == ("True", "file", "none")
    assert rows["wall_clock_breakdown"] == (False, "file", "monitoring")
    section = "zero_optimization.offload_optimizer"
    assert rows[f"{section}.ratio"] == (0.5, "file", "zero.offload.fraction")
    assert rows[f"{section}.nvme_path"][2] == f"not read: {section}.device is not 'nvme'"
    lines = _lines_of(table)
    for row in config.sources:
        assert row.meaning.split()[0] in lines[row.key].split()


def _lines_of(table: str) -> dict[str, str]:
    """Return the line of each key; those of a section follow its name."""
    found, section = dict[str, str](), ""
    for line in table.splitlines()[2:]:
        if line.startswith(" "):
            continue  # more of a meaning
        key, *others = line.split()
        section = section if others else key
        if others:
            found[section + key if key.startswith(".") else key] = line
    return found


def test_a_default_list_is_one_line_of_the_table_and_a_given_one_is_whole() -> None:
    """Class names that nobody wrote push away what somebody did."""

    def lines(**leaf_module: list[str]) -> list[str]:
        zero = {"stage": 3, "leaf_module": leaf_module}
        raw = {"train_batch_size": 1, "zero_optimization": zero}
        table = EngineConfig.from_deepspeed(raw).table()
        assert max(map(len, table.splitlines())) <= 100
        return [line for line in table.splitlines() if line.startswith(".leaf_module.classes")]

    (line,) = lines()
    num_names = len(LEAF_CLASSES)
    assert line.split()[1:] == [str(num_names), "names", "default", "leaf_modules"]
    (line,) = lines(classes=["A", "B", "C"])
    assert "names" not in line and "file" in line


def test_a_configuration_travels_and_compares(nested) -> None:
    """It goes to other processes, and ranks compare what they were told."""
    keys = {"train_batch_size": 8, ".stage": 3, **PARAMS_ON_DISK, "optimizer.params.lr": 0.1}
    config = EngineConfig.from_deepspeed(nested(keys | {"optimizer.type": "sgd"}))

    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert hash(config) == hash(copy.deepcopy(config))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.max_norm = 2.0  # type: ignore[misc]


def test_fields_are_checked_when_they_are_given_directly() -> None:
    """Not every configuration comes from a file."""
    wrong = {"zero": None, "loss_scale": 128.0, "max_norm": float("nan"), "train_batch_size": 0}
    wrong |= {"micro_batch_size": True, "accumulation_steps": None, "optimizer": "adam"}
    for name, value in {**wrong, "checks_overflow": 1, "autocast_dtype": "fp16"}.items():
        with pytest.raises(ConfigError, match=rf"^EngineConfig\.{name}: expected"):
            EngineConfig(**{"train_batch_size": 8, "micro_batch_size": 8, name: value})


# ---- As DeepSpeed reads it ----


def test_what_is_only_shown_stops_no_training() -> None:
    """Numbers do not depend on it, and DeepSpeed's own logs are not worth a job."""
    plain = EngineConfig.from_deepspeed({"train_batch_size": 8})
    for path, values in {
        "dump_state": [True, [1]],
        "comet": [{"enabled": True, "of_next_year": {}}, "on", True],
        "steps_per_print": [0, -5, "auto", "10", 2.5, True, [1], {}],
    }.items():
        for value in values:
            with pytest.warns(UserWarning, match=rf"change nothing here: {path}$"):
                found = EngineConfig.from_deepspeed({"train_batch_size": 8, path: value})
            assert found == plain


def test_monitoring_is_what_the_file_asks_for() -> None:
    """Templates have all sections, turned off: without a warning, which would be an error here."""
    off = {"tensorboard": {"enabled": False, "job_name": "x"}, "wandb": {}, "dump_state": False}
    asked = {"csv_monitor": {"enabled": True, "job_name": "x"}, "flops_profiler": {"detailed": 0}}
    base = {"train_batch_size": 8, "wall_clock_breakdown": 0, **off}

    assert EngineConfig.from_deepspeed(base | {"csv_monitor": None}).monitor is None
    found = EngineConfig.from_deepspeed(base | asked | {"memory_breakdown": True}).monitor
    assert isinstance(found, Monitoring)
    assert found.asked == {
        "csv_monitor.enabled": True,
        "csv_monitor.job_name": "x",
        "memory_breakdown": True,
    }


def test_keys_that_are_not_known_are_named_in_the_warning(nested) -> None:
    """Files are of several versions and of several tools. A slip is an error, see WRONG."""
    plain = EngineConfig.from_deepspeed({"train_batch_size": 8})
    huge = 10**5_000  # has no str()
    spaced = {"train_batch_size (global)": 512, "": 1, "note one": 1, "note two": 2}
    with pytest.warns(UserWarning, match=r"train_batch_size \(global\) \(unknown\)"):
        assert EngineConfig.from_deepspeed({"train_batch_size": 8, **spaced}) == plain
    said = {"of_next_year": {"a": huge}, "csv_monitor.colour": 3, "fp16.of_nobody": None}

    with pytest.warns(UserWarning, match="change nothing here") as caught:
        found = EngineConfig.from_deepspeed({"train_batch_size": 8, **nested(said)})

    assert found == plain and "of_next_year" in found.table()
    (named,) = {str(each.message).partition(": ")[2] for each in caught}
    assert set(named.split(", ")) == {f"{path} (unknown)" for path in said}


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({".stage": 2, ".stage3_max_reuse_distance": 5}, 3),
        ({".stage": 2, ".offload_param.device": "cpu"}, 3),
        ({".stage": 2, ".leaf_module.names": ["a"]}, 3),
        ({".stage": 1, ".zero_hpz_partition_size": 2}, 3),
        ({".stage": 0, ".offload_optimizer.device": "cpu"}, 1),
        ({".stage": 0, ".zero_quantized_gradients": True}, 1),
    ],
)
def test_the_stage_alone_can_be_changed(nested, keys: Any, first: int) -> None:
    """What a higher stage would read is named, and means nothing."""
    plain = EngineConfig.from_deepspeed(nested({"train_batch_size": 8, ".stage": keys[".stage"]}))
    path = f"zero_optimization{list(keys)[-1]}"

    with pytest.warns(UserWarning, match=rf"nothing here: {path} \(from stage {first} on\)$"):
        found = EngineConfig.from_deepspeed({"train_batch_size": 8, **nested(keys)})

    assert found == plain


def test_prescaled_gradients_are_a_mean() -> None:
    """DeepSpeed divides them before the sum, whatever is said of dividing after it."""
    base = {"train_batch_size": 8, "prescale_gradients": True}
    found = [
        EngineConfig.from_deepspeed(base | {"gradient_allreduce_op": op}) for op in ("mean", "sum")
    ]

    assert found[0] == found[1]
    assert found[0].zero.precision is not None and found[0].zero.precision.reduces_mean


@pytest.mark.parametrize("stage", [0, 1])
def test_hysteresis_is_for_zero(nested, stage: int) -> None:
    """DeepSpeed's optimizers of stage 0 halve the scale at once and never give up, and say so.

    Their rule (`runtime/fp16/fused_optimizer.py`) has neither a count nor an error at the minimum.
    """
    keys = {"train_batch_size": 8, ".stage": stage, "fp16.enabled": True, "fp16.hysteresis": 4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raw = nested(keys | {"optimizer.type": "Adam", "optimizer.params.lr": 0.1})
        scale = EngineConfig.from_deepspeed(raw).loss_scale

    own = {} if stage else {"hysteresis": 1, "raises_at_minimum": False}
    assert scale == DynamicLossScale(**{"hysteresis": 4, "raises_at_minimum": True, **own})
    said = ["nothing here: fp16.hysteresis" in str(each.message) for each in caught]
    assert said == [True] * (1 - stage)


SIZES: Final = (None, 1, 2, 3, 4, 6, 8, 12)
KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("world_size", [1, 3])
def test_inference_of_batch_sizes_agrees_with_trying_all(world_size: int) -> None:
    """A batch of another size trains another model, and nobody sees it."""
    for given in itertools.product(SIZES, repeat=3):
        expected = _by_trying(*given, world_size=world_size)
        raw = {key: size for key, size in zip(KEYS, given, strict=True) if size is not None}

        if expected is None:
            with pytest.raises(ConfigError, match=r"^train_batch_size: ") as caught:
                EngineConfig.from_deepspeed(raw, world_size=world_size)
            # Of what the file has, each with its value; a remedy names the others.
            said = dict(re.findall(r"(\w+) (\d+)", str(caught.value)))
            assert {*said} - {"size", "got"} == {*raw} - {KEYS[0]} or KEYS[0] not in raw
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
