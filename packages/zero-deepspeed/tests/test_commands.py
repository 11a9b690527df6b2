"""DeepSpeed's files, where `zero plan` is given one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zero_engine
from zero_engine import ZeroConfig
from zero_engine.cli import main
from zero_engine.planning import GPTSize


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_file_is_planned_as_what_it_says(
    stage: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Who comes from DeepSpeed has one."""
    path = tmp_path / "ds.json"
    content = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    path.write_text(json.dumps(content))
    size = ["--layers", "4", "--hidden", "256", "--world-size", "8", "--json"]

    assert not main(["plan", *size, "--config", str(path)])

    found = json.loads(capsys.readouterr().out)
    expected = zero_engine.plan(GPTSize(4, 256), ZeroConfig(stage), world_size=8).to_dict()
    assert found["config"]["stage"] == stage
    assert found["memory"]["at_rest"] == expected["memory"]["at_rest"]
    assert found["sent_bytes"] == expected["sent_bytes"]
