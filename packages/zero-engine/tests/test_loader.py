"""Who gets which samples, and when the order changes: the loader that `initialize` gives."""

from itertools import chain
from typing import Any

import pytest
import torch
import zero_engine
from torch import nn
from torch.utils.data import IterableDataset
from zero_comm import Group
from zero_engine import ConfigError
from zero_engine.engine import EngineConfig


def _make(dataset: Any, group: Group, *, batch_size: int = 4, **options: Any) -> Any:
    config = EngineConfig(
        micro_batch_size=batch_size,
        train_batch_size=batch_size * group.world_size,
        drop_last=options.pop("drop_last", False),
    )
    return zero_engine.initialize(
        model=nn.Linear(1, 1), training_data=dataset, config=config, group=group, **options
    )[2]


def _epoch(loader: Any) -> list[int]:
    with torch.device("cpu"):  # not the tests' default: what is pinned must be on the host
        return [int(sample) for batch in loader for sample in batch]


def test_ranks_share_out_the_dataset(ranks) -> None:
    """A sample that two ranks see counts twice in the gradient; one that none sees, never.

    A rest is made up: a rank with one batch less would leave the others waiting in a collective.
    """
    seen = ranks(3).run(_epochs)
    for epoch in range(3):
        assert sorted(chain(*(of_rank[24][epoch] for of_rank in seen))) == list(range(24))
    uneven = [of_rank[25][0] for of_rank in seen]
    assert len({len(samples) for samples in uneven}) == 1
    assert set(chain(*uneven)) == set(range(25))


def _epochs(group: Group) -> dict[int, list[list[int]]]:
    found = {}
    for size in (24, 25):
        loader = _make(range(size), group)
        found[size] = [_epoch(loader) for _ in range(3)]
    return found


def test_each_epoch_has_another_order_and_can_be_gone_back_to() -> None:
    """A resumed run must see what the interrupted one would have seen."""
    first, second = (_make(range(24), Group.solo()) for _ in "ab")
    epochs = [_epoch(first) for _ in range(4)]
    second.epoch = 3

    assert len(set(map(tuple, epochs))) == 4
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert _epoch(second) == epochs[3]
    assert second.epoch == 4


def test_batches_are_of_the_size_asked_for_and_made_by_collate_fn() -> None:
    """Schedulers are built from their number before anything is read; text needs its padding."""
    for drops, expected in ((False, [4, 4, 4, 1]), (True, [4, 4, 4])):
        loader = _make(range(13), Group.solo(), drop_last=drops)
        batches = list(loader)
        assert all(isinstance(batch, torch.Tensor) for batch in batches)
        assert [len(batch) for batch in batches] == expected
        assert len(loader) == len(expected)

    collated = list(_make(range(6), Group.solo(), batch_size=3, collate_fn=tuple))
    assert sorted(chain(*collated)) == list(range(6))
    assert all(isinstance(batch, tuple) for batch in collated)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ([], "at least one sample"),
        (_Stream(), "_Stream.*cannot be divided among ranks"),
        ({1, 2}, "__getitem__"),
    ],
)
def test_what_cannot_be_divided_is_refused(dataset: Any, match: str) -> None:
    """A stream divided by nobody gives every rank the same samples."""
    with pytest.raises(ConfigError, match=match):
        _make(dataset, Group.solo())
