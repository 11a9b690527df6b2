"""One disk store for all that one model has on disk."""

from __future__ import annotations

from attrs import define, field
from zero_offload import DiskSettings, DiskStore

from ._errors import ConfigError
from ._offload import Offload


@define(eq=False)
class Disk:
    """The store, opened when room is first taken in it, closed when nobody uses it any more.

    Not before: a folder that is missing on one rank is then known to all.
    """

    offload: Offload
    _store: DiskStore | None = field(default=None, init=False)
    _num_users: int = field(default=0, init=False)

    def open(self) -> DiskStore:
        """The store, for one user more.

        Raises:
            zero_offload.StoreError: There is no such folder, or it cannot be written to.
        """
        if self._store is None:
            if self.offload.path is None:
                raise ConfigError("Offload.path: expected a folder on the disk to use, got None")
            self._store = DiskStore(self.offload.path, self.offload.disk or DiskSettings())
        self._num_users += 1
        return self._store

    def close(self) -> None:
        """One user has ended."""
        self._num_users -= 1
        if not self._num_users and self._store is not None:
            self._store.close()
            self._store = None
