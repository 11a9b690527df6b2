"""The route of one buffer's gradients: from what each rank collected to what its shard is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field
from torch import Tensor
from zero_comm import (
    AbstractCodec,
    CommError,
    DivergenceError,
    Handle,
    LocoErrors,
    Reduction,
    all_reduce_flat,
    even_splits,
    reduce_scatter_by_levels,
    reduce_scatter_flat,
)

from ._flat_buffer import FlatBuffer
from ._precision import Precision
from ._unit import Unit
from ._wire import Routes, Wire


@define(eq=False)
class GradientRoute:
    """Over which groups, in how many hops and in which codec one buffer's gradients are reduced.

    One reduction at a time. What it launches, in `launch` and in `advance`, must be launched in the
    same order on every rank.
    """

    buffer: FlatBuffer
    unit: Unit
    routes: Routes
    precision: Precision
    codec: AbstractCodec | None = None  # in which they travel; see `Wire.gradients`
    loco_errors: LocoErrors | None = None  # what that lost before, to be made up for
    _in_flight: Handle[Tensor] | None = field(default=None, init=False)

    @classmethod
    def plan(
        cls, buffer: FlatBuffer, unit: Unit, *, routes: Routes, precision: Precision, wire: Wire
    ) -> GradientRoute:
        """As the wire says for gradients of this dtype."""
        codec = wire.codec_of_gradients(buffer.wire_dtype)
        errors = None if codec is None or wire.loco is None else LocoErrors(wire.loco)
        return cls(buffer, unit, routes, precision, codec, errors)

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction has begun that nobody has waited for."""
        return self._in_flight is not None

    def launch(self, values: Tensor, *, into: Tensor | None) -> None:
        """Begin the first hop of a reduction. Collective.

        Args:
            values: This rank's gradients, 1-D, of the whole buffer, padding included. Lent until
                `advance` or `finish` has returned once; written.
            into: Receives this rank's part of the result, in the dtype that travels. None: all of
                it takes the place of `values`, on every rank.
        """
        scaling = self.precision.scaling_of(self.routes.whole.world_size)
        if self.codec is not None:  # what another unit left there would count in a block's scale
            for gap in self.buffer.plan.layout.gaps:
                values[gap.as_slice()].zero_()
        if scaling.divisor_before != 1.0:
            values.div_(scaling.divisor_before)
        if into is None:
            reduction = self._reduce_in_place(values, scaling.op)
        else:
            reduction = self._reduce_into(into, values.to(self.buffer.wire_dtype), scaling.op)
        if scaling.after != 1.0:
            reduction = reduction.map(lambda reduced: reduced.mul_(scaling.after))
        self._in_flight = reduction

    def advance(self) -> bool:
        """Wait for the hop in flight and launch the next; the last is for `finish`. Collective.

        Returns:
            Whether there was a next one, and `values` are the caller's again.
        """
        assert self._in_flight is not None, "the reducer lists what is in flight"
        with self._named():
            return self._in_flight.advance()

    def finish(self) -> Tensor:
        """Wait for what is left of the reduction, and return its result."""
        assert self._in_flight is not None, "the reducer lists what is in flight"
        with self._named():
            reduced = self._in_flight.wait()
        self._in_flight = None
        return reduced

    def _reduce_in_place(self, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout = self.buffer.plan.layout
        return all_reduce_flat(
            values,
            group=self.routes.shards,
            op=op,
            splits=layout.splits,
            payload=layout.payload_splits,
            tag=self.buffer.reduce_tag,
        )

    def _reduce_into(self, out: Tensor, values: Tensor, op: Reduction) -> Handle[Tensor]:
        layout, codec, tag = self.buffer.plan.layout, self.codec, self.buffer.reduce_tag
        splits, payload = layout.splits, layout.payload_splits
        if codec is not None and self.unit.errors is not None:
            self.unit.errors.gradients.note(self.unit.name, codec, values.split(splits))
        if codec is not None and self.routes.hops is not None:
            return reduce_scatter_by_levels(
                values,
                splits=splits,
                levels=self.routes.hops,
                codec=codec,
                errors=self.loco_errors,
                op=op,
                out=out,
                tag=tag,
                payload=payload,
            )
        reduction = reduce_scatter_flat(
            values,
            group=self.routes.shards,
            op=op,
            splits=splits,
            payload=payload,
            out=out,
            tag=tag,
            codec=codec,
        )
        if self.routes.replicas is None:
            return reduction
        return reduction.then(lambda shard: self._reduce_over_replicas(shard, op))

    def _reduce_over_replicas(self, shard: Tensor, op: Reduction) -> Handle[Tensor]:
        replicas, layout = self.routes.replicas, self.buffer.plan.layout
        assert replicas is not None, "it follows where there are some"
        splits = even_splits(shard.numel(), replicas.world_size)
        return all_reduce_flat(
            shard,
            group=replicas,
            op=op,
            splits=splits,
            payload=layout.payload_of(splits, start=layout.shard(self.buffer.group.rank).start),
            tag=self.buffer.reduce_tag,
            codec=self.codec,
        )

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DivergenceError:
            raise  # it names the units
        except CommError as error:
            raise CommError(
                f"reducing the gradients of unit {self.unit.name!r}: {error}"
            ) from error
