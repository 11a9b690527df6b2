"""load_deepspeed(): what DeepSpeed's ZeRO saved, into a model and an optimizer of ours."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import nn
from zero_comm import Group, check_agreement, collective
from zero_partition.seams import (
    ShardedModel,
    StateSource,
    find_sharded,
    load_ranges,
    param_groups_of,
    plan_load,
)

from zero_engine.checks import default_group, together

from .deepspeed import DeepSpeedFolder
from .load import refuse
from .save import sharded_of

_WHAT: Final = "load_deepspeed()"
_TIMEOUT_S: Final = 60.0


@final
@frozen(kw_only=True)
class DeepSpeedLoadReport:
    """What was loaded."""

    path: Path  # of the folder the files lie in
    step: int  # DeepSpeed's global_steps
    stage: int  # that saved it
    world_size: int  # likewise
    num_params: int  # in the files
    num_states: int  # entries of optimizer state that were loaded, of whole parameters
    missing: tuple[str, ...]  # parameters and buffers that stayed as they were
    unexpected: tuple[str, ...]  # that the model does not have
    engine: Mapping[str, Any]  # what its engine kept besides: counters, scheduler; not restored
    client_state: Mapping[str, Any]  # what `save_checkpoint` was given

    def __str__(self) -> str:
        return (
            f"loaded {self.num_params} parameters and {self.num_states} entries of optimizer state "
            f"of step {self.step}, stage {self.stage}, {self.world_size} ranks, from {self.path}"
        )


@collective
def load_deepspeed(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tag: str | None = None,
    is_strict: bool = True,
    group: Group | None = None,
) -> DeepSpeedLoadReport:
    """Go on from a checkpoint that DeepSpeed's ZeRO saved at stage 1, 2 or 3. Collective.

    Parameters and optimizer state go by name and element into what each rank keeps, at any world
    size, stage and residence. Those that trained come from DeepSpeed's fp32 partitions: masters
    take them as they are. Each rank maps the files and reads the elements it keeps. Options of
    param groups, learning rates too, stay those of `optimizer`; loss scales and random numbers are
    not read, and what the engine kept besides is in the report only.

    Files are read as tensors and plain values (`weights_only=True`), and nothing of them is run.
    DeepSpeed need not be installed.

    Args:
        folder: That `save_checkpoint` was given, or the one of a tag in it.
        model: That was sharded; without `optimizer` also one inside `Init`, on the meta device, or
            plain, as for `load_pretrained`.
        optimizer: That was sharded with it; None leaves its state as it is.
        tag: Which checkpoint; what the folder's file `latest` says when None.
        is_strict: Whether missing and unexpected names, and trained parameters without state in the
            files, are errors.
        group: As for `load_pretrained`, where the model is not sharded yet.

    Returns:
        What was loaded; its `step` is where training goes on.

    Raises:
        FileError: A file is missing, damaged, of tensor, pipeline or expert parallelism, or asks
            for more than tensors and plain values: it is named with what it asks for.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing was
            written.
        zero_partition.StateError: `optimizer` was given and not sharded with the model; or a
            forward is running.
        zero_comm.AgreementError: Ranks see different files or pass different arguments.
        zero_comm.CommError: A rank did not take part in time.
    """
    is_plain = optimizer is None and find_sharded(model) is None
    sharded = None if is_plain else sharded_of(model, optimizer, _WHAT)
    if sharded is not None:
        group = sharded.whole
    group = default_group(model) if group is None else group
    opened: list[DeepSpeedFolder] = []
    together(
        lambda: opened.append(DeepSpeedFolder.open(folder, tag)),
        what=_WHAT,
        group=group,
        timeout_s=_TIMEOUT_S,
    )
    (found,) = opened
    content = {n: {k: str(r.shape) for k, r in state.items()} for n, state in found.states.items()}
    facts = {
        "checkpoint": f"step {found.step}, {len(found.params)} parameters "
        f"({zlib.crc32(repr((sorted(found.params), content)).encode()):08x})",
        "optimizer": str(optimizer is not None),
        "is_strict": str(is_strict),
    }
    check_agreement(facts, group=group, timeout_s=_TIMEOUT_S)
    num_states = 0
    if sharded is None:
        also = {alias: found.params[name] for alias, name in found.ties.items()}
        readers = {**found.params, **also, **found.buffers}
        report = load_ranges(model, readers, group=group, strict=is_strict)
        missing, unexpected = report.missing, report.unexpected
    else:
        groups = [{"params": options["params"]} for options in param_groups_of(sharded)]
        states = {name: state for name, state in found.states.items() if state}
        source = StateSource(
            params=found.params,
            buffers=found.buffers,
            ties=found.ties,
            may_lack=frozenset(),
            states=None if optimizer is None else states,
            param_groups=groups,
            where=str(found.path),
        )
        planned = plan_load(sharded, source, is_strict=is_strict)
        missing, unexpected = planned.missing, planned.unexpected
        problems = list(planned.problems)
        if optimizer is not None and is_strict:
            problems += _find_lacking_states(found, sharded, groups)
        refuse(problems, found.path, what=_WHAT, group=group)
        if optimizer is not None:
            optimizer.zero_grad()
            num_states = sum(map(len, states.values()))
        together(planned.apply, what=_WHAT, group=group)
    return DeepSpeedLoadReport(
        path=found.path,
        step=found.step,
        stage=found.stage,
        world_size=found.world_size,
        num_params=len(found.params),
        num_states=num_states,
        missing=missing,
        unexpected=unexpected,
        engine=found.engine,
        client_state=found.client_state,
    )


def _find_lacking_states(
    found: DeepSpeedFolder, sharded: ShardedModel, groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Trained parameters would begin anew if nothing was said."""
    stepped = {name for options in groups for name in options["params"]}
    lacking = [
        place.name
        for place in sharded.places
        if place.is_trainable
        and place.name in stepped
        and not any(found.states.get(name) for name in place.plan.names)
    ]
    return [f"no optimizer state of {', '.join(map(repr, lacking))}"] if lacking else []
