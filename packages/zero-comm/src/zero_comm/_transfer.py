"""One collective among ranks that read each other's memory, and what its peers lend for it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen
from torch import Tensor

from ._errors import CommError
from ._process_memory import read_into, why
from ._watch import Launch


@frozen
class RemoteBuffer:
    """A peer's buffer, lent until this rank is done with it."""

    lender: int  # rank
    reader: int
    pid: int
    address: int
    num_bytes: int

    def read_into(self, tensor: Tensor, *, offset: int) -> None:
        """Fill `tensor` from `offset` bytes into the buffer.

        Raises:
            CommError: The peer has ended, or has no such memory any more.
        """
        try:
            read_into(tensor, self.pid, self.address + offset)
        except OSError as error:
            raise CommError(
                f"rank {self.reader} could not read a buffer that rank {self.lender} (process "
                f"{self.pid}) had lent: {why(error)}. A buffer must stay until its wait() has "
                "returned, on every rank, and a result must go to memory that can be written"
            ) from error


@define(eq=False)
class Transfer:
    """One collective of this rank: its buffer is lent to every peer until all are done."""

    tag: int
    buffer: Tensor
    carry_out: Callable[[dict[int, RemoteBuffer]], None]  # receives every peer's buffer, by rank
    is_carried_out: bool = False
    done_by: set[int] = field(factory=set)  # peers
    error: Exception | None = None
    launch: Launch | None = None  # where the group's watch counts it
    done_entry: int = 0  # how many entries the journal has when it says that this rank is done
    num_bytes: tuple[int, ...] | None = None  # of each rank's buffer; all are as ours when None
