"""This rank's part of a parameter that was sharded before its unit is known."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, NoReturn
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from zero_comm import Group, all_gather_flat, broadcast_coalesced, broadcast_flat

from zero_partition.errors import PartitionError, StateError
from zero_partition.plan.layout import FlatLayout, Span, strides_of
from zero_partition.stand_in import StandIn, placeholder, stand_in_type, tensors_among, unconverted
from zero_partition.torch_private import plainly, version_of

# NOTE(blank): all bits set is NaN in every float dtype, eight bits wide or more, so that arithmetic
# on unwritten memory stays unwritten. Dtypes without NaN get a pattern that no table of positions,
# mask or count has by accident.
_NAN_BYTE = 0xFF
_ODD_BYTE = 0xA5


def fill_blank(tensor: Tensor) -> None:
    """Mark every element of a contiguous tensor as not yet written. Local."""
    byte = _NAN_BYTE if _has_nan(tensor) else _ODD_BYTE
    with torch.no_grad():
        tensor.detach().reshape(-1).view(torch.uint8).fill_(byte)


def has_blank(tensor: Tensor) -> bool:
    """Return whether an element is still marked as not written, or is NaN. Local."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return False
    if _has_nan(tensor):
        # Few operations know float dtypes of one byte.
        if flat.dtype.itemsize == 1:
            flat = flat.to(torch.float32)
        return bool(torch.isnan(flat).any())
    as_bytes = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)
    return bool((as_bytes == _ODD_BYTE).all(dim=1).any())


def _has_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


# NOTE(early): a unit's flat buffers are planned from the whole model, which is not known while it
# is built. So each parameter gets a layout of its own first, and partition() lays the shards out
# anew, unit by unit. The shard is the Parameter's attribute `__deepcopy__`, which `copy` looks for
# on the object itself. So a copy of a sharded parameter is a sharded parameter, and no table beside
# the model could outlive it.

# NOTE(aliases): `nn.Parameter(other)` is no torch function, and gives another Parameter over the
# same memory: a stand-in's, if the other is sharded. Its address identifies the sharded one.

# NOTE(files): memory of a mapped file, as transformers reads safetensors, is pages of that file
# until it is written: then each page is copied, and stays until the file is closed. So rank 0's
# values are not received in the parameter's memory, which is freed first. Otherwise every rank but
# 0 would have the whole model in memory.

# NOTE(unread): inside Init a mode gathers a parameter that is touched, and `nn.Parameter(other)`
# needs `other` in its own class. Outside of every Init nothing gathers, so its class is one that
# raises where values would be read or written.

CURRENT: Final[ContextVar[Any]] = ContextVar("the innermost Init of this thread", default=None)

# Up to so many bytes, a copy is cheaper than a message of its own.
_SMALL_BYTES: Final = 2**16
_BY_ADDRESS: Final[WeakValueDictionary[int, EarlyShard]] = WeakValueDictionary()


class UnreadParam(StandIn):
    """Mixin of the class of an early sharded parameter outside of every Init; NOTE(unread)."""

    __slots__ = ()

    @classmethod
    def _on_use(cls, func: Any, name: str, attribute: str, args: tuple, kwargs: dict) -> Any:
        param = next(t for t in tensors_among((args, kwargs)) if isinstance(t, UnreadParam))
        early = find_early(param)  # type: ignore[arg-type]
        assert early is not None, "the class ends with its shard"
        if name in {"__repr__", "__format__"}:
            ranks = early.group.world_size
            return (
                f"{early.label!r}, shape {tuple(early.stand_in.shape)}, {early.stand_in.dtype}: "
                f"sharded over {ranks} rank{'s' * (ranks > 1)} by Init"
            )
        if (same := unconverted(func, name, args, kwargs)) is not None:
            return same
        raise StateError(
            f"{attribute or name} was called on parameter {early.label!r}, which has no values "
            f"between Init and shard() (rank {early.group.rank}): call zero_engine.shard(model, "
            "optimizer, config) first; or read and write it inside `with Init(...):`, which may be "
            "entered again, or `with zero_engine.GatheredParameters(param, modifier_rank=0):`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__dict__["__deepcopy__"].__reduce__()


@define(eq=False)
class EarlyShard:
    """A parameter's layout, and the part of it that this rank keeps."""

    # For messages and agreement: the class of its module, and its name there.
    label: str
    group: Group
    layout: FlatLayout
    shard: Tensor  # 1-D, padding included
    # Strides of the user's tensor; None: those of a contiguous one.
    strides: tuple[int, ...] | None = None
    is_blank: bool = False
    # Whether GatheredParameters has made it whole for now.
    is_gathered: bool = field(default=False, init=False)
    # Rises in the same order on every rank.
    serial: int = field(factory=count().__next__, init=False)
    stand_in: Tensor = field(init=False)  # placeholder that the parameter views
    # Version of the parameter after the last write that is known.
    version: int = field(init=False)
    _param: ReferenceType[nn.Parameter] = field(init=False)
    # The parameter's class while it has that of UnreadParam in its place, else None.
    _own_type: type[nn.Parameter] | None = field(default=None, init=False)

    def install(self, param: nn.Parameter) -> None:
        """Let a parameter view a stand-in, and hang its shard on it. Local."""
        param.data = placeholder(param.shape, param.dtype, self.group.device)
        self.stand_in, self.version, self._param = param.data, version_of(param), ref(param)
        param.__deepcopy__ = self  # type: ignore[attr-defined]
        if param.numel():
            _BY_ADDRESS[param.data_ptr()] = self
        if CURRENT.get() is None:
            self.forbid_use()

    def forbid_use(self) -> None:
        """Let uses of the parameter's values raise, until `allow_use`."""
        param = self._param()
        is_done = self._own_type is not None or self.is_gathered
        # An empty one has no values, and no address by which `allow_uses` would find it.
        if param is None or is_done or not param.numel():
            return
        own_type = type(param)
        # Where Python cannot change the class, uses read NaN.
        with contextlib.suppress(TypeError):
            param.__class__ = stand_in_type(UnreadParam, own_type)
            self._own_type = own_type

    def allow_use(self) -> None:
        """Give the parameter its own class back."""
        param = self._param()
        if param is not None and self._own_type is not None:
            param.__class__, self._own_type = self._own_type, None

    def mark_blank(self) -> None:
        """Fill this rank's part with the mark of memory that was never written."""
        fill_blank(self.payload)
        self.is_blank = True

    def mark_written(self) -> None:
        """Note that this rank's part has values."""
        self.is_blank = False

    def show(self, whole: Tensor) -> None:
        """Let the parameter view its gathered values, until `hide`."""
        self.allow_use()
        self.is_gathered, self.parameter.data = True, whole

    def hide(self) -> None:
        """Let the parameter view a stand-in again."""
        self.is_gathered, self.parameter.data = False, self.stand_in
        self.version = version_of(self.parameter)
        if CURRENT.get() is None:
            self.forbid_use()

    def install_copy(self, param: nn.Parameter) -> None:
        """Let another parameter of the same shape and dtype have the same values. Local."""
        evolve(self, shard=self.shard.clone()).install(param)

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter whose part it is."""
        param = self._param()
        assert param is not None, "its shard hangs on it"
        return param

    @property
    def kept(self) -> Span:
        """The elements of the parameter that are here."""
        own = self.layout.pieces(self.group.rank)
        return own[0].in_tensor if own else Span(0, 0)

    @property
    def payload(self) -> Tensor:
        """The shard without its padding."""
        return self.shard[: self.kept.numel]

    def whole(self, *, timeout_s: float | None = None) -> Tensor:
        """A new tensor of the parameter's shape with its values. Collective, unless blank."""
        flat = torch.empty(self.layout.numel, dtype=self.shard.dtype, device=self.group.device)
        if self.is_blank:
            fill_blank(flat)
        else:
            all_gather_flat(
                flat,
                splits=self.layout.splits,
                payload=self.layout.payload_splits,
                group=self.group,
                shard=self.shard,
            ).wait(timeout_s=timeout_s)
        return flat[self.layout.spans[0].as_slice()].view(self.stand_in.shape)

    def keep_part_of(self, whole: Tensor) -> None:
        """Let the values be those of a whole tensor, the same on every rank. Local."""
        self.payload.copy_(whole.reshape(-1)[self.kept.as_slice()])
        self.is_blank = False

    def is_replaced(self, param: nn.Parameter) -> bool:
        """Return whether the parameter was given other memory than its stand-in's."""
        return bool(param.numel()) and param.data_ptr() != self.stand_in.data_ptr()

    def check_untouched(self, param: nn.Parameter, name: str) -> None:
        """Raise PartitionError if the parameter was written to, converted or moved meanwhile."""
        if not self.is_replaced(param) and version_of(param) == self.version:
            return
        raise PartitionError(
            f"parameter {name!r} was changed after Init sharded it (it is now {param.dtype} on "
            f"{param.device}), and the ranks have its values in shards (rank {self.group.rank}): "
            "write, convert and move parameters inside `with Init(...):`, which may be entered "
            "again"
        )

    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy of the parameter, sharded too; `copy.deepcopy` of it calls this. Local."""
        original = self.parameter
        with plainly():
            own_type = self._own_type or type(original)
            copied = own_type(original.data, original.requires_grad)
            self.install_copy(copied)
        return copied

    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"pickling {self.label}, which Init sharded: call zero_engine.shard() on the model and "
            "save zero_engine.full_state_dict(model) instead"
        )


def find_early(tensor: Tensor) -> EarlyShard | None:
    """The shard of a parameter that is early sharded, else None."""
    if not isinstance(tensor, nn.Parameter):
        return None
    early = tensor.__dict__.get("__deepcopy__")
    return early if isinstance(early, EarlyShard) else None


def find_aliased(param: nn.Parameter) -> EarlyShard | None:
    """The shard whose stand-in this parameter views though it is not its own; NOTE(aliases)."""
    if param.is_meta or is_lazy(param) or find_early(param) is not None:
        return None
    early = _BY_ADDRESS.get(param.data_ptr())
    return early if early is not None and early.stand_in.shape == param.shape else None


def forbid_uses() -> None:
    """Let uses of early sharded parameters raise: an Init is left."""
    for early in list(_BY_ADDRESS.values()):
        early.forbid_use()


def allow_uses() -> None:
    """Give all early sharded parameters their own classes back: an Init is entered."""
    for early in list(_BY_ADDRESS.values()):
        early.allow_use()


def forget_early(param: nn.Parameter) -> None:
    """The parameter has memory of its own again, or of a unit."""
    param.__dict__["__deepcopy__"].allow_use()
    del param.__dict__["__deepcopy__"]


def early_shard_of(
    tensor: Tensor, label: str, *, group: Group, strides: tuple[int, ...] | None = None
) -> EarlyShard:
    """Return this rank's part of such a tensor, cut evenly, as zeros. Local.

    The user's tensor has these strides; those of `tensor` if None.
    """
    layout = FlatLayout.plan([tensor.numel()], world_size=group.world_size, align=1)
    shard = torch.zeros(layout.splits[group.rank], dtype=tensor.dtype, device=group.device)
    return EarlyShard(label, group, layout, shard, strides or strides_of(tensor))


def shard_early(params: Sequence[tuple[str, nn.Parameter]], *, group: Group) -> None:
    """Keep this rank's part of each parameter, of the values of rank 0. Collective.

    Args:
        params: Labels and parameters; whole, dense, on the group's device.
        group: The ranks to distribute over.
    """
    # Whole values are freed one after the other.
    values = deque(param.detach().contiguous() for _, param in params)
    small = [whole for whole in values if 0 < whole.nbytes <= _SMALL_BYTES]
    broadcast_coalesced([_bytes_of(whole) for whole in small], group=group).wait()
    for label, param in params:
        whole = values.popleft()
        early = early_shard_of(whole, label, group=group, strides=strides_of(param))
        early.install(param)
        if param.nbytes > _SMALL_BYTES:
            if group.rank:  # see NOTE(files)
                del whole
                whole = torch.empty(param.shape, dtype=param.dtype, device=group.device)
            broadcast_flat(_bytes_of(whole), src=0, group=group).wait()
        early.keep_part_of(whole)


def _bytes_of(whole: Tensor) -> Tensor:
    return whole.view(-1).view(torch.uint8)
