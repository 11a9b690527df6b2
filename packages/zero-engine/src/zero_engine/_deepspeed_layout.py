"""Where the elements of a parameter lie in DeepSpeed's flat partitions. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import frozen

# NOTE(partitions): a checkpoint has flat groups of parameters, in order, and every rank has a
# partition of each group.
# Stages 1 and 2: a group is its parameters end to end, with gaps that align them, cut into one
# partition per rank; those of the last ranks are shorter by what would be padding.
# Stage 3: each parameter is cut into equal parts, one per rank, the last ones padded; a rank's
# partition is its parts end to end. Groups are runs of parameters, and a rank's partitions end to
# end are one flat sequence, whose cuts into groups need not be known.


@frozen
class Run:
    """Consecutive elements of a parameter, in one partition."""

    rank: int
    group: int
    start: int  # in the partition
    stop: int


Numels: TypeAlias = Mapping[str, int]  # elements of parameters, in order
Runs: TypeAlias = dict[str, tuple[Run, ...]]  # by parameter, in the order of its elements


def locate_whole_groups(
    groups: Sequence[Numels],
    gaps: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
) -> Runs:
    """For stages 1 and 2; see NOTE(partitions).

    Args:
        groups: The parameters of each group.
        gaps: Elements that follow each parameter of each group, for alignment.
        lengths: Of partitions, by rank and group.

    Returns:
        Runs that end early for a parameter of which not everything is there.
    """
    runs: Runs = {}
    for group, numels in enumerate(groups):
        segments = [(rank, group, of_rank[group]) for rank, of_rank in enumerate(lengths)]
        cursor = 0
        for (name, numel), gap in zip(numels.items(), gaps[group], strict=True):
            runs[name] = tuple(_cut(segments, cursor, cursor + numel))
            cursor += numel + gap
    return runs


def locate_cut_params(groups: Sequence[Numels], lengths: Sequence[Sequence[int]]) -> Runs:
    """For stage 3; see NOTE(partitions), and `locate_whole_groups`."""
    world_size = len(lengths)
    segments = [
        [(rank, group, length) for group, length in enumerate(of_rank)]
        for rank, of_rank in enumerate(lengths)
    ]
    runs: Runs = {}
    cursor = 0
    for numels in groups:
        for name, numel in numels.items():
            part = -(-numel // world_size)
            ends = [min(numel, part * (rank + 1)) for rank in range(world_size)]
            starts = [min(numel, part * rank) for rank in range(world_size)]
            runs[name] = tuple(
                run
                for rank in range(world_size)
                for run in _cut(segments[rank], cursor, cursor + ends[rank] - starts[rank])
            )
            cursor += part
    return runs


def _cut(segments: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[Run]:
    """Elements [start, stop) of partitions (rank, group, length) that follow each other."""
    begin = 0
    for rank, group, length in segments:
        first, last = max(start, begin), min(stop, begin + length)
        if first < last:
            yield Run(rank, group, first - begin, last - begin)
        begin += length
