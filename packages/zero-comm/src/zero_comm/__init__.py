"""Coalesced collectives over one group of ranks."""

from .__about__ import __version__
from ._agreement import all_gather_json, check_agreement
from ._backend import BACKENDS, Backend
from ._blockwise import Blockwise
from ._by_levels import reduce_scatter_by_levels, sent_by_levels
from ._calls import collective
from ._cast import Cast
from ._chunks import even_splits
from ._coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    reduce_scatter_coalesced,
)
from ._codec import AbstractCodec
from ._compositions import (
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    reduce_scatter_flat,
)
from ._ddp_hook import ddp_hook
from ._errors import (
    AgreementError,
    CodecError,
    CommError,
    DivergenceError,
    GroupMismatchError,
    RankFailedError,
)
from ._exposure import Exposure, expose
from ._gather_to import gather_flat
from ._group import Group, init, record_traffic
from ._handle import Handle
from ._kernels import native_status
from ._levels import Levels
from ._loco import Loco, LocoErrors
from ._parse_codec import parse_codec
from ._quant_reduce import all_to_all_loco_quant_reduce, all_to_all_quant_reduce
from ._reduction import Reduction
from ._sent import Sent, sent_of
from ._traffic import OperationTraffic, Traffic, TrafficLog
from ._watch import Purpose

__all__ = [
    "BACKENDS",
    "AbstractCodec",
    "AgreementError",
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
    "TrafficLog",
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
    "sent_by_levels",
    "sent_of",
]
