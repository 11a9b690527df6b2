"""Steps of an optimizer while the gradients of DistributedDataParallel are still being reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from ._parcel import Parcel
from ._publication import Publication


@define(eq=False)
class StepInBackward:
    """What a communication hook does with each bucket of gradients.

    While one bucket is being reduced, the parameters of the one before are updated by their owners
    and sent. After the last bucket every rank has all parameters.
    """

    publication: Publication
    update: Callable[[Mapping[Tensor, Tensor]], None]  # local; gets reduced gradients
    reduce: Callable[[Any, Any], torch.futures.Future]
    _positions: dict[Tensor, int] = field(init=False)
    _parcels: dict[tuple[int, ...], tuple[Parcel, ...]] = field(factory=dict, init=False)
    _reducing: deque[tuple[Any, torch.futures.Future]] = field(factory=deque, init=False)
    _sending: deque[Callable[[], None]] = field(factory=deque, init=False)

    def __attrs_post_init__(self) -> None:
        self.follow(self.publication)

    def follow(self, publication: Publication) -> None:
        """Go on with other parameters. Local."""
        self.publication = publication
        self._positions = {param: at for at, param in enumerate(publication.params)}
        self._parcels.clear()

    def take(self, state: Any, bucket: Any) -> torch.futures.Future:
        """Reduce a bucket, and update what the one before has. Collective."""
        if bucket.index() == 0:  # what a backward that raised has left
            self._reducing.clear()
            self._sending.clear()
        future = self.reduce(state, bucket)
        self._reducing.append((bucket, future))
        while len(self._reducing) > (0 if bucket.is_last() else 1):
            self._step(*self._reducing.popleft())
        while len(self._sending) > (0 if bucket.is_last() else 1):
            self._sending.popleft()()
        return future

    def _step(self, bucket: Any, future: torch.futures.Future) -> None:
        """Update and send the parameters of a bucket. Collective."""
        reduced = future.wait()
        if isinstance(reduced, list):
            reduced = reduced[0]
        if reduced.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(reduced)  # as DDP itself will
        given = zip(bucket.parameters(), bucket.gradients(), strict=True)
        grads = {param: grad for param, grad in given if param in self._positions}
        positions = tuple(self._positions[param] for param in grads)
        rank, owners = self.publication.group.rank, self.publication.owners
        own = {p: g for p, g in grads.items() if owners[self._positions[p]] == rank}
        if own:
            self.update(own)
        if self.publication.group.world_size == 1:
            return
        if positions not in self._parcels:
            self._parcels[positions] = self.publication.parcels_of(positions)
        self._sending += map(self.publication.launch, self._parcels[positions])


@contextmanager
def only(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let an optimizer see no parameters but these, with these gradients."""
    kept = [group["params"] for group in optimizer.param_groups]
    grads_before = {param: param.grad for param in grads}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param in grads]
        for param, grad in grads.items():
            param.grad = grad
        yield
    finally:
        for param, grad in grads_before.items():
            param.grad = grad
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params
