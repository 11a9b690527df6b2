"""Limits on sizes and counts in files, which may be untrusted; save() keeps to them as well."""

from __future__ import annotations

from typing import Final

# Levels of values in values; Python's own limit is near 1,000 calls.
MOST_NESTED: Final = 100
# Largest size or count. A product that torch computes stays below 2**63.
LARGEST_NUMBER: Final = 2**62
LARGEST_HEADER_BYTES: Final = 10**8  # limit of the safetensors library
MOST_DIMENSIONS: Final = 64  # torch's own limit
MOST_RANK_DIGITS: Final = 9
# File names have at most 255 bytes; the remaining ones are for the marks of a partial folder.
LONGEST_TAG_BYTES: Final = 200
