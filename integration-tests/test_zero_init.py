"""Scripts for DeepSpeed that build, load and train a model inside `zero.Init`."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import training
import zero_deepspeed as deepspeed
from high_water import HighWater, giving_memory_back, needs_high_water
from parity import ZeroConfig
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import RankPool, equal
from zero_engine import initialize, shard
from zero_partition import PartitionError, StateError

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def _init(group: Group, **options: Any) -> Any:
    return deepspeed.zero.Init(data_parallel_group=group.process_group, **options)


def _engine(group: Group, model: nn.Module, *, optimizer: Any = None, **settings: Any) -> Any:
    config = SETTINGS | settings
    return initialize(model=model, optimizer=optimizer, config=config, group=group)[0]


def _tiny_loss(model: Any, step: int) -> Tensor:
    return parity.loss_of(model, parity.batch(step, 0, 0))


def _train(
    engine: Any, steps: range, loss_of: Callable[[Any, int], Tensor] = _tiny_loss
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


# ---- initialize() inside ----


def test_an_engine_may_be_made_and_trained_inside(group: Group) -> None:
    """Scripts put all of their setup under it; DeepSpeed leaves its context for `initialize`."""
    plain, its_optimizer = parity.build_with_optimizer(make=parity.tiny_float32)
    expected = parity.run_steps(plain, its_optimizer, range(4), rank=0)
    with _init(group), _init(group):
        model = parity.build(parity.tiny_float32)
        with pytest.raises(PartitionError, match=r"shard\(\) was called inside"):
            shard(model, None, ZeroConfig(3), group=group)
        optimizer = parity.OPTIMIZERS["adamw"](parity.param_groups(model))
        engine = _engine(group, model, optimizer=optimizer)
        losses = _train(engine, range(2))
        other = nn.Linear(600, 600)
    assert other.weight.untyped_storage().nbytes() == 4  # the contexts went on
    assert losses + _train(engine, range(2, 4)) == expected


# ---- state_dict() ----


def test_state_dicts_have_the_names(group: Group) -> None:
    """As DeepSpeed's have at stage 3: scripts look for them, often on one rank alone."""
    expected = parity.build(parity.tiny_float32).state_dict()
    with _init(group):
        model = parity.build(parity.tiny_float32)
    _assert_names(model.state_dict(), expected, torch.float32)
    engine = _engine(group, model, bf16={"enabled": True})
    if group.rank == 0:
        _assert_names(engine.module.state_dict(), expected, torch.bfloat16)
        named = {name.removeprefix("module."): v for name, v in engine.state_dict().items()}
        assert len(named) == len(engine.state_dict()) == len(expected)
        _assert_names(named, expected, torch.bfloat16)
        kept = engine.module.state_dict(keep_vars=True)
        assert all(kept[name] is param for name, param in model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, value in engine.module.state_dict().items():
            assert equal(value, expected[name].to(value.dtype)), name
    with deepspeed.zero.GatheredParameters([model.embed.weight]):
        some = engine.module.state_dict()
        assert equal(some["embed.weight"], some["head.weight"])
        with pytest.raises(StateError, match="'scale'"):
            some["scale"].sum()
    _assert_names(engine.module.state_dict(), expected, torch.bfloat16)
    assert model.scale.detach is not None and "detach" not in vars(model.scale)

    whole = parity.build(parity.tiny_float32)
    stage_2 = _engine(group, whole, zero_optimization={"stage": 2})
    parity.assert_same_weights(stage_2.module.state_dict(), expected, what="stage 2")


def _assert_names(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> None:
    buffers = {name for name, _ in parity.tiny_float32().named_buffers()}
    assert list(found) == list(expected)
    for name, value in found.items():
        if name in buffers:
            assert equal(value, expected[name])
        else:
            assert not value.requires_grad
            assert (value.shape, value.dtype) == (expected[name].shape, dtype), name
            with pytest.raises(StateError, match=rf"'(module\.)?{name}'"):
                value.clone()


# ---- from_pretrained() inside ----

transformers = pytest.importorskip("transformers")


def _config(**more: Any) -> Any:
    options = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48} | more
    return transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **options)


def _save(folder: Path, config: Any) -> None:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (2, 7), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


@contextmanager
def _as_transformers_for_deepspeed(group: Group) -> Iterator[None]:
    """What its HfDeepSpeedConfig makes of from_pretrained, which asks for DeepSpeed's metadata."""
    from transformers.integrations import deepspeed as theirs
    from zero_deepspeed import accelerator, zero

    modules = {"deepspeed": deepspeed, "deepspeed.accelerator": accelerator}
    inside = partial(zero.Init, data_parallel_group=group.process_group)
    known = mock.Mock(config=SETTINGS)  # it is kept by a weak reference
    theirs.set_hf_deepspeed_config(known)
    try:
        with (
            mock.patch("transformers.modeling_utils.prevent_arange_dtype_change", nullcontext),
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(zero, "Init", inside),
        ):
            yield
    finally:
        theirs.unset_hf_deepspeed_config()


@pytest.mark.parametrize(("way", "kind"), [("inside", "untied"), ("as DeepSpeed", "tied")])
@pytest.mark.ranks(timeout_s=90)
def test_what_from_pretrained_loads_is_trained(
    group: Group, tmp_path: Path, way: str, kind: str
) -> None:
    """The usual first line of a fine-tuning at stage 3."""
    config = _config(tie_word_embeddings=kind == "tied")
    parity.by_rank_0(group, lambda: _save(tmp_path, config))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    unstepped = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = training.train(plain.train(), optimizer, _loss_of, num_steps=3)

    with _init(group) if way == "inside" else _as_transformers_for_deepspeed(group):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = _engine(group, model.train(), optimizer=optimizer)
    training.assert_weights_of(model, unstepped, group=group, what="loaded")
    assert _train(engine, range(3), _loss_of) == expected


@needs_high_water
def test_no_rank_holds_the_whole_of_what_it_loads(tmp_path: Path) -> None:
    """M/N and one parameter, and a tenth.

    Rank 0 reads pages of the mapped file, which count, and which the kernel takes back. The others
    once wrote to theirs, and so held a copy of all. Of ranks that have done nothing before: their
    allocators have no holes.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    _save(tmp_path / "small", _config())
    _save(tmp_path / "large", _config(**sizes))
    file_bytes = (tmp_path / "large" / "model.safetensors").stat().st_size

    with RankPool(2) as fresh:
        found = fresh.run(_measure_loading, folder=str(tmp_path), timeout_s=90.0)

    for rank, (rise, largest) in enumerate(found):
        # Pages of torch's libraries that are first used here count too; builds for CUDA have more.
        code = 2**23
        assert rise <= 1.1 * (file_bytes / 2 + largest) + code + (0 if rank else file_bytes)


def _measure_loading(group: Group, folder: str) -> tuple[int, int]:
    """Return by how much memory rose at most, and bytes of the largest parameter."""

    def build(name: str) -> Any:
        with _init(group):
            return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")

    build("small")  # what is imported at first use
    gc.collect()
    with giving_memory_back():
        mark = HighWater()
        model = build("large")
        rise = mark.rise_bytes()
    return rise, max(param.nbytes for param in model.parameters())
