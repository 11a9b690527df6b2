"""Weights from elsewhere, straight into what each rank keeps."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import Group, check_agreement

from ._early_guards import guard_module
from ._early_shard import find_early, plan_early
from ._errors import LoadError, StateError
from ._grouping import check_parameter
from ._hooks import find_sharded
from ._materialise import allocate_blank, allocate_blank_buffer, plain_on_meta
from ._sharded_model import ShardedModel
from ._span import Span

CHUNK_BYTES: Final = 8 * 2**20  # what is in flight between a reader and a shard


class AbstractRangeReader(ABC):
    """One tensor somewhere else, of which any run of elements can be had alone."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Known before anything is read."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Known before anything is read."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor: 1-D, of `dtype`, on the CPU."""


@frozen
class LoadReport:
    """What did not match, where that was allowed."""

    missing: tuple[str, ...]  # in the model only
    unexpected: tuple[str, ...]  # in the source only


@define(eq=False)
class _Target:
    """One parameter or persistent buffer, and where this rank keeps which part of it."""

    names: tuple[str, ...]
    tensor: Tensor
    parts: list[tuple[Span, Tensor]] = field(factory=list)  # elements, and 1-D memory for them

    @property
    def is_meta(self) -> bool:
        return self.tensor.is_meta


def load_ranges(
    model: nn.Module,
    readers: Mapping[str, AbstractRangeReader] | Iterable[tuple[str, AbstractRangeReader]],
    *,
    group: Group,
    strict: bool = True,
    timeout_s: float = 60.0,
) -> LoadReport:
    """Read weights into a model, each rank only what it keeps. Collective; moves no weights.

    The model may be built by `Init`, on the meta device (it is then as `Init` would leave it),
    partitioned at any stage, or plain. Names are those of `model.state_dict()`: parameters and
    persistent buffers. A tied parameter may come under any of its names, or under several that
    hold the same values. Beyond the shards a rank needs 8 MiB, or the largest buffer.

    Values of a float dtype are rounded to the float dtype of the model, to nearest even; all other
    dtypes must be the model's.

    Args:
        model: What to fill.
        readers: Names and where to read them.
        group: The ranks that the model is, or will be, distributed over.
        strict: Whether missing and unexpected names are errors.
        timeout_s: How long to wait for ranks that do not call this, in seconds.

    Returns:
        The names that did not match; none if strict.

    Raises:
        LoadError: Names all that is missing, unexpected, of another shape or dtype, tied but
            different, or left on the meta device. Nothing was written.
        StateError: A forward is running.
        zero_comm.AgreementError: Ranks have different models or sources.
        zero_comm.CommError: A rank did not take part in time.
    """
    readers = dict(readers)
    sharded = find_sharded(model)
    if sharded is not None and any(unit.depth for unit in sharded.units):
        raise StateError("load_ranges() was called while a forward is running")
    targets = list(_targets(model))
    missing = [t.names[0] for t in targets if not any(name in readers for name in t.names)]
    known = {name for target in targets for name in target.names}
    unexpected = [name for name in readers if name not in known]
    if sharded is not None:
        _find_parts(targets, sharded)
    problems = _problems(model, targets, readers, reports_missing=not strict)
    if strict:
        problems += [f"missing: {', '.join(map(repr, missing))}"] if missing else []
        problems += [f"unexpected: {', '.join(map(repr, unexpected))}"] if unexpected else []
    for target in targets:
        if not target.parts:
            target.parts = _parts_at_rest(target, readers)
    problems += _different_ties(targets, readers, group)
    content = [(name, tuple(r.shape), str(r.dtype)) for name, r in readers.items()]
    facts = {
        "weights to load": f"{len(readers)} tensors ({zlib.crc32(repr(content).encode()):08x})",
        "what does not fit": "; ".join(problems),
        "model to load into": f"{zlib.crc32(repr([t.names for t in targets]).encode()):08x}",
    }
    check_agreement(facts, group=group, timeout_s=timeout_s)
    if problems:
        raise LoadError(f"cannot load, and nothing was written: {'; '.join(problems)}")

    if sharded is not None:
        sharded.begin_write()
    _allocate(model, targets, group)
    with torch.no_grad():
        for target in targets:
            name = next((name for name in target.names if name in readers), None)
            if name is not None:
                _fill(target, readers[name])
    if sharded is not None:
        sharded.end_write()
    return LoadReport(tuple(missing), tuple(unexpected))


def _targets(model: nn.Module) -> Iterator[_Target]:
    """Every parameter and persistent buffer once, with all its names in `state_dict`."""
    found: dict[int, _Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                target = found.setdefault(id(tensor), _Target((), tensor))
                target.names = (*target.names, start + key)
    yield from found.values()


def _find_parts(targets: Iterable[_Target], sharded: ShardedModel) -> None:
    """Where a partitioned model keeps its parameters."""
    places = {
        id(param): (buffer, position)
        for unit in sharded.units
        for buffer in unit.buffers
        for position, param in enumerate(buffer.params)
    }
    for target in targets:
        if id(target.tensor) not in places:
            continue
        buffer, position = places[id(target.tensor)]
        if buffer.whole is not None:
            span = buffer.plan.layout.spans[position]
            target.parts = [(span.shifted(-span.start), buffer.whole[span.as_slice()])]
        else:
            target.parts = [
                (piece.in_tensor, buffer.shard[piece.in_shard.as_slice()])
                for piece in buffer.pieces
                if piece.index == position
            ] or [(Span(0, 0), buffer.shard[:0])]


def _parts_at_rest(
    target: _Target, readers: Mapping[str, AbstractRangeReader]
) -> list[tuple[Span, Tensor]]:
    """Where a model that is not partitioned keeps one of its tensors; nowhere if on meta."""
    tensor = target.tensor
    if tensor.is_meta or not any(name in readers for name in target.names):
        return []
    early = find_early(tensor)
    if early is not None:
        assert isinstance(tensor, nn.Parameter), "only parameters are sharded"
        early.check_untouched(tensor, target.names[0])
        return [(p.in_tensor, early.shard[p.in_shard.as_slice()]) for p in early.pieces]
    if isinstance(tensor, nn.Parameter):
        check_parameter(tensor, target.names[0])
        return [(Span(0, tensor.numel()), tensor.detach().view(-1))]
    return [(Span(0, tensor.numel()), tensor)]  # a buffer may have any strides


def _allocate(model: nn.Module, targets: Iterable[_Target], group: Group) -> None:
    for target in targets:
        if not target.is_meta:
            continue
        tensor = target.tensor
        if isinstance(tensor, nn.Parameter):
            allocate_blank(tensor, target.names[0], group=group)
            early = find_early(tensor)
            assert early is not None, "just made"
            target.parts = [(p.in_tensor, early.shard[p.in_shard.as_slice()]) for p in early.pieces]
        else:
            allocate_blank_buffer(tensor, group=group)
            target.parts = [(Span(0, tensor.numel()), tensor)]
    for module in model.modules():
        if any(p is not None and find_early(p) is not None for p in module._parameters.values()):
            guard_module(module)


def _fill(target: _Target, reader: AbstractRangeReader) -> None:
    for span, memory in target.parts:
        if memory.dim() != 1 or not memory.is_contiguous():
            memory.copy_(reader.read(span.start, span.stop).view(memory.shape))
            continue
        for part in _chunks(span, reader.dtype):
            memory[part.shifted(-span.start).as_slice()].copy_(reader.read(part.start, part.stop))
    early = find_early(target.tensor)
    if early is not None:
        if early.is_blank:
            early.shard[early.payload.numel() :].zero_()
        early.is_blank = False


def _chunks(span: Span, dtype: torch.dtype) -> Iterator[Span]:
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


def _problems(
    model: nn.Module,
    targets: Iterable[_Target],
    readers: Mapping[str, AbstractRangeReader],
    *,
    reports_missing: bool,
) -> list[str]:
    problems = []
    for target in targets:
        expected = target.tensor
        given = [name for name in target.names if name in readers]
        for name in given:
            reader = readers[name]
            if reader.shape != expected.shape:
                problems.append(
                    f"{name!r}: expected shape {tuple(expected.shape)}, got {tuple(reader.shape)}"
                )
            if reader.dtype != expected.dtype and not (
                reader.dtype.is_floating_point and expected.dtype.is_floating_point
            ):
                problems.append(f"{name!r}: expected {expected.dtype}, got {reader.dtype}")
        if not given and target.is_meta and reports_missing:
            problems.append(f"{target.names[0]!r} is on the meta device and has no weights")
    lost = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and not any(target.tensor is buffer for target in targets)
    ] + plain_on_meta(model)
    if lost:
        problems.append(
            f"{', '.join(map(repr, lost))}: on the meta device, and no part of a state dict; "
            "compute them with zero_engine.materialise(model, init=fn) first, or build the model "
            "inside zero_engine.Init"
        )
    return problems


def _different_ties(
    targets: Iterable[_Target], readers: Mapping[str, AbstractRangeReader], group: Group
) -> list[str]:
    """Names of one tensor that come with different values, as far as this rank reads them."""
    problems = []
    for target in targets:
        first, *others = [name for name in target.names if name in readers] or [""]
        for other in others:
            mine, theirs = readers[first], readers[other]
            if mine.shape == theirs.shape and any(
                not _same(mine.read(part.start, part.stop), theirs.read(part.start, part.stop))
                for span in _spans(target, group)
                for part in _chunks(span, mine.dtype)
            ):
                problems.append(f"{first!r} and {other!r} are one tensor, and differ")
    return problems


def _spans(target: _Target, group: Group) -> list[Span]:
    if target.is_meta:  # what it is going to keep
        layout = plan_early(target.tensor.numel(), group)
        return [piece.in_tensor for piece in layout.pieces(group.rank)]
    return [span for span, _ in target.parts]


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
