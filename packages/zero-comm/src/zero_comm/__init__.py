"""Coalesced collectives over one group of ranks."""

from .__about__ import __version__
from ._agreement import all_gather_json, check_agreement
from ._backend import BACKENDS, Backend
from ._coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    reduce_scatter_coalesced,
)
from ._compositions import (
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    even_splits,
    reduce_scatter_flat,
)
from ._ddp_hook import ddp_hook
from ._errors import (
    AgreementError,
    CommError,
    DivergenceError,
    GroupMismatchError,
    RankFailedError,
)
from ._exposure import Exposure, expose
from ._gather_to import gather_flat
from ._group import Group, init
from ._handle import Handle
from ._levels import Levels
from ._reduction import Reduction
from ._traffic import OperationTraffic, Sent, Traffic, TrafficLog, record_traffic
from ._watch import Purpose

__all__ = [
    "BACKENDS",
    "AgreementError",
    "Backend",
    "CommError",
    "DivergenceError",
    "Exposure",
    "Group",
    "GroupMismatchError",
    "Handle",
    "Levels",
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
    "broadcast_coalesced",
    "broadcast_flat",
    "check_agreement",
    "ddp_hook",
    "even_splits",
    "expose",
    "gather_flat",
    "init",
    "record_traffic",
    "reduce_scatter_coalesced",
    "reduce_scatter_flat",
]
