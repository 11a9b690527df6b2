"""Weights from elsewhere, straight into what each rank keeps."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from attrs import frozen
from torch import nn
from zero_comm import Group, check_agreement, collective

from zero_partition.errors import LoadError, StateError
from zero_partition.memory.flat_buffer import FlatBuffer
from zero_partition.memory.seams import AbstractRangeReader, AbstractUpdater
from zero_partition.run.hooks import find_sharded
from zero_partition.stand_in import StateKind
from zero_partition.values.load import (
    NamedReaders,
    Target,
    allocate_missing,
    fill_buffer,
    find_different_ties,
    find_problems,
    targets_of,
)


@frozen
class LoadReport:
    """What did not match, where that was allowed."""

    missing: tuple[str, ...]  # in the model only
    unexpected: tuple[str, ...]  # in the source only


@collective
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

    Values of a float dtype are rounded to the float dtype of the model, to nearest even; masters
    take them as they are. All other dtypes must be the model's.

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
    if sharded is not None:
        sharded.refuse_parked("load_ranges()", StateKind.PARAMS, StateKind.MASTERS)
    targets = list(targets_of(model))
    for target in targets:
        if target.given(readers):
            target.find_parts(sharded)
    report = _compare_names(targets, readers)
    problems = find_problems(model, targets, readers, reports_missing=not strict)
    if strict:
        problems += _describe(report)
    problems += find_different_ties(targets, readers, group)
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
        sharded.finish_update()
        sharded.begin_write()
    allocate_missing(model, targets, group)
    with torch.no_grad():
        _fill(targets, readers, None if sharded is None else sharded.residence.updater)
    if sharded is not None:
        if sharded.residence.home is not None:
            sharded.residence.home.settle()
        sharded.end_write()
    return report


def _fill(
    targets: Iterable[Target], readers: NamedReaders, updater: AbstractUpdater | None
) -> None:
    placed: dict[FlatBuffer, dict[int, AbstractRangeReader]] = {}
    for target in targets:
        for name in target.given(readers)[:1]:
            if (place := target.place) is not None:
                placed.setdefault(place.buffer, {})[place.position] = readers[name]
            else:
                target.fill(readers[name])
    for buffer, of_buffer in placed.items():
        fill_buffer(buffer, of_buffer, updater)


def _compare_names(targets: Sequence[Target], readers: NamedReaders) -> LoadReport:
    known = {name for target in targets for name in target.names}
    return LoadReport(
        missing=tuple(target.names[0] for target in targets if not target.given(readers)),
        unexpected=tuple(name for name in readers if name not in known),
    )


def _describe(report: LoadReport) -> list[str]:
    kinds = (("missing", report.missing), ("unexpected", report.unexpected))
    return [f"{kind}: {', '.join(map(repr, names))}" for kind, names in kinds if names]
