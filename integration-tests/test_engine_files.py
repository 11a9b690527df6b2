"""An engine that loads what another saved goes on as that one did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import parity
import pytest
import torch
import zero_engine
from engines import assert_weights, build_engine, engine_config, run_micro_batch, weights_of
from one_dtype import OneDtype
from parity import ZeroConfig
from safetensors.torch import load_file
from torch import Tensor
from zero_comm import AgreementError, Group
from zero_comm.testing import assert_close
from zero_engine import ConfigError, Engine, FileError, Precision
from zero_engine.engine import DynamicLossScale

COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps", "cur_scale")


def _facts(engine: Engine) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in COUNTERS} | {"lr": engine.get_lr()}


def _fp16(group: Group, stage: int) -> Engine:
    settings = engine_config(
        group,
        stage,
        accumulation_steps=2,
        loss_scale=DynamicLossScale(initial_power=16, window=2, hysteresis=1),
    )
    zero = ZeroConfig(stage, precision=Precision(params=torch.float16))
    return build_engine(group, attrs.evolve(settings, zero=zero), OneDtype)


def _steps(engine: Engine, steps: range) -> list[Any]:
    """With an overflow now and then, so that the scale and its counters move."""
    seen: list[Any] = []
    for step in steps:
        for micro in range(2):
            factor = 3e38 if step % 4 == 1 else 1.0
            loss = run_micro_batch(engine, step, micro, factor=factor)
            seen.append(loss)
        seen.append(_facts(engine))
    return seen


def test_scale_counters_and_scheduler_go_on(group: Group, tmp_path: Path) -> None:
    """A scale that starts anew skips its first steps, and a schedule that does warms up twice."""
    engine = _fp16(group, 3)
    _steps(engine, range(6))
    state = {"position": 12, "names": ("a", "b")}
    assert engine.save_checkpoint(str(tmp_path), client_state=state) is True
    saved, expected = _facts(engine), _steps(engine, range(6, 11))
    assert saved["skipped_steps"] > 0 and saved["cur_scale"] != 2.0**16

    again = _fp16(group, 2)  # which reduces as often
    run_micro_batch(again, 0, 0)  # begun, and forgotten
    with pytest.warns(UserWarning, match="gradients are not saved"):
        again.save_checkpoint(tmp_path / "other")
    path, found = again.load_checkpoint(str(tmp_path))

    assert path == str(tmp_path / "global_step6") and found == state
    assert _facts(again) == saved
    assert _steps(again, range(6, 11)) == expected
    assert_weights(again, weights_of(engine))


def test_a_folder_that_is_none_is_refused_on_all_ranks(group: Group, tmp_path: Path) -> None:
    """An empty variable would fill the working directory; some scripts have one on rank 0 only."""
    engine = build_engine(group, engine_config(group, 2))
    for nowhere in ("", None):
        with pytest.raises(ConfigError, match=r"expected the path of a folder .*got (''|None) \("):
            engine.save_checkpoint(nowhere)
        with pytest.raises(AgreementError, match="folder"):
            engine.save_checkpoint(nowhere if group.rank else tmp_path)

    engine.save_checkpoint(tmp_path, tag=6)

    assert (tmp_path / "latest").read_text() == "6"
    with pytest.raises(FileError, match="expected a checkpoint '7', found '6'"):
        engine.load_checkpoint(tmp_path, tag=7)
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    with pytest.raises(ConfigError, match=r"extra\['f'\]: expected .* got a builtin_function"):
        engine.save_checkpoint(tmp_path, client_state={"f": print})


def test_the_first_start_of_a_script_that_resumes_is_a_warning(
    group: Group, tmp_path: Path
) -> None:
    """Scripts for DeepSpeed load before they have saved; what is something else stays an error."""
    engine = build_engine(group, engine_config(group, 2))
    for missing in (tmp_path, tmp_path / "no"):
        said = "no such folder" if missing.name == "no" else "contains no complete checkpoint"
        with pytest.warns(UserWarning, match=f"{missing}: {said}; the training begins anew"):
            assert engine.load_checkpoint(missing) == (None, None)
        with pytest.raises(FileError, match="pass missing_ok=True"):
            engine.load_checkpoint(missing, missing_ok=False)
    (tmp_path / "file").touch()
    (tmp_path / "weights").mkdir(exist_ok=True)  # by each rank
    (tmp_path / "weights" / "model.safetensors").touch()
    for other in ("file", "weights"):
        with pytest.raises(FileError, match="expected the folder of all checkpoints"):
            engine.load_checkpoint(tmp_path / other)


def test_parts_of_a_checkpoint_are_loaded_alone(group: Group, tmp_path: Path) -> None:
    """Fine-tuning takes the weights of a run, and nothing else of it."""
    engine = build_engine(group, engine_config(group, 2))
    for step in range(2):
        run_micro_batch(engine, step)
    engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)
    engine.save_checkpoint(tmp_path)
    fresh = _facts(build_engine(group, engine_config(group, 3)))

    def load(**options: Any) -> Engine:
        loaded = build_engine(group, engine_config(group, 3))
        loaded.load_checkpoint(tmp_path, **options)
        assert_weights(loaded, weights_of(engine))
        return loaded

    assert _facts(load(load_module_only=True)) == fresh
    no_moments = load(tag="aside", load_optimizer_states=False)
    assert (no_moments.global_steps, no_moments.lr_scheduler.last_epoch) == (2, 2)
    assert not no_moments.optimizer.state
    no_schedule = load(load_lr_scheduler_states=False)
    assert no_schedule.optimizer.state and no_schedule.lr_scheduler.last_epoch == 0


def test_weights_alone_are_saved_for_others(group: Group, tmp_path: Path) -> None:
    """What is deployed has no moments, and is read without this library."""
    engine = build_engine(group, engine_config(group, 3))

    assert engine.save_16bit_model(tmp_path) and engine.save_16bit_model(tmp_path, "m.safetensors")
    engine.save_16bit_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True)

    expected = dict(weights_of(engine))
    if group.rank:
        return
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    parity.assert_same_weights(state, expected, what="torch.save")
    found: dict[str, Tensor] = load_file(tmp_path / "m.safetensors")
    del expected["head.weight"]  # tied
    assert_close(found, expected, rtol=0, atol=0)
    trained = load_file(tmp_path / "trained.safetensors")
    assert found.keys() - trained.keys() == {"frozen"} and len(list(tmp_path.iterdir())) == 3


def test_what_a_file_asks_for_and_another_was_passed_is_named(group: Group) -> None:
    """DeepSpeed takes what was passed; in silence, a rate in the file would be taken for real."""
    model = parity.build(parity.tiny_float32)
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    said = r"optimizer\.params\.lr, scheduler\.params\.warmup_num_steps: not used, as initialize"
    with pytest.warns(UserWarning, match=said):
        engine, made, *_ = zero_engine.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=file, group=group
        )
    assert made is optimizer and engine.get_lr() == [0.1]
