"""Reads run ahead and writes behind; proved by the order of events, not by a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from zero_offload import OffloadedState, StoreError, TornStepError
from zero_offload.testing import RecordingStore

NUM_SLOTS = 3  # one being read, one stepped, one written
NUMEL = 1000  # of a parameter, whose state is one sub-group


class _Swapped:
    """Parameters with state on a disk: each of them a sub-group, which holds its number."""

    def __init__(self, num: int, **options: Any) -> None:
        self.store = RecordingStore()
        self.params = [torch.full((NUMEL,), 10.0 * k) for k in range(num)]
        self.on_step: Callable[[int], None] = lambda k: self.store.catch_up(but=1)
        swapped = self

        class Noting(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                (param,) = (param for group in self.param_groups for param in group["params"])
                number = round(param[0].item() / 10)
                swapped.on_step(number)
                swapped.store.events.append(("step", str(number)))
                super().step(closure)

        optimizer = Noting([torch.zeros(1)], lr=1e-3, momentum=0.9)
        self.groups: list[dict[str, Any]] = [{**optimizer.param_groups[0], "params": self.params}]
        self.state = OffloadedState.like(
            [optimizer],
            state="disk",
            store=self.store,
            own_masters={},
            subgroup_bytes=4 * NUMEL,
            small_bytes=0,
            **options,
        )
        self.state.add(dict.fromkeys(self.params, 0), self.groups)
        if num:
            self.step()  # the first makes the state, and reads none
            self.state.flush()

    def step(self) -> None:
        grads: dict[Tensor, Tensor] = {param: torch.ones(NUMEL) for param in self.params}
        self.state.step(self.groups, grads)

    def events(self) -> list[str]:
        """Since the last time: what happened to which sub-group."""
        found = []
        for what, key in self.store.events:
            verb, *done = what.split()
            found.append(" ".join([verb, key.rpartition(".")[2], *done]))
        self.store.events.clear()
        return found


def _steady(num: int, **options: Any) -> dict[str, int]:
    """When each thing happened in a step."""
    swapped = _Swapped(num, **options)
    swapped.events()
    swapped.step()
    swapped.state.flush()
    return {event: index for index, event in enumerate(swapped.events())}


def test_next_read_and_last_write_are_under_way_during_a_step() -> None:
    """That is the overlap: the disk works while the processor does, in both directions."""
    at = _steady(6)

    for k in range(6):
        assert at[f"read {k}"] < at[f"read {k} done"] < at[f"step {k}"] < at[f"write {k}"]
        if k + 1 < 6:
            assert at[f"read {k + 1}"] < at[f"step {k}"] < at[f"read {k + 1} done"]
            assert at[f"write {k}"] < at[f"step {k + 1}"] < at[f"write {k} done"]


@pytest.mark.parametrize("num", range(8))
def test_a_slot_is_filled_only_after_what_it_held_is_written(num: int) -> None:
    """Else state is overwritten on its way to the disk."""
    at = _steady(num)

    for k in range(NUM_SLOTS, num):
        assert at[f"write {k - NUM_SLOTS} done"] < at[f"read {k}"]
    assert sum(event.startswith("write") and event.endswith("done") for event in at) == num


def test_nobody_waits_for_the_write_that_a_read_ahead_comes_after() -> None:
    """A backward begins with it: it must not stand still until the disk has caught up."""
    swapped = _Swapped(6)
    swapped.on_step = lambda k: None  # the disk is done with nothing that nobody waits for
    swapped.step()
    swapped.events()

    swapped.state.read_ahead()
    assert swapped.events() == []  # all slots are still being written

    swapped.step()
    assert swapped.events()[:4] == ["write 3 done", "read 0", "read 0 done", "step 0"]


def test_what_rests_in_memory_takes_no_slot_and_does_not_delay_reads() -> None:
    """With a share on the host, its steps are the time in which the first reads happen."""
    at = _steady(5, fraction={"host": 0.4})

    assert at["read 2"] < at["step 0"]
    assert at["read 4"] < at["step 2"]
    assert not {"read 0", "read 1", "write 0", "write 1"} & set(at)


@pytest.mark.parametrize("fails", ["read 0", "read 2", "step 2", "write 1", "write 4"])
def test_an_error_is_raised_after_all_transfers_have_ended(fails: str) -> None:
    """A transfer that outlives its step writes into memory that is somebody else's."""
    swapped = _Swapped(5)
    swapped.events()
    verb, number = fails.split()
    if verb == "step":

        def fail(k: int) -> None:
            if k == int(number):
                raise OSError(fails)

        swapped.on_step = fail
    else:
        swapped.store.fails = (verb, swapped.store.counts[verb] + int(number))

    with pytest.raises((StoreError, TornStepError), match=r"injected|step 2"):
        swapped.step()
        swapped.state.flush()

    events = swapped.events()
    for event in [each for each in events if each[0] in "rw" and not each.endswith("done")]:
        assert f"{event} done" in events
