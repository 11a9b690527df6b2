"""megatron-core's own GPT, checkpointed by zero_ckpt and sharded over its data-parallel ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero_ckpt
import zero_engine
from parity import ZeroConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zero_ckpt.testing import fresh_default
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Offload

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.cpu_only("megatron-core takes whatever else it finds for CUDA"),
]

WIDTH, HEADS, LAYERS, TOKENS, LENGTH, STEPS = 32, 4, 2, 64, 16, 3
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@contextmanager
def _megatron(**sizes: int) -> Iterator[Any]:
    """Yield its `parallel_state`, with zero_ckpt's functions in place of Megatron's."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of Apex and Transformer Engine, which are not there
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.tensor_parallel import layers, random
        from megatron.core.transformer.moe import moe_utils

        stack.enter_context(fresh_default())
        replaced: list[tuple[Any, str, Any]] = [
            *(
                (m, "get_cuda_rng_tracker", zero_ckpt.get_cuda_rng_tracker)
                for m in (tensor_parallel, random, layers, moe_utils)
            ),
            *(
                (m, "checkpoint", zero_ckpt.CheckpointFunction.apply)
                for m in (tensor_parallel, random)
            ),
            (moe_utils, "te_general_gemm", None),  # a name that it lacks without that package
        ]
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        parallel_state.initialize_model_parallel(**sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        zero_ckpt.configure(parallel_state)
        yield parallel_state


def _build(mpu: Any, *, num_experts: int | None = None, **options: Any) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if num_experts is not None:
        options |= {"num_moe_experts": num_experts, "moe_token_dispatcher_type": "allgather"}
        options |= {"moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        add_bias_linear=num_experts is None,
        **{"hidden_dropout": 0.1, "attention_dropout": 0.1, **options},
    )
    zero_ckpt.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(0)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=num_experts),
        vocab_size=TOKENS,
        max_sequence_length=LENGTH,
    )


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, mpu: Any, step: int) -> Tensor:
    torch.manual_seed(10 * step + mpu.get_data_parallel_rank())
    tokens = torch.randint(TOKENS, (2, LENGTH + 1))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mpu: Any, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(model, mpu, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
RECOMPUTED["full, inputs split"] = {**RECOMPUTED["full"], "distribute_saved_activations": True}
HOST = Offload(optimizer="host", params="host")
CASES = {
    **{f"stage {stage}": (2, ZeroConfig(stage), "full") for stage in range(4)},
    "stage 3, inputs split": (2, ZeroConfig(3), "full, inputs split"),
    "stage 3, selective": (2, ZeroConfig(3), "selective"),
    "data 4": (1, ZeroConfig(3), "full"),
    "tensor 4": (4, ZeroConfig(2), "selective"),
    "host": (2, ZeroConfig(3, offload=HOST), "full"),
}
# Gloo adds up four ranks in another order; the host steps by a kernel of ours.
IN_OTHER_BITS = ("data 4", "host")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_a_gpt_trains_as_under_ddp(group: Group, case: str) -> None:
    """With dropout, of which tensor-parallel ranks draw a part each; DDP keeps all activations."""
    tensor, config, recomputed = CASES[case]
    with _megatron(tensor_model_parallel_size=tensor) as mpu:
        over = mpu.get_data_parallel_group()
        plain = _build(mpu)
        ddp = DistributedDataParallel(plain, process_group=over)
        expected = _train(ddp, _adamw(ddp), mpu, range(STEPS))

        model = _build(mpu, **RECOMPUTED[recomputed])
        optimizer = _adamw(model)
        zero_engine.shard(model, optimizer, config, group=over)
        found = _train(model, optimizer, mpu, range(STEPS))
        if case in IN_OTHER_BITS:
            assert found == pytest.approx(expected, rel=1e-5)
            return
        assert found == expected
        for (name, param), of_plain in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert equal(zero_engine.full_param(param), of_plain.detach()), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_is_that_of_all_tensor_parallel_ranks(group: Group, stage: int) -> None:
    """Megatron marks what is split; all else counts on the first of these ranks."""
    with _megatron(tensor_model_parallel_size=2) as mpu:
        model = _build(mpu, **NO_DROPOUT)
        optimizer, over = _adamw(model), mpu.get_tensor_model_parallel_group()
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=mpu.get_data_parallel_group())
        _loss(model, mpu, 0).backward()
        total = torch.zeros(())
        for param in model.parameters():
            is_split = getattr(param, "tensor_model_parallel", False)
            counts = is_split or mpu.get_tensor_model_parallel_rank() == 0
            total += zero_engine.full_grad(param).square().sum() * counts
        dist.all_reduce(total, group=over)
        norm = zero_engine.clip_grad_norm_(model, 0.1, across=Group.from_process_group(over))
        torch.testing.assert_close(norm, total.sqrt())


@pytest.mark.drawn(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("stage", "expert"), [(0, 2), (1, 4), (2, 2), (3, 2)])
def test_experts_have_the_ranks_that_megatron_gives_them(
    group: Group, stage: int, expert: int
) -> None:
    """Its law, by hand: all gradients over the number of data-parallel ranks, experts' too."""
    with _megatron(expert_model_parallel_size=expert) as mpu:
        num_ranks = mpu.get_data_parallel_world_size()
        plain = _build(mpu, num_experts=4, **NO_DROPOUT)
        its_optimizer = _adamw(plain)
        model = _build(mpu, num_experts=4, **NO_DROPOUT)
        optimizer = _adamw(model)
        groups = {"*.experts.*": mpu.get_expert_data_parallel_group()}
        over = mpu.get_data_parallel_group()
        zero_engine.shard(model, optimizer, ZeroConfig(stage, groups=groups), group=over)
        for step in range(STEPS):
            expected = _loss(plain, mpu, step)
            expected.backward()
            for param in plain.parameters():
                is_dense = getattr(param, "allreduce", True)
                ranks = over if is_dense else mpu.get_expert_data_parallel_group()
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad, group=ranks)
                param.grad /= num_ranks
            its_optimizer.step()
            its_optimizer.zero_grad()
            loss = _loss(model, mpu, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for (name, param), of_plain in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            found = zero_engine.full_param(param)
            torch.testing.assert_close(found, of_plain.detach(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [3])
def test_a_run_goes_on_from_a_checkpoint(group: Group, stage: int, tmp_path: Path) -> None:
    """Each tensor-parallel rank has a folder; the tracker's random numbers go on, too."""
    with _megatron(tensor_model_parallel_size=2) as mpu:
        over, full = mpu.get_data_parallel_group(), RECOMPUTED["full"]
        folder = tmp_path / str(mpu.get_tensor_model_parallel_rank())
        model = _build(mpu, **full)
        optimizer = _adamw(model)
        zero_engine.shard(model, optimizer, ZeroConfig(stage), group=over)
        _train(model, optimizer, mpu, range(2))
        zero_engine.save(folder, model, optimizer, step=2)
        expected = _train(model, optimizer, mpu, range(2, 4))

        again = _build(mpu, **full)
        its_optimizer = _adamw(again)
        zero_engine.shard(again, its_optimizer, ZeroConfig(4 - stage), group=over)
        zero_engine.load(folder, again, its_optimizer)
        assert _train(again, its_optimizer, mpu, range(2, 4)) == expected
        for param, other in zip(again.parameters(), model.parameters(), strict=True):
            assert equal(zero_engine.full_param(param), zero_engine.full_param(other))
