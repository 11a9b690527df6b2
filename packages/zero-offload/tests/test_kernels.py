"""Every kernel gives the scalar kernel's bits, which are those of the formula in plain torch."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor
from zero_offload.testing import Batch, Formula, Rule, native_isas, step

pytestmark = pytest.mark.usefixtures("compiled")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FAST: Final = ("vector", "avx2", "avx512")
NUMELS: Final = (0, 1, 7, 8, 9, 15, 16, 17, 33, 1003)
RULES: Final = {
    "adamw": Rule(
        formula=Formula.ADAM,
        rate=-1e-2,
        factor=0.37,
        decoupled=True,
        shrink=1 - 1e-3,
        beta1=0.9,
        beta2=0.999,
        unbias=22.37,
        eps=1e-8,
    ),
    "adam_uphill": Rule(
        formula=Formula.ADAM,
        rate=-1e-2,
        maximize=True,
        weight_decay=0.1,
        beta1=0.3,
        beta2=0.99,
        eps=1e-3,
    ),
    "adagrad": Rule(formula=Formula.ADAGRAD, rate=-1e-2, weight_decay=0.01, eps=1e-10),
    "adam_half": Rule(  # where torch's lerp changes ends
        formula=Formula.ADAM, rate=-1e-2, beta1=0.5, beta2=0.5, eps=1e-8
    ),
    "lion": Rule(
        formula=Formula.LION, rate=-1e-3, decoupled=True, shrink=0.99, beta1=0.9, beta2=0.99
    ),
}


class Mix(NamedTuple):
    """Of dtypes."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    out: torch.dtype | None


# Every mix that an optimizer can ask for.
MIXES: Final = [
    Mix(param, grad, state, out)
    for param, grad, state, out in itertools.product(
        (F32, BF16, F16), (F32, BF16, F16), (F32, BF16, F16), (None, BF16, F16)
    )
    if param is F32 or out is None
]


def _ident(mix: Mix) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in mix)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["scalar", *FAST])
@pytest.mark.parametrize("rule", RULES)
def test_every_instruction_set_gives_the_bits_of_the_formula(rule: str, isa: str) -> None:
    """Ranks on different machines must step alike, with a compiler and without; ends as well."""
    for mix, amsgrad, offset in itertools.product(MIXES, (False, True), (0, 3)):
        mine, theirs = (_batch(mix, rule, NUMELS, offset, amsgrad) for _ in range(2))
        step(mine, RULES[rule], _here(isa))
        step(theirs, RULES[rule], None)

        _assert_same_bits(mine, theirs, f"{_ident(mix)}, amsgrad={amsgrad}, from {offset}")


@pytest.mark.parametrize("isa", ["scalar", *FAST])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_a_million_elements_in_threads_are_the_formula(rule: str, isa: str) -> None:
    """Threads take parts that begin anywhere in a list of tensors."""
    mix = Mix(F32, BF16, F32, BF16)
    numels = (70_001, 1_000_003, 5)
    mine, theirs = (_batch(mix, rule, numels, 1, amsgrad=False) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        step(mine, RULES[rule], _here(isa))
    finally:
        torch.set_num_threads(threads)
    step(theirs, RULES[rule], None)

    _assert_same_bits(mine, theirs, isa)


@pytest.mark.parametrize("isa", ["scalar", *FAST])
def test_only_the_span_asked_for_is_written(isa: str) -> None:
    """A range of a step touches its elements; its neighbours may be on their way from disk."""
    mix = Mix(F32, BF16, F32, BF16)
    whole, part, before = (_batch(mix, "adamw", (1003,), 0, amsgrad=True) for _ in range(3))
    part.starts, part.stops = [13], [801]
    for batch in (whole, part):
        step(batch, RULES["adamw"], _here(isa))

    columns = zip(whole.written(), part.written(), before.written(), strict=True)
    for (stepped,), (mixed,), (old,) in columns:
        assert torch.equal(mixed, torch.cat([old[:13], stepped[13:801], old[801:]]))


@pytest.mark.parametrize("isa", ["scalar", *FAST])
def test_every_16_bit_number_is_read_as_torch_reads_it(isa: str) -> None:
    """A conversion that is wrong for subnormals alone would pass every test on random numbers."""
    zero = Rule(formula=Formula.ADAGRAD, rate=0.0)
    for dtype in (BF16, F16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        batch = Batch()
        _fill(batch, torch.zeros(2**16), every, torch.zeros(2**16))
        step(batch, zero, _here(isa))

        torch.testing.assert_close(
            batch.tensors["first"][0], every.float() * every.float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("isa", ["scalar", *FAST])
def test_hard_numbers_are_rounded_as_torch_rounds_them(isa: str) -> None:
    """Ties, overflow, subnormals and infinities: to nearest, ties to even."""
    stay = Rule(formula=Formula.LION, rate=-0.0)  # -0.0 stays as well
    hard = _hard_numbers()
    for dtype in (BF16, F16):
        batch = Batch()
        _fill(batch, hard.clone(), torch.zeros_like(hard), torch.zeros_like(hard))
        batch.tensors["out"].append(torch.zeros_like(hard, dtype=dtype))
        step(batch, stay, _here(isa))

        assert torch.equal(batch.tensors["out"][0].isnan(), hard.isnan())
        finite = ~hard.isnan()
        mine, torchs = batch.tensors["out"][0][finite], hard.to(dtype)[finite]
        assert torch.equal(mine.view(torch.int16), torchs.view(torch.int16))


@pytest.mark.parametrize("isa", ["scalar", *FAST])
@pytest.mark.parametrize("rule", RULES)
def test_numbers_at_the_ends_step_as_the_formula_says(rule: str, isa: str) -> None:
    """A parameter of which nothing was asked stays; one that broke shows it, on every machine."""
    ends = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-39, 3e38, 1.0)
    grads, firsts, params = (
        torch.tensor(column) for column in zip(*itertools.product(ends, repeat=3), strict=True)
    )
    batches = []
    if RULES[rule].formula == Formula.ADAGRAD:
        firsts = firsts.abs()
    for _ in range(2):
        batch = Batch()
        _fill(batch, params.clone(), grads.clone(), firsts.clone())
        if RULES[rule].formula == Formula.ADAM:
            batch.tensors["second"].append(firsts.abs())
            batch.tensors["largest"].append(firsts.abs())  # nan stays nan: amsgrad hides nothing
        batches.append(batch)
    step(batches[0], RULES[rule], _here(isa))
    step(batches[1], RULES[rule], None)

    for (mine,), (theirs,) in zip(*(batch.written() for batch in batches), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", ["scalar", *FAST])
def test_a_step_and_the_callers_floating_point_settings_leave_each_other(isa: str) -> None:
    """Threads differ in whether they flush subnormals; users' own code runs on the same thread."""
    mine, theirs = (_batch(Mix(F32, F32, F32, None), "adamw", (99,), 0, False) for _ in range(2))
    for batch in (mine, theirs):
        batch.tensors["first"][0].mul_(1e-39)
        batch.tensors["grad"][0].zero_()
    tiny = torch.tensor([1e-39])
    try:
        torch.set_flush_denormal(True)
        step(mine, RULES["adamw"], _here(isa))
        after = (tiny * 0.5).item()
    finally:
        torch.set_flush_denormal(False)
    step(theirs, RULES["adamw"], _here(isa))

    assert after == 0.0
    assert (tiny * 0.5).item() > 0.0
    assert mine.tensors["first"][0].any()
    _assert_same_bits(mine, theirs, isa)


@pytest.mark.parametrize("isa", ["scalar", *FAST])
def test_stochastic_rounding_is_the_references_and_right_on_average(isa: str) -> None:
    """It may go up or down, with the probability that makes the mean exact."""
    numel = 2**16
    values = torch.tensor([1.0 + 2.0**-9, -3.0 - 3 * 2.0**-9, 1.0, float("inf")])
    values = values.repeat_interleave(numel // 4)
    stay = Rule(Formula.LION, rate=0.0, stochastic=True, seed=77)
    batches = []
    for _ in range(2):
        batch = Batch()
        _fill(batch, values.clone(), torch.zeros(numel), torch.zeros(numel))
        batch.tensors["out"].append(torch.zeros(numel, dtype=BF16))
        batch.indices[0] = 2**32 - numel // 2  # where 32 bits wrap
        batches.append(batch)
    step(batches[0], stay, _here(isa))
    step(batches[1], stay, None)

    _assert_same_bits(*batches, isa)
    rounded = batches[0].tensors["out"][0].double().view(4, -1)
    up = 2.0**-7  # the distance of bf16 neighbours above 1; 2^-6 above 2
    # three standard deviations of the mean of 16384 draws are 0.012 of that distance
    assert rounded[0].mean().item() == pytest.approx(1 + 2.0**-9, abs=0.012 * up)
    assert rounded[1].mean().item() == pytest.approx(-3 - 3 * 2.0**-9, abs=0.012 * 2 * up)
    assert rounded[2].unique().tolist() == [1.0]
    assert rounded[3].unique().tolist() == [float("inf")]


def _here(isa: str) -> str:
    if isa not in native_isas():
        pytest.skip(f"there are no kernels for {isa} here")
    return isa


def _fill(batch: Batch, param: Tensor, grad: Tensor, first: Tensor) -> None:
    batch.tensors["param"].append(param)
    batch.tensors["grad"].append(grad)
    batch.tensors["first"].append(first)
    batch.starts.append(0)
    batch.stops.append(param.numel())
    batch.indices.append(0)


def _batch(mix: Mix, rule: str, numels: tuple[int, ...], offset: int, amsgrad: bool) -> Batch:
    """The same numbers for the same arguments, `offset` elements into their storage."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((mix, rule, numels)).encode()))

    def made(numel: int, dtype: torch.dtype) -> Tensor:
        storage = torch.zeros(numel + offset, dtype=dtype)
        storage[offset:] = torch.randn(numel, generator=generator) * 0.1
        return storage[offset:]

    batch = Batch()
    for numel in numels:
        _fill(batch, made(numel, mix.param), made(numel, mix.grad), made(numel, mix.state))
        if RULES[rule].formula == Formula.ADAM:
            batch.tensors["second"].append(made(numel, mix.state).abs_())
            if amsgrad:
                batch.tensors["largest"].append(made(numel, mix.state).abs_())
        if RULES[rule].formula == Formula.ADAGRAD:
            batch.tensors["first"][-1].abs_()
        if mix.out is not None:
            batch.tensors["out"].append(made(numel, mix.out))
    return batch


def _assert_same_bits(mine: Batch, theirs: Batch, which: str) -> None:
    for column, other in zip(mine.written(), theirs.written(), strict=True):
        for got, expected in zip(column, other, strict=True):
            kind = torch.int32 if got.dtype is F32 else torch.int16
            assert torch.equal(got.view(kind), expected.view(kind)), which


def _hard_numbers() -> Tensor:
    """Around every 16-bit number: itself, its ties with the neighbours, and next to those."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    around = []
    for dtype, spare_bits in ((BF16, 16), (F16, 13)):
        bits = every.view(dtype).float().view(torch.int32)
        tie = 1 << (spare_bits - 1)
        around += [(bits + d).view(F32) for d in (0, 1, -1, tie, tie + 1, tie - 1)]
    tiny = torch.arange(1, 5000).float() * 2.0**-26  # between fp16's subnormals
    return torch.cat([*around, tiny, -tiny, tiny * 2.0**-123])
