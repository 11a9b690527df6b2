"""Threads that share the elements of one native call, and what is called: steps and norms."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, final

import torch
from attrs import define, field
from torch import Tensor

from zero_offload import _native
from zero_offload._native import AdamKernels
from zero_offload._native.library import DTYPES, ISAS, NO_DTYPE, Rule

from . import reference
from .batches import Batch

# With fewer elements, waking a thread takes longer than the work that it would do.
ALONE_NUMEL: Final = 2**16
PARTS_PER_THREAD: Final = 8
# Parts start at multiples of this, so that no two threads write to one cache line.
CUT_NUMEL: Final = 64

# Field of a rule -> column whose dtype it has.
_KINDS: Final = {
    "param_dtype": "param",
    "grad_dtype": "grad",
    "state_dtype": "first",
    "out_dtype": "out",
}
# Elements of a partial sum. Chunks do not depend on the number of threads, so sums do not either.
CHUNK_NUMEL: Final = 2**18


@final
@define(eq=False)
class Team:
    """Threads for native calls, as many as torch uses, the caller included; made when needed."""

    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    # Process and number of threads that `_pool` was made for.
    _key: tuple[int, int] = field(default=(0, 0), init=False)

    def share(self, numel: int, work: Callable[[int, int], None]) -> None:
        """Call `work(start, stop)` on contiguous parts of [0, numel), side by side. Blocking.

        The work must release the GIL, and may not depend on how it is divided. Few elements are
        not divided at all.
        """
        num_parts = min(torch.get_num_threads() * PARTS_PER_THREAD, 1 + numel // ALONE_NUMEL)
        self.divide(numel, num_parts, work, multiple=CUT_NUMEL)

    def divide(
        self, count: int, num_parts: int, work: Callable[[int, int], None], *, multiple: int = 1
    ) -> None:
        """Call `work(start, stop)` on `num_parts` parts of [0, count), cut at multiples. Blocking.

        A thread that is done takes the next part, so that a slow thread is not waited for long.
        """
        num_threads = min(torch.get_num_threads(), num_parts)
        if num_threads <= 1:
            work(0, count)
            return
        cuts = [count * k // num_parts // multiple * multiple for k in range(num_parts)]
        # The threads share this iterator, so that each part is taken once.
        parts = iter(list(zip(cuts, [*cuts[1:], count], strict=True)))

        def take_turns() -> None:
            for start, stop in parts:
                work(start, stop)

        others = [self._threads().submit(take_turns) for _ in range(num_threads - 1)]
        try:
            take_turns()
        finally:
            for other in others:
                other.result()

    def _threads(self) -> ThreadPoolExecutor:
        # The process is part of the key, since threads do not survive a fork.
        key = (os.getpid(), torch.get_num_threads())
        if self._pool is None or self._key != key:
            self._pool = ThreadPoolExecutor(key[1] - 1, thread_name_prefix="zero_offload")
            self._key = key
        return self._pool


def step_batch(batch: Batch, rule: Rule, *, kernels: AdamKernels | None, team: Team) -> None:
    """Step every run of the batch in place. Local, blocking; kernels run without the GIL."""
    if kernels is None:
        reference.step_batch(batch, rule)
        return
    table = batch.table()
    for kind, column in _KINDS.items():
        tensors = batch.tensors[column]
        setattr(rule, kind, DTYPES[tensors[0].dtype] if tensors else NO_DTYPE)
    run = partial(kernels.library.zero_step, ISAS[kernels.isa], table.ctypes.data, len(table))
    team.share(int(table["numel"].sum()), partial(run, ctypes.byref(rule)))


def total_norm(grads: Sequence[Tensor], norm_type: float, team: Team) -> float:
    """Return the norm of all gradients as one vector; inf or nan as torch's. Local, blocking."""
    if norm_type == 2.0:
        return math.sqrt(math.fsum(_sum_of_squares(grad, team) for grad in grads))
    norms = [float(torch.linalg.vector_norm(grad.float(), norm_type)) for grad in grads]
    return float(
        torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), norm_type)
    )


def _sum_of_squares(grad: Tensor, team: Team) -> float:
    """Return the sum of squares of a gradient; inf or nan where torch's norm is.

    Kernels give the same bits for any number of threads; plain torch may differ in the last bits.
    """
    if grad.is_cpu and grad.dtype in DTYPES and grad.is_contiguous():
        found = _sum_of_finite(grad, team)
        if found is not None:
            return found
    # The gradient is on a device, or an element is not finite: torch's norm is then inf or nan.
    is_wide = grad.is_cpu or grad.dtype is torch.float64
    wide = torch.float64 if is_wide else torch.float32
    return float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2


def _sum_of_finite(grad: Tensor, team: Team) -> float | None:
    """Return the sum of squares, in double; None if an element is inf or nan."""
    kernels = _native.kernels()
    cuts = range(0, grad.numel(), CHUNK_NUMEL)
    if kernels is None:
        parts = [grad.view(-1)[at : at + CHUNK_NUMEL].float() for at in cuts]
        if not all(part.isfinite().all() for part in parts):
            return None
        return math.fsum(part.double().square().sum().item() for part in parts)
    sums, bad = (ctypes.c_double * len(cuts))(), (ctypes.c_int64 * len(cuts))()
    isa, dtype, start = ISAS[kernels.isa], DTYPES[grad.dtype], grad.data_ptr()

    def measure(first: int, last: int) -> None:
        for k in range(first, last):
            kernels.library.zero_sum_squares(
                isa,
                start + cuts[k] * grad.element_size(),
                dtype,
                min(CHUNK_NUMEL, grad.numel() - cuts[k]),
                ctypes.byref(sums, k * 8),
                ctypes.byref(bad, k * 8),
            )

    team.divide(len(cuts), len(cuts), measure)
    return None if any(bad) else math.fsum(sums)
