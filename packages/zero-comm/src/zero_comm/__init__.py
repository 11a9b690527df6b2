"""Coalesced collectives over one group of ranks."""

# Layers, lowest first: errors, torch_private, logs, ranges, _native, build, calls, watch, circles,
# traces, order, codecs, handle, reduction, messages, shared_host, planning, traffic, group,
# transport, flat, loco, agreement, coalesced, ddp, hierarchical, exposure, sanitize, failure,
# testing.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from zero_comm.__about__ import __version__

if TYPE_CHECKING:
    from zero_comm.agreement import all_gather_json, check_agreement
    from zero_comm.calls import collective
    from zero_comm.coalesced import (
        all_gather_coalesced,
        all_reduce_coalesced,
        broadcast_coalesced,
        reduce_scatter_coalesced,
    )
    from zero_comm.codecs import AbstractCodec, Blockwise, Cast, native_status, parse_codec
    from zero_comm.ddp import ddp_hook
    from zero_comm.errors import (
        AgreementError,
        CodecError,
        CommError,
        DivergenceError,
        GroupMismatchError,
        RankFailedError,
    )
    from zero_comm.exposure import Exposure, expose
    from zero_comm.flat import (
        all_gather_flat,
        all_reduce_flat,
        broadcast_flat,
        gather_flat,
        reduce_scatter_flat,
    )
    from zero_comm.group import BACKENDS, AnyRanks, Backend, Group, init, record_traffic
    from zero_comm.handle import Handle
    from zero_comm.hierarchical import (
        Levels,
        all_to_all_loco_quant_reduce,
        all_to_all_quant_reduce,
        reduce_scatter_by_levels,
    )
    from zero_comm.loco import Loco, LocoErrors
    from zero_comm.planning import Sent
    from zero_comm.reduction import Reduction
    from zero_comm.traffic import OperationTraffic, Traffic
    from zero_comm.transport import even_splits
    from zero_comm.watch import Purpose

__all__ = [
    "BACKENDS",
    "AbstractCodec",
    "AgreementError",
    "AnyRanks",
    "Backend",
    "Blockwise",
    "Cast",
    "CodecError",
    "CommError",
    "DivergenceError",
    "Exposure",
    "Group",
    "GroupMismatchError",
    "Handle",
    "Levels",
    "Loco",
    "LocoErrors",
    "OperationTraffic",
    "Purpose",
    "RankFailedError",
    "Reduction",
    "Sent",
    "Traffic",
    "__version__",
    "all_gather_coalesced",
    "all_gather_flat",
    "all_gather_json",
    "all_reduce_coalesced",
    "all_reduce_flat",
    "all_to_all_loco_quant_reduce",
    "all_to_all_quant_reduce",
    "broadcast_coalesced",
    "broadcast_flat",
    "check_agreement",
    "collective",
    "ddp_hook",
    "even_splits",
    "expose",
    "gather_flat",
    "init",
    "native_status",
    "parse_codec",
    "record_traffic",
    "reduce_scatter_by_levels",
    "reduce_scatter_coalesced",
    "reduce_scatter_flat",
]

# Module -> public names that it has; a module is loaded on first use.
_NAMES: Final = {
    "zero_comm.agreement": "all_gather_json check_agreement",
    "zero_comm.calls": "collective",
    "zero_comm.coalesced": (
        "all_gather_coalesced all_reduce_coalesced broadcast_coalesced reduce_scatter_coalesced"
    ),
    "zero_comm.codecs": "AbstractCodec Blockwise Cast native_status parse_codec",
    "zero_comm.ddp": "ddp_hook",
    "zero_comm.errors": (
        "AgreementError CodecError CommError DivergenceError GroupMismatchError RankFailedError"
    ),
    "zero_comm.exposure": "Exposure expose",
    "zero_comm.flat": (
        "all_gather_flat all_reduce_flat broadcast_flat gather_flat reduce_scatter_flat"
    ),
    "zero_comm.group": "BACKENDS AnyRanks Backend Group init record_traffic",
    "zero_comm.handle": "Handle",
    "zero_comm.hierarchical": (
        "Levels all_to_all_loco_quant_reduce all_to_all_quant_reduce reduce_scatter_by_levels"
    ),
    "zero_comm.loco": "Loco LocoErrors",
    "zero_comm.planning": "Sent",
    "zero_comm.traffic": "OperationTraffic Traffic",
    "zero_comm.reduction": "Reduction",
    "zero_comm.transport": "even_splits",
    "zero_comm.watch": "Purpose",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load what a name needs when it is first asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
