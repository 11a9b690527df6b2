"""Which trainings the gate of bits compares: a covering choice of the matrix, and some by name."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy
import torch
from names import find
from torch import nn
from trainings import Case, Record, Tiny, Training, batch, make_optimizer, recorded

# ---- What comes after the last step ----


def _nothing(training: Training) -> None:
    del training


def _save(training: Training) -> None:
    """Into a run at another stage, which goes on."""
    folder = Path(training.folder, "saved")
    find("save")(folder, training.model, training.optimizer, step=training.step)
    training.note_files("file", folder)
    other = Training(training.group, training.case, training.folder)
    other.build(training.case.config(training.folder, stage=training.case.stage % 3 + 1))
    report = find("load")(folder, other.model, other.optimizer)
    training.note("loaded", [report.step, report.num_tensors, report.num_bytes, report.extra])
    other.step = training.step
    other.train(1)
    other.note_whole("after load")
    for name, value in other.record.items():
        training.record[f"resumed: {name}"] = value


def _save_in_background(training: Training) -> None:
    """While a step is taken; and back into the same model."""
    folder = Path(training.folder, "saved")
    with find("Saver")(folder, training.model, training.optimizer, overlap=True) as saver:
        saver.save(step=training.step, extra={"position": 5})
        training.train(1)
    training.note_files("file", folder)
    find("load")(folder, training.model, training.optimizer)
    training.train(1)


def _offload_states(training: Training) -> None:
    path = Path(training.folder, "parked")
    path.mkdir(exist_ok=True)
    find("offload_states")(training.model, to="disk", path=path)
    training.note_memory("memory while offloaded")
    find("reload_states")(training.model)
    training.train(1)


def _reload_optimizer(training: Training) -> None:
    """Its whole state dict, as torch.save would have it."""
    state = find("full_optimizer_state_dict")(training.model)
    training.train(1)
    find("load_full_optimizer_state_dict")(training.model, state)
    training.train(1)


def _unshard(training: Training) -> None:
    find("unshard")(training.model, training.optimizer)
    training.note("plain weights", training.model.state_dict())
    training.note("plain state", training.optimizer.state_dict())
    find("shard")(
        training.model,
        training.optimizer,
        training.case.config(training.folder),
        group=training.group,
    )
    training.train(1)


THEN: Final[dict[str, Callable[[Training], None]]] = {
    "nothing": _nothing,
    "save": _save,
    "background": _save_in_background,
    "offload_states": _offload_states,
    "reload_optimizer": _reload_optimizer,
    "unshard": _unshard,
}


# ---- Scenarios ----


def _train(training: Training) -> None:
    """What all cells of the matrix do."""
    training.build()
    training.note_memory("memory at rest")
    with recorded(training, "traffic of all"):
        training.train(3)
        THEN[training.case.then](training)
    _note_end(training)


def _note_end(training: Training) -> None:
    find("finish_update")(training.model)
    training.note_parts("part")
    training.note_whole("end")
    training.note_memory("memory at the end")


def _evaluate(training: Training) -> None:
    """In the middle of training; and schedules."""
    training.build()
    for _ in range(2):
        training.train(1)
        training.model.eval()
        with torch.no_grad():
            training.note(f"evaluated {training.step}", training.loss(step=99))
        with find("unsharded")(training.model):
            training.note(f"unsharded {training.step}", training.loss(step=99).detach())
        training.model.train()
    training.train(1)
    if training.case.stage == 3:
        training.note("schedule", find("schedule_report")(training.model))
    _note_end(training)


def _edit(training: Training) -> None:
    """Whole parameters, gradients and state, read and written."""
    training.build()
    training.train(1)
    training.loss().backward()
    for name, param in training.model.named_parameters():
        training.note(f"full {name}", find("full_param")(param))
        if not param.requires_grad or name == "unused":
            continue
        grad = find("full_grad")(param)
        training.note(f"grad {name}", grad)
        find("set_full_grad")(param, torch.ones_like(grad) if grad is not None else None)
        state = find("full_optimizer_state")(param, "exp_avg")
        training.note(f"state {name}", state)
        find("set_full_optimizer_state")(param, "exp_avg", 2 * state)
    training.optimizer.step()
    training.optimizer.zero_grad()
    with (
        find("GatheredParameters")(list(training.model.parameters()), modifier_rank=0),
        torch.no_grad(),
    ):
        if training.group.rank == 0:
            for param in training.model.parameters():
                param.add_(0.25)
    training.step += 1
    training.train(1)
    _note_end(training)


def _init(training: Training) -> None:
    """A model that no rank ever holds whole."""
    torch.manual_seed(0)
    with find("Init")(group=training.group, config=training.case.config(training.folder)):
        training.model = Tiny()
    training.optimizer = make_optimizer(training.case.optimizer, training.model)
    config = training.case.config(training.folder)
    find("shard")(training.model, training.optimizer, config, group=training.group)
    torch.manual_seed(1 + training.group.rank)
    training.train(3)
    _note_end(training)


def _average(training: Training) -> None:
    training.build()
    average = find("ShardedAverage")(training.model, decay=0.5)
    for _ in range(3):
        training.train(1)
        average.update()
    folder = Path(training.folder, "saved")
    find("save")(folder, training.model, training.optimizer, step=3, average=average)
    training.note_files("file", folder)
    with average.swap():
        training.note("average", find("full_state_dict")(training.model))
    _note_end(training)


def _without_batch(training: Training) -> None:
    """The last rank has run out of data."""
    training.build()
    training.train(1)
    for _ in range(2):
        if training.group.rank == training.group.world_size - 1:
            find("backward_without_batch")(training.model)
        else:
            training.loss().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
    _note_end(training)


def _scaled(training: Training) -> None:
    """A loss scale, one overflow, and clipping in one pass."""
    training.build()
    for step in range(3):
        factor = float("inf") if step == 1 and training.group.rank == 0 else 4.0
        (training.loss() * factor).backward()
        report = find("unscale_and_clip_")(training.model, scale=4.0, max_norm=0.5)
        training.note(f"report {step}", report)
        if step != 1:
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
    _note_end(training)


def _engine(training: Training) -> None:
    """DeepSpeed's shape, with the loss scale of fp16 or with bf16, and its checkpoints."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": training.case.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    if training.case.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    if training.case.dtype == "masters":
        config["bf16"] = {"enabled": True}
    if training.case.optimizer_on == "host":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}

    def start() -> Any:
        torch.manual_seed(0)
        engine, *_ = find("initialize")(model=Tiny(), config=config, group=training.group)
        return engine

    engine = start()
    torch.manual_seed(1 + training.group.rank)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            for micro in range(2):
                loss = engine(*batch(step, micro, training.group.rank))
                engine.backward(loss)
                engine.step()
                training.note(f"loss {step}.{micro}", loss.detach())
            training.note(f"norm {step}", engine.get_global_grad_norm())
            training.note(f"scale {step}", float(engine.cur_scale))
            training.note(f"lr {step}", engine.get_lr())

    steps(0, 4)
    folder = Path(training.folder, "engine")
    engine.save_checkpoint(str(folder), client_state={"position": 7})
    training.note_files("file", folder)
    engine = start()
    path, client_state = engine.load_checkpoint(str(folder))
    training.note("loaded", [Path(str(path)).name, client_state, engine.global_steps])
    steps(4, 6)
    training.model, training.optimizer = engine.module, engine.optimizer
    training.note_traffic("traffic")
    _note_end(training)


def _redundancy(training: Training) -> None:
    """ZeroRedundancyOptimizer, beside torch's DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=training.group.process_group)
    kind = find("ZeroRedundancyOptimizer")
    optimizer = kind(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step + training.group.rank))
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    training.note("weights", model.state_dict())
    optimizer.consolidate_state_dict(to=0)
    if training.group.rank == 0:
        training.note("state", optimizer.state_dict())


def _penalty(training: Training) -> None:
    """Gradients of gradients."""
    training.build()
    for _ in range(2):
        tokens, targets = batch(training.step, 0, training.group.rank)
        loss = training.model(tokens, targets)
        weight = training.model.get_parameter("lift.weight")
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + grad.float().square().sum()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
    _note_end(training)


SCENARIOS: Final[dict[str, Callable[[Training], None]]] = {
    "train": _train,
    "evaluate": _evaluate,
    "edit": _edit,
    "init": _init,
    "average": _average,
    "without_batch": _without_batch,
    "scaled": _scaled,
    "engine": _engine,
    "redundancy": _redundancy,
    "penalty": _penalty,
}


def run_case(group: Any, *, case: dict[str, Any], folder: str, by_messages: bool) -> Record:
    """What one rank has to tell of one case."""
    if by_messages:
        os.environ["ZERO_COMM_PEER_MEMORY"] = "0"
    chosen = Case(**case)
    training = Training(group, chosen, folder)
    random.seed(group.rank)
    numpy.random.seed(group.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            SCENARIOS[chosen.scenario](training)
        except Exception as error:  # a refusal is told as well; both must say the same
            training.record["raises"] = f"{type(error).__name__}: {error}"
    return training.record


# ---- The matrix ----

_FREE: Final[dict[str, tuple[Any, ...]]] = {
    "world_size": (1, 2, 4),
    "dtype": ("fp32", "masters", "bf16"),
    "optimizer": ("adamw", "fused", "sgd", "cpu_adam"),
    "accumulates": ("no", "each", "no_sync"),
    "clips": (False, True),
    "checkpoints": (False, True),
    "then": tuple(THEN),
}


def _cores() -> Iterator[dict[str, Any]]:
    """Each stage with each residence and each codec that it can have."""
    places = ("device", "host", "disk")
    yield from [{"stage": 0, "codec": "none"}] * 5  # which has no other
    for stage in (1, 2, 3):
        for optimizer_on in places:
            for params_on in places if stage == 3 else places[:1]:
                for codec in ("none", "int8", "int4", "loco"):
                    yield {
                        "stage": stage,
                        "optimizer_on": optimizer_on,
                        "params_on": params_on,
                        "codec": codec,
                    }


def matrix() -> list[Case]:
    """All cores; what else there is to choose, so that any two values meet as far as they can."""
    draw, met, cases = random.Random(0), set[Any](), []
    every = [dict(zip(_FREE, v, strict=True)) for v in itertools.product(*_FREE.values())]
    for core in _cores():
        draw.shuffle(every)
        is_coded = core["codec"] != "none"  # one rank encodes nothing
        fitting = [free for free in every[:300] if free["world_size"] > is_coded]
        candidates = [core | free for free in fitting]
        best = max(candidates, key=lambda chosen: len(_pairs(chosen) - met))
        met |= _pairs(best)
        cases.append(Case(**best))
    return cases


def _pairs(chosen: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(chosen.items(), 2))


def by_name() -> list[Case]:
    """What the matrix does not have."""
    delayed = {"delayed_update": True}
    return [
        *(
            Case(world_size=4, wire={"levels": 2, "secondary": True}, codec=c)
            for c in ("none", "int8")
        ),
        *(Case(world_size=4, stage=s, wire={"levels": 2, "replicas": True}) for s in (1, 2, 3)),
        Case(world_size=4, wire={"levels": 2}, codec="int4", dtype="masters"),
        Case(world_size=4, wire={"levels": 2}, codec="loco", then="background"),
        Case(world_size=4, wire={"levels": 2, "replicas": True}, codec="int4"),
        Case(wire={"frozen": "int8:16"}, then="save"),
        Case(wire={"params": "bf16", "gradients": "int8:16"}),
        Case(world_size=1, codec="loco"),
        Case(world_size=4, settings={"cut": "row"}, then="save"),
        Case(world_size=4, stage=2, optimizer="muon", then="save"),
        Case(world_size=4, stage=3, optimizer="muon"),
        Case(settings={"cut": "block(8)"}, stage=1),
        Case(settings={"window": 1, "prefetch_numel": 0}),
        Case(settings={"window": 2, "max_reuse_numel": 0}, scenario="evaluate"),
        Case(settings={"small_param_numel": 8}, then="save"),
        Case(optimizer_on="host", optimizer="cpu_adam", offload=delayed),
        Case(optimizer_on="disk", stage=2, offload=delayed, dtype="masters"),
        Case(optimizer_on="disk", params_on="disk", offload={"fraction": 0.5}, then="save"),
        Case(params_on="disk", offload={"max_host_numel": 200, "read_ahead": 1}),
        *(Case(stage=stage, scenario="evaluate") for stage in (0, 1, 3)),
        *(Case(stage=stage, scenario="edit") for stage in (0, 2, 3)),
        Case(optimizer_on="disk", params_on="disk", scenario="edit", dtype="masters"),
        Case(scenario="init"),
        Case(scenario="init", world_size=4, params_on="disk", optimizer_on="disk"),
        Case(scenario="average"),
        Case(scenario="average", stage=1, dtype="masters", optimizer_on="disk"),
        *(Case(stage=stage, scenario="without_batch") for stage in (1, 3)),
        *(Case(stage=s, scenario="scaled", dtype=d) for s, d in ((0, "fp32"), (2, "masters"))),
        *(Case(stage=s, scenario="engine", dtype=d) for s, d in ((1, "fp16"), (3, "masters"))),
        Case(stage=2, scenario="engine", optimizer_on="host"),
        Case(stage=1, scenario="redundancy"),
        Case(stage=2, scenario="penalty"),
        Case(stage=3, scenario="penalty", settings={"window": 9}),
    ]


def chosen_cases(pattern: str = "") -> list[tuple[Case, bool]]:
    """Cases whose names have the pattern in them, and whether ranks send messages only."""
    cases = [(case, False) for case in (*matrix(), *by_name())]
    cases += [(Case(world_size=size, stage=stage), True) for size in (2, 4) for stage in (1, 3)]
    return [(c, m) for c, m in cases if pattern in full_name(c, by_messages=m)]


def full_name(case: Case, *, by_messages: bool) -> str:
    """As results are called."""
    return f"{case.name}, by messages" if by_messages else case.name


def as_dict(case: Case) -> dict[str, Any]:
    """For `run_case`."""
    return attrs.asdict(case)
