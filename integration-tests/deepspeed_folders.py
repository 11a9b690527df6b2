"""Writes checkpoint folders as DeepSpeed's ZeRO does, from a plain model and optimizer."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor, nn

ENTRIES: Final = ("exp_avg", "exp_avg_sq")


@frozen(kw_only=True)
class Form:
    """Who saved, and how."""

    stage: int
    world_size: int
    dtype: torch.dtype = torch.float32  # that the model computed with
    subgroups: bool = False  # stage 3: two parameters each
    elastic: bool = False  # stages 1 and 2
    gap: int = 0  # stages 1 and 2: elements between parameters


@frozen
class _Cut:
    """What ranks keep, by rank and group."""

    masters: list[list[Tensor]]
    states: list[list[dict[str, Tensor]]]
    param_group_of: list[int]  # by group
    sizes: list[int]  # parameters by group


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
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [
        {names[id(p)]: p.detach() for p in group["params"] if p.requires_grad}
        for group in optimizer.param_groups
    ]
    group_of = list(range(len(groups)))
    if form.subgroups:
        halves = [list(_pairs(group)) for group in groups]
        group_of = [i for i, of_group in enumerate(halves) for _ in of_group]
        groups = [half for of_group in halves for half in of_group]
    state = {
        names[id(p)]: optimizer.state.get(p) or {k: torch.zeros_like(p) for k in ENTRIES}
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    }
    cut = _cut_params if form.stage == 3 else _cut_groups
    moments = {
        key: cut([{n: state[n][key] for n in group} for group in groups], form) for key in ENTRIES
    }
    kept = _Cut(
        cut(groups, form),
        [
            [
                {"step": torch.tensor(float(step)), **{k: moments[k][rank][g] for k in ENTRIES}}
                for g in range(len(groups))
            ]
            for rank in range(form.world_size)
        ],
        group_of,
        [len(group) for group in groups],
    )
    prefix = "bf16_" if form.dtype == torch.bfloat16 else ""
    with _classes_of_deepspeed() as made:
        for rank in range(form.world_size):
            said = _optimizer_of(kept, optimizer, form, rank, made)
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": said, "ds_version": "0"}, path / name)
    for rank in range(form.world_size if form.stage == 3 else 1):
        name = f"{f'zero_pp_rank_{rank}_' if form.stage == 3 else ''}mp_rank_00_model_states.pt"
        said = _model_of(model, groups, step, form, rank) | dict(more or {})
        torch.save(said, path / name)
    return path


def _pairs(group: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    items = list(group.items())
    for start in range(0, len(items), 2):
        yield dict(items[start : start + 2])


def _cut_groups(groups: Sequence[dict[str, Tensor]], form: Form) -> list[list[Tensor]]:
    """By rank and group, padding included: parameters end to end."""
    cut: list[list[Tensor]] = [[] for _ in range(form.world_size)]
    for group in groups:
        parts = [torch.cat([v.reshape(-1), torch.full((form.gap,), 7.0)]) for v in group.values()]
        flat = torch.cat(parts)
        padding = -flat.numel() % (2 * form.world_size)
        flat = torch.cat([flat, torch.full((padding,), 9.0)])
        for rank, part in enumerate(flat.chunk(form.world_size)):
            cut[rank].append(part.clone())
    return cut


def _cut_params(groups: Sequence[dict[str, Tensor]], form: Form) -> list[list[Tensor]]:
    """By rank and group: each parameter in equal parts."""
    return [
        [torch.cat([_part(v, rank, form) for v in group.values()]) for group in groups]
        for rank in range(form.world_size)
    ]


def _part(value: Tensor, rank: int, form: Form) -> Tensor:
    padding = torch.full((-value.numel() % form.world_size,), 9.0, dtype=value.dtype)
    return torch.cat([value.reshape(-1), padding]).chunk(form.world_size)[rank].clone()


def _optimizer_of(
    kept: _Cut, optimizer: torch.optim.Optimizer, form: Form, rank: int, made: dict[str, type]
) -> dict[str, Any]:
    states, group_of = kept.states[rank], kept.param_group_of
    scaler = made["DynamicLossScaler" if form.dtype == torch.float16 else "LossScaler"]()
    scaler.cur_scale, scaler.dtype = 1.0, form.dtype
    said = {"zero_stage": made["ZeroStageEnum"](form.stage), "loss_scaler": scaler}
    numbers = range(len(group_of))
    gaps = [[form.gap] * num_params for num_params in kept.sizes] if form.gap else None
    param_groups = [
        {"lr": group["lr"], "params": [n for n in numbers if group_of[n] == index]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    base = {"state": dict(zip(numbers, states, strict=True)), "param_groups": param_groups}
    if form.stage == 3:
        said |= {"partition_count": form.world_size, "fp32_flat_groups": kept.masters[rank]}
        return {**said, "optimizer_state_dict": base}
    address = made["fragment_address"]()
    address.numel, address.start = 1, 0
    lean = [_lean(kept.masters, group, rank) for group in numbers]
    return {
        **said,
        "partition_count": [form.world_size] * len(group_of),
        "single_partition_of_fp32_groups": lean,
        "param_slice_mappings": [OrderedDict(name=address) for _ in group_of],
        "param_alignment_paddings": gaps,
        "base_optimizer_state": [
            {k: v[: lean[g].numel()] if v.dim() else v for k, v in states[g].items()}
            for g in numbers
        ]
        if form.elastic
        else base,
    }


def _lean(masters: list[list[Tensor]], group: int, rank: int) -> Tensor:
    """Without padding, which the last rank has."""
    part = masters[rank][group]
    return part[: part.numel() - int((part == 9.0).sum())] if rank + 1 == len(masters) else part


def _model_of(
    model: nn.Module, groups: list[dict[str, Tensor]], step: int, form: Form, rank: int
) -> dict[str, Any]:
    frozen = {
        n: p.detach().to(form.dtype) for n, p in model.named_parameters() if not p.requires_grad
    }
    buffers = [n for n, _ in model.named_buffers() if n in model.state_dict()]
    first = {id(p): n for n, p in model.named_parameters()}
    ties = {
        name: first[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if first[id(param)] != name
    }
    module = {
        name: value if name in buffers else value.to(form.dtype)
        for name, value in model.state_dict().items()
    }
    fragments: dict[str, Tensor] | None = frozen
    if form.stage == 3:
        module = {n: v if n in buffers else torch.empty(0) for n, v in module.items()}
        fragments = {name: _part(value, rank, form) for name, value in frozen.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": buffers,
        "param_shapes": [OrderedDict((n, v.shape) for n, v in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict((n, v.shape) for n, v in frozen.items()),
        "frozen_param_fragments": fragments,
        "shared_params": ties,
        "global_steps": step,
    }


@contextmanager
def _classes_of_deepspeed() -> Iterator[dict[str, type]]:
    """Classes that are pickled under the names of DeepSpeed's, which is not installed."""
    kinds = {
        "ZeroStageEnum": ("deepspeed.runtime.zero.config", _Stage),
        "LossScaler": ("deepspeed.runtime.fp16.loss_scaler", object),
        "DynamicLossScaler": ("deepspeed.runtime.fp16.loss_scaler", object),
        "fragment_address": ("deepspeed.utils.tensor_fragment", object),
    }
    made, modules = {}, {}
    for name, (module, base) in kinds.items():
        made[name] = type(name, (base,), {"__module__": module})
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(modules[module], name, made[name])
    with mock.patch.dict(sys.modules, modules):
        yield made


class _Stage(int):
    """Pickled as an enum is: the class, called with the value."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (int(self),)
