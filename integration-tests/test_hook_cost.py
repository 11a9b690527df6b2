"""What a hook costs must not grow with how many hooks there are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import zero_engine
import zero_partition
from torch import Tensor, nn
from zero_comm import Group

PACKAGE = str(Path(inspect.getfile(zero_partition)).parent)


class _Many(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(1) for _ in range(num)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.gains)).sum() * x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_four_times_the_parameters_is_four_times_the_work(stage: int) -> None:
    """Asking at each arrival whether all have arrived is a square, and shows at thousands."""
    few, many = (_instructions_of_a_step(num, stage) for num in (50, 200))

    assert many <= 4 * few


def _instructions_of_a_step(num: int, stage: int) -> int:
    model = _Many(num)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage), group=Group.solo())
    for _ in range(2):
        with _counting_instructions() as count:
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return count[0]


@contextmanager
def _counting_instructions() -> Iterator[list[int]]:
    """Python's own, in this package: exact, whatever else the machine does."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        count[0] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
