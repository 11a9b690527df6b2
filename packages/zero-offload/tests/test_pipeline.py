"""Reads run ahead and writes behind; proved by the order of events, not by a clock."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from zero_offload._pipeline import NUM_SLOTS, Pipeline, Turn, plan_turns


class _Future(Future):
    """Notes when it is waited for."""

    def __init__(self, events: list[str], name: str, error: Exception | None = None) -> None:
        super().__init__()
        self.events, self.name, self.error = events, name, error

    def result(self, timeout: float | None = None) -> None:
        if f"{self.name} done" not in self.events:
            self.events.append(f"{self.name} done")
        if self.error:
            raise self.error


def _run(
    num_swapped: int, *, resident: tuple[int, ...] = (), fails: str = ""
) -> tuple[list[str], Exception | None]:
    events: list[str] = []
    turns = plan_turns(range(num_swapped), lambda k: k not in resident)

    def begin(verb: str, turn: Turn) -> Future:
        name = f"{verb} {turn.subgroup}"
        events.append(name)
        return _Future(events, name, OSError(name) if name == fails else None)

    def step(turn: Turn) -> None:
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
