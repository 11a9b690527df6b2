"""Gradients are copied or added where they arrive, and measured on the way."""

from __future__ import annotations

import math

import pytest
import torch
from zero_offload._native import Kernels
from zero_offload._native._abi import ISAS
from zero_offload._take import CHUNK_NUMEL, Taken, take
from zero_offload._team import Team

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (0, 1, 7, 17, 1003, CHUNK_NUMEL + 5)


@pytest.mark.parametrize("isa", [None, *ISAS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_arrives_whole_and_measured(
    request: pytest.FixtureRequest, isa: str | None, dtype: torch.dtype
) -> None:
    """The norm decides on clipping, the count on skipping: neither may cost a pass of its own."""
    kernels = _kernels(request, isa)
    for numel in NUMELS:
        source = torch.randn(numel + 1, generator=torch.Generator().manual_seed(numel))
        source = source.to(dtype)[1:]
        before = torch.randn(numel)
        to = before.clone()
        squares = source.double().square().sum().item()

        for adds in (True, False):
            taken = take(source, to, adds=adds, kernels=kernels, team=Team())
            assert taken.sum_of_squares == pytest.approx(squares, rel=1e-12)
            assert taken.num_not_finite == 0
            expected = before + source.float() if adds else source.float()
            assert torch.equal(to, expected)
        assert take(source, None, adds=False, kernels=kernels, team=Team()) == taken


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_what_is_not_finite_is_counted_and_copied(
    request: pytest.FixtureRequest, isa: str | None
) -> None:
    """The rest of the norm stays of use for saying how bad it is."""
    source = torch.ones(1003)
    source[[0, 5, 999]] = torch.tensor([math.inf, -math.inf, math.nan])
    to = torch.empty(1003)
    taken = take(source, to, adds=False, kernels=_kernels(request, isa), team=Team())

    assert taken == Taken(1000.0, 3)
    torch.testing.assert_close(to, source, equal_nan=True, rtol=0, atol=0)


def test_neither_threads_nor_instructions_change_the_sum(kernels: Kernels) -> None:
    """A norm that differed between ranks would clip them differently."""
    source = torch.randn(3 * CHUNK_NUMEL + 11)
    threads = torch.get_num_threads()
    found = set()
    try:
        for isa in (isa for name, isa in enumerate(ISAS) if kernels.library.zero_has(name)):
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                chosen = kernels.with_isa(isa)
                found.add(take(source, None, adds=False, kernels=chosen, team=Team()))
    finally:
        torch.set_num_threads(threads)

    assert len(found) == 1


def _kernels(request: pytest.FixtureRequest, isa: str | None) -> Kernels | None:
    if isa is None:
        return None
    kernels = request.getfixturevalue("kernels")
    if not kernels.library.zero_has(ISAS[isa]):
        pytest.skip(f"this processor has no {isa}")
    return kernels.with_isa(isa)
