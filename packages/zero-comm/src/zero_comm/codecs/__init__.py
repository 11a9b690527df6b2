"""Codecs as a building block: what they are, and the arithmetic of blocks in plain torch.

`encode_blocks` and `decode_blocks` are the specification: kernels write and read the same bits.
"""

from .blockwise import Blockwise
from .cast import Cast
from .codec import AbstractCodec, decode_blocks, encode_blocks
from .kernels import native_status
from .parse import parse_codec

__all__ = [
    "AbstractCodec",
    "Blockwise",
    "Cast",
    "decode_blocks",
    "encode_blocks",
    "native_status",
    "parse_codec",
]
