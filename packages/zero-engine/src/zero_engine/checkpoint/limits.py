"""Limits on what a file may ask for, which may be a stranger's, and on what is written for it."""

from __future__ import annotations

from typing import Final

MOST_NESTED: Final = 100  # values in values: Python's own limit is near 1,000 calls
LARGEST_NUMBER: Final = 2**62  # sizes and counts: a product of torch's stays below 2**63
LARGEST_HEADER_BYTES: Final = 10**8  # of a safetensors file: what that library accepts
MOST_DIMENSIONS: Final = 64  # of a tensor: torch's own limit
MOST_RANK_DIGITS: Final = 9
LONGEST_TAG_BYTES: Final = 200  # names of 255 have room for what marks a folder as partial
