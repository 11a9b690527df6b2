"""FusedAdam: Adam over all parameters of a CUDA device in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from zero_offload._native import cuda_kernels
from zero_offload._native.library import COLUMNS, DTYPES, NO_DTYPE, TENSOR, Formula, Rule
from zero_offload.errors import OffloadError

# A parameter's tensors in the order of `zero_tensor`: what is stepped, its master or itself;
# gradient; first and second moment; largest second moment or None; the parameter to be written
# with the rounded master, or None without one; step count.
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

    # The formula is elementwise: a part of a parameter is stepped as in the whole.
    needs_cut = "flat"

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
        self._library = cuda_kernels()
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
        self._tables: dict[Any, PieceTable] = {}

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
        for index, group in enumerate(self.param_groups):
            # Device and dtypes, which the tensors of a launch share -> tensors of each parameter.
            launches: dict[Any, list[Tensors]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    tensors = self._tensors_of(param, group)
                    launches.setdefault(_kind_of(tensors), []).append(tensors)
            for kind, tensors in launches.items():
                table = self._tables.get((index, kind))
                if table is None or table.addresses != addresses_of(tensors):
                    table = PieceTable.of(tensors, self._library.zero_cuda_piece_numel())
                    self._tables[index, kind] = table
                self._launch(table, group, kind)
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
        if grad.is_sparse or grad.dtype not in DTYPES:
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

    def _launch(self, table: PieceTable, group: dict[str, Any], kind: tuple[Any, ...]) -> None:
        device, param, grad, state, out = kind
        lr = group["lr"]
        is_lr_on_device = isinstance(lr, Tensor) and lr.device.type == "cuda"
        rule = Rule(
            Formula.ADAM,
            rate=0.0 if is_lr_on_device else -float(lr),
            maximize=group["maximize"],
            decoupled=group["decoupled"],
            weight_decay=group["weight_decay"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            param_dtype=param,
            grad_dtype=grad,
            state_dtype=state,
            out_dtype=out,
        )
        with torch.cuda.device(device):
            table.step(
                self._library,
                rule,
                lr=lr if is_lr_on_device else None,
                divisor=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                stream=torch.cuda.current_stream(device).cuda_stream,
            )


@frozen(eq=False)
class PieceTable:
    """Pieces of tensors, one for each block of a launch, in device memory."""

    # Addresses of each parameter's whole tensors, 0 for None. If one changes, the table is void.
    addresses: list[list[int]]
    # Array of `zero_tensor` as bytes, one for each block; 1-D, uint8, on the device.
    pieces: Tensor
    num_pieces: int
    # Addresses of the step counts; 1-D, int64, on the device.
    steps: Tensor

    @classmethod
    def of(cls, works: list[Tensors], piece_numel: int) -> PieceTable:
        """Return the table of these tensors, in memory of their device."""
        addresses = addresses_of(works)
        pieces = np.concatenate([pieces_of(tensors, piece_numel) for tensors in works])
        # One unused element, so that the array is never empty: torch wants some memory.
        array = np.zeros(len(pieces) + 1, TENSOR)
        array[:-1] = pieces
        device = works[0][0].device
        return cls(
            addresses,
            torch.from_numpy(array.view(np.uint8)).to(device),
            len(pieces),
            torch.tensor([each[-1] for each in addresses], device=device),
        )

    def step(
        self,
        library: ctypes.CDLL,
        rule: Rule,
        *,
        lr: Tensor | None,
        divisor: Tensor | None,
        found_inf: Tensor | None,
        stream: int,
    ) -> None:
        """Count a step for each parameter and take it. Launched on a stream of the current device.

        Args:
            library: That of the device.
            rule: Its rate is minus the learning rate, unless there is `lr`.
            lr: One float32 in memory of the device, as `divisor` and `found_inf` are.
            divisor: The number that gradients are divided by.
            found_inf: The step is skipped unless it is 0.
            stream: The stream's address.
        """
        end = (_address_of(found_inf), stream)
        library.zero_cuda_advance(self.steps.data_ptr(), len(self.steps), *end)
        library.zero_cuda_adam(
            self.pieces.data_ptr(),
            self.num_pieces,
            rule,
            _address_of(lr),
            _address_of(divisor),
            *end,
        )


def addresses_of(works: list[Tensors]) -> list[list[int]]:
    """Return the addresses of the tensors of each parameter; 0 for None."""
    return [[_address_of(tensor) for tensor in tensors] for tensors in works]


def pieces_of(tensors: Tensors, piece_numel: int) -> np.ndarray:
    """A parameter's elements, divided among blocks: `piece_numel` each, the last one fewer."""
    *divided, step = tensors
    numel = tensors[0].numel()
    starts = np.arange(0, numel, piece_numel, dtype=np.uintp)
    pieces = np.zeros(len(starts), TENSOR)
    pieces["numel"] = np.minimum(piece_numel, numel - starts.astype(np.int64))
    pieces["step"] = step.data_ptr()
    for name, tensor in zip(COLUMNS, divided, strict=True):
        if tensor is not None:
            pieces[name] = tensor.data_ptr() + starts * np.uintp(tensor.itemsize)
    return pieces


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kind_of(tensors: Tensors) -> tuple[Any, ...]:
    """Device, and dtypes of parameter, gradient, state and out as kernels take them."""
    param, grad, first, _, _, out, _ = tensors
    codes = (NO_DTYPE if t is None else DTYPES[t.dtype] for t in (param, grad, first, out))
    return (param.device, *codes)


def _check_param(param: Tensor, index: int) -> None:
    is_dense = param.layout is torch.strided and param.is_contiguous()
    if param.device.type != "cuda" or param.dtype not in DTYPES or not is_dense:
        raise OffloadError(
            "FusedAdam: expected contiguous parameters of float32, bfloat16 or float16 on CUDA, "
            f"got {param.dtype} on {param.device}, strides {tuple(param.stride())}, for parameter "
            f"{index} of shape {tuple(param.shape)}; CPUAdam is for those on the CPU"
        )
