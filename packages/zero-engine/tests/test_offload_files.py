"""Whole files with offload, as tutorials and libraries have them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from zero_engine import Offload, Precision, ZeroConfig
from zero_engine.deepspeed import EngineConfig
from zero_offload import DiskSettings

FOLDER: Final = "/local_nvme"
MIB: Final = 2**20
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


def _nvme(**keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": FOLDER, **keys}


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
            "nvme_path": FOLDER,
            "buffer_count": 4,
            "pin_memory": False,
        },
        "offload_param": {
            "device": "cpu",
            "nvme_path": FOLDER,
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
