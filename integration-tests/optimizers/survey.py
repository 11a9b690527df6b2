"""What becomes of each optimizer of `zoo_of_optimizers` over shards, against plain torch.

python integration-tests/optimizers/survey.py docs/guides/optimizers.md   # writes the table
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import zero_engine
import zoo_of_optimizers as zoo
from attrs import frozen
from torch import Tensor, nn
from zero_comm import Group
from zero_comm.testing import RankPool
from zero_engine import Offload, ZeroConfig
from zero_partition.seams import find_sharded

NUM_STEPS: Final = 12
SAVED_AT: Final = 6
CELLS: Final = ((1, "device"), (3, "device"), (1, "host"), (3, "host"))
TIMEOUT_S: Final = 240.0
_NEED_CLOSURE: Final = ("SAM", "LBFGS")
_NEED_LOSS: Final = ("AliG",)  # from a closure that evaluates nothing
_NEED_GRAPH: Final = ("Adahessian", "AdaHessian", "SophiaH")  # they differentiate gradients


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model each time, with matrices above where state is quantized and factored."""
    torch.set_num_threads(1)  # decompositions depend on it
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(80, 64), _Block(), _Block(), nn.Linear(64, 80))
    return model, zoo.OPTIMIZERS[name](model)


def _loss(model: nn.Module, step: int, ranks: tuple[int, ...]) -> Tensor:
    losses = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 80, (4, 8), generator=generator)
        logits = model(tokens)[:, :-1]
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    return torch.stack(losses).mean()


def _train(model: nn.Module, optimizer: Any, steps: range, ranks: tuple[int, ...]) -> list[float]:
    """The losses of these ranks' batches; schedule-free optimizers change modes on the way."""
    has_modes = all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
    torch.manual_seed(2 + steps.start)
    losses = []
    for step in steps:

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, step, ranks)
            loss.backward(create_graph=type(optimizer).__name__ in _NEED_GRAPH)
            return loss

        if has_modes and step % 4 == 1:
            optimizer.eval()
            with torch.no_grad():
                losses.append(_loss(model, 99, ranks).item())
        if has_modes:
            optimizer.train()
        if type(optimizer).__name__ in _NEED_CLOSURE:
            losses.append(optimizer.step(closure).item())
        else:
            loss = closure().item()
            losses.append(loss)
            optimizer.step(*[lambda loss=loss: loss] * (type(optimizer).__name__ in _NEED_LOSS))
    return losses


def train_plainly(name: str, num_ranks: int) -> list[float]:
    """In one process, which sees the batches of two ranks, and of so many from the middle on."""
    model, optimizer = build(name)
    first = _train(model, optimizer, range(SAVED_AT), (0, 1))
    later = _train(model, optimizer, range(SAVED_AT, NUM_STEPS), tuple(range(num_ranks)))
    return first + later


@frozen
class Outcome:
    """What became of an optimizer in one cell."""

    kind: str  # "trains", "refused", "fails", "not saved" or "not loaded"
    losses: list[float]
    words: str = ""
    cuts: str = ""


def train_sharded(
    group: Group, name: str, stage: int, place: str, folder: str, *, is_first: bool
) -> tuple[Any, ...]:
    """Until it is saved; or from there on, by other ranks in a model of another stage.

    Returns:
        The fields of an `Outcome`, whose class another process may have by another name.
    """
    losses: list[float] = []
    offload = Offload(optimizer="host") if place == "host" else None
    model, optimizer = build(name)
    config = ZeroConfig(stage, min_unit_bytes=0, offload=offload)
    doing = "refused"
    with warnings.catch_warnings(action="ignore"):
        try:
            zero_engine.shard(model, optimizer, config, group=group)
            sharded: Any = find_sharded(model)
            cuts = ", ".join(sorted({str(place.plan.cut) for place in sharded.param_refs}))
            if not is_first:
                doing = "not loaded"
                report: Any = zero_engine.load(folder, model, optimizer)
                assert not report.begins_anew, report.begins_anew[0]
            doing = "fails"
            steps = range(SAVED_AT) if is_first else range(SAVED_AT, NUM_STEPS)
            losses += _train(model, optimizer, steps, (group.rank,))
            if is_first:
                doing = "not saved"
                zero_engine.save(folder, model, optimizer, step=SAVED_AT)
        except Exception as error:
            return doing, losses, _said(error)
    return "trains", losses, "", cuts


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _means(found: list[Outcome]) -> list[float]:
    """Of the ranks' losses, by step."""
    return [sum(of) / len(of) for of in zip(*(o.losses for o in found), strict=True)]


def look(pools: dict[int, RankPool], name: str, stage: int, place: str) -> tuple[Outcome, float]:
    """What became of an optimizer in one cell, and how far it is from plain torch.

    Two ranks save; one or three go on, at another stage. Differences are of losses, relative where
    these are above 1.
    """
    num_ranks, means, first = 3 if stage == 3 else 1, list[float](), Outcome("fails", [])
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"name": name, "place": place, "folder": folder}
        for is_first in (True, False):
            pool = pools[2 if is_first else num_ranks]
            options |= {"stage": stage if is_first or not stage else 4 - stage}
            replies = pool.run(train_sharded, **options, is_first=is_first, timeout_s=TIMEOUT_S)
            found = [Outcome(*reply) for reply in replies]
            first = found[0] if is_first else first
            means += _means(found)
            if found[0].kind != "trains":
                first = found[0]
                break
    expected = train_plainly(name, num_ranks) if means else []
    pairs = zip(means, expected, strict=False)
    return first, max((abs(a - b) / max(1.0, abs(b)) for a, b in pairs), default=0.0)


def _shorten(words: str) -> str:
    return textwrap.shorten(words, 160, placeholder=" ...")


def _row(name: str, seen: dict[tuple[int, str], tuple[Outcome, float]]) -> str:
    device, host = (seen[3, place][0] for place in ("device", "host"))
    if device.kind == "refused":
        reason = re.sub(r"^\w+Error: (a \w+ (cannot work on shards: )?)?", "", device.words)
        return f"| `{name}` | refused | | {_shorten(reason.split('. Stage 0')[0])} |"
    assert device.kind == "trains", (name, device)
    words = "" if host.kind == "trains" else _shorten(re.sub(r"^\w+Error: ", "", host.words))
    return f"| `{name}` | {device.cuts} | {'refused' if words else 'yes'} | {words} |"


def main(page: Path) -> None:
    """Write the table between the lines that mark it."""
    rows = []
    with RankPool(1) as one, RankPool(2) as two, RankPool(3) as three:
        pools = {1: one, 2: two, 3: three}
        for name in zoo.OPTIMIZERS:
            seen = {cell: look(pools, name, *cell) for cell in CELLS}
            worst = max(off for _, off in seen.values())
            assert worst < 1e-4, (name, worst)
            rows.append(_row(name, seen))
            print(rows[-1], flush=True)
    text = page.read_text()
    begin, end = "<!-- table -->\n", "<!-- end -->"
    before, rest = text.split(begin)
    head = "| optimizer | cut | state on the host | why not |\n|---|---|---|---|\n"
    page.write_text(before + begin + head + "\n".join(rows) + "\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
