"""Errors of encoding, fed back into the next reduction (LoCo, arXiv 2407.04480)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zero_comm.codecs.blockwise import Blockwise
from zero_comm.codecs.codec import AbstractCodec

from .errors import CodecError
from .transport import chunks_of

# NOTE(telescope): with h = g + e sent as q, r = h - q lost, and e' = b e + (1 - b) r kept, what the
# reductions lack in all is the sum of r - e = (e' - e) / (1 - b), which telescopes to the last
# error alone: the mean over many reductions is as exact as one likes, though each is coarse.


@frozen
class Loco:
    """How errors of encoding are fed back. The names are DeepSpeed's.

    Args:
        err_beta: What remains of the error kept so far when the newest one is taken into their
            moving average: 0 or more, less than 1.
        reset_T: Reductions after which the errors are forgotten, as gradients of long ago are of
            another model.
        kept: How errors are kept between reductions; as float32 when None. They are as many as the
            elements of a whole gradient, on every rank.
    """

    err_beta: float = field(default=0.8)
    reset_T: int = field(default=1024)
    kept: AbstractCodec | None = field(default=Blockwise(bits=8))

    @err_beta.validator
    def _check_beta(self, _: object, err_beta: float) -> None:
        if not 0 <= err_beta < 1:
            raise CodecError(f"expected err_beta in [0, 1), got {err_beta!r}")

    @reset_T.validator
    def _check_reset(self, _: object, reset_t: int) -> None:
        if reset_t < 1:
            raise CodecError(f"expected reset_T of at least 1 reduction, got {reset_t!r}")


class Level(Enum):
    """Hop of a reduction, inside a node or across nodes; values are encoded for each."""

    INSIDE = "inside"
    ACROSS = "across"


@define(eq=False)
class LocoErrors:
    """The errors of one buffer's reductions, on one rank; zero at first. Local.

    Use one object for each buffer (or list of tensors), in every reduction of it and no other.
    Losing the errors acts as a reset; save `state_dict` to continue with the same bits.
    """

    loco: Loco = field(factory=Loco)
    _num_reductions: int = field(default=0, init=False)
    _numels: dict[Level, list[int]] = field(factory=dict, init=False)
    # Errors of all parts, end to end: 1-D, uint8 as `Loco.kept` encodes them, or else float32.
    _kept: dict[Level, Tensor] = field(factory=dict, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the errors kept on this rank."""
        return sum(kept.nbytes for kept in self._kept.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state: `num_reductions`, and a tensor for each level there is.

        Tensors are 1-D, uint8 as encoded by `Loco.kept` or else float32, and not copied: the next
        reduction changes them. They fit only this rank, groups of this size, and this buffer with
        the same splits.
        """
        kept = {level.value: tensor for level, tensor in self._kept.items()}
        return {"num_reductions": self._num_reductions, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, with the same `Loco`. Tensors are taken as they are.

        Raises:
            CodecError: A tensor is not of the dtype in which errors are kept. That they are of
                another buffer is found by the next reduction.
        """
        dtype = torch.float32 if self.loco.kept is None else torch.uint8
        kept = {level: state[level.value] for level in Level if level.value in state}
        for level, tensor in kept.items():
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise CodecError(
                    f"expected errors of level {level.value!r} to be 1-D and {dtype}, as "
                    f"{self.loco} keeps them, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        self.reset()
        self._kept, self._num_reductions = kept, int(state["num_reductions"])

    def reset(self) -> None:
        """Drop the errors and free their memory."""
        self._kept.clear()
        self._num_reductions = 0

    def begin(self) -> None:
        """Count a reduction that begins; reset the errors after `Loco.reset_T` reductions."""
        if self._num_reductions == self.loco.reset_T:
            self.reset()
        self._num_reductions += 1

    @torch.no_grad()
    def encode(
        self, level: Level, parts: Sequence[Tensor], rows: Sequence[Tensor], codec: AbstractCodec
    ) -> None:
        """Fill each part's row from its values and the errors, and keep the new errors."""
        numels = [part.numel() for part in parts]
        if self._numels.setdefault(level, numels) != numels:
            raise CodecError(
                f"these errors are of a buffer cut into {self._numels[level]} elements, got one of "
                f"{numels}; every buffer needs a LocoErrors of its own, and a new one when its "
                "layout changes"
            )
        sizes = [self._size_of(numel) for numel in numels]
        if level not in self._kept:
            self._kept[level] = self._no_errors(parts, sizes)
        kept = self._kept[level]
        if kept.numel() != sum(sizes):
            raise CodecError(
                f"expected errors of {sum(sizes)} elements or bytes, for a buffer cut into "
                f"{numels} elements, got {kept.numel()}: what was loaded is of another buffer"
            )
        for part, row, errors in zip(parts, rows, chunks_of(kept, sizes), strict=True):
            for span in codec.spans(part, granule=self._granule):
                self._encode_span(part, row, errors, codec, span)

    def _encode_span(
        self, part: Tensor, row: Tensor, kept: Tensor, codec: AbstractCodec, span: slice
    ) -> None:
        where = {"start": span.start, "numel": part.numel()}
        error = self._read(kept, span, part.numel())
        wanted = part[span] + error  # float32 for parts of any dtype
        codec.encode_span(wanted, row, **where)
        codec.decode_span(row, sent := torch.empty_like(wanted), **where)
        lost = wanted.sub_(sent).mul_(1 - self.loco.err_beta)
        error.mul_(self.loco.err_beta).add_(lost)
        # Reset inf and nan, so that one overflow does not persist.
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if self.loco.kept is not None:
            self.loco.kept.encode_span(error, kept, **where)

    @property
    def _granule(self) -> int:
        return 1 if self.loco.kept is None else self.loco.kept.granule

    def _size_of(self, numel: int) -> int:
        return numel if self.loco.kept is None else self.loco.kept.wire_bytes(numel)

    def _no_errors(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        codec, device = self.loco.kept, parts[0].device
        if codec is None:
            return torch.zeros(sum(sizes), device=device)
        kept = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for part, row in zip(parts, chunks_of(kept, sizes), strict=True):
            codec.encode(torch.zeros(part.numel(), device=device), row)
        return kept

    def _read(self, kept: Tensor, span: slice, numel: int) -> Tensor:
        if self.loco.kept is None:
            return kept[span]
        error = torch.empty(span.stop - span.start, device=kept.device)
        self.loco.kept.decode_span(kept, error, start=span.start, numel=numel)
        return error
