"""Train a small GPT on Python source with ZeRO, on two CPU ranks or on every GPU there is.

    hatch run train                                    # stage 3, about three minutes on two cores
    hatch run train --stage 1 --ranks 4 --steps 200
    hatch run train --data ~/novels --size medium      # a file, or a folder of text files
    hatch run train --optimizer-on disk --params-on disk --path /scratch     # little in memory

Hatch installs what it imports; elsewhere: pip install matplotlib safetensors tqdm.

Read it top to bottom: the text, the model, the training, the run folder, the command line. The
changes to a plain PyTorch program for ZeRO are in `train()`, on the lines marked `# zero`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import sys
import sysconfig
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero_comm
import zero_engine
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from zero_partition import memory_report

try:
    from matplotlib.figure import Figure
    from safetensors.torch import save_file
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}: pip install matplotlib safetensors tqdm")

NUM_SYMBOLS = 256  # one per byte: no tokenizer, and any text will do
SIZES = {"tiny": (2, 64, 2), "small": (4, 192, 6), "medium": (8, 512, 8)}  # layers, width, heads

# -- The text ------------------------------------------------------------------------------------


def read_text(source: Path | None, context: int) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the held-out bytes, the same on every rank."""
    if source is None:
        source = Path(sysconfig.get_paths()["stdlib"])
        # Tests and tables of character codes are Python too, but teach little of its style.
        skipped = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
        files = [file for file in source.rglob("*.py") if not skipped.intersection(file.parts)]
    else:
        files = list(source.rglob("*")) if source.is_dir() else [source]
    files.sort()  # a file system may list them to each rank in another order
    random.Random(0).shuffle(files)  # so that the held-out end is a fair sample
    try:
        texts = [file.read_bytes() for file in files if not file.is_dir()]
    except OSError as error:
        raise SystemExit(f"--data {source}: expected a readable file or folder: {error}") from None
    text = b"\n".join(text for text in texts if b"\0" not in text)  # a zero byte: not a text
    cut = len(text) * 19 // 20
    if len(text) - cut < context + 2:
        raise SystemExit(
            f"--data {source}: expected at least {20 * (context + 2):,} bytes of text, of which a "
            f"twentieth is held out, got {len(text):,} from {len(texts)} files"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def draw_batch(data: Tensor, args: argparse.Namespace, rng: torch.Generator) -> Tensor:
    """Return `batch` random pieces of the text, each `context` bytes and one more to predict."""
    starts = torch.randint(len(data) - args.context, (args.batch, 1), generator=rng)
    return data[starts + torch.arange(args.context + 1)].long()


# -- The model: plain PyTorch, which knows nothing of ranks --------------------------------------


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with the position: rotary embedding."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Block(nn.Module):
    """Attention, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes in, a score for each possible next byte out."""

    def __init__(self, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_SYMBOLS, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:  # small: all bytes equally likely at first, a loss of ln 256 = 5.55
                nn.init.normal_(param, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, context) bytes to (batch, context, 256) scores."""
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean surprise, in nats, at each next byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# -- The training --------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train, evaluate, sample and save. Every rank runs all of this."""
    group = zero_comm.init()  # zero: this process's rank, the world size and the device
    text, held_out = read_text(args.data, args.context)
    torch.manual_seed(args.seed)
    model = GPT(*SIZES[args.size]).to(group.device)
    optimizer = build_optimizer(model, args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, args.steps))

    # zero: returns the same two objects, sharded over the ranks, with rank 0's values. Offloaded
    # states are moved to the device when they are needed; results are the same.
    offload = zero_engine.Offload(
        optimizer=args.optimizer_on, params=args.params_on, path=args.path
    )
    config = zero_engine.ZeroConfig(stage=args.stage, offload=offload)
    model, optimizer = zero_engine.shard(model, optimizer, config)

    rng = torch.Generator().manual_seed(1000 * args.seed + group.rank)  # other text on each rank
    rows, losses, since = [], [], time.perf_counter()
    bar = tqdm(range(1, args.steps + 1), unit="step", disable=group.rank != 0)
    for step in bar:
        loss = loss_of(model, draw_batch(text, args, rng).to(group.device))
        loss.backward()
        norm = zero_engine.clip_grad_norm_(model, 1.0)  # zero: the norm over all ranks' shards
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        losses.append(loss.detach())
        is_evaluation = step % max(1, args.steps // 5) == 0 or step == args.steps
        if not (is_evaluation or step == 1 or step % 10 == 0):
            continue  # to read a loss is to wait for the device: now and then is enough
        row: dict[str, float | None] = {"step": step, "norm": float(norm)}
        row["loss"] = mean_over_ranks(losses, group)
        num_tokens = len(losses) * args.batch * args.context * group.world_size
        row["tokens_per_s"] = round(num_tokens / (time.perf_counter() - since))
        row["val_loss"] = evaluate(model, held_out, args, group) if is_evaluation else None
        rows.append(row)
        state = tqdm.format_sizeof(memory_report(model).model_state_bytes, "B")  # zero: its share
        speed = f"{row['tokens_per_s']:,} tokens/s"
        bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed}, model state {state} per rank")
        losses, since = [], time.perf_counter()

    params = zero_engine.full_state_dict(model)  # zero: collective; whole parameters on rank 0
    if group.rank == 0:
        write_run(args, rows, params)
    sampled = sample(model, args, group)
    if group.rank == 0:
        (args.out / "sample.txt").write_text(sampled + "\n", encoding="utf-8")
        print(f"{sampled}\n\nThis, the parameters, metrics and a plot are in {args.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices, and leaves biases and norms alone."""
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def pace(step: int, num_steps: int) -> float:
    """Return the part of the learning rate to use: a steep rise, then half a cosine down."""
    rise = (step + 1) / max(1, num_steps // 20)
    return min(rise, 0.05 + 0.95 * (1 + math.cos(math.pi * step / num_steps)) / 2)


def mean_over_ranks(losses: list[Tensor], group: zero_comm.Group) -> float:
    """Average losses here, then over the ranks. Collective."""
    mean = torch.stack(losses).mean()
    zero_comm.all_reduce_coalesced([mean], group=group).wait()  # in place
    return mean.item()


@torch.no_grad()
def evaluate(
    model: nn.Module, held_out: Tensor, args: argparse.Namespace, group: zero_comm.Group
) -> float:
    """Return the loss on text that training never sees; ranks share the work. Collective."""
    model.eval()
    rng = torch.Generator().manual_seed(group.rank)  # the same pieces in every evaluation
    batches = [draw_batch(held_out, args, rng).to(group.device) for _ in range(16)]
    losses = [loss_of(model, batch) for batch in batches]
    model.train()
    return mean_over_ranks(losses, group)


@torch.no_grad()
def sample(model: nn.Module, args: argparse.Namespace, group: zero_comm.Group) -> str:
    """Continue the prompt, byte by byte. Collective.

    At stage 3 a forward gathers parameters from all ranks, so all run the same forwards: they start
    from one prompt and draw with equal seeds, hence the same bytes.
    """
    model.eval()
    rng = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([list(args.prompt.encode() or b"\n")], device=group.device)
    for _ in range(600):
        scores = model(tokens[:, -args.context :])[:, -1].cpu()
        chances = torch.softmax(scores / 0.8, dim=-1)  # below 1: prefer the likely bytes
        token = torch.multinomial(chances, 1, generator=rng).to(group.device)
        tokens = torch.cat([tokens, token], dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


# -- The run folder ------------------------------------------------------------------------------


def write_run(args: argparse.Namespace, rows: list[dict], params: dict) -> None:
    """Write options, metrics, their plot and the parameters. Local."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(vars(args), indent=2, default=str) + "\n")
    with (args.out / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", "loss", "val_loss", "tokens_per_s", "norm"])
        table.writeheader()
        table.writerows(rows)

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    for name, style, label in ("loss", "-", "training"), ("val_loss", "o", "held-out text"):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"GPT, ZeRO stage {args.stage}")
    axes.legend()
    figure.savefig(args.out / "loss.png", dpi=120)

    save_file(params, args.out / "model.safetensors")  # GPT.load_state_dict() takes it back
    last = rows[-1]
    print(f"\nloss {rows[0]['loss']:.2f} -> {last['loss']:.2f}, held out {last['val_loss']:.2f}")


# -- The command line ----------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with ZeRO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage; 0 shards nothing")
    add("--ranks", type=int, default=torch.accelerator.device_count() or 2, help="processes")
    add("--size", choices=SIZES, default="small", help="layers and width of the model")
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--batch", type=int, default=8, help="pieces of text per rank and step")
    add("--context", type=int, default=128, help="bytes the model looks back at")
    add("--seed", type=int, default=0, help="of the parameters, the batches and the sample")
    add("--data", type=Path, help="file or folder of text; None: Python's standard library")
    add("--prompt", default="\n\ndef ", help="what the sample starts with")
    add("--out", type=Path, help="run folder; None: a new one under runs/")
    places = ("device", "host", "disk")
    add("--optimizer-on", choices=places, default="device", help="where its state is stored")
    add("--params-on", choices=places, default="device", help="of parameters, the same; stage 3")
    add("--path", type=Path, help="folder on the disk for states that are offloaded there")
    args = parser.parse_args()
    if min(args.ranks, args.steps, args.batch, args.context) < 1:
        parser.error("--ranks, --steps, --batch and --context must be above zero")
    name = f"{args.size}-stage{args.stage}-{datetime.now():%Y%m%d-%H%M%S}"
    args.out = args.out or Path("runs", name)
    return args


def main() -> None:
    """Train as one rank, if torchrun started this process or one is enough; else start ranks."""
    args = parse_options()
    if "WORLD_SIZE" in os.environ or args.ranks == 1:
        train(args)
        return
    read_text(args.data, args.context)  # complain once, before anything is started
    # Ranks share the cores of a CPU; more threads than cores only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.ranks)))
    try:
        torchrun(["--standalone", f"--nproc-per-node={args.ranks}", *sys.argv])
    except ChildFailedError:
        sys.exit(1)  # the rank that failed has shown its own traceback


if __name__ == "__main__":
    main()
