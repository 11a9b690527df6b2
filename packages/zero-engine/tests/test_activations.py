"""Activations are estimated without values: what autograd then saves is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from zero_engine import ConfigError
from zero_engine.planning import GPTSize, estimate_activations

transformers = pytest.importorskip("transformers")

SMALL = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}


def _config(kind: str, layers: int, **further: Any) -> Any:
    given = SMALL[kind] | {"num_hidden_layers": layers, "vocab_size": 128} | further
    return transformers.AutoConfig.for_model(kind, **given)


def _saved_bytes(config: Any, batch_size: int, sequence_length: int, dtype: torch.dtype) -> int:
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.randint(128, (batch_size, sequence_length))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert loss.requires_grad and own & storages.keys()  # weights are saved, and counted elsewhere
    return sum(storage.nbytes() for start, storage in storages.items() if start not in own)


@pytest.mark.slow
@pytest.mark.cpu_only("the estimate is of operators on the CPU")
@pytest.mark.parametrize("kind", sorted(SMALL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_estimate_is_what_autograd_saves(kind: str, dtype: torch.dtype) -> None:
    """A wrong factor sends its reader to the wrong device."""
    for layers, batch_size, sequence_length in ((1, 1, 8), (2, 3, 16), (3, 1, 40)):
        config = _config(kind, layers)
        size = {"batch_size": batch_size, "sequence_length": sequence_length}

        estimate = estimate_activations(config, **size, dtype=dtype)

        assert estimate == _saved_bytes(config, *size.values(), dtype)
        assert estimate == estimate_activations(config.to_dict(), **size, dtype=dtype)


@pytest.mark.slow
def test_the_dtype_is_the_configurations_where_none_is_said() -> None:
    """As the model is then built."""
    size = {"batch_size": 2, "sequence_length": 8}
    config = _config("llama", 1, dtype=torch.bfloat16)

    asked = estimate_activations(config, **size, dtype=torch.float32)

    assert config.dtype == torch.bfloat16  # is not written to
    assert estimate_activations(config, **size) < asked


def test_what_cannot_be_estimated_is_an_error_with_the_remedy() -> None:
    """Memory can be measured, and said."""
    size = {"batch_size": 2, "sequence_length": 8}
    images = transformers.AutoConfig.for_model("vit", architectures=["ViTModel"])
    for config, given, message in (
        (GPTSize(2, 64), size, "expected a configuration of transformers"),
        (images, size, "expected a model of tokens"),
        (_config("llama", 1), size | {"batch_size": 0}, "batch_size: expected int of at least 1"),
        (_config("llama", 1, hidden_act="none"), size, "builds no model"),
    ):
        with pytest.raises(ConfigError, match=message):
            estimate_activations(config, **given)
