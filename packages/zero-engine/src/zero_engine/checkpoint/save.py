"""save(): every rank writes its parts, and rank 0 makes a checkpoint of them."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import zero_ckpt
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from zero_comm import Group, all_gather_json, check_agreement, collective
from zero_partition import ShardedAverage, StateError
from zero_partition.plan import STAGES
from zero_partition.seams import (
    PartBatch,
    ShardedModel,
    StateParts,
    WholeTensor,
    find_sharded,
    loco_facts,
    loco_state,
    param_groups_of,
    plan_parts,
)

from zero_engine.checks import together
from zero_engine.errors import ConfigError, FileError

from .folder import FILE_SYSTEM, FileSystem, PartialFolder, check_tag
from .manifest import from_json, name_of, to_json
from .pieces import Checkpoint
from .writer import Given, GivenBatch, Written, write_parts


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By the first of its names, in `state_dict()`'s order. Local."""
    return dict(_walk(model))


def differing_buffers(
    buffers: dict[str, Tensor], *, group: Group, timeout_s: float | None = None
) -> dict[str, Tensor]:
    """Those whose values on this rank are not those of rank 0. Collective."""
    mine = {name: zlib.crc32(_bytes_of(tensor)) for name, tensor in buffers.items()}
    first = all_gather_json(mine, group=group, timeout_s=timeout_s)[0]
    return {name: buffers[name] for name in buffers if mine[name] != first.get(name)}


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{key}" if prefix else key, tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


# ---- Every random number generator of a rank, as tensors of bytes by the name of its stream ----


_CPU: Final = "torch.cpu"
_DEVICE: Final = "torch.device"
_PYTHON: Final = "python"
_NUMPY: Final = "numpy"
_TRACKER: Final = "zero_ckpt"


def capture_rngs(device: torch.device) -> dict[str, Tensor]:
    """Where they are: torch's of the CPU and of `device`, Python's, numpy's, zero_ckpt's. Local."""
    streams = {_CPU: torch.get_rng_state(), _PYTHON: _said(random.getstate())}
    if device.type != "cpu":
        streams[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        streams[_NUMPY] = _said((kind, torch.from_numpy(keys.astype("int64")), *rest))
    tracker = zero_ckpt.get_cuda_rng_tracker()
    if tracker.is_initialized():
        streams[_TRACKER] = _said(tracker.state_dict())
    return {name: state.cpu() for name, state in streams.items()}


def restore_rngs(streams: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on where `capture_rngs` was called; what was not there then, or is not now, is left.

    Raises:
        FileError: A state is not one of its generator.
    """
    for name, restore in _RESTORERS.items():
        if name not in streams or (name == _DEVICE and device.type == "cpu"):
            continue
        try:
            restore(streams[name], device)
        except (ValueError, TypeError, RuntimeError, KeyError, LookupError) as error:
            raise FileError(f"state of random numbers {name!r} cannot be read: {error}") from error


def _restore_cpu(state: Tensor, device: torch.device) -> None:
    torch.set_rng_state(state)


def _restore_device(state: Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def _restore_python(state: Tensor, device: torch.device) -> None:
    random.setstate(_value_of(state))


def _restore_numpy(state: Tensor, device: torch.device) -> None:
    if "numpy" in sys.modules:
        kind, keys, *rest = _value_of(state)
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _restore_tracker(state: Tensor, device: torch.device) -> None:
    zero_ckpt.get_cuda_rng_tracker().load_state_dict(_value_of(state))


_RESTORERS: Final = {
    _CPU: _restore_cpu,
    _DEVICE: _restore_device,
    _PYTHON: _restore_python,
    _NUMPY: _restore_numpy,
    _TRACKER: _restore_tracker,
}


def _said(value: Any) -> Tensor:
    content = json.dumps(to_json(value, "state of random numbers")).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _value_of(state: Tensor) -> Any:
    return from_json(json.loads(state.numpy().tobytes()))


# ---- A checkpoint on its way to disk: what every rank writes, and what rank 0 makes of it ----


_TIMEOUT_S: Final = 60.0
_AGREED: Final = ("tag", "step", "keep", "has_frozen", "is_latest")


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


@define(eq=False)
class Writing:
    """A checkpoint that is being written. `begin` is collective; all else is local.

    Attributes:
        group: Of the model.
        request: What was asked for.
        path: Of the folder that is written to.
        num_tensors: Whole ones.
        loco_facts: What errors of encoding gradients that are saved are of.
        num_updates: Of the average; None where none is saved.
        frozen_batches: What this rank writes of parameters that do not train.
        batches: All else that it writes.
    """

    group: Group
    request: SaveRequest
    parts: StateParts
    stage: int
    num_tensors: int
    loco_facts: dict[str, str]
    num_updates: int | None
    frozen_batches: list[GivenBatch]
    batches: list[GivenBatch]
    system: FileSystem
    path: Path = field(init=False)
    _partial: PartialFolder | None = field(default=None, init=False)  # on rank 0

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        engine: Any = None,
        average: ShardedAverage | None = None,
        system: FileSystem = FILE_SYSTEM,
        warns: bool = True,
        **asked: Any,
    ) -> Writing:
        """See what there is to write, and make the folder for it. Collective."""
        sharded = sharded_of(model, optimizer, "save()")
        sharded.refuse_while_gathered("save()")
        if warns and any(g.has_local for g in sharded.reducer.gradients):
            warn_of_gradients(stacklevel=4)
        groups = [] if optimizer is None else param_groups_of(sharded)
        group = sharded.whole
        _check_folder(asked["folder"], group)
        request = _check(engine=engine, param_groups=groups, **asked)
        facts = {name: str(getattr(request, name)) for name in _AGREED}
        facts |= {"optimizer": str(optimizer is not None), "average": str(average is not None)}
        check_agreement(facts, group=group, timeout_s=_TIMEOUT_S)
        parts = plan_parts(
            sharded,
            has_state=optimizer is not None,
            has_frozen=request.has_frozen,
            timeout_s=_TIMEOUT_S,
        )
        buffers = persistent_buffers(model)
        others = differing_buffers(buffers, group=group, timeout_s=_TIMEOUT_S)
        has_state = optimizer is not None
        own = {
            "rank_buffers": others,
            "rngs": capture_rngs(group.device),
            "loco": loco_state(sharded) if has_state else {},
        }
        given = parts if sharded.routes.is_first_replica else evolve(parts, batches=())
        frozen_batches, batches = given_batches(given, group.rank, buffers, own)
        if sharded.routes.is_first_replica:
            own_state = {str(number): tensor for number, tensor in enumerate(parts.own)}
            batches += _whole_batches(("own_state", str(sharded.group.rank)), own_state)
        if average is not None and sharded.routes.is_first_replica:
            batches += [_given_of(batch, "average") for batch in average.batches()]
        self = cls(
            group,
            request,
            parts,
            stage_of(sharded),
            len(parts.tensors) + len(buffers),
            loco_facts(sharded) if has_state else {},
            None if average is None else average.num_updates,
            frozen_batches,
            batches,
            system,
        )
        name = together(self._make_folder, what="save()", group=group)[0]
        self.path = request.folder / name
        return self

    def _make_folder(self) -> str | None:
        if self.group.rank:
            return None
        self._partial = PartialFolder.begin(self.request.folder, self.request.tag, self.system)
        return self._partial.path.name

    def write(self) -> dict[str, Any]:
        """Write what this rank gives; returns what it has written, as JSON can say it."""
        before = _before(self.path.parent) if self.frozen_batches else None
        name, system = f"{self.group.rank:05}", self.system
        first = write_parts(
            self.path, f"frozen-{name}", self.frozen_batches, system=system, before=before
        )
        then = write_parts(self.path, f"rank-{name}", self.batches, system=system)
        return {"pieces": [*first.pieces, *then.pieces], "files": first.files | then.files}

    def publish(self, said: Sequence[dict[str, Any]]) -> None:
        """On rank 0, make a complete checkpoint of what all ranks have written."""
        if self._partial is not None:
            written = [Written(**of_rank) for of_rank in said]
            content = manifest_of(self, written, self._partial.serial)
            request = self.request
            self._partial.publish(content, is_latest=request.is_latest, keep=request.keep)

    def abandon(self) -> None:
        """Remove what there is; after `publish`, nothing happens."""
        if self._partial is not None:
            self._partial.abandon()


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


def _check_folder(folder: Any, group: Group) -> None:
    """On all ranks alike, that there is a name: rank 0 alone may have one. Collective."""
    is_named = isinstance(folder, str | os.PathLike) and bool(str(folder))
    said = str(Path(folder)) if is_named else repr(folder)
    check_agreement({"folder": said}, group=group, timeout_s=_TIMEOUT_S)
    if not is_named:
        raise ConfigError(
            f"save(): expected the path of a folder that every rank sees, got {folder!r} "
            f"(rank {group.rank}); pass the same one on all ranks"
        )


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
    own: dict[str, dict[str, Tensor]],
) -> tuple[list[GivenBatch], list[GivenBatch]]:
    """What this rank writes: of frozen parameters, and all else. Local."""
    trained: list[GivenBatch] = []
    frozen_ones: list[GivenBatch] = []
    for batch in parts.batches:
        given = _given_of(batch)
        (frozen_ones if batch.is_frozen else trained).append(given)
    if rank == 0:
        trained += _whole_batches(("buffers",), buffers)
    for section, tensors in own.items():  # of this rank alone
        trained += _whole_batches((section, str(rank)), tensors)
    return frozen_ones, trained


def _given_of(batch: PartBatch, section: str = "params") -> GivenBatch:
    runs = (
        Given(
            _path_of(p.tensor, section), p.tensor.dtype, p.tensor.shape, p.span.start, p.span.stop
        )
        for p in batch.parts
    )
    return GivenBatch(tuple(runs), batch.read, batch.is_resident)


def _path_of(tensor: WholeTensor, section: str = "params") -> tuple[str, ...]:
    if tensor.entry is None:
        return (section, tensor.name)
    return ("optimizer", tensor.name, tensor.entry)


def _whole_batches(prefix: tuple[str, ...], tensors: dict[str, Tensor]) -> Iterable[GivenBatch]:
    for name, tensor in tensors.items():
        run = Given((*prefix, name), tensor.dtype, tensor.shape, 0, tensor.numel())
        flat: Callable[[], Sequence[Tensor]] = partial(_flatten, tensor)
        yield GivenBatch((run,), flat)


def _flatten(tensor: Tensor) -> list[Tensor]:
    return [tensor.detach().reshape(-1)]


def _before(folder: Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder)
    except FileError:  # it is damaged: then everything is written
        return None


def manifest_of(writing: Writing, written: Sequence[Written], serial: int) -> dict[str, Any]:
    """What the manifest says. Local."""
    request, parts = writing.request, writing.parts
    names = (
        "params",
        "buffers",
        "rank_buffers",
        "optimizer",
        "own_state",
        "rngs",
        "loco",
        "average",
    )
    sections: dict[str, Any] = {name: {} for name in names}
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
        "world_size": writing.group.world_size,
        "stage": writing.stage,
        "excludes_frozen": not request.has_frozen,
        **sections,
        "own_said": parts.own_said,
        "loco_facts": writing.loco_facts,
        "num_updates": writing.num_updates,
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


# ---- save(): every rank writes its parts, and rank 0 makes a checkpoint of them ----


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
