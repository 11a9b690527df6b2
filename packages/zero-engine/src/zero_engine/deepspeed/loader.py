"""Batches of a dataset: each rank its own samples, in another order each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_engine.errors import ConfigError


@final
class Loader:
    """Iterate over it once per epoch; `len` is the number of batches of one.

    Attributes:
        epoch: Of the next iteration. To go on with another one, set it.
    """

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        self.epoch = 0
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self._loader)


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
) -> Loader:
    """What `initialize(training_data=dataset)` gives: shuffled, divided among ranks. Local.

    As `torch.utils.data.DistributedSampler` divides: where the number of samples is no multiple of
    the world size, the first few of the epoch are taken twice, so that ranks have equally many.

    Args:
        dataset: With `__getitem__` and `__len__`, and not empty.
        batch_size: Samples of this rank in one micro-batch.
        rank: Which of the ranks that divide the samples among them.
        world_size: How many these are.
        collate_fn: From a list of samples to a batch; torch's own when None.
        drop_last: Whether a last batch that is smaller than the others is left out.

    Raises:
        ConfigError: `dataset` cannot be divided.
    """
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_items:
        raise ConfigError(
            "make_loader(): dataset: expected one with __getitem__ and __len__, got a "
            f"{type(dataset).__name__}. What can only be iterated over cannot be divided among "
            "ranks here: iterate over it yourself, each rank over its own part"
        )
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError("make_loader(): dataset: expected at least one sample, got an empty one")
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),
    )
    return Loader(loader, sampler)
