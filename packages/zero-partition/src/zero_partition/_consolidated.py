"""Whole optimizer state as it was put together, while the optimizer goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define
from torch import Tensor

from ._nested_state import map_tensors


@define(eq=False)
class Consolidated:
    """State of all parameters as of one moment."""

    state: dict[Tensor, dict[str, Any]]
    live: list[Tensor]  # parameters whose state here is still the optimizer's own memory

    @classmethod
    def of(
        cls, params: list[Tensor], whole: Mapping[int, dict[str, Any]], mine: Mapping[int, Any]
    ) -> Consolidated:
        """Of state by the number of the parameter; `mine` is that of this rank."""
        state = {params[number]: of_param for number, of_param in whole.items()}
        return cls(state, [params[number] for number in mine])

    def detach(self) -> None:
        """Give it memory of its own, before the optimizer writes to what it shares.

        In place, since a caller may have it by now.
        """
        for param in self.live:
            state = self.state[param]
            state.update(map_tensors(state, torch.clone))
        self.live.clear()
