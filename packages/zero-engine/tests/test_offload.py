"""Where things rest: the value, and what DeepSpeed's files say of it."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from zero_engine import ConfigError, EngineConfig, Offload, Precision, ZeroConfig
from zero_offload import DiskSettings

FOLDER: Final = Path("/local_nvme")
MIB: Final = 2**20

# The value ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name", "part"),
    [
        ({"optimizer": "cpu"}, "optimizer", "'host'"),
        ({"params": None}, "params", "'disk'"),
        ({"optimizer": "host", "fraction": 1.5}, "fraction", "from 0 to 1"),
        ({"optimizer": "host", "fraction": float("nan")}, "fraction", "from 0 to 1"),
        ({"optimizer": "host", "fraction": True}, "fraction", "from 0 to 1"),
        ({"optimizer": "disk", "path": 3}, "path", "a folder"),
        ({"optimizer": "disk", "path": ""}, "path", "a folder"),
        ({"optimizer": "host", "pin": 1}, "pin", "bool"),
        ({"optimizer": "host", "subgroup_bytes": 0}, "subgroup_bytes", "at least 1"),
        ({"optimizer": "host", "subgroup_bytes": 1e6}, "subgroup_bytes", "int"),
        ({"params": "disk", "path": FOLDER, "read_ahead": -1}, "read_ahead", "at least 0"),
        ({"params": "disk", "path": FOLDER, "max_host_numel": -1}, "max_host_numel", "at least 0"),
        ({"optimizer": "host", "budget_bytes": 0}, "budget_bytes", "at least 1"),
        ({"optimizer": "disk", "path": FOLDER, "disk": {}}, "disk", "DiskSettings or None"),
        ({"optimizer": "host", "delayed_update": "yes"}, "delayed_update", "bool"),
        # Together.
        ({"optimizer": "disk"}, "path", "optimizer='disk'"),
        ({"params": "disk"}, "path", "params='disk'"),
        ({"optimizer": "host", "params": "host", "path": FOLDER}, "path", "leave it out"),
        ({"optimizer": "host", "disk": DiskSettings()}, "disk", "optimizer='disk' or"),
        ({"params": "host", "max_host_numel": 1}, "max_host_numel", "without params='disk'"),
        ({"params": "host", "fraction": 0.5}, "fraction", "without optimizer='host'"),
        ({"params": "host", "delayed_update": True}, "delayed_update", "set optimizer='host'"),
    ],
)
def test_a_wrong_value_says_what_was_expected(fields: Any, name: str, part: str) -> None:
    """It is read here, before a model of hours is loaded; and nothing asked for is passed over."""
    with pytest.raises(ConfigError, match=rf"^Offload\.{name}: expected") as caught:
        Offload(**fields)

    assert part in str(caught.value)


def test_what_rests_elsewhere_may_be_any_of_both() -> None:
    """Parameters, optimizer state and fraction are chosen independently of each other."""
    for optimizer in ("device", "host", "disk"):
        for params in ("device", "host", "disk"):
            for fraction in (0, 0.3, 1) if optimizer != "device" else (1,):
                Offload(
                    optimizer=optimizer,
                    params=params,
                    fraction=fraction,
                    path=FOLDER if "disk" in (optimizer, params) else None,
                )


def test_it_travels_and_compares() -> None:
    """It goes to other processes, and ranks compare what they were told."""
    offload = Offload(optimizer="disk", path="/a", disk=DiskSettings(queue_depth=4))

    assert offload.path == Path("/a")
    assert pickle.loads(pickle.dumps(offload)) == offload == copy.deepcopy(offload)
    assert hash(offload) == hash(copy.deepcopy(offload))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_what_is_sharded_may_rest_elsewhere(stage: int) -> None:
    """Stage 0 shards nothing, 1 and 2 all but parameters."""
    for name, lowest in (("optimizer", 1), ("params", 3)):
        offload = Offload(**{name: "host"})
        if stage >= lowest:
            assert ZeroConfig(stage=stage, offload=offload).offload is offload
        else:
            with pytest.raises(ConfigError, match=rf"^ZeroConfig\.offload: .*{name}='device' at"):
                ZeroConfig(stage=stage, offload=offload)
    assert ZeroConfig(stage=stage, offload=Offload()).offload == Offload()


def test_what_is_no_offload_is_refused() -> None:
    """A dict of DeepSpeed's, say."""
    with pytest.raises(ConfigError, match=r"^ZeroConfig\.offload: expected Offload or None"):
        ZeroConfig(offload={"device": "cpu"})  # type: ignore[arg-type]


# Files ----------------------------------------------------------------------------------------


def _offload(optimizer: Any = None, param: Any = None, **raw: Any) -> Offload | None:
    """What a file says at stage 3: its two sections, `aio`, and further keys of ZeRO."""
    aio = raw.pop("aio", {})
    zero = {"stage": 3, "offload_optimizer": optimizer, "offload_param": param, **raw}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ZeroConfig.from_deepspeed({"zero_optimization": zero, "aio": aio}).offload


def _nvme(**keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(FOLDER), **keys}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        # offload_optimizer.device and offload_param.device: "none", "cpu" or "nvme".
        ({}, None),
        ({"optimizer": {"device": "none"}, "param": {"device": "none"}}, None),
        ({"optimizer": {"device": "cpu"}}, Offload(optimizer="host")),
        ({"param": {"device": "cpu"}}, Offload(params="host")),
        ({"optimizer": _nvme()}, Offload(optimizer="disk", path=FOLDER)),
        ({"param": _nvme()}, Offload(params="disk", path=FOLDER)),
        (
            {"optimizer": _nvme(), "param": {"device": "cpu"}},
            Offload(optimizer="disk", params="host", path=FOLDER),
        ),
        # A section that is off means nothing, whatever stands in it.
        ({"optimizer": {"pin_memory": False, "ratio": 0.1, "nvme_path": "/a"}}, None),
        # Their deprecated forms.
        ({"cpu_offload": True}, Offload(optimizer="host")),
        ({"cpu_offload": False, "cpu_offload_param": None}, None),
        (
            {"cpu_offload": True, "cpu_offload_param": True},
            Offload(optimizer="host", params="host"),
        ),
        (
            {"cpu_offload": True, "cpu_offload_use_pin_memory": False},
            Offload(optimizer="host", pin=False),
        ),
        ({"cpu_offload": True, "optimizer": {"device": "cpu"}}, Offload(optimizer="host")),
        # nvme_path: one folder for both; where nothing goes to NVMe it means nothing.
        (
            {"optimizer": _nvme(), "param": _nvme()},
            Offload(optimizer="disk", params="disk", path=FOLDER),
        ),
        (
            {"optimizer": {"device": "nvme"}, "param": _nvme()},
            Offload(optimizer="disk", params="disk", path=FOLDER),
        ),
        ({"optimizer": {"device": "cpu", "nvme_path": "/a"}}, Offload(optimizer="host")),
        (
            {"optimizer": {"device": "cpu", "nvme_path": "/a"}, "param": _nvme()},
            Offload(optimizer="host", params="disk", path=FOLDER),
        ),
        # pin_memory: of host memory.
        (
            {"optimizer": {"device": "cpu", "pin_memory": False}},
            Offload(optimizer="host", pin=False),
        ),
        ({"param": {"device": "cpu", "pin_memory": True}}, Offload(params="host")),
        # ratio: the share of the optimizer's states that is updated on the CPU.
        ({"optimizer": {"device": "cpu", "ratio": 0.3}}, Offload(optimizer="host", fraction=0.3)),
        ({"optimizer": {"device": "cpu", "ratio": 0}}, Offload(optimizer="host", fraction=0.0)),
        # max_in_cpu: elements kept in memory where the others go to NVMe.
        (
            {"param": _nvme(max_in_cpu=1e9)},
            Offload(params="disk", path=FOLDER, max_host_numel=10**9),
        ),
        ({"param": {"device": "cpu", "max_in_cpu": 1e9}}, Offload(params="host")),
        # sub_group_size: elements whose states are updated, and are in memory, together.
        (
            {"optimizer": {"device": "cpu"}, "sub_group_size": 1000},
            Offload(optimizer="host", subgroup_bytes=1000 * (4 + 4 + 4)),
        ),
        ({"optimizer": {"device": "cpu"}, "sub_group_size": 1e9}, Offload(optimizer="host")),
        (
            {"cpu_offload": True, "sub_group_size": 1000},
            Offload(optimizer="host", subgroup_bytes=12000),
        ),
        ({"sub_group_size": 1000}, None),
        # aio: how NVMe is used.
        (
            {"optimizer": _nvme(), "aio": {"block_size": MIB, "queue_depth": 16}},
            Offload(
                optimizer="disk",
                path=FOLDER,
                disk=DiskSettings(block_bytes=MIB, queue_depth=16),
            ),
        ),
        (
            {"param": _nvme(), "aio": {"intra_op_parallelism": 4}},
            Offload(params="disk", path=FOLDER, disk=DiskSettings(num_workers=4)),
        ),
        (
            {"param": _nvme(), "aio": {"thread_count": 4}},
            Offload(params="disk", path=FOLDER, disk=DiskSettings(num_workers=4)),
        ),
        (  # whole pages, and no more than the disk's requests may have
            {"param": _nvme(), "aio": {"block_size": 4097}},
            Offload(params="disk", path=FOLDER, disk=DiskSettings(block_bytes=8192)),
        ),
        (
            {"param": _nvme(), "aio": {"block_size": 1e12}},
            Offload(params="disk", path=FOLDER, disk=DiskSettings(block_bytes=2**30)),
        ),
        ({"optimizer": {"device": "cpu"}, "aio": {"queue_depth": 16}}, Offload(optimizer="host")),
    ],
)
def test_a_key_means_what_deepspeed_says_of_it(file: dict[str, Any], expected: Any) -> None:
    """Else the memory that a file was tuned for is other memory here."""
    assert _offload(**file) == expected


@pytest.mark.parametrize("numel", [0, 1, 10**6, 64 * MIB // 12, 64 * MIB // 12 + 1, 10**12])
def test_a_sub_group_has_at_most_the_bytes_of_the_file_and_ours(numel: int) -> None:
    """Files say 1e9 by habit: 12 GB, three times, in memory that may not be there."""
    offload = _offload({"device": "cpu"}, sub_group_size=numel)

    assert offload is not None
    assert 1 <= offload.subgroup_bytes <= min(max(12 * numel, 12), 64 * MIB)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_is_offloaded_from_stage_1_on(stage: int) -> None:
    """ZeRO-Offload is for the stages that have parameters whole, too."""
    raw = {"stage": stage, "offload_optimizer": {"device": "cpu"}}

    zero = ZeroConfig.from_deepspeed({"zero_optimization": raw})

    assert zero == ZeroConfig(stage=stage, offload=Offload(optimizer="host"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offload_optimizer.buffer_count", 9),
        ("offload_optimizer.pipeline_read", True),
        ("offload_optimizer.pipeline_write", True),
        ("offload_optimizer.fast_init", True),
        ("offload_optimizer.cpuadam_cores_perc", 0.5),
        ("offload_param.buffer_count", 9),
        ("offload_param.buffer_size", 1e9),
    ],
)
def test_what_is_a_matter_of_their_implementation_changes_nothing(name: str, value: Any) -> None:
    """It is in most files, and is warned of, so that nobody goes on tuning it."""
    sections: dict[str, Any] = {"offload_optimizer": _nvme(), "offload_param": _nvme()}
    before = ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, **sections}})
    section, _, key = name.partition(".")
    sections[section][key] = value

    with pytest.warns(UserWarning, match=f"zero_optimization.{name}: "):
        after = ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, **sections}})

    assert after == before


def test_null_is_as_good_as_absent() -> None:
    """Accelerate writes a null for every path that it was not given."""
    assert _offload(
        {"device": "cpu", "nvme_path": None},
        {"device": "none", "nvme_path": None},
        cpu_offload=None,
        sub_group_size=None,
        stage3_max_live_parameters=None,
        stage3_model_persistence_threshold=None,
    ) == Offload(optimizer="host")


def test_a_section_below_its_stage_is_not_read() -> None:
    """One template serves all stages, with what only some of them need left open."""
    section = {"device": "auto", "pin_memory": False, "buffer_count": 9}

    zero = ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 2, "offload_param": section}})

    assert zero == ZeroConfig(stage=2)


def test_the_table_names_the_field_and_says_why_a_key_is_not_read() -> None:
    """Several sections become one value: who looks for a key has to find it."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/a", "ratio": 0.5}}
    raw = {"train_batch_size": 8, "zero_optimization": zero, "aio": {"queue_depth": 4}}
    rows = {row.key: row.meaning for row in EngineConfig.from_deepspeed(raw).sources}

    section = "zero_optimization.offload_optimizer"
    assert rows[f"{section}.device"] == "zero.offload.optimizer"
    assert rows[f"{section}.ratio"] == "zero.offload.fraction"
    assert rows[f"{section}.nvme_path"] == f"not read: {section}.device is not 'nvme'"
    assert rows["aio.queue_depth"] == (
        f"not read: {section}.device and zero_optimization.offload_param.device are not 'nvme'"
    )


# Whole files ----------------------------------------------------------------------------------

FP16: Final = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE_3: Final = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
AUTO: Final = {
    "fp16.enabled": True,
    "zero_optimization.reduce_bucket_size": 10**6,
    "zero_optimization.stage3_prefetch_bucket_size": 10**6,
    "zero_optimization.stage3_param_persistence_threshold": 10**4,
}


def _whole(path: Path, zero: dict[str, Any], **sections: Any) -> EngineConfig:
    """Read a file as it lies on a disk, for two ranks, the way a Trainer does."""
    raw = {
        "fp16": FP16,
        "zero_optimization": zero,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "train_batch_size": 8,
        "wall_clock_breakdown": False,
        **sections,
    }
    path.write_text(json.dumps(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = {
            key: value for key, value in AUTO.items() if zero["stage"] == 3 or "stage3" not in key
        }
        return EngineConfig.from_deepspeed(path, world_size=2, auto=auto)


def test_the_tutorial_of_zero_offload_is_read(tmp_path: Path) -> None:
    """Ten billion parameters on one GPU: stage 2, the optimizer on the CPU."""
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    }

    config = _whole(tmp_path / "ds.json", zero)

    assert config.zero == ZeroConfig(
        stage=2, precision=Precision(params=torch.float16), offload=Offload(optimizer="host")
    )


def test_stage_3_with_both_on_the_cpu_is_read(tmp_path: Path) -> None:
    """The file that most people of the Trainer start from."""
    on_cpu = {"device": "cpu", "pin_memory": True}

    config = _whole(
        tmp_path / "ds.json",
        {"stage": 3, "offload_optimizer": on_cpu, "offload_param": on_cpu, **STAGE_3},
    )

    assert config.zero.offload == Offload(optimizer="host", params="host")
    assert config.zero.max_live_numel == 10**9


def test_zero_infinity_is_read(tmp_path: Path) -> None:
    """Both on NVMe, with every key of both sections and of aio."""
    config = _whole(
        tmp_path / "ds.json",
        {
            "stage": 3,
            "offload_optimizer": _nvme(
                pin_memory=True,
                buffer_count=4,
                fast_init=False,
                pipeline_read=False,
                pipeline_write=False,
            ),
            "offload_param": _nvme(
                pin_memory=True, buffer_count=5, buffer_size=1e8, max_in_cpu=1e9
            ),
            **STAGE_3,
        },
        aio={
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    )

    assert config.zero.offload == Offload(
        optimizer="disk",
        params="disk",
        path=FOLDER,
        max_host_numel=10**9,
        disk=DiskSettings(block_bytes=262144, queue_depth=32, num_workers=1),
    )


def test_twin_flow_is_read(tmp_path: Path) -> None:
    """A part of the optimizer stays on the device."""
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
        **STAGE_3,
        "sub_group_size": 1e6,
    }

    config = _whole(tmp_path / "ds.json", zero)

    assert config.zero.offload == Offload(optimizer="host", fraction=0.3, subgroup_bytes=12 * 10**6)


def test_what_lightning_writes_is_read(tmp_path: Path) -> None:
    """It spells out the paths and buffers of NVMe where the device is the CPU, too."""
    zero = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "sub_group_size": 1e12,
        "offload_optimizer": {
            "device": "cpu",
            "nvme_path": "/local_nvme",
            "buffer_count": 4,
            "pin_memory": False,
        },
        "offload_param": {
            "device": "cpu",
            "nvme_path": "/local_nvme",
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
            "pin_memory": False,
        },
    }

    config = _whole(
        tmp_path / "ds.json",
        zero,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
        aio={
            "block_size": MIB,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
    )

    assert config.zero.offload == Offload(optimizer="host", params="host", pin=False)
