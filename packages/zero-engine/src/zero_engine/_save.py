"""save(): every rank writes its parts, and rank 0 makes a checkpoint of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor, nn
from zero_comm import check_agreement
from zero_partition import (
    STAGES,
    ShardedModel,
    StateError,
    StateParts,
    WholeTensor,
    find_sharded,
    param_groups_of,
    plan_parts,
)

from ._checkpoint import Checkpoint
from ._errors import ConfigError, FileError
from ._file_system import FILE_SYSTEM, FileSystem
from ._model_buffers import differing_buffers, persistent_buffers
from ._part_writer import Given, GivenBatch, Written, write_parts
from ._plain_values import name_of, to_json
from ._rngs import capture_rngs
from ._save_folder import PartialFolder, check_tag
from ._together import together

_TIMEOUT_S: Final = 60.0


@final
@frozen(kw_only=True)
class SaveReport:
    """What was saved."""

    path: Path  # of the checkpoint's own folder
    num_tensors: int  # whole ones
    num_bytes: int  # of all ranks' files
    linked_bytes: int  # of those, in files that the checkpoint before has too, on this rank


@frozen(kw_only=True)
class SaveRequest:
    """What a user asked for, checked."""

    folder: Path
    tag: str
    step: int
    extra: Any
    scheduler: Any
    engine: Any
    param_groups: list[dict[str, Any]]  # none where the optimizer is not saved
    keep: int | None
    has_frozen: bool
    is_latest: bool


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

    Returns:
        Where it is, and how large.

    Raises:
        ConfigError: An argument cannot be, or would have to be pickled; nothing was done.
        FileError: Something could not be written, on this rank or another. The checkpoint before is
            as it was.
        zero_partition.StateError: The model is not sharded, or not with this optimizer; parameters
            are gathered; or an entry of the optimizer's state has no whole.
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
    )


def save_with(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    engine: Any = None,
    system: FileSystem = FILE_SYSTEM,
    warns: bool = True,
    **asked: Any,
) -> SaveReport:
    """As `save`, with what an engine keeps besides, and a file system that tests replace."""
    sharded = sharded_of(model, optimizer, "save()")
    sharded.refuse_while_gathered("save()")
    if warns and any(g.has_local for g in sharded.reducer.gradients):
        warn_of_gradients(stacklevel=3)
    groups = [] if optimizer is None else param_groups_of(sharded)
    request = _check(engine=engine, param_groups=groups, **asked)
    group = sharded.group
    facts = {"tag": request.tag, "step": str(request.step), "folder": str(request.folder)}
    facts |= {"optimizer": str(optimizer is not None), "keep": str(request.keep)}
    facts |= {"exclude_frozen": str(not request.has_frozen), "is_latest": str(request.is_latest)}
    check_agreement(facts, group=group, timeout_s=_TIMEOUT_S)
    parts = plan_parts(
        sharded,
        has_state=optimizer is not None,
        has_frozen=request.has_frozen,
        timeout_s=_TIMEOUT_S,
    )
    buffers = persistent_buffers(model)
    others = differing_buffers(buffers, group=group, timeout_s=_TIMEOUT_S)
    batches = given_batches(parts, group.rank, buffers, others, capture_rngs(group.device))
    partial_folder: list[PartialFolder] = []

    def begin() -> str | None:
        if group.rank:
            return None
        partial_folder.append(PartialFolder.begin(request.folder, request.tag, system))
        return partial_folder[0].path.name

    try:
        name = together(begin, what="save()", group=group)[0]
        path = request.folder / name
        write = partial(_write, path, batches, group.rank, system)
        said = together(write, what="save()", group=group)
        written = [Written(**of_rank) for of_rank in said]

        def publish() -> None:
            if partial_folder:
                whole = partial_folder[0]
                content = manifest_of(request, sharded, parts, written, whole.serial)
                whole.publish(content, is_latest=request.is_latest, keep=request.keep)

        together(publish, what="save()", group=group)
    finally:
        for one in partial_folder:
            one.abandon()
    return SaveReport(
        path=request.folder / request.tag,
        num_tensors=len(parts.tensors) + len(buffers),
        num_bytes=sum(f["bytes"] for of_rank in written for f in of_rank.files.values()),
        linked_bytes=_linked_bytes(request.folder / request.tag, written[group.rank]),
    )


def warn_of_gradients(*, stacklevel: int) -> None:
    """Of a step that has begun."""
    warnings.warn(
        "saved in the middle of accumulation: gradients are not saved, and a run that resumes "
        "begins the step anew; save after the step of a boundary",
        stacklevel=stacklevel + 1,
    )


def sharded_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, what: str
) -> ShardedModel:
    """What `shard` made of the two.

    Raises:
        StateError: Nothing, or of others.
    """
    sharded = find_sharded(model)
    if sharded is None:
        raise StateError(
            f"{what}: expected a model that was sharded, got a plain {type(model).__name__}; call "
            "zero_engine.shard(model, optimizer) first, which works in one process too"
        )
    if optimizer is not None and sharded.optimizer is not optimizer:
        raise StateError(
            f"{what}: expected the optimizer that was sharded with the model, got another "
            f"{type(optimizer).__name__}; pass what shard() returned"
        )
    return sharded


def _check(*, folder: Any, tag: Any, step: Any, keep: Any, scheduler: Any, **rest: Any) -> Any:
    for name, value, minimum in (("step", step, 0), ("keep", keep, 1)):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not is_number and not (value is None and name == "keep"):
            raise ConfigError(f"save(): expected {name} to be an int from {minimum}, got {value!r}")
    state = None if scheduler is None else scheduler.state_dict()
    return SaveRequest(
        folder=Path(folder),
        tag=check_tag(f"step-{step}" if tag is None else tag),
        step=step,
        keep=keep,
        scheduler=to_json(state, "save(): scheduler.state_dict()"),
        extra=to_json(rest.pop("extra"), "save(): extra"),
        engine=to_json(rest.pop("engine"), "engine"),
        **rest,
    )


def given_batches(
    parts: StateParts,
    rank: int,
    buffers: dict[str, Tensor],
    others: dict[str, Tensor],
    rngs: dict[str, Tensor],
) -> tuple[list[GivenBatch], list[GivenBatch]]:
    """What this rank writes: of frozen parameters, and all else. Local."""
    trained: list[GivenBatch] = []
    frozen_ones: list[GivenBatch] = []
    for batch in parts.batches:
        runs = tuple(
            Given(_path_of(p.tensor), p.tensor.dtype, p.tensor.shape, p.span.start, p.span.stop)
            for p in batch.parts
        )
        (frozen_ones if batch.is_frozen else trained).append(GivenBatch(runs, batch.read))
    if rank == 0:
        trained += _whole_batches(("buffers",), buffers)
    trained += _whole_batches(("rank_buffers", str(rank)), others)
    trained += _whole_batches(("rngs", str(rank)), rngs)
    return frozen_ones, trained


def _path_of(tensor: WholeTensor) -> tuple[str, ...]:
    if tensor.entry is None:
        return ("params", tensor.name)
    return ("optimizer", tensor.name, tensor.entry)


def _whole_batches(prefix: tuple[str, ...], tensors: dict[str, Tensor]) -> Iterable[GivenBatch]:
    for name, tensor in tensors.items():
        run = Given((*prefix, name), tensor.dtype, tensor.shape, 0, tensor.numel())
        flat: Callable[[], Sequence[Tensor]] = partial(_flatten, tensor)
        yield GivenBatch((run,), flat)


def _flatten(tensor: Tensor) -> list[Tensor]:
    return [tensor.detach().reshape(-1)]


def _write(
    path: Path,
    batches: tuple[list[GivenBatch], list[GivenBatch]],
    rank: int,
    system: FileSystem,
) -> dict[str, Any]:
    frozen_ones, trained = batches
    before = _before(path.parent) if frozen_ones else None
    name = f"{rank:05}"
    first = write_parts(path, f"frozen-{name}", frozen_ones, system=system, before=before)
    then = write_parts(path, f"rank-{name}", trained, system=system)
    return {"pieces": [*first.pieces, *then.pieces], "files": first.files | then.files}


def _before(folder: Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder)
    except FileError:  # it is damaged: then everything is written
        return None


def _linked_bytes(path: Path, written: Written) -> int:
    try:
        return sum(
            facts["bytes"]
            for name, facts in written.files.items()
            if (path / name).stat().st_nlink > 1
        )
    except OSError:  # pruned or replaced by now
        return 0


def manifest_of(
    request: SaveRequest,
    sharded: ShardedModel,
    parts: StateParts,
    written: Iterable[Written],
    serial: int,
) -> dict[str, Any]:
    """What the manifest says. Local."""
    written = list(written)
    sections: dict[str, Any] = {
        name: {} for name in ("params", "buffers", "rank_buffers", "optimizer", "rngs")
    }
    for tensor in parts.tensors:
        _tensor_at(sections, _path_of(tensor), name_of(tensor.dtype), list(tensor.shape))
    for of_rank in written:
        for said in of_rank.pieces:
            tensor = _tensor_at(sections, said["path"], said["dtype"], said["shape"])
            if said["piece"]["stop"] > said["piece"]["start"]:
                tensor["pieces"].append(said["piece"])
    for name, values in parts.values.items():
        of_param = sections["optimizer"].setdefault(name, {})
        for key, value in values.items():
            of_param[key] = {"value": to_json(value, f"optimizer state {key!r} of {name!r}")}
    for name in parts.frozen:
        sections["params"][name]["frozen"] = True
    for name, dtype in parts.computes_in.items():
        sections["params"][name]["computes_in"] = name_of(dtype)
    return {
        "tag": request.tag,
        "serial": serial if request.is_latest else None,
        "step": request.step,
        "world_size": sharded.group.world_size,
        "stage": stage_of(sharded),
        "excludes_frozen": not request.has_frozen,
        **sections,
        "ties": dict(parts.ties),
        "param_groups": [_group_of(group) for group in request.param_groups],
        "scheduler": request.scheduler,
        "engine": request.engine,
        "extra": request.extra,
        "files": {name: facts for of_rank in written for name, facts in of_rank.files.items()},
    }


def _tensor_at(
    sections: dict[str, Any], path: Sequence[str], dtype: str, shape: list[int]
) -> dict[str, Any]:
    at = sections
    for name in path[:-1]:
        at = at.setdefault(name, {})
    return at.setdefault(path[-1], {"dtype": dtype, "shape": shape, "pieces": []})


def _group_of(group: dict[str, Any]) -> dict[str, Any]:
    """Options that are no plain values stay what the next run makes them."""
    said: dict[str, Any] = {}
    for key, value in group.items():
        try:
            said[key] = to_json(value, key)
        except ConfigError:
            continue
    return said


def stage_of(sharded: ShardedModel) -> int:
    """As which stage the model rests; on one rank parameters rest whole. Local."""
    return next(int(stage) for stage, row in STAGES.items() if row == sharded.placements)
