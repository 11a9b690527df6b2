"""What encoding gradients has lost on a rank, for a checkpoint: of one layout, and one wire."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from zero_comm import LocoErrors

from ._buffer_plan import BufferPlan
from ._sharded_model import ShardedModel

_NUM_REDUCTIONS: Final = "num_reductions"  # of each buffer, in their order: one tensor for all


def loco_facts(sharded: ShardedModel) -> dict[str, str]:
    """What must be the same where errors that were saved are to be fed back. Local.

    Empty where none are kept. Equal on every rank.
    """
    kept = _kept(sharded)
    if not kept:
        return {}
    hops = sharded.routes.hops
    route = next(g.route for g in sharded.reducer.gradients if g.route.loco_errors is not None)
    facts = {
        "number of ranks": str(sharded.whole.world_size),
        "ranks of a node": str(
            sharded.whole.world_size if hops is None else hops.inside.world_size
        ),
        "codec of gradients": str(route.codec),
        "Loco": str(next(iter(kept.values())).loco),
    }
    layouts = {_name(g.buffer.plan): _layout_of(g.buffer.plan) for g in sharded.reducer.gradients}
    return facts | {f"layout of {name!r} and what lies beside it": layouts[name] for name in kept}


def loco_state(sharded: ShardedModel) -> dict[str, Tensor]:
    """This rank's errors, 1-D tensors by names of their own; not copied. Local."""
    counts, tensors = [], {}
    for name, errors in _kept(sharded).items():
        state = errors.state_dict()
        counts.append(state.pop(_NUM_REDUCTIONS))
        tensors |= {f"{name}.{level}": tensor for level, tensor in state.items()}
    if not tensors:
        return {}
    return {_NUM_REDUCTIONS: torch.tensor(counts, dtype=torch.int64), **tensors}


def restore_loco(sharded: ShardedModel, saved: Mapping[str, Tensor]) -> None:
    """Feed back what `loco_state` gave where `loco_facts` are the same; forget all if empty. Local.

    Args:
        sharded: The model, between steps.
        saved: On any device.
    """
    kept, device = _kept(sharded), sharded.group.device
    counts = saved[_NUM_REDUCTIONS].tolist() if saved else [0] * len(kept)
    for (name, errors), count in zip(kept.items(), counts, strict=True):
        prefix = f"{name}."
        of_levels = {
            level: saved[prefix + level].to(device)
            for level in ("inside", "across")
            if prefix + level in saved
        }
        errors.load_state_dict({_NUM_REDUCTIONS: count, **of_levels})


def _kept(sharded: ShardedModel) -> dict[str, LocoErrors]:
    """By the first parameter of the buffer."""
    return {
        _name(g.buffer.plan): g.route.loco_errors
        for g in sharded.reducer.gradients
        if g.route.loco_errors is not None
    }


def _name(plan: BufferPlan) -> str:
    return plan.params[0].name


def _layout_of(plan: BufferPlan) -> str:
    """Which elements each rank has; too long to say in full."""
    spans = [(span.start, span.stop) for span in plan.layout.spans]
    said = ([param.name for param in plan.params], spans, plan.layout.splits)
    return f"{zlib.crc32(repr(said).encode()):08x}"
