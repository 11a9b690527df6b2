"""One sub-group at run time: its pieces, the optimizer over them, and their state in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_offload.adam.batches import MASTER
from zero_offload.adam.cpu_optimizer import AbstractCPUOptimizer

from .stepper import Stepper, set_numbers
from .subgroups import Column, Piece, Residence, SubGroup
from .transit import is_here

Fetch = Callable[[Tensor], Tensor]
Send = Callable[[Tensor, Tensor], None]


@final
@define(eq=False)
class SubGroupState:
    """Pieces of parameters with an optimizer of their own.

    `attach` says in which memory the state lies just now. A state's large tensors are views of it;
    what is small, step counts above all, stays in the optimizer.

    Args:
        plan: What it consists of.
        params: The user's parameter of each piece.
        groups: Position of each piece's param group.
        stepper: Makes the optimizer.
    """

    plan: SubGroup
    params: Sequence[nn.Parameter]
    groups: Sequence[int]
    stepper: Stepper
    on_host: bool = field(init=False)
    _pieces: list[nn.Parameter] = field(init=False)  # what the optimizer steps
    _inner: Optimizer = field(init=False)
    _positions: list[int] = field(init=False)  # of the outer group, for each of the inner ones
    _memory: Tensor | None = field(default=None, init=False)
    _views: list[dict[str, Tensor]] = field(factory=list, init=False)  # of each piece, by name
    _wholes: list[bool] = field(init=False)  # whether a piece is its whole parameter
    _own_masters: list[torch.dtype | None] = field(init=False)  # of pieces

    def __attrs_post_init__(self) -> None:
        self.on_host = self.plan.residence is not Residence.DEVICE or is_here(self.params[0])
        self._wholes = [
            piece.numel == param.numel()
            for piece, param in zip(self.plan.pieces, self.params, strict=True)
        ]
        self._own_masters = [
            self.stepper.own_master(param.dtype, on_host=self.on_host) for param in self.params
        ]
        self._pieces = [nn.Parameter(self._nothing(k)) for k in range(len(self.params))]
        self._positions = sorted(set(self.groups))
        groups = [
            {"params": [p for p, at in zip(self._pieces, self.groups, strict=True) if at == where]}
            for where in self._positions
        ]
        dtype = self.params[0].dtype
        self._inner = self.stepper.make(groups, dtype=dtype, on_host=self.on_host)

    # ---- Memory ----

    def attach(self, memory: Tensor) -> None:
        """Let the state lie in `memory`: 1-D, bytes, `plan.nbytes` long, on the state's device."""
        if self._memory is None or self._memory.data_ptr() != memory.data_ptr():
            self._views = [{} for _ in self.params]
            for column in self.plan.columns:
                self._views[column.piece][column.name] = self._view(column, memory)
        self._memory = memory
        for piece, views in enumerate(self._views):
            entries = self._entries(piece)
            entries.update({name: view for name, view in views.items() if name in entries})

    def let_go(self) -> None:
        """Keep no view of parameters until the next step."""
        for k, piece in enumerate(self._pieces):
            piece.data = self._nothing(k)

    def is_started(self, piece: int, besides: Collection[str] = ()) -> bool:
        """Whether a piece has state, besides these entries."""
        return bool(self._entries(piece).keys() - set(besides))

    def has_own_master(self, piece: int) -> bool:
        """Whether the next step of a piece begins with a master that the sub-group keeps."""
        return self._own_masters[piece] is not None and MASTER in self._entries(piece)

    # ---- Stepping ----

    def step(
        self,
        outer: Sequence[dict[str, Any]],
        grads: Sequence[Tensor | None],
        factor: float,
        *,
        fetch: Fetch,
        send: Send,
        wait: Callable[[], None],
    ) -> None:
        """Step all pieces that have a gradient. Local, blocking.

        Args:
            outer: The user's param groups.
            grads: Of each piece's whole parameter.
            factor: What gradients are multiplied by.
            fetch: Begins to bring a tensor to where the step is.
            send: Begins to bring one back, given with its destination.
            wait: Blocks until what was fetched is here.
        """
        present = [k for k, grad in enumerate(grads) if grad is not None]
        for k in present:
            grad = grads[k]
            assert grad is not None, "looked above"
            self._point(k, fetch)
            self._pieces[k].grad = fetch(self._part(k, grad))
        wait()
        for k in present:
            self._begin(k)
            self._scale(k, factor)
        for group, position in zip(self._inner.param_groups, self._positions, strict=True):
            set_numbers(group, outer[position])
        if isinstance(self._inner, AbstractCPUOptimizer):
            self._inner.grad_scale = None if factor == 1 else 1 / factor
        self._inner.step()
        for piece in self._pieces:
            piece.grad = None
        for k in present:
            self._settle(k)
            self._publish(k, send)
        # What was stepped shares memory with parameters, but not what autograd looks at.
        torch.autograd.graph.increment_version([self.params[k] for k in present])

    def _point(self, k: int, fetch: Fetch) -> None:
        """Let a piece be its span of the parameter, or a copy of it here."""
        if self._own_masters[k] is not None:
            self._pieces[k].data = self._master(k)
        elif not self._is_in_place(k):
            self._pieces[k].data = fetch(self._span(k))

    def _is_in_place(self, k: int) -> bool:
        """Whether a piece is its parameter already, as from the second step on of most on a CPU."""
        piece, param = self._pieces[k], self.params[k]
        return (
            self._wholes[k]
            and self._own_masters[k] is None
            and piece.data_ptr() == param.data_ptr()
            and piece.is_cpu == param.is_cpu
        )

    def _begin(self, k: int) -> None:
        """Before a first step, or one after loading a state without masters: fill the master.

        While it steps, the optimizer finds the state as it would be without ours.
        """
        if self._own_masters[k] is None:
            return
        if self._entries(k).pop(MASTER, None) is None:
            self._pieces[k].detach().copy_(self._span(k))

    def _scale(self, k: int, factor: float) -> None:
        """Where the optimizer does not. The user's gradient stays as it is."""
        grad = self._pieces[k].grad
        assert grad is not None, "only pieces with one are asked for"
        if factor != 1 and not isinstance(self._inner, AbstractCPUOptimizer):
            self._pieces[k].grad = grad * factor

    def _settle(self, k: int) -> None:
        """Bring what the optimizer has made or replaced into our memory."""
        entries = self._entries(k)
        if self._own_masters[k] is not None:
            entries[MASTER] = self._master(k)
        for name, view in self._views[k].items():
            value = entries.get(name)
            if value is not None and value is not view:
                view.copy_(value)
                entries[name] = view
                if isinstance(self._inner, AbstractCPUOptimizer):
                    self._inner.forget_plan()  # which holds what it has made, outside the budget

    def _publish(self, k: int, send: Send) -> None:
        """Bring a stepped piece back to its parameter, if it was stepped elsewhere."""
        if self._is_in_place(k):
            return
        source, target = self._pieces[k].detach(), self._span(k)
        if source.data_ptr() != target.data_ptr() or source.device != target.device:
            send(source, target)

    # ---- State ----

    def copy_into(
        self, piece: int, whole: dict[str, Any], names: Collection[str] | None = None
    ) -> None:
        """Add copies of a piece's state, on the CPU, to the entries of its whole parameter.

        Args:
            piece: Which.
            whole: Where to.
            names: Of these entries only.
        """
        param = self.params[piece]
        columns = {column.name for column in self.plan.columns if column.piece == piece}
        for name, value in self._entries(piece).items():
            if names is not None and name not in names:
                continue
            if name in columns and not self._wholes[piece]:
                if name not in whole:
                    whole[name] = torch.empty(param.shape, dtype=value.dtype)
                self._cut(piece, whole[name]).copy_(value)
            elif isinstance(value, Tensor):
                whole[name] = value.detach().to("cpu", copy=True)
            else:
                whole[name] = copy.deepcopy(value)

    def describe_into(self, piece: int, whole: dict[str, Any]) -> None:
        """As `copy_into`, but what moves with the sub-group comes without values or memory."""
        columns = {column.name for column in self.plan.columns if column.piece == piece}
        for name, value in self._entries(piece).items():
            if name in columns:
                blank = torch.empty((), dtype=value.dtype)
                whole[name] = blank.expand(self.params[piece].shape)
            else:
                whole[name] = value

    def load(
        self, piece: int, entries: Mapping[str, Any], keeps: Collection[str] | None = ()
    ) -> None:
        """Put a piece's state in place of what there is, in the dtypes kept here.

        A master is passed over where none is kept: the parameter is what is stepped.

        Args:
            piece: Which.
            entries: Of the whole parameter, as a state dict has them; empty: none.
            keeps: Entries that stay where there are no new ones; None: all.
        """
        mine = self._entries(piece)
        for name in [n for n in mine if keeps is not None and n not in keeps]:
            del mine[name]
        views = self._views[piece]
        whole = self.params[piece].numel()
        for name, value in entries.items():
            view = views.get(name)
            if name == MASTER and view is None:
                continue
            if view is not None and isinstance(value, Tensor) and value.numel() == whole:
                view.copy_(self._cut(piece, value).view(view.shape))
                mine[name] = view
            elif isinstance(value, Tensor):
                device = "cpu" if self.on_host or name == "step" else self.params[piece].device
                mine[name] = value.detach().to(device, copy=True)
            else:
                mine[name] = copy.deepcopy(value)

    def forget(self) -> None:
        """Have no state, as before a first step."""
        for piece in self._pieces:
            self._inner.state[piece].clear()

    def refresh(self, piece: int) -> None:
        """Set a master, if there is one, from the parameter."""
        entries = self._entries(piece)
        if MASTER in entries:
            entries[MASTER].copy_(self._span(piece).view(entries[MASTER].shape))

    # ---- Shapes ----

    def _entries(self, k: int) -> dict[str, Any]:
        return self._inner.state[self._pieces[k]]

    def _nothing(self, k: int) -> Tensor:
        """What a piece is between steps: of its shape, without memory."""
        return torch.empty((), dtype=self._dtype(k)).expand(self._shape(k))

    def _shape(self, k: int) -> tuple[int, ...]:
        """Of a piece: the parameter's if it is all of it, else flat."""
        return tuple(self.params[k].shape) if self._wholes[k] else (self.plan.pieces[k].numel,)

    def _dtype(self, k: int) -> torch.dtype:
        return self._own_masters[k] or self.params[k].dtype

    def _view(self, column: Column, memory: Tensor) -> Tensor:
        stop = column.offset_bytes + column.numel * column.dtype.itemsize
        return memory[column.offset_bytes : stop].view(column.dtype).view(self._shape(column.piece))

    def _master(self, k: int) -> Tensor:
        return self._views[k][MASTER]

    def _span(self, k: int) -> Tensor:
        """A piece's elements in the parameter: a view."""
        param = self.params[k].detach()
        return param if self._wholes[k] else _slice(param.view(-1), self.plan.pieces[k])

    def _part(self, k: int, whole: Tensor) -> Tensor:
        """A piece's elements of a gradient, as the piece is shaped and stepped."""
        whole = whole.detach() if whole.requires_grad else whole
        grad = whole if self._wholes[k] else self._cut(k, whole)
        return grad if (own := self._own_masters[k]) is None else grad.to(own)

    def _cut(self, k: int, whole: Tensor) -> Tensor:
        return _slice(whole.detach().reshape(-1), self.plan.pieces[k])


def _slice(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.start : piece.stop]
