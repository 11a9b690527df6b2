"""Where things rest changes no bit of what is trained."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from one_dtype import OneDtype
from parity import ZeroConfig
from residences import Blocks, Cell, Optimizers, assert_same, cells, parts_of, sharded, train
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import Precision
from zero_offload import CPUAdam
from zero_partition import MemoryReport, memory_report

PRECISIONS: Final = {
    "fp32": None,
    "bf16": Precision(params=torch.bfloat16),
    "fp16": Precision(params=torch.float16),
}


# Which cell has which precision is by turns; masters rest as fp32's parameters do. Gradients of
# stage 2 rest as those of stages 1 and 3 do, and its state as that of stage 1.
TURNS: Final = {(1, "fp32"): (0, 2), (1, "bf16"): (1, 2), (2, "fp32"): (1, 4)} | {
    (3, precision): (first, 3) for first, precision in enumerate(PRECISIONS)
}


@pytest.mark.parametrize(("stage", "precision"), TURNS)
def test_every_residence_trains_the_same_bits(
    ranks, tmp_path: Path, stage: int, precision: str
) -> None:
    """Offload is chosen by memory alone, and a run must not be another one for it."""
    ranks(2).run(_same_bits, folder=str(tmp_path), stage=stage, precision=precision, timeout_s=120)

    assert not list(tmp_path.iterdir()), "files are left"


def _same_bits(group: Group, folder: str, stage: int, precision: str) -> None:
    def run(cell: Cell | None) -> dict[str, Any]:
        settings = {"stage": stage, "precision": PRECISIONS[precision]}
        with sharded(group, cell, folder, make=Blocks, **settings) as (model, optimizer):
            losses = train(model, optimizer, group.rank)
            return parts_of(model, optimizer) | {"losses": losses}

    expected = run(None)
    first, step = TURNS[stage, precision]
    for cell in itertools.islice(cells(stage), first, None, step):
        assert_same(run(cell), expected, f"{cell}")


NARROW: Final[dict[str, Optimizers]] = {
    "AdamW": lambda model: torch.optim.AdamW(parity.param_groups(model), lr=1e-2),
    "CPUAdam": lambda model: CPUAdam(
        parity.param_groups(model), lr=1e-2, masters=False, state_dtype=None
    ),
}


@pytest.mark.cpu_only("the optimizers are CPUAdam, and AdamW with a fused kernel of the CPU")
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.ranks(timeout_s=120)
def test_what_is_updated_in_16_bits_is_so_wherever_it_rests(
    group: Group, tmp_path: Path, name: str
) -> None:
    """Who asks for no masters has no memory for them, on the host least of all."""
    precision = Precision(params=torch.bfloat16, masters=None)

    def run(cell: Cell | None, stage: int) -> tuple[dict[str, Any], MemoryReport]:
        settings: Any = {"stage": stage, "precision": precision, "make_optimizer": NARROW[name]}
        with sharded(group, cell, tmp_path, make=Blocks, **settings) as (model, optimizer):
            found = {"losses": train(model, optimizer, group.rank)}
            return found | parts_of(model, optimizer), memory_report(model)

    for stage, cells_of_stage in CELLS.items():
        expected, _ = run(None, stage)
        moments = [value for key, value in expected.items() if "exp_avg" in key]
        assert {value.dtype for value in moments} == {torch.bfloat16}
        for cell in cells_of_stage:
            found, held = run(cell, stage)
            assert_same(found, expected, f"{cell}")
            if cell == Cell(1, "host"):
                num_columns = 2 * len(moments)  # each begins a cache line
                state = sum(value.nbytes for value in moments)
                assert state <= held.host_bytes <= state + 64 * num_columns
                assert held.optimizer_bytes == 0


CELLS: Final = {
    1: (Cell(1, "host"), Cell(1, "disk", fraction=0.3)),
    3: (Cell(3, "host"), Cell(3, "disk", "disk", residence="poisoned"), Cell(3, "device", "host")),
}


@pytest.mark.ranks(1)
def test_a_file_says_in_which_dtype_state_is_kept_with_offload_and_without(group: Group) -> None:
    """`bf16_optimizer_states` was asked for to save memory, or left out to keep precision."""

    def run(
        has_masters: bool, is_bf16: bool, device: str
    ) -> tuple[dict[str, Any], set[torch.dtype]]:
        file = {
            "train_batch_size": 2,
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": not has_masters,
                "bf16_optimizer_states": is_bf16,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
        }
        model = parity.build(Blocks)
        engine, optimizer, _, _ = zero_engine.initialize(model=model, config=file, group=group)
        for step in range(5):
            engine.backward(parity.loss_of(engine, parity.batch(step, 0, 0)))
            engine.step()
        dtypes = {v.dtype for state in optimizer.state.values() for v in state.values() if v.dim()}
        weights = zero_engine.full_state_dict(model)
        zero_engine.unshard(model, optimizer)
        return weights, dtypes

    is_cpu, cases = group.device.type == "cpu", [(False, True), (True, False)]
    if group.device.type in ("cpu", "cuda"):  # for which there are kernels
        cases.append((False, False))
    for has_masters, is_bf16 in cases:
        expected, of_device = run(has_masters, is_bf16, "none")
        weights, of_host = run(has_masters, is_bf16, "cpu")
        assert of_device == of_host == {torch.bfloat16 if is_bf16 else torch.float32}
        if not has_masters and is_cpu:  # the device's kernels round apart from the host's
            assert_same(weights, expected, f"{is_bf16=}: state on the host")
        assert_close(weights, expected)  # our kernel rounds apart from torch's


@pytest.mark.cpu_only("CPUAdam steps tensors of the CPU")
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, None), (1, None), (3, None), (1, torch.bfloat16), (3, torch.bfloat16)]
)
def test_the_native_adam_steps_shards_and_clips_on_the_way(
    group: Group, stage: int, dtype: torch.dtype | None
) -> None:
    """Shards are slices of other memory; unscaling and clipping are left to the step."""
    precision = None if dtype is None else Precision(params=dtype)
    found = []
    for make in (torch.optim.AdamW, CPUAdam):
        model = parity.build(OneDtype)
        optimizer = make(parity.param_groups(model), lr=1e-2)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, precision=precision), group=group)
        for step in range(4):
            (parity.loss_of(model, parity.batch(step, 0, group.rank)) * 16.0).backward()
            report = zero_engine.unscale_and_clip_(model, scale=16.0, max_norm=0.1, in_step=True)
            assert report.is_in_step == (step > 0 and make is CPUAdam)
            optimizer.step()
            optimizer.zero_grad()
        found.append(zero_engine.full_state_dict(model))
    assert_close(*found, rtol=1e-5, atol=1e-6)
