"""Codecs as a building block: what they are, and the arithmetic of blocks in plain torch.

`encode_blocks` and `decode_blocks` are the specification: kernels write and read the same bits.
"""

from ._blocks import decode_blocks, encode_blocks
from ._blockwise import Blockwise
from ._cast import Cast
from ._codec import AbstractCodec
from ._kernels import native_status
from ._loco import Loco, LocoErrors
from ._parse_codec import parse_codec

__all__ = [
    "AbstractCodec",
    "Blockwise",
    "Cast",
    "Loco",
    "LocoErrors",
    "decode_blocks",
    "encode_blocks",
    "native_status",
    "parse_codec",
]
