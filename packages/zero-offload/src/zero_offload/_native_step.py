"""From a batch of tensors to one call of a kernel."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from ._batch import Batch
from ._native import Kernels
from ._native._abi import DTYPES, ISAS, NO_DTYPE, TENSOR, NativeRule
from ._rule import Rule
from ._team import Team


def step_batch(batch: Batch, rule: Rule, *, kernels: Kernels, team: Team) -> None:
    """Step every run of the batch in place. Local, blocking; the GIL is released meanwhile."""
    table = _table(batch)
    numbers = _numbers(batch, rule)
    kernel = getattr(kernels.library, f"zero_{rule.formula.value}")
    isa, address, count = ISAS[kernels.isa], table.ctypes.data, len(table)

    def work(start: int, stop: int) -> None:
        kernel(isa, address, count, ctypes.byref(numbers), start, stop)

    team.share(int(table["numel"].sum()), work)


def advance(steps: list[Tensor], kernels: Kernels | None) -> None:
    """Add 1 to each step count: fp32 tensors of one element on the CPU. Local, blocking."""
    if kernels is None:
        for step in steps:
            step.add_(1)
    else:
        addresses = np.array([step.data_ptr() for step in steps], np.uintp)
        kernels.library.zero_count(addresses.ctypes.data, len(steps))


def _table(batch: Batch) -> np.ndarray:
    """An array of `zero_tensor`; of a batch used again, gradients' addresses are renewed."""
    dtypes, starts = batch.dtypes, np.array(batch.starts, np.int64)
    columns = [("grad", batch.grads, dtypes.grad)]
    table = batch.table
    if table is None:
        table = batch.table = np.zeros(len(batch.params), TENSOR)
        table["numel"] = np.array(batch.stops, np.int64) - starts
        table["index"] = np.array(batch.indices, np.int64) + starts
        columns += [
            ("param", batch.params, dtypes.param),
            ("first", batch.firsts, dtypes.state),
            ("second", batch.seconds, dtypes.state),
            ("largest", batch.largests, dtypes.state),
            ("out", batch.outs, dtypes.out or dtypes.param),
        ]
    for name, tensors, dtype in columns:
        if tensors:
            addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
            table[name] = addresses + starts * dtype.itemsize
    return table


def _numbers(batch: Batch, rule: Rule) -> NativeRule:
    dtypes = batch.dtypes
    return NativeRule(
        param_dtype=DTYPES[dtypes.param],
        grad_dtype=DTYPES[dtypes.grad],
        state_dtype=DTYPES[dtypes.state],
        out_dtype=NO_DTYPE if dtypes.out is None else DTYPES[dtypes.out],
        maximize=rule.maximize,
        decoupled=rule.decoupled,
        stochastic=rule.seed is not None,
        factor=rule.factor,
        weight_decay=rule.weight_decay,
        shrink=rule.shrink,
        beta1=rule.beta1,
        beta2=rule.beta2,
        one_minus_beta1=1 - rule.beta1,
        one_minus_beta2=1 - rule.beta2,
        unbias=rule.unbias,
        eps=rule.eps,
        rate=rule.rate,
        seed=rule.seed or 0,
    )
