"""Runs of elements that one rule steps, all of the same dtypes, and the plan that collects them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Literal, final

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload._native.library import COLUMNS, DTYPES, TENSOR
from zero_offload.errors import UnsupportedTensorError

SUPPORTED: Final = tuple(DTYPES)
MASTER: Final = "master"
MOMENTS: Final = ("first", "second", "largest")
WRITTEN: Final = tuple(name for name in COLUMNS if name != "grad")


@define(eq=False)
class Batch:
    """Lists: position k of each belongs to the k-th run.

    `tensors` has the columns of `zero_tensor`. They are contiguous and on the CPU, those of a
    column of one dtype; of each, elements [starts[k], stops[k]) in memory order are meant. "param"
    is what is computed with, fp32 masters where there are any; "out" receives the result once more
    in its own dtype; what the formula or the dtypes do not need is empty. `indices` number the
    first element of each *tensor* among all that the optimizer has, for stochastic rounding.

    A batch that is used again has the same tensors but for "grad".
    """

    tensors: dict[str, list[Tensor]] = field(factory=lambda: {name: [] for name in COLUMNS})
    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)
    indices: list[int] = field(factory=list)
    # Position of the param group whose numbers give the rule.
    group: int = field(default=0, kw_only=True)
    # Step count after this step.
    step: int = field(default=0, kw_only=True)
    # The parameters themselves, where "param" of `tensors` has masters.
    owners: list[Tensor] = field(factory=list, init=False)
    _table: np.ndarray | None = field(default=None, init=False)

    def written(self) -> list[list[Tensor]]:
        """The columns that a step writes."""
        return [self.tensors[name] for name in WRITTEN if self.tensors[name]]

    def table(self) -> np.ndarray:
        """An array of `zero_tensor`; of a batch used again, gradients' addresses are renewed."""
        starts, columns = np.array(self.starts, np.uintp), ("grad",)
        if self._table is None:
            columns = COLUMNS
            self._table = np.zeros(len(starts), TENSOR)
            self._table["numel"] = np.array(self.stops, np.uintp) - starts
            self._table["index"] = np.array(self.indices, np.uintp) + starts
        for name in columns:
            if tensors := self.tensors[name]:
                addresses = np.array([*map(Tensor.data_ptr, tensors)], np.uintp)
                self._table[name] = addresses + starts * np.uintp(tensors[0].itemsize)
        return self._table


@frozen(kw_only=True)
class StatePolicy:
    """Settings of the state tensors of an optimizer, as the arguments of `CPUAdam` have them."""

    masters: bool = True
    state_dtype: torch.dtype | None = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.state_dtype not in (None, *SUPPORTED):
            raise ValueError(f"state_dtype={self.state_dtype}: expected None, {_SUPPORTED_TEXT}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")

    def seed_of(self, step: int) -> int:
        """32 bits that look unrelated for neighbouring steps (SplitMix64's finalizer)."""
        mask = 2**64 - 1
        mixed = (self.seed * 0xD1342543DE82EF95 + step * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        return (mixed ^ (mixed >> 31)) & 0xFFFFFFFF

    def dtype_of(self, name: str, param: Tensor) -> torch.dtype:
        """Return the dtype of a state entry that has one element per element of the parameter."""
        return torch.float32 if name == MASTER else self.state_dtype or param.dtype

    def prepare(
        self,
        entries: dict[str, Any],
        param: Tensor,
        names: Iterable[str],
        start: float,
        room: Mapping[str, Tensor],
    ) -> None:
        """Complete the state of a parameter, and convert entries to their dtype and memory order.

        Moments, those in `names`, that are missing are filled: the first with `start`, others with
        0. A missing master is copied from the parameter. New entries are in the memory that `room`
        has for them, or else in memory of their own.
        """
        step = entries.get("step", 0.0)
        if not torch.is_tensor(step) or step.dtype is not torch.float32 or not step.is_cpu:
            entries["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        if self.masters and param.dtype is not torch.float32:
            names = (*names, MASTER)
        else:
            entries.pop(MASTER, None)
        for name in names:
            value, dtype = entries.get(name), self.dtype_of(name, param)
            if value is None:
                value = room.get(name)
                if value is None:
                    value = torch.empty(param.shape, dtype=dtype, device="cpu")
                is_master = name == MASTER
                entries[name] = value.copy_(param.detach()) if is_master else value.fill_(start)
            elif not (
                value.dtype is dtype
                and value.numel() == param.numel()
                and value.is_cpu
                and value.is_contiguous()
            ):
                entries[name] = self.shaped(name, value, param)
            start = 0.0

    def shaped(self, name: str, tensor: Tensor, param: Tensor) -> Tensor:
        """Return a state tensor's values as the kernels take them: dtype, device and memory order.

        Raises:
            UnsupportedTensorError: The numbers of elements of tensor and parameter differ.
        """
        if tensor.numel() != param.numel():
            raise UnsupportedTensorError(
                f"state {name!r} has {tensor.numel()} elements, its parameter of shape "
                f"{tuple(param.shape)} has {param.numel()}"
            )
        return tensor.detach().to(device="cpu", dtype=self.dtype_of(name, param)).contiguous()

    def check(self, param: Tensor, *, where: str) -> None:
        """Raise for a parameter that cannot be stepped here.

        Raises:
            UnsupportedTensorError: Not on the CPU, not strided, or of another dtype.
        """
        if param.device.type != "cpu":
            raise UnsupportedTensorError(
                f"{where}: expected CPU tensors, got one of shape {tuple(param.shape)} on "
                f"{param.device}. Keep a CPU copy to step, or use torch's optimizers on the device"
            )
        if param.layout is not torch.strided or param.dtype not in SUPPORTED:
            raise UnsupportedTensorError(
                f"{where}: expected dense tensors of {_SUPPORTED_TEXT}, got one of "
                f"shape {tuple(param.shape)}, {param.dtype}, {param.layout}"
            )
        if self.rounding == "stochastic" and param.dtype is torch.float16:
            raise UnsupportedTensorError(
                f"{where}: stochastic rounding is for bfloat16, got a float16 tensor of shape "
                f"{tuple(param.shape)}"
            )


@final
@define(eq=False)
class StepPlan:
    """Batches of a step, with the step counts and copies of parameters that it needs besides."""

    # "amsgrad" of each param group when the plan was made; the plan is void if one changes.
    amsgrad: list[Any]
    # Param group, step count, dtypes of parameter and gradient -> batch.
    batches: dict[Any, Batch] = field(factory=dict, init=False)
    # Step counts of the optimizer's state, which this step advances by one.
    steps: list[Tensor] = field(factory=list, init=False)
    # Parameters that are not contiguous, and copies to step instead, to be copied back.
    copies: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)
    # Step counts and columns of all parameters; the plan is void if the address of one changes.
    _kept: list[Tensor] = field(factory=list, init=False)
    # Values of `steps` after this step.
    _counts: list[float] = field(factory=list, init=False)
    # Result of `_look_at` when the plan was recorded; empty before.
    _look: list[list[Any]] = field(factory=list, init=False)

    def add(
        self,
        param: Tensor,
        grad: Tensor,
        entries: dict[str, Any],
        *,
        index: int,
        group: int,
        names: tuple[str, ...],
    ) -> None:
        """Plan the step of a parameter of any strides.

        Its first element has number `index` among those of all parameters; its state, of which
        `names` are the moments, is as `StatePolicy.prepare` leaves it.
        """
        count = int(entries["step"].item()) + 1
        self.steps.append(entries["step"])
        self._counts.append(count)
        plain = param
        if not param.is_contiguous():
            plain = param.detach().contiguous()
            self.copies.append((param, plain))

        key = group, count, param.dtype, grad.dtype
        batch = self.batches.get(key)
        if batch is None:
            batch = self.batches[key] = Batch(group=group, step=count)
        batch.owners.append(param)
        batch.tensors["grad"].append(grad)
        columns = dict(zip(MOMENTS, map(entries.__getitem__, names), strict=False))
        if MASTER in entries:
            columns |= {"param": entries[MASTER], "out": plain}
        else:
            columns["param"] = plain
        for column, tensor in columns.items():
            batch.tensors[column].append(tensor)
        self._kept += [entries["step"], *columns.values()]
        batch.starts.append(0)
        batch.stops.append(param.numel())
        batch.indices.append(index)

    def record(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Record what `renew` compares, and drop the gradients until the next step.

        Args:
            params: All parameters that had a gradient, in order.
            state: The optimizer's state.
        """
        for batch in self.batches.values():
            batch.tensors["grad"] = []
        self._look = self._look or self._look_at(params, state)

    def renew(self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Return whether this plan can be used for the next step, too; see `record` for arguments.

        If so, its gradients and step counts are the new ones. Lists are compared as wholes: with
        thousands of small tensors, planning anew would take longer than stepping them.
        """
        counts = [*map(Tensor.item, self.steps)]
        if self.copies or counts != self._counts or self._look_at(params, state) != self._look:
            return False
        self._counts = [count + 1 for count in counts]
        for batch in self.batches.values():
            batch.tensors["grad"] = [*map(Tensor.contiguous, map(_GRAD, batch.owners))]
            batch.step += 1
        return True

    def _look_at(
        self, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]
    ) -> list[list[Any]]:
        """Return what a plan depends on: the tensors' identities, addresses, dtypes and layouts."""
        values = chain.from_iterable(map(dict.values, map(state.__getitem__, params)))
        tensors = [*params, *map(_GRAD, params)]
        look: list[list[Any]] = [
            [*map(id, chain(params, values))],
            [*map(Tensor.data_ptr, self._kept)],
            [*map(Tensor.is_contiguous, params)],
        ]
        for form in _FORMS:
            look.append([*map(form, tensors)])
        return look


_SUPPORTED_TEXT: Final = ", ".join(map(str, SUPPORTED))
_GRAD: Final = attrgetter("grad")
_FORMS: Final = (attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu"), Tensor.numel)


def checked_grad(param: Tensor) -> Tensor:
    """Return the gradient of a parameter, checked and made contiguous.

    Raises:
        UnsupportedTensorError: It has the wrong device, dtype, layout or number of elements.
    """
    grad = param.grad
    assert grad is not None, "the caller looked"
    if grad.layout is not torch.strided or not grad.is_cpu or grad.dtype not in SUPPORTED:
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)}: expected a dense CPU tensor "
            f"of {_SUPPORTED_TEXT}, got {grad.dtype}, {grad.layout}, on {grad.device}"
            + ("; use sparse=False in the embedding" if grad.layout is torch.sparse_coo else "")
        )
    # `param.data` may have been replaced since backward. A kernel would read past the gradient.
    if grad.numel() != param.numel():
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)} has {grad.numel()} elements"
        )
    return grad if grad.is_contiguous() else grad.contiguous()
