"""Journals, driven by hand: several ranks in one process, which may read its own memory too."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any, Literal

import attrs
import pytest
import torch
from attrs import define, field
from torch import Tensor
from zero_comm import CommError
from zero_comm.shared_host import journal
from zero_comm.testing import journal_capacity, local_peers, looking_alone, reads_refused


@define(eq=False)
class _Exchange:
    """One transfer of a rank that takes all that its peers lend."""

    memory: Any  # what `Reads.memory` is
    tag: int
    buffer: Tensor
    got: dict[int, list[float]] = field(factory=dict)  # by rank
    transfer: Any = field(init=False)

    def launch(self) -> _Exchange:
        self.transfer = self.memory.launch(self.tag, self.buffer, self._take)
        return self

    def _take(self, buffers: dict[int, Any]) -> None:
        for rank, theirs in buffers.items():
            assert rank not in self.got, "carried out twice"
            row = torch.empty_like(self.buffer)
            theirs.read_into(row, offset=0)
            self.got[rank] = row.tolist()

    def look(self) -> str:
        """What is missing, after one look at the news; nothing when it is over."""
        # A process looks at all its groups' journals, and here every rank lives in this one.
        with looking_alone(self.memory):
            try:
                self.memory.wait(self.transfer, "exchange", timeout_s=0)
            except CommError as error:
                return str(error)
        return ""

    def is_over(self) -> bool:
        return not self.look()


def _exchange(memory: Any, tag: int, value: float) -> _Exchange:
    return _Exchange(memory, tag, torch.full((2,), value)).launch()


def _look_until_over(exchanges: list[_Exchange]) -> None:
    """In turns, as ranks that wait would, each until the last one's is over."""
    for _ in range(10 * len(exchanges) + 10):
        missing = [exchange.look() for exchange in exchanges]
        if not any(missing):
            return
    pytest.fail(f"{sum(map(bool, missing))} are never over: {missing}")


# ---- When bytes move ----


def test_an_offer_alone_moves_nothing() -> None:
    """What the other side will pass, and where it may be written, is not known yet."""
    first, second = local_peers(2)
    early = _exchange(first, 0, 1.0)
    other_tag = _exchange(second, 1, 2.0)

    assert "rank 1 has not offered its part (rank 0)" in early.look()
    assert "rank 0 has not offered its part (rank 1)" in other_tag.look()
    assert (early.got, other_tag.got) == ({}, {})

    late = _exchange(second, 0, 3.0)

    assert late.got == {0: [1.0, 1.0]}  # in launch: both sides had agreed
    assert early.got == {}  # nobody writes to another's memory

    _look_until_over([early, late])

    assert early.got == {1: [3.0, 3.0]}


def test_transfers_of_one_tag_pair_in_the_order_of_their_launches() -> None:
    """A tag is used once a step; the third gather must not take what the second was lent."""
    first, second = local_peers(2)
    ours = [_exchange(first, 7, float(i)) for i in range(3)]
    theirs = [_exchange(second, 7, 10.0 + i) for i in range(3)]
    _look_until_over([*reversed(ours), *theirs])

    for i in range(3):
        assert ours[i].got == {1: [10.0 + i] * 2}
        assert theirs[i].got == {0: [float(i)] * 2}


def test_transfers_of_different_tags_pair_in_any_order() -> None:
    """A prefetch runs ahead on one rank; its bytes belong to its own unit all the same."""
    first, second = local_peers(2)
    ours = {tag: _exchange(first, tag, float(tag)) for tag in (0, 1, 2)}
    theirs = {tag: _exchange(second, tag, 10.0 + tag) for tag in (2, 0, 1)}
    _look_until_over([*ours.values(), *theirs.values()])

    for tag in range(3):
        assert ours[tag].got == {1: [10.0 + tag] * 2}
        assert theirs[tag].got == {0: [float(tag)] * 2}


def test_a_look_at_one_transfer_carries_out_the_others() -> None:
    """A peer that waits for this rank's part must not wait for this rank's order of waits."""
    first, second = local_peers(2)
    never = _exchange(first, 0, 0.0)
    ours = _exchange(first, 1, 1.0)
    theirs = _exchange(second, 1, 2.0)

    assert not never.is_over()
    assert ours.got == {1: [2.0, 2.0]}
    assert theirs.is_over()


def test_a_part_of_a_buffer_is_read_from_its_offset() -> None:
    """A chunk is bytes from the start of the buffer; elements would be another rank's chunk."""
    first, second = local_peers(2)
    taken = torch.zeros(2, dtype=torch.float64)
    first.launch(0, torch.arange(5, dtype=torch.float64), lambda _: None)
    second.launch(
        0, torch.zeros(5, dtype=torch.float64), lambda all_: all_[0].read_into(taken, offset=24)
    )

    assert taken.tolist() == [3.0, 4.0]


# ---- Until when a buffer is lent ----


def test_a_lent_buffer_is_not_over_until_every_peer_is_done() -> None:
    """Its owner writes to it next, and the last reader would find half of each."""
    memories = local_peers(3)
    exchanges = [_exchange(memory, 0, float(memory.rank)) for memory in memories]
    owner, other, last = exchanges

    assert last.got == {0: [0.0] * 2, 1: [1.0] * 2}
    assert "rank 1 has not read its part (rank 0)" in owner.look()
    assert owner.got == {1: [1.0] * 2, 2: [2.0] * 2}
    assert "rank 1 has not read its part (rank 2)" in last.look()
    assert other.is_over()  # all others had read; now it has, too
    assert owner.is_over()
    assert last.is_over()


@pytest.mark.parametrize("comes_last", [False, True], ids=["comes first", "comes last"])
def test_a_transfer_that_nobody_waits_on_still_lends_its_buffer(comes_last: bool) -> None:
    """A handle dropped by an exception must not turn into a peer's garbage, nor into a leak."""
    first, second = local_peers(2)
    theirs = _exchange(second, 0, 6.0) if comes_last else None
    exchange = _exchange(first, 0, 5.0)  # where it comes last, this side is done at once
    seen = weakref.ref(exchange.buffer)
    del exchange
    gc.collect()

    assert seen() is not None

    theirs = theirs or _exchange(second, 0, 6.0)
    theirs.look()

    assert theirs.got == {0: [5.0, 5.0]}

    first.launch(1, torch.zeros(0), lambda _: None)  # hears that its peer is done
    gc.collect()

    assert seen() is None


# ---- A journal is a ring ----


@pytest.fixture
def small_journals() -> Iterator[Callable[[int], None]]:
    """Journals that are made from now on hold so few entries."""
    with ExitStack() as stack:
        yield lambda entries: stack.enter_context(journal_capacity(entries))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_journal_wraps_around(small_journals: Callable[[int], None], world_size: int) -> None:
    """Training launches millions of transfers; the ring has a thousand places."""
    small_journals(5)  # an offer and a done do not divide it
    memories = local_peers(world_size)
    for i in range(40):
        exchanges = [_exchange(memory, 3, 100.0 * memory.rank + i) for memory in memories]
        _look_until_over(exchanges)
        for exchange in exchanges:
            assert exchange.got == {
                peer.rank: [100.0 * peer.rank + i] * 2
                for peer in memories
                if peer is not exchange.memory
            }


def test_an_exception_between_any_two_lines_loses_no_entry() -> None:
    """One that was lost was waited for until the timeout, by the rank itself as by its peers."""
    num_interrupts = 0
    for at in itertools.count(1):
        made = journal.Journal(2)
        is_through = False
        with contextlib.suppress(KeyboardInterrupt), _interrupted_at(at):
            made.write((journal.OFFER, 7, 70), read_by_all=lambda head: head)
            is_through = True
        made.write((journal.OFFER, 8, 80), read_by_all=lambda head: head)
        seen = journal.read_entries(0, made.head, 2, made.whereabouts)
        begun, after = (journal.OFFER, 7, 70), (journal.OFFER, 8, 80)
        assert seen in ([begun, after], [after])  # where it came before the first was noted
        assert made.num_written == made.head == len(seen)
        if is_through:
            break
        num_interrupts += 1
    assert num_interrupts > 10


@contextlib.contextmanager
def _interrupted_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at so many lines of the journal's from here."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != journal.__file__ or frame.f_code.co_name == "fence":
            return None  # a body that is `pass` is left with its lock held, which no signal does
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_more_launches_than_the_journal_holds_all_arrive() -> None:
    """Peers may be that far behind; nothing is lost and no launch blocks."""
    first, second = local_peers(2)
    numbers = range(2 * 1024 + 3)
    ours = [_exchange(first, 0, float(i)) for i in numbers]
    theirs = [_exchange(second, 0, -float(i)) for i in numbers]

    for i in numbers:
        _look_until_over([ours[i], theirs[i]])

        assert (ours[i].got, theirs[i].got) == ({1: [-float(i)] * 2}, {0: [float(i)] * 2})


def test_a_rank_that_waited_on_all_its_transfers_owes_its_peers_nothing(
    small_journals: Callable[[int], None],
) -> None:
    """It may compute, or wait for a message, as long as it likes: no thread speaks for it."""
    small_journals(2)
    for seed in range(120):
        rng = random.Random(seed)
        memories = local_peers(3)
        launched: list[list[_Exchange]] = [[] for _ in memories]
        for _ in range(2000):
            rank = rng.randrange(3)
            mine = launched[rank]
            if len(mine) < 6 and rng.random() < 0.5:
                mine.append(_exchange(memories[rank], 0, 0.0))
            elif (rank > 0 or len(mine) == 6) and mine and mine[-1].is_over() and rank == 0:
                break  # it waited on the last of its transfers, and never looks again
        else:
            pytest.fail("rank 0 waits for ever")
        _look_until_over([theirs[-1] for theirs in launched[1:]])


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_moves_every_value_to_its_own_place(
    small_journals: Callable[[int], None], seed: int
) -> None:
    """Ranks launch and look as they please; what is over is overwritten at once, as users do."""
    rng = random.Random(seed)
    small_journals(rng.choice([2, 3, 7, 64]))
    memories = local_peers(rng.choice([2, 3, 4]))
    tags = [rng.randrange(4) for _ in range(30)]
    still = [rng.sample(tags, len(tags)) for _ in memories]  # each rank's own order
    launched: list[list[_Exchange]] = [[] for _ in memories]

    def look(rank: int) -> None:
        exchange = rng.choice(launched[rank])
        if exchange.is_over():
            exchange.buffer.fill_(-1.0)

    while any(still):
        rank = rng.randrange(len(memories))
        if still[rank] and rng.random() < 0.4:
            tag = still[rank].pop()
            number = sum(exchange.tag == tag for exchange in launched[rank])
            value = 1000.0 * rank + 100.0 * tag + number
            launched[rank].append(_exchange(memories[rank], tag, value))
        elif launched[rank]:
            look(rank)
    _look_until_over([exchange for exchanges in launched for exchange in exchanges])

    for exchanges in launched:
        numbers = dict.fromkeys(tags, 0)
        for exchange in exchanges:
            number = numbers[exchange.tag]
            numbers[exchange.tag] += 1
            assert exchange.got == {
                peer.rank: [1000.0 * peer.rank + 100.0 * exchange.tag + number] * 2
                for peer in memories
                if peer is not exchange.memory
            }


@pytest.mark.slow
def test_threads_of_one_rank_may_wait_side_by_side() -> None:
    """Backward of a CUDA-less autograd runs where it is called, and that may be two threads."""
    memories = local_peers(2)
    wrong: list[object] = []

    def work(memory: Any, tag: int) -> None:
        for i in range(200):
            exchange = _exchange(memory, tag, 1000.0 * memory.rank + 10.0 * i + tag)
            memory.wait(exchange.transfer, "exchange")
            peer = 1 - memory.rank
            if exchange.got != {peer: [1000.0 * peer + 10.0 * i + tag] * 2}:
                wrong.append((memory.rank, tag, i, exchange.got))

    threads = [
        threading.Thread(target=_noting(wrong, work), args=(memory, tag))
        for memory in memories
        for tag in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def _noting(wrong: list[object], work: Callable[..., None]) -> Callable[..., None]:
    def run(*args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # it would be lost with the thread
            wrong.append(error)

    return run


# ---- What can go wrong ----


def test_a_process_that_is_not_the_rank_is_refused() -> None:
    """In another container a number means another process, and its memory is no journal."""
    with pytest.raises(ProcessLookupError, match=rf"process {os.getpid()} here is not rank 1"):
        local_peers(2, told=lambda there: attrs.evolve(there, token=there.token + 1))
    with pytest.raises(OSError, match="Bad address"):
        local_peers(2, told=lambda there: attrs.evolve(there, address=8))


class _GivenAway:
    """A buffer whose memory is no longer there."""

    nbytes = 8

    def data_ptr(self) -> int:
        return 4096


def test_a_tag_serves_again_after_an_error() -> None:
    """The caller may go on with another batch; what failed must not be counted among the later."""
    first, second = local_peers(2)
    failing = _exchange(first, 0, 1.0)
    lender = second.launch(0, _GivenAway(), lambda _: None)  # type: ignore[arg-type]
    ours, theirs = _exchange(first, 0, 1.0), _exchange(second, 0, 2.0)
    with pytest.raises(CommError, match="could not read a buffer"):
        first.wait(failing.transfer, "exchange")
    second.wait(lender, "exchange", timeout_s=0)

    _look_until_over([ours, theirs])

    assert (ours.got, theirs.got) == ({1: [2.0] * 2}, {0: [1.0] * 2})


def test_a_reader_that_fails_says_so_in_its_own_wait() -> None:
    """Another transfer was being waited on when it happened, and is not to blame."""
    first, second = local_peers(2)
    failing, other = _exchange(first, 0, 1.0), _exchange(first, 1, 1.0)
    lender = second.launch(0, _GivenAway(), lambda _: None)  # type: ignore[arg-type]
    good = _exchange(second, 1, 2.0)

    assert other.is_over()
    assert good.is_over()
    with pytest.raises(CommError, match=r"rank 0 could not read a buffer .*rank 1.*no such mem"):
        first.wait(failing.transfer, "exchange")
    second.wait(lender, "exchange", timeout_s=0)  # who failed reads no more


@pytest.mark.parametrize("what", ["journal", "buffer"])
def test_a_peer_that_may_be_read_no_more_is_named_with_the_switch(
    what: Literal["journal", "buffer"],
) -> None:
    """A sandbox, or a change of user after the start: nothing in the traceback says whose fault."""
    first, second = local_peers(2)
    theirs = _exchange(second, 0, 2.0)

    with (
        reads_refused(what),
        pytest.raises(CommError, match=r"rank 0 c.* rank 1 \(.*not perm.*ZERO_COMM_PEER_MEMORY=0"),
    ):
        first.wait(_exchange(first, 0, 1.0).transfer, "exchange")
    assert theirs.got == {}


def test_what_goes_wrong_while_adding_is_raised_by_its_own_wait() -> None:
    """The same as above; and a wait that returns without the values is a wrong gradient."""
    first, second = local_peers(2)

    def add(_: object) -> None:
        raise NotImplementedError("no sum of such values")

    failing, other = first.launch(0, torch.zeros(2), add), _exchange(first, 1, 1.0)
    lender, good = _exchange(second, 0, 1.0), _exchange(second, 1, 2.0)

    assert other.is_over()
    assert good.is_over()
    with pytest.raises(NotImplementedError, match="no sum"):
        first.wait(failing, "exchange", timeout_s=0.1)
    assert lender.is_over()  # who failed reads no more


def test_a_rank_that_was_interrupted_says_so_and_keeps_no_peer_waiting() -> None:
    """Ctrl-C may come between any two lines; what it tore apart cannot be trusted."""
    first, second = local_peers(2)

    def be_interrupted(_: object) -> None:
        raise KeyboardInterrupt

    theirs = _exchange(second, 0, 2.0)
    with pytest.raises(KeyboardInterrupt):
        first.launch(0, torch.zeros(2), be_interrupted)

    with pytest.raises(CommError, match=r"of rank 0 was interrupted .*start the job again"):
        first.launch(1, torch.zeros(2), lambda _: None)
    with pytest.raises(CommError, match=r"cannot finish: .* rank 0 "):
        second.wait(theirs.transfer, "exchange")


def test_a_process_that_took_over_the_number_counts_as_ended() -> None:
    """Numbers are used again, and a stranger's memory would be read as a journal."""
    first, second = local_peers(2)
    exchange = _exchange(first, 0, 1.0)
    where = second.whereabouts
    ctypes.c_int64.from_address(where.address).value = where.token + 1  # as another process's
    started = time.monotonic()

    with pytest.raises(
        CommError, match=rf"finish: the process of rank 1 \({where.pid}\) has ended"
    ):
        first.wait(exchange.transfer, "exchange")
    assert time.monotonic() - started < 5  # the timeout is 20


def test_a_group_that_a_rank_gave_away_is_an_error_at_once() -> None:
    """The process goes on without it, and takes part in nothing more."""
    first, second = local_peers(2)
    exchange = _exchange(first, 0, 1.0)
    del second
    gc.collect()
    started = time.monotonic()

    with pytest.raises(CommError, match=r"cannot finish: .* rank 1 "):
        first.wait(exchange.transfer, "exchange")
    assert time.monotonic() - started < 5


def test_a_wait_ends_with_its_timeout() -> None:
    """The one given, else the group's own."""
    for own_s, given_s in [(0.05, None), (20.0, 0.05)]:
        first, _second = local_peers(2, timeout_s=own_s)
        exchange = _exchange(first, 0, 1.0)
        started = time.monotonic()

        with pytest.raises(CommError, match=r"exchange did not .* 0.05 s .*: rank 1 has n"):
            first.wait(exchange.transfer, "exchange", timeout_s=given_s)
        assert 0.05 <= time.monotonic() - started < 5
