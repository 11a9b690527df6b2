"""A process that ends keeps its shards for its peers, once and for a while."""

from __future__ import annotations

import time
from multiprocessing import util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transports import READS, over
from zero_comm import Exposure, Group, expose
from zero_comm.testing import lingering

LINGER_S = 0.4
ERRORS = {
    "": None,
    "an error": ZeroDivisionError(),
    "exit with an error": SystemExit(1),
    "Ctrl-C": KeyboardInterrupt(),
    "exit": SystemExit(0),
}


@pytest.mark.parametrize("by", ERRORS)
def test_a_process_lingers_once_and_not_after_an_error(ranks, by: str) -> None:
    """A job whose last rank hangs should be over in a minute, not in several.

    Of an error torch.multiprocessing.spawn hears only when the process has ended.
    """
    took_s, _ = ranks(2).run(_end, by=by, peer_leaves=False)

    if by in ("", "exit"):  # sys.exit() is an exception too
        assert LINGER_S <= took_s < 2 * LINGER_S
    else:
        assert took_s < LINGER_S


def test_a_process_whose_peers_have_left_ends_at_once(ranks) -> None:
    """The usual end of a script."""
    took_s, _ = ranks(2).run(_end, by="", peer_leaves=True)

    assert took_s < LINGER_S


def _end(group: Group, by: str, peer_leaves: bool) -> float:
    """How long it takes rank 0 to end, of which its peer knows when it has."""
    group, took_s = over(group, READS), 0.0
    with mock.patch.dict(util._finalizer_registry, clear=True):  # as in a process just forked
        exposures = [_expose(group) for _ in range(3)]
        if group.rank == 1 and peer_leaves:
            exposures.clear()
        dist.barrier()  # which reads no peer's memory
        if group.rank == 0:
            took_s = _run_finalizers(ERRORS[by])
        dist.barrier()
    return took_s


def _expose(group: Group) -> Exposure:
    exposure = expose([torch.ones(2)], group=group)
    assert exposure is not None
    return exposure


def _run_finalizers(error: BaseException | None) -> float:
    """What the end of a process of multiprocessing runs, while an error is being handled."""
    took_s = 0.0
    try:
        try:
            if error is not None:
                raise error
        finally:
            started = time.monotonic()
            with lingering(LINGER_S):
                util._run_finalizers(0)
            took_s = time.monotonic() - started
    except BaseException as raised:
        assert raised is error
    return took_s
