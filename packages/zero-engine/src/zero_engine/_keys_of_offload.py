"""Offload in `zero_optimization`, and the section `aio`."""

from __future__ import annotations

from typing import Final

from zero_offload import DiskSettings

from ._file_key import Becomes, CannotMatter, FileKey, Gate, NotBuilt, section
from ._offload import RESIDENCES, SUBGROUP_BYTES
from ._value_kinds import COUNT, FLAG, FOLDER, OBJECT, POSITIVE, choice, number

_DEVICE: Final = choice("none", "cpu", "nvme")
_SHARE: Final = number(0, 1)

_PATH: Final = Becomes("zero.offload.path")
_PIN: Final = Becomes("zero.offload.pin")
_DISK: Final = DiskSettings()

_ON_DISK: Final = Gate(("device",), ("nvme",))
_ANY_ON_DISK: Final = Gate(("offload_optimizer.device", "offload_param.device"), ("nvme",)).within(
    "zero_optimization"
)

_OWN_BUFFERS: Final = CannotMatter("buffers are planned from what passes through them")
_OVERLAPS: Final = CannotMatter("reading, stepping and writing always overlap")
_SUBMISSION: Final = CannotMatter("requests are handed over in batches, while earlier ones run")

_ADAM_BYTES_PER_ELEMENT: Final = 12  # fp32: master, first and second moment
_LEAST_SUBGROUP_BYTES: Final = 2**20
_PAGE_BYTES: Final = 4096
_MAX_BLOCK_BYTES: Final = 2**30


def _residence(name: str) -> Becomes:
    return Becomes(f"zero.offload.{name}", RESIDENCES.__getitem__)


def _on_host(name: str) -> Becomes:
    return Becomes(f"zero.offload.{name}", lambda offloads: "host" if offloads else "device")


def _subgroup_bytes(numel: int) -> int:
    """An upper bound: the files say 1e9 by habit, which is 12 GB in each of three slots.

    And no tiny one: DeepSpeed cuts no parameter into sub-groups, so there 8 means one parameter
    each, where pieces of eight elements would take a hundred times as long.
    """
    return min(max(numel * _ADAM_BYTES_PER_ELEMENT, _LEAST_SUBGROUP_BYTES), SUBGROUP_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return min(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, _MAX_BLOCK_BYTES)


OFFLOAD_KEYS: Final = (
    *section(
        "zero_optimization.offload_param",
        FileKey("device", _DEVICE, "none", _residence("params"), min_stage=3),
        FileKey("nvme_path", FOLDER, None, _PATH, gate=_ON_DISK),
        FileKey("buffer_count", COUNT, 5, _OWN_BUFFERS),
        FileKey("buffer_size", COUNT, 10**8, _OWN_BUFFERS),
        FileKey(
            "max_in_cpu",
            COUNT,
            0,
            Becomes("zero.offload.max_host_numel"),
            neutral=(10**9,),
            gate=_ON_DISK,
        ),
        FileKey("pin_memory", FLAG, True, _PIN),
        gate="device",
    ),
    *section(
        "zero_optimization.offload_optimizer",
        FileKey("device", _DEVICE, "none", _residence("optimizer"), min_stage=1),
        FileKey("nvme_path", FOLDER, None, _PATH, gate=_ON_DISK),
        FileKey("buffer_count", COUNT, 4, _OWN_BUFFERS),
        FileKey("pin_memory", FLAG, True, _PIN),
        FileKey("pipeline_read", FLAG, False, _OVERLAPS),
        FileKey("pipeline_write", FLAG, False, _OVERLAPS),
        FileKey(
            "fast_init",
            FLAG,
            False,
            CannotMatter("masters are always written from the parameters, once"),
        ),
        FileKey("ratio", _SHARE, 1.0, Becomes("zero.offload.fraction", float)),
        FileKey(
            "super_offload",
            FLAG,
            False,
            NotBuilt("stepping before the norm is known, and back (SuperOffload)"),
        ),
        FileKey("cpuadam_cores_perc", _SHARE, 0.8, CannotMatter("only SuperOffload binds cores")),
        gate="device",
    ),
    *section(
        "zero_optimization",
        FileKey("cpu_offload", FLAG, None, _on_host("optimizer"), neutral=(False,), min_stage=1),
        FileKey("cpu_offload_param", FLAG, None, _on_host("params"), neutral=(False,), min_stage=3),
        FileKey(
            "cpu_offload_use_pin_memory",
            FLAG,
            None,
            _PIN,
            neutral=(True,),
            gate=Gate(("cpu_offload", "cpu_offload_param")),
        ),
        FileKey(
            "sub_group_size",
            COUNT,
            None,
            Becomes("zero.offload.subgroup_bytes", _subgroup_bytes),
            neutral=(10**9,),
            gate=Gate(("offload_optimizer.device", "cpu_offload")),
        ),
        FileKey(
            "save_muon_momentum_buffer_in_memory",
            FLAG,
            False,
            NotBuilt("Muon's momentum rests where the other state does"),
            gate=Gate(("offload_optimizer.device",), ("nvme",)),
        ),
        FileKey("zenflow", OBJECT, None, NotBuilt("ZenFlow")),
    ),
    FileKey(
        "aio.block_size",
        POSITIVE,
        _DISK.block_bytes,
        Becomes("zero.offload.disk.block_bytes", _whole_pages),
        neutral=(2**20,),
        gate=_ANY_ON_DISK,
    ),
    FileKey(
        "aio.queue_depth",
        POSITIVE,
        _DISK.queue_depth,
        Becomes("zero.offload.disk.queue_depth"),
        neutral=(8,),
        gate=_ANY_ON_DISK,
    ),
    *(
        FileKey(
            f"aio.{name}",
            POSITIVE,
            _DISK.num_workers,
            Becomes("zero.offload.disk.num_workers"),
            neutral=(1,),
            gate=_ANY_ON_DISK,
        )
        for name in ("intra_op_parallelism", "thread_count")  # today's name, and an older one
    ),
    FileKey("aio.single_submit", FLAG, False, _SUBMISSION, gate=_ANY_ON_DISK),
    FileKey("aio.overlap_events", FLAG, True, _SUBMISSION, gate=_ANY_ON_DISK),
    FileKey(
        "aio.use_gds",
        FLAG,
        False,
        NotBuilt("transfers between disk and device that pass the host by (GPUDirect Storage)"),
        gate=_ANY_ON_DISK,
    ),
)
