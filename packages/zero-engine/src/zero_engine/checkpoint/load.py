"""load(): all of a checkpoint, or nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import nn
from zero_comm import Group, check_agreement, collective
from zero_partition import LoadError, ShardedAverage
from zero_partition.seams import (
    ShardedModel,
    StateLoad,
    StateSource,
    loco_facts,
    plan_load,
    restore_loco,
)

from zero_engine.checks import check_folder, together
from zero_engine.errors import FileError

from .deepspeed import holds_deepspeed
from .pieces import Checkpoint, find_complete, holds_parts
from .pretrained import holds_weights
from .ranges import Range
from .save import restore_rngs, sharded_of

_TIMEOUT_S: Final = 60.0


@final
@frozen(kw_only=True)
class LoadReport:
    """What was restored; `print` it."""

    path: Path  # of the checkpoint's own folder
    step: int
    extra: Any
    num_tensors: int  # whole ones, of parameters, buffers and optimizer state
    num_tensors_saved: int
    num_bytes: int  # of those that were restored, whole
    missing: tuple[str, ...]  # parameters and buffers that stayed as they were
    unexpected: tuple[str, ...]  # that the model does not have
    restores_rngs: bool  # they were saved by as many ranks
    begins_anew: tuple[str, ...]  # what training kept and cannot go on with here, each with why
    engine: Any  # what an engine keeps

    def __str__(self) -> str:
        anew = f"; begins anew: {'; '.join(self.begins_anew)}" if self.begins_anew else ""
        return (
            f"restored {self.num_tensors} of {self.num_tensors_saved} tensors, {self.num_bytes} "
            f"bytes, of step {self.step} from {self.path}{anew}"
        )


@collective
def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    tag: str | None = None,
    is_strict: bool = True,
    restores_rngs: bool = True,
    missing_ok: bool = False,
    average: ShardedAverage | None = None,
) -> LoadReport | None:
    """Go on where `save` was called: another world size, stage, residence or precision will do.

    Collective. All files are checked before anything is written; each rank then reads the elements
    that it keeps, 16 MiB at a time. Gradients that are there are dropped. Options of param groups,
    learning rates too, are the saved ones; `fused`, `foreach`, `capturable` and `differentiable`
    stay. Random numbers go on where they were at the same world size only, and so do the errors of
    encoding gradients that `Wire.loco` feeds back, which are of one layout and wire. State of a
    parameter with an entry that has no whole goes on where each rank keeps the same elements as the
    one that saved them. The report says where something begins anew.

    Args:
        folder: Of all checkpoints: what `save` was given, not the folder of one of them.
        model: That was sharded.
        optimizer: That was sharded with it; None leaves its state as it is.
        scheduler: Whatever has `load_state_dict()`, for what `save` was given.
        tag: Which checkpoint; the newest complete one when None.
        is_strict: Whether it is an error if names or entries of state are missing or unexpected, or
            param groups hold other parameters.
        restores_rngs: Whether generators of random numbers go on, too.
        missing_ok: Return None where there is nothing yet, at the first start of a job that resumes
            when it can: no such folder, or one without a complete checkpoint.
        average: Of the model's parameters, for what `save` was given.

    Returns:
        What was restored; None only with `missing_ok`.

    Raises:
        ConfigError: `folder` is no path.
        FileError: There is no such folder, no checkpoint in it, or none of that tag; it is a file,
            one checkpoint's own folder, or holds what DeepSpeed or Hugging Face saved (whatever
            `missing_ok`): it says what to call. Or a file of the checkpoint is damaged: the tags
            that can be loaded are named, and nothing was written. If a file cannot be read any more
            after it was checked, the model is in parts as it was, and the message says so.
        zero_partition.LoadError: Names all that is missing, unexpected or does not fit; nothing was
            written.
        zero_partition.StateError: The model is not sharded, or not with this optimizer; or a
            forward is running.
        zero_comm.AgreementError: Ranks pass different arguments, or see different files.
        zero_comm.CommError: A rank did not take part in time.
    """
    check_folder("load()", folder)
    sharded = sharded_of(model, optimizer, "load()")
    group = sharded.whole
    opened: list[Checkpoint | None] = []

    def open_it() -> str:
        opened.append(_open(Path(folder), tag, missing_ok=missing_ok))
        return "none" if opened[0] is None else f"{opened[0].tag} ({opened[0].serial})"

    found = together(open_it, what="load()", group=group, timeout_s=_TIMEOUT_S)
    checkpoint = opened[0]
    facts = {"checkpoint": found[group.rank], "is_strict": str(is_strict)}
    facts |= {"optimizer": str(optimizer is not None), "scheduler": str(scheduler is not None)}
    facts["average"] = str(average is not None)
    check_agreement(facts, group=group, timeout_s=_TIMEOUT_S)
    if checkpoint is None:
        return None
    planned = _plan(checkpoint, sharded, is_state=optimizer is not None, is_strict=is_strict)
    problems = list(planned.problems)
    if scheduler is not None and checkpoint.scheduler is None and is_strict:
        problems.append("it was saved without a scheduler")
    if average is not None and checkpoint.num_updates is not None:
        problems += average.find_problems(checkpoint.average)
    elif average is not None and is_strict:
        problems.append("it was saved without an average")
    refuse(problems, checkpoint.path, what="load()", group=group)
    together(lambda: _verify(checkpoint, group), what="load()", group=group)
    if optimizer is not None:
        optimizer.zero_grad()
    loco_problem = None if optimizer is None else _why_no_loco(checkpoint, sharded)
    does_rngs = restores_rngs and checkpoint.world_size == group.world_size

    def apply() -> None:
        try:
            planned.apply()
            _fill_own_buffers(checkpoint, sharded)
            if scheduler is not None and checkpoint.scheduler is not None:
                scheduler.load_state_dict(checkpoint.scheduler)
            if average is not None and checkpoint.num_updates is not None:
                average.load(checkpoint.average, checkpoint.num_updates)
            if optimizer is not None:
                own = {} if loco_problem else checkpoint.loco.get(group.rank, {})
                restore_loco(sharded, {name: reader.whole() for name, reader in own.items()})
            if does_rngs:
                streams = checkpoint.rngs.get(group.rank, {})
                restore_rngs({k: r.whole() for k, r in streams.items()}, group.device)
        except OSError as error:
            raise FileError(
                f"{checkpoint.path}: {error}; it failed after some values were written: load again "
                "before training goes on"
            ) from error

    together(apply, what="load()", group=group)
    weights = {**checkpoint.params, **checkpoint.buffers}
    restored: list[Any] = [r for name, r in weights.items() if name not in planned.unexpected]
    states = checkpoint.optimizer.values() if optimizer is not None else ()
    entries = [entry for of_param in states for entry in of_param.values()]
    return LoadReport(
        path=checkpoint.path,
        step=checkpoint.step,
        extra=checkpoint.extra,
        num_tensors=planned.num_tensors,
        num_tensors_saved=len(weights) + len(entries),
        num_bytes=sum(e.num_bytes for e in restored + entries if isinstance(e, Range)),
        missing=planned.missing,
        unexpected=planned.unexpected,
        restores_rngs=does_rngs,
        begins_anew=(*planned.begins_anew, *([loco_problem] if loco_problem else ())),
        engine=checkpoint.engine,
    )


def _open(folder: Path, tag: str | None, *, missing_ok: bool) -> Checkpoint | None:
    """The checkpoint, or None where there is nothing yet and that is no error. Local."""
    mistake = None if find_complete(folder) else _find_mistake(folder.absolute(), tag)
    if mistake is not None:
        raise FileError(f"load(): expected the folder of all checkpoints, got {mistake}")
    is_new = missing_ok and folder.exists() and not any(folder.iterdir())  # whatever the tag
    found = Checkpoint.open(folder, tag) if folder.exists() and not is_new else None
    if found is None and not missing_ok:
        lacks = "holds no complete checkpoint" if folder.exists() else "no such folder"
        aside = ", ".join(map(repr, find_complete(folder)))
        raise FileError(
            f"load(): {folder}: {lacks}{f' but {aside}, to be named by tag=...' if aside else ''}; "
            "pass missing_ok=True where the first start of a job has nothing to load"
        )
    return found


def _find_mistake(path: Path, tag: str | None) -> str | None:
    """What a path is that is no folder of checkpoints of ours, and what to call. Local."""
    if path.is_file():
        return f"the file {path}; load_pretrained(model, path) reads files of weights"
    if holds_parts(path):
        own = "" if path.name.startswith(".") else f" and tag={path.name!r}"
        return f"the folder of one of them, {path}; pass {str(path.parent)!r}{own}"
    if holds_deepspeed(path, tag):
        return (
            f"{path}, which DeepSpeed saved; call load_deepspeed(folder, model, optimizer), or "
            "engine.load_checkpoint(folder)"
        )
    if holds_weights(path):
        return f"{path}, which holds weights alone; call load_pretrained(model, folder)"
    return None


def _plan(
    checkpoint: Checkpoint, sharded: ShardedModel, *, is_state: bool, is_strict: bool
) -> StateLoad:
    may_lack: frozenset[str] = frozenset()
    if checkpoint.excludes_frozen:
        may_lack = frozenset(place.name for place in sharded.places if not place.is_trainable)
    source = StateSource(
        params=checkpoint.params,
        buffers=checkpoint.buffers,
        ties=checkpoint.ties,
        may_lack=may_lack,
        states=checkpoint.optimizer if is_state else None,
        param_groups=checkpoint.param_groups,
        where=str(checkpoint.path),
        own_said=checkpoint.own_said if is_state else {},
        own=checkpoint.own_state,
    )
    return plan_load(sharded, source, is_strict=is_strict)


def refuse(problems: Sequence[str], path: Path, *, what: str, group: Group) -> None:
    """What does not fit on any rank stops all of them. Collective."""

    def look() -> None:
        if problems:
            raise LoadError(
                f"{path}: cannot be loaded, and nothing was written: {'; '.join(problems)}"
            )

    together(look, what=what, group=group)


def _verify(checkpoint: Checkpoint, group: Group) -> None:
    """Every rank checks some of the files, of about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(group.world_size)]
    sizes = [0] * group.world_size
    largest_first = sorted(checkpoint.files.items(), key=lambda item: -item[1].num_bytes)
    for name, facts in largest_first:
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += facts.num_bytes
    checkpoint.verify(shares[group.rank])


def _fill_own_buffers(checkpoint: Checkpoint, sharded: ShardedModel) -> None:
    """Those of this rank that were not rank 0's, if as many ranks have saved them."""
    if checkpoint.world_size != sharded.whole.world_size:
        return
    own = checkpoint.rank_buffers.get(sharded.whole.rank, {})
    buffers = dict(sharded.model.named_buffers(remove_duplicate=False))
    for name, reader in own.items():
        if name in buffers:
            buffers[name].copy_(reader.whole())


def _why_no_loco(checkpoint: Checkpoint, sharded: ShardedModel) -> str | None:
    """What to say where errors of encoding are kept, and those that were saved are of others."""
    here, saved = loco_facts(sharded), checkpoint.loco_facts
    if not here:
        return None
    what = "errors of encoding gradients (LoCo)"
    if not saved:
        return f"{what}, of which none were saved"
    for name in here | dict(saved):
        if here.get(name) != saved.get(name):
            return f"{what}: {name} was {saved.get(name)} when they were saved, is {here.get(name)}"
    return None
