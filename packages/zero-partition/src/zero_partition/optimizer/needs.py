"""Trials of optimizers on small tensors: how may parameters be cut, and what state is kept."""

from __future__ import annotations

import ast
import inspect
import logging
import math
import textwrap
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from types import MethodType
from typing import Any, Final

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from zero_partition.chained import is_inner, members_of, options_of, shared_state
from zero_partition.errors import LayoutError, PartitionError, StateError
from zero_partition.nested import describe, flat_entries, is_strange, plain_tensors_in
from zero_partition.plan.cuts import Cut, CutChoice
from zero_partition.torch_private import version_of

from .watch import StepWatch, cut_grain

# NOTE(trial): a copy of the optimizer steps a few times on small parameters with made-up gradients,
# once on whole ones, where its operators are watched, and once on each of two ranks' shards. If a
# shard's update is not that part of the whole's, or the numbers that a step writes into param
# groups are others, the optimizer looks at more than it would see. Values and gradients are uneven
# over the elements, and differently in every step, so that a norm or a mean of a part differs from
# that of the whole. The user's own optimizer, parameters, gradients and random numbers are not
# touched.

_LOG: Final = logging.getLogger(__name__)
# Steps of a trial, since some look at the whole from their fourth on; and of optimizers that change
# nothing in the first ones.
_NUM_STEPS: Final = 6
_NUM_STEPS_OF_THOSE_THAT_WAIT: Final = 24
# Steps are also watched as if so many had been made.
_LATER: Final = (100, 10_000, 1_000_000)
# Elements of a sample, above where optimizers begin to quantise, and the least size of its dims,
# from which on they factor.
_NUMEL: Final = 2**14
_LEAST_DIM: Final = 128
# A warm-up that starts at zero would show nothing.
_LEAST_LR: Final = 1e-2
# Part of the largest update; rounding is far below, and another norm far above.
_TOLERANCE: Final = 1e-3
# Attributes that the copy must not share with the optimizer.
_OF_THE_COPY: Final = {"param_groups", "state"}
# Seconds after which a trial is named in the log, and again after so many more.
_SILENT_S: Final = 2.0
_AGAIN_S: Final = 5.0
# Cuts from small to large: each is tried where the one before is not enough. 8-bit state has
# blocks.
_LADDER: Final = (Cut.FLAT, Cut.block(256), Cut.block(2048), Cut.ROW, Cut.TENSOR)

Grads = Sequence[Sequence[Tensor | None]]  # by step and parameter


@frozen
class Sample:
    """A parameter of the optimizer, as the trial needs it."""

    name: str
    shape: torch.Size
    device: torch.device
    cut: Cut
    param_group: int
    # Whether the cut is the user's.
    is_said: bool = True

    @property
    def kind(self) -> tuple[int, str, int]:
        """Parameters of one kind get one cut."""
        return self.param_group, str(self.cut) if self.is_said else "", len(self.shape)


@frozen
class Outcome:
    """Results of the steps of a trial."""

    # What the steps added to each parameter.
    updates: list[Tensor]
    # Place in the param groups -> number there.
    numbers: dict[str, float]
    # What in the state could not be saved; "" if all could.
    unsaved: str


class _DependenceError(Exception):
    """Why an optimizer would train differently on shards."""


def find_cuts(
    optimizer: torch.optim.Optimizer, samples: Sequence[Sample], *, must_be_tried: bool = True
) -> dict[tuple[int, str, int], Cut] | str:
    """Find the smallest cuts with which an optimizer trains as on whole tensors. Local.

    Args:
        optimizer: Is not changed, nor are its parameters.
        samples: Its parameters, group by group. Cuts that the user said stay.
        must_be_tried: Whether one that cannot step on whole tensors is taken for dependent.

    Returns:
        Kind of sample -> its cut; or why there are none.
    """
    with _undisturbed(optimizer), _named_if_long(optimizer):
        try:
            chosen = _found_cuts(optimizer, _choose(samples), must_be_tried=must_be_tried)
        except _DependenceError as error:
            return str(error)
    return {sample.kind: sample.cut for sample in chosen}


def _found_cuts(
    optimizer: torch.optim.Optimizer, samples: list[Sample], *, must_be_tried: bool
) -> list[Sample]:
    """Return these samples with the smallest cuts that will do; none if it cannot be tried.

    Raises:
        _DependenceError: There are none.
    """
    values = [_values(sample, index, step=-1) for index, sample in enumerate(samples)]

    def gradients(num_steps: int) -> list[list[Tensor]]:
        return [
            [_values(sample, index, step=step) for index, sample in enumerate(samples)]
            for step in range(num_steps)
        ]

    try:
        watch, grads = StepWatch(), gradients(_NUM_STEPS)
        whole = _outcome(optimizer, samples, values, grads, watch)
        if not any(update.any() for update in whole.updates):
            watch, grads = StepWatch(), gradients(_NUM_STEPS_OF_THOSE_THAT_WAIT)
            whole = _outcome(optimizer, samples, values, grads, watch)
    except Exception as error:
        if not must_be_tried:
            return []
        raise _DependenceError(_why_failed(optimizer, error)) from error
    problems = {
        "a trial step on small tensors changed nothing, so nothing can be said of it": must_be_tried
        and not any(update.any() for update in whole.updates),
        f"{watch.mixed}, and a rank would have only some of them": watch.mixed,
        f"its state could be neither saved nor sent: {whole.unsaved}": must_be_tried
        and whole.unsaved,
    }
    for problem, is_one in problems.items():
        if is_one:
            raise _DependenceError(problem)
    samples = _with_needed_cuts(samples, watch.grains)
    while (larger := _try_shards(optimizer, samples, values, grads, whole)) is not None:
        samples = larger
    return samples


def _why_failed(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    said = str(error)
    if getattr(optimizer, "is_second_order", False) or "does not require grad" in said:
        return (
            "its step differentiates gradients again, and there is no graph behind the averages "
            f"that ranks step with ({type(error).__name__}: {said})"
        )
    if _takes_closure(optimizer) and "closure" in said.lower():
        return (
            "its step wants the loss, and each rank knows that of its own batch alone "
            f"({type(error).__name__}: {said})"
        )
    if isinstance(error, TypeError) and "NoneType" in said and _takes_closure(optimizer):
        return (
            "its step evaluates the loss by a closure, at points that depend on all parameters at "
            "once"
        )
    return (
        "a trial step on small tensors, with gradients alone, failed with "
        f"{type(error).__name__}: {said}"
    )


def _with_needed_cuts(samples: Sequence[Sample], grains: Mapping[int, int]) -> list[Sample]:
    """Enlarge cuts so that what operators look at together stays together."""
    needed: dict[tuple[int, str, int], Cut] = {}
    for index, sample in enumerate(samples):
        cut = Cut.parse(cut_grain(grains.get(index, 1), sample.shape))
        before = needed.setdefault(sample.kind, sample.cut)
        if not before.keeps(cut, sample.shape):
            if sample.is_said:
                raise _DependenceError(
                    f"its step combines {grains[index]} elements of a tensor of shape "
                    f"{tuple(sample.shape)} like parameter {sample.name!r}, and cut "
                    f"{str(sample.cut)!r} leaves a rank without some of them"
                )
            needed[sample.kind] = cut
    return [evolve(sample, cut=needed[sample.kind]) for sample in samples]


def _try_shards(
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    values: Sequence[Tensor],
    grads: Grads,
    whole: Outcome,
) -> list[Sample] | None:
    """Step shards as two ranks would; returns samples with larger cuts, None if these will do.

    Raises:
        _DependenceError: No cut is larger, or the user said which.
    """
    for rank in range(2):
        mine = _parts(samples, values, rank)
        mine_grads = [_grads(samples, [g for g in of if g is not None], rank) for of in grads]
        differing, reason = range(len(samples)), ""
        try:
            outcome = _outcome(optimizer, samples, mine, mine_grads)
        except Exception as error:
            reason = (
                f"a trial step on shards failed with {type(error).__name__}: {error}, while one on "
                "whole tensors went well; a rank that keeps nothing of a parameter has no gradient "
                "of it"
            )
        else:
            parts = _parts(samples, whole.updates, rank)
            pairs = zip(samples, outcome.updates, parts, strict=True)
            found = [_difference(*each) for each in pairs]
            differing = [index for index, difference in enumerate(found) if difference]
            reason = next((difference for difference in found if difference), "")
            if not reason and _difference_of_groups(outcome.numbers, whole.numbers):
                # Some optimizers count parameters: numbers that do not change with other gradients
                # are not compared.
                other = [
                    [grad if grad is None else grad * (1 + step) for grad in of_step]
                    for step, of_step in enumerate(grads[::-1])
                ]
                others = _outcome(optimizer, samples, values, other).numbers
                by_grads = {k: v for k, v in whole.numbers.items() if v != others[k]}
                reason = _difference_of_groups(outcome.numbers, by_grads)
                differing = range(len(samples))
        if reason:
            kinds = {samples[index].kind for index in differing}
            larger = [_enlarged(each) if each.kind in kinds else each for each in samples]
            if larger == samples:
                raise _DependenceError(reason)
            return larger
    return None


def _enlarged(sample: Sample) -> Sample:
    """Return a sample with the next larger cut; the same if the user said it, or none is larger."""
    shape, numel = sample.shape, sample.shape.numel()
    grain = sample.cut.grain(shape)
    larger = (cut for cut in _LADDER[:-1] if grain < cut.grain(shape) < numel)
    if sample.is_said or sample.cut == Cut.TENSOR:
        return sample
    return evolve(sample, cut=min(larger, key=lambda cut: cut.grain(shape), default=Cut.TENSOR))


@contextmanager
def _named_if_long(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say what takes so long, where it does."""
    what = "shard() is trying a %s on small tensors, to see how parameters may be cut for it (%d s)"
    is_over, began = threading.Event(), time.monotonic()

    def name() -> None:
        wait_s = _SILENT_S
        while not is_over.wait(wait_s):
            _LOG.warning(what, type(optimizer).__name__, round(time.monotonic() - began))
            wait_s = _AGAIN_S

    threading.Thread(target=name, daemon=True).start()
    try:
        # Compiling would take minutes.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        is_over.set()


def states_after_step(
    optimizer: torch.optim.Optimizer,
    params: Sequence[list[nn.Parameter]],
    options: Sequence[Mapping[str, Any]] | None = None,
) -> Mapping[Any, Mapping[str, Any]] | None:
    """Return the state that one step of a copy makes for tiny parameters; None if it fails. Local.

    `params`, which are stepped, and `options`, which replace the optimizer's, are by param group.
    """
    grads = [[torch.ones_like(param) for param in chain(*params)]]
    with _undisturbed(optimizer):
        try:
            return _stepped(optimizer, params, grads, options).state
        except Exception:
            # It may need a warmed-up model, for example.
            return None


def _choose(samples: Iterable[Sample]) -> list[Sample]:
    """Return two small samples of each kind: two, since one may depend on another."""
    largest: dict[tuple[int, str, int], Sample] = {}
    for sample in samples:
        if sample.kind not in largest or sample.shape.numel() > largest[sample.kind].shape.numel():
            largest[sample.kind] = sample
    return [_shrunk(sample) for sample in largest.values() for _ in range(2)]


def _shrunk(sample: Sample) -> Sample:
    shape = list(sample.shape)
    limit = max(_NUMEL, 4 * (sample.cut.block_numel or 1))
    while math.prod(shape) > limit and max(shape) > _LEAST_DIM:
        largest = max(range(len(shape)), key=shape.__getitem__)
        shape[largest] = max(-(-shape[largest] // 2), _LEAST_DIM)
    return evolve(sample, shape=torch.Size(shape))


def _values(sample: Sample, index: int, *, step: int) -> Tensor:
    """Return made-up values or gradients of a sample's shape; see NOTE(trial)."""
    generator = torch.Generator().manual_seed(1000 * index + step + 1)
    numel = sample.shape.numel()
    ramp = torch.linspace(0.2, 2.0, max(numel, 1), device="cpu")[:numel]
    uneven = torch.randn(numel, generator=generator, device="cpu") * (
        ramp if step % 2 else ramp.flip(0)
    )
    return (uneven / (1 + 4 * (index % 2))).view(sample.shape).to(sample.device)


def _parts(samples: Sequence[Sample], whole: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the part of each tensor that one of two ranks keeps, in the shape of its shard."""
    parts = []
    for index, (sample, tensor) in enumerate(zip(samples, whole, strict=True)):
        numel, grain = sample.shape.numel(), sample.cut.grain(sample.shape)
        count = numel // 2 // grain
        # Odd, so that no power of 2 divides it.
        count = count | 1 if (count | 1) * grain < numel else count
        middle = count * grain
        if sample.cut == Cut.TENSOR:
            # Of the two samples, each rank has one.
            middle = numel * ((index // 2 + index) % 2)
        flat = tensor.reshape(-1)[:middle] if rank == 0 else tensor.reshape(-1)[middle:]
        parts.append(flat.view(sample.cut.shard_shape(sample.shape, flat.numel())))
    return parts


def _grads(samples: Sequence[Sample], whole: Sequence[Tensor], rank: int) -> list[Tensor | None]:
    """Return the parts of gradients that one of two ranks keeps, as `_parts` does for values.

    As in a step, an empty part is None, unless the cut is flat or the whole is empty too.
    """
    parts = zip(samples, _parts(samples, whole, rank), strict=True)
    return [
        part if part.numel() or sample.cut == Cut.FLAT or not sample.shape.numel() else None
        for sample, part in parts
    ]


def _outcome(
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    values: Sequence[Tensor],
    grads: Grads,
    watch: StepWatch | None = None,
) -> Outcome:
    """Let a copy make all steps on these parameters."""
    by_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for sample, value in zip(samples, values, strict=True):
        by_group[sample.param_group].append(nn.Parameter(value.clone()))
    torch.manual_seed(0)
    twin = _stepped(optimizer, by_group, grads, watch=watch)
    pairs = zip(chain(*by_group), values, strict=True)
    updates = [param.detach() - value for param, value in pairs]
    numbers = {
        f"param_groups[{index}][{key!r}]": float(value)
        for index, group in enumerate(twin.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    unsaved = next(filter(None, map(_why_unsaved, twin.state.values())), "")
    if watch is not None:
        _watch_later(twin, [*chain(*by_group)], grads, watch)
    return Outcome(updates, numbers, unsaved)


def _why_unsaved(state: Any) -> str:
    for name, value in flat_entries(state).items() if isinstance(state, dict) else ():
        if is_strange(name):
            return f"it has the key {name.removeprefix('[?')}, which is no string and no int"
        try:
            describe(value, [])
        except (StateError, RecursionError) as error:
            return f"{name!r}: {error}"
    return ""


def _watch_later(
    twin: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    grads: Grads,
    watch: StepWatch,
) -> None:
    """Watch steps whose counters are far on, as after a warm-up; what they do is not compared."""
    before = _counters(twin)
    _step(twin, params, grads[-1], None)
    counting = {
        where: holder
        for where, (holder, count) in _counters(twin).items()
        if where in before and count - before[where][1] == 1
    }
    for later in _LATER:
        for (_, key), holder in counting.items():
            count = holder[key]
            holder[key] = torch.full_like(count, later) if isinstance(count, Tensor) else later
        try:
            _step(twin, params, grads[-1], watch)
        except Exception:
            # The counter may count something else as well.
            return


def _counters(twin: torch.optim.Optimizer) -> dict[tuple[int, Any], tuple[Any, float]]:
    """Numbers in state, param groups and attributes, with their containers."""
    inside = [*twin.state.values(), *vars(twin).values()]
    holders = [twin.state, *twin.param_groups, vars(twin)]
    holders += [each for each in inside if type(each) in {dict, defaultdict, list}]
    found: dict[tuple[int, Any], tuple[Any, float]] = {}
    for holder in holders:
        for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
            is_number = type(value) in {int, float}
            if is_number or (isinstance(value, Tensor) and value.numel() == 1):
                found[id(holder), key] = holder, float(value)
    return found


def _stepped(
    optimizer: torch.optim.Optimizer,
    params: Sequence[list[nn.Parameter]],
    grads: Grads,
    options: Sequence[Mapping[str, Any]] | None = None,
    watch: StepWatch | None = None,
) -> torch.optim.Optimizer:
    """A copy of the optimizer that has stepped these parameters with these gradients."""
    before = [param.detach().clone() for param in chain(*params)]
    problem: Exception | None = None
    for make in (_copy, _construct):
        try:
            twin = make(optimizer, _groups(optimizer, params, options))
            # Schedule-free optimizers must be told that they train.
            if callable(getattr(twin, "train", None)):
                twin.train()  # type: ignore[attr-defined]
            for step in grads:
                _step(twin, [*chain(*params)], step, watch)
            return twin
        except Exception as error:
            # It may keep state from its constructor on, which a copy of its attributes lacks.
            problem = problem or error
            for param, value in zip(chain(*params), before, strict=True):
                param.data.copy_(value)
    assert problem is not None, "neither way was one"
    raise problem


def _step(
    twin: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    grads: Sequence[Tensor | None],
    watch: StepWatch | None,
) -> None:
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        param.grad = None if grad is None else grad.clone()
        if watch is not None and param.grad is not None:
            watch.follow(number, param)
            watch.follow(number, param.grad)
    with nullcontext() if watch is None else watch:
        twin.step(lambda: 0.0) if _needs_closure(twin) else twin.step()


def _groups(
    optimizer: torch.optim.Optimizer,
    params: Sequence[list[nn.Parameter]],
    options: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Return the optimizer's param groups with these parameters and options in place of its own.

    Options that are not replaced are copied; learning rates are raised to `_LEAST_LR`.
    """
    groups = []
    for group, small, given in zip(
        optimizer.param_groups, params, options or [{}] * len(params), strict=True
    ):
        mine = _copied(options_of(group))
        if "lr" in mine:
            lr = mine["lr"]
            if isinstance(lr, Tensor):
                mine["lr"] = lr.clamp(min=_LEAST_LR)
            elif lr is not None:
                # Adafactor computes its own if it is None.
                mine["lr"] = max(lr, _LEAST_LR)
        groups.append({"params": small, **mine, **_copied(dict(given))})
    return groups


def _copy(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with the same attributes, without calling its constructor."""
    kind = type(optimizer)
    attributes = vars(optimizer)
    if not attributes.keys() >= _OF_THE_COPY or any(hasattr(kind, name) for name in _OF_THE_COPY):
        raise TypeError(f"a {kind.__name__} computes its param_groups or state")
    twin = object.__new__(kind)
    for name, value in attributes.items():
        if name in _OF_THE_COPY:  # set below; those of the original may be as large as the model
            continue
        if callable(value) and callable(getattr(kind, name, None)):
            # A method replaced on the object, as schedulers do, acts on the original.
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            own: Any = OrderedDict()
        elif isinstance(value, MethodType) and value.__self__ is optimizer:
            own = MethodType(value.__func__, twin)
        elif is_inner(value, optimizer):
            own = _copy(value, groups)
        else:
            own = _copied(value)
        twin.__dict__[name] = own
    state = _copied(shared_state(optimizer))
    twin.__dict__ |= {"state": defaultdict(dict, state), "param_groups": groups}
    return twin


def _construct(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {k: _copied(v) for k, v in optimizer.defaults.items() if k in known}
    return kind(groups, **options)


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


def _difference(sample: Sample, mine: Tensor, expected: Tensor) -> str:
    """Say by how much the update of a shard is off; "" if it is not."""
    if not mine.numel():
        return ""
    largest = expected.abs().max().item()
    off = (mine - expected).abs().max().item()
    # This is false for NaN.
    if off <= _TOLERANCE * largest:
        return ""
    alone = "alone" if sample.cut == Cut.TENSOR else f"cut {str(sample.cut)!r}"
    return (
        f"on a tensor of shape {tuple(sample.shape)} like parameter {sample.name!r}, {alone}, its "
        f"update differs by {off:.2g} from the update of whole tensors together, whose largest "
        f"element is {largest:.2g}; it looks at elements that a rank would not have, or is random"
    )


def _difference_of_groups(mine: Mapping[str, float], expected: Mapping[str, float]) -> str:
    """Say which number a step writes into a param group that would not be the same on ranks."""
    for name, value in mine.items():
        other = expected.get(name, value)
        if not (math.isclose(value, other, rel_tol=_TOLERANCE) or math.isnan(value + other)):
            return (
                f"its step writes {name} from gradients: {value:.4g} on shards, {other:.4g} on "
                "whole tensors together"
            )
    return ""


@contextmanager
def _undisturbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the user's gradients away, so that nothing a copy may share can step, and put back."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, versions = [p.grad for p in params], [version_of(p) for p in params]
    elsewhere = [param.device for param in params if param.device.type not in ("cpu", "meta")]
    kind, devices = elsewhere[0].type if elsewhere else "cpu", sorted({d.index for d in elsewhere})
    try:
        for param in params:
            param.grad = None
        with torch.random.fork_rng(devices, device_type=kind), torch.enable_grad():
            yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    if [version_of(param) for param in params] != versions:
        kind = type(optimizer).__name__
        raise PartitionError(
            f"{kind} was tried, to see whether it can work on shards, and its copy wrote to "
            "parameters of the model, which it must keep outside of param_groups; say what it "
            f"needs, {kind}.needs_cut = 'flat' or 'tensor', and build the model again"
        )


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    return "closure" in inspect.signature(optimizer.step).parameters


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _calls_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether its step needs a closure, by its signature or by its code.

    Nothing is run: an optimizer that says what it needs may have the user's model as an attribute,
    and write to it.
    """
    if _needs_closure(optimizer) or not _takes_closure(optimizer):
        return _needs_closure(optimizer)
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(optimizer).step))))
    except (OSError, TypeError, SyntaxError):
        return False
    return _calls_unasked(code)


def _calls_unasked(node: ast.AST) -> bool:
    """Tell whether code calls `closure` outside of what depends on whether there is one."""
    if isinstance(node, ast.If | ast.IfExp) and any(
        isinstance(each, ast.Name) and each.id == "closure" for each in ast.walk(node.test)
    ):
        return False
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if is_call and node.func.id == "closure":  # type: ignore[attr-defined]
        return True
    return any(map(_calls_unasked, ast.iter_child_nodes(node)))


# NOTE(needs): the cut that an optimizer needs is known from, in this order, its attribute
# `needs_cut` (a cut, or a method from a param group to a cut), this table for torch's own classes,
# and a trial of a copy of it. Subclasses of torch's are tried, since they may override anything.

_NEEDS_OF_TORCH: Final = {
    Cut.FLAT: "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    Cut.TENSOR: "Adafactor Muon",
}


def choose_cuts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, choice: CutChoice
) -> dict[int, Cut]:
    """Return the cut of each parameter, by id, for an optimizer that will work on shards.

    The user's choice counts first, then `cut` in the parameter's param group, then what the
    optimizer needs; without any of them a parameter may be cut anywhere.

    Raises:
        PartitionError: A choice names no parameter or no cut, or the optimizer would train
            differently on shards cut so, or nothing is known of it and it cannot be tried.
    """
    names = {id(param): name for name, param in reversed(list(model.named_parameters()))}
    cuts = _said_by_user(model, choice)
    for member in members_of(optimizer):
        _choose_for(member, names, cuts)
    return cuts


def _choose_for(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], cuts: dict[int, Cut]
) -> None:
    """Add the cuts of its parameters to what the user said, and check those."""
    kind = type(optimizer).__name__
    # Id and sample of parameters for which neither the user nor the optimizer says a cut.
    samples: list[tuple[int, Sample]] = []
    # A cut in pieces that the optimizer's own word allows.
    trusted: Cut | None = None
    need: Cut | None = None
    for index, group in enumerate(optimizer.param_groups):
        where = f"'cut' in param group {index} of the {kind}"
        said = _parse(group["cut"], where) if group.get("cut") is not None else None
        need = need_of(optimizer, group)
        for param in group["params"]:
            chosen, name = cuts.get(id(param), said), names[id(param)]
            cut = cuts[id(param)] = chosen or need or Cut.FLAT
            if need is None:
                # The sample has values, so it is not on meta.
                device = torch.device("cpu") if param.is_meta else param.device
                is_said = chosen is not None
                samples.append((id(param), Sample(name, param.shape, device, cut, index, is_said)))
                continue
            if need != Cut.TENSOR and getattr(optimizer, "needs_cut", None) is not None:
                trusted = need
            if not cut.keeps(need, param.shape):
                raise PartitionError(
                    f"parameter {name!r} of shape {tuple(param.shape)}: {kind} needs "
                    f"the cut {str(need)!r}, and would train differently on shards cut "
                    f"{str(cut)!r}, as was asked for; leave the cut to the optimizer, or ask for "
                    f"{str(need)!r} or 'tensor'"
                )
    if trusted is not None and _calls_closure(optimizer):
        _LOG.warning(
            "%s says needs_cut=%r and is taken at its word, but its step evaluates the loss by a "
            "closure, at points that may depend on all parameters at once, as SAM's do: on shards "
            "it would train something else. Use stage 0 then",
            *(kind, str(trusted)),
        )
    found = find_cuts(optimizer, [sample for _, sample in samples]) if samples else {}
    if isinstance(found, str):
        raise PartitionError(
            f"{kind} cannot work on shards: {found}. Stage 0 takes any optimizer that steps by "
            "averaged gradients, or by a closure, of a model without DTensors; if you know better, "
            f"say so by its attribute: {kind}.needs_cut = 'flat', 'row', 'block(k)' or 'tensor'"
        )
    for key, sample in samples:
        cuts[key] = found[sample.kind]
    how = "a trial on small tensors went well" if samples else "what it needs is known"
    _LOG.debug("cuts for %s: %s", kind, how)
    for cut in dict.fromkeys(map(str, found.values())):
        if cut != "flat":
            of_cut = [sample for _, sample in samples if str(found[sample.kind]) == cut]
            _LOG.info(
                "a %s gets parameters cut %r, as a trial shows that it needs: %d of them, such as "
                "%r; a rank may keep up to %d elements more than others of each",
                *(kind, cut, len(of_cut), of_cut[0].name),
                max(found[sample.kind].grain(sample.shape) for sample in of_cut),
            )


def _said_by_user(model: nn.Module, choice: CutChoice) -> dict[int, Cut]:
    params = list(model.named_parameters(remove_duplicate=False))
    cuts: dict[int, Cut] = {}
    if isinstance(choice, Mapping):
        for pattern, value in choice.items():
            matched = [param for name, param in params if fnmatchcase(name, pattern)]
            if not matched:
                raise PartitionError(
                    f"cut: {pattern!r} matches no parameter; see model.named_parameters()"
                )
            for param in matched:
                cuts.setdefault(id(param), _parse(value, f"cut of {pattern!r}"))
        return cuts
    for name, param in params:
        value = choice(name, param) if callable(choice) else choice
        if value is not None:
            cuts.setdefault(id(param), _parse(value, f"cut of {name!r}"))
    return cuts


def need_of(optimizer: Any, group: dict[str, Any]) -> Cut | None:
    """Return the cut that an optimizer needs for a param group, None if unknown; NOTE(needs)."""
    kind = type(optimizer)
    need = getattr(optimizer, "needs_cut", None)
    if callable(need):
        need = need(group)
    if need is not None:
        return _parse(need, f"{kind.__name__}.needs_cut")
    if kind is not getattr(torch.optim, kind.__name__, None):
        return None
    cuts = (cut for cut, names in _NEEDS_OF_TORCH.items() if kind.__name__ in names.split())
    return next(cuts, None)


def _parse(value: Any, where: str) -> Cut:
    try:
        return Cut.parse(value)
    except LayoutError as error:
        raise PartitionError(f"{where}: {error}") from error


# Sides of the parameters that are tried, small ones and ones that are large enough for optimizers
# to quantize and factor state. Sides above 2 differ, so that they can be told apart.
_SIDES: Final = ((11, 13, 7, 5, 3, 2, 2, 2), (136, 128, 7, 5, 3, 2, 2, 2))
_LARGE_NUMEL: Final = 4096


@frozen
class StateTensor:
    """One tensor of a parameter's state, of any size of the parameter."""

    # Name of the entry that it is, or is in.
    name: str
    dtype: torch.dtype
    # Its shape when `of` was the shape of the parameter.
    shape: tuple[int, ...]
    of: tuple[int, ...]

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return its shape for a parameter of this shape, which has as many dims as `of`."""
        numel, of_numel = math.prod(self.shape), math.prod(self.of)
        if self.shape == self.of:
            return tuple(shape)
        if self.shape and numel == of_numel:
            return (math.prod(shape),)
        if len(self.shape) == 1 and not {*self.shape} & {*self.of, 1} and of_numel % numel == 0:
            # One element for each block.
            return (-(-math.prod(shape) * numel // of_numel),)
        return tuple(shape[self.of.index(side)] if side in self.of else side for side in self.shape)


Kind = tuple[int, int, torch.dtype]  # param group, number of dims, dtype


@frozen
class StatePlan:
    """State by kind of parameter. Empty without an optimizer."""

    of_small: Mapping[Kind, tuple[StateTensor, ...]] = field(factory=dict)
    of_large: Mapping[Kind, tuple[StateTensor, ...]] = field(factory=dict)

    def tensors_of(self, kind: Kind, shape: Sequence[int]) -> tuple[StateTensor, ...]:
        """Return what a parameter of this kind and shape has."""
        known = self.of_large if math.prod(shape) >= _LARGE_NUMEL else self.of_small
        return known.get(kind, ())

    def bytes_of(self, kind: Kind, shape: Sequence[int]) -> tuple[int, int]:
        """Return a parameter's bytes of state: per element, row or block; and of single numbers."""
        state = scalars = 0
        for tensor in self.tensors_of(kind, shape):
            found = tensor.shape_for(shape)
            num_bytes = math.prod(found) * tensor.dtype.itemsize
            if found == tuple(shape) or math.prod(found) > 1:
                state += num_bytes
            else:
                scalars += num_bytes
        return state, scalars


def plan_state(optimizer: torch.optim.Optimizer, kinds: Sequence[Kind]) -> StatePlan:
    """Step a copy of the optimizer on a small and a large parameter of each kind. Local.

    Args:
        optimizer: Is not changed.
        kinds: Of its parameters, as they are stepped; groups are counted through all optimizers of
            a chain.

    Raises:
        PartitionError: It cannot step so.
    """
    return StatePlan(*(_state_by_kind(optimizer, kinds, sides) for sides in _SIDES))


def _state_by_kind(
    optimizer: torch.optim.Optimizer, kinds: Sequence[Kind], sides: Sequence[int]
) -> dict[Kind, tuple[StateTensor, ...]]:
    found: dict[Kind, tuple[StateTensor, ...]] = {}
    first = 0
    for member in members_of(optimizer):
        groups = range(first, first + len(member.param_groups))
        mine = [sorted({k for k in kinds if k[0] == at}, key=str) for at in groups]
        params = [
            [
                nn.Parameter(torch.ones(_shape(sides, kind[1]), dtype=kind[2], device="cpu"))
                for kind in of_group
            ]
            for of_group in mine
        ]
        states = states_after_step(member, params)
        if states is None:
            raise PartitionError(
                f"a trial step of a {type(member).__name__} on small tensors failed, so nothing is "
                "known of the state that it keeps; give an optimizer that steps any tensors"
            )
        for of_group, tried in zip(mine, params, strict=True):
            for kind, param in zip(of_group, tried, strict=True):
                found[kind] = tuple(
                    StateTensor(name, tensor.dtype, tuple(tensor.shape), tuple(param.shape))
                    for name, value in flat_entries(states.get(param, {})).items()
                    for tensor in plain_tensors_in(value)
                )
        first = groups.stop
    return found


def _shape(sides: Sequence[int], num_dims: int) -> tuple[int, ...]:
    is_flat = num_dims == 1 and sides is _SIDES[1]
    return (_NUMEL,) if is_flat else tuple(sides[:num_dims])
