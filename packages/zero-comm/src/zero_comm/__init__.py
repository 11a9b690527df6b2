"""Coalesced collectives over one group of ranks."""

# Layers, lowest first: errors, torch_private, _native, build, watch, codecs, handle, peer_memory,
# traffic, meet, group, transport, flat, loco, agreement, coalesced, ddp_hook, hierarchical, window,
# testing.

from zero_comm.codecs.blockwise import Blockwise
from zero_comm.codecs.cast import Cast
from zero_comm.codecs.codec import AbstractCodec
from zero_comm.codecs.kernels import native_status
from zero_comm.codecs.parse import parse_codec

from .__about__ import __version__
from .agreement import all_gather_json, check_agreement
from .coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    reduce_scatter_coalesced,
)
from .ddp_hook import ddp_hook
from .errors import (
    AgreementError,
    CodecError,
    CommError,
    DivergenceError,
    GroupMismatchError,
    RankFailedError,
)
from .flat import (
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    gather_flat,
    reduce_scatter_flat,
)
from .group import BACKENDS, Backend, Group, init, record_traffic
from .handle import Handle
from .hierarchical import (
    Levels,
    all_to_all_loco_quant_reduce,
    all_to_all_quant_reduce,
    reduce_scatter_by_levels,
    sent_by_levels,
)
from .loco import Loco, LocoErrors
from .traffic import OperationTraffic, Sent, Traffic, sent_of
from .transport import Reduction, even_splits
from .watch import Purpose, collective
from .window import Exposure, expose

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
