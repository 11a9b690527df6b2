"""examples/finetune_llama.py as a reader starts it: all weights, then adapters on the same base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import scripts
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")
pytest.importorskip("transformers")

EXAMPLE: Final = str(Path(__file__).parents[1] / "examples/finetune_llama.py")
SMALL: Final = ("--examples", "100", "--batch", "4")
HELD_OUT: Final = r"loss (\d+\.\d+) on functions that are held out\n((?:  .*\n){3})"


@pytest.mark.drawn(3)
@pytest.mark.slow
@pytest.mark.cpu_only("torchrun starts ranks of its own")
def test_a_llama_is_finetuned_with_all_weights_and_with_adapters(ranks, tmp_path: Path) -> None:
    """It learns, what is saved generates the same by itself, and a second run goes on."""
    full, lora, base = tmp_path / "full", tmp_path / "lora", tmp_path / "full/base"
    made = [*SMALL, "--steps", "6", "--base-steps", "4", "--out", str(full)]
    given = [*SMALL, "--lora", "--base", str(base), "--out", str(lora)]

    _check(scripts.launch(EXAMPLE, made), full, 6)
    run = scripts.on_ranks(ranks)
    _check(run(EXAMPLE, [*given, "--steps", "4"]), lora, 4)
    again = run(EXAMPLE, [*given, "--steps", "6"])
    _check(again, lora, 6)

    assert re.findall(r"^step (\d+):", again, re.M) == ["5", "6"]
    before = load_file(base / "model.safetensors")
    after = load_file(full / "model/model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    adapters = load_file(lora / "model/adapter_model.safetensors")
    assert adapters
    assert all("lora_" in name for name in adapters)


def _check(printed: str, out: Path, last: int) -> None:
    """Losses fall, the checkpoint is there, and plain transformers agree."""
    (before, _), (after, texts) = re.findall(HELD_OUT, printed)
    assert float(after) < float(before)
    assert texts
    [path] = re.findall(rf"^step {last}: loss \d+\.\d+, checkpoint in (\S+)$", printed, re.M)
    assert Path(path) == out / f"checkpoints/step-{last}"
    assert (Path(path) / "manifest.json").is_file()
    assert "loaded by plain transformers, text is the same" in printed
