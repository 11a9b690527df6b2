"""Loads a checkpoint of DeepSpeed's ZeRO into a model, sharded or not."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, frozen
from torch import nn
from zero_comm import AnyRanks
from zero_engine.checkpoint.folder import run_on_all_ranks
from zero_engine.checkpoint.load import open_together, stop_unless_it_fits
from zero_engine.checkpoint.save import sharded_of
from zero_engine.checks import default_group
from zero_partition.plan import whole_of
from zero_partition.seams import (
    ShardedModel,
    StateSource,
    find_sharded,
    load_ranges,
    param_groups_of,
    plan_load,
)

from .saved import DeepSpeedFolder


@final
@frozen(kw_only=True)
class DeepSpeedLoadReport:
    """Report of a load."""

    # Folder of the files.
    path: Path
    step: int  # DeepSpeed's global_steps
    # Stage and number of ranks that saved the checkpoint.
    stage: int
    world_size: int
    # Parameters in the files, and entries of whole parameters' optimizer state that were loaded.
    num_params: int
    num_states: int
    # Names of parameters and buffers that were not loaded, and of those that the model lacks.
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    # Other values of DeepSpeed's engine, such as counters and the scheduler; they are not restored.
    engine: Mapping[str, Any]
    # The argument of `save_checkpoint`.
    client_state: Mapping[str, Any]

    def __str__(self) -> str:
        return (
            f"loaded {self.num_params} parameters and {self.num_states} entries of optimizer state "
            f"of step {self.step}, stage {self.stage}, {self.world_size} ranks, from {self.path}"
        )


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tag: str | None,
    is_strict: bool,
    group: AnyRanks | None,
    is_universal: bool,
) -> DeepSpeedLoadReport:
    """See `zero_engine.load_deepspeed`. Collective."""
    what, has_state = "load_deepspeed()", optimizer is not None
    is_plain = not has_state and find_sharded(model) is None
    sharded = None if is_plain else sharded_of(model, optimizer, what)
    if sharded is not None:
        group = sharded.routes.all_ranks
    group = default_group(model) if group is None else whole_of(group)
    found = open_together(
        lambda: DeepSpeedFolder.open(folder, tag, is_universal=is_universal),
        _describe,
        what=what,
        group=group,
        optimizer=has_state,
        is_strict=is_strict,
    )
    source = found.source
    if sharded is None:
        also = {alias: source.params[name] for alias, name in source.ties.items()}
        readers = {**source.params, **also, **source.buffers}
        report: Any = load_ranges(model, readers, group=group, strict=is_strict)
    else:
        names = [{"params": group["params"]} for group in param_groups_of(sharded)]
        source = evolve(source, param_groups=names)
        if optimizer is None:
            source = evolve(source, states=None)
        planned = report = plan_load(sharded, source, is_strict=is_strict)
        problems = list(planned.problems)
        if has_state and is_strict:
            problems += _find_lacking_states(source, sharded)
        stop_unless_it_fits(planned, problems, found.path, what=what, group=group)
        if optimizer is not None:
            optimizer.zero_grad()
        run_on_all_ranks(planned.apply, what=what, group=group)
    return DeepSpeedLoadReport(
        path=found.path,
        step=found.step,
        stage=found.stage,
        world_size=found.world_size,
        num_params=len(source.params),
        num_states=sum(map(len, (source.states or {}).values())) if has_state else 0,
        missing=report.missing,
        unexpected=report.unexpected,
        engine=found.engine,
        client_state=found.client_state,
    )


def _describe(found: DeepSpeedFolder) -> str:
    params, states = found.source.params, found.source.states or {}
    content = {n: {k: str(r.shape) for k, r in state.items()} for n, state in states.items()}
    crc32 = zlib.crc32(repr((sorted(params), content)).encode())
    return f"step {found.step}, {len(params)} parameters ({crc32:08x})"


def _find_lacking_states(source: StateSource, sharded: ShardedModel) -> list[str]:
    """Return an error text, if any, that names parameters without state in the checkpoint."""
    stepped = {name for options in source.param_groups for name in options["params"]}
    lacking = [
        param_ref.name
        for param_ref in sharded.param_refs
        if param_ref.is_trainable
        and param_ref.name in stepped
        and not any(name in (source.states or {}) for name in param_ref.plan.names)
    ]
    return [f"no optimizer state of {', '.join(map(repr, lacking))}"] if lacking else []
