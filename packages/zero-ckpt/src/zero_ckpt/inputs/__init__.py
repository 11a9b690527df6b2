"""Savers of a checkpointed function's inputs, until backward runs the function again.

A checkpointer gives a call's inputs to a saver and gets an `AbstractKept`, whose `restore` returns
them. savers.py has this interface, and `KeepSaver`, which keeps inputs as they are. `PackedSaver`
(packed.py) uses less memory of the device: inputs are split over ranks (split.py), copied to the
host, or written into memory that is allocated once. memory.py counts the bytes that are kept.

Read savers.py first. What must never happen: `restore` returns other values, shapes or strides than
were saved, or an input lives longer than the graph of its call.
"""
