"""Offload and ZeRO++ in `zero_optimization`, and the section `aio`: none of it is built."""

from __future__ import annotations

from typing import Final

from ._file_key import CannotMatter, FileKey, NotBuilt, section
from ._value_kinds import COUNT, FLAG, OBJECT, POSITIVE, TEXT, choice, integer, number

_PARAM: Final = NotBuilt("parameters stay on the device; leave it at 'none', or use more ranks")
_OPTIM: Final = NotBuilt("optimizer state stays on the device; leave it at 'none', or shard it")
_QUANTIZED: Final = NotBuilt("quantized communication (ZeRO++)")
_DEVICE: Final = choice("none", "cpu", "nvme")
_SHARE: Final = number(0, 1)
_NO_DISK: Final = CannotMatter("nothing is offloaded to disk")

KEYS: Final = (
    *section(
        "zero_optimization.offload_param",
        FileKey("device", _DEVICE, "none", _PARAM, needs_stage_3=True),
        FileKey("nvme_path", TEXT, None, _PARAM),
        FileKey("buffer_count", COUNT, 5, _PARAM),
        FileKey("buffer_size", COUNT, 10**8, _PARAM),
        FileKey("max_in_cpu", COUNT, 10**9, _PARAM),
        FileKey("pin_memory", FLAG, True, _PARAM),
        gate="device",
    ),
    *section(
        "zero_optimization.offload_optimizer",
        FileKey("device", _DEVICE, "none", _OPTIM),
        FileKey("nvme_path", TEXT, None, _OPTIM),
        FileKey("buffer_count", COUNT, 4, _OPTIM),
        FileKey("pin_memory", FLAG, True, _OPTIM),
        FileKey("pipeline_read", FLAG, False, _OPTIM),
        FileKey("pipeline_write", FLAG, False, _OPTIM),
        FileKey("fast_init", FLAG, False, _OPTIM),
        FileKey("ratio", _SHARE, 1.0, _OPTIM),
        FileKey("super_offload", FLAG, False, _OPTIM),
        FileKey("cpuadam_cores_perc", _SHARE, 0.8, _OPTIM),
        gate="device",
    ),
    *section(
        "zero_optimization",
        FileKey("cpu_offload", FLAG, None, _OPTIM, neutral=(False,)),
        FileKey("cpu_offload_param", FLAG, None, _PARAM, neutral=(False,), needs_stage_3=True),
        FileKey(
            "cpu_offload_use_pin_memory", FLAG, None, CannotMatter("nothing is offloaded to memory")
        ),
        FileKey("zenflow", OBJECT, None, NotBuilt("ZenFlow")),
        FileKey("zero_quantized_weights", FLAG, False, _QUANTIZED, needs_stage_3=True),
        FileKey("zero_quantized_nontrainable_weights", FLAG, False, _QUANTIZED, needs_stage_3=True),
        FileKey("zero_quantized_gradients", FLAG, False, _QUANTIZED),
        FileKey("zeropp_loco_param", OBJECT, None, _QUANTIZED),
        FileKey(
            "zero_hpz_partition_size",
            POSITIVE,
            1,
            NotBuilt("a second copy of parameters within a node (hpZ)"),
            needs_stage_3=True,
        ),
        FileKey(
            "mics_shard_size",
            integer(-1),
            -1,
            NotBuilt("sharding within a part of the ranks (MiCS)"),
            needs_stage_3=True,
        ),
        FileKey(
            "mics_hierarchical_params_gather",
            FLAG,
            False,
            NotBuilt("sharding within a part of the ranks (MiCS)"),
            gate="mics_shard_size",
        ),
    ),
    *section(
        "aio",
        FileKey("block_size", POSITIVE, 2**20, _NO_DISK),
        FileKey("queue_depth", POSITIVE, 8, _NO_DISK),
        FileKey("intra_op_parallelism", POSITIVE, 1, _NO_DISK),
        FileKey("thread_count", POSITIVE, 1, _NO_DISK),  # its older name
        FileKey("single_submit", FLAG, False, _NO_DISK),
        FileKey("overlap_events", FLAG, True, _NO_DISK),
        FileKey("use_gds", FLAG, False, _NO_DISK),
    ),
)
