"""Sources of a unit's whole values: its slot is filled from one of them."""

# ruff: noqa: D102 - `UnitSource` says it

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from zero_comm import AbstractCodec, CommError, Exposure
from zero_comm.errors import named

from zero_partition.memory.flat_buffer import FlatBuffer, SecondaryShards
from zero_partition.memory.seams import ParamOffload, Pending


@define(eq=False, repr=False)
class LossByUnit:
    """Sums of squares, by unit: of what was to be sent, and of what was lost of it."""

    # Unit name -> sums of squares of what was lost and of what was sent: shape (2,), float64.
    _sums: dict[str, Tensor] = field(factory=dict, init=False)

    @torch.no_grad()
    def note(self, unit: str, codec: AbstractCodec, parts: Iterable[Tensor]) -> None:
        """Add these, each of which is encoded apart. Encodes and decodes them once more."""
        for part in parts:
            exact = part.float()
            lost = codec.decode(codec.encode(part), torch.empty_like(exact)).sub_(exact)
            sums = torch.stack([lost.double().square().sum(), exact.double().square().sum()])
            self._sums[unit] = self._sums[unit] + sums if unit in self._sums else sums

    def relative(self) -> dict[str, float]:
        """The norm of what was lost by that of what was to be sent; 0 of zeros. Waits for it."""
        return {
            unit: 0.0 if sums[1] == 0 else (sums[0] / sums[1]).sqrt().item()
            for unit, sums in self._sums.items()
        }


@define(eq=False, repr=False)
class CodecErrors:
    """Encoding errors that `record_codec_errors()` records on this rank, by name of the unit."""

    # Loss of this rank's shards in gathers of parameters.
    params: LossByUnit = field(factory=LossByUnit)
    # Loss of this rank's local gradients in the first hop of their reduction.
    gradients: LossByUnit = field(factory=LossByUnit)


class UnitSource(Protocol):
    """Source of a unit's whole flat buffers while its values have one version."""

    # Whether `start` launches collectives. If not, no other rank is waited for, and prefetching
    # hides nothing.
    is_collective: ClassVar[bool]

    @property
    def encoded_bytes(self) -> int:
        """Return bytes of encoded shards that one `start` brings to this rank."""
        return 0

    def start(self, full: Sequence[Tensor]) -> Sequence[Pending]:
        """Begin to fill the unit's whole buffers, 1-D; return what must be waited for."""
        ...


@final
@frozen(eq=False)
class ShardGather(UnitSource):
    """Gather of the ranks' shards, exact or encoded."""

    is_collective = True
    name: str
    buffers: Sequence[FlatBuffer]
    version: int
    errors: CodecErrors | None

    @property
    def encoded_bytes(self) -> int:
        return sum(
            sum(map(codec.wire_bytes, buffer.plan.layout.splits))
            for buffer in self.buffers
            if (codec := buffer.gather_codec) is not None
        )

    def start(self, full: Sequence[Tensor]) -> Sequence[Pending]:
        pairs = list(zip(self.buffers, full, strict=True))
        reads = [buffer.model_shard.fetch(buffer.own_of(whole)) for buffer, whole in pairs]
        for read in reads:
            if read is not None:
                read.wait()
        if self.errors is not None:
            for buffer, whole in pairs:
                self._note_errors(self.errors, buffer, whole)
        return [
            buffer.all_gather(whole, shard=buffer.model_shard.sent, version=self.version)
            for buffer, whole in pairs
        ]

    def _note_errors(self, errors: CodecErrors, buffer: FlatBuffer, whole: Tensor) -> None:
        codec, shard = buffer.gather_codec, buffer.model_shard.sent
        # A shard that is stored encoded is sent as it is, and loses nothing more.
        if codec is not None and buffer.model_shard.codec is None:
            own = buffer.own_of(whole) if shard is None else shard
            errors.params.note(self.name, codec, [own])


@final
@frozen(eq=False)
class PeerShards(UnitSource):
    """Shards in the memory of ranks of this host, which is read without their taking part."""

    is_collective = False
    name: str
    buffers: Sequence[FlatBuffer]
    exposure: Exposure

    def start(self, full: Sequence[Tensor]) -> Sequence[Pending]:
        for buffer, whole in zip(self.buffers, full, strict=True):
            layout, shard = buffer.plan.layout, buffer.model_shard.memory
            assert shard is not None, "it could not be read else"
            try:
                self.exposure.gather(
                    shard,
                    whole,
                    splits=layout.splits,
                    payload=layout.payload_splits,
                    tag=buffer.gather_tag,
                )
            except CommError as error:
                raise named(f"gathering unit {self.name!r}", error) from error.__cause__
        return ()


@final
@frozen(eq=False)
class NodeGather(UnitSource):
    """Gather, within the node, of the copy of these values that its ranks share."""

    is_collective = True
    secondary: SecondaryShards

    def start(self, full: Sequence[Tensor]) -> Sequence[Pending]:
        return self.secondary.gather(full)


@final
@frozen(eq=False)
class CachedBuffers(UnitSource):
    """Whole buffers in this rank's cache on the host or on disk."""

    is_collective = False
    buffers: Sequence[FlatBuffer]
    cache: ParamOffload

    def start(self, full: Sequence[Tensor]) -> Sequence[Pending]:
        pairs = zip(self.buffers, full, strict=True)
        return [self.cache.read(buffer.index, whole) for buffer, whole in pairs]
