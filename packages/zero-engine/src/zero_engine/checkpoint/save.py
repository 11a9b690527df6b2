"""save(): every rank writes its parts, and rank 0 makes a checkpoint of them."""

from __future__ import annotations

import json
import os
import random
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import zero_ckpt
from torch import Tensor, nn
from zero_comm import AnyRanks, Group, all_gather_json, check_agreement, collective
from zero_comm.logs import warn_user
from zero_partition import ShardedAverage, StateError
from zero_partition.plan import STAGES
from zero_partition.seams import (
    ModelPhase,
    ParamRef,
    PartBatch,
    ShardedModel,
    StateParts,
    WholeTensor,
    describe_state_dict,
    find_sharded,
    local_of,
    loco_facts,
    loco_state,
    param_groups_of,
    pattern_of,
    plan_parts,
)

from zero_engine.errors import ConfigError, FileError
from zero_engine.sharding import has_optimizer
from zero_engine.torch_private import non_persistent_buffers, own_buffers

from .folder import LATEST, on_all, run_on_all_ranks
from .limits import LARGEST_NUMBER, LONGEST_TAG_BYTES
from .manifest import from_json, name_of, no_pieces, to_json
from .pipeline import CheckpointRanks, join_stages
from .writer import CheckpointWriter, SaveReport, SaveRequest, WriteBatch, WriteItem, tensor_at

_TIMEOUT_S: Final = 60.0
# Sections of the manifest whose tensors are in files.
_SECTIONS: Final = (
    *("params", "buffers", "rank_buffers", "optimizer", "own_state", "rngs", "loco", "average"),
)


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
    stages: AnyRanks | None = None,
) -> SaveReport:
    """Save all that training needs to go on, at any world size, stage and offloading. Collective.

    Call it between steps, on every rank; it returns when everything is on disk. A checkpoint is
    complete or absent: whatever ends the job meanwhile, the previous one is unchanged. Saving takes
    16 MiB of memory, or as much as one parameter's shard if that is larger and offloaded. Gradients
    are not saved. Additions of modules to `state_dict()` are: extra state, and entries that are
    neither parameters nor buffers, if they are of the types that `extra` may have.

    Args:
        folder: The folder of all checkpoints, which every rank sees. Made if need be.
        model: The model that was sharded.
        optimizer: The optimizer that was sharded with it; None saves weights, and no optimizer
            state.
        step: A number from 0 that says how far training is.
        extra: Values that `load` returns, such as the position of a sampler: None, bools, numbers,
            strings, small tensors; lists, tuples and dicts of these. Rank 0's are saved.
        scheduler: An object whose `state_dict()` has values as in `extra`. Rank 0's is saved.
        tag: The name of the checkpoint's own folder; "step-" and the step when None. An existing
            checkpoint of this name is replaced.
        keep: How many checkpoints to keep, this one included: older ones are removed when this one
            is complete. All when None.
        exclude_frozen: Leave out parameters that do not train; `load` then leaves them as they are.
        is_latest: Whether `load` finds it without its tag.
        average: An average of the model's parameters, which `load` restores at any world size, too.
        stages: Where `model` is a stage of a pipeline, the ranks that have the other stages, one of
            each: a group, or a dimension of a mesh. All ranks of all stages call it then, with the
            same arguments, and write one checkpoint. It has the names of parameters in their stage,
            which must be those of the whole model. Without it, pass each stage a folder of its own.

    Returns:
        A report of where the checkpoint is, and how large.

    Raises:
        ConfigError: An argument is wrong, or would have to be pickled; nothing was done.
        FileError: Something could not be written, on this rank or another. The previous checkpoint
            is unchanged.
        zero_partition.StateError: The model is not sharded, or not with this optimizer; parameters
            are gathered; or an entry of the optimizer's state that cannot be put together from its
            shards would have to be pickled.
        zero_comm.AgreementError: Ranks pass different arguments.
        zero_comm.CommError: A rank did not take part in time.
    """
    return save_as(
        SaveRequest(
            model=model,
            optimizer=optimizer,
            folder=folder,
            step=step,
            extra=extra,
            scheduler=scheduler,
            tag=tag,
            keep=keep,
            exclude_frozen=exclude_frozen,
            is_latest=is_latest,
            average=average,
            stages=stages,
        )
    )


def save_as(asked: SaveRequest) -> SaveReport:
    """Save as a request says; see `save`. Collective."""
    writer = begin(asked)
    try:
        written = run_on_all_ranks(writer.write, what="save()", group=writer.group)
        run_on_all_ranks(lambda: writer.publish(written), what="save()", group=writer.group)
    finally:
        writer.abandon()
    return writer.report(written)


def begin(asked: SaveRequest) -> CheckpointWriter:
    """Plan what to write, check that ranks agree, and make the folder. Collective."""
    sharded = sharded_of(asked.model, asked.optimizer, "save()", scheduler=asked.scheduler)
    sharded.require("save()", no=(ModelPhase.GATHERED,))
    if asked.engine is None and asked.optimizer is not None and sharded.awaits_step:
        warn_of_gradients()
    ranks = CheckpointRanks.of(sharded, asked.stages)
    group = ranks.group
    _check_number("step", asked.step, 0)
    if asked.keep is not None:
        _check_number("keep", asked.keep, 1)
    content = _content(asked, sharded, ranks)
    is_named = isinstance(asked.folder, str | os.PathLike) and bool(str(asked.folder))
    facts: dict[str, Any] = {"tag": content["tag"], "step": asked.step, "keep": asked.keep}
    facts |= {"has_frozen": not asked.exclude_frozen, "is_latest": asked.is_latest}
    facts |= {"optimizer": asked.optimizer is not None, "average": asked.average is not None}
    facts["folder"] = Path(asked.folder) if is_named else repr(asked.folder)
    said = {name: str(value) for name, value in facts.items()}
    sharded.compare_launches("save()", at_once=True)
    check_agreement(said, group=group, timeout_s=_TIMEOUT_S)
    # All ranks agree, so none of them has named a folder.
    if not is_named:
        raise ConfigError(
            f"save(): expected the path of a folder that every rank sees, got {asked.folder!r} "
            f"(rank {group.rank}); pass the same one on all ranks"
        )
    describe = partial(_describe, asked, sharded, content)
    parts, buffers = on_all(describe, what="save()", group=group)
    of_this_stage, num_buffers = join_stages(content, buffers, sharded, ranks)
    writer = CheckpointWriter(
        asked=asked,
        group=group,
        content=content,
        batches=list(
            _batches(asked, sharded, parts, buffers, ranks=ranks, of_this_stage=of_this_stage)
        ),
        num_tensors=_num_tensors_in(content) + num_buffers,
    )
    try:
        writer.write_in(run_on_all_ranks(writer.make_folder, what="save()", group=group)[0])
    except BaseException:
        writer.abandon()
        raise
    return writer


def _describe(
    asked: SaveRequest, sharded: ShardedModel, content: dict[str, Any]
) -> tuple[StateParts, dict[str, Tensor]]:
    """Describe a model in a manifest; return its parts and persistent buffers. Collective."""
    parts = plan_parts(
        sharded,
        has_state=asked.optimizer is not None,
        has_frozen=not asked.exclude_frozen,
        timeout_s=_TIMEOUT_S,
    )
    _describe_parts(content, parts)
    buffers = _persistent_buffers(asked.model)
    _add_other_ranks(content, sharded, [*parts.problems, *_misplaced(content, buffers, sharded)])
    return parts, buffers


def _content(asked: SaveRequest, sharded: ShardedModel, ranks: CheckpointRanks) -> dict[str, Any]:
    """Return a manifest with all but its tensors and files, which are added later. Local."""
    scheduler, average = asked.scheduler, asked.average
    state = None if scheduler is None else scheduler.state_dict()
    has_state = asked.optimizer is not None
    return {
        "tag": _check_tag(f"step-{asked.step}" if asked.tag is None else asked.tag),
        "serial": None,
        "step": asked.step,
        "world_size": ranks.group.world_size,
        "num_parts": sharded.routes.num_parts,
        "num_stages": ranks.num_stages,
        # On one rank parameters are replicated, whatever stage was asked for.
        "stage": next(int(s) for s, row in STAGES.items() if row == sharded.placements),
        "excludes_frozen": bool(asked.exclude_frozen),
        **{name: {} for name in _SECTIONS},
        "loco_facts": loco_facts(sharded) if has_state else {},
        "num_updates": None if average is None else average.num_updates,
        "param_groups": _groups_of(sharded) if has_state else [],
        "state_dict": _layout_of(sharded),
        "scheduler": to_json(state, "save(): scheduler.state_dict()"),
        "engine": to_json(asked.engine, "engine"),
        "extra": to_json(asked.extra, "save(): extra"),
    }


def _layout_of(sharded: ShardedModel) -> dict[str, Any] | None:
    """Describe what modules save by code of their own. Local; the same call on every rank."""
    layout = describe_state_dict(sharded)
    if layout is None:
        return None
    values = {k: to_json(v, f"save(): state_dict()[{k!r}]") for k, v in layout.values.items()}
    metadata = to_json(layout.metadata, "save(): state_dict()._metadata")
    return {"keys": layout.keys, "values": values, "metadata": metadata}


def _describe_parts(content: dict[str, Any], parts: StateParts) -> None:
    """Add the model and its optimizer to a manifest; pieces are added when they are written."""
    shared = [to_json(of_member, "optimizer.state") for of_member in parts.shared]
    said = "optimizer.state_dict()"
    extra = [to_json(_saveable(of_member, said), said) for of_member in parts.extra]
    content |= {"own_said": parts.own_said, "ties": dict(parts.ties)}
    content |= {"shared_state": shared, "state_dict_extra": extra}
    for tensor in parts.tensors:
        tensor_at(content, _path_of(tensor), no_pieces(tensor.dtype, tensor.shape, tensor.split))
    for name, values in parts.values.items():
        of_param = content["optimizer"].setdefault(name, {})
        for key, value in values.items():
            of_param[key] = {"value": to_json(value, f"optimizer state {key!r} of {name!r}")}
    for name in parts.frozen:
        content["params"][name]["frozen"] = True
    for name, dtype in parts.computes_in.items():
        content["params"][name]["computes_in"] = name_of(dtype)


def _misplaced(
    content: Mapping[str, Any], buffers: Collection[str], sharded: ShardedModel
) -> list[str]:
    """Return what cannot be saved where ranks have different parameters, as messages. Local."""
    problems = [
        f"buffer {name!r} belongs to parameters that not all ranks have (ZeroConfig.groups), and "
        "would be saved for rank 0's alone; register it with persistent=False"
        for name in buffers
        if pattern_of(name, sharded.routes.of_groups)
    ]
    if sharded.routes.of_groups and (content["state_dict"] or {}).get("keys"):
        problems.append(
            "modules change what state_dict() gives, by hooks or methods of their own, and ranks "
            "have different parameters (ZeroConfig.groups): what rank 0's modules say would be "
            "taken for all; leave out those hooks"
        )
    return problems


def _add_other_ranks(
    content: dict[str, Any], sharded: ShardedModel, problems: Sequence[str]
) -> None:
    """Add other ranks' entries of parameters that this one lacks. Collective if there are some.

    Raises:
        StateError: There are problems on a rank.
    """
    routes = sharded.routes
    if not routes.of_groups:
        return
    firsts = {param_ref.saved_name for param_ref in sharded.param_refs if _is_first_with(param_ref)}
    mine = {
        "problems": problems,
        "params": {name: said for name, said in content["params"].items() if name in firsts},
        "optimizer": {name: said for name, said in content["optimizer"].items() if name in firsts},
        "ties": {alias: name for alias, name in content["ties"].items() if name in firsts},
        "groups": [
            [name for name in group["params"] if name in firsts]
            for group in content["param_groups"]
        ],
    }
    by_rank = all_gather_json(mine, group=routes.all_ranks, timeout_s=_TIMEOUT_S)
    for rank, said in enumerate(by_rank):
        if said["problems"]:
            raise StateError(f"save(): {said['problems'][0]} (on rank {rank})")
    for said in by_rank:
        for section in ("params", "optimizer", "ties"):
            content[section] = {**said[section], **content[section]}
        for group, names in zip(content["param_groups"], said["groups"], strict=True):
            group["params"] = [*dict.fromkeys((*group["params"], *names))]


def _is_first_with(param_ref: ParamRef) -> bool:
    return bool(param_ref.buffer.plan.ranks) and param_ref.whole.rank == 0


def _num_tensors_in(content: Mapping[str, Any]) -> int:
    """Return how many whole tensors of parameters and of optimizer state a manifest has."""
    states = content["optimizer"].values()
    entries = (said for of_param in states for said in of_param.values())
    return len(content["params"]) + sum("value" not in said for said in entries)


def _saveable(value: Any, where: str) -> Any:
    """Return an optimizer's own entries without those that JSON cannot represent; warn of each."""
    if not isinstance(value, Mapping):
        to_json(value, where)
        return value
    kept = {}
    for key, item in value.items():
        try:
            to_json(key, f"{where}: key {key!r}")
            kept[key] = _saveable(item, f"{where}[{key!r}]")
        except ConfigError as error:
            warn_user(f"save(): it goes on without {error}")
    return kept


def _batches(
    asked: SaveRequest,
    sharded: ShardedModel,
    parts: StateParts,
    buffers: dict[str, Tensor],
    *,
    ranks: CheckpointRanks,
    of_this_stage: Collection[str],
) -> Iterable[WriteBatch]:
    """Yield the batches that this rank writes. Collective.

    Args:
        asked: The arguments of `save`.
        sharded: The model, or this rank's stage of one.
        parts: This rank's parts of parameters and optimizer state.
        buffers: All persistent buffers.
        ranks: The ranks that save.
        of_this_stage: Names of the buffers that its ranks save.
    """
    group, is_first = sharded.routes.all_ranks, sharded.routes.is_first_replica
    rank = str(ranks.position)
    if is_first:
        yield from (_write_batch_of(batch) for batch in parts.batches)
    others = _differing_buffers(buffers, group)
    others |= {name: buffers[name] for name in buffers if name not in of_this_stage}
    if group.rank == 0:
        own_buffers = {name: buffers[name] for name in buffers if name in of_this_stage}
        yield from _whole_batches(own_buffers, "buffers")
    yield from _whole_batches(others, "rank_buffers", rank)
    yield from _whole_batches(capture_rngs(group.device), "rngs", rank)
    if asked.optimizer is not None:
        yield from _whole_batches(loco_state(sharded), "loco", rank)
    if is_first:
        own = {str(number): tensor for number, tensor in enumerate(parts.own)}
        yield from _whole_batches(own, "own_state", str(sharded.group.rank))
    if is_first and asked.average is not None:
        yield from (_write_batch_of(batch, "average") for batch in asked.average.batches())


def _write_batch_of(batch: PartBatch, section: str = "params") -> WriteBatch:
    runs = tuple(
        WriteItem(_path_of(t, section), t.dtype, t.shape, part.span.start, part.span.stop, t.split)
        for part in batch.parts
        for t in (part.tensor,)
    )
    return WriteBatch(runs, batch.read, batch.is_resident, batch.is_frozen)


def _path_of(tensor: WholeTensor, section: str = "params") -> tuple[str, ...]:
    if tensor.entry is None:
        return (section, tensor.name)
    return ("optimizer", tensor.name, tensor.entry)


def _whole_batches(tensors: dict[str, Tensor], *path: str) -> Iterable[WriteBatch]:
    for name, tensor in tensors.items():
        run = WriteItem((*path, name), tensor.dtype, tensor.shape, 0, tensor.numel())
        yield WriteBatch((run,), partial(_flatten, tensor))


def _flatten(tensor: Tensor) -> list[Tensor]:
    return [tensor.detach().reshape(-1)]


def _groups_of(sharded: ShardedModel) -> list[dict[str, Any]]:
    saved = {param_ref.name: param_ref.saved_name for param_ref in sharded.param_refs}
    return [
        {**_group_of(group), "params": [saved[name] for name in group["params"]]}
        for group in param_groups_of(sharded)
    ]


def _group_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a param group that JSON can represent; a later run sets the others."""
    said: dict[str, Any] = {}
    for key, value in group.items():
        with suppress(ConfigError):
            said[key] = to_json(value, key)
    return said


def _check_tag(tag: Any) -> str:
    """Return a tag that can be the name of a folder; raise ConfigError for any other."""
    is_name = isinstance(tag, str) and tag and Path(tag).name == tag and tag != LATEST
    is_short = is_name and len(os.fsencode(tag)) <= LONGEST_TAG_BYTES
    if not is_short or tag.startswith(".") or any(c in tag for c in "\0\n"):
        raise ConfigError(
            f"tag: expected the name of a folder, of at most {LONGEST_TAG_BYTES} bytes, that does "
            f"not begin with a dot, got {tag!r:.80}"
        )
    return tag


def warn_of_gradients() -> None:
    """Warn that gradients which no step has used are not saved."""
    warn_user(
        "saved between a backward and its step: gradients are not saved, and a run that resumes "
        "begins the step anew; save after the step, at the end of an accumulation",
    )


def sharded_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    what: str,
    *,
    scheduler: Any = None,
) -> ShardedModel:
    """Return the sharded model that a call is given.

    Raises:
        StateError: It is plain, or was sharded with another optimizer.
        ConfigError: The scheduler has no state, or is what another argument is for.
    """
    is_other = isinstance(scheduler, torch.optim.Optimizer | nn.Module)
    if scheduler is not None and (is_other or not hasattr(scheduler, "state_dict")):
        raise ConfigError(
            f"{what}: expected scheduler to be a learning-rate scheduler, or another object with "
            f"state_dict() and load_state_dict(), got one of type {type(scheduler).__name__}"
        )
    sharded = find_sharded(model)
    if sharded is None:
        raise StateError(
            f"{what}: expected a model that was sharded, got a plain {type(model).__name__}; call "
            "zero_engine.shard(model, optimizer) first, which works in one process too"
        )
    if not has_optimizer(sharded, optimizer):
        raise StateError(
            f"{what}: expected the optimizer that was sharded with the model, got another "
            f"{type(optimizer).__name__}; pass what shard() returned"
        )
    return sharded


def _check_number(name: str, value: Any, minimum: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not minimum <= value <= LARGEST_NUMBER:
        raise ConfigError(f"save(): expected {name} to be an int from {minimum}, got {value!r}")


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers by the first of their names, in `state_dict()`'s order. Local."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in own_buffers(module).items():
            if tensor is not None and key not in non_persistent_buffers(module):
                name, local = f"{prefix}.{key}" if prefix else key, local_of(tensor)
                if local.shape != tensor.shape:
                    raise StateError(
                        f"save(): buffer {name!r} is a DTensor that is split over ranks; replicate "
                        "it, make it a parameter, or register it with persistent=False"
                    )
                found.setdefault(id(tensor), (name, local))
    return dict(found.values())


def _differing_buffers(buffers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return the buffers that have other values on this rank than on rank 0. Collective."""
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
    """Return the states of random number generators. Local.

    They are torch's of the CPU and of `device`, Python's, and, if in use, numpy's and zero_ckpt's.
    """
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
    """Restore generators from `capture_rngs`; any that was, or is, missing is left as it is."""
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
