"""transformers' own Trainer, on two ranks, over sharded models: its numbers, and its files."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from high_water import HighWater, giving_memory_back, needs_high_water
from torch import Tensor
from zero_comm import Group
from zero_comm.testing import RankPool, assert_close, equal
from zero_engine import ConfigError, Precision, ZeroConfig, full_state_dict
from zero_partition import PartitionError

transformers = pytest.importorskip("transformers")

from zero_engine.integrations.transformers import (  # noqa: E402
    ZeroSeq2SeqTrainer,
    ZeroTrainer,
)

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

VOCABULARY: Final = 29
STILL: Final = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # no dropout


def _as_torchrun(group: Group) -> None:
    """What torchrun says in the environment, which Accelerate looks at; a run's end restores it."""
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(OMP_NUM_THREADS="1")
    _on_device_of(group)


def _on_device_of(group: Group) -> None:
    """Let Accelerate use the ranks' device, of a kind that it need not know."""
    if group.device.type != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(group.device)


def _zero(stage: int) -> ZeroConfig:
    """Each small block is gathered by itself."""
    return ZeroConfig(stage=stage, min_unit_bytes=0, window=1)


def _args(folder: Any, kind: Any = None, **options: Any) -> Any:
    told = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "save_strategy": "no",
    }
    return (kind or transformers.TrainingArguments)(str(folder), **told | options)


def _gpt2(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def _sequences(num: int, seed: int = 2) -> list[dict[str, Tensor]]:
    """Counting in steps of different size; the first tokens of some are not to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        start, stride, hidden = torch.randint(1, 6, (3,), generator=generator).tolist()
        tokens = (start + stride * torch.arange(8)) % VOCABULARY
        labels = torch.where(torch.arange(8) < hidden, -100, tokens)
        found.append({"input_ids": tokens, "labels": labels})
    return found


def _logged(trainer: Any, *names: str) -> list[Any]:
    """What the log has under these names, in order."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def _train(model: Any, args: Any, *, zero: Any = None, **options: Any) -> Any:
    """By the host's own Trainer where `zero` is None."""
    options = {"train_dataset": _sequences(13), **options}
    if zero is None:
        kind = _AsOnGPU if args.fp16 else transformers.Trainer
        trainer = kind(model=model, args=args, **options)
    else:
        trainer = ZeroTrainer(model=model, args=args, zero=zero, **options)
    trainer.train()
    return trainer


# ---- Numbers ----


OPTIONS: Final[dict[str, dict[str, bool]]] = {
    "fp32": {},
    "bf16 and recomputed": {"bf16": True, "activation_checkpointing": True},
    "fp16": {"fp16": True},
}


class _AsOnGPU(transformers.Trainer):
    """The host's own, with the autocast and scaler that it leaves out on a CPU, silently."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "way",
    [
        "fp32",
        "bf16 and recomputed",
        pytest.param("fp16", marks=pytest.mark.cpu_only("Accelerate knows devices by name")),
    ],
)
@pytest.mark.ranks(timeout_s=120)
def test_numbers_are_those_of_ddp(group: Group, tmp_path: Path, way: str) -> None:
    """The law: dropout, schedule, uneven last batches, evaluation, and nothing else changes."""
    _as_torchrun(group)
    found = {}
    for stage in (None, 1, 2, 3):
        args = _args(tmp_path, num_train_epochs=2, eval_strategy="epoch", **OPTIONS[way])
        zero = None if stage is None else _zero(stage)
        trainer = _train(_gpt2(), args, zero=zero, eval_dataset=_sequences(5, seed=3))
        weights = trainer.model.state_dict() if zero is None else full_state_dict(trainer.model)
        found[stage] = (
            _logged(trainer, "loss", "eval_loss", "learning_rate"),
            _logged(trainer, "grad_norm"),
            weights,
        )
    logs, norms, weights = found.pop(None)
    assert logs[-2] < logs[0] - 0.5, "it learns nothing"
    for stage, (their_logs, their_norms, their_weights) in found.items():
        assert their_logs == logs, stage
        assert_close(their_norms, norms, rtol=1e-5, atol=0)
        if group.rank == 0:
            parity.assert_same_weights(their_weights, weights, what=f"stage {stage}")


@pytest.mark.ranks(timeout_s=120)
def test_accumulated_and_clipped_it_is_the_plain_loop(group: Group, tmp_path: Path) -> None:
    """Its bits, and DDP's numbers; the norm in the log is that of all ranks' gradients."""
    _as_torchrun(group)
    told = {
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 3,  # of 5 batches: the last step has two
        "max_grad_norm": 0.1,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
    }
    data = _sequences(19)
    ddp = _train(_gpt2(**STILL), _args(tmp_path, **told), train_dataset=data)
    for stage in (1, 2, 3):
        options = {"args": _args(tmp_path, **told), "zero": _zero(stage)}
        trainer = _train(_gpt2(**STILL), train_dataset=data, **options)
        weights = full_state_dict(trainer.model)
        for name in ("loss", "grad_norm"):
            assert_close(_logged(trainer, name), _logged(ddp, name), rtol=1e-5, atol=0)
        norms, expected = _plain_loop(group, stage, trainer)
        rtol = 0 if group.device.type == "cpu" else 1e-5  # others scale the loss in another order
        assert_close(_logged(trainer, "grad_norm"), norms, rtol=rtol, atol=0)
        assert min(norms) > 0.1, "nothing is clipped"
        if group.rank == 0:
            for name, value in ddp.model.state_dict().items():
                assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
            if not rtol:
                parity.assert_same_weights(weights, expected, what=f"stage {stage}")


@pytest.mark.ranks(timeout_s=180)
@pytest.mark.parametrize("way", ["fp32", "bf16"])
def test_a_second_trainer_is_that_of_ddp(group: Group, tmp_path: Path, way: str) -> None:
    """Two phases, or a notebook's cell that is run again; an evaluation in between."""
    _as_torchrun(group)
    told: Any = {"num_train_epochs": 1} | ({"bf16": True} if way == "bf16" else {})

    def run(*stages: int | None) -> Any:
        model, logs = _gpt2(), []
        for number, stage in enumerate(stages):
            zero = None if stage is None else _zero(stage)
            args = _args(tmp_path, learning_rate=1e-2 / (number + 1), **told)
            data = {"train_dataset": _sequences(13, seed=number)}
            trainer = _train(model, args, zero=zero, **data)
            logs += _logged(trainer, "loss")
            if number == 1:
                kind = transformers.Trainer if zero is None else ZeroTrainer
                more = {} if zero is None else {"zero": zero}
                # The host's own leaves a mark by which the next one would not average gradients.
                seen = copy.deepcopy(model) if zero is None else model
                other = kind(model=seen, args=args, eval_dataset=_sequences(5, seed=3), **more)
                logs.append(other.evaluate()["eval_loss"])
        if stages[0] is None:
            return logs, model.state_dict()
        weights = full_state_dict(model)
        zero_engine.unshard(model)
        assert "forward" not in vars(model) and not hasattr(model, "_is_accelerate_prepared")
        return logs, weights

    logs, weights = run(None, None, None)
    for stages in ((1, 1, 1), (3, 3, 3), (2, 3, 1)):
        their_logs, their_weights = run(*stages)
        assert their_logs == logs, stages
        if group.rank == 0:
            parity.assert_same_weights(their_weights, weights, what=str(stages))


@pytest.mark.ranks(timeout_s=180)
@pytest.mark.parametrize("only_model", [False, True], ids=["whole", "weights alone"])
def test_a_checkpoint_of_the_hosts_own_is_resumed_from(
    group: Group, tmp_path: Path, only_model: bool
) -> None:
    """A run that began under DDP goes on sharded, with its optimizer's state if that is there."""
    _as_torchrun(group)
    told = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    first = _args(tmp_path, save_only_model=only_model, **told)
    _train(_gpt2(**STILL), first)
    checkpoint = str(tmp_path / "checkpoint-4")
    runs = {}
    for stage in (None, 1, 3):
        args = _args(tmp_path / f"{stage}", **told | {"save_strategy": "no"})
        options: Any = {"model": _gpt2(**STILL), "args": args, "train_dataset": _sequences(13)}
        kind = transformers.Trainer if stage is None else ZeroTrainer
        trainer = kind(**options, **({} if stage is None else {"zero": _zero(stage)}))
        trainer.train(resume_from_checkpoint=checkpoint)
        weights = trainer.model.state_dict() if stage is None else full_state_dict(trainer.model)
        runs[stage] = _logged(trainer, "loss"), weights
    logs, weights = runs.pop(None)
    for stage, (their_logs, their_weights) in runs.items():
        assert their_logs == logs, stage
        if group.rank == 0:
            parity.assert_same_weights(their_weights, weights, what=f"stage {stage}")


@pytest.mark.ranks(timeout_s=180)
@pytest.mark.parametrize("dtype", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_in_16_bits_is_that_of_ddp(group: Group, tmp_path: Path, dtype: str) -> None:
    """It converts the model when training has ended, which was refused then."""
    _as_torchrun(group)
    found = {}
    for stage in (None, 1, 2, 3):
        args = _args(tmp_path, num_train_epochs=1, **{dtype: True})
        zero = None if stage is None else _zero(stage)
        trainer = _train(_gpt2(**STILL), args, zero=zero, eval_dataset=_sequences(5, seed=3))
        found[stage] = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        kind = transformers.Trainer if stage is None else ZeroTrainer
        more = {} if stage is None else {"zero": zero}
        alone = kind(model=_gpt2(**STILL), args=args, eval_dataset=_sequences(5, seed=3), **more)
        found[stage].append(alone.evaluate()["eval_loss"])
    expected = found.pop(None)
    for stage, losses in found.items():
        assert_close(losses, expected, rtol=1e-3, atol=0, msg=f"stage {stage}")


class _Runs(ZeroTrainer):
    """Runs out of memory in its first attempts."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Fail with the words of torch's allocator where batches are large."""
        if self._train_batch_size > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().training_step(*args, **kwargs)


@pytest.mark.ranks(timeout_s=180)
def test_a_batch_size_is_found(group: Group, tmp_path: Path) -> None:
    """Each attempt builds an optimizer of its own."""
    _as_torchrun(group)
    told: Any = {"num_train_epochs": 1, "per_device_train_batch_size": 8}
    for stage in (1, 3):
        ddp = _train(_gpt2(**STILL), _args(tmp_path, num_train_epochs=1))
        args = _args(tmp_path, auto_find_batch_size=True, **told)
        trainer = _Runs(
            model=_gpt2(**STILL), args=args, zero=_zero(stage), train_dataset=_sequences(13)
        )
        trainer.train()
        assert trainer._train_batch_size == 2
        assert_close(_logged(trainer, "loss")[0], _logged(ddp, "loss")[0])


def _search(folder: Path, zero: ZeroConfig | None, **options: Any) -> tuple[Any, list[float]]:
    """The best of three learning rates, each in a training of its own; and all losses."""
    import optuna

    grid = optuna.samplers.GridSampler({"learning_rate": [1e-3, 1e-2, 3e-2]}, seed=0)
    trainer = (transformers.Trainer if zero is None else ZeroTrainer)(
        model_init=lambda: _gpt2(**STILL),
        args=_args(folder, max_steps=4, **options),
        train_dataset=_sequences(13),
        eval_dataset=_sequences(5, seed=3),
        **({} if zero is None else {"zero": zero}),
    )
    losses: list[float] = []
    trainer.add_callback(_Keeps(losses))
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1)},
        backend="optuna",
        direction="minimize",
        n_trials=3,
        sampler=grid,
    )
    return best, losses


class _Keeps(transformers.TrainerCallback):
    """What is logged, of all trainings."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep losses."""
        self.losses += [logs[name] for name in ("loss", "eval_loss") if name in logs]


SEARCHES: Final[dict[str, dict[str, Any]]] = {
    "evaluated at the end": {},
    "evaluated in between": {"eval_strategy": "steps", "eval_steps": 2},
    "saved": {"save_strategy": "steps", "save_steps": 2},
}


@pytest.mark.ranks(timeout_s=240)
@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_over_learning_rates_is_that_of_ddp(
    group: Group, tmp_path: Path, search: str
) -> None:
    """Each trial trains a new model; the one before is shared out no more."""
    _as_torchrun(group)
    expected, losses = _search(tmp_path / "ddp", None, **SEARCHES[search])
    for stage in (1, 3):
        best, found = _search(tmp_path / str(stage), _zero(stage), **SEARCHES[search])
        assert_close(found, losses, rtol=1e-5, atol=1e-5, msg=f"stage {stage}")
        if group.rank == 0:
            assert best.hyperparameters == expected.hyperparameters
            assert best.objective == pytest.approx(expected.objective, rel=1e-5)
        else:
            assert best is None


class _InParts(ZeroTrainer):
    """Its loss is made of parts of the model, without a call of it."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **named: Any) -> Any:
        """GPT-2's own, in parts; the model's would shift the labels so."""
        hidden = model.transformer(inputs["input_ids"]).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
        labels, counted = inputs["labels"][:, 1:], named["num_items_in_batch"]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        # `counted` is of all ranks, whose losses are averaged.
        return loss * self.args.world_size / counted


@pytest.mark.ranks(timeout_s=120)
def test_a_loss_of_its_own_may_use_parts_of_the_model(group: Group, tmp_path: Path) -> None:
    """Trainer drops gradients by `model.zero_grad()`, and nothing calls the model."""
    _as_torchrun(group)
    told = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    options: Any = {"train_dataset": _sequences(12)}
    ddp = _train(_gpt2(**STILL), _args(tmp_path, **told), **options)
    for stage in (0, 1, 2, 3):
        args = _args(tmp_path, **told)
        trainer = _InParts(model=_gpt2(**STILL), args=args, zero=_zero(stage), **options)
        trainer.train()
        assert_close(_logged(trainer, "loss"), _logged(ddp, "loss"), rtol=1e-4, atol=0)
        weights = full_state_dict(trainer.model)
        for name, value in ddp.model.state_dict().items() if group.rank == 0 else ():
            assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def _plain_loop(group: Group, stage: int, trainer: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of one epoch over the same batches."""
    model, batches = _gpt2(**STILL), list(trainer.get_train_dataloader())
    model, norms = model.train(), []
    decays = set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [param for name, param in named if name in decays], "weight_decay": 0.1},
            {"params": [param for name, param in named if name not in decays], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=trainer.optimizer.defaults["fused"],
    )
    zero_engine.shard(model, optimizer, _zero(stage))
    for start in range(0, len(batches), 3):
        of_step = batches[start : start + 3]
        num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in of_step)
        torch.distributed.all_reduce(num_items)
        for batch in of_step:
            waits = stage < 2 and batch is not of_step[-1]
            with zero_engine.no_sync(model) if waits else nullcontext():
                loss = model(**batch, num_items_in_batch=num_items).loss * group.world_size
                loss.backward()
        norms.append(zero_engine.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, full_state_dict(model)


FILE: Final = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "initial_scale_power": 19, "hysteresis": 1},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
}
FILLED: Final = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.1,
    "fp16": FILE["fp16"] | {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 1e-2,
            "warmup_num_steps": 3,
            "total_num_steps": 8,
        },
    },
    "zero_optimization": {"stage": 3},
}


@pytest.mark.cpu_only("for fp16, Accelerate knows the kinds of devices by name")
@pytest.mark.ranks(timeout_s=120)
def test_a_deepspeed_file_is_filled_as_trainer_fills_it(group: Group, tmp_path: Path) -> None:
    """The bits of an engine whose file has the numbers; in fp16, with steps that overflow."""
    _as_torchrun(group)
    file = tmp_path / f"{group.rank}.json"
    file.write_text(json.dumps(FILE))
    args = _args(
        tmp_path,
        max_steps=8,
        fp16=True,
        max_grad_norm=0.1,
        train_sampling_strategy="sequential",
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        warmup_steps=3,
    )
    data = _sequences(40)
    trainer = _train(_gpt2(**STILL), args, zero=str(file), train_dataset=data)
    rates, applied = [], []
    engine, *_ = zero_engine.initialize(model=_gpt2(**STILL), config=FILLED)
    for batch, _ in zip(trainer.get_train_dataloader(), range(8), strict=False):
        num_items = (batch["labels"][:, 1:] != -100).sum()
        torch.distributed.all_reduce(num_items)
        loss = engine(**batch, num_items_in_batch=num_items).loss * group.world_size
        rates.append(engine.get_lr()[0])
        engine.backward(loss)
        engine.step()
        applied.append(engine.was_step_applied())

    assert trainer.model.dtype is torch.float16
    assert _logged(trainer, "learning_rate") == rates
    assert {True, False} == set(applied)
    assert trainer.accelerator.scaler.state_dict()["scale"] == engine.cur_scale
    weights, expected = full_state_dict(trainer.model), full_state_dict(engine.module)
    parity.assert_same_weights(weights, expected, what="fp16")


# ---- Files ----


def test_checkpoints_are_gone_on_with(ranks, tmp_path: Path) -> None:
    """By as many ranks bit for bit; by one rank too."""
    from safetensors.torch import load_file

    losses, _ = ranks(2).run(_save_and_resume, folder=str(tmp_path), timeout_s=150)
    [found] = ranks(1).run(_resume_alone, folder=str(tmp_path), timeout_s=150)

    def written(name: str, step: int) -> dict[str, Tensor]:
        return load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors")

    expected = written("ddp", 6)
    for name in ("zero", "again"):
        parity.assert_same_weights(written(name, 6), expected, what=name)
    assert_close(found, losses, rtol=1e-5, atol=0)
    best, last = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("final", "zero/checkpoint-6")
    )
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "zero/checkpoint-2")
    parity.assert_same_weights(best, reloaded.state_dict(), what="best")
    assert not equal(best["lm_head.weight"], last["lm_head.weight"])
    kept = {path.name for path in (tmp_path / "zero").iterdir()}
    assert kept == {"checkpoint-2", "checkpoint-6"}


def _resume_alone(group: Group, folder: str) -> list[Any]:
    _on_device_of(group)
    folders = (Path(folder, "alone"), _zero(3), Path(folder, "zero"))
    # What tests create is on the device, and cannot be pinned.
    options = {"use_cpu": group.device.type == "cpu", "dataloader_pin_memory": False}
    trainer = _train_with_checkpoints(*folders, batch=4, **options)
    return _logged(trainer, "loss", "eval_loss", "learning_rate")


def _train_with_checkpoints(
    folder: Path, zero: Any, resumed: Path | None = None, *, batch: int = 2, **more: Any
) -> Any:
    """The best is the worst, so that it is the first, and training ends two evaluations later."""
    kind = transformers.Trainer if zero is None else ZeroTrainer
    args = _args(
        folder,
        max_steps=8,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        **more,
    )
    trainer = kind(
        model=_gpt2(**STILL),
        args=args,
        train_dataset=_sequences(40),
        eval_dataset=_sequences(4, seed=3),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train(resume_from_checkpoint=resumed and str(resumed / "checkpoint-2"))
    assert trainer.state.global_step == 6
    return trainer


def _save_and_resume(group: Group, folder: str) -> list[float]:
    _as_torchrun(group)
    root = Path(folder)
    _train_with_checkpoints(root / "ddp", None)
    trainer = _train_with_checkpoints(root / "zero", _zero(3))
    losses = _logged(trainer, "loss", "eval_loss", "learning_rate")
    trainer.save_model(str(root / "final"))
    best = full_state_dict(trainer.model)
    trainer = _train_with_checkpoints(root / "thin", _zero(3), save_only_model=True)
    parity.assert_same_weights(full_state_dict(trainer.model), best, what="weights alone")
    _train_with_checkpoints(root / "again", _zero(1), root / "zero")
    _train_with_checkpoints(root / "from ddp", _zero(2), root / "ddp")
    return losses


def _llama(**options: Any) -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48} | options
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


class _PassesNoValues(transformers.Trainer):
    """Saves as trainers of other libraries do, which ask the model itself."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            self.model.save_pretrained(output_dir)


class _ZeroPassesNoValues(ZeroTrainer, _PassesNoValues):
    """The same over a sharded model."""


def test_what_a_trainer_in_between_saves_has_values(ranks, tmp_path: Path) -> None:
    """Of adapters, of modules that peft copies beside them, and of a whole model."""
    pytest.importorskip("peft")
    ranks(2).run(_train_in_between, folder=str(tmp_path), timeout_s=120)


def _train_in_between(group: Group, folder: str) -> None:
    import peft
    from safetensors.torch import load_file

    _as_torchrun(group)
    options: Any = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    for kind in ("whole", "adapters"):
        for name, zero in (("ddp", None), ("zero", _zero(3))):
            model = _llama()
            if kind == "adapters":
                model = peft.get_peft_model(model, peft.LoraConfig(**options))
            steps: Any = {"max_steps": 2, "save_steps": 2, "save_strategy": "steps"}
            args = _args(f"{folder}/{kind}-{name}", **steps)
            trainer = (_PassesNoValues if zero is None else _ZeroPassesNoValues)(
                model=model,
                args=args,
                train_dataset=_sequences(20),
                **({} if zero is None else {"zero": zero}),
            )
            trainer.train()
        if group.rank == 0:
            file = f"checkpoint-2/{'model' if kind == 'whole' else 'adapter_model'}.safetensors"
            expected, found = (
                load_file(f"{folder}/{kind}-{name}/{file}") for name in ("ddp", "zero")
            )
            parity.assert_same_weights(found, expected, what=kind)
            assert kind == "whole" or any("lm_head" in key for key in found)


def test_of_peft_the_adapter_alone_is_saved(ranks, tmp_path: Path) -> None:
    """What DDP would save, at stage 3, without gathering what is frozen."""
    from safetensors.torch import load_file

    peft = pytest.importorskip("peft")
    ranks(2).run(_train_adapters, folder=str(tmp_path), timeout_s=120)

    name = "adapter_model.safetensors"
    for run in ("zero", "again", "best"):
        folder = tmp_path / run / "checkpoint-4"
        assert not (folder / "model.safetensors").exists()
        with pytest.raises(zero_engine.FileError, match="saved with exclude_frozen=True"):
            zero_engine.export(folder / "zero", tmp_path / "exported")
        expected = load_file(tmp_path / "ddp" / "checkpoint-4" / name)
        parity.assert_same_weights(load_file(folder / name), expected, what=run)
    loaded = peft.PeftModel.from_pretrained(_llama(), tmp_path / "zero" / "checkpoint-4")
    assert isinstance(loaded, peft.PeftModelForCausalLM)


def _train_adapters(group: Group, folder: str) -> None:
    import peft

    _as_torchrun(group)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best |= {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    for name, zero, resumed, more in (
        ("ddp", None, None, {}),
        ("zero", _zero(3), None, {}),
        ("again", _zero(3), f"{folder}/zero/checkpoint-2", {}),
        ("best", _zero(3), None, best),
        ("alone", _zero(2), None, best | {"save_only_model": True}),
    ):
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        args = _args(f"{folder}/{name}", max_steps=4, save_strategy="steps", save_steps=2, **more)
        trainer = (transformers.Trainer if zero is None else ZeroTrainer)(
            model=peft.get_peft_model(_llama(), lora),
            args=args,
            train_dataset=_sequences(20),
            eval_dataset=_sequences(4, seed=3),
            **({} if zero is None else {"zero": zero}),
        )
        trainer.train(resume_from_checkpoint=resumed)
        trainer.save_model(f"{folder}/{name}/final")
        if more and group.rank == 0:
            saved = Path(folder, name, "final/adapter_model.safetensors").read_bytes()
            assert saved == Path(folder, "ddp/checkpoint-2/adapter_model.safetensors").read_bytes()


# ---- Construction, evaluation alone, generation ----


@needs_high_water
def test_no_rank_holds_a_model_that_is_built_for_the_trainer(tmp_path: Path) -> None:
    """M/N and one parameter, and a tenth; rank 0 reads pages of the mapped file besides.

    Of ranks that have done nothing before: their allocators have no holes.
    """
    _llama().save_pretrained(tmp_path / "small")
    large = _llama(hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    large.save_pretrained(tmp_path / "large")
    file_bytes = (tmp_path / "large" / "model.safetensors").stat().st_size

    with RankPool(2) as fresh:
        found = fresh.run(_measure, folder=str(tmp_path), timeout_s=90.0)

    for rank, (rise, largest) in enumerate(found):
        bound = 1.1 * (file_bytes / 2 + largest) + (0 if rank else file_bytes)
        assert rise <= bound, (rank, rise, bound, file_bytes)


def _measure(group: Group, folder: str) -> tuple[int, int]:
    """Of a `model_init` within `Init`; and evaluated and trained, the small one is as DDP's."""
    _as_torchrun(group)
    load = transformers.AutoModelForCausalLM.from_pretrained
    data = {"train_dataset": _sequences(8), "eval_dataset": _sequences(5, seed=3)}
    args = _args(folder, max_steps=2, eval_on_start=True)
    plain = transformers.Trainer(load(f"{folder}/small"), args, **data)
    plain.train()
    args = _args(folder, max_steps=2)
    zero = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}
    zero |= {"train_micro_batch_size_per_gpu": "auto"}
    with ZeroTrainer.Init(args, zero):
        model = load(f"{folder}/small")
    trainer = ZeroTrainer(model, args, zero=zero, **data)
    assert trainer.evaluate()["eval_loss"] == _logged(plain, "eval_loss")[0]
    trainer.train()
    assert _logged(trainer, "loss") == _logged(plain, "loss")
    gc.collect()
    with giving_memory_back():
        mark = HighWater()
        with ZeroTrainer.Init(args):
            trainer = ZeroTrainer(args=args, model_init=lambda: load(f"{folder}/large"))
        params = list(trainer.model.parameters())
        at_rest = sum(param.untyped_storage().nbytes() for param in params)
        assert at_rest < sum(param.nbytes for param in params) / 100, "it is whole"
        return mark.rise_bytes(), max(param.nbytes for param in params)


def test_what_is_generated_is_what_ddp_generates(ranks, tmp_path: Path) -> None:
    """At stage 3 every token needs every rank, and ranks come to their ends at different ones."""
    ranks(2).run(_generate, folder=str(tmp_path), timeout_s=120)


@mock.patch("zero_comm.init", parity.by_messages)  # as with NCCL, or on several hosts
def _generate(group: Group, folder: str) -> None:
    _as_torchrun(group)
    data, found = _sequences(24), []
    for kind, zero in (
        (transformers.Seq2SeqTrainer, {}),
        (ZeroSeq2SeqTrainer, {"zero": _zero(3)}),
    ):
        torch.manual_seed(1)
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        args = _args(
            folder,
            transformers.Seq2SeqTrainingArguments,
            num_train_epochs=1,
            eval_strategy="epoch",
            predict_with_generate=True,
            generation_max_length=10,
        )
        trainer = kind(
            transformers.T5ForConditionalGeneration(config),
            args,
            train_dataset=data,
            eval_dataset=data[:5],
            **zero,
        )
        trainer.train()
        torch.manual_seed(7 + group.rank)
        ends = list(range(1, VOCABULARY, 4))
        predicted = trainer.predict(data[:7], do_sample=True, eos_token_id=ends)
        found.append((_logged(trainer, "loss", "eval_loss"), predicted.predictions.tolist()))
    assert found[0] == found[1]
    assert len({row.index(0, 1) for row in found[0][1]}) > 1, "they end together"


# ---- What is refused ----


def test_what_cannot_be_beside_zero_names_the_line_to_change(tmp_path: Path) -> None:
    """Arguments, and the marks that transformers leaves on a model: nothing is ignored."""
    zero = ZeroConfig(precision=Precision(params=torch.bfloat16))
    for mark, options, expected in (
        ("", {"fsdp": "full_shard"}, r"leave fsdp= out: zero=ZeroConfig\(stage=3\)"),
        ("", {"torch_compile": True}, "leave torch_compile= out: compile each block: for layer in"),
        ("", {"save_on_each_node": True}, "let output_dir be a folder that all nodes see"),
        ("", {"fp16": True}, "expected bf16, as zero= says, got fp16; change one of them"),
        ("hf_device_map", {}, "leave device_map= out: load it in `with ZeroTrainer.Init"),
    ):
        model = _llama()
        setattr(model, mark or "unmarked", {"model": 0, "lm_head": "cpu"})
        with mock.patch.dict(os.environ):  # Accelerate writes to it
            args = _args(tmp_path, **options)
            with pytest.raises(ConfigError, match=expected):
                ZeroTrainer(model, args, zero=zero)


def test_deepspeed_in_the_arguments_is_answered_with_the_line_to_change(tmp_path: Path) -> None:
    """It is what every tutorial says; the host's own answer is that a package is missing."""
    with pytest.raises(ConfigError, match=r"ZeroTrainer\(\.\.\., zero=THE_SAME_FILE\)"):
        _args(tmp_path, deepspeed="ds.json")
    args = _args(tmp_path)
    args.deepspeed = "ds.json"
    with pytest.raises(ConfigError, match="leave deepspeed= out: write ZeroTrainer"):
        ZeroTrainer(_llama(), args)
    (tmp_path / "latest").write_text("global_step2")
    trainer = ZeroTrainer(_llama(), _args(tmp_path), train_dataset=_sequences(4))
    with pytest.raises(zero_engine.FileError, match=re.escape(str(tmp_path))):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_how_a_job_was_started_and_what_its_file_says_must_fit(tmp_path: Path) -> None:
    """Copies that train apart, or in one process, and numbers that contradict the arguments'."""
    args = _args(tmp_path)
    with (
        mock.patch.object(transformers.TrainingArguments, "n_gpu", 2),
        pytest.raises(ConfigError, match="DataParallel; start it by: torchrun --nproc-per-node=2"),
    ):
        ZeroTrainer(_llama(), args)
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="2"),
        pytest.raises(ConfigError, match=r"all 2 processes .*got 1: .*\(use_cpu=True"),
    ):
        ZeroTrainer(_llama(), args)
    zero = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu: expected 2"):
        ZeroTrainer(_llama(), args, zero=zero)
    with pytest.raises(ConfigError, match=r"zero=: expected a ZeroConfig, .*, got 3"):
        ZeroTrainer(_llama(), args, zero=3)


@pytest.mark.cpu_only("transformers knows devices by name")
@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_transformers_has_split_trains_as_the_whole_one(
    group: Group, stage: int, tmp_path: Path
) -> None:
    """By its tensor-parallel plan, over all ranks: each has a part of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))
    if group.rank == 0:
        plain.save_pretrained(tmp_path / "whole")
    torch.distributed.barrier()  # the other rank reads it
    its_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    said = {"WORLD_SIZE": "2", "RANK": str(group.rank), "LOCAL_RANK": str(group.rank)}
    with mock.patch.dict(os.environ, said):
        split = DistributedConfig(tp_size=2, tp_plan="auto")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "whole", distributed_config=split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(PartitionError, match=r"Group\.solo\(device\) where every rank"):
        zero_engine.shard(model, optimizer, ZeroConfig(stage))
    zero_engine.shard(model, optimizer, ZeroConfig(stage), group=Group.solo())
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(64, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = zero_engine.clip_grad_norm_(model, 1.0)
        expected = plain(input_ids=tokens, labels=tokens).loss
        expected.backward()
        its_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for each in (optimizer, its_optimizer):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm, its_norm, rtol=1e-3, atol=1e-5)
    found = zero_engine.full_state_dict(model)
    for name, value in found.items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-2, atol=1e-3)
