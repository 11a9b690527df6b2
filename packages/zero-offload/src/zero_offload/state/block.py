"""One sub-group at run time: its pieces, the optimizer over them, and their state in memory."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zero_offload.adam.batches import MASTER
from zero_offload.adam.cpu_optimizers import AbstractCPUOptimizer

from .staging import Staging, is_on_host
from .subgroups import ParamRange, Residence, SubGroup
from .template import Attributes, OptimizerTemplate, plain_attributes

T = TypeVar("T")


@define(eq=False)
class _PieceState:
    """Elements of a parameter as the sub-group's optimizer steps them."""

    param: nn.Parameter
    plan: ParamRange
    # Dtype of the master that the sub-group keeps instead of the optimizer; None without one.
    own_master: torch.dtype | None
    # Whether the piece is all of the parameter.
    is_whole: bool = field(init=False)
    stepped: nn.Parameter = field(init=False)
    # Name of an entry -> view of the sub-group's memory; set by `SubGroupState.attach`.
    views: dict[str, Tensor] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.is_whole = self.plan.numel == self.param.numel()
        self.stepped = nn.Parameter(self.blank())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter if the piece is all of it, else 1-D."""
        return tuple(self.param.shape) if self.is_whole else (self.plan.numel,)

    def blank(self) -> Tensor:
        """Return the value of `stepped` between steps: of its shape and dtype, without memory."""
        dtype = self.own_master or self.param.dtype
        return torch.empty((), dtype=dtype, device="cpu").expand(self.shape)

    def elements(self) -> Tensor:
        """Return the piece's elements as a view of the parameter."""
        param = self.param.detach()
        return param if self.is_whole else param.view(-1)[self.plan.start : self.plan.stop]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the same elements of a tensor like the parameter, as 1-D."""
        return whole.detach().reshape(-1)[self.plan.start : self.plan.stop]

    def is_in_place(self) -> bool:
        """Return whether `stepped` shares the parameter's memory already.

        Most pieces on a CPU do, from the second step on.
        """
        stepped, param = self.stepped, self.param
        start = param.data_ptr() + self.plan.start * param.element_size()
        return stepped.data_ptr() == start and stepped.is_cpu == param.is_cpu

    def begin_step(self, whole: Tensor, entries: dict[str, Any], staging: Staging | None) -> None:
        """Prepare `stepped`, its gradient and its state for the optimizer.

        Args:
            whole: The gradient of the whole parameter.
            entries: The state of the piece.
            staging: Copies tensors to the host, if they are on a device and stepped on the host.
        """
        grad = whole.detach() if whole.requires_grad else whole
        if not self.is_whole:
            grad = self.cut(grad)
        if self.own_master is not None:
            grad = grad.to(self.own_master)
            self.stepped.data = self.views[MASTER]
            # The optimizer must not find our master in its state during the step. There is none
            # before a first step, or after a state without masters was loaded.
            if entries.pop(MASTER, None) is None:
                self.stepped.detach().copy_(self.elements())
        elif staging is not None:
            self.stepped.data = staging.fetch(self.elements())
        elif not self.is_in_place():
            self.stepped.data = self.elements()
        self.stepped.grad = grad if staging is None else staging.fetch(grad)

    def end_step(self, staging: Staging | None) -> None:
        """Copy the stepped values to the parameter, unless they share its memory."""
        self.stepped.grad = None
        if not self.is_in_place():
            source, target = self.stepped.detach(), self.elements()
            target.copy_(source) if staging is None else staging.send(source, target)


@final
@define(eq=False)
class SubGroupState:
    """Pieces of parameters with an optimizer of their own.

    `attach` sets the memory of the state, of which its large tensors are views. Small values, such
    as step counts, stay in the optimizer.

    Args:
        plan: Pieces of the sub-group, and the layout of its state.
        params: The user's parameter of each piece.
        groups: Position of each piece's param group.
        template: Makes the optimizer.
    """

    plan: SubGroup
    params: Sequence[nn.Parameter]
    groups: Sequence[int]
    template: OptimizerTemplate
    on_host: bool = field(init=False)
    _pieces: list[_PieceState] = field(init=False)
    _inner: Optimizer = field(init=False)
    # Position in the user's param groups, for each param group of `_inner`.
    _positions: list[int] = field(init=False)
    # Whether parameters on a device are copied to the host to be stepped there.
    _passes: bool = field(init=False)
    _memory: Tensor | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        is_param_on_host = is_on_host(self.params[0])
        self.on_host = self.plan.residence is not Residence.DEVICE or is_param_on_host
        self._passes = self.on_host and not is_param_on_host
        self._pieces = [
            _PieceState(param, piece, self.template.own_master(param.dtype, on_host=self.on_host))
            for param, piece in zip(self.params, self.plan.pieces, strict=True)
        ]
        self._positions = sorted(set(self.groups))
        at = list(zip(self._pieces, self.groups, strict=True))
        groups = [
            {"params": [piece.stepped for piece, group in at if group == position]}
            for position in self._positions
        ]
        dtype = self.params[0].dtype
        self._inner = self.template.create(groups, dtype=dtype, on_host=self.on_host)
        if isinstance(self._inner, AbstractCPUOptimizer):
            self._inner.use_memory({piece.stepped: piece.views for piece in self._pieces})

    # ---- Memory ----

    def attach(self, memory: Tensor) -> None:
        """Use `memory` for the state: 1-D, bytes, `plan.nbytes` long, on the state's device."""
        if self._memory is not None and self._memory.data_ptr() == memory.data_ptr():
            return
        self._memory = memory
        for span in self.plan.entries:
            piece, start = self._pieces[span.piece], span.offset_bytes
            view = memory[start : start + span.numel * span.dtype.itemsize].view(span.dtype)
            piece.views[span.name] = view.view(piece.shape)
        for piece in self._pieces:
            entries = self._entries(piece)
            entries.update({name: view for name, view in piece.views.items() if name in entries})

    def drop_views(self) -> None:
        """Keep no view of parameters until the next step."""
        for piece in self._pieces:
            piece.stepped.data = piece.blank()

    def started(self, besides: Collection[str] = ()) -> set[Tensor]:
        """Return parameters that have state besides these entries."""
        return {p.param for p in self._pieces if self._entries(p).keys() - set(besides)}

    def read_by_step(self) -> set[Tensor]:
        """Return parameters that the next step reads: those without a master of the sub-group."""
        return {
            piece.param
            for piece in self._pieces
            if piece.own_master is None or MASTER not in self._entries(piece)
        }

    # ---- Stepping ----

    def step(
        self,
        numbers: Sequence[dict[str, Any]],
        grads: Mapping[Any, Tensor],
        factor: float,
        staging: Staging,
        attributes: Attributes,
    ) -> dict[int, dict[str, Any]]:
        """Step all pieces that have a gradient. Local, blocking.

        Args:
            numbers: Numbers of all of the user's param groups.
            grads: Gradients of whole parameters.
            factor: Number that gradients are multiplied by.
            staging: Copies tensors on a device to the host and back, if the step is on the host.
            attributes: Plain attributes of the user's optimizer.

        Returns:
            The numbers that the step has written, by position of the param group.
        """
        inner, present = self._inner, []
        passing = staging if self._passes else None
        if passing is not None:
            passing.begin()
        for piece in self._pieces:
            grad = grads.get(piece.param)
            if grad is not None:
                piece.begin_step(grad, inner.state[piece.stepped], passing)
                present.append(piece)
        if passing is not None:
            passing.wait()
        before = []
        for group, position in zip(inner.param_groups, self._positions, strict=True):
            group.update({key: _copied(value) for key, value in numbers[position].items()})
            before.append({k: _copied(value) for k, value in group.items() if k != "params"})
        is_native = isinstance(inner, AbstractCPUOptimizer)
        if is_native:
            inner.grad_scale = None if factor == 1 else 1 / factor
        else:
            vars(inner).update(copy.deepcopy(attributes))
            # Multiply out of place: `stepped.grad` may share memory with the user's gradient.
            for piece in present if factor != 1 else ():
                piece.stepped.grad = piece.stepped.grad * factor
        inner.step()
        for piece in present:
            # Without a master of ours, a native optimizer makes state in the sub-group's memory.
            if not is_native or piece.own_master is not None:
                self._keep(piece)
            piece.end_step(passing)
        # The stepped tensors share memory with the parameters, but not their version counters.
        torch.autograd.graph.increment_version([piece.param for piece in present])
        # Masters of state on disk are sent from a slot, which another sub-group uses next.
        if passing is not None:
            passing.end(waits=self.plan.residence is Residence.DISK)
        if is_native:
            return {}
        each = zip(inner.param_groups, self._positions, before, strict=True)
        return {position: _changed(group, had) for group, position, had in each}

    def attributes(self) -> Attributes:
        """Return plain attributes of the optimizer of this sub-group; none of a native one."""
        is_native = isinstance(self._inner, AbstractCPUOptimizer)
        return {} if is_native else plain_attributes(self._inner)

    def _keep(self, piece: _PieceState) -> None:
        """Copy state that the optimizer has made or replaced into the sub-group's memory."""
        entries = self._entries(piece)
        if piece.own_master is not None:
            entries[MASTER] = piece.views[MASTER]
        for name, view in piece.views.items():
            value = entries.get(name)
            if value is not None and value is not view:
                view.copy_(value)
                entries[name] = view

    # ---- State ----

    def read_into(
        self,
        wanted: Mapping[Tensor, dict[str, Any]],
        names: Collection[str] | None = None,
        *,
        is_blank: bool = False,
    ) -> None:
        """Add copies of state, on the CPU, to the entries of whole parameters.

        Args:
            wanted: Entries by parameter; changed by this.
            names: Read entries of these names only; None: all.
            is_blank: Give entries in the sub-group's memory their shape and dtype, but no values
                and no memory.
        """
        for piece, whole in self._among(wanted):
            for name, value in self._entries(piece).items():
                if names is not None and name not in names:
                    continue
                if is_blank and name in piece.views:
                    whole[name] = torch.empty((), dtype=value.dtype, device="cpu").expand(
                        piece.param.shape
                    )
                elif name in piece.views and not piece.is_whole:
                    if name not in whole:
                        whole[name] = torch.empty(
                            piece.param.shape, dtype=value.dtype, device="cpu"
                        )
                    piece.cut(whole[name]).copy_(value)
                else:
                    whole[name] = _copy_on(value, "cpu")

    def load(self, states: Mapping[Tensor, Mapping[str, Any]], *, replaces: bool) -> None:
        """Replace entries of the state, converted to the dtypes kept here.

        A master is ignored where none is kept, since the parameter itself is stepped there.

        Args:
            states: Entries of whole parameters, as a state dict has them; {} means no state.
            replaces: Whether to delete entries that have no new one, except hidden masters.
        """
        for piece, entries in self._among(states):
            mine, param = self._entries(piece), piece.param
            stays = {MASTER} if self.template.hides_master(param.dtype) else set()
            for name in mine.keys() - stays if replaces else ():
                del mine[name]
            for name, value in entries.items():
                view = piece.views.get(name)
                if name == MASTER and view is None:
                    continue
                is_like = isinstance(value, Tensor) and value.numel() == param.numel()
                if view is not None and is_like:
                    view.copy_(piece.cut(value).view(view.shape))
                    mine[name] = view
                else:
                    device = "cpu" if self.on_host or name == "step" else param.device
                    mine[name] = _copy_on(value, device)

    def forget(self) -> None:
        """Remove all state, as before a first step."""
        for piece in self._pieces:
            self._entries(piece).clear()

    def refresh(self) -> None:
        """Set masters, where there are any, from their parameters."""
        for piece in self._pieces:
            master = self._entries(piece).get(MASTER)
            if master is not None:
                master.copy_(piece.elements().view(master.shape))

    def _entries(self, piece: _PieceState) -> dict[str, Any]:
        return self._inner.state[piece.stepped]

    def _among(self, params: Mapping[Tensor, T]) -> Iterator[tuple[_PieceState, T]]:
        for piece in self._pieces:
            if piece.param in params:
                yield piece, params[piece.param]


@final
class _CopiesOn(TorchFunctionMode):
    """Mode in which `copy.deepcopy` makes the copies of tensors on a device."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _copy_on(tensor, self.device)
        return memo[id(tensor)]


def _copy_on(value: Any, device: Any) -> Any:
    """Return a copy whose tensors are on a device, also those in lists, dicts and objects.

    For a tensor that is made of others, such as quantized state, the inner tensors are copied.
    """
    if not isinstance(value, Tensor):
        with _CopiesOn(device):
            return copy.deepcopy(value)
    if not hasattr(value, "__tensor_flatten__"):
        return value.detach().to(device, copy=True)
    names, context = value.__tensor_flatten__()
    inner = {name: _copy_on(getattr(value, name), device) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())  # type: ignore[attr-defined]


def _copied(value: Any) -> Any:
    """Return a clone of a one-element tensor, which sub-groups must not share; else the value."""
    return value.clone() if isinstance(value, Tensor) and value.numel() == 1 else value


def _changed(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in a param group that a step has changed."""
    return {
        key: value
        for key, value in group.items()
        if (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1))
        and (key not in before or bool(value != before[key]))
    }
