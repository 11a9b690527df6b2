"""Packing is copying end to end, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from zero_comm._wire import by_dtype, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize("seed", range(100))
def test_unpack_undoes_pack(seed: int) -> None:
    """For any sizes and shapes, an empty tensor anywhere among them included."""
    tensors = _some_tensors(seed)

    for _, chosen in by_dtype(tensors):
        wire = pack([tensors[i] for i in chosen])
        back = [torch.full_like(tensors[i], 77) for i in chosen]
        unpack(wire, back)

        assert wire.tolist() == [x for i in chosen for x in tensors[i].reshape(-1).tolist()]
        assert all(torch.equal(b, tensors[i]) for b, i in zip(back, chosen, strict=True))


@pytest.mark.parametrize("seed", range(100))
def test_each_tensor_travels_in_one_wire_buffer(seed: int) -> None:
    """That of its dtype; and every rank must come to the same order of buffers."""
    tensors = _some_tensors(seed)
    groups = list(by_dtype(tensors))
    shuffled = list(by_dtype(list(reversed(tensors))))

    assert sorted(i for _, chosen in groups for i in chosen) == list(range(len(tensors)))
    assert all(tensors[i].dtype == dtype for dtype, chosen in groups for i in chosen)
    assert all(chosen == sorted(chosen) for _, chosen in groups)
    assert [dtype for dtype, _ in groups] == [dtype for dtype, _ in shuffled]


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_a_wire_buffer_is_a_copy(num_tensors: int) -> None:
    """The caller may write its tensors as soon as the collective was launched."""
    tensors = [torch.ones(3) for _ in range(num_tensors)]
    wire = pack(tensors)
    for tensor in tensors:
        tensor.zero_()

    assert wire.tolist() == [1.0] * 3 * num_tensors


def _some_tensors(seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        [rng.randrange(4) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(10))
    ]
    return [
        torch.randint(0, 100, shape, generator=generator).to(rng.choice(DTYPES)) for shape in shapes
    ]
