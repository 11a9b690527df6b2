"""What cannot be meant is refused where it is written, not in the middle of a forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from zero_ckpt import (
    MATMULS,
    Checkpointer,
    CheckpointError,
    CheckpointFunction,
    PackedSaver,
    RngTracker,
    Verification,
    by_name,
    by_operator,
    by_type,
    every_nth,
    inside,
    partition_activations_in_checkpoint,
    set_num_layers,
    within_bytes,
)

X = torch.ones(2)
MODEL = nn.ModuleDict({"head": nn.Linear(2, 2)})

NO_BOOL = [None, 1, "no"]  # None is no choice here, and "no" is true
NO_OPERATORS = [by_name("*"), "mm", every_nth(2, by_type(nn.Linear))]
COUNTS = [0, -1, 1.5, "2", True]  # none of them is one

CASES: dict[str, tuple[Callable[[Any], Any], list[Any], str]] = {  # what is called, with, says
    "saver": (lambda v: Checkpointer(saver=v), ["host"], r"saver=\): expected .* or None, got"),
    "tracker": (lambda v: Checkpointer(tracker=v), [3], r"tracker=\): expected .* or None, got"),
    "early": (lambda v: Checkpointer(stops_early=v), NO_BOOL, r"stops_early=\): expected True or"),
    "waits": (lambda v: Checkpointer(synchronizes=v), NO_BOOL, r"synchronizes=\): expected True"),
    "times": (lambda v: Checkpointer(profiles=v), NO_BOOL, r"profiles=\): expected True or False"),
    "verifies": (lambda v: Checkpointer(verifies=v), [True], r"Checkpointer\(verifies=\): .* got "),
    "every": (Verification, COUNTS, r"Verification\(every=\): .* got .*verifies=None"),
    "keeps": (lambda v: Checkpointer(keeps=v), NO_OPERATORS, r"keeps=.*policy over operators.*got"),
    "the first tensor, or DeepSpeed's list": (
        lambda v: CheckpointFunction.apply(torch.sin, v, X),
        [None, 1, X],
        r"bool.*list.*call checkpoint\(\)",
    ),
    "a size that has slipped by one argument": (
        lambda v: Checkpointer().checkpoint_distributed(torch.sin, v, X),
        [None, 1],
        "expected True or False",
    ),
    "group": (lambda v: PackedSaver(group=v), ["tp"], "a zero_comm.Group or None, got 'tp'"),
    "on host": (lambda v: PackedSaver(on_host=v), NO_BOOL, "expected True or False, got"),
    "slots": (lambda v: PackedSaver(num_slots=v), COUNTS, "1 or more, or None, got"),
    "layers": (set_num_layers, [*COUNTS, None], r"set_num_layers\(\): expected an int of 1 or"),
    "in checkpoint": (partition_activations_in_checkpoint, ["no"], r"in_checkpoint\(\): expected"),
    "an rng's name": (lambda v: RngTracker("cpu").add(v, 3), [3], "expected a str as name"),
    "a fork's name": (lambda v: RngTracker("cpu").fork(v).__enter__(), [None], "a str as name"),
    "budget": (lambda v: within_bytes(v, MATMULS), [-1, 1.5, None], "0 or more bytes"),
    "of a budget": (
        lambda v: within_bytes(5, v),
        NO_OPERATORS,
        "within_bytes.*expected a policy over operators",
    ),
    "classes": (by_type, [int, nn.Linear(1, 1)], "classes of modules"),
    "nth": (lambda v: every_nth(v, by_name("*")), [0], "1 or more"),
    "modules": (lambda v: inside(MODEL, v), [MATMULS, "head"], "expected a policy over modules"),
    "no module": (lambda v: inside(MODEL, lambda _: v), [["top"]], "selects 'top', which has"),
    "no names": (lambda v: inside(MODEL, lambda _: v), [True, "head"], "returned (True|'head')"),
    # A name that never matches would be a setting that is silently ignored.
    "no operator": (by_operator, ["mmm"], "there is no such operator.*close: .*mm"),
    "no namespace": (by_operator, ["nowhere::mm"], "there is no such operator"),
    "writes": (by_operator, ["relu_"], "writes to its arguments"),
    "view": (by_operator, ["view"], "views"),
    "cast": (by_operator, ["_to_copy"], "casts"),
    "composite": (by_operator, ["linear"], "made of other operators.*MATMULS"),
    "composite object": (by_operator, [torch.ops.aten.matmul], "made of other operators"),
    "no name": (by_operator, [3], "expected names or operators"),
    # What torch would do and we do not: selective checkpointing that is not done takes memory that
    # was counted on.
    **{
        f"torch's {name}": (
            lambda v, name=name: Checkpointer().checkpoint(torch.sin, X, **{name: v}),
            [value],
            rf"checkpoint\({name}=\).*{remedy}.*partial",
        )
        for name, value, remedy in (
            ("use_reentrant", "no", "expected True or False or None"),
            ("determinism_check", "none", "always compared"),
            ("context_fn", lambda: (nullcontext(), nullcontext()), r"Checkpointer\(keeps="),
            ("debug", True, r"Checkpointer\(verifies="),
            ("early_stop", False, r"Checkpointer\(stops_early="),
        )
    },
    "no times": (lambda _: Checkpointer().timings(), [None], r"Checkpointer\(profiles=True\)"),
}


@pytest.mark.parametrize(("call", "values", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_meant_is_refused(
    call: Callable[[Any], Any], values: list[Any], message: str
) -> None:
    """The message says what was expected, and where."""
    for value in values:
        with pytest.raises(CheckpointError, match=message):
            call(value)
