"""Settings of a store on disk, and the status that tells which of them it uses."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of

_ALIGN_BYTES = 4096


def _whole_pages(_: object, attribute: object, block_bytes: int) -> None:
    if block_bytes < _ALIGN_BYTES or block_bytes % _ALIGN_BYTES or block_bytes > 2**30:
        raise ValueError(
            f"block_bytes must be a multiple of {_ALIGN_BYTES} up to 2**30, got {block_bytes}"
        )


@frozen(kw_only=True)
class DiskSettings:
    """Settings of how a `DiskStore` moves bytes. `tune(path)` finds good ones for a device.

    Args:
        block_bytes: Bytes of one request to the device; a multiple of 4096.
        queue_depth: Requests in flight for one value that is read or written.
        num_workers: Values read or written at the same time.
        uses_uring: Use io_uring where it is available; else threads with pread and pwrite.
        is_direct: Use O_DIRECT where the file system has it: no copy in the page cache.
        has_checksums: Record a checksum of what is written, and compare it with what is read.
    """

    block_bytes: int = field(default=4 * 2**20, validator=[instance_of(int), _whole_pages])
    queue_depth: int = field(default=8, validator=[instance_of(int), ge(1)])
    num_workers: int = field(default=2, validator=[instance_of(int), ge(1)])
    uses_uring: bool = True
    is_direct: bool = True
    has_checksums: bool = False


@frozen(kw_only=True)
class DiskStatus:
    """Features that a `DiskStore` uses, and why not the others; the reason of one in use is empty.

    Attributes:
        transport: "io_uring" or "threads".
        uring_reason: Why not io_uring.
        direct_bytes: Alignment of O_DIRECT transfers; 1 through the page cache.
        direct_reason: Why not O_DIRECT.
        lock_reason: Why a later job cannot tell that this one is dead, and leaves its files alone.
        checksum: "crc32c" (native), "crc32" (zlib) or "".
    """

    transport: str
    uring_reason: str
    direct_bytes: int
    direct_reason: str
    lock_reason: str
    checksum: str
