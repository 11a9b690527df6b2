"""Training code for transformers and DeepSpeed runs with one import changed, as plain torch would.

The oracle is one process: each batch is that of all ranks, laid end to end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from zero_comm.testing import assert_close

pytest.importorskip("transformers")

import huggingface_script as script
from scripts import WORLD_SIZE, Runner, on_ranks
from transformers import GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

pytestmark = pytest.mark.xdist_group("ranks")

MICRO_BATCH: Final = 2
NUM_MICRO_BATCHES: Final = 2
NUM_EPOCHS: Final = 2
OPTIONS: Final = {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8}
LOSS_SCALE_POWER: Final = 10
SECTIONS: Final[dict[torch.dtype, dict[str, Any]]] = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER}},
    torch.bfloat16: {"bf16": {"enabled": True}},
}


def _configuration(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """A template of the Hub: what depends on the model, or on other keys, is "auto"."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "optimizer": {"type": "AdamW", "params": OPTIONS},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": stage == 3,
        },
        **SECTIONS[dtype],
    }


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.float32), (2, torch.float16), (3, torch.bfloat16)], ids=str
)
def test_a_script_for_transformers_runs_with_one_line_changed(
    ranks, tmp_path: Path, stage: int, dtype: torch.dtype
) -> None:
    """Models of transformers are what people train with ZeRO-3, and they come with such scripts."""
    configuration = _configuration(stage, dtype)
    printed = _run_script(on_ranks(ranks), tmp_path, configuration, recomputes=stage == 3)

    expected = _train_alone(stage, dtype)
    assert printed["batch"] == WORLD_SIZE * MICRO_BATCH * NUM_MICRO_BATCHES
    assert printed["steps"] == expected["steps"]
    # In 16 bits, the gradient of a batch is not to the bit the mean of those of its parts.
    is_cpu = ranks(WORLD_SIZE).device == "cpu"
    atol = 1e-5 if dtype is torch.float32 else 1e-3 if is_cpu else 1e-2  # others round apart
    for what in ("lr", "losses", "grad_norms", "evals", "norms"):
        assert_close(printed[what], expected[what], rtol=atol, atol=atol)
    assert expected["evals"][-1] < expected["losses"][0] - 0.3, "it learns nothing"

    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "model", dtype="auto").eval()
    assert saved.dtype == dtype
    assert_close(_evaluate(saved), printed["evals"][-1], rtol=0, atol=1e-5 if is_cpu else 1e-4)
    prompt = torch.tensor(printed["generated"])[:, :4]
    for _ in range(6):  # greedily
        with torch.no_grad():
            following = saved(input_ids=prompt).logits[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, following], dim=1)
    assert printed["generated"] == prompt.tolist()


def _run_script(
    run: Runner, folder: Path, settings: dict[str, Any], *, recomputes: bool
) -> dict[str, Any]:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(settings))
    arguments = ["--deepspeed", "--deepspeed_config", str(path)]
    arguments += ["--output_dir", str(folder / "model"), "--num_train_epochs", str(NUM_EPOCHS)]
    arguments += ["--gradient_checkpointing"] * recomputes
    printed = run(script.__file__, arguments)
    found = dict(re.findall(r"^(batch|norms|lr|generated|steps) (.*)$", printed, re.MULTILINE))
    return {
        **{name: json.loads(text) for name, text in found.items()},
        "losses": _numbers_after("^loss", printed),
        "grad_norms": _numbers_after("^grad_norm", printed),
        "evals": _numbers_after("eval", printed),
    }


def _numbers_after(word: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{word} (.*)$", text, re.MULTILINE)]


# ---- The oracle ----


def _train_alone(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """One process and plain torch; in 16 bits with masters, as arXiv 1710.03740 has it."""
    set_seed(1234)
    with _device_of_construction(stage):
        masters = script.make_model()
    masters = masters.cpu()
    with torch.no_grad():
        masters.transformer.wpe.weight.mul_(0.5)
    model = script.make_model().to(dtype)
    model.load_state_dict(masters.state_dict())
    optimizer = torch.optim.AdamW(script.group_parameters(masters, 0.1), **OPTIONS)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 100)
    scale = 2.0**LOSS_SCALE_POWER if dtype is torch.float16 else 1.0
    losses, grad_norms, evals = [], [], []
    for epoch in range(NUM_EPOCHS):
        for index, tokens in enumerate(_batches(epoch)):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss.float() / NUM_MICRO_BATCHES * scale).backward()
            losses.append(loss.item())
            _move_gradients(model, masters, scale)
            if (index + 1) % NUM_MICRO_BATCHES == 0:
                grad_norms.append(nn.utils.clip_grad_norm_(masters.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                model.load_state_dict(masters.state_dict())
        evals.append(_evaluate(model))
    embedding = masters.transformer.wte.weight
    moment = optimizer.state[embedding]["exp_avg"]
    return {
        "losses": losses,
        "grad_norms": grad_norms,
        "evals": evals,
        "norms": [embedding.norm().item(), moment.norm().item()],
        "lr": scheduler.get_last_lr(),
        "steps": len(losses) // NUM_MICRO_BATCHES,
    }


def _device_of_construction(stage: int) -> torch.device:
    """Where the script draws the weights: at stage 3 `Init` does so on the device."""
    return torch.device(script.deepspeed.get_accelerator().device_name() if stage == 3 else "cpu")


@torch.no_grad()
def _evaluate(model: nn.Module) -> float:
    tokens = script.Sequences(8, length=12, seed=2).tokens
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss.item()


def _batches(epoch: int) -> Iterator[Tensor]:
    """Of one epoch: those of both ranks, laid end to end."""
    dataset = script.Sequences(32, length=12, seed=1)
    orders = []
    for rank in range(WORLD_SIZE):
        sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=rank)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    for start in range(0, len(orders[0]), MICRO_BATCH):
        yield torch.cat([dataset.tokens[order[start : start + MICRO_BATCH]] for order in orders])


def _move_gradients(model: nn.Module, masters: nn.Module, scale: float) -> None:
    for param, master in zip(model.parameters(), masters.parameters(), strict=True):
        assert param.grad is not None
        grad = param.grad.float() / scale
        master.grad = grad if master.grad is None else master.grad + grad
        param.grad = None
