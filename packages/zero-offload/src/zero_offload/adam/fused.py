"""FusedAdam: Adam over all parameters of a CUDA device in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, final

import torch
from attrs import frozen
from torch import Tensor

from zero_offload._native._cuda import Piece, Rule, cuda_kernels
from zero_offload.errors import OffloadError

_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NONE: Final = 3
# One parameter's, in the order of `zero_cuda_piece`: the master in its place, where there is one;
# gradient, first and second moment; largest or None; the parameter as what is rounded into, or
# None; step.
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


@final
class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101) in one pass over memory, on CUDA.

    Gradients may be fp32, bf16 or fp16, whatever the parameters are. 16-bit parameters have fp32
    masters in the state, `"master"`, unless `masters` is False. Like torch's fused optimizers it
    reads `grad_scale` and `found_inf` on the device, so that a step is unscaled, clipped or skipped
    without the host; with `lr` a tensor on the device, a captured CUDA graph goes on being right.

    State dicts are torch's, of Adam and AdamW alike.

    Args:
        params: Parameters or groups, all on CUDA devices.
        lr: A number, or a float32 tensor of one element on the parameters' device.
        betas: Decay of the two averages.
        eps: Added to the root of the second average.
        weight_decay: Strength of weight decay.
        decoupled: Decay shrinks parameters (AdamW); added to gradients (Adam) when False.
        amsgrad: Divide by the largest second average so far.
        maximize: Go up the gradient.
        masters: Whether 16-bit parameters have fp32 masters.

    Raises:
        OffloadError: A parameter is not on CUDA or of another dtype, or the library is not built:
            the message says why and how to.
    """

    needs_cut = "flat"  # elementwise: a part of a parameter is stepped as in the whole

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        masters: bool = True,
    ) -> None:
        self._kernels = cuda_kernels()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "masters": masters,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                _check_param(param, index)
        self._step_supports_amp_scaling = True
        self._tables: dict[Any, _Table] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. On the current stream; waits for nothing.

        Returns:
            What `closure` returns.

        Raises:
            OffloadError: A gradient is sparse or of another dtype, or a launch failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        divisor = getattr(self, "grad_scale", None)
        for index, group in enumerate(self.param_groups):
            launches: dict[Any, list[Tensors]] = {}  # by what the tensors of one launch share
            for param in group["params"]:
                if param.grad is not None:
                    tensors = self._tensors_of(param, group)
                    launches.setdefault(_kind_of(tensors), []).append(tensors)
            for kind, tensors in launches.items():
                addresses = [[0 if t is None else t.data_ptr() for t in each] for each in tensors]
                table = self._tables.get((index, kind))
                if table is None or table.addresses != addresses:
                    table = _Table.of(tensors, addresses, self._kernels.piece_numel)
                    self._tables[index, kind] = table
                self._launch(table, group, kind, divisor, found_inf)
        return loss

    def _tensors_of(self, param: Tensor, group: dict[str, Any]) -> Tensors:
        state = self.state[param]
        if not state:
            has_master = group["masters"] and param.dtype != torch.float32
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            like = torch.float32 if has_master else param.dtype
            largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
            for name in ("exp_avg", "exp_avg_sq", *largest):
                state[name] = torch.zeros_like(param, dtype=like)
            if has_master:
                state["master"] = param.detach().to(torch.float32)
        grad = param.grad
        assert grad is not None, "asked for those that have one"
        if grad.is_sparse or grad.dtype not in _CODES:
            raise OffloadError(
                f"FusedAdam.step(): expected a dense gradient of float32, bfloat16 or float16, got "
                f"{grad.layout} {grad.dtype} for a parameter of shape {tuple(param.shape)}"
            )
        master = state.get("master")
        return (
            param if master is None else master,
            grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("max_exp_avg_sq") if group["amsgrad"] else None,
            None if master is None else param,
            state["step"],
        )

    def _launch(
        self,
        table: _Table,
        group: dict[str, Any],
        kind: tuple[Any, ...],
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        device, param_dtype, grad_dtype, state_dtype, out_dtype = kind
        lr = group["lr"]
        on_device = isinstance(lr, Tensor) and lr.device.type == "cuda"
        rule = Rule(
            param_dtype=_CODES[param_dtype],
            grad_dtype=_CODES[grad_dtype],
            state_dtype=_CODES[state_dtype],
            out_dtype=_NONE if out_dtype is None else _CODES[out_dtype],
            maximize=group["maximize"],
            decoupled=group["decoupled"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            lr=0.0 if on_device else float(lr),
            rate=lr.data_ptr() if on_device else None,
            divisor=None if divisor is None else divisor.data_ptr(),
            found_inf=None if found_inf is None else found_inf.data_ptr(),
        )
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            self._kernels.advance(table.steps, rule.found_inf, stream)
            self._kernels.adam(table.pieces, table.num_pieces, rule, stream)


@frozen(eq=False)
class _Table:
    """Pieces of tensors, one for each block of a launch, in device memory."""

    addresses: list[list[int]]  # of whole tensors
    pieces: Tensor  # uint8
    num_pieces: int
    steps: Tensor  # int64: addresses

    @classmethod
    def of(cls, works: list[Tensors], addresses: list[list[int]], piece_numel: int) -> _Table:
        """Made where the tensors are; copied there once."""
        pieces = [piece for tensors in works for piece in pieces_of(tensors, piece_numel)]
        array = bytearray((Piece * (len(pieces) + 1))(*pieces))  # one more: torch wants some memory
        device = works[0][0].device
        return cls(
            addresses,
            torch.frombuffer(array, dtype=torch.uint8).to(device),
            len(pieces),
            torch.tensor([each[-1] for each in addresses], device=device),
        )


def pieces_of(tensors: Tensors, piece_numel: int) -> list[Piece]:
    """A parameter's elements, divided among blocks: `piece_numel` each, the last one fewer."""
    *divided, step = tensors
    numel = tensors[0].numel()
    return [
        Piece(
            *(None if t is None else t.data_ptr() + start * t.itemsize for t in divided),
            step.data_ptr(),
            min(piece_numel, numel - start),
        )
        for start in range(0, numel, piece_numel)
    ]


def _kind_of(tensors: Tensors) -> tuple[Any, ...]:
    param, grad, first, _, _, out, _ = tensors
    return param.device, param.dtype, grad.dtype, first.dtype, None if out is None else out.dtype


def _check_param(param: Tensor, index: int) -> None:
    is_dense = param.layout is torch.strided and param.is_contiguous()
    if param.device.type != "cuda" or param.dtype not in _CODES or not is_dense:
        raise OffloadError(
            "FusedAdam: expected contiguous parameters of float32, bfloat16 or float16 on CUDA, "
            f"got {param.dtype} on {param.device}, strides {tuple(param.stride())}, for parameter "
            f"{index} of shape {tuple(param.shape)}; CPUAdam is for those on the CPU"
        )
