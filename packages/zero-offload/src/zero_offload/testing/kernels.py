"""Compiled kernels for tests: chosen, left out or replaced; and a single step of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torch import Tensor

from zero_offload import _native
from zero_offload._native import AdamKernels, NativeStatus, load
from zero_offload._native.library import Formula, Rule, open_cuda_library, with_io
from zero_offload.adam import parallel
from zero_offload.adam.batches import Batch
from zero_offload.adam.fused import PieceTable, Tensors
from zero_offload.adam.parallel import Team
from zero_offload.disk import file as disk_file
from zero_offload.errors import NativeUnavailableError

__all__ = [
    "Batch",
    "Formula",
    "Rule",
    "checksums_in_pieces",
    "fused_step",
    "load",
    "native",
    "native_isas",
    "share",
    "step",
]

_TEAM: Final = Team()


def native_isas() -> tuple[str, ...]:
    """Instruction sets that are compiled and that this processor has; none without kernels."""
    found = _native.kernels()
    return () if found is None else tuple(found.isas)


@contextmanager
def native(
    isa: str | None = None, *, library: Any = None, reason: str = "a test"
) -> Iterator[None]:
    """Have new optimizers and stores use these compiled kernels and no others, inside. Local.

    Args:
        isa: The instruction set; plain torch steps, and threads move bytes, when None.
        library: Library to use in place of this installation's, for its disk I/O.
        reason: Why there is none, where there is none.
    """
    chosen = None
    if library is not None:
        chosen = AdamKernels(with_io(library), isa or "scalar")
    elif isa is not None:
        chosen = _of(isa)
    found = chosen, NativeStatus(chosen.isa if chosen else "", reason if chosen is None else "")
    with mock.patch.object(_native, "_loaded", lambda: found):
        yield


def step(batch: Batch, rule: Rule, isa: str | None) -> None:
    """Step a batch in place by one instruction set; by the formula in plain torch when None. Local.

    Raises:
        NativeUnavailableError: This processor or build has none of that name.
    """
    parallel.step_batch(batch, rule, kernels=None if isa is None else _of(isa), team=_TEAM)


def fused_step(
    library: Path,
    works: list[Tensors],
    rule: Rule,
    *,
    lr: Tensor | None = None,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Step as FusedAdam does, by a library that was compiled for where the tensors are. Local.

    Args:
        library: The file.
        works: Of each parameter: itself or its master, gradient, first and second moment, largest
            second moment or None, what is rounded into or None, step.
        rule: Its rate is minus the learning rate.
        lr: In place of the rule's: one float32, as the others.
        divisor: The number that gradients are divided by.
        found_inf: The step is skipped unless it is 0.
    """
    kernels = open_cuda_library(library)
    table = PieceTable.of(works, kernels.zero_cuda_piece_numel())
    table.step(kernels, rule, lr=lr, divisor=divisor, found_inf=found_inf, stream=0)


def share(numel: int, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` on parts of [0, numel), as a step does by torch's threads. Local."""
    _TEAM.share(numel, work)


@contextmanager
def checksums_in_pieces(piece_bytes: int) -> Iterator[None]:
    """Read values `piece_bytes` at a time inside, as very large ones are. Local."""
    with mock.patch.object(disk_file, "_BLOCK_BYTES", piece_bytes):
        yield


def _of(isa: str) -> AdamKernels:
    found = _native.kernels()
    if found is None:
        raise NativeUnavailableError(_native.native_status().reason)
    return found.with_isa(isa)
