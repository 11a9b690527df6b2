"""Who gets which samples, and when the order changes."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from zero_engine._errors import ConfigError
from zero_engine._loader import make_loader


def _epoch(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_out_the_dataset_and_nobody_gets_a_sample_twice(world_size: int) -> None:
    """A sample that two ranks see counts twice in the gradient; one that none sees, never."""
    loaders = [
        make_loader(range(24), batch_size=5, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(3):
        seen = [_epoch(loader) for loader in loaders]

        assert sorted(chain(*seen)) == list(range(24))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rest_is_made_up_so_that_ranks_do_equally_many_steps(world_size: int) -> None:
    """A rank with one batch less would leave the others waiting in a collective."""
    seen = [
        _epoch(make_loader(range(25), batch_size=4, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]

    assert len({len(samples) for samples in seen}) == 1
    assert set(chain(*seen)) == set(range(25))


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_epoch_has_another_order_and_each_seed_too(world_size: int) -> None:
    """Without set_epoch every epoch has the order of the first, and nothing says so."""

    def orders(seed: int) -> list[list[int]]:
        loader = make_loader(range(24), batch_size=4, rank=0, world_size=world_size, seed=seed)
        return [_epoch(loader) for _ in range(3)]

    distinct = {tuple(order) for seed in (0, 99) for order in orders(seed)}

    assert len(distinct) == 6
    assert orders(0) == orders(0)


def test_an_epoch_can_be_gone_back_to() -> None:
    """A resumed run must see what the interrupted one would have seen."""
    first, second = (make_loader(range(24), batch_size=4, rank=0, world_size=2) for _ in "ab")
    epochs = [_epoch(first) for _ in range(4)]
    second.epoch = 3

    assert _epoch(second) == epochs[3]
    assert second.epoch == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_the_number_of_batches(drop_last: bool) -> None:
    """Schedulers are built from it before anything is read."""
    loader = make_loader(range(25), batch_size=4, rank=1, world_size=2, drop_last=drop_last)
    sizes = [len(batch) for batch in loader]

    assert len(loader) == len(sizes) == (3 if drop_last else 4)  # 13 samples a rank
    assert sizes[-1] == (4 if drop_last else 1)


def test_a_batch_is_made_by_collate_fn() -> None:
    """Text needs its own padding."""
    loader = make_loader(range(6), batch_size=3, rank=0, world_size=1, collate_fn=tuple)

    assert sorted(chain(*loader)) == list(range(6))
    assert all(isinstance(batch, tuple) for batch in loader)
    plain = make_loader(range(6), batch_size=3, rank=0, world_size=1)
    assert all(isinstance(batch, torch.Tensor) for batch in plain)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 0}, "batch_size: expected"),
        ({"batch_size": True}, "batch_size: expected"),
        ({"rank": 2}, "rank: expected less than world size 2, got 2"),
        ({"rank": -1}, "rank: expected"),
        ({"drop_last": "yes"}, "drop_last: expected"),
        ({"dataset": []}, "at least one sample"),
        ({"dataset": _Stream()}, "_Stream.*cannot be divided among ranks"),
        ({"dataset": {1, 2}}, "__getitem__"),
    ],
)
def test_what_cannot_be_divided_is_refused(change: dict, match: str) -> None:
    """A stream divided by nobody gives every rank the same samples."""
    given: dict[str, Any] = {"dataset": range(8), "batch_size": 2, "rank": 0, "world_size": 2}

    with pytest.raises(ConfigError, match=match):
        make_loader(**(given | change))
