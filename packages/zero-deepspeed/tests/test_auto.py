"""A key that says "auto" means what Hugging Face's Trainer makes of it, or is an error."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import zero_deepspeed as deepspeed
import zero_engine
from torch import nn
from zero_engine import ConfigError, ZeroConfig
from zero_engine.engine import EngineConfig

AUTO: Final = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
BATCH: Final = {"train_micro_batch_size_per_gpu": 4}
OPEN: Final = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4},
    },
}


def _model(**config: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**config)
    return model


@pytest.mark.parametrize(
    "model",
    [
        _model(hidden_size=768),
        _model(hidden_sizes=[96, 768, 192]),
        _model(text_config=SimpleNamespace(hidden_sizes=(768,)), vision_config=None),
    ],
    ids=["one", "several", "text"],
)
def test_sizes_come_from_the_hidden_size(model: nn.Module) -> None:
    """As transformers documents: 0.9 of its square to prefetch, ten of it to keep whole."""
    zero = ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3, **AUTO}}, model=model)

    assert zero == ZeroConfig(stage=3, prefetch_numel=int(0.9 * 768**2), small_param_numel=7680)


@pytest.mark.parametrize("name", AUTO)
def test_without_a_hidden_size_auto_is_an_error(name: str) -> None:
    """A guess would be a bound on memory that nobody chose."""
    path = f"zero_optimization.{name}"
    for model in (None, _model(vocab_size=3), nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match=rf"^{path}: .*model=.*auto=") as caught:
            raw = {"zero_optimization": {"stage": 3, name: "auto"}}
            ZeroConfig.from_deepspeed(raw, model=model)
        assert f'auto={{"{path}": ...}}' in str(caught.value)


@pytest.mark.parametrize("model", [None, _model(hidden_size=768)], ids=["no-model", "model"])
def test_keys_that_are_not_read_may_stay_auto(model: nn.Module | None) -> None:
    """Trainers ship one file for all stages, with both 16-bit sections in it."""
    raw = {
        "zero_optimization": {"stage": 2, **AUTO},
        "fp16": {"enabled": False, "initial_scale_power": "auto", "loss_scale": "auto"},
        "bf16": {"enabled": True},
    }
    optimizer = {"type": "adam", "params": {"lr": "auto"}}  # of whoever builds it in a plain loop

    config = EngineConfig.from_deepspeed(BATCH | raw, model=model)

    assert (config.zero.stage, config.zero.small_param_numel) == (2, 0)
    assert ZeroConfig.from_deepspeed(raw | {"optimizer": optimizer}, model=model) == config.zero


def test_a_trainers_file_is_resolved_whole() -> None:
    """The file that transformers' documentation gives for stage 3, but for what is not built."""
    raw = OPEN | {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", **AUTO}}
    given = {
        "fp16.enabled": False,
        "bf16.enabled": True,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.1,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "steps_per_print": 5,  # not in the file: nothing asks for it
    }

    with pytest.warns(UserWarning, match="reduce_bucket_size"):
        config = EngineConfig.from_deepspeed(
            raw, world_size=2, model=_model(hidden_size=10), auto=given
        )

    assert config.train_batch_size == 12
    assert config.max_norm == 0.5
    assert config.zero.prefetch_numel == 90
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 1e-4
    assert config.scheduler is not None
    expected = {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 4}
    assert config.scheduler.params == expected
    assert config.steps_per_print is None
    origins = {row.key: row.origin for row in config.sources}
    assert origins["zero_optimization.stage3_prefetch_bucket_size"] == "auto"
    assert origins["train_batch_size"] == "inferred"


@pytest.mark.parametrize(
    "path",
    [
        "gradient_clipping",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.offload_optimizer.device",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
    ],
)
def test_what_nothing_resolves_is_an_error_with_its_path(nested, path: str) -> None:
    """The word is no value: it would end up in an optimizer."""
    raw = nested(
        {".stage": 3, "optimizer.type": "adam", "scheduler.type": "OneCycle", path: "auto"}
    )

    with warnings.catch_warnings(), pytest.raises(ConfigError) as caught:
        warnings.simplefilter("ignore")
        EngineConfig.from_deepspeed(BATCH | raw)

    assert str(caught.value).startswith(f'{path}: expected a value for "auto"')


def test_answers_are_checked_like_the_file() -> None:
    """Two places that say different things must not be settled by which was read last."""
    key = "gradient_clipping"
    for raw, auto, message in (
        ({}, {"gradient_cliping": 1.0}, r"^gradient_cliping: .*gradient_clipping"),
        ({key: "auto"}, {key: "1"}, r"^gradient_clipping: .*'1'"),
        ({key: 0.5}, {key: 1.0}, rf"^{key}: expected 1\.0, as auto=.* says, got 0\.5 in the file"),
        ({key: "auto"}, {key: "auto"}, r"^gradient_clipping: "),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_deepspeed({**BATCH, **raw}, auto=auto)
    with pytest.raises(ConfigError, match=r"auto with a configuration of DeepSpeed's.*ZeroConfig"):
        zero_engine.initialize(model=nn.Linear(4, 4), config=ZeroConfig(1), auto={key: 1.0})


def test_all_answers_that_contradict_the_file_are_listed_at_once() -> None:
    """Trainer's arguments and a template differ in several, and each run showed one."""
    raw = BATCH | {"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 3}
    auto = {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_deepspeed(raw, auto=auto)
    *lines, remedy = str(caught.value).split("\n  ")
    assert [line.split(":")[0] for line in lines] == [*auto]
    assert remedy == 'change one, or write "auto" in the file'


def test_all_that_is_left_open_is_listed_at_once() -> None:
    """Who fills in a template wants to do it in one go."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_deepspeed(OPEN, auto={"optimizer.params.eps": 1e-8})

    assert str(caught.value).startswith('train_batch_size: expected a value for "auto", got none')
    left = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    left += ["gradient_clipping", "fp16.enabled", "bf16.enabled", "scheduler.params.warmup_max_lr"]
    left += [f"optimizer.params.{name}" for name in ("lr", "betas", "weight_decay")]
    answers = str(caught.value).partition("auto=")[2]
    assert {part.split('"')[1] for part in answers.split(",")} == set(left)


@pytest.mark.parametrize(
    ("initialize", "dtype"),
    [
        (zero_engine.initialize, torch.float32),
        (zero_engine.initialize, torch.float16),
        (deepspeed.initialize, torch.bfloat16),
    ],
    ids=["fp32", "fp16", "theirs, bf16"],
)
def test_what_follows_from_arguments_is_filled_in(initialize: Any, dtype: torch.dtype) -> None:
    """An optimizer has its options, a model its dtype, and two batch sizes give the third."""
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.8, 0.9))
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)  # has begun to warm up
    engine, same, _, scheduler = initialize(
        args=SimpleNamespace(train_micro_batch_size_per_gpu=3),
        model=model,
        optimizer=optimizer,
        config=OPEN,
        auto={"gradient_clipping": 0.5, "gradient_accumulation_steps": 2},
    )

    assert same is optimizer
    assert engine.train_batch_size() == 6
    assert engine.gradient_clipping() == 0.5
    assert engine.fp16_enabled() is (dtype is torch.float16)
    assert engine.bfloat16_enabled() is (dtype is torch.bfloat16)
    assert engine.config.optimizer.params["lr"] == 0.25
    assert engine.config.optimizer.params["betas"] == (0.8, 0.9)
    assert scheduler is not None
    assert engine.config.scheduler.params["warmup_max_lr"] == 0.25


def test_a_section_that_is_not_used_may_stay_open() -> None:
    """A script that brings its own optimizer and scheduler keeps the file of one that does not."""
    raw = {**BATCH, "optimizer": OPEN["optimizer"], "scheduler": {"type": "WarmupDecayLR"}}
    raw["scheduler"]["params"] = {"total_num_steps": "auto", "warmup_max_lr": "auto"}
    model = nn.Linear(4, 4)

    engine, *_ = zero_engine.initialize(
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        config=raw,
    )

    assert engine.get_lr() == [0.5]
