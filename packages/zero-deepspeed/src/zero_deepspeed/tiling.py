"""TiledLinear: a linear layer in tiles, each of which is gathered and released by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from zero_engine import ConfigError


def _bounds(size: int, splits: int, what: str) -> list[int]:
    """Return where parts begin and end; the first ones have an element more if they must."""
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= size:
        raise ConfigError(f"TiledLinear: expected {what} from 1 to {size}, got {splits!r}")
    quotient, rest = divmod(size, splits)
    return [part * quotient + min(part, rest) for part in range(splits + 1)]


class TiledLinear(nn.Module):
    """Computes `x @ weight.T + bias` of shape `[..., out_features]` tile by tile.

    At stage 3 no more than `window` tiles are whole at a time, so that a layer too large for a
    device can be trained. The sum over tiles of inputs is taken in another order than `nn.Linear`
    takes it. `linears[o][i]` is the tile of the o-th part of outputs and the i-th of inputs; the
    last of a row has the bias.

    Args:
        in_features: Size of inputs.
        out_features: Size of outputs.
        bias: Whether there is one.
        in_splits: Parts of the inputs.
        out_splits: Parts of the outputs.
        input_is_already_split: Whether `forward` gets a sequence of parts instead of one tensor,
            where there are several.
        combine_out_splits: Whether `forward` returns one tensor; else a list of parts.
        linear_cls: Makes a tile of `(in_features, out_features, bias=...)`.
        init_linear: A layer whose weight and bias the tiles begin with.
        kwargs: For `linear_cls`.

    Raises:
        zero_engine.ConfigError: There are more parts than features, or fewer than one.
    """

    def __init__(  # noqa: PLR0917 - the order is DeepSpeed's
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds(in_features, in_splits, "in_splits")
        self.out_parts = _bounds(out_features, out_splits, "out_splits")
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[i + 1] - self.in_parts[i],
                    self.out_parts[o + 1] - self.out_parts[o],
                    # Only the last tile has a bias, as in DeepSpeed's checkpoints.
                    bias=bias and i == in_splits - 1,
                    **kwargs,
                )
                for i in range(in_splits)
            )
            for o in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Outputs, one tensor or parts of it as `combine_out_splits` says."""
        if self.in_splits == 1 or self.input_is_already_split:
            inputs = [input_] if self.in_splits == 1 else list(input_)
        else:
            assert isinstance(input_, Tensor), "it is one tensor, unless it is split already"
            sizes = [stop - start for start, stop in self._in_slices()]
            inputs = list(input_.split(sizes, dim=-1))
        outputs = [self._row(row, inputs) for row in self.linears]  # type: ignore[arg-type]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _row(self, row: nn.ModuleList, inputs: Sequence[Tensor]) -> Any:
        total = None
        for tile, part in zip(row, inputs, strict=True):
            total = self._add(total, tile(part))
        return total

    def _add(self, total: Any, output: Any) -> Any:
        return output if total is None else total + output

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    def _in_slices(self) -> Iterator[tuple[int, int]]:
        return zip(self.in_parts, self.in_parts[1:], strict=False)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take weight and bias of a whole layer: `other.weight` of `[out_features, in_features]`.

        Before the layer is sharded.

        Raises:
            zero_engine.ConfigError: Its shapes are others, or only one of the two has a bias.
        """
        weight, bias = other.weight, getattr(other, "bias", None)
        assert isinstance(weight, Tensor), "it is a linear layer"
        expected = (self.out_features, self.in_features)
        if tuple(weight.shape) != expected or (bias is not None) != self.use_bias:
            raise ConfigError(
                f"TiledLinear.copy_params_from(): expected a weight of shape {expected} "
                f"{'and a bias' if self.use_bias else 'without a bias'}, got "
                f"{tuple(weight.shape)} {'with' if bias is not None else 'without'} a bias"
            )
        rows = zip(self.out_parts, self.out_parts[1:], strict=False)
        for (top, bottom), row in zip(rows, self.linears, strict=True):
            for (left, right), tile in zip(self._in_slices(), row, strict=True):  # type: ignore[arg-type]
                tile.weight.copy_(weight[top:bottom, left:right])
            if bias is not None:
                row[-1].bias.copy_(bias[top:bottom])  # type: ignore[index, union-attr]


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return `(output, bias)`, as Megatron's do; returns the same."""

    def _add(self, total: Any, output: Any) -> Any:
        output, bias = output
        if total is None:
            return output, bias
        return total[0] + output, total[1] if bias is None else bias

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = torch.cat([output for output, _ in outputs], dim=-1)
        return whole, torch.cat(biases, dim=-1) if biases else None
