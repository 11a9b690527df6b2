"""One flat buffer at run time: its parameters, this rank's shard, and views of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from attrs import define, field
from torch import Tensor, nn
from zero_comm import AbstractCodec, Group, Handle, all_gather_flat, even_splits

from zero_partition.dtensors import outer_of
from zero_partition.errors import StateError
from zero_partition.plan.layout import BufferPlan, Piece
from zero_partition.stand_in import placeholder, sharded_type_of
from zero_partition.torch_private import plain_access, version_of

from .store import Rounded, Store

# Device on which offloaded shards are stepped.
_CPU: Final = torch.device("cpu")
# How often values are compared, to find writes that changed no version.
NUM_LOOKS: Final = 3


@define(eq=False, repr=False)
class FlatBuffer:
    """One flat buffer on this rank: its plan, its parameters, and the stores of its shard.

    `model_shard` is this rank's shard, padding included. Where parameters are sharded, it is in
    memory of its own, rounded from masters, encoded, or offloaded. Where they are replicated, it is
    a view of `whole`; but it is beside `whole` where `codec` rounds what is gathered into that.
    `main_shard` is what the optimizer updates: masters of the same layout where there are some,
    else the same object as `model_shard`.
    """

    plan: BufferPlan
    # Number among all buffers of the model; the tags of its collectives follow from it.
    index: int
    group: Group
    params: tuple[nn.Parameter, ...]
    model_shard: Store
    # Replicated parameters, 1-D; None if they are sharded.
    whole: Tensor | None
    main_shard: Store
    # What optimizer offload steps, one per parameter; empty without it.
    offloaded_params: tuple[nn.Parameter, ...]
    # Dtype in which gradients are sent.
    wire_dtype: torch.dtype
    # Device of `shard_params` and their gradients.
    stepped_device: torch.device
    # Encodes shards in gathers; None: they are exact. `codec` is for gathers into `whole` only.
    gather_codec: AbstractCodec | None
    codec: AbstractCodec | None = field(init=False)
    # Tags of its all-gathers and of its reductions.
    gather_tag: int = field(init=False)
    reduce_tag: int = field(init=False)
    # Placeholders that parameters view while they are sharded.
    stand_ins: tuple[Tensor, ...] = field(init=False)
    pieces: tuple[Piece, ...] = field(init=False)
    # Shards as the optimizer has them, one per parameter; some may be empty.
    shard_params: tuple[nn.Parameter, ...] = field(init=False)
    # Versions of the parameters after the last write that is known, and when last resharded.
    versions: tuple[int, ...] = field(init=False)
    _sharded_versions: tuple[int, ...] = field(init=False)
    # The parameters, and the DTensors of which they are the local parts.
    _shown: tuple[nn.Parameter, ...] = field(init=False)
    # Types of `_shown` while unsharded, and while sharded; whether they have the latter now.
    unsharded_types: tuple[type[nn.Parameter], ...] = field(init=False)
    sharded_types: tuple[type[nn.Parameter], ...] = field(init=False)
    has_sharded_types: bool = field(default=False, init=False)
    # Position -> whole values that a context has gathered, apart from the unit.
    pinned: dict[int, Tensor] = field(factory=dict, init=False)
    _looks_left: float = field(default=NUM_LOOKS, init=False)  # see `follow_writes`
    # Whether `whole` has values that were not gathered into it.
    is_unrounded: bool = field(init=False)
    # Views that were installed last.
    _views: Sequence[Tensor] = field(default=(), init=False)
    # Addresses of `shard_params`, to notice that an optimizer has replaced their memory.
    _part_addresses: list[int] = field(init=False)
    # Addresses of `_views`, once asked for.
    _addresses: list[int] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.codec = None if self.whole is None else self.gather_codec
        self.gather_tag, self.reduce_tag = 2 * self.index, 2 * self.index + 1
        self.stand_ins = tuple(
            placeholder(p.shape, p.dtype, self.group.device) for p in self.plan.params
        )
        dtensors = (outer for p in self.params if (outer := outer_of(p)) is not p)
        self._shown = (*self.params, *dtensors)
        self.unsharded_types = tuple(type(param) for param in self._shown)
        self.sharded_types = tuple(sharded_type_of(param) for param in self._shown)
        self.versions = self._sharded_versions = tuple(map(version_of, self.params))
        self.pieces = self.plan.layout.pieces(self.group.rank)
        stepped, size = self.main_shard.memory, torch.Size([self.shard_numel])
        if stepped is None:
            # The optimizer offload has the masters.
            stepped = placeholder(size, self.main_shard.dtype, self.stepped_device)
        self.shard_params = tuple(
            nn.Parameter(part, requires_grad=self.plan.trainable) for part in self.parts_of(stepped)
        )
        self.point_targets(None)
        self._part_addresses = [param.data_ptr() for param in self.shard_params]
        self.note_write()

    def note_write(self) -> None:
        """Note that `whole` has values that were not gathered into it."""
        self.is_unrounded = self.codec is not None

    def publish(self) -> Handle[Tensor]:
        """Gather replicated parameters from the ranks' shards, in place. Collective."""
        assert self.whole is not None, "replicated parameters have a whole buffer"
        self.is_unrounded = False
        return self.all_gather(self.whole)

    @property
    def has_masters(self) -> bool:
        """Return whether the optimizer updates masters and not what the model computes with."""
        return self.main_shard is not self.model_shard

    @property
    def shard(self) -> Tensor:
        """Return this rank's values, 1-D, to read: the memory itself, or else a copy."""
        return self.model_shard.read()

    @property
    def trained(self) -> Tensor:
        """Return this rank's values as the optimizer updates them: masters where there are some."""
        return self.main_shard.read()

    @property
    def is_view(self) -> bool:
        """Return whether the shard is a view of the replicated parameters."""
        return self.whole is not None and self.codec is None

    @property
    def own(self) -> Tensor | None:
        """Return this rank's span of replicated parameters, as the model computes with it."""
        if self.whole is None:
            return None
        return self.own_of(self.whole)

    def own_of(self, full: Tensor) -> Tensor:
        """Return this rank's span of a full flat tensor of this layout."""
        return full[self.plan.layout.shard(self.group.rank).as_slice()]

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's span, padding included."""
        return self.plan.layout.splits[self.group.rank]

    def views_of(self, full: Tensor) -> tuple[Tensor, ...]:
        """Return views of a full flat tensor of this layout, one in the shape of each parameter."""
        pairs = zip(self.plan.layout.spans, self.plan.params, strict=True)
        return tuple(full[span.as_slice()].view(param.shape) for span, param in pairs)

    def all_gather(
        self,
        full: Tensor,
        *,
        shard: Tensor | None = None,
        is_exact: bool = False,
        version: int | None = None,
    ) -> Handle[Tensor]:
        """Launch the gather of a flat tensor of this layout from the ranks' shards. Collective.

        Args:
            full: The flat tensor that is filled.
            shard: This rank's, encoded if it is stored so; None: it is in its place in `full`.
            is_exact: Whether no codec is used.
            version: Of the values, where it is known.
        """
        layout = self.plan.layout
        return all_gather_flat(
            full,
            splits=layout.splits,
            payload=layout.payload_splits,
            group=self.group,
            shard=shard,
            tag=self.gather_tag,
            version=version,
            codec=None if is_exact else self.gather_codec,
        )

    def parts_of(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Return views of a flat shard of this layout as the optimizer has them, one per parameter.

        The shape of each follows from the parameter's cut; it is empty where this rank has nothing
        of it.
        """
        parts = [shard[:0].view(p.cut.shard_shape(p.shape, 0)) for p in self.plan.params]
        for piece in self.pieces:
            plan = self.plan.params[piece.index]
            shape = plan.cut.shard_shape(plan.shape, piece.in_tensor.numel)
            parts[piece.index] = shard[piece.in_shard.as_slice()].view(shape)
        return tuple(parts)

    def param_tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor of ours that may view this rank's parameters, shard or masters."""
        own = (self.whole, self.model_shard.memory, self.main_shard.memory)
        memory = tuple(tensor for tensor in own if tensor is not None)
        return (*memory, *self._views, *self.params, *self.shard_params, *self.offloaded_params)

    def forget_addresses(self) -> None:
        """Forget cached addresses: the buffers have moved.

        Every tensor views the new memory already.
        """
        self._addresses = None
        self._part_addresses = [param.data_ptr() for param in self.shard_params]

    def fill(self, position: int, value: Tensor) -> None:
        """Write a parameter's full value to `whole`, and this rank's part of it to its stores."""
        self.check_memory()
        flat, piece = value.detach().reshape(-1), self.piece_of(position)
        self.is_unrounded = self.codec is not None
        with torch.no_grad():
            if self.whole is not None:
                self.whole[self.plan.layout.spans[position].as_slice()].copy_(flat)
            if piece is None:
                return
            for storage in dict.fromkeys((self.model_shard, self.main_shard)):
                with storage.edit() as shard:
                    shard[piece.in_shard.as_slice()].copy_(flat[piece.in_tensor.as_slice()])

    def piece_of(self, position: int) -> Piece | None:
        """Return the part of a parameter that this rank has; None if there is none."""
        return next((piece for piece in self.pieces if piece.index == position), None)

    def follow_update(self) -> None:
        """Copy what the optimizer has updated to this rank's part of the parameters.

        Masters are rounded into the shard. Where `codec` is used, the values are also copied to
        this rank's span of replicated parameters, which other ranks have yet to receive.
        """
        memory = self.main_shard.memory
        if self.has_masters and memory is not None:
            self.model_shard.write(memory)
        if self.codec is not None:
            exact = self.model_shard.memory if memory is None else memory
            assert self.own is not None and exact is not None, "replicated, with an exact shard"
            self.own.copy_(exact)

    @torch.no_grad()
    def round_whole(self) -> None:
        """Round replicated parameters to what a gather would make of them. Local.

        Where only some were written, the others, which the codec has rounded before, are encoded
        again.
        """
        self.is_unrounded = False
        assert self.codec is not None and self.whole is not None, "what it is for"
        for shard in self.plan.layout.shards:
            values = self.whole[shard.as_slice()]
            self.codec.decode(self.codec.encode(values), values)

    def follow_writes(self) -> None:
        """Copy what was written to replicated parameters in place into the shard and the masters.

        A version tells of most writes. Those through `data`, which have none, are looked for before
        the first steps; where there was one, before all that follow.

        Raises:
            StateError: As for `check_memory`.
        """
        self.check_memory()
        if self.own is None or not (self.has_masters or self.codec is not None):
            return
        if self._looks_left > 0 and self.has_masters and self.codec is None:
            self._looks_left -= 1
            self._follow_values(self.own)
        versions = tuple(version_of(param) for param in self.params)
        written = [
            piece for piece in self.pieces if versions[piece.index] != self.versions[piece.index]
        ]
        for storage in dict.fromkeys((self.model_shard, self.main_shard)) if written else ():
            with storage.edit() as shard:
                for piece in written:
                    part = piece.in_shard.as_slice()
                    shard[part].copy_(self.own[part])
        self.versions = versions

    @torch.no_grad()
    def _follow_values(self, own: Tensor) -> None:
        """Copy parameters to their masters where they are not what the masters round to."""
        if (memory := self.main_shard.memory) is None:
            return
        for piece in self.pieces:
            master, part = memory[piece.in_shard.as_slice()], own[piece.in_shard.as_slice()]
            is_written = master.to(part.dtype) != part
            if self._looks_left < math.inf and is_written.any():
                self._looks_left = math.inf
            # Without a branch on `is_written`, the host does not wait for the device.
            if self._looks_left == math.inf:
                master.copy_(torch.where(is_written, part.to(master.dtype), master))

    def reclaim(self) -> None:
        """Copy back values that an optimizer put in place of our memory, as by `param.data = ...`.

        Its parameters view our memory again afterwards.
        """
        memory = self.main_shard.memory
        if memory is None or list(map(Tensor.data_ptr, self.shard_params)) == self._part_addresses:
            return
        # This is no write of the user's.
        with plain_access():
            for param, part in zip(self.shard_params, self.parts_of(memory), strict=True):
                if param.data_ptr() != part.data_ptr():
                    part.copy_(param.data)
                    param.data = part

    def point_targets(self, shard: Tensor | None) -> None:
        """Let targets view this flat shard.

        When None, they view the shard on the device, or a placeholder where there is none.
        """
        memory = self.model_shard.memory if shard is None else shard
        if memory is None:
            memory = placeholder(torch.Size([self.shard_numel]), self.plan.dtype, _CPU)
        for target, part in zip(self.offloaded_params, self.parts_of(memory), strict=False):
            target.data = part

    def install(self, views: Sequence[Tensor]) -> None:
        """Make the parameters view this memory, but for those in `pinned`. Moves no data."""
        if views is not self._views:
            self._views, self._addresses = views, None
        # Setting `data` of a sharded type would be noticed as a use.
        if self.has_sharded_types:
            for param, whole_type in zip(self._shown, self.unsharded_types, strict=True):
                param.__class__ = whole_type
        if self.pinned:
            views = [self.pinned.get(position, view) for position, view in enumerate(views)]
        for param, view in zip(self.params, views, strict=True):
            param.data = view
        self.has_sharded_types = self._views is self.stand_ins
        if self.has_sharded_types:  # see NOTE(class) in stand_in.py
            self._sharded_versions = tuple(map(version_of, self.params))
            for param, sharded_type in zip(self._shown, self.sharded_types, strict=True):
                param.__class__ = sharded_type

    def return_params(self, values: Sequence[Tensor]) -> None:
        """Give parameters memory that is theirs from now on, as the partition ends. Local."""
        self.install(values)
        # Keep no reference to `values`, which are as large as the parameters.
        self._views = self.stand_ins

    def find_touched(self) -> int | None:
        """Return the position of the first parameter that the user has changed; None if none.

        It has other memory or another dtype, was written to, or requires gradients though it was
        frozen.
        """
        dtype, trainable, is_sharded = self.plan.dtype, self.plan.trainable, self.whole is None
        if self._addresses is None:
            self._addresses = [view.data_ptr() for view in self._views]
        for position, param in enumerate(self.params):
            pinned = self.pinned.get(position) if self.pinned else None
            address = self._addresses[position] if pinned is None else pinned.data_ptr()
            is_other = param.dtype is not dtype or (
                param.data_ptr() != address and (is_sharded or not self._is_like(position))
            )
            # A sharded parameter's class refuses writes; it does not see `set_`, which moves it.
            is_own = self.sharded_types[position] is self.unsharded_types[position]
            is_noticed = self.has_sharded_types and not is_own
            version = self._sharded_versions[position] if is_noticed else version_of(param)
            is_written = is_sharded and pinned is None and version != self.versions[position]
            # Adapters are switched on and off around an evaluation, which needs no gradient memory.
            is_thawed = param.requires_grad and not trainable and torch.is_grad_enabled()
            if is_other or is_written or is_thawed:
                return position
        return None

    def _is_like(self, position: int) -> bool:
        """Return whether a parameter, with memory of the user's, could be copied into ours."""
        param, view = self.params[position], self._views[position]
        return param.shape == view.shape and param.device == view.device

    def find_replaced(self) -> list[int]:
        """Return positions of replicated parameters with memory of the user's, by `param.data =`.

        A forward computes with that memory, as in plain torch. Code that reads our memory instead
        must not run then.
        """
        if self.whole is None or not self.has_touched_whole():
            return []
        pairs = zip(self.params, self._views, strict=True)
        return [at for at, (param, view) in enumerate(pairs) if param.data_ptr() != view.data_ptr()]

    def check_memory(self) -> None:
        """Raise StateError where a parameter has memory of the user's, maybe for a while only."""
        if replaced := self.find_replaced():
            name = self.plan.params[replaced[0]].name
            raise StateError(
                f"parameter {name!r}: its memory was replaced, as by `param.data = value`, and "
                f"what is read now would have other values (rank {self.group.rank}). Put its own "
                "memory back, or write the value into it: param.data.copy_(value)"
            )

    def restore_memory(self) -> dict[nn.Parameter, Tensor]:
        """Let parameters view our memory again; return what the user had put in its place."""
        replaced = {self.params[at]: self.params[at].data for at in self.find_replaced()}
        if replaced:
            self.install(self._views)
        return replaced

    @torch.no_grad()
    def adopt_values(self) -> None:
        """Copy values from memory that the user has put in place of ours: a step writes to ours."""
        for param, value in self.restore_memory().items():
            # This counts as a write, which masters follow by its version.
            param.copy_(value)

    def has_touched_whole(self) -> bool:
        """Return whether a parameter was written to while it is whole, or views other memory."""
        if self.pinned:
            return False
        if tuple(map(version_of, self.params)) != self.versions:
            return True
        return list(map(Tensor.data_ptr, self.params)) != list(map(Tensor.data_ptr, self._views))

    def find_written(self, full: Tensor) -> int | None:
        """Return the first parameter whose gathered values, in `full`, are not those of the shard.

        None if there is none. This rank's part is compared, where the shard is on the device and
        not encoded. A write that changed nothing is forgotten, and so is other memory of a frozen
        parameter with the same values, which bitsandbytes puts there.
        """
        versions, model_shard = tuple(map(version_of, self.params)), self.model_shard.memory
        if isinstance(self.model_shard, Rounded):
            model_shard = self.model_shard.read()
        is_comparable = (
            model_shard is not None and self.gather_codec is None and not self.plan.trainable
        )
        others: set[int] = set()
        for position, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            is_other = param.data_ptr() != view.data_ptr() and position not in self.pinned
            is_like = param.dtype == view.dtype and self._is_like(position)
            is_lost = is_other and not (is_comparable and is_like)
            if is_lost or (model_shard is None and versions[position] != self.versions[position]):
                return position
            if is_other:
                others.add(position)
        if self.pinned or model_shard is None or self.gather_codec is not None:
            return None
        own = self.own_of(full)
        for piece in self.pieces:
            part = own[piece.in_shard.as_slice()]
            if piece.index in others:
                part = self.params[piece.index].detach().reshape(-1)[piece.in_tensor.as_slice()]
            own_stored = model_shard[piece.in_shard.as_slice()]
            if not torch.equal(part.view(torch.uint8), own_stored.view(torch.uint8)):
                return piece.index
        self.versions = versions
        return None

    def pin(self, values: Mapping[int, Tensor]) -> None:
        """Let the parameters at these positions view memory of their own until `unpin`."""
        self.pinned.update(values)
        self.install(self._views)

    def unpin(self, positions: Iterable[int]) -> None:
        """End `pin`: view again what the others view."""
        released = [
            position for position in positions if self.pinned.pop(position, None) is not None
        ]
        self.install(self._views)
        versions = list(self.versions)
        for position in released:
            versions[position] = version_of(self.params[position])
        self.versions = tuple(versions)


# NOTE(secondary): a node's copy of a unit is made when another unit takes the slot, and not before:
# until then the slot has the unit's values, and they are not gathered. So units that share no slot
# have no copies. Gathers in evaluation or a further micro-batch stay inside the node, too.


@define(eq=False, repr=False)
class SecondaryShards:
    """This rank's even parts of a unit's flat buffers, as its node has gathered them."""

    group: Group
    buffers: Sequence[FlatBuffer]
    # Version of the values; -1: there are none.
    version: int = field(default=-1, init=False)
    _parts: list[Tensor] = field(factory=list, init=False)

    @property
    def num_bytes(self) -> int:
        """Return bytes of the parts, padding included."""
        return sum(part.nbytes for part in self._parts)

    def update(self, full: Sequence[Tensor], version: int) -> None:
        """Copy this rank's parts of whole buffers, if new. Local; see NOTE(secondary)."""
        if self.version == version:
            return
        pairs = zip(full, self._splits, strict=True)
        own = [whole.split(splits)[self.group.rank] for whole, (splits, _) in pairs]
        if not self._parts:
            self._parts = [torch.empty_like(part) for part in own]
        for part, source in zip(self._parts, own, strict=True):
            part.copy_(source)
        self.version = version

    def gather(self, full: Sequence[Tensor]) -> list[Handle[Tensor]]:
        """Launch the gathers that fill whole buffers from the node's parts. Collective in it."""
        return [
            all_gather_flat(
                whole,
                splits=splits,
                payload=payload,
                group=self.group,
                shard=part,
                tag=buffer.gather_tag,
                version=self.version,
            )
            for whole, buffer, (splits, payload), part in zip(
                full, self.buffers, self._splits, self._parts, strict=True
            )
        ]

    def release(self) -> None:
        """Give the memory back."""
        self._parts, self.version = [], -1

    @cached_property
    def _splits(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return elements per rank of the node, and those without padding, of each buffer."""
        layouts = [buffer.plan.layout for buffer in self.buffers]
        splits = [even_splits(layout.numel, self.group.world_size) for layout in layouts]
        return [(s, layout.payload_of(s)) for s, layout in zip(splits, layouts, strict=True)]
