"""Every method of peft at stage 3: trained, saved, loaded back and merged as on plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import parity
import pytest
import torch
import zero_engine
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import assert_close
from zero_engine import ZeroConfig
from zero_partition import ShardedParamError, StateError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, of each method

VOCABULARY: Final = 64
ATTENTION: Final = {"target_modules": ["q_proj", "v_proj"]}
TOKENS: Final = {"num_virtual_tokens": 4}
METHODS: Final[dict[str, dict[str, Any]]] = {
    "LoraConfig": {"r": 4, **ATTENTION},
    "LoraConfig, modules_to_save": {"r": 4, "modules_to_save": ["lm_head"], **ATTENTION},
    "LoraConfig, trainable_token_indices": {"r": 4, "trainable_token_indices": [1], **ATTENTION},
    "LoraConfig, use_dora": {"r": 4, "use_dora": True, **ATTENTION},
    "LoraConfig, use_rslora": {"r": 4, "use_rslora": True, "lora_bias": True, **ATTENTION},
    "LoraConfig, bias": {"r": 4, "bias": "all", **ATTENTION},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10, **ATTENTION},
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1},
    "BOFTConfig": {"boft_block_size": 4, **ATTENTION},
    "BeftConfig": {"target_modules": ["v_proj"]},
    "C3AConfig": {"block_size": 8, **ATTENTION},
    "CPTConfig": {
        "cpt_token_ids": [1, 2, 3],
        "cpt_mask": [1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 3],
    },
    "CartridgeConfig": TOKENS,
    "DeftConfig": {"r": 4, **ATTENTION},
    "DeloraConfig": {"r": 4, **ATTENTION},
    "FourierFTConfig": {"n_frequency": 20, **ATTENTION},
    "FrodConfig": ATTENTION,
    "GloraConfig": {"r": 4, **ATTENTION},
    "GraloraConfig": {"r": 4, "gralora_k": 2, **ATTENTION},
    "HRAConfig": {"r": 4, **ATTENTION},
    "HiraConfig": {"r": 4, **ATTENTION},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "LilyConfig": {"r": 4, **ATTENTION},
    "LoHaConfig": {"r": 4, **ATTENTION},
    "LoKrConfig": {"r": 4, **ATTENTION},
    "MissConfig": {"r": 4, **ATTENTION},
    "MultitaskPromptTuningConfig": {"num_tasks": 2, **TOKENS},
    "OFTConfig": {"oft_block_size": 4, **ATTENTION},
    "OSFConfig": {"effective_rank": 4, **ATTENTION},
    "PeanutConfig": {"r": 4, **ATTENTION},
    "PolyConfig": {"r": 4, "n_tasks": 2, "n_skills": 2, "n_splits": 2, **ATTENTION},
    "PrefixTuningConfig": TOKENS,
    "PromptEncoderConfig": {"encoder_hidden_size": 16, **TOKENS},
    "PromptTuningConfig": TOKENS,
    "PsoftConfig": {"r": 4, **ATTENTION},
    "PveraConfig": {"r": 4, **ATTENTION},
    "RandLoraConfig": {"r": 4, **ATTENTION},
    "RoadConfig": {"group_size": 4, **ATTENTION},
    "ShiraConfig": {"r": 2, **ATTENTION},
    "SupertuningConfig": ATTENTION,
    "TinyLoraConfig": {"r": 2, **ATTENTION},
    "TrainableTokensConfig": {"token_indices": [1, 3]},
    "UniLoraConfig": {"r": 4, **ATTENTION},
    "VBLoRAConfig": {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2, **ATTENTION},
    "VeraConfig": {"r": 4, **ATTENTION},
    "WaveFTConfig": {"n_frequency": 20, **ATTENTION},
}
MARKS: Final = {"FrodConfig": pytest.mark.cpu_only("its own code adds the CPU's to a device's")}
WITH_TASKS: Final = {"MultitaskPromptTuningConfig", "PolyConfig"}
WRITES_IN_FORWARD: Final = {"CPTConfig"}  # its loss is projected onto a ball, in place
WRITES_ON_LOADING: Final = {"CartridgeConfig"}


def _base() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def _build(method: str) -> tuple[Any, torch.optim.Optimizer]:
    model = _base()
    torch.manual_seed(2)
    config = getattr(peft, method.split(",", maxsplit=1)[0])(
        task_type="CAUSAL_LM", **METHODS[method]
    )
    model = peft.get_peft_model(model, config).train()
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def _loss(method: str, model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 10), generator=generator)
    more = {"task_ids": torch.tensor([0, 1])} if method in WITH_TASKS else {}
    torch.manual_seed(3)  # some drop out
    return model(input_ids=tokens, labels=tokens, **more).loss


def _train(method: str, model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    for step in range(3):
        for rank in ranks:
            (_loss(method, model, step, rank) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _outcome(call: Callable[[], Any]) -> Any:
    """Return what it returns, or the type of its error: peft refuses to merge some methods."""
    try:
        return call()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return type(error)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=MARKS.get(name, ())) for name in METHODS]
)
@pytest.mark.drawn(2)
def test_a_method_of_peft_is_trained_saved_loaded_and_merged(
    group: Group, tmp_path: Path, method: str
) -> None:
    """A library asks modules for their state dicts, for the names in them, on one rank alone."""
    if not hasattr(peft, method.split(",", maxsplit=1)[0]):
        pytest.skip("an older peft")
    plain, its_optimizer = _build(method)
    _train(method, plain, its_optimizer, list(range(group.world_size)))
    model, optimizer = _build(method)
    stage = 2 if method in WRITES_IN_FORWARD else 3
    if method in WRITES_IN_FORWARD:
        refused, _ = _build(method)
        zero_engine.shard(refused, None, ZeroConfig(3, min_unit_bytes=0), group=group)
        with pytest.raises(StateError, match=r"wrote to it.*Use stage 2"):
            _loss(method, refused, 0, 0)
    zero_engine.shard(model, optimizer, ZeroConfig(stage, min_unit_bytes=0), group=group)
    _train(method, model, optimizer, [group.rank])

    full = zero_engine.full_state_dict(model)
    folders = {"plain": tmp_path / f"plain-{group.rank}", "ours": tmp_path / "ours"}
    plain.save_pretrained(folders["plain"])
    if (
        group.device.type != "cpu"
    ):  # prompts are computed from weights, whose gathers are collective
        others = tmp_path / f"ours-{group.rank}"
        model.save_pretrained(others, state_dict=full or plain.state_dict())
        folders["ours"] = others
    elif group.rank == 0:
        model.save_pretrained(folders["ours"], state_dict=full)
    if group.rank == 0:
        trainable = not plain.active_peft_config.is_prompt_learning
        found, expected = (
            peft.PeftModel.from_pretrained(_base(), folder, is_trainable=trainable).state_dict()
            for folder in (folders["ours"], folders["plain"])
        )
        _assert_close(found, expected)

    saved = {
        name: value.detach().clone()
        for name, value in peft.get_peft_model_state_dict(plain).items()
    }
    edited = {name: value * 0.5 for name, value in saved.items() if value.is_floating_point()}
    peft.set_peft_model_state_dict(plain, copy.deepcopy(saved | edited))
    if method in WRITES_ON_LOADING:
        with pytest.raises(ShardedParamError, match=r"frozen_embedding.*set_full_param"):
            peft.set_peft_model_state_dict(model, saved | edited)
        return
    peft.set_peft_model_state_dict(model, saved | edited)
    full = zero_engine.full_state_dict(model)
    if group.rank == 0:
        _assert_close(full, plain.state_dict())

    zero_engine.unshard(model, optimizer)
    if hasattr(plain.base_model, "merge_adapter"):
        merged, expected = _outcome(model.merge_and_unload), _outcome(plain.merge_and_unload)
        if isinstance(expected, type):
            assert merged is expected
        else:
            _assert_close(merged.state_dict(), expected.state_dict())


def test_what_is_saved_without_values_says_how_to(group: Group, tmp_path: Path) -> None:
    """Empty weights would be found out when they are loaded."""
    model, optimizer = _build("LoraConfig, modules_to_save")
    zero_engine.shard(model, optimizer, ZeroConfig(3, min_unit_bytes=0), group=group)
    plain, _ = _build("LoraConfig, modules_to_save")
    if group.rank == 0:
        with pytest.raises(StateError, match=r"unsharded\(model\)"):
            model.save_pretrained(tmp_path)
    with zero_engine.unsharded(model):
        if group.rank == 0:
            model.save_pretrained(tmp_path)
            back = peft.PeftModel.from_pretrained(_base(), tmp_path)
            parity.assert_same_weights(back.state_dict(), plain.state_dict(), what="saved")
