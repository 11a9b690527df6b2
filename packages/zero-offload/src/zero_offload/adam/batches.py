"""Runs of elements that one rule steps, all of the same dtypes, and the plan that collects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, Literal, cast, final

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload.errors import UnsupportedTensorError


class Formula(Enum):
    """Which kernel; the value is part of its name in the library."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    LION = "lion"


@frozen(kw_only=True)
class Rule:
    """The numbers of one step, computed in double as torch does and rounded to fp32 where used.

    Attributes:
        factor: What gradients are multiplied by first: unscaling and clipping.
        weight_decay: Added to the gradient times the parameter, unless decoupled.
        shrink: What the parameter is multiplied by, if decoupled.
        unbias: Adam's 1 / sqrt(1 - beta2^t), what the root of the second moment is multiplied by.
        rate: Minus the step size, Adam's bias correction in it.
        seed: Of stochastic rounding, another for each step; None rounds to nearest.
    """

    formula: Formula
    rate: float
    factor: float = 1.0
    maximize: bool = False
    decoupled: bool = False
    weight_decay: float = 0.0
    shrink: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    unbias: float = 1.0
    eps: float = 0.0
    seed: int | None = None


@frozen
class Dtypes:
    """Of the tensors of a batch; `out` is None where there is none."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    out: torch.dtype | None = None


@define(eq=False)
class Batch:
    """Lists: position k of each belongs to the k-th run.

    Tensors are contiguous and on the CPU; of each, elements [starts[k], stops[k]) in memory order
    are meant. `params` are what is computed with, fp32 masters where there are any; `outs` receive
    the result once more in their own dtype. `indices` number the first element of each *tensor*
    among all that the optimizer has, for stochastic rounding.

    A batch that is used again has the same tensors but for `grads`.

    `seconds`, `largests` and `outs` are empty where the formula or the dtypes need none.
    """

    dtypes: Dtypes
    params: list[Tensor] = field(factory=list)
    grads: list[Tensor] = field(factory=list)
    firsts: list[Tensor] = field(factory=list)
    seconds: list[Tensor] = field(factory=list)
    largests: list[Tensor] = field(factory=list)
    outs: list[Tensor] = field(factory=list)
    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)
    indices: list[int] = field(factory=list)
    table: np.ndarray | None = field(default=None, init=False)  # of addresses, once there is one

    # What gives the rule, and whose state this is.
    group: int = field(default=0, kw_only=True)  # position in param_groups
    step: int = field(default=0, kw_only=True)  # the step count, after this step
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the moments, first to largest
    owners: list[Tensor] = field(factory=list, init=False)
    entries: list[dict[str, Any]] = field(factory=list, init=False)
    addresses: list[list[int]] = field(factory=list, init=False)  # of what is written

    def written(self) -> list[list[Tensor]]:
        """The lists that a step writes."""
        lists = (self.params, self.firsts, self.seconds, self.largests, self.outs)
        return [tensors for tensors in lists if tensors]

    def moments(self) -> Iterator[tuple[str, list[Tensor]]]:
        """The lists of the moments, by name."""
        return zip(self.names, (self.firsts, self.seconds, self.largests), strict=False)


SUPPORTED: Final = (torch.float32, torch.bfloat16, torch.float16)
MASTER: Final = "master"


@frozen(kw_only=True)
class StatePolicy:
    """Which tensors an optimizer keeps beside its parameters: arguments of `CPUAdam`."""

    masters: bool = True
    state_dtype: torch.dtype | None = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.state_dtype not in (None, *SUPPORTED):
            raise ValueError(
                f"state_dtype={self.state_dtype}: expected None, {', '.join(map(str, SUPPORTED))}"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")

    def seed_of(self, step: int) -> int | None:
        """32 bits that look unrelated for neighbouring steps (SplitMix64's finalizer)."""
        if self.rounding == "nearest":
            return None
        mask = 2**64 - 1
        mixed = (self.seed * 0xD1342543DE82EF95 + step * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        return (mixed ^ (mixed >> 31)) & 0xFFFFFFFF

    def prepare(
        self, entries: dict[str, Any], param: Tensor, names: tuple[str, ...], start: float
    ) -> None:
        """Complete a parameter's state, and bring what is there into dtype and memory order.

        Args:
            entries: Empty before its first step.
            param: On the CPU.
            names: Of its moments.
            start: What a missing first moment is filled with; the others with 0.
        """
        step = entries.get("step", 0.0)
        if not torch.is_tensor(step) or step.dtype is not torch.float32 or not step.is_cpu:
            entries["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        numel, wanted = param.numel(), dict.fromkeys(names, self.state_dtype or param.dtype)
        if self.masters and param.dtype is not torch.float32:
            wanted[MASTER] = torch.float32
        else:
            entries.pop(MASTER, None)
        for name, dtype in wanted.items():
            value = entries.get(name)
            if value is None and name == MASTER:
                entries[name] = param.detach().to(dtype, copy=True).contiguous()
            elif value is None:
                fill = start if name == names[0] else 0.0
                entries[name] = torch.full(param.shape, fill, dtype=dtype, device="cpu")
            elif not (
                value.dtype is dtype
                and value.numel() == numel
                and value.is_cpu
                and value.is_contiguous()
            ):
                entries[name] = self.shaped(name, value, param)

    def shaped(self, name: str, tensor: Tensor, param: Tensor) -> Tensor:
        """The same values as the kernels take them.

        Raises:
            UnsupportedTensorError: It has not one element for each of the parameter's.
        """
        if tensor.numel() != param.numel():
            raise UnsupportedTensorError(
                f"state {name!r} has {tensor.numel()} elements, its parameter of shape "
                f"{tuple(param.shape)} has {param.numel()}"
            )
        dtype = torch.float32 if name == MASTER else self.state_dtype or param.dtype
        return tensor.detach().to(device="cpu", dtype=dtype).contiguous()

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
                f"{where}: expected dense tensors of {', '.join(map(str, SUPPORTED))}, got one of "
                f"shape {tuple(param.shape)}, {param.dtype}, {param.layout}"
            )
        if self.rounding == "stochastic" and param.dtype is torch.float16:
            raise UnsupportedTensorError(
                f"{where}: stochastic rounding is for bfloat16, got a float16 tensor of shape "
                f"{tuple(param.shape)}"
            )


@final
@define(eq=False)
class Plan:
    """Batches, and what else a step does to parameters. `add` checks each as it comes."""

    policy: StatePolicy
    batches: dict[Any, Batch] = field(factory=dict, init=False)  # by what their tensors share
    steps: list[Tensor] = field(factory=list, init=False)  # counts that this step advances by one
    # Parameters that are not contiguous, and copies to step instead, to be copied back.
    copies: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)

    @property
    def params(self) -> list[Tensor]:
        """What is stepped."""
        return [param for batch in self.batches.values() for param in batch.owners]

    def add(
        self,
        group: int,
        param: Tensor,
        entries: dict[str, Any],
        names: tuple[str, ...],
        *,
        start: float,
        span: tuple[int, int],
        index: int,
        advances: bool,
    ) -> None:
        """Plan a step of elements `span`, in memory order, of `param`, which has a gradient.

        Args:
            group: Position of its group.
            param: Of any strides.
            entries: Its state; completed, see `StatePolicy.prepare`, as are `names` and `start`.
            names: Of its moments.
            start: Of the first of them.
            span: Start and stop.
            index: Of its first element among those of all parameters.
            advances: Whether its step count is yet to be advanced.

        Raises:
            UnsupportedTensorError: The parameter or gradient has the wrong device, dtype or layout.
        """
        dtype = param.dtype
        if not param.is_cpu or dtype not in SUPPORTED:
            self.policy.check(param, where="step()")
        grad = _checked_grad(param)
        self.policy.prepare(entries, param, names, start)
        step, master = entries["step"], entries.get(MASTER)
        count = int(step.item())
        if advances:
            count += 1
            self.steps.append(step)
        plain = param
        if not param.is_contiguous():
            plain = param.detach().contiguous()
            self.copies.append((param, plain))

        key = group, count, dtype, grad.dtype
        batch = self.batches.get(key)
        if batch is None:
            stepped, out = (dtype, None) if master is None else (master.dtype, dtype)
            dtypes = Dtypes(stepped, grad.dtype, entries[names[0]].dtype, out)
            batch = self.batches[key] = Batch(dtypes, group=group, step=count, names=names)
        batch.owners.append(param)
        batch.entries.append(entries)
        batch.params.append(plain if master is None else master)
        if master is not None:
            batch.outs.append(plain)
        batch.grads.append(grad)
        for name, tensors in batch.moments():
            tensors.append(entries[name])
        batch.starts.append(span[0])
        batch.stops.append(span[1])
        batch.indices.append(index)

    def written(self) -> Iterator[Tensor]:
        """All that the step overwrites, as views."""
        yield from self.steps
        for batch in self.batches.values():
            for tensors in batch.written():
                for tensor, start, stop in zip(tensors, batch.starts, batch.stops, strict=True):
                    yield tensor.view(-1)[start:stop]
        yield from (param for param, _ in self.copies)

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether this plan of a whole step, made earlier, serves for the next one as well.

        If so, its gradients and step counts are the new ones. Lists are compared as wholes: with
        thousands of small tensors, planning anew would take longer than stepping them.
        """
        if self.copies:
            return False
        present = [id(p) for group in groups for p in group["params"] if p.grad is not None]
        if _ids(self.params) != present:  # in another order too, where batches of a group alternate
            return False
        self.steps = []
        return all(self._renew(batch, state) for batch in self.batches.values())

    def keep(self) -> None:
        """Prepare to be renewed: note where tensors lie, and let gradients go before this plan."""
        for batch in self.batches.values():
            batch.grads = []
            if not batch.addresses:
                batch.addresses = [_addresses(tensors) for tensors in batch.written()]

    def _renew(self, batch: Batch, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        params, entries, dtypes = batch.owners, batch.entries, batch.dtypes
        kept = [*batch.moments()]
        if dtypes.out is not None:
            kept.append((MASTER, batch.params))
        if not all("step" in entry for entry in entries):  # somebody has taken a state away
            return False
        steps = [entry["step"] for entry in entries]
        grads = [param.grad for param in params]
        is_current = (
            _ids(state[param] for param in params) == _ids(entries)
            and all(
                _ids(entry.get(name) for entry in entries) == _ids(tensors)
                for name, tensors in kept
            )
            and [_addresses(tensors) for tensors in batch.written()] == batch.addresses
            and _are_plain(params, dtypes.out or dtypes.param, batch.stops)
            and _are_plain(grads, dtypes.grad, batch.stops)
            and {step.dtype for step in steps} == {torch.float32}
            and {step.item() for step in steps} == {batch.step}
        )
        if is_current:
            batch.grads = cast("list[Tensor]", grads)  # _are_plain: none is missing
            batch.step += 1
            self.steps += steps
        return is_current


def _ids(objects: Iterable[object]) -> list[int]:
    return [id(each) for each in objects]


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _are_plain(tensors: list[Any], dtype: torch.dtype, numels: list[int]) -> bool:
    return (
        {tensor.dtype for tensor in tensors} == {dtype}
        and {tensor.layout for tensor in tensors} == {torch.strided}
        and {tensor.is_cpu for tensor in tensors} == {True}
        and {tensor.is_contiguous() for tensor in tensors} == {True}
        and [tensor.numel() for tensor in tensors] == numels
    )


def _checked_grad(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None, "the caller looked"
    if grad.layout is not torch.strided or not grad.is_cpu or grad.dtype not in SUPPORTED:
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)}: expected a dense CPU tensor "
            f"of {', '.join(map(str, SUPPORTED))}, got {grad.dtype}, {grad.layout}, on "
            f"{grad.device}"
            + ("; use sparse=False in the embedding" if grad.layout is torch.sparse_coo else "")
        )
    if (
        grad.numel() != param.numel()
    ):  # possible after `param.data` was set; the kernel would run past it
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)} has {grad.numel()} elements"
        )
    return grad if grad.is_contiguous() else grad.contiguous()
