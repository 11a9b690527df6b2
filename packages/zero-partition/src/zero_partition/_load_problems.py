"""What speaks against loading, found before anything is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from zero_comm import Group

from ._load_target import NamedReaders, Target, in_chunks
from ._materialise import plain_on_meta
from ._range_reader import AbstractRangeReader


def find_problems(
    model: nn.Module,
    targets: Iterable[Target],
    readers: NamedReaders,
    *,
    reports_missing: bool,
) -> list[str]:
    """What in the source does not fit the model, or is not there for it to work."""
    problems = []
    for target in targets:
        expected, given = target.tensor, target.given(readers)
        for name in given:
            problems += find_misfits(name, expected.shape, expected.dtype, readers[name])
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


def find_misfits(
    name: str, shape: torch.Size, dtype: torch.dtype, reader: AbstractRangeReader
) -> list[str]:
    """What speaks against reading a tensor of this shape and dtype there; floats are converted."""
    problems = []
    if reader.shape != shape:
        problems.append(f"{name!r}: expected shape {tuple(shape)}, got {tuple(reader.shape)}")
    is_float = reader.dtype.is_floating_point and dtype.is_floating_point
    if reader.dtype != dtype and not is_float:
        problems.append(f"{name!r}: expected {dtype}, got {reader.dtype}")
    return problems


def find_different_ties(
    targets: Iterable[Target], readers: NamedReaders, group: Group
) -> list[str]:
    """Names of one tensor that come with different values, as far as this rank reads them."""
    problems = []
    for target in targets:
        first, *others = target.given(readers) or [""]
        for other in others:
            mine, theirs = readers[first], readers[other]
            if mine.shape == theirs.shape and any(
                not _same(mine.read(part.start, part.stop), theirs.read(part.start, part.stop))
                for span in target.spans(group)
                for part in in_chunks(span, mine.dtype)
            ):
                problems.append(f"{first!r} and {other!r} are one tensor, and differ")
    return problems


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
