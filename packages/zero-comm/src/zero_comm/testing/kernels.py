"""Kernels that encode blocks, for tests: a given set, those that can be loaded, or none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from zero_comm._native import load as load_native
from zero_comm.codecs import blockwise, kernels
from zero_comm.codecs.kernels import _agrees as triton_agrees
from zero_comm.codecs.kernels import load_triton

__all__ = [
    "forgetting_kernels",
    "load_native",
    "load_triton",
    "triton_agrees",
    "triton_gives",
    "triton_kernels",
    "triton_ptx",
    "using_kernels",
]

_TRITON: Final = "zero_comm.codecs.triton"


@contextmanager
def using_kernels(found: Any) -> Iterator[None]:
    """Inside, `Blockwise` calls these on every device; plain torch when None. Local."""
    with mock.patch.object(blockwise, "kernels", lambda _: found):
        yield


@contextmanager
def forgetting_kernels() -> Iterator[None]:
    """Inside, kernels are looked for anew; and after it once more. Local."""
    kernels._loaded.cache_clear()
    try:
        yield
    finally:
        kernels._loaded.cache_clear()


def triton_kernels() -> Any:
    """The kernels for CUDA. Imports Triton."""
    from zero_comm.codecs.triton import TritonKernels  # noqa: PLC0415

    return TritonKernels()


@contextmanager
def triton_gives(kernels: Callable[[], Any] | None) -> Iterator[None]:
    """Inside, Triton makes these kernels; it cannot be imported when None. Local."""
    with mock.patch.dict(sys.modules):
        if kernels is None:
            sys.modules.pop(_TRITON, None)
            sys.modules["triton"] = None  # type: ignore[assignment]
        else:
            sys.modules[_TRITON] = SimpleNamespace(TritonKernels=kernels)  # type: ignore[assignment]
        yield


def triton_ptx(capability: int, dtype: str, bits: int, block: int) -> list[str]:
    """Return the PTX of the kernels that encode, decode, and decode to add. Local.

    Compiling needs no GPU.

    Args:
        capability: Compute capability of the device: 80, 90 and so on.
        dtype: "fp32", "bf16" or "fp16".
        bits: Bits of the codec.
        block: Block of the codec, in elements.
    """
    triton = importlib.import_module("triton")
    backends = importlib.import_module("triton.backends.compiler")
    compiler = importlib.import_module("triton.compiler")

    from zero_comm.codecs import triton as triton_codec  # noqa: PLC0415

    types = {"values": f"*{dtype}", "out": f"*{dtype}", "integers": "*i8"}
    types |= {"numel": "i32", "num_bytes": "i32"}
    found = []
    for kernel, adds in (
        ("_encode", {}),
        ("_decode", {"ADDS": False}),
        ("_decode", {"ADDS": True}),
    ):
        function = getattr(triton_codec, kernel)
        names = function.arg_names
        types["scales"] = "*i32" if kernel == "_encode" else "*fp32"
        source = compiler.ASTSource(
            function,
            {name: types.get(name, "constexpr") for name in names},
            triton_codec.tile_of(bits, block) | adds,
            {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types},
        )
        target = backends.GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=triton_codec.LAUNCH)
        assert compiled.asm["cubin"], f"{kernel}: no machine code for sm_{capability}"
        found.append(compiled.asm["ptx"])
    return found
