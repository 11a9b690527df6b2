"""Values of options of the `zero` command."""

from __future__ import annotations

import argparse
import re
from typing import Final

import torch

from ._tensor_file import CODES

_UNITS: Final = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
DTYPES: Final = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in CODES if dtype.is_floating_point},
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def dtype_of(text: str) -> torch.dtype:
    """A floating-point dtype by its name, or argparse's error."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(sorted(DTYPES))}, got {text!r}"
        )
    return DTYPES[text]


def share_of(text: str) -> float:
    """A share such as 20% or 0.2, or argparse's error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(%?)", text.strip())
    share = 1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 20% or 0.2, got {text!r}")
    return share


def num_bytes_of(text: str) -> int:
    """A size such as 5GB, in bytes, or argparse's error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]I?B|B?)", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2].removeprefix("B")])
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"expected a size such as 5GB, 500MB or 2GiB, got {text!r}"
        )
    return size
