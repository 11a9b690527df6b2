"""Whether an optimizer that nobody knows trains the same on shards: a trial on small tensors."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from ._cut import Cut
from ._errors import PartitionError

# NOTE(trial): a copy of the optimizer steps a few times on small parameters with made-up gradients,
# once on whole ones and once on each of two ranks' shards. If a shard's update is not that part of
# the whole's, the optimizer looks at more than it would see. Values and gradients are uneven over
# the elements, and differently in every step, so that a norm or a mean of a part differs from that
# of the whole. The user's own optimizer, parameters, gradients and random numbers are not touched.

_NUM_STEPS: Final = 3
_NUMEL: Final = 2**14  # of a sample, above where optimizers begin to quantise,
_LEAST_DIM: Final = 128  # and the size of its dims, from which on they factor: both if it has them
_LEAST_LR: Final = 1e-2  # a warm-up that starts at zero would show nothing
_TOLERANCE: Final = 1e-3  # of the largest update; rounding is far below, another norm far above
_OF_THE_COPY: Final = {"param_groups", "state"}  # what it must not share with the optimizer

Tensors = list[list[Tensor]]  # by param group and parameter


@frozen
class Sample:
    """A parameter of the optimizer, as the trial needs it."""

    name: str
    shape: torch.Size
    device: torch.device
    cut: Cut


def find_dependence(
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sequence[Sample]],
    *,
    must_be_tried: bool = True,
) -> str | None:
    """Why the optimizer would train differently on shards, None if it would not. Local.

    Args:
        optimizer: Is not changed, nor are its parameters.
        samples: Per param group, its parameters with the cuts they would get.
        must_be_tried: Whether one that cannot step on whole tensors is taken for dependent.
    """
    chosen = [_choose(group) for group in samples]
    values = [[_values(s, i, step=-1) for i, s in enumerate(group)] for group in chosen]
    grads = [
        [[_values(s, i, step=step) for i, s in enumerate(group)] for group in chosen]
        for step in range(_NUM_STEPS)
    ]

    def pairs(tensors: Tensors) -> Iterator[tuple[list[Sample], list[Tensor]]]:
        return zip(chosen, tensors, strict=True)

    with _undisturbed(optimizer):
        try:
            whole = _updates(optimizer, values, grads)
        except Exception as error:
            if not must_be_tried:
                return None
            return f"a trial step on small tensors failed with {type(error).__name__}: {error}"
        if must_be_tried and not any(update.any() for group in whole for update in group):
            return "a trial step on small tensors changed nothing, so nothing can be said of it"
        for rank in range(2):
            mine = [_parts(group, whole_values, rank) for group, whole_values in pairs(values)]
            mine_grads = [
                [_grads(group, whole_grads, rank) for group, whole_grads in pairs(step)]
                for step in grads
            ]
            try:
                updates = _updates(optimizer, mine, mine_grads)
            except Exception as error:
                return (
                    f"a trial step on shards failed with {type(error).__name__}: {error}, while "
                    "one on whole tensors went well"
                )
            for group, ours, theirs in zip(chosen, updates, whole, strict=True):
                reason = _first_difference(group, ours, _parts(group, theirs, rank))
                if reason is not None:
                    return reason
    return None


def entries_after_step(
    optimizer: torch.optim.Optimizer,
    dims: Sequence[Sequence[int]],
    options: Sequence[Mapping[str, Any]],
) -> list[dict[int, frozenset[str]]]:
    """Which entries of state one step leaves for tiny parameters; none where it fails. Local.

    Args:
        optimizer: Is not changed.
        dims: Per param group, how many dims its parameters have.
        options: Per param group, in place of its own.
    """
    params = [[nn.Parameter(torch.ones((2,) * num_dims)) for num_dims in of] for of in dims]
    states = states_after_step(optimizer, params, options)
    if states is None:
        return [{} for _ in dims]
    return [{param.dim(): frozenset(states.get(param, ())) for param in group} for group in params]


def states_after_step(
    optimizer: torch.optim.Optimizer,
    params: Sequence[list[nn.Parameter]],
    options: Sequence[Mapping[str, Any]] | None = None,
) -> Mapping[Any, Mapping[str, Any]] | None:
    """What state one step of a copy leaves for tiny parameters; None where it fails. Local.

    Args:
        optimizer: Is not changed.
        params: Per param group; they are stepped.
        options: Per param group, in place of its own; its own when None.
    """
    options = [{} for _ in params] if options is None else options
    with _undisturbed(optimizer):
        for make in (_copy, _construct):
            try:
                twin = make(optimizer, params)
                for group, given in zip(twin.param_groups, options, strict=True):
                    group.update(_copied(dict(given)))
                for param in (param for group in params for param in group):
                    param.grad = torch.ones_like(param)
                twin.step(lambda: 0.0) if _needs_closure(twin) else twin.step()
            except Exception:  # it needs a warmed-up model, say
                continue
            return twin.state
    return None


def _choose(samples: Sequence[Sample]) -> list[Sample]:
    """Two small ones for each cut and number of dims: two, since one may depend on another."""
    largest: dict[tuple[str, int], Sample] = {}
    for sample in samples:
        key = (str(sample.cut), len(sample.shape))
        if key not in largest or sample.shape.numel() > largest[key].shape.numel():
            largest[key] = sample
    return [_shrunk(sample) for sample in largest.values() for _ in range(2)]


def _shrunk(sample: Sample) -> Sample:
    shape = list(sample.shape)
    limit = max(_NUMEL, 4 * (sample.cut.block_numel or 1))
    while math.prod(shape) > limit and max(shape) > _LEAST_DIM:
        largest = max(range(len(shape)), key=shape.__getitem__)
        shape[largest] = max(-(-shape[largest] // 2), _LEAST_DIM)
    return Sample(sample.name, torch.Size(shape), sample.device, sample.cut)


def _values(sample: Sample, index: int, *, step: int) -> Tensor:
    """Made up; see NOTE(trial)."""
    generator = torch.Generator().manual_seed(1000 * index + step + 1)
    numel = sample.shape.numel()
    ramp = torch.linspace(0.2, 2.0, max(numel, 1))[:numel]
    uneven = torch.randn(numel, generator=generator) * (ramp if step % 2 else ramp.flip(0))
    return (uneven / (1 + 4 * (index % 2))).view(sample.shape).to(sample.device)


def _parts(group: Sequence[Sample], whole: Sequence[Tensor], rank: int) -> list[Tensor]:
    """What one of two ranks keeps of each, in the shape it has there."""
    parts = []
    for index, (sample, tensor) in enumerate(zip(group, whole, strict=True)):
        numel, grain = sample.shape.numel(), sample.cut.grain(sample.shape)
        count = numel // 2 // grain
        count = count | 1 if (count | 1) * grain < numel else count  # odd: no power of 2 divides it
        middle = count * grain
        if sample.cut == Cut.TENSOR:
            middle = numel * ((index // 2 + index) % 2)  # of the two samples, each rank has one
        flat = tensor.reshape(-1)[:middle] if rank == 0 else tensor.reshape(-1)[middle:]
        parts.append(flat.view(sample.cut.shard_shape(sample.shape, flat.numel())))
    return parts


def _grads(group: Sequence[Sample], whole: Sequence[Tensor], rank: int) -> list[Tensor | None]:
    """As `_parts`, but None for what the rank keeps nothing of, as in a step."""
    parts = zip(group, _parts(group, whole, rank), strict=True)
    return [
        part if part.numel() or sample.cut == Cut.FLAT or not sample.shape.numel() else None
        for sample, part in parts
    ]


def _updates(
    optimizer: torch.optim.Optimizer,
    values: Tensors,
    grads: Sequence[Sequence[Sequence[Tensor | None]]],
) -> Tensors:
    """What a copy of the optimizer adds to these parameters in all steps."""
    try:
        return _updates_of(_copy, optimizer, values, grads)
    except Exception as error:
        try:  # it may keep state from its constructor on, which a copy of its attributes lacks
            return _updates_of(_construct, optimizer, values, grads)
        except Exception:
            raise error from None


def _updates_of(
    make: Callable[[torch.optim.Optimizer, list[list[nn.Parameter]]], torch.optim.Optimizer],
    optimizer: torch.optim.Optimizer,
    values: Tensors,
    grads: Sequence[Sequence[Sequence[Tensor | None]]],
) -> Tensors:
    params = [[nn.Parameter(value.clone()) for value in group] for group in values]
    torch.manual_seed(0)
    twin = make(optimizer, params)
    for step in grads:
        for group, group_grads in zip(params, step, strict=True):
            for param, grad in zip(group, group_grads, strict=True):
                param.grad = None if grad is None else grad.clone()
        if _needs_closure(twin):
            twin.step(lambda: 0.0)
        else:
            twin.step()
    return [
        [param.detach() - value for param, value in zip(group, before, strict=True)]
        for group, before in zip(params, values, strict=True)
    ]


def _groups(optimizer: torch.optim.Optimizer, params: Sequence[list]) -> list[dict[str, Any]]:
    groups = []
    for group, small in zip(optimizer.param_groups, params, strict=True):
        mine = {k: _copied(v) for k, v in group.items() if k not in {"params", "param_names"}}
        if "lr" in mine:
            lr = mine["lr"]
            mine["lr"] = lr.clamp(min=_LEAST_LR) if isinstance(lr, Tensor) else max(lr, _LEAST_LR)
        groups.append({"params": small, **mine})
    return groups


def _copy(optimizer: torch.optim.Optimizer, params: Sequence[list]) -> torch.optim.Optimizer:
    """An optimizer with the same attributes, without calling its constructor."""
    kind = type(optimizer)
    attributes = vars(optimizer)
    if not attributes.keys() >= _OF_THE_COPY or any(hasattr(kind, name) for name in _OF_THE_COPY):
        raise TypeError(f"a {kind.__name__} computes its param_groups or state")
    twin = object.__new__(kind)
    for name, value in attributes.items():
        if callable(value) and callable(getattr(kind, name, None)):
            continue  # a method replaced on the object, as schedulers do, acts on the original
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        twin.__dict__[name] = OrderedDict() if is_hooks else _copied(value)
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = _groups(optimizer, params)
    return twin


def _construct(optimizer: torch.optim.Optimizer, params: Sequence[list]) -> torch.optim.Optimizer:
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {k: _copied(v) for k, v in optimizer.defaults.items() if k in known}
    return kind(_groups(optimizer, params), **options)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in {list, tuple, set}:
        return type(value)(_copied(item) for item in value)
    if type(value) in {dict, defaultdict, OrderedDict}:
        copy = value.copy()
        copy.update({key: _copied(item) for key, item in value.items()})
        return copy
    return value


def _first_difference(
    group: Sequence[Sample], ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> str | None:
    for sample, mine, expected in zip(group, ours, theirs, strict=True):
        if not mine.numel():
            continue
        largest = expected.abs().max().item()
        off = (mine - expected).abs().max().item()
        if not off <= _TOLERANCE * largest:  # NaN too
            alone = "alone" if sample.cut == Cut.TENSOR else f"cut {str(sample.cut)!r}"
            return (
                f"on a tensor of shape {tuple(sample.shape)} like parameter {sample.name!r}, "
                f"{alone}, its update differs by {off:.2g} from the update of whole tensors "
                f"together, whose largest element is {largest:.2g}; it looks at elements that a "
                "rank would not have, or is random"
            )
    return None


@contextmanager
def _undisturbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the user's gradients away, so that nothing a copy may share can step, and put back."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, versions = [p.grad for p in params], [p._version for p in params]
    devices = sorted({param.device.index for param in params if param.device.type == "cuda"})
    try:
        for param in params:
            param.grad = None
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    if [param._version for param in params] != versions:
        kind = type(optimizer).__name__
        raise PartitionError(
            f"a {kind} was tried, to see whether it can work on shards, and its copy wrote to "
            "parameters of the model, which it must hold elsewhere than in param_groups; say what "
            f"it needs, {kind}.needs_cut = 'flat' or 'tensor', and build the model again"
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
