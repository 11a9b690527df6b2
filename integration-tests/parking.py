"""Backups for tests of parking, and a training that parks as it goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import parity
import torch
import zero_engine
from attrs import define, field
from torch import Tensor, nn
from zero_comm import Group
from zero_partition import StateKind
from zero_partition.seams import offload_states, reload_states


@define(eq=False)
class PoisonedBackup:
    """Its memory is nobody else's, and what it was given is overwritten: copies must be real."""

    fails_at: int = -1  # the copy, counted from 0, that raises
    sizes: dict[str, int] = field(factory=dict)
    kept: dict[str, bytes] = field(factory=dict)  # no tensors: live_bytes overlooks them
    is_closed: bool = False
    _num_copies: int = 0

    def allocate(self, sizes: Mapping[str, int]) -> None:  # noqa: D102
        self.sizes = dict(sizes)

    def write(self, key: str, source: Tensor, *, non_blocking: bool) -> None:  # noqa: D102
        self._count()
        assert source.numel() == self.sizes[key]
        self.kept[key] = source.cpu().numpy().tobytes()
        source.fill_(0xFF)

    def read(self, key: str, into: Tensor, *, non_blocking: bool) -> None:  # noqa: D102
        self._count()
        into.copy_(torch.frombuffer(bytearray(self.kept[key]), dtype=torch.uint8))
        del self.kept[key]

    def close(self) -> None:  # noqa: D102
        self.is_closed = True

    def _count(self) -> None:
        self._num_copies += 1
        if self._num_copies == self.fails_at + 1:
            raise OSError("the backup's disk is full")


Disturb = Callable[[nn.Module], None]
Training = tuple[nn.Module, torch.optim.Optimizer]


def offload_and_reload(*kinds: StateKind) -> Disturb:
    """Park these kinds with a poisoned backup and bring them back at once."""

    def disturb(model: nn.Module) -> None:
        backup = PoisonedBackup()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing stays in memory because of a view of it
            offload_states(model, backup, kinds)
        reload_states(model)
        assert backup.is_closed and not backup.kept

    return disturb


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    disturb: Disturb = lambda _: None,
    *,
    steps: range = range(2),
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and rank 0's weights of two micro-batches a step, disturbed between all its phases.

    In even steps the first micro-batch is not reduced, so that whole gradients wait.
    """
    losses = []
    for step in steps:
        for micro in range(2):
            waits = micro == 0 and step % 2 == 0
            with zero_engine.no_sync(model) if waits else nullcontext():
                loss = parity.loss_of(model, parity.batch(step, micro, group.rank))
                loss.backward()
                losses.append(loss.item())
                del loss
                disturb(model)
        zero_engine.clip_grad_norm_(model, 1.0)
        disturb(model)
        optimizer.step()
        optimizer.zero_grad()
        disturb(model)
    return losses, zero_engine.full_state_dict(model)


def assert_same_bits(group: Group, build: Callable[[], Training], *disturbs: Disturb) -> None:
    """Each of these changes nothing of a training, whenever it comes. Collective."""
    expected_losses, expected = train(*build(), group)
    for number, disturb in enumerate(disturbs):
        losses, weights = train(*build(), group, disturb)
        assert losses == expected_losses, f"{number}"
        parity.assert_same_weights(weights, expected, what=f"{number}")
