"""Threads that share the elements of one native call."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, final

import torch
from attrs import define, field

ALONE_NUMEL: Final = 2**16  # below, waking a thread costs more than it does
PARTS_PER_THREAD: Final = 8
CUT_NUMEL: Final = 64  # cuts fall on these, so that no two threads write one cache line


@final
@define(eq=False)
class Team:
    """As many threads as torch uses, the caller among them; made when first needed."""

    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _key: tuple[int, int] = field(default=(0, 0), init=False)  # process and threads of `_pool`

    def share(self, numel: int, work: Callable[[int, int], None]) -> None:
        """Call `work(start, stop)` on contiguous parts of [0, numel), side by side. Blocking.

        The work must release the GIL, and may not depend on how it is divided. Few elements are
        not divided at all.
        """
        num_threads = min(torch.get_num_threads(), 1 + numel // ALONE_NUMEL)
        num_parts = min(num_threads * PARTS_PER_THREAD, 1 + numel // ALONE_NUMEL)
        self.divide(numel, num_parts, work, multiple=CUT_NUMEL)

    def divide(
        self, count: int, num_parts: int, work: Callable[[int, int], None], *, multiple: int = 1
    ) -> None:
        """The same in as many parts as asked for, cut at multiples.

        A thread that is done takes the next part: one that others slow down is not waited for long.
        """
        num_threads = min(torch.get_num_threads(), num_parts)
        if num_threads <= 1:
            work(0, count)
            return
        cuts = [count * k // num_parts // multiple * multiple for k in range(num_parts)]
        parts = iter(list(zip(cuts, [*cuts[1:], count], strict=True)))  # gives out each part once

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
        key = (os.getpid(), torch.get_num_threads())  # threads do not survive a fork
        if self._pool is None or self._key != key:
            self._pool = ThreadPoolExecutor(key[1] - 1, thread_name_prefix="zero_offload")
            self._key = key
        return self._pool
