"""Optimizers that people install train as in plain torch, or are refused with the reason.

`hatch run optimizers:test`, in an environment that has them; not a part of `hatch run test`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from zero_comm.testing import RankPool

sys.path.insert(0, str(Path(__file__).parent))

import survey
import zoo_of_optimizers as zoo

# Nothing of these is done: no step is taken, and the words say which dependence it is.
REFUSED: Final = {
    r"writes param_groups\[0\]\[.*from gradients": (
        "prodigyopt.Prodigy",
        *(f"dadaptation.DAdapt{name}" for name in ("Adam", "Lion", "AdaGrad", "Adan")),
    ),
    r"combines values of several parameters": (
        *(f"pytorch_optimizer.{name}" for name in ("Prodigy", "DAdaptAdam", "DAdaptLion")),
        *(f"pytorch_optimizer.{name}" for name in ("Adai", "DAdaptSGD", "Ranger21")),
        *("heavyball.PSGDKron", "timm.Lamb"),
    ),
    r"looks at elements that a rank would not have": ("dadaptation.DAdaptSGD", "timm.Kron"),
    r"a trial step on shards failed": ("muon",),
    r"differentiates gradients again": ("pytorch_optimizer.SophiaH", "timm.Adahessian"),
    r"wants the loss, and each rank knows that of its own": ("pytorch_optimizer.AliG",),
    r"evaluates the loss by a closure|as it wraps another optimizer": ("SAM",),
    r"keeps parameters in its attribute '_params'": ("LBFGS",),
}
NOT_ON_HOST: Final = {
    r"keeps state of no parameter": (
        *(f"pytorch_optimizer.{name}" for name in ("SPAM", "EmoLynx", "EmoFact")),
    ),
    r"a Lookahead cannot be offloaded": ("timm.Lookahead",),
    r"in different collectives": ("prodigyopt.Prodigy(fsdp_in_use)",),  # sub-groups differ
}
# What they need is each rank's own, under DDP too: the loss, or the graph behind its gradients.
NOWHERE: Final = ("pytorch_optimizer.AliG", "pytorch_optimizer.SophiaH", "timm.Adahessian")
# Decompositions, codes and Muon's iteration in bfloat16 enlarge the last bit, which is another one
# where gradients are averaged over three ranks, or zero-offload's AdamW steps.
TOLERANCE: Final = {
    "ChainedOptimizer(Muon, AdamW)": 1e-4,
    **dict.fromkeys(("galore_torch.GaLoreAdamW", "apollo_torch.APOLLOAdamW"), 0.001),
    **{f"torchao.{name}": 1e-3 for name in ("Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{f"bitsandbytes.{name}": 1e-3 for name in ("Adam8bit", "AdamW8bit", "PagedAdamW8bit")},
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two, RankPool(3) as three:
        yield {1: one, 2: two, 3: three}


def _words(table: dict[str, tuple[str, ...]], name: str) -> str | None:
    return next((words for words, names in table.items() if name in names), None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", survey.CELLS, ids=str)
@pytest.mark.parametrize("name", zoo.OPTIMIZERS)
def test_it_trains_as_plain_torch_or_says_why_not(
    pools: dict[int, RankPool], name: str, cell: tuple[int, str]
) -> None:
    outcome, off = survey.look(pools, name, *cell)
    refused = _words(REFUSED, name)
    if refused is None and cell[1] == "host":
        refused = _words(NOT_ON_HOST, name)
    if refused is not None:
        assert outcome.kind == "refused"
        assert re.search(refused, outcome.words), outcome.words
        return
    assert outcome.kind == "trains", outcome.words
    assert off < TOLERANCE.get(name, 1e-5), outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for names in REFUSED.values() for name in names if name not in NOWHERE]
)
def test_what_is_refused_trains_at_stage_0(pools: dict[int, RankPool], name: str) -> None:
    """The remedy that the errors name."""
    outcome, off = survey.look(pools, name, 0, "device")
    assert outcome.kind == "trains", outcome.words
    assert off < 1e-5, outcome
