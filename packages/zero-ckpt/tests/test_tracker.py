"""Named rngs: whose numbers they give, and that no block of code can mix them up."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from same_numbers import assert_equal, plainly
from torch import Tensor, nn
from torch.nn import functional
from zero_ckpt import Checkpointer, CheckpointError, RngTracker, SeedInUseError, UnknownRngError

SEEDS = {"a": 11, "b": 22}
NO_SEEDS = (1.5, "7", None, True, 2**64, -(2**63) - 1)


def _tracker(seeds: dict[str, int] = SEEDS) -> RngTracker:
    tracker = RngTracker("cpu")
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


GOOD = _tracker().get_states()


def _draw(tracker: RngTracker, name: str) -> Tensor:
    with tracker.fork(name):
        return torch.rand(3)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_GPU)])
def test_an_rng_gives_the_numbers_of_its_seed(device: str) -> None:
    """Runs are compared with Megatron's by seed; the default rng, of weights, does not move."""
    tracker = RngTracker(device)
    tracker.add("a", 11)
    torch.manual_seed(11)
    expected = torch.rand(3, device=device)
    torch.manual_seed(11)

    with tracker.fork("a"):
        drawn = torch.rand(3, device=device)

    assert torch.equal(drawn, expected)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_forks_nested_and_left_by_exceptions_keep_every_rng_apart() -> None:
    """Two rngs that overlap give equal dropout masks, which nobody notices."""
    for seed in range(50):
        choices = random.Random(seed)
        tracker = _tracker()
        torch.manual_seed(seed)
        oracle = {name: torch.Generator().manual_seed(value) for name, value in SEEDS.items()}
        oracle["default"] = torch.Generator().manual_seed(seed)
        _draw_in_forks(tracker, oracle, choices, "default", depth=0)

        assert torch.equal(torch.get_rng_state(), oracle.pop("default").get_state()), seed
        assert _equal(tracker.get_states(), {name: rng.get_state() for name, rng in oracle.items()})


def _draw_in_forks(
    tracker: RngTracker, oracle: dict[str, Any], choices: random.Random, name: str, depth: int
) -> None:
    for _ in range(choices.randrange(1, 4)):
        assert torch.equal(torch.rand(2), torch.rand(2, generator=oracle[name]))
        if depth < 4 and choices.random() < 0.7:
            inner = choices.choice(["a", "b"])
            with suppress(ZeroDivisionError), tracker.fork(inner):
                _draw_in_forks(tracker, oracle, choices, inner, depth + 1)
                if choices.random() < 0.3:
                    raise ZeroDivisionError


@pytest.mark.parametrize("inner", ["a", "b"])
def test_a_checkpoint_inside_a_fork_that_forks_again_is_recomputed_alike(inner: str) -> None:
    """Backward runs outside of the fork, where the same numbers must come from the same rngs."""
    outcomes = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        checkpointer = Checkpointer(tracker=_tracker())
        x = torch.randn(8, 8, requires_grad=True)

        def function(x: Tensor, tracker: RngTracker) -> Tensor:
            with tracker.fork(inner):
                x = functional.dropout(x).sin()
            return functional.dropout(x).sin()

        with checkpointer.tracker.fork("a"):
            torch.rand(1)  # the rng that is lent out has moved since
            call = checkpointer.checkpoint if is_checkpointed else plainly
            y = call(function, x, checkpointer.tracker)
        y.sum().backward()
        with checkpointer.tracker.fork("a"):
            after = torch.rand(1)
        outcomes.append((y, x.grad, torch.rand(1), after))

    for plain, checkpointed in zip(*outcomes, strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_backward_inside_a_fork_leaves_it_where_it_was() -> None:
    """A gradient penalty may be taken in the middle of a block."""
    checkpointer = Checkpointer(tracker=_tracker())
    tracker = checkpointer.tracker
    x = torch.randn(4, requires_grad=True)
    y = checkpointer.checkpoint(lambda x: functional.dropout(x).sin(), x).sum()

    with tracker.fork("a"):
        y.backward()
        drawn = torch.rand(3)

    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert torch.equal(_draw(tracker, "b"), _draw(_tracker(), "b"))


def test_a_seed_that_is_refused_changes_nothing() -> None:
    """Two rngs of one seed give the same masks; True is 1, and a float may come from a division."""
    tracker = _tracker()
    for name, seed, error, message in (
        ("c", 11, SeedInUseError, "seed 11 is in use"),
        ("a", 33, SeedInUseError, "an rng 'a' already"),
        *(("c", seed, CheckpointError, "expected an int from") for seed in NO_SEEDS),
    ):
        with pytest.raises(error, match=message):
            tracker.add(name, seed)

        assert _equal(tracker.get_states(), GOOD)
        assert tracker.state_dict()["seeds"] == SEEDS


def test_an_unknown_rng_is_named_with_those_that_exist() -> None:
    """The usual cause is that seeding was forgotten; the message says which call is missing."""
    with pytest.raises(UnknownRngError, match=r"\('a', 'b'\), got 'model-parallel-rng'"):
        _tracker().fork().__enter__()
    with pytest.raises(UnknownRngError, match=r"\(none\).*call model_parallel_cuda_manual_seed"):
        RngTracker("cpu").fork().__enter__()


def test_a_state_goes_on_after_being_saved_and_loaded() -> None:
    """A run that was resumed draws the masks of the one that was not; seeds stay in use."""
    tracker, resumed, file = _tracker(), RngTracker("cpu"), io.BytesIO()
    with tracker.fork("a"):  # a checkpoint may be written anywhere
        torch.rand(3)
        torch.save(tracker.state_dict(), file)
        expected = [torch.rand(3)]
    expected.append(_draw(tracker, "b"))

    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state)
    state["states"]["a"].zero_()  # whoever owns the file's tensors may use them again

    assert_equal([_draw(resumed, "a"), _draw(resumed, "b")], expected)
    with pytest.raises(SeedInUseError, match="seed 22 is in use"):
        resumed.add("c", 22)


BAD_STATES: dict[str, Any] = {
    "no dict": [GOOD["a"]],
    "a name that is no str": {0: GOOD["a"]},
    "no tensor": {"a": GOOD["a"].tolist()},
    "another dtype": {"a": GOOD["a"].long()},
    "of another device's generator": {"a": torch.zeros(16, dtype=torch.uint8)},
    "no state at all": {"a": torch.zeros_like(GOOD["a"])},
}
BAD_STATE_DICTS: list[Any] = [  # half a state would let a seed be used twice
    *({"states": states, "seeds": {"a": 1}} for states in BAD_STATES.values()),
    GOOD,
    None,
    {"states": GOOD},
    {"states": GOOD, "seeds": {}, "more": 1},
    {"states": GOOD, "seeds": [1, 2]},
    {"states": GOOD, "seeds": {"a": 1.0}},
    {"states": GOOD, "seeds": {"a": 1, "b": 1}},
]


@pytest.mark.parametrize(
    ("load", "wrong"),
    [("set_states", BAD_STATES.values()), ("load_state_dict", BAD_STATE_DICTS)],
)
def test_states_that_no_tracker_can_be_in_are_refused_when_they_are_set(
    load: str, wrong: Iterable[Any]
) -> None:
    """Later, in the middle of a forward, nobody would know where they came from."""
    tracker = _tracker()
    for state in wrong:
        with pytest.raises(CheckpointError, match=rf"RngTracker\.{load}\(\).*: expected"):
            getattr(tracker, load)(state)

        assert _equal(tracker.get_states(), GOOD)
        assert tracker.state_dict()["seeds"] == SEEDS


def test_states_are_put_back_and_forgotten() -> None:
    """Other code captures and restores a tracker; an evaluation script seeds as another did."""
    tracker = _tracker()
    states = tracker.get_states()
    first = _draw(tracker, "a")

    tracker.set_states(states)
    assert torch.equal(_draw(tracker, "a"), first)
    assert tracker.is_initialized()

    tracker.reset()
    assert not tracker.is_initialized()
    tracker.add("a", 11)


def test_what_would_be_overwritten_when_a_fork_ends_is_refused_inside_it() -> None:
    """The fork stores its rng when it ends, so the change would be lost in silence."""
    tracker = _tracker()
    for act in (
        tracker.reset,
        lambda: tracker.set_states(GOOD),
        lambda: tracker.load_state_dict({"states": GOOD, "seeds": SEEDS}),
        lambda: tracker.reseed("a", 3),
    ):
        with (
            tracker.fork("b"),
            pytest.raises(CheckpointError, match=r"outside of fork\(\), but fork\('b'\)"),
        ):
            act()

    assert _equal(tracker.get_states(), GOOD)


def test_an_rng_begins_again_from_another_seed() -> None:
    """And its old seed is free, while those of others are not."""
    tracker = _tracker()

    for _ in range(2):
        tracker.reseed("a", 33)
        assert torch.equal(_draw(tracker, "a"), _draw(_tracker({"a": 33}), "a"))

    with pytest.raises(SeedInUseError, match=r"seed 22 is in use.* rng 'b'"):
        tracker.reseed("a", 22)
    with pytest.raises(UnknownRngError, match="got 'c'"):
        tracker.reseed("c", 44)
    tracker.add("c", 11)


def test_a_torch_built_for_an_accelerator_that_is_not_there_uses_the_cpu(monkeypatch) -> None:
    """What pip installs on a laptop is built for CUDA."""

    def built_for(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)

    assert RngTracker().device == torch.device("cpu")


def test_a_fork_that_no_checkpoint_restores_is_refused() -> None:
    """The second run would draw other numbers, and gradients be of another dropout mask."""
    own, others = _tracker(), _tracker()

    def function(x: Tensor) -> Tensor:
        with own.fork("a"):
            return functional.dropout(x, 0.5).sin()

    def nested(x: Tensor) -> Tensor:
        return Checkpointer(tracker=own).checkpoint(function, x)

    x = torch.ones(3, requires_grad=True)
    for checkpointed in (function, nested):
        before = torch.get_rng_state(), own.get_states()
        with pytest.raises(CheckpointError, match=r"fork\(\).*another one.*tracker="):
            Checkpointer(tracker=others).checkpoint(checkpointed, x)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert _equal(own.get_states(), before[1])

    function(x)  # outside, and where gradients are off, nothing is drawn twice
    with torch.no_grad():
        Checkpointer(tracker=others).checkpoint(function, x)


def test_a_copy_of_a_model_draws_from_the_rngs_that_its_checkpoints_restore() -> None:
    """An average of weights is a deep copy, of all that a module holds."""
    tracker = _tracker()
    model = nn.Module()
    model.tracker, model.checkpointer = tracker, Checkpointer(tracker=tracker)
    copied = copy.deepcopy(model)

    def function(x: Tensor) -> Tensor:
        with copied.tracker.fork("a"):
            return functional.dropout(x, 0.5).sin()

    x = torch.ones(64, requires_grad=True)
    y = copied.checkpointer.checkpoint(function, x)
    y.sum().backward()

    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)
    assert not torch.equal(tracker.get_states()["a"], GOOD["a"])
