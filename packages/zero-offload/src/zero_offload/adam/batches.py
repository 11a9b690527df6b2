"""Runs of elements that one rule steps, all of the same dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, cast, final

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_offload.errors import UnsupportedTensorError


@frozen
class Dtypes:
    """Of the tensors of a batch; `out` is None where there is none."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    out: torch.dtype | None = None


@define(eq=False)
class Batch:
    """Columns: position k of each list belongs to the k-th run.

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

    def written(self) -> list[list[Tensor]]:
        """The columns that a step writes."""
        columns = (self.params, self.firsts, self.seconds, self.largests, self.outs)
        return [column for column in columns if column]


# ---- The optimizer's state of one parameter ----


SUPPORTED: Final = (torch.float32, torch.bfloat16, torch.float16)
MASTER: Final = "master"


@frozen(kw_only=True)
class StatePolicy:
    """Which tensors an optimizer keeps beside its parameters.

    Attributes:
        masters: Whether 16-bit parameters have an fp32 master, in their state as "master".
        state_dtype: Of moments; None for the parameter's own.
        rounding: Of bf16 parameters, to the nearest or stochastic.
        seed: Of stochastic rounding.
    """

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

    def has_master(self, param: Tensor) -> bool:
        """Whether the parameter is stepped in another dtype than its own."""
        return self.masters and param.dtype is not torch.float32

    def dtype_of(self, name: str, param: Tensor) -> torch.dtype:
        """Of the state's tensor `name` of `param`."""
        return torch.float32 if name == MASTER else self.state_dtype or param.dtype

    def prepare(
        self, entries: dict[str, Any], param: Tensor, names: tuple[str, ...], start: float
    ) -> None:
        """Complete `entries`, and bring what is there into dtype and memory order.

        Args:
            entries: The parameter's state, empty before its first step.
            param: On the CPU.
            names: Of its moments.
            start: What a missing first moment is filled with; the others with 0.
        """
        step = entries.get("step", 0.0)
        if not torch.is_tensor(step) or step.dtype is not torch.float32 or not step.is_cpu:
            entries["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        for name in names:
            if name not in entries:
                entries[name] = torch.full(
                    param.shape,
                    start if name == names[0] else 0.0,
                    dtype=self.dtype_of(name, param),
                    device="cpu",
                )
        if not self.has_master(param):
            entries.pop(MASTER, None)
        elif MASTER not in entries:
            entries[MASTER] = param.detach().to(torch.float32, copy=True).contiguous()
        for name, tensor in entries.items():
            if name in names or name == MASTER:
                entries[name] = self.shaped(name, tensor, param)

    def shaped(self, name: str, tensor: Tensor, param: Tensor) -> Tensor:
        """The same values as the kernels take them; the same tensor if it is so already.

        Raises:
            UnsupportedTensorError: It has not one element for each of the parameter's.
        """
        if tensor.numel() != param.numel():
            raise UnsupportedTensorError(
                f"state {name!r} has {tensor.numel()} elements, its parameter of shape "
                f"{tuple(param.shape)} has {param.numel()}"
            )
        return tensor.detach().to(device="cpu", dtype=self.dtype_of(name, param)).contiguous()


def check_param(param: Tensor, policy: StatePolicy, *, where: str) -> None:
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
    if policy.rounding == "stochastic" and param.dtype is torch.float16:
        raise UnsupportedTensorError(
            f"{where}: stochastic rounding is for bfloat16, got a float16 tensor of shape "
            f"{tuple(param.shape)}"
        )


# ---- Which tensors one call steps, gathered into batches; nothing is stepped here ----


class Key(NamedTuple):
    """What the tensors of a part have in common."""

    group: int  # position in param_groups
    step: int  # the step count, after this step
    param: torch.dtype
    grad: torch.dtype
    has_master: bool


@define(eq=False)
class Part:
    """One batch, the parameters it belongs to, and what gives its rule."""

    group: int
    step: int
    names: tuple[str, ...]
    batch: Batch
    params: list[Tensor] = field(factory=list, init=False)
    entries: list[dict[str, Any]] = field(factory=list, init=False)
    addresses: list[list[int]] = field(factory=list, init=False)  # of what is written


@final
@define(eq=False)
class Plan:
    """Parts, and what else a step does to parameters. `add` checks each as it comes."""

    policy: StatePolicy
    parts: dict[Key, Part] = field(factory=dict, init=False)
    steps: list[Tensor] = field(factory=list, init=False)  # counts that this step advances by one
    copies: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # see `_contiguous`

    @property
    def params(self) -> list[Tensor]:
        """What is stepped."""
        return [param for part in self.parts.values() for param in part.params]

    def add(
        self,
        group: int,
        param: Tensor,
        entries: dict[str, Any],
        names: tuple[str, ...],
        *,
        start_value: float,
        span: tuple[int, int],
        index: int,
        advances: bool,
    ) -> None:
        """Plan a step of elements `span` of `param`, which has a gradient.

        Args:
            group: Position of its group.
            param: Any strides; memory order below is that of a contiguous tensor.
            entries: Its state; completed if need be.
            names: Of its moments.
            start_value: What a missing first moment is filled with.
            span: Start and stop.
            index: Of its first element among those of all parameters.
            advances: Whether its step count is yet to be advanced.

        Raises:
            UnsupportedTensorError: The parameter or gradient has the wrong device, dtype or layout.
        """
        numel, dtype = param.numel(), param.dtype
        policy = self.policy
        if not param.is_cpu or dtype not in SUPPORTED:
            check_param(param, policy, where="step()")
        grad = _checked_grad(param, numel)
        has_master = policy.masters and dtype is not torch.float32
        wanted = policy.state_dtype or dtype
        for name in names:
            if not _is_plain(entries.get(name), wanted, numel):
                policy.prepare(entries, param, names, start_value)
                break
        if has_master and not _is_plain(entries.get(MASTER), torch.float32, numel):
            policy.prepare(entries, param, names, start_value)
        if not _is_plain(entries.get("step"), torch.float32, 1):
            policy.prepare(entries, param, names, start_value)
        step = entries["step"]
        count = step.item()
        if advances:
            count += 1
            self.steps.append(step)

        key = Key(group, int(count), dtype, grad.dtype, has_master)
        part = self.parts.get(key)
        if part is None:
            stepped, out = (torch.float32, dtype) if has_master else (dtype, None)
            batch = Batch(Dtypes(stepped, grad.dtype, wanted, out))
            part = self.parts[key] = Part(group, key.step, names, batch)
        part.params.append(param)
        part.entries.append(entries)
        batch = part.batch
        plain = param if param.is_contiguous() else self._contiguous(param)
        if has_master:
            batch.params.append(entries[MASTER])
            batch.outs.append(plain)
        else:
            batch.params.append(plain)
        batch.grads.append(grad)
        for name, column in zip(names, (batch.firsts, batch.seconds, batch.largests), strict=False):
            column.append(entries[name])
        batch.starts.append(span[0])
        batch.stops.append(span[1])
        batch.indices.append(index)

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether this plan of a whole step, made earlier, serves for the next one as well.

        If so, its gradients and step counts are the new ones. Columns are compared as wholes: with
        thousands of small tensors, planning anew would take longer than stepping them.
        """
        if self.copies:
            return False
        planned = [id(param) for part in self.parts.values() for param in part.params]
        present = [id(p) for group in groups for p in group["params"] if p.grad is not None]
        if planned != present:  # in another order too, where parts of a group alternate
            return False
        self.steps = []
        return all(self._renew(part, state) for part in self.parts.values())

    def keep(self) -> None:
        """Prepare to be renewed: note where tensors lie, and let gradients go before this plan."""
        for part in self.parts.values():
            part.batch.grads = []
            if not part.addresses:
                part.addresses = [_addresses(column) for column in part.batch.written()]

    def _renew(self, part: Part, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        batch, params, entries = part.batch, part.params, part.entries
        dtypes, numels = batch.dtypes, batch.stops
        columns = [batch.firsts, batch.seconds, batch.largests]
        kept = [*zip(part.names, columns, strict=False)]
        if dtypes.out is not None:
            kept.append((MASTER, batch.params))
        if not all("step" in entry for entry in entries):  # somebody has taken a state away
            return False
        steps = [entry["step"] for entry in entries]
        grads = [param.grad for param in params]
        is_current = (
            _ids(state[param] for param in params) == _ids(entries)
            and all(
                _ids(entry.get(name) for entry in entries) == _ids(column) for name, column in kept
            )
            and [_addresses(column) for column in batch.written()] == part.addresses
            and _are_plain(params, dtypes.out or dtypes.param, numels)
            and _are_plain(grads, dtypes.grad, numels)
            and {step.dtype for step in steps} == {torch.float32}
            and {step.item() for step in steps} == {part.step}
        )
        if is_current:
            batch.grads = cast("list[Tensor]", grads)  # _are_plain: none is missing
            part.step += 1
            self.steps += steps
        return is_current

    def _contiguous(self, param: Tensor) -> Tensor:
        """A copy to step instead, to be copied back."""
        copy = param.detach().contiguous()
        self.copies.append((param, copy))
        return copy


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


def _is_plain(tensor: Tensor | None, dtype: torch.dtype, numel: int) -> bool:
    return (
        tensor is not None
        and tensor.dtype is dtype
        and tensor.numel() == numel
        and tensor.is_contiguous()
        and tensor.is_cpu
    )


def _checked_grad(param: Tensor, numel: int) -> Tensor:
    grad = param.grad
    assert grad is not None, "the caller looked"
    if grad.layout is not torch.strided or not grad.is_cpu or grad.dtype not in SUPPORTED:
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)}: expected a dense CPU tensor "
            f"of {', '.join(map(str, SUPPORTED))}, got {grad.dtype}, {grad.layout}, on "
            f"{grad.device}"
            + ("; use sparse=False in the embedding" if grad.layout is torch.sparse_coo else "")
        )
    if grad.numel() != numel:  # possible after `param.data` was set; the kernel would run past it
        raise UnsupportedTensorError(
            f"gradient of a parameter of shape {tuple(param.shape)} has {grad.numel()} elements"
        )
    return grad if grad.is_contiguous() else grad.contiguous()
