"""For tests: several ranks on one machine, peers whose memory cannot be read, codecs' kernels.

`RankPool` is what the `ranks` fixture gives. `local_peers` makes ranks of one process, each of them
what `Reads.memory` is; `cannot_read` and its like make reading fail. `using_kernels` and its like
choose what encodes blocks. `equal` and `assert_close` compare values of different devices, as
results and oracles are where ranks run on an accelerator. `rely_on` waits for what was launched.
"""

from .kernels import (
    forgetting_kernels,
    load_native,
    load_triton,
    triton_agrees,
    triton_gives,
    triton_kernels,
    triton_ptx,
    using_kernels,
)
from .peers import (
    cannot_read,
    journal_capacity,
    lingering,
    local_peers,
    looking_alone,
    reads_cut_short,
    reads_refused,
    without_reads,
)
from .rank_pool import RankPool, without_default_device
from .values import assert_close, equal, on_cpu, rely_on

__all__ = [
    "RankPool",
    "assert_close",
    "cannot_read",
    "equal",
    "forgetting_kernels",
    "journal_capacity",
    "lingering",
    "load_native",
    "load_triton",
    "local_peers",
    "looking_alone",
    "on_cpu",
    "reads_cut_short",
    "reads_refused",
    "rely_on",
    "triton_agrees",
    "triton_gives",
    "triton_kernels",
    "triton_ptx",
    "using_kernels",
    "without_default_device",
    "without_reads",
]
