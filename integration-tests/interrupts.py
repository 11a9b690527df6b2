"""Exceptions from outside, as Ctrl-C is, at each line of ours that a step runs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import parity
import torch
import zero_ckpt
import zero_comm
import zero_deepspeed
import zero_engine
import zero_offload
import zero_partition
from attrs import define, field
from parity import ZeroConfig
from torch import Tensor, nn
from zero_ckpt import checkpoint
from zero_comm import Group
from zero_comm.testing import equal
from zero_engine import Offload, Wire
from zero_partition.seams import find_sharded

_PACKAGES: Final = (
    *(zero_comm, zero_partition, zero_offload, zero_ckpt, zero_engine, zero_deepspeed),
)
_OURS: Final = tuple(str(Path(package.__file__).parent) for package in _PACKAGES)
_OF_TESTS: Final = str(Path(zero_comm.testing.__file__).parent)  # no user runs its lines


class InterruptError(KeyboardInterrupt):
    """What `except Exception` does not see."""


@define
class Interrupting:
    """Raises InterruptError at the `at`-th line of our packages that this thread begins to run."""

    at: int = 0  # 0: nowhere; lines are counted
    lines: list[tuple[str, int]] = field(factory=list, init=False)  # those that it saw begin
    where: str = field(default="", init=False)
    _before: Any = field(default=None, init=False)

    def __enter__(self) -> Interrupting:
        """Begin to count."""
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        files = [each.f_code.co_filename for each in (frame, frame.f_back) if each is not None]
        is_of_tests = any(file.startswith(_OF_TESTS) for file in files)  # or called by those
        return self._line if files[0].startswith(_OURS) and not is_of_tests else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_lasti not in _without_signals(frame.f_code):
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.at and _is_in_finalizer(frame):
                self.at += 1
            elif len(self.lines) == self.at:
                sys.settrace(None)
                code = frame.f_code
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
                raise InterruptError
        return self._line


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether Python prints and ignores what is raised, as there is nobody to catch it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_qualname == "finalize.__call__":
            return True
        frame = frame.f_back
    return False


@cache
def _without_signals(code: CodeType) -> frozenset[int]:
    """Return where no handler of a signal runs, but a trace function does.

    The exits of `with` statements begin there, between the body and the call of `__exit__`, and
    `pass` is there: who holds a lock relies on it. What is raised at the `pass` of such a body is
    no part of it to Python, and leaves it without the call of `__exit__`.
    """
    found = [*dis.get_instructions(code)]
    nothing = {each.offset for each in found if each.opname == "NOP"}
    none = [each.opname == "LOAD_CONST" and each.argval is None for each in found]
    threes = zip(none, none[1:], none[2:], strict=False)
    exits = [at for at, is_exit in enumerate(threes) if all(is_exit)]
    # Where a body returns, what it returns is put aside first.
    exits += [at - 1 for at in exits if found[at - 1].opname == "SWAP"]
    return frozenset({found[at].offset for at in exits} | nothing)


# ---- What is interrupted ----


class Recomputing(parity.Tiny):
    """Blocks are recomputed in backward by zero_ckpt."""

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(tokens) + self.positions + self.frozen
        for block in self.blocks:
            x = checkpoint(block, x)
        for gate in self.gates:
            x = gate(x)
        x = x + self.lift(self.adapter(x.to(self.lift.weight.dtype))).float()
        return self.head(x) * self.scale


@define
class Case:
    """A model and how it is sharded."""

    config: Callable[..., Any]
    make: Callable[[], nn.Module] = parity.Tiny
    num_micro: int = 1  # batches of a step; all but the last inside no_sync()

    def build(self, group: Group | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard it, and take two steps."""
        model, optimizer = parity.build_with_optimizer(make=self.make)
        group = Group.solo(torch.get_default_device()) if group is None else group
        zero_engine.shard(model, optimizer, self.config(), group=group)
        for step in range(2):
            self.run(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def run(self, model: nn.Module, step: int) -> list[Tensor]:
        """Forward and backward of all micro-batches; returns the losses."""
        sharded = find_sharded(model)
        assert sharded is not None
        losses = []
        for micro in range(self.num_micro):
            is_last = micro == self.num_micro - 1
            with nullcontext() if is_last else zero_engine.no_sync(model):
                loss = parity.loss_of(model, parity.batch(step, micro, sharded.whole.rank))
                loss.backward()
            losses.append(loss.detach())
        return losses


def _host(**options: Any) -> Offload:
    return Offload(optimizer="host", **options)


CASES: Final = {
    **{f"stage-{stage}": Case(partial(ZeroConfig, stage)) for stage in parity.STAGES},
    "stage-2-int8": Case(partial(ZeroConfig, 2, wire=Wire(gradients="int8", levels=1))),
    "stage-3-two-slots": Case(partial(ZeroConfig, 3, window=2)),
    "stage-1-host": Case(partial(ZeroConfig, 1, offload=_host())),
    "stage-3-host": Case(partial(ZeroConfig, 3, offload=_host(params="host"))),
    "stage-0-micro": Case(partial(ZeroConfig, 0), num_micro=2),
    "stage-2-micro": Case(partial(ZeroConfig, 2), num_micro=2),
    "stage-1-checkpoint": Case(partial(ZeroConfig, 1), make=Recomputing),
    "stage-3-checkpoint": Case(partial(ZeroConfig, 3), make=Recomputing),
}


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """Copies of what the optimizer would step with."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [None if p.grad is None else p.grad.detach().clone() for p in params]


def are_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether these are the same bits, and the same are missing."""
    return len(found) == len(expected) and all(
        (a is None and b is None) or (a is not None and b is not None and equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


@contextmanager
def interrupted(at: int) -> Iterator[Interrupting]:
    """Go on after it."""
    interrupting = Interrupting(at)
    try:
        with interrupting:
            yield interrupting
    except InterruptError:
        pass
