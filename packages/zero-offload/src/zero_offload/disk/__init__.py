"""Stores of tensors outside the device, by key: on disk and in host memory.

`DiskStore` (disk_store.py) keeps one file per key (file.py) in a private folder (folder.py) that is
locked while its job lives. transport.py moves bytes past the page cache, in blocks of which several
are under way, by native threads where they are built. settings.py holds the choices and tune.py
measures a disk to make them. host_store.py has the same methods over memory, for state on the host
and for tests.

Reads and writes return a future at once; values are borrowed until it ends. What must never happen:
a read gives other bytes than were written last. Files are checked for changes when they are opened,
and by checksums where those are on.
"""
