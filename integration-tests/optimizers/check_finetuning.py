"""Quantised bases, TRL and the averages of diffusers and timm, over sharded models.

`hatch run optimizers:test`, in an environment that has them; not a part of `hatch run test`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import zero_engine
from torch import nn
from zero_comm import Group
from zero_engine import ZeroConfig
from zero_partition import LoadError, PartitionError, StateError

sys.path.insert(0, str(Path(__file__).parent))

import zoo_of_optimizers  # noqa: F401  (it imports parts of timm)

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from zero_engine.integrations.transformers import ZeroTrainer  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(timeout_s=240)]
STAGES: Final = (0, 1, 2, 3)
WORDS: Final = [f"w{number}" for number in range(60)]


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config)


def _adapted(base: Any) -> Any:
    for param in base.parameters():
        param.requires_grad_(False)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora)
    for name, param in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(param, std=0.05)
    return model


def _in_8_bits(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(*linear.weight.shape[::-1], bias=False, has_fp16_weights=False)
    weight = linear.weight.data.clone()
    made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


def _in_4_bits(linear: nn.Linear, **options: Any) -> nn.Module:
    made = bnb.nn.Linear4bit(*linear.weight.shape[::-1], bias=False, compute_dtype=torch.float32)
    weight = linear.weight.data.clone()
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", **options)
    return made.to("cpu")


QUANTISED: Final[dict[str, Callable[[nn.Linear], nn.Module]]] = {
    "8-bit": _in_8_bits,
    "4-bit": _in_4_bits,
    "4-bit-twice": lambda linear: _in_4_bits(linear, compress_statistics=True),
}


def _quantised(kind: str) -> Any:
    base = _llama()
    for name, module in list(base.model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(base.model.get_submodule(parent), attribute, QUANTISED[kind](module))
    return _adapted(base)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _steps(model: Any, optimizer: Any, first: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(64, (2, 8), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", QUANTISED)
def test_adapters_on_a_quantised_base_train_as_under_ddp_and_resume(
    group: Group, tmp_path: Path, kind: str
) -> None:
    plain = _quantised(kind)
    optimizer = _optimizer(plain)
    ddp = nn.parallel.DistributedDataParallel(plain, process_group=group.process_group)
    expected = [_steps(ddp, optimizer, first, group.rank) for first in (0, 2)]
    for stage in STAGES:
        folder = tmp_path / str(stage)
        model = _quantised(kind)
        optimizer = _optimizer(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
        assert _steps(model, optimizer, 0, group.rank) == expected[0], stage
        zero_engine.save(folder, model, optimizer, step=2)
        whole = zero_engine.full_state_dict(model)
        suffix = "SCB" if kind == "8-bit" else "weight.absmax"
        assert group.rank or any(name.endswith(suffix) for name in whole)

        other = _quantised(kind)
        optimizer = _optimizer(other)
        zero_engine.shard(other, optimizer, ZeroConfig(3 - stage, min_unit_bytes=0), group=group)
        zero_engine.load(folder, other, optimizer)
        assert _steps(other, optimizer, 2, group.rank) == expected[1], stage
        zero_engine.unshard(other, optimizer)
        _steps(other, optimizer, 4, group.rank)


def test_another_quantisation_is_not_loaded_into(group: Group, tmp_path: Path) -> None:
    """Codes of one with scales of the other would be nobody's weights."""
    model = _quantised("4-bit")
    optimizer = _optimizer(model)
    zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)
    zero_engine.save(tmp_path, model, optimizer, step=0)
    base = _llama()
    base.model.layers[0].self_attn.q_proj.weight.data *= 2
    linear = _in_4_bits(base.model.layers[0].self_attn.q_proj)
    other = _quantised("4-bit")
    layer = other.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer = linear
    optimizer = _optimizer(other)
    zero_engine.shard(other, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)
    with pytest.raises(LoadError, match=r"absmax' differs from that of the model"):
        zero_engine.load(tmp_path, other, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_made_of_other_tensors_are_refused_by_name(group: Group, stage: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = _llama()
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    model = _adapted(model)
    with pytest.raises(PartitionError, match=r"q_proj.* is a Int8Tensor, a tensor made of others"):
        zero_engine.shard(model, _optimizer(model), ZeroConfig(stage), group=group)


# ---- Trainers ----


def _as_torchrun(group: Group) -> None:
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(OMP_NUM_THREADS="1")


def _told(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "ddp_find_unused_parameters": False,
        **options,
    }


def _logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_trainer_takes_quantised_models_with_adapters(
    group: Group, tmp_path: Path, bits: str
) -> None:
    """As `from_pretrained(quantization_config=...)` loads them; a checkpoint is resumed from."""
    _as_torchrun(group)
    data = [{"input_ids": (torch.arange(8) * n) % 64} for n in range(1, 17)]
    data = [{**sample, "labels": sample["input_ids"]} for sample in data]
    if group.rank == 0:
        _llama().save_pretrained(tmp_path / "base")
    torch.distributed.barrier(group.process_group)

    def model() -> Any:
        asked = transformers.BitsAndBytesConfig(**{bits: True})
        base = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=asked, dtype=torch.float32
        )
        return _adapted(base)

    def losses(kind: Any, folder: Path, resumes: Any = None, **zero: Any) -> list[float]:
        args = transformers.TrainingArguments(**_told(folder))
        trainer = kind(model(), args, train_dataset=data, **zero)
        trainer.train(resume_from_checkpoint=resumes)
        return _logged(trainer)

    expected = losses(transformers.Trainer, tmp_path / "plain")
    for stage in STAGES:
        zero = {"zero": ZeroConfig(stage, min_unit_bytes=0)}
        folder = tmp_path / str(stage)
        assert losses(ZeroTrainer, folder, **zero) == expected, stage
        resumed = losses(ZeroTrainer, folder, str(folder / "checkpoint-2"), **zero)
        assert resumed[2:] == expected[2:], stage


class _ZeroSFT(ZeroTrainer, trl.SFTTrainer):
    """What a user of TRL writes."""


class _ZeroDPO(ZeroTrainer, trl.DPOTrainer):
    """Likewise."""


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {**{word: n for n, word in enumerate(WORDS)}, "<pad>": 60, "<eos>": 61, "<unk>": 62}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **marks)


@pytest.mark.parametrize("what", ["sft", "dpo", "dpo-sharded-reference"])
def test_trl_trains_with_its_own_losses(group: Group, tmp_path: Path, what: str) -> None:
    """The reference model of DPO is whole on each rank, unless it is sharded before."""
    from datasets import Dataset

    _as_torchrun(group)
    texts = [" ".join(WORDS[(7 * n + at) % 60] for at in range(12)) for n in range(32)]

    def trained(kind: Any, folder: Path, **zero: Any) -> list[float]:
        if what == "sft":
            args = trl.SFTConfig(**_told(folder), bf16=False, max_length=16)
            data = Dataset.from_dict({"text": texts})
            trainer = kind(
                _llama(), args=args, train_dataset=data, processing_class=_tokenizer(), **zero
            )
        else:
            reference = _llama()
            if what == "dpo-sharded-reference" and zero:
                config = ZeroConfig(stage=3, min_unit_bytes=0)
                zero_engine.shard(reference, None, config, group=group)
                half = sum(param.numel() * 4 for param in reference.parameters()) // 2
                assert zero_engine.memory_report(reference).params_bytes <= 1.01 * half
            args = trl.DPOConfig(**_told(folder), bf16=False, max_length=32)
            pairs = {"prompt": [text[:10] for text in texts], "chosen": texts}
            data = Dataset.from_dict({**pairs, "rejected": texts[::-1]})
            trainer = kind(
                _llama(),
                ref_model=reference,
                args=args,
                train_dataset=data,
                processing_class=_tokenizer(),
                **zero,
            )
        trainer.train()
        return _logged(trainer)

    theirs, ours = (trl.SFTTrainer, _ZeroSFT) if what == "sft" else (trl.DPOTrainer, _ZeroDPO)
    expected = trained(theirs, tmp_path / "plain")
    for stage in STAGES:
        zero = {"zero": ZeroConfig(stage, min_unit_bytes=0)}
        found = trained(ours, tmp_path / str(stage), **zero)
        assert found == pytest.approx(expected, rel=1e-6), stage  # norms add up in another order


# ---- Averages ----


def _diffusers(model: nn.Module) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(model.parameters(), decay=0.9)


def _timm(model: nn.Module) -> Any:
    from timm.utils.model_ema import ModelEmaV3

    return ModelEmaV3(model, decay=0.9)


AVERAGES: Final[dict[str, tuple[Any, Any, Any]]] = {  # made, updated, read
    "diffusers.EMAModel": (_diffusers, lambda a, m: a.step(m.parameters()), "shadow_params"),
    "timm.ModelEmaV3": (_timm, lambda a, m: a.update(m), "module"),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_others_work_where_parameters_rest_whole(group: Group, name: str) -> None:
    """Made before `shard()`, below stage 3; at stage 3 the error names `ShardedAverage`."""
    make, update, attribute = AVERAGES[name]

    def averaged(stage: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = make(model)
        if stage is not None:
            zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
        for step in range(3):
            model(torch.full((4, 8), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update(average, model)
        values = getattr(average, attribute)
        return [v.detach() for v in (values.parameters() if name[0] == "t" else values)]

    expected = averaged(None)
    for stage in STAGES[:3]:
        torch.testing.assert_close(averaged(stage), expected)
    with pytest.raises(StateError, match=r"ShardedAverage\(model, decay=\.\.\.\)"):
        averaged(3)


# ---- What TrainingArguments(optim=...) names ----


NOT_HERE: Final = {  # where Trainer says so: another device, a package, or no several ranks
    *("adalomo", "adamw_anyprecision", "adamw_torch_npu_fused", "adamw_torch_xla", "grokadamw"),
    *("apollo_adamw_layerwise", "galore_adafactor_layerwise", "galore_adamw_layerwise"),
    *("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
}
NAMES: Final = sorted({n.value for n in transformers.training_args.OptimizerNames} - NOT_HERE)
LOW_RANK: Final = {"galore": "rank=8,update_proj_gap=4,scale=0.25", "apollo": None}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_that_trainer_names(group: Group, tmp_path: Path, name: str) -> None:
    """Where Trainer itself runs it here, on two ranks and a CPU."""
    _as_torchrun(group)
    data = [{"input_ids": (torch.arange(8) * n) % 64} for n in range(1, 33)]
    data = [{**sample, "labels": sample["input_ids"]} for sample in data]
    low_rank = next((options for key, options in LOW_RANK.items() if key in name), "")
    told: dict[str, Any] = {} if low_rank == "" else {"optim_target_modules": ["q_proj", "v_proj"]}

    def losses(kind: Any, **zero: Any) -> list[float]:
        options = _told(tmp_path, optim=name, save_strategy="no", optim_args=low_rank or None)
        args = transformers.TrainingArguments(**options, **told)
        trainer = kind(_llama(), args, train_dataset=data, **zero)
        trainer.train()
        return _logged(trainer)

    if name == "lomo":
        with pytest.raises(PartitionError, match="a Lomo updates parameters within backward"):
            losses(ZeroTrainer, zero=ZeroConfig(1))
        return
    expected = losses(transformers.Trainer)
    for stage in (0, 1, 3):
        found = losses(ZeroTrainer, zero=ZeroConfig(stage, min_unit_bytes=0))
        assert found == pytest.approx(expected, abs=2e-5), stage
