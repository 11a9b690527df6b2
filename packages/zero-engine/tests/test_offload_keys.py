"""What DeepSpeed's keys of offload mean here, one by one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from zero_comm import Group
from zero_engine import Offload, Precision, ZeroConfig, shard, unshard
from zero_engine.deepspeed import EngineConfig
from zero_offload import DiskSettings

FOLDER: Final = Path("/local_nvme")
MIB: Final = 2**20


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
            {"optimizer": {"device": "cpu"}, "sub_group_size": 1e6},
            Offload(optimizer="host", subgroup_bytes=10**6 * (4 + 4 + 4)),
        ),
        ({"optimizer": {"device": "cpu"}, "sub_group_size": 1e9}, Offload(optimizer="host")),
        (
            {"cpu_offload": True, "sub_group_size": 1e6},
            Offload(optimizer="host", subgroup_bytes=12 * 10**6),
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


@pytest.mark.parametrize("numel", [0, 8, 10**6, 64 * MIB // 12, 64 * MIB // 12 + 1, 10**12])
def test_a_sub_group_has_the_bytes_of_the_file_but_neither_few_nor_many(numel: int) -> None:
    """Files say 1e9 by habit: 12 GB, three times. And 8 is one parameter each to DeepSpeed."""
    offload = _offload({"device": "cpu"}, sub_group_size=numel)

    assert offload is not None
    assert offload.subgroup_bytes == min(max(12 * numel, MIB), 64 * MIB)


@pytest.mark.ranks(1)
def test_a_tiny_sub_group_size_changes_no_number(group: Group) -> None:
    """Scripts for debugging set it: each of its sub-groups would be eight elements, and a call."""
    plain, host = _train(None), {"offload_optimizer": {"device": "cpu"}}
    expected = _train(host)
    torch.testing.assert_close(expected, plain)
    for numel in (8, 100):
        assert all(map(torch.equal, _train({**host, "sub_group_size": numel}), expected))


def _train(file: dict[str, Any] | None) -> list[Tensor]:
    """Three steps of 1M parameters, as a file says or without one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if file is not None:
        zero = {"zero_optimization": {"stage": 3, **file}}
        shard(model, optimizer, ZeroConfig.from_deepspeed(zero))
    for _ in range(3):
        model(torch.ones(2, 512)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if file is not None:
        unshard(model, optimizer)
    return [param.detach() for param in model.parameters()]


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


# ---- Whole files, as tutorials and libraries have them ----

_FP16: Final = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_STAGE_3: Final = {
    "stage": 3,
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
_AUTO: Final = {
    "fp16.enabled": True,
    "zero_optimization.reduce_bucket_size": 10**6,
    "zero_optimization.stage3_prefetch_bucket_size": 10**6,
    "zero_optimization.stage3_param_persistence_threshold": 10**4,
}
_ON_CPU: Final = {"device": "cpu", "pin_memory": True}
_LIGHTNING: Final = {"device": "cpu", "nvme_path": str(FOLDER), "pin_memory": False}
_EVENTS: Final = {"single_submit": False, "overlap_events": True}

# ZeRO's section, the other sections, and where things rest.
FILES: Final[dict[str, tuple[dict[str, Any], dict[str, Any], Offload]]] = {
    "the tutorial of ZeRO-Offload": (
        {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        {},
        Offload(optimizer="host"),
    ),
    "both on the CPU, as most people of the Trainer start": (
        {**_STAGE_3, "offload_optimizer": _ON_CPU, "offload_param": _ON_CPU},
        {},
        Offload(optimizer="host", params="host"),
    ),
    "ZeRO-Infinity, with every key of both sections and of aio": (
        {
            **_STAGE_3,
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
        },
        {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, **_EVENTS}},
        Offload(
            optimizer="disk",
            params="disk",
            path=FOLDER,
            max_host_numel=10**9,
            disk=DiskSettings(block_bytes=262144, queue_depth=32, num_workers=1),
        ),
    ),
    "Twin-Flow, with a part on the device": (
        {**_STAGE_3, "offload_optimizer": {**_ON_CPU, "ratio": 0.3}, "sub_group_size": 1e6},
        {},
        Offload(optimizer="host", fraction=0.3, subgroup_bytes=12 * 10**6),
    ),
    "Lightning's, which spells out NVMe where the device is the CPU": (
        {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "sub_group_size": 1e12,
            "offload_optimizer": {**_LIGHTNING, "buffer_count": 4},
            "offload_param": {
                **_LIGHTNING,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        {
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "aio": {"block_size": MIB, "queue_depth": 8, "thread_count": 1, **_EVENTS},
        },
        Offload(optimizer="host", params="host", pin=False),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_is_read(name: str, tmp_path: Path) -> None:
    """As it lies on a disk, for two ranks, the way a Trainer reads it."""
    zero, sections, offload = FILES[name]
    raw = {
        "fp16": _FP16,
        "zero_optimization": zero,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "train_batch_size": 8,
        "wall_clock_breakdown": False,
        **sections,
    }
    path, stage = tmp_path / "ds.json", zero["stage"]
    path.write_text(json.dumps(raw))
    auto = {key: value for key, value in _AUTO.items() if stage == 3 or "stage3" not in key}

    config = EngineConfig.from_deepspeed(path, world_size=2, auto=auto)

    assert config.zero.stage == stage
    assert config.zero.precision == Precision(params=torch.float16)
    assert config.zero.offload == offload
    if "stage3_max_live_parameters" in zero:
        assert config.zero.max_live_numel == 10**9
