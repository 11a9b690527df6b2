"""save(): every rank writes its parts, and rank 0 makes a checkpoint of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen
from torch import nn
from zero_comm import collective
from zero_partition import ShardedAverage

from ._part_writer import Written
from ._together import together
from ._writing import Writing


@final
@frozen(kw_only=True)
class SaveReport:
    """What was saved."""

    path: Path  # of the checkpoint's own folder
    num_tensors: int  # whole ones
    num_bytes: int  # of all ranks' files
    linked_bytes: int  # of those, in files that the checkpoint before has too, on this rank


@collective
def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    scheduler: Any = None,
    tag: str | None = None,
    keep: int | None = None,
    exclude_frozen: bool = False,
    is_latest: bool = True,
    average: ShardedAverage | None = None,
) -> SaveReport:
    """Save all that training needs to go on, at any world size, stage and residence. Collective.

    Call it between steps, on every rank; it returns when everything is on disk. A checkpoint is
    complete or not there: whatever ends the job meanwhile, the one before is as it was. Beside what
    is trained, there is 16 MiB in memory, or one parameter's shard where that is larger and rests
    elsewhere. Gradients are not saved.

    Args:
        folder: Of all checkpoints; one that every rank sees. Made if need be.
        model: That was sharded.
        optimizer: That was sharded with it; None saves weights, and no optimizer state.
        step: Whatever number says how far training is, from 0.
        extra: What else is to come back, such as the position of a sampler: None, bools, numbers,
            strings, small tensors; lists, tuples and dicts of these. Rank 0's is kept.
        scheduler: Whatever has `state_dict()`, and gives the like of `extra`. Rank 0's is kept.
        tag: The name of the checkpoint's own folder; "step-" and the step when None. One that is
            there is replaced.
        keep: How many checkpoints to keep, this one included: older ones are removed when this one
            is complete. All when None.
        exclude_frozen: Leave out parameters that do not train; `load` then leaves them as they are.
        is_latest: Whether `load` finds it without its tag.
        average: Of the model's parameters, which `load` takes back at any world size, too.

    Returns:
        Where it is, and how large.

    Raises:
        ConfigError: An argument cannot be, or would have to be pickled; nothing was done.
        FileError: Something could not be written, on this rank or another. The checkpoint before is
            as it was.
        zero_partition.StateError: The model is not sharded, or not with this optimizer; parameters
            are gathered; or an entry of the optimizer's state that has no whole would have to be
            pickled.
        zero_comm.AgreementError: Ranks pass different arguments.
        zero_comm.CommError: A rank did not take part in time.
    """
    return save_with(
        model,
        optimizer,
        folder=folder,
        step=step,
        extra=extra,
        scheduler=scheduler,
        tag=tag,
        keep=keep,
        has_frozen=not exclude_frozen,
        is_latest=is_latest,
        average=average,
    )


def save_with(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, **asked: Any
) -> SaveReport:
    """As `save`, with what an engine keeps besides, and a file system that tests replace."""
    writing = Writing.begin(model, optimizer, **asked)
    group = writing.group
    try:
        said = together(writing.write, what="save()", group=group)
        together(lambda: writing.publish(said), what="save()", group=group)
    finally:
        writing.abandon()
    return report_of(writing, said)


def report_of(writing: Writing, said: Sequence[dict[str, Any]]) -> SaveReport:
    """Of a checkpoint that is complete."""
    written = [Written(**of_rank) for of_rank in said]
    path = writing.request.folder / writing.request.tag
    return SaveReport(
        path=path,
        num_tensors=writing.num_tensors,
        num_bytes=sum(f["bytes"] for of_rank in written for f in of_rank.files.values()),
        linked_bytes=_linked_bytes(path, written[writing.group.rank]),
    )


def _linked_bytes(path: Path, written: Written) -> int:
    try:
        return sum(
            facts["bytes"]
            for name, facts in written.files.items()
            if (path / name).stat().st_nlink > 1
        )
    except OSError:  # pruned or replaced by now
        return 0
