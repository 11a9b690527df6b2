"""Writes checkpoint folders as DeepSpeed's ZeRO does, from a plain model and optimizer."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor, nn

MASTER: Final = "master"
ENTRIES: Final = ("exp_avg", "exp_avg_sq")
PADDING: Final = 9.0


@frozen(kw_only=True)
class Form:
    """Who saved, and how."""

    stage: int
    world_size: int
    dtype: torch.dtype = torch.float32  # that the model computed with
    subgroups: bool = False  # stage 3: two parameters each
    elastic: bool = False  # stages 1 and 2
    gap: int = 0  # stages 1 and 2: elements between parameters


def save_as_deepspeed(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    form: Form,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder; returns that of its tag. `more` goes into the files of model states.

    The model has fp32 values, which are the masters; state that a parameter lacks is zeros, as for
    one that never had a gradient.
    """
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    (folder / "latest").write_text(path.name)
    params = dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    groups = [  # each with the number of its param group
        (number, [names[id(p)] for p in group["params"] if p.requires_grad])
        for number, group in enumerate(optimizer.param_groups)
    ]
    if form.subgroups:
        groups = [
            (number, group[i : i + 2]) for number, group in groups for i in range(0, len(group), 2)
        ]
    param_groups = [
        {"lr": group["lr"], "params": [n for n, (of, _) in enumerate(groups) if of == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    flats: dict[str, list[list[Tensor]]] = {}  # by group and rank
    for key in (MASTER, *ENTRIES):
        values = {name: _value(optimizer, param, key) for name, param in params.items()}
        flats[key] = [_cut([values[name] for name in group], form) for _, group in groups]
    prefix = "bf16_" if form.dtype == torch.bfloat16 else ""
    with _classes_of_deepspeed() as made:
        for rank in range(form.world_size):
            own = {key: [of_group[rank] for of_group in flats[key]] for key in flats}
            said = _optimizer_of(own, param_groups, step=step, form=form, rank=rank, made=made)
            if form.gap and form.stage < 3:
                said["param_alignment_paddings"] = [[form.gap] * len(group) for _, group in groups]
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": said, "ds_version": "0"}, path / name)
    for rank in range(form.world_size if form.stage == 3 else 1):
        name = f"{f'zero_pp_rank_{rank}_' if form.stage == 3 else ''}mp_rank_00_model_states.pt"
        shapes = [OrderedDict((n, params[n].shape) for n in group) for _, group in groups]
        said = _model_of(model, step, form, rank) | {"param_shapes": shapes} | dict(more or {})
        torch.save(said, path / name)
    return path


def save_as_universal(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, form: Form
) -> Path:
    """Write what ds_to_universal.py of DeepSpeed 0.19 makes of such a folder; returns its tag's.

    Stage 3 has flat tensors, and no steps beside them.
    """
    saved = save_as_deepspeed(folder, model, optimizer, step=step, form=form)
    (folder / "latest").unlink()
    path = folder / f"{saved.name}_universal"
    (folder / "latest_universal").write_text(path.name)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in params.items():
        (path / "zero" / name).mkdir(parents=True)
        for entry, key in {"fp32": MASTER, **{each: each for each in ENTRIES}}.items():
            value = _value(optimizer, param, key).clone()
            said = value.reshape(-1) if form.stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(said, path / "zero" / name / f"{entry}.pt")
        if form.stage < 3:
            torch.save(torch.tensor(float(step)), path / "zero" / name / "step.pt")
    for file in saved.glob("*_model_states.pt"):
        shutil.copy2(file, path)
    first = next(saved.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    with _classes_of_deepspeed():
        said = torch.load(first, weights_only=False)["optimizer_state_dict"]
        if form.stage < 3:
            said["param_groups"] = said.pop("base_optimizer_state")["param_groups"]
            del said["param_slice_mappings"], said["single_partition_of_fp32_groups"]
        torch.save(said, path / "zero" / "optimizer_state.pt")
    shutil.rmtree(saved)
    return path


def _value(optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str) -> Tensor:
    own = {MASTER: param.detach(), **optimizer.state.get(param, {})}
    return own[key] if key in own else torch.zeros_like(param)


def _cut(values: Sequence[Tensor], form: Form) -> list[Tensor]:
    """A group, by rank, padding included: each parameter in equal parts, or all end to end."""
    if form.stage == 3:
        ranks = range(form.world_size)
        return [torch.cat([_part(value, rank, form) for value in values]) for rank in ranks]
    gap = torch.full((form.gap,), 7.0)
    flat = torch.cat([part for value in values for part in (value.reshape(-1), gap)])
    padding = torch.full((-flat.numel() % (2 * form.world_size),), PADDING)
    return [part.clone() for part in torch.cat([flat, padding]).chunk(form.world_size)]


def _part(value: Tensor, rank: int, form: Form) -> Tensor:
    padding = torch.full((-value.numel() % form.world_size,), PADDING, dtype=value.dtype)
    return torch.cat([value.reshape(-1), padding]).chunk(form.world_size)[rank].clone()


def _optimizer_of(
    own: dict[str, list[Tensor]],
    param_groups: list[dict[str, Any]],
    *,
    step: int,
    form: Form,
    rank: int,
    made: dict[str, Any],
) -> dict[str, Any]:
    scaler = made["DynamicLossScaler" if form.dtype == torch.float16 else "LossScaler"]()
    scaler.cur_scale, scaler.dtype = 1.0, form.dtype
    said = {"zero_stage": made["ZeroStageEnum"](form.stage), "loss_scaler": scaler}
    states = [
        {"step": torch.tensor(float(step)), **dict(zip(ENTRIES, entries, strict=True))}
        for entries in zip(*(own[key] for key in ENTRIES), strict=True)
    ]
    base: Any = {"state": dict(enumerate(states)), "param_groups": param_groups}
    if form.stage == 3:
        said |= {"partition_count": form.world_size, "fp32_flat_groups": own[MASTER]}
        return {**said, "optimizer_state_dict": base}
    lean = own[MASTER]
    if rank + 1 == form.world_size:  # the last, which has the padding
        lean = [part[: part.numel() - int((part == PADDING).sum())] for part in lean]
    if form.elastic:
        base = [
            {key: value[: part.numel()] if value.dim() else value for key, value in state.items()}
            for state, part in zip(states, lean, strict=True)
        ]
    address = made["fragment_address"]()
    address.numel, address.start = 1, 0
    return {
        **said,
        "partition_count": [form.world_size] * len(lean),
        "single_partition_of_fp32_groups": lean,
        "param_slice_mappings": [OrderedDict(name=address) for _ in lean],
        "param_alignment_paddings": None,
        "base_optimizer_state": base,
    }


def _model_of(model: nn.Module, step: int, form: Form, rank: int) -> dict[str, Any]:
    params = dict(model.named_parameters())
    frozen = {n: p.detach().to(form.dtype) for n, p in params.items() if not p.requires_grad}
    buffers = [n for n, _ in model.named_buffers() if n in model.state_dict()]
    first = {id(param): name for name, param in params.items()}
    everything = model.named_parameters(remove_duplicate=False)
    module = {n: v if n in buffers else v.to(form.dtype) for n, v in model.state_dict().items()}
    fragments = frozen
    if form.stage == 3:
        module = {n: v if n in buffers else torch.empty(0) for n, v in module.items()}
        fragments = {name: _part(value, rank, form) for name, value in frozen.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": buffers,
        "frozen_param_shapes": OrderedDict((n, v.shape) for n, v in frozen.items()),
        "frozen_param_fragments": fragments,
        "shared_params": {n: first[id(p)] for n, p in everything if first[id(p)] != n},
        "global_steps": step,
    }


@contextmanager
def _classes_of_deepspeed() -> Iterator[dict[str, Any]]:
    """Classes that are pickled under the names of DeepSpeed's, which is not installed."""
    place = "deepspeed.runtime.zero.config"
    made: dict[str, Any] = {"ZeroStageEnum": IntEnum("ZeroStageEnum", "a b c", module=place)}
    for name, module in (
        ("LossScaler", "deepspeed.runtime.fp16.loss_scaler"),
        ("DynamicLossScaler", "deepspeed.runtime.fp16.loss_scaler"),
        ("fragment_address", "deepspeed.utils.tensor_fragment"),
    ):
        made[name] = type(name, (), {"__module__": module})
    modules: dict[str, ModuleType] = {}
    for name, kind in made.items():
        for parent in itertools.accumulate(kind.__module__.split("."), "{}.{}".format):
            modules.setdefault(parent, ModuleType(parent))
        setattr(modules[kind.__module__], name, kind)
    with mock.patch.dict(sys.modules, modules):
        yield made
