"""The one system call that reads another process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from zero_comm import _process_memory
from zero_comm._process_memory import read, read_into


def test_a_tensor_is_filled_from_an_address() -> None:
    """Bit for bit, whatever the dtype, and not a byte more."""
    source = torch.randn(7).bfloat16()
    target = torch.zeros(9, dtype=torch.bfloat16)

    read_into(target[1:8], os.getpid(), source.data_ptr())

    assert torch.equal(target[1:8], source)
    assert target[0] == target[8] == 0


def test_a_read_that_the_kernel_cuts_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at 2 GiB, which is a buffer of half a billion parameters."""
    kernel = _process_memory._READ

    def cut_short(*arguments: Any) -> int:
        for span in (arguments[1]._obj, arguments[3]._obj):
            span.num_bytes = min(3, span.num_bytes)
        return kernel(*arguments)

    monkeypatch.setattr(_process_memory, "_READ", cut_short)
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)

    read_into(target, os.getpid(), source.data_ptr())

    assert torch.equal(target, source)


def test_nothing_is_read_for_nothing() -> None:
    """An empty chunk has no address, and a peer that lends one may have ended."""
    read_into(torch.zeros(0), pid=0, address=0)


def test_memory_that_is_not_there_is_an_error() -> None:
    """A short copy taken for a whole one is a wrong gradient."""
    word = ctypes.c_int64()

    with pytest.raises(OSError, match="Bad address"):
        read(os.getpid(), 8, into=ctypes.addressof(word), num_bytes=8)


def test_a_process_that_has_ended_is_known_by_its_error() -> None:
    """Peers tell an end from a refusal by it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    word = ctypes.c_int64()

    with pytest.raises(ProcessLookupError):
        read(ended.pid, 4096, into=ctypes.addressof(word), num_bytes=8)
