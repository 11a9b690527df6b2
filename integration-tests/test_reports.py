"""Names the rank that makes a call alone, of those that all ranks must make, in `zero report`."""

from __future__ import annotations

import inspect
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

import parity
import pytest
import torch
import zero_engine
from parity import ZeroConfig
from torch import nn
from zero_comm import CommError, Group
from zero_comm.failure import ASKED, describe_launches
from zero_engine import failure
from zero_partition.seams import require_sharded

Optimizer = torch.optim.Optimizer

pytestmark = pytest.mark.cpu_only("a report of a device does not say whom a rank waits for")


def _full_state_dict(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    zero_engine.full_state_dict(model)


def _full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    zero_engine.full_optimizer_state_dict(model)


def _save(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    zero_engine.save(folder / "run", model, optimizer, step=1)


def _clip_grad_norm_(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    zero_engine.clip_grad_norm_(model, 1.0)


def _full_grad(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    zero_engine.full_grad(next(model.parameters()))


CALLS: Final = (_full_state_dict, _full_optimizer_state_dict, _save, _clip_grad_norm_, _full_grad)
OF_GRADIENTS: Final = (_clip_grad_norm_, _full_grad)
Call = Callable[[nn.Module, Optimizer, Path], None]


def _trained(
    group: Group, call: Call, *, reads: bool, patience_s: float
) -> tuple[nn.Module, Optimizer]:
    """Return a model after a step, with new gradients for calls that need some."""
    of = Group.from_process_group(group.process_group, patience_s=patience_s)
    group = of if reads else parity.by_messages(patience_s=patience_s)
    assert group.exchanges.reads_peers == reads
    model, optimizer = parity.build_sharded(group, ZeroConfig(3), make=_wide)
    _backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if call in OF_GRADIENTS:
        _backward(model)
    return model, optimizer


def _wide() -> nn.Module:
    """A model whose shards do not fit into the buffers of a socket: a send waits for its peer."""
    return nn.Sequential(*(nn.Linear(768, 768) for _ in range(5)))


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 768)).square().mean().backward()


def _check(folder: Path, call: Call, *, trains: bool = False) -> str:
    """Check the verdict on reports of two ranks, of which rank 1 trains or not; return it."""
    *lines, verdict = failure.summary(folder).splitlines()
    source, first = inspect.getsourcelines(call)
    place = f"{__file__}:{first + len(source) - 1}"
    name = f"{call.__name__[1:]}()"
    # Each step clips, and who trains may have a batch more: any rank may be wrong.
    if trains or call is _clip_grad_norm_:
        assert verdict.startswith(f"look at rank 0, in {name} at {place}, and at rank 1, at ")
        assert re.search(rf"at rank 1, at {re.escape(__file__)}:\d", verdict)
    else:
        assert verdict.startswith(f"look at rank 0 first: {name} is called there, at {place}, and")
        assert "not on rank 1." in verdict
    assert "`if rank == 0:`" in verdict
    own = "\n".join(lines).partition("\nrank 1: ")[0]
    assert lines[0].startswith("rank 0: ")
    assert "no rank" not in own
    assert f"in {name} at {place}" in own
    return verdict


@pytest.mark.parametrize("reads", [False, True], ids=["messages", "memory"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_an_error_of_a_call_that_one_rank_makes_names_it(
    group: Group, tmp_path: Path, call: Call, reads: bool
) -> None:
    """Each rank waits for the other one, so that the waits alone accuse neither."""
    model, optimizer = _trained(group, call, reads=reads, patience_s=0.25)
    with pytest.raises(CommError) as caught:
        if group.rank == 0:
            call(model, optimizer, tmp_path)
        # Rank 0 needs peers to gather over messages, and to write where they read its memory. What
        # it launches in the call could also meet the same launch of a step, so that comes later.
        if reads:
            _backward(model)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            _backward(model)
    error = caught.value
    why = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
    _report(tmp_path, why, model, group)

    if group.rank == 0:
        _wait_for(tmp_path, 1)
        verdict = _check(tmp_path, call, trains=reads)
        assert "uneven batches: backward_without_batch(model)" in verdict


@pytest.mark.parametrize("reads", [False, True], ids=["messages", "memory"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__[1:])
def test_a_call_that_one_rank_is_in_is_named_while_the_other_computes(
    group: Group, tmp_path: Path, call: Call, reads: bool
) -> None:
    """Rank 1 waits for no rank then, and yet the wrong line is one of rank 0."""
    model, optimizer = _trained(group, call, reads=reads, patience_s=60.0)
    if group.rank == 0:
        asks = threading.Thread(target=_report_in_wait, args=(tmp_path, model, group), daemon=True)
        asks.start()
    else:
        _wait_for(tmp_path, 0)
        _report(tmp_path, ASKED, model, group)
    call(model, optimizer, tmp_path)

    if group.rank == 0:
        asks.join()
        verdict = _check(tmp_path, call)
        later = rf"If rank 1 makes it later, see .*{re.escape(__file__)}:\d"
        assert re.search(later, verdict) or call is _clip_grad_norm_


@pytest.mark.cpu_only("on a device the call is a launch like others, and is named as it is made")
def test_a_call_that_has_ended_is_named_as_the_error_names_it(group: Group, tmp_path: Path) -> None:
    """On one host it reads its peers' shards and ends. Ranks differ in what they do next."""
    model, optimizer = _trained(group, _full_grad, reads=True, patience_s=0.25)
    if group.rank == 0:
        zero_engine.full_state_dict(model)
    with pytest.raises(CommError) as caught:
        for _ in range(3):
            optimizer.step()
            _backward(model)
    why = f"{type(caught.value).__name__}: {caught.value}"
    _report(tmp_path, why, model, group)

    if group.rank == 0:
        _wait_for(tmp_path, 1)
        verdict = failure.summary(tmp_path).splitlines()[-1]
        ended = "look at rank 0 first: it has called full_state_dict() more often than rank 1"
        assert verdict.startswith(ended)


def test_a_rank_that_is_late_is_named_and_not_the_call_of_the_others(tmp_path: Path) -> None:
    """It has yet to launch what precedes the call, or most ranks are in the call."""
    launched = "[launched]\ncollectives = {}\n{} = {}, in flight\n[stacks]"
    in_save = "call = save() at train.py:7"

    def write(folder: Path, ranks: dict[int, tuple[bool, int, str]]) -> str:
        folder.mkdir()
        for rank, (is_in_call, number, what) in ranks.items():
            with mock.patch.dict("os.environ", WORLD_SIZE=str(len(ranks))):
                failure.write(path := folder / f"zero-report-rank{rank}.txt", ASKED, {})
            text = path.read_text().replace("[stacks]", launched.format(number, number, what))
            waits = "rank 1 for 9 s in save()" if is_in_call else "no rank"
            text = text.replace("[launched]", f"[launched]\nwaits for = {waits}")
            path.write_text(re.sub("call = .*", in_save, text) if is_in_call else text)
        return failure.summary(folder).splitlines()[-1]

    alone = {0: (True, 4, "agree"), 1: (False, 3, "gathering unit '0'")}
    late = {0: (True, 4, "reducing the gradients of unit '0'"), 1: alone[1]}
    most = {**alone, 2: alone[0]}
    assert write(tmp_path / "alone", alone).startswith("look at rank 0 first: save() is called")
    assert write(tmp_path / "late", late).startswith("look at rank 1 first: rank 0 waits for it")
    assert write(tmp_path / "most", most).startswith("look at rank 1 first: rank 0 waits for it")


def _report(folder: Path, why: str, model: nn.Module, group: Group) -> None:
    failure.write(folder / f"zero-report-rank{group.rank}.txt", why, {model: group})


def _report_in_wait(folder: Path, model: nn.Module, group: Group) -> None:
    """Report once this rank has waited for half a second: a shorter wait may be of the training."""
    waits = "no rank"
    while waits == "no rank" or " for 0 s" in waits:
        waits = describe_launches(require_sharded(model).whole)["waits for"]
        time.sleep(0.01)
    _report(folder, ASKED, model, group)


def _wait_for(folder: Path, rank: int) -> None:
    while not (folder / f"zero-report-rank{rank}.txt").exists():
        time.sleep(0.01)
