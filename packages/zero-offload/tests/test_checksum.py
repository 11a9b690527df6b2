"""Checksums equal their definitions."""

from __future__ import annotations

import zlib

import pytest
import torch
from zero_offload import _checksum
from zero_offload._checksum import choose_checksummer
from zero_offload._ring import io_library


def _crc32c(data: bytes) -> int:
    """By the definition: bits, least first, over the reversed polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_oracle_is_crc32c() -> None:
    """The check value of the catalogues."""
    assert _crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1003])
@pytest.mark.parametrize("start", [0, 1])
def test_checksums_equal_their_definition(nbytes: int, start: int) -> None:
    """Recorded beside the value by name, they may be checked by another build."""
    tensor = torch.randint(0, 256, (nbytes + start,), dtype=torch.uint8)[start:]
    data = tensor.numpy().tobytes()
    library, _ = io_library()

    plain = choose_checksummer(None).of(tensor)
    native = choose_checksummer(library).of(tensor)

    assert (plain.algorithm, plain.value) == ("crc32", zlib.crc32(data))
    if native.algorithm == "crc32c":
        assert native.value == _crc32c(data)
    else:
        assert native == plain


def test_a_checksum_goes_on_from_piece_to_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values above a GiB are read in pieces; one that counts only the last would miss most."""
    tensor = torch.randint(0, 256, (1003,), dtype=torch.uint8)
    library, _ = io_library()
    both = [choose_checksummer(None), choose_checksummer(library)]
    whole = [each.of(tensor) for each in both]
    monkeypatch.setattr(_checksum, "_BLOCK_BYTES", 100)

    assert [each.of(tensor) for each in both] == whole
