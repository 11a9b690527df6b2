"""Which tensors one call steps, gathered into batches; nothing is stepped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast, final

import torch
from attrs import define, field
from torch import Tensor

from ._batch import Batch, Dtypes
from ._errors import UnsupportedTensorError
from ._host_state import MASTER, SUPPORTED, StatePolicy, check_param


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
