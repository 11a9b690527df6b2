"""Named generators, each with numbers of its own: RngTracker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from ._errors import SeedInUseError, UnknownRngError
from ._rng import get_state, set_state

MODEL_PARALLEL_RNG = "model-parallel-rng"


@final
class RngTracker:
    """Named rngs of one device, from which a block of code can draw instead of the default one.

    Ranks of a model-parallel group need equal random numbers where they hold the same activation
    and different ones where each holds a part: so there is a second rng, seeded apart.

    Args:
        device: Whose default generator is lent out; the current accelerator's, or else the CPU's,
            when None.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    @property
    def device(self) -> torch.device:
        """Whose default generator `fork` lends out."""
        if self._device is not None:
            return self._device
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def add(self, name: str, seed: int) -> None:
        """Make an rng. Local; the default one stays where it is.

        Raises:
            SeedInUseError: The name or the seed has been added before.
        """
        if seed in self._seeds:
            raise SeedInUseError(
                f"RngTracker.add({name!r}): seed {seed} is in use, and would give the numbers of "
                f"another rng ({', '.join(map(repr, self._states))}) once more; choose another, or "
                "reset() first"
            )
        if name in self._states:
            raise SeedInUseError(
                f"RngTracker.add(): there is an rng {name!r} already; choose another name, or "
                "reset() first"
            )
        before = get_state(self.device)
        try:
            self._seed_default(seed)
            self._states[name] = get_state(self.device)
        finally:
            set_state(self.device, before)
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Inside, draw from the rng of that name; afterwards from the default one again.

        Raises:
            UnknownRngError: Nobody added it.
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise UnknownRngError(
                f"RngTracker.fork(): expected an rng that was added ({known}), got {name!r}; call "
                "model_parallel_cuda_manual_seed(seed), or add(name, seed), once at the start"
            )
        device = self.device
        before = get_state(device)
        set_state(device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = get_state(device)
            set_state(device, before)

    def get_states(self) -> dict[str, Tensor]:
        """Where every rng is: uint8 tensors on the CPU, by name; for `set_states`, and to save."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Go on where `get_states` was called."""
        self._states = dict(states)

    def reset(self) -> None:
        """Forget all rngs and seeds. Local."""
        self._states, self._seeds = {}, set()

    def _seed_default(self, seed: int) -> None:
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(self.device).manual_seed(seed)
