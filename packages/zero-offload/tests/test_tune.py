"""Tuning returns settings that were measured, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from zero_offload import DiskSettings, DiskStore, StoreError, host_memory, tune
from zero_offload.testing import faults


def test_tune_prints_a_table_and_returns_its_first_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user believes settings whose figures are beside those of the others."""
    # It takes a quarter of what is free, and 256 MiB at most.
    monkeypatch.setattr(os, "statvfs", faults.free_bytes(32 * 2**20).statvfs)

    settings = tune(tmp_path, seconds=0)

    title, _, *rows = capsys.readouterr().out.splitlines()
    transport, block_kib, depth, *speeds = rows[0].split()
    assert title.startswith("one file of 8 MiB")
    assert transport == ("io_uring" if settings.uses_uring else "threads")
    assert int(block_kib) * 1024 == settings.block_bytes
    assert int(depth) == settings.queue_depth
    assert all(float(speed) > 0 for speed in speeds)
    assert isinstance(settings, DiskSettings)
    assert list(tmp_path.iterdir()) == []
    assert "tune" not in host_memory()
    with DiskStore(tmp_path, settings) as store:
        store.write("x", torch.zeros(3)).result()


def test_a_place_that_is_none_is_told(tmp_path: Path) -> None:
    """Usually the disk is not mounted."""
    with pytest.raises(StoreError, match="no folder"):
        tune(tmp_path / "missing")
