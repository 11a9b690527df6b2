"""Reads run ahead and writes behind; proved by the order of events, not by a clock."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

import pytest
from zero_offload._pipeline import NUM_SLOTS, Pipeline, Turn, plan_turns


class _Future(Future):
    """Is done when it is waited for, and notes that."""

    def __init__(self, events: list[str], name: str, error: Exception | None = None) -> None:
        super().__init__()
        self.events, self.name, self.error = events, name, error

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.events.append(f"{self.name} done")
            self.set_exception(self.error) if self.error else self.set_result(None)
        return super().result(timeout)


def _run(
    num_swapped: int, *, resident: tuple[int, ...] = (), fails: str = ""
) -> tuple[list[str], Exception | None]:
    """A run of a disk that is done with the write before the last when the next step begins."""
    events: list[str] = []
    begun: dict[str, Future] = {}
    turns = plan_turns(range(num_swapped), lambda k: k not in resident)

    def begin(verb: str, turn: Turn) -> Future:
        name = f"{verb} {turn.subgroup}"
        events.append(name)
        begun[name] = _Future(events, name, OSError(name) if name == fails else None)
        return begun[name]

    def step(turn: Turn) -> None:
        with contextlib.suppress(KeyError, OSError):
            begun[f"write {turn.subgroup - 2}"].result()
        events.append(f"step {turn.subgroup}")
        if fails == f"step {turn.subgroup}":
            raise OSError(fails)

    pipeline = Pipeline(
        read=lambda turn: begin("read", turn), write=lambda turn: begin("write", turn)
    )
    try:
        pipeline.run(turns, step)
        pipeline.settle()
    except OSError as error:
        return events, error
    return events, None


def test_next_read_and_last_write_are_under_way_during_a_step() -> None:
    """That is the overlap: the disk works while the processor does, in both directions."""
    events, _ = _run(6)

    at = {event: index for index, event in enumerate(events)}
    for k in range(6):
        assert at[f"read {k}"] < at[f"read {k} done"] < at[f"step {k}"] < at[f"write {k}"]
        if k + 1 < 6:
            assert at[f"read {k + 1}"] < at[f"step {k}"] < at[f"read {k + 1} done"]
            assert at[f"write {k}"] < at[f"step {k + 1}"] < at[f"write {k} done"]


@pytest.mark.parametrize("num", range(8))
def test_a_slot_is_filled_only_after_what_it_held_is_written(num: int) -> None:
    """Else state is overwritten on its way to the disk."""
    events, _ = _run(num)

    at = {event: index for index, event in enumerate(events)}
    for k in range(NUM_SLOTS, num):
        assert at[f"write {k - NUM_SLOTS} done"] < at[f"read {k}"]
    assert sum(event.startswith("write") and event.endswith("done") for event in events) == num


def test_nobody_waits_for_the_write_that_a_read_ahead_comes_after() -> None:
    """A backward begins with it: it must not stand still until the disk has caught up."""
    events: list[str] = []
    turns = plan_turns(range(6), lambda _: True)

    def begin(verb: str, turn: Turn) -> Future:
        events.append(f"{verb} {turn.subgroup}")
        return _Future(events, events[-1])

    pipeline = Pipeline(
        read=lambda turn: begin("read", turn), write=lambda turn: begin("write", turn)
    )
    pipeline.run(turns, lambda turn: None)
    events.clear()
    pipeline.read_ahead(turns)
    assert events == []  # all slots are still being written

    pipeline.run(turns, lambda turn: events.append(f"step {turn.subgroup}"))
    pipeline.settle()
    assert events[:4] == ["write 3 done", "read 0", "read 0 done", "step 0"]


def test_what_rests_in_memory_takes_no_slot_and_does_not_delay_reads() -> None:
    """With a share on the host, its steps are the time in which the first reads happen."""
    events, _ = _run(5, resident=(0, 1, 3))

    at = {event: index for index, event in enumerate(events)}
    assert at["read 2"] < at["step 0"]
    assert at["read 4"] < at["step 2"]
    assert not {"read 0", "read 1", "read 3", "write 3"} & set(events)


@pytest.mark.parametrize("fails", ["read 0", "read 2", "step 2", "write 1", "write 4"])
def test_an_error_is_raised_after_all_transfers_have_ended(fails: str) -> None:
    """A transfer that outlives its step writes into memory that is somebody else's."""
    events, error = _run(5, fails=fails)

    assert str(error) == fails
    for event in [each for each in events if each[0] in "rw" and not each.endswith("done")]:
        assert f"{event} done" in events
