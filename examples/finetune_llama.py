"""Fine-tune a Llama of transformers with ZeRO: all weights, or LoRA adapters with `--lora`.

    torchrun --nproc-per-node 2 examples/finetune_llama.py          # minutes on two cores
    torchrun --nproc-per-node 2 examples/finetune_llama.py --lora
    torchrun --nproc-per-node 8 examples/finetune_llama.py --base /models/llama --lora

It learns to write docstrings. Examples are the functions of Python's standard library: the code is
the prompt, and the first paragraph of the docstring is the answer. Without `--base` it first makes
a base model, so that none has to be downloaded: a tokenizer and a small Llama, trained on other
modules for a minute and saved as a Hugging Face folder.

With a run folder that has checkpoints, training resumes, at any number of ranks. It needs
transformers and peft. The changes to a plain program for ZeRO are on the lines marked `# zero`.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import zero_comm
import zero_engine
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar
from zero_comm import Group

CONTEXT = 192  # tokens of a prompt and its answer; longer ones are left out
NUM_BASE_MODULES = 60  # the base is trained on these, and sees no held-out function
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "lib2to3"}

# -- The examples --------------------------------------------------------------------------------


class Example(NamedTuple):
    """A function without its docstring, and the docstring's first paragraph."""

    prompt: str
    answer: str


def find_modules() -> list[Path]:
    """Return files of the standard library, in one order on every rank."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not SKIPPED.intersection(file.parts))
    random.Random(0).shuffle(files)
    return files


def find_examples(modules: list[Path]) -> Iterator[Example]:
    """Yield an example for each function with a docstring in these modules."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            if docstring := ast.get_docstring(node):
                node.body.pop(0)
                answer = " ".join(docstring.split("\n\n")[0].split())
                yield Example(f"{ast.unparse(node)}\n\n# Docstring:\n", answer)


class Batches:
    """Examples as tokens: those to train on, and held-out ones."""

    def __init__(self, tokenizer: Any, examples: list[Example], args: argparse.Namespace) -> None:
        self.args, self.end = args, tokenizer.eos_token_id
        self.examples = list[Example]()
        self._tokens = list[tuple[list[int], int]]()  # tokens, and how many are the prompt's
        for example in examples:
            prompt, answer = (tokenizer(text).input_ids for text in example)
            if len(prompt) + len(answer) < CONTEXT:
                self.examples.append(example)
                self._tokens.append(([*prompt, *answer, self.end], len(prompt)))
        # The first ones, so that at most one module has both held-out and other examples.
        self.num_held_out = len(self._tokens) // 20
        every = max(1, self.num_held_out // 3)
        self.shown = self.examples[: self.num_held_out : every][:3]

    def draw(self, number: int, group: Group, *, is_held_out: bool = False) -> dict[str, Tensor]:
        """Return this rank's part of a batch; it depends on the number alone."""
        first, last = (0, self.num_held_out) if is_held_out else (self.num_held_out, None)
        of_all = random.Random(number).choices(
            self._tokens[first:last], k=self.args.batch * group.world_size
        )
        mine = of_all[group.rank :: group.world_size]
        length = max(len(tokens) for tokens, _ in mine)
        ids = torch.full((len(mine), length), self.end)
        labels = torch.full((len(mine), length), -100)  # only answers are learned
        for row, (tokens, num_prompt) in enumerate(mine):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, num_prompt : len(tokens)] = torch.tensor(tokens[num_prompt:])
        lengths = torch.tensor([len(tokens) for tokens, _ in mine])
        mask = (torch.arange(length) < lengths[:, None]).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: value.to(group.device) for name, value in batch.items()}


# -- The base ------------------------------------------------------------------------------------


def make_base(folder: Path, modules: list[Path], args: argparse.Namespace, group: Group) -> None:
    """Train a tokenizer and a small Llama, and save both as a Hugging Face folder. Collective."""
    made = folder.with_name(f"{folder.name}.partial")  # until it is complete
    text = "\n".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)
    if group.rank == 0:
        byte_pairs = Tokenizer(models.BPE())
        byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        byte_pairs.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=2048,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        byte_pairs.train_from_iterator([text], trainer)
        PreTrainedTokenizerFast(
            tokenizer_object=byte_pairs, eos_token="<end>", pad_token="<end>"
        ).save_pretrained(made)
    wait_for_rank_0(group)
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    tokens = torch.tensor(tokenizer(text).input_ids)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2 * CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    sharding = zero_engine.ZeroConfig(stage=args.stage)
    with zero_engine.Init(config=sharding):  # zero: no rank stores the full model
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero_engine.shard(model, optimizer, sharding)  # zero: in place, whatever model it is
    losses = list[float]()
    for step in range(args.base_steps):
        draw = torch.Generator().manual_seed(step * group.world_size + group.rank)
        starts = torch.randint(len(tokens) - CONTEXT, (args.batch, 1), generator=draw)
        ids = tokens[starts + torch.arange(CONTEXT)].to(group.device)
        loss = model(input_ids=ids, labels=ids).loss
        take_step(model, optimizer, loss)
        losses.append(loss.item())
    whole = zero_engine.full_state_dict(model)  # zero: collective; whole weights on rank 0
    if group.rank == 0:
        model.save_pretrained(made, state_dict=whole)
        made.rename(folder)
        num = sum(param.numel() for param in model.parameters())
        print(f"base: {num:,} parameters, loss {losses[0]:.2f} -> {losses[-1]:.2f}, in {folder}")
    wait_for_rank_0(group)


def wait_for_rank_0(group: Group) -> None:
    """Return when rank 0 has come here, too, so that what it wrote can be read. Collective."""
    zero_comm.all_gather_json("written", group=group)


# -- Fine-tuning ---------------------------------------------------------------------------------


def finetune(args: argparse.Namespace) -> None:
    """Load the base, train, evaluate, generate and save. Every rank runs all of this."""
    group = zero_comm.init()  # zero: this process's rank, the world size and the device
    modules = find_modules()
    base = args.base or args.out / "base"
    if not base.exists():
        if args.base is not None:
            raise SystemExit(f"--base {base}: expected a Hugging Face folder, there is none")
        make_base(base, modules[-NUM_BASE_MODULES:], args, group)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    examples = [*islice(find_examples(modules[:-NUM_BASE_MODULES]), args.examples)]
    batches = Batches(tokenizer, examples, args)

    torch.manual_seed(0)
    sharding = zero_engine.ZeroConfig(stage=args.stage)
    with zero_engine.Init(config=sharding):  # zero: each rank keeps its part of what is read
        model = AutoModelForCausalLM.from_pretrained(base)
        if args.lora:
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr or (3e-3 if args.lora else 5e-4))
    zero_engine.shard(model, optimizer, sharding)  # zero

    # zero: what was saved by a run before, at any number of ranks; None at the first start.
    report = zero_engine.load(args.out / "checkpoints", model, optimizer, missing_ok=True)
    first = 0 if report is None else report.step
    if group.rank == 0:
        numel = sum(param.numel() for param in model.parameters())
        print(f"trains {sum(p.numel() for p in trained):,} of {numel:,} parameters")
    show("before", model, tokenizer, batches, group)

    losses = list[Tensor]()
    for step in range(first + 1, args.steps + 1):
        loss = model(**batches.draw(step, group)).loss
        take_step(model, optimizer, loss)
        losses.append(loss.detach())
        if step % max(1, args.steps // 5) == 0 or step == args.steps:
            mean = mean_over_ranks(losses, group)
            # zero: each rank writes its part. Frozen weights are the base's, and are left out.
            saved = zero_engine.save(
                args.out / "checkpoints", model, optimizer, step=step, keep=2, exclude_frozen=True
            )
            if group.rank == 0:
                print(f"step {step}: loss {mean:.3f}, checkpoint in {saved.path}")
            losses.clear()

    generated = show("after", model, tokenizer, batches, group)
    whole = zero_engine.full_state_dict(model)  # zero: collective; whole weights on rank 0
    if group.rank == 0:
        model.save_pretrained(args.out / "model", state_dict=whole)
        tokenizer.save_pretrained(args.out / "model")
        is_same = generate(load_plain(args, base), tokenizer, batches) == generated
        kind = "adapters" if args.lora else "weights"
        print(f"{kind} in {args.out / 'model'}; loaded by plain transformers, text is", end=" ")
        print("the same" if is_same else "another")
    if dist.is_initialized():
        dist.destroy_process_group()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Compute gradients, clip them and update the weights. Collective."""
    loss.backward()
    zero_engine.clip_grad_norm_(model, 1.0)  # zero: the norm over all ranks' shards
    optimizer.step()
    optimizer.zero_grad()


def load_plain(args: argparse.Namespace, base: Path) -> nn.Module:
    """Load the saved model in one process and without zero."""
    if args.lora:
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), args.out / "model"
        )
    return AutoModelForCausalLM.from_pretrained(args.out / "model")


def mean_over_ranks(losses: list[Tensor], group: Group) -> float:
    """Average losses here, then over the ranks. Collective."""
    mean = torch.stack(losses).mean()
    zero_comm.all_reduce_coalesced([mean], group=group).wait()  # in place
    return mean.item()


@torch.no_grad()
def show(when: str, model: nn.Module, tokenizer: Any, batches: Batches, group: Group) -> list[str]:
    """Print the loss on held-out examples, and docstrings for three of them. Collective."""
    model.eval()
    held_out = [batches.draw(number, group, is_held_out=True) for number in range(8)]
    mean = mean_over_ranks([model(**batch).loss for batch in held_out], group)
    texts = generate(model, tokenizer, batches)
    model.train()
    if group.rank == 0:
        print(f"{when}: loss {mean:.3f} on functions that are held out")
        for example, text in zip(batches.shown, texts, strict=True):
            print(f"  {example.prompt.splitlines()[0]:40.40}  {text!r}")
    return texts


@torch.no_grad()
def generate(model: Any, tokenizer: Any, batches: Batches) -> list[str]:
    """Return docstrings for some held-out functions.

    At stage 3 a forward is collective, so all ranks must generate equally many tokens: they get
    the same prompts, and take the likeliest token each time.
    """
    model.eval()
    texts = list[str]()
    for example in batches.shown:
        prompt = tokenizer(example.prompt, return_tensors="pt").to(model.device)
        ids = model.generate(
            input_ids=prompt.input_ids,
            attention_mask=prompt.attention_mask,
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=batches.end,
            eos_token_id=batches.end,
        )
        new = ids[0, prompt.input_ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


# -- The command line ----------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a Llama with ZeRO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--lora", action="store_true", help="train adapters, and leave the base as it is")
    add("--base", type=Path, help="Hugging Face folder to start from; None: a small one is made")
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage; 0 shards nothing")
    add("--examples", type=int, default=3000, help="functions to learn from")
    add("--steps", type=int, default=150, help="optimizer steps")
    add("--base-steps", type=int, default=200, help="optimizer steps of the base that is made")
    add("--batch", type=int, default=8, help="examples per rank and step")
    add("--lr", type=float, help="learning rate; None: 3e-3 with --lora, else 5e-4")
    add("--out", type=Path, help="run folder; None: runs/llama, or runs/llama-lora")
    args = parser.parse_args()
    if min(args.steps, args.base_steps, args.batch) < 1 or args.examples < 100:
        parser.error("--steps, --base-steps and --batch must be above zero, --examples above 99")
    args.out = args.out or Path("runs", "llama-lora" if args.lora else "llama")
    return args


if __name__ == "__main__":
    disable_progress_bar()
    finetune(parse_options())
