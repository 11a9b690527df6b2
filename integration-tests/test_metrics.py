"""Numbers of each step, in a plain loop and as DeepSpeed's file asks for them."""

from __future__ import annotations

import csv
import re
import sys
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import fmean
from types import FrameType, SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import zero_engine
from engines import build_engine, engine_config, run_micro_batch
from parity import ZeroConfig
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from zero_comm import Group, record_traffic
from zero_comm.testing import assert_close
from zero_deepspeed.monitor import Monitoring
from zero_engine import ConfigError, FileError, Wire
from zero_engine.engine import DynamicLossScale
from zero_partition import StateError, memory_report

IO = Path("/proc/self/io")


class Loop:
    """A plain one."""

    def __init__(self, group: Group, **config: Any) -> None:
        self.model = parity.build(parity.Chain)
        self.optimizer = parity.adamw(self.model)
        zero_engine.shard(self.model, self.optimizer, ZeroConfig(**config), group=group)

    def step(self) -> Tensor:
        """Forward, backward, the optimizer's step; returns the loss."""
        loss = self.model(torch.ones(1, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def _read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


# ---- A plain loop ----


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "replicas"])
def test_a_row_says_what_others_count(group: Group, stage: int | str) -> None:
    """Bytes by record_traffic, memory by its report, seconds by the clock."""
    has_nodes = stage == "replicas"
    replicas = {"stage": 3, "wire": Wire(levels=2, replicas=True)}
    loop = Loop(group, **(replicas if has_nodes else {"stage": stage}))
    start = time.monotonic()
    with zero_engine.metrics(loop.model) as end_step:
        first = (loop.step(), end_step())[1]
        with record_traffic(group) as sent:
            loss = loop.step()
        row = end_step(loss=loss, samples=3, tokens=7, grad_norm=0.5)
    elapsed = time.monotonic() - start

    assert row["sent/inside_bytes"] == sent.inside().num_bytes > 0
    assert row["sent/across_bytes"] == sent.across().num_bytes
    assert bool(row["sent/across_bytes"]) == has_nodes
    report = memory_report(loop.model)
    held = {name: value for name, value in row.items() if name.startswith("memory/")}
    assert held == {name: getattr(report, name.removeprefix("memory/")) for name in held}
    assert len(held) > 10
    parts = ("compute", "optimizer", "swap", "exposed")
    assert row["time/step_s"] == pytest.approx(sum(row[f"time/{part}_s"] for part in parts))
    exposed = sum(row[f"time/{kind}_s"] for kind in ("gather", "reduce", "publish"))
    assert 0 < row["time/exposed_s"] == pytest.approx(exposed)
    assert first["time/step_s"] + row["time/step_s"] <= elapsed
    assert row["samples_per_s"] * row["time/step_s"] == pytest.approx(3)
    assert row["tokens_per_s"] * row["time/step_s"] == pytest.approx(7)
    assert (row["loss"], row["grad_norm"]) == (loss.item(), 0.5)


def test_rows_go_to_files_and_functions_on_one_rank(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on adds lines; a file of other numbers stays as it is."""
    loop, file, seen = Loop(group, stage=2), tmp_path / "new" / f"{group.rank}.csv", []
    rows = []
    for _ in range(2):
        to = [file, lambda row, step: seen.append((row, step))]
        with zero_engine.metrics(loop.model, to=to) as end_step:
            rows += [end_step(loss=loop.step()) for _ in range(2)]
    with pytest.raises(StateError, match="has ended"):
        end_step()

    assert file.exists() == (group.rank == 0) == bool(seen)
    if group.rank:
        return
    head, *lines = _read(file)
    assert head == ["step", *rows[0]]
    assert [line[0] for line in lines] == ["1", "2", "1", "2"]
    assert [[float(value) for value in line[1:]] for line in lines] == [[*r.values()] for r in rows]
    assert seen == list(zip(rows, (1, 2, 1, 2), strict=True))
    before = file.read_bytes()
    with zero_engine.metrics(loop.model, to=[file, tmp_path / "x.csv"]) as end_step:
        with pytest.raises(ConfigError, match="expected columns"):
            end_step(other=1.0)
        (tmp_path / "x.csv").mkdir()
        with pytest.raises(FileError, match="cannot be written"):
            end_step(loss=0.0)
    assert file.read_bytes().startswith(before)
    for wrong, said in ((5, "paths and functions"), ("board", "pip install tensorboard")):
        with monkeypatch.context() as patched, pytest.raises(ConfigError, match=said):
            patched.setitem(sys.modules, "torch.utils.tensorboard", None)
            zero_engine.metrics(loop.model, to=[wrong]).__enter__()


@pytest.mark.ranks(3)
def test_means_are_those_of_all_ranks(group: Group) -> None:
    """Of what a rank knows, where only some know it."""
    loop = Loop(group, stage=1)
    own = {"only_first": 8.0} if group.rank == 0 else {}
    with zero_engine.metrics(loop.model, mean=True) as end_step:
        loop.step()
        row = end_step(loss=float(group.rank), **own)

    assert row["loss"] == fmean(range(group.world_size))
    assert ("only_first" in row) == (group.rank == 0) and row.get("only_first", 8.0) == 8.0
    assert row["memory/params_bytes"] == memory_report(loop.model).params_bytes


@pytest.mark.ranks(1)
def test_a_step_makes_the_calls_of_before_once_nothing_is_measured(group: Group) -> None:
    """Nobody pays for what others may ask for; nor does an engine without a monitor."""
    engine = build_engine(group, engine_config(group, 3))
    for step in range(3):
        run_micro_batch(engine, step)

    def calls() -> list[str]:
        counted: list[str] = []

        def count(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            # Of objects that go, autograd's thread of a device drops some.
            if event == "call" and "/zero_" in code.co_filename and code.co_name != "__del__":
                counted.append(code.co_filename)

        sys.setprofile(count)
        try:
            run_micro_batch(engine, 3)
        finally:
            sys.setprofile(None)
        return counted

    before = calls()
    with zero_engine.metrics(engine.module):
        during = calls()
    assert before == calls() and len(before) < len(during)
    assert not any("observe" in file or "monitor" in file for file in before)


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not tell")
def test_disk_rates_are_those_of_the_kernel(group: Group, tmp_path: Path) -> None:
    """A rate that misses what was written, or counts what was not, misleads."""

    def written() -> int:
        return int(dict(line.split(": ") for line in IO.read_text().splitlines())["write_bytes"])

    with zero_engine.metrics(Loop(group, stage=1).model) as end_step:
        outer = written()
        end_step()
        inner = written()
        with (tmp_path / f"{group.rank}").open("wb", buffering=0) as file:
            file.write(bytes(2**22))
        inner = written() - inner
        row = end_step()
        outer = written() - outer

    num_bytes = round(row["disk/write_bytes_per_s"] * row["time/step_s"])
    assert inner <= num_bytes <= outer


# ---- DeepSpeed's file ----


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_csv_monitor_writes_what_training_computed(
    group: Group, tmp_path: Path, accumulation_steps: int
) -> None:
    """DeepSpeed's files, headers and samples: a loss is of the samples before its step."""
    asked = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = engine_config(
        group,
        2,
        accumulation_steps=accumulation_steps,
        loss_scale=DynamicLossScale(initial_power=4, hysteresis=1),
        monitor=Monitoring({f"csv_monitor.{name}": value for name, value in asked.items()}),
    )
    engine = build_engine(group, config)
    expected: dict[str, list[list[float]]] = {"train_loss": [], "lr": [], "loss_scale": []}
    for step in range(4):
        before, factor = engine.global_samples, float("inf") if step == 2 else 1.0
        micro_batches = range(accumulation_steps)
        losses = [run_micro_batch(engine, step, micro, factor) for micro in micro_batches]
        samples = 2 * group.world_size * accumulation_steps * (step + 1)
        expected["train_loss"].append([before, fmean(losses) * factor])
        expected["lr"].append([samples, engine.get_lr()[0]])
        expected["loss_scale"].append([samples, engine.cur_scale])

    assert engine.skipped_steps == 1 and engine.cur_scale == 8.0
    if group.rank == 0:
        files = {file.name: _read(file) for file in (tmp_path / "job").iterdir()}
        assert files.keys() == {f"Train_Samples_{name}.csv" for name in expected}
        for name, rows in expected.items():
            head, *lines = files[f"Train_Samples_{name}.csv"]
            assert head == ["step", name]
            found = torch.tensor([[float(each) for each in line] for line in lines])
            assert_close(found, torch.tensor(rows))


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_boards_get_the_same_tags(group: Group, tmp_path: Path, monkeypatch: Any) -> None:
    """TensorBoard's files where it is installed, and a run of wandb, on the first rank alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: list[tuple[dict[str, float], int]] = []
    run = SimpleNamespace(log=lambda row, step: logged.append((dict(row), step)))
    made: list[dict[str, Any]] = []
    fake = SimpleNamespace(init=lambda **how: made.append(how) or run)
    board = {"tensorboard.enabled": True, "tensorboard.output_path": str(tmp_path)}
    asked = {**board, "wandb.enabled": True, "wandb.team": "us"}
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "wandb", fake)
        engine = build_engine(group, engine_config(group, 1, monitor=Monitoring(asked)))
    losses = [run_micro_batch(engine, step) for step in range(3)]
    engine.destroy()

    assert made == [{"project": "deepspeed", "group": None, "entity": "us"}] * (group.rank == 0)
    if group.rank == 0:
        found = EventAccumulator(str(tmp_path / "DeepSpeedJobName")).Reload()
        events = [(e.step, e.value) for e in found.Scalars("Train/Samples/train_loss")]
        assert events == [(4 * step, loss) for step, loss in enumerate(losses)]
        assert len(found.Scalars("Train/Samples/lr")) == 3
        told = [(step, *row.values()) for row, step in logged if "Train/Samples/train_loss" in row]
        assert told == events


@pytest.mark.parametrize(
    ("section", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("comms_logger", "tabulate")],
)
def test_a_missing_package_is_said_on_every_rank(
    group: Group, section: str, module: str, monkeypatch: Any
) -> None:
    """Before the first step: a rank that stops alone leaves the others waiting."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"^{section}.enabled: .* pip install"):
            zero_engine.initialize(
                model=parity.tiny_float32(),
                config={"train_batch_size": group.world_size, section: {"enabled": True}},
                group=group,
            )


@pytest.mark.parametrize("stage", [1, 3])
def test_flops_are_those_of_the_plain_model(group: Group, tmp_path: Path, stage: int) -> None:
    """By module, whoever has its parameters."""
    file = tmp_path / "flops"
    asked = {"enabled": True, "profile_step": 2, "output_file": str(file), "module_depth": 1}
    monitoring = {f"flops_profiler.{name}": value for name, value in asked.items()}
    config = engine_config(group, stage, accumulation_steps=2, monitor=Monitoring(monitoring))
    engine = build_engine(group, config)
    with redirect_stdout(StringIO()):
        for step, micro in product(range(4), range(2)):
            run_micro_batch(engine, step, micro)

    plain = parity.build(parity.tiny_float32)
    with FlopCounterMode(display=False) as forward:
        loss = parity.loss_of(plain, parity.batch(0, 0, 0))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counts = [f"{counter.get_total_flops():,}" for counter in (forward, backward)]
    title = "flops of a micro-batch of one rank in step 3: forward {}, backward {}".format(*counts)
    assert file.read_text() == f"{title}\n{forward.get_table(2)}\n"


def test_what_is_printed_is_what_reports_say(group: Group, tmp_path: Path) -> None:
    """And the times have DeepSpeed's tags, with the parts that they are made of."""
    keys = ("wall_clock_breakdown", "memory_breakdown", "comms_logger.enabled")
    csv_monitor = {"csv_monitor.enabled": True, "csv_monitor.output_path": str(tmp_path)}
    asked = {**dict.fromkeys(keys, True), **csv_monitor}
    engine = build_engine(group, engine_config(group, 2, monitor=Monitoring(asked)))
    with redirect_stdout(StringIO()) as printed:
        run_micro_batch(engine, 0)
    said = [str(memory_report(engine.module)), zero_engine.report(engine.module)]
    engine.destroy()

    text = printed.getvalue()
    if group.rank:
        assert not text
        return
    assert all(each in text for each in said)
    ms = dict(re.findall(r"(\w+): (\d+\.\d+)", text.splitlines()[0]))
    assert {*ms} == {"forward", "backward", "backward_inner", "backward_allreduce", "step"}
    folder = tmp_path / "DeepSpeedJobName"
    lines = {name: _read(folder / f"Train_Samples_elapsed_time_ms_{name}.csv") for name in ms}
    assert {name: f"{float(line[1][1]):.2f}" for name, line in lines.items()} == ms
    assert all(float(ms[call]) > 0 for call in ("forward", "backward", "step"))
    whole, inner, reduce = (float(ms[f"backward{part}"]) for part in ("", "_inner", "_allreduce"))
    assert inner == pytest.approx(max(whole - reduce, 0.0), abs=0.02)
