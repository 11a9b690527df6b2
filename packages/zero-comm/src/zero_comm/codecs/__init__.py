"""Codecs as a building block: encodings in which values travel in fewer bytes.

codec.py has the interface, `AbstractCodec`, and the arithmetic of blocks in plain torch:
`encode_blocks` and `decode_blocks` are the specification, and kernels write and read the same bits.
`Blockwise` (blockwise.py) encodes integers of 8 or 4 bits with one scale per block, `Cast`
(cast.py) another floating-point dtype. kernels.py chooses a kernel for a device once: native code
on the CPU, Triton (triton.py) on CUDA, otherwise plain torch.

Read codec.py first. What must never happen: ranks compute different sizes or different values from
the same bytes.
"""

from __future__ import annotations

from typing import Final

from zero_comm.errors import CodecError

from .blockwise import BLOCK, Blockwise
from .cast import NAMES, Cast
from .codec import AbstractCodec, decode_blocks, encode_blocks
from .kernels import native_status

__all__ = [
    "AbstractCodec",
    "Blockwise",
    "Cast",
    "decode_blocks",
    "encode_blocks",
    "native_status",
    "parse_codec",
]

_CASTS: Final = {name: dtype for dtype, name in NAMES.items()}
_BITS: Final = {"int8": 8, "int4": 4}


def parse_codec(name: str) -> AbstractCodec | None:
    """The codec of a name: "none", "bf16", "fp16", "fp32", "int8", "int4", "int8:128" (its block).

    None for "none": values travel as they are.

    Raises:
        CodecError: There is none of that name.
    """
    kind, colon, block = name.partition(":")
    if kind in _BITS and (block.isdecimal() if colon else True):
        return Blockwise(bits=_BITS[kind], block=int(block) if colon else BLOCK)
    if name == "none":
        return None
    if name in _CASTS:
        return Cast(_CASTS[name])
    raise CodecError(
        f"no codec is called {name!r}: expected none, {', '.join((*_CASTS, *_BITS))}, or one of "
        "the latter two with a block size, such as int8:128"
    )
