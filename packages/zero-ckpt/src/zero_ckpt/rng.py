"""Named generators, each with numbers of its own: RngTracker."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, final

import torch
from attrs import frozen
from torch import Tensor

from .errors import CheckpointError, SeedInUseError, UnknownRngError
from .torch_private import accelerator


def get_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator: uint8, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator to one from `get_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def seeded_state(device: torch.device, seed: int) -> Tensor:
    """Return the state that `manual_seed` would give the device's default generator. Local."""
    return torch.Generator(device).manual_seed(seed).get_state()


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """Return accelerators where numbers may be drawn: those of tensors, and the current one."""
    found = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    device = accelerator()
    if device is not None and torch.get_device_module(device).is_initialized():
        found.add(torch.device(device.type, torch.accelerator.current_device_index()))
    return tuple(sorted(found, key=str))


MODEL_PARALLEL_RNG = "model-parallel-rng"

# Trackers whose rngs are restored in the second runs of the checkpoints around the running code,
# outermost first. Each thread has its own.
_restored: Final[ContextVar[tuple[RngTracker, ...]]] = ContextVar("restored", default=())


class ForkedRng(NamedTuple):
    """The rng that `fork` has put in place of a device's default one."""

    name: str
    device: torch.device


@final
class RngTracker:
    """Named rngs of one device, from which a block of code can draw instead of the default one.

    Ranks of a model-parallel group need equal random numbers where they have the same activation,
    and different ones where each has a part of it. So there is a second rng with another seed.

    Args:
        device: Device whose default generator `fork` uses; the current accelerator, or else the
            CPU, when None.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._states: dict[str, Tensor] = {}
        self._seeds: dict[str, int] = {}
        self._forked: ForkedRng | None = None

    @property
    def device(self) -> torch.device:
        """Device whose default generator `fork` uses for an rng."""
        if self._device is not None:
            return self._device
        device = accelerator()
        if device is None:
            return torch.device("cpu")
        return torch.device(device.type, torch.accelerator.current_device_index())

    def is_initialized(self) -> bool:
        """Return whether the tracker has any rng."""
        return bool(self._states)

    def add(self, name: str, seed: int) -> None:
        """Add an rng. Local; the state of the default rng does not change.

        Args:
            name: Name for `fork`.
            seed: Seed as for `torch.manual_seed`, after which the default rng would draw the same
                numbers.

        Raises:
            SeedInUseError: The name or the seed has been added before.
            CheckpointError: The name is no str, or the seed no int of 64 bits.
        """
        _check_name("add", name)
        if name in self._states:
            raise SeedInUseError(
                f"RngTracker.add(): there is an rng {name!r} already; choose another name, or "
                "reset() first"
            )
        self._seed("add", name, seed)

    def reseed(self, name: str, seed: int) -> None:
        """Seed an rng anew. Local.

        Raises:
            UnknownRngError: It was not added.
            SeedInUseError: Another rng has the seed.
            CheckpointError: The seed is no int of 64 bits, or this is inside a `fork`.
        """
        self._check_not_forked("reseed")
        self._known("reseed", name)
        self._seed("reseed", name, seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from the rng of that name inside; afterwards, also on errors, from the one before.

        Forks nest: an rng continues from its last state, whichever fork drew from it last.

        Raises:
            UnknownRngError: It was not added.
            CheckpointError: This is inside a checkpoint that restores another tracker.
        """
        self._known("fork", name)
        if any(other is not self for other in _restored.get()):
            raise CheckpointError(
                "RngTracker.fork(): expected the tracker that the checkpoint around restores, got "
                "another one, whose numbers the second run could not draw again; give the "
                "checkpointer this one, as in Checkpointer(tracker=get_cuda_rng_tracker()), or "
                "fork default_checkpointer().tracker where checkpoint() is called"
            )
        outer, forked = self._forked, ForkedRng(name, self.device)
        before = get_state(forked.device)
        if outer is not None:
            self._states[outer.name] = get_state(outer.device)
        set_state(forked.device, self._states[name])
        self._forked = forked
        try:
            yield
        finally:
            self._states[name] = get_state(forked.device)
            self._forked = outer
            set_state(forked.device, before)
            # A fork inside another one of the same name has drawn from the outer fork's rng.
            if outer is not None:
                set_state(outer.device, self._states[outer.name])

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each rng by name, uint8 on the CPU; for `set_states`, and to save."""
        states = dict(self._states)
        if self._forked is not None:
            states[self._forked.name] = get_state(self._forked.device)
        return states

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all rngs by those of `states`, which `get_states` returned. Local.

        Raises:
            CheckpointError: This is inside a `fork`; a name is no str; or a state is not that of a
                generator of `device`. Nothing has been set then.
        """
        self._check_not_forked("set_states")
        self._states = self._checked_states("set_states", states)

    def state_dict(self) -> dict[str, Any]:
        """Return `states` of `get_states`, and `seeds` by name, for a training checkpoint.

        Local; each rank of a model-parallel group has its own. It contains only dicts, tensors and
        ints, which `torch.load(weights_only=True)` reads.
        """
        return {"states": self.get_states(), "seeds": dict(self._seeds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rngs and seeds by those of a `state_dict`; these seeds count as in use.

        Raises:
            CheckpointError: This is inside a `fork`; `state` is not of the form that `state_dict`
                gives; or it is that of another type of device. Nothing has been loaded then.
        """
        self._check_not_forked("load_state_dict")
        where = "load_state_dict"
        if not isinstance(state, Mapping) or set(state) != {"states", "seeds"}:
            raise CheckpointError(
                f"RngTracker.{where}(): expected what state_dict() gives, a dict of 'states' and "
                f"'seeds', got {_shown(state)}"
            )
        states, seeds = self._checked_states(where, state["states"]), state["seeds"]
        if not isinstance(seeds, Mapping):
            raise CheckpointError(
                f"RngTracker.{where}(): expected 'seeds' to be a dict of ints by name, got "
                f"{_shown(seeds)}"
            )
        checked = {
            _check_name(where, name): seed_of(f"RngTracker.{where}()", seed)
            for name, seed in seeds.items()
        }
        if len(set(checked.values())) < len(checked):
            raise CheckpointError(
                f"RngTracker.{where}(): expected a seed of its own for each rng, got {checked}"
            )
        self._states = {name: value.clone() for name, value in states.items()}
        self._seeds = checked

    def reset(self) -> None:
        """Forget all rngs and seeds. Local.

        Raises:
            CheckpointError: This is inside a `fork`.
        """
        self._check_not_forked("reset")
        self._states, self._seeds = {}, {}

    def capture(self) -> tuple[dict[str, Tensor], ForkedRng | None]:
        """Return the arguments for `restore`, inside a `fork` as well. Local."""
        return self.get_states(), self._forked

    def restore(self, states: Mapping[str, Tensor], forked: ForkedRng | None) -> None:
        """Restore rngs from `capture`, and the default generator too if that was in a `fork`."""
        self._states, self._forked = dict(states), forked
        if forked is not None:
            set_state(forked.device, self._states[forked.name])

    def _seed(self, where: str, name: str, seed: Any) -> None:
        checked = seed_of(f"RngTracker.{where}({name!r})", seed)
        others = [other for other, used in self._seeds.items() if used == checked and other != name]
        # A name that has a seed but no state lost its rng by `set_states`, after numbers of this
        # seed may have been used.
        if others or (name not in self._states and self._seeds.get(name) == checked):
            raise SeedInUseError(
                f"RngTracker.{where}({name!r}): seed {checked} is in use, and would give the "
                f"numbers of rng {(others or [name])[0]!r} once more; choose another, or reset() "
                "first"
            )
        self._states[name] = seeded_state(self.device, checked)
        self._seeds[name] = checked

    def _known(self, where: str, name: Any) -> None:
        _check_name(where, name)
        if name not in self._states:
            added = ", ".join(map(repr, self._states)) or "none"
            raise UnknownRngError(
                f"RngTracker.{where}(): expected an rng that was added ({added}), "
                f"got {name!r}; call model_parallel_cuda_manual_seed(seed), or add(name, seed), "
                "once at the start"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Mark both runs of a checkpointed function, whose second run restores this tracker."""
        token = _restored.set((*_restored.get(), self))
        try:
            yield
        finally:
            _restored.reset(token)

    def __deepcopy__(self, memo: dict[int, Any]) -> RngTracker:
        """Return itself: copies of a model draw from the same rngs, as from the default one."""
        return self

    def _check_not_forked(self, where: str) -> None:
        if self._forked is not None:
            raise CheckpointError(
                f"RngTracker.{where}(): expected to be outside of fork(), but "
                f"fork({self._forked.name!r}) has not ended; call it after that"
            )

    def _checked_states(self, where: str, states: Any) -> dict[str, Tensor]:
        if not isinstance(states, Mapping):
            raise CheckpointError(
                f"RngTracker.{where}(): expected a dict of uint8 tensors by name, as get_states() "
                f"gives, got {_shown(states)}"
            )
        found = {}
        for name, state in states.items():
            _check_name(where, name)
            try:
                found[name] = state.cpu()
                torch.Generator(self.device).set_state(found[name])
            except (RuntimeError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"RngTracker.{where}(): expected the state of a generator of {self.device} for "
                    f"rng {name!r}, got {_shown(state)}; states from another type of device, or "
                    "another version of torch, cannot be gone on from: seed anew"
                ) from error
        return found


def seed_of(where: str, seed: Any) -> int:
    """Return the seed as an int; CheckpointError if `torch.manual_seed` would not take it."""
    try:
        # `index` accepts integers of numpy too.
        value = operator.index(seed)
    except TypeError:
        value = None
    if value is None or isinstance(seed, bool) or not -(2**63) <= value < 2**64:
        raise CheckpointError(
            f"{where}: expected an int from -2**63 to 2**64 - 1 as seed, got {seed!r}"
        )
    return value


def _check_name(where: str, name: Any) -> str:
    if not isinstance(name, str):
        raise CheckpointError(
            f"RngTracker.{where}(): expected a str as name of an rng, got {name!r}"
        )
    return name


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r:.80}"


_CPU: Final = torch.device("cpu")


@frozen
class RngSnapshot:
    """States of the CPU's and devices' generators and of all rngs of a tracker, uint8 tensors."""

    tracker: RngTracker
    _devices: Mapping[torch.device, Tensor]
    _tracked: Mapping[str, Tensor]
    # The rng of the `fork` that this was captured in; None outside of any.
    _forked: ForkedRng | None

    @classmethod
    def capture(cls, devices: Iterable[torch.device], tracker: RngTracker) -> RngSnapshot:
        """Capture the current states. Local; waits for no device."""
        states = {device: get_state(device) for device in {_CPU, *devices}}
        return cls(tracker, states, *tracker.capture())

    @contextmanager
    def drawn_again(self) -> Iterator[None]:
        """Draw again the numbers that came after `capture`; then restore the present states."""
        before = RngSnapshot.capture(self._devices, self.tracker)
        try:
            self.put_back()
            with self.tracker.restored():
                yield
        finally:
            before.put_back()

    def put_back(self) -> None:
        """Set all generators and rngs to the states in this snapshot. Local."""
        for device, state in self._devices.items():
            set_state(device, state)
        self.tracker.restore(self._tracked, self._forked)
