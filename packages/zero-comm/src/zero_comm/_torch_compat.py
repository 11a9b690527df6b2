"""The only place that names version-dependent functions of torch.distributed.

torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single` and warns about the old names; 2.11 knows only the old ones.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_store() -> Any:
    """The store at which the ranks of the job met.

    Raises:
        ValueError: torch.distributed is not initialised, or not any more.
    """
    return _get_default_store()
