"""What a rank decides can be read, and is not, unless somebody asks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from zero_comm import Group
from zero_engine.planning.tables import in_units
from zero_partition import memory_report

pytestmark = pytest.mark.drawn(2)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_line_says_what_a_sharded_model_takes(group: Group, stage: int) -> None:
    """Bytes are those that the report then finds."""
    logger, kept = logging.getLogger("zero_engine"), _Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        model = parity.build(parity.Chain)
        optimizer = parity.adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=group)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)
    for _ in range(2):
        model(torch.ones(1, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (line,) = kept.lines
    report = memory_report(model)
    assert line.startswith(f"sharding a Chain: stage {stage}, ")
    assert f"at rest {in_units(report.total_bytes)} (parameters" in line
    assert f"optimizer state {in_units(report.optimizer_bytes)}" in line
    assert group.transport in line


PROGRAM = """
import sys, torch, zero_engine
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
on_disk = zero_engine.Offload(optimizer="disk", path=sys.argv[1])
zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage=1, offload=on_disk))
"""


@pytest.mark.parametrize(
    ("level", "says"),
    [("debug", ["unit '", "cuts for AdamW", "page-locked", "direct_bytes", "kernels"]), ("", [])],
)
def test_the_environment_asks_for_lines_and_each_names_its_rank(
    level: str, says: list[str], tmp_path: Path
) -> None:
    """On standard error: what a program prints may be read by another."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=os.environ | {"ZERO_LOG": level, "RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not ran.stdout
    lines = [line for line in ran.stderr.splitlines() if " zero_" in line]
    assert bool(lines) == bool(level)
    assert all(" rank 3: " in line for line in lines)
    assert all(any(text in line for line in lines) for text in says)
