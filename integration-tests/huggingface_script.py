"""A language model trained as people do with transformers and ZeRO-3; one import is changed.

Run by test_huggingface_script.py.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import zero_deepspeed as deepspeed  # was: import deepspeed
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
    get_linear_schedule_with_warmup,
    set_seed,
)

VOCABULARY = 29


class Sequences(Dataset):
    """Counting in steps of different size, modulo the vocabulary."""

    def __init__(self, num_samples: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.device("cpu"):  # also where a test has another default: loaders pin samples
            start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
            stride = torch.randint(1, 4, (num_samples, 1), generator=generator)
            self.tokens = (start + stride * torch.arange(length)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def parse_args() -> argparse.Namespace:
    """The command line, DeepSpeed's part of it included."""
    parser = argparse.ArgumentParser(description="Train a causal language model")
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--num_train_samples", type=int, default=32)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "-1")))
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_model() -> GPT2LMHeadModel:
    """Small enough for a test; its embeddings are tied."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict]:
    """Biases and norms do not decay."""
    no_decay = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {
            "params": [param for name, param in named if not name.endswith(no_decay)],
            "weight_decay": weight_decay,
        },
        {
            "params": [param for name, param in named if name.endswith(no_decay)],
            "weight_decay": 0.0,
        },
    ]


def print_rank_0(message: str) -> None:
    """Once per job."""
    if deepspeed.comm.get_rank() == 0:
        print(message, flush=True)


def mean_over_ranks(value: torch.Tensor) -> float:
    """Of a number that every rank has."""
    value = value.detach().float().clone()
    deepspeed.comm.all_reduce(value, op=deepspeed.comm.ReduceOp.SUM)
    return (value / deepspeed.comm.get_world_size()).item()


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, loader: DataLoader, device: torch.device) -> float:
    """Mean loss over all ranks' part of the evaluation set."""
    engine.eval()
    losses = []
    for batch in loader:
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        losses.append(engine(**inputs).loss)
    engine.train()
    return mean_over_ranks(torch.stack(losses).float().mean())


def save_hf_format(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """The whole model, written by rank 0."""
    model = engine.module
    with deepspeed.zero.GatheredParameters(
        list(model.parameters()), enabled=engine.zero_optimization_stage() == 3
    ):
        if deepspeed.comm.get_rank() == 0:
            state_dict = {
                name: param.detach().cpu().clone() for name, param in model.named_parameters()
            }
            model.save_pretrained(folder, state_dict=state_dict)


def main() -> None:
    """Train, evaluate, save, generate."""
    args = parse_args()
    deepspeed.init_distributed()
    accelerator = deepspeed.get_accelerator()
    accelerator.set_device(args.local_rank)
    device = torch.device(accelerator.device_name(args.local_rank))
    set_seed(args.seed)

    stage = json.loads(Path(args.deepspeed_config).read_text())["zero_optimization"]["stage"]
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=stage == 3):
        model = make_model()
    positions = model.transformer.wpe.weight
    gathered = deepspeed.zero.GatheredParameters(positions, modifier_rank=0, enabled=stage == 3)
    with gathered, torch.no_grad():
        positions.mul_(0.5)  # a start of one's own
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    train_set = Sequences(args.num_train_samples, length=12, seed=1)
    eval_set = Sequences(8, length=12, seed=2)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)
    eval_loader = DataLoader(
        eval_set, batch_size=2, sampler=eval_sampler, collate_fn=default_data_collator
    )

    def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return get_linear_schedule_with_warmup(optimizer, args.num_warmup_steps, 100)

    engine, _, train_loader, lr_scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=group_parameters(model, args.weight_decay),
        training_data=train_set,
        lr_scheduler=make_scheduler,
        collate_fn=default_data_collator,
    )
    print_rank_0(f"batch {engine.train_batch_size()}")

    for epoch in range(args.num_train_epochs):
        engine.train()
        for batch in train_loader:
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
            print_rank_0(f"loss {mean_over_ranks(loss)!r}")
            if engine.was_step_applied():
                print_rank_0(f"grad_norm {engine.get_global_grad_norm()!r}")
        print_rank_0(f"epoch {epoch}: eval {evaluate(engine, eval_loader, device)!r}")

    embedding = engine.module.transformer.wte.weight
    whole = deepspeed.utils.safe_get_full_fp32_param(embedding)
    moment = deepspeed.utils.safe_get_full_optimizer_state(embedding, "exp_avg")
    print_rank_0(f"norms {[whole.norm().item(), moment.norm().item()]}")
    print_rank_0(f"steps {engine.global_steps - engine.skipped_steps}")
    print_rank_0(f"lr {lr_scheduler.get_last_lr()}")

    save_hf_format(engine, args.output_dir)
    prompt = eval_set.tokens[:2, :4].to(device)
    engine.eval()
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped:
        generated = unwrapped.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
        )
    print_rank_0(f"generated {generated.tolist()}")
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
