"""save(): every rank writes its parts, and rank 0 makes a checkpoint of them."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import zero_ckpt
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import Group, all_gather_json, check_agreement, collective
from zero_partition import ShardedAverage, StateError
from zero_partition.plan import STAGES
from zero_partition.seams import (
    ModelState,
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
from .writer import Given, GivenBatch, write_files


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By the first of its names, in `state_dict()`'s order. Local."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                found.setdefault(id(tensor), (f"{prefix}.{key}" if prefix else key, tensor))
    return dict(found.values())


def _differing_buffers(buffers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Those whose values on this rank are not those of rank 0. Collective."""
    mine = {}
    for name, tensor in buffers.items():
        flat = tensor.detach().cpu().contiguous().view(-1)
        mine[name] = zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    first = all_gather_json(mine, group=group, timeout_s=_TIMEOUT_S)[0]
    return {name: buffers[name] for name in buffers if mine[name] != first.get(name)}


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
    for name, state in streams.items():
        try:
            if name == _CPU:
                torch.set_rng_state(state)
            elif name == _DEVICE and device.type != "cpu":
                torch.get_device_module(device).set_rng_state(state, device)
            elif name == _PYTHON:
                random.setstate(_value_of(state))
            elif name == _NUMPY and "numpy" in sys.modules:
                kind, keys, *rest = _value_of(state)
                state_of_numpy = (kind, keys.numpy().astype("uint32"), *rest)
                sys.modules["numpy"].random.set_state(state_of_numpy)
            elif name == _TRACKER:
                zero_ckpt.get_cuda_rng_tracker().load_state_dict(_value_of(state))
        except (ValueError, TypeError, RuntimeError, LookupError) as error:
            raise FileError(f"state of random numbers {name!r} cannot be read: {error}") from error


def _said(value: Any) -> Tensor:
    content = json.dumps(to_json(value, "state of random numbers")).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _value_of(state: Tensor) -> Any:
    return from_json(json.loads(state.numpy().tobytes()))


_TIMEOUT_S: Final = 60.0
_SECTIONS: Final = (  # of the manifest, whose tensors lie in files
    *("params", "buffers", "rank_buffers", "optimizer", "own_state", "rngs", "loco", "average"),
)


@final
@frozen(kw_only=True)
class SaveReport:
    """What was saved."""

    path: Path  # of the checkpoint's own folder
    num_tensors: int  # whole ones
    num_bytes: int  # of all ranks' files
    linked_bytes: int  # of those, in files that the checkpoint before has too, on this rank


@define(eq=False)
class CheckpointWriter:
    """A checkpoint that is being written. `begin` is collective; all else is local."""

    group: Group  # of the model
    folder: Path  # of all checkpoints
    keep: int | None
    is_latest: bool
    content: dict[str, Any]  # of the manifest, as far as it is known
    parts: StateParts
    batches: list[GivenBatch]  # what this rank writes
    num_tensors: int  # whole ones
    system: FileSystem
    path: Path = field(init=False)  # of the folder that is written to
    _partial: PartialFolder | None = field(default=None, init=False)  # on rank 0

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        folder: Any,
        step: Any,
        extra: Any = None,
        scheduler: Any = None,
        tag: Any = None,
        keep: Any = None,
        has_frozen: bool = True,
        is_latest: bool = True,
        average: ShardedAverage | None = None,
        engine: Any = None,
        system: FileSystem = FILE_SYSTEM,
        warns: bool = True,
    ) -> CheckpointWriter:
        """See what there is to write, and make the folder for it. Collective.

        Arguments are those of `save`; an engine keeps something besides, and warns itself.
        """
        sharded = sharded_of(model, optimizer, "save()")
        sharded.require("save()", no=(ModelState.GATHERED,))
        if warns and any(g.has_local for g in sharded.reducer.gradients):
            warn_of_gradients(stacklevel=4)
        group = sharded.whole
        _check_folder(folder, group)
        _check_number("step", step, 0)
        if keep is not None:
            _check_number("keep", keep, 1)
        state = None if scheduler is None else scheduler.state_dict()
        has_state = optimizer is not None
        content: dict[str, Any] = {
            "tag": check_tag(f"step-{step}" if tag is None else tag),
            "serial": None,
            "step": step,
            "world_size": group.world_size,
            # On one rank parameters rest whole.
            "stage": next(int(s) for s, row in STAGES.items() if row == sharded.placements),
            "excludes_frozen": not has_frozen,
            **{name: {} for name in _SECTIONS},
            "own_said": {},
            "loco_facts": loco_facts(sharded) if has_state else {},
            "num_updates": None if average is None else average.num_updates,
            "ties": {},
            "param_groups": [_group_of(g) for g in param_groups_of(sharded)] if has_state else [],
            "scheduler": to_json(state, "save(): scheduler.state_dict()"),
            "engine": to_json(engine, "engine"),
            "extra": to_json(extra, "save(): extra"),
        }
        facts = {"tag": content["tag"], "step": step, "keep": keep, "has_frozen": has_frozen}
        facts |= {"is_latest": is_latest, "optimizer": has_state, "average": average is not None}
        said = {name: str(value) for name, value in facts.items()}
        check_agreement(said, group=group, timeout_s=_TIMEOUT_S)
        parts = plan_parts(
            sharded, has_state=has_state, has_frozen=has_frozen, timeout_s=_TIMEOUT_S
        )
        content |= {"own_said": parts.own_said, "ties": dict(parts.ties)}
        is_first = sharded.routes.is_first_replica
        batches = [_given_of(batch) for batch in parts.batches] if is_first else []
        buffers, rank = _persistent_buffers(model), str(group.rank)
        others = _differing_buffers(buffers, group)
        if group.rank == 0:
            batches += _whole_batches(buffers, "buffers")
        batches += _whole_batches(others, "rank_buffers", rank)
        batches += _whole_batches(capture_rngs(group.device), "rngs", rank)
        batches += _whole_batches(loco_state(sharded) if has_state else {}, "loco", rank)
        if is_first:
            own = {str(number): tensor for number, tensor in enumerate(parts.own)}
            batches += _whole_batches(own, "own_state", str(sharded.group.rank))
        if is_first and average is not None:
            batches += [_given_of(batch, "average") for batch in average.batches()]
        num_tensors = len(parts.tensors) + len(buffers)
        self = cls(
            group, Path(folder), keep, is_latest, content, parts, batches, num_tensors, system
        )
        self.path = self.folder / together(self._make_folder, what="save()", group=group)[0]
        return self

    def _make_folder(self) -> str | None:
        if self.group.rank:
            return None
        self._partial = PartialFolder.begin(self.folder, self.content["tag"], self.system)
        return self._partial.path.name

    def write(self) -> dict[str, Any]:
        """Write what this rank gives; returns what it has written, as JSON can say it."""
        has_frozen = any(batch.is_frozen for batch in self.batches)
        before = _before(self.folder) if has_frozen else None
        return write_files(
            self.path, self.group.rank, self.batches, system=self.system, before=before
        )

    def publish(self, said: Sequence[dict[str, Any]]) -> None:
        """On rank 0, make a complete checkpoint of what all ranks have written."""
        if self._partial is not None:
            self._fill_manifest(said)
            self.content["serial"] = self._partial.serial if self.is_latest else None
            self._partial.publish(self.content, is_latest=self.is_latest, keep=self.keep)

    def _fill_manifest(self, said: Sequence[dict[str, Any]]) -> None:
        content, parts = self.content, self.parts
        for tensor in parts.tensors:
            _tensor_at(content, _path_of(tensor), name_of(tensor.dtype), list(tensor.shape))
        for one in (one for of_rank in said for one in of_rank["pieces"]):
            tensor = _tensor_at(content, one["path"], one["dtype"], one["shape"])
            if one["piece"]["stop"] > one["piece"]["start"]:
                tensor["pieces"].append(one["piece"])
        for name, values in parts.values.items():
            of_param = content["optimizer"].setdefault(name, {})
            for key, value in values.items():
                of_param[key] = {"value": to_json(value, f"optimizer state {key!r} of {name!r}")}
        for name in parts.frozen:
            content["params"][name]["frozen"] = True
        for name, dtype in parts.computes_in.items():
            content["params"][name]["computes_in"] = name_of(dtype)
        content["files"] = {name: f for of_rank in said for name, f in of_rank["files"].items()}

    def abandon(self) -> None:
        """Remove what there is; after `publish`, nothing happens."""
        if self._partial is not None:
            self._partial.abandon()

    def report(self, said: Sequence[dict[str, Any]]) -> SaveReport:
        """Of a checkpoint that is complete."""
        path = self.folder / self.content["tag"]
        mine = said[self.group.rank]["files"]
        try:
            linked = [f["bytes"] for n, f in mine.items() if (path / n).stat().st_nlink > 1]
        except OSError:  # pruned or replaced by now
            linked = []
        return SaveReport(
            path=path,
            num_tensors=self.num_tensors,
            num_bytes=sum(f["bytes"] for of_rank in said for f in of_rank["files"].values()),
            linked_bytes=sum(linked),
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


def _check_number(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"save(): expected {name} to be an int from {minimum}, got {value!r}")


def _given_of(batch: PartBatch, section: str = "params") -> GivenBatch:
    runs = (
        Given(
            _path_of(p.tensor, section), p.tensor.dtype, p.tensor.shape, p.span.start, p.span.stop
        )
        for p in batch.parts
    )
    return GivenBatch(tuple(runs), batch.read, batch.is_resident, batch.is_frozen)


def _path_of(tensor: WholeTensor, section: str = "params") -> tuple[str, ...]:
    if tensor.entry is None:
        return (section, tensor.name)
    return ("optimizer", tensor.name, tensor.entry)


def _whole_batches(tensors: dict[str, Tensor], *path: str) -> Iterable[GivenBatch]:
    for name, tensor in tensors.items():
        run = Given((*path, name), tensor.dtype, tensor.shape, 0, tensor.numel())
        yield GivenBatch((run,), partial(_flatten, tensor))


def _flatten(tensor: Tensor) -> list[Tensor]:
    return [tensor.detach().reshape(-1)]


def _before(folder: Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder)
    except FileError:  # it is damaged: then everything is written
        return None


def _tensor_at(
    content: dict[str, Any], path: Sequence[str], dtype: str, shape: list[int]
) -> dict[str, Any]:
    at = content
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
    writer = CheckpointWriter.begin(model, optimizer, **asked)
    try:
        said = together(writer.write, what="save()", group=writer.group)
        together(lambda: writer.publish(said), what="save()", group=writer.group)
    finally:
        writer.abandon()
    return writer.report(said)
