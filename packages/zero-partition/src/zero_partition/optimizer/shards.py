"""Any torch optimizer, working on shards: how its state is divided with parameters, and whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor, nn
from zero_comm import Group, all_gather_flat

from zero_partition.chained import attribute_with_params, members_of, set_state
from zero_partition.errors import PartitionError, StateError
from zero_partition.nested import (
    describe,
    flat_entries,
    is_made_of_attributes,
    is_plain,
    is_wrapper,
    map_tensors,
    nested_entries,
    rebuild,
    tensors_in,
)
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import ParameterPlan, Span
from zero_partition.run.step import has_state, refuse_parameter
from zero_partition.run.unit import Unit
from zero_partition.torch_private import base_of

# NOTE(entries): an entry of a shard's state is one of four things, and its shape says which.
# One value for the whole parameter: what is no tensor, has no dim, or is called "step".
# One value per element: the shape of the shard, or as many elements in one dim.
# One slice per row, where the cut is "row", or per block, where it is "block(k)": along dim 0.
# Anything at all, where the cut keeps the whole parameter on one rank, which then has all of it.
# An entry of any other shape is one value for the whole parameter, if it has one element on every
# rank; otherwise no whole is known. A block of one element has the shape of an element, and is
# taken for one, which differs only for a scalar's shape. Beside a parameter of one element, one
# value has that shape as well: there the same entry of larger parameters says what it is.


def _as_shape(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)


@frozen
class EntryInfo:
    """Description of an entry that a rank has; attrs.asdict() of it can be sent as JSON."""

    # A tensor's dtype, or the name of a class.
    kind: str
    # Shape of a tensor; None for other values.
    shape: tuple[int, ...] | None = field(default=None, converter=_as_shape)
    is_on_host: bool = False
    # What `describe` says of another value; None where it cannot.
    nest: Any = None

    @property
    def described(self) -> Any:
        """Return the description that `describe` gives; None where it cannot."""
        if self.shape is not None:
            return ["tensor", self.kind.removeprefix("torch."), list(self.shape)]
        return self.nest

    @classmethod
    def of(cls, value: Any) -> EntryInfo:
        """Return the description of this value."""
        if isinstance(value, Tensor) and not is_wrapper(value):
            return cls(str(value.dtype), tuple(value.shape), value.device.type == "cpu")
        try:
            nest = describe(value, [])
        except (StateError, RecursionError):
            # An object of some class, or a circle of them.
            nest = None
        return cls(type(value).__name__, nest=nest)


@frozen
class TensorEntry:
    """A tensor's entry in full: its shape, and the elements of it that each rank has."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool
    # Per rank, in rank order; several ranks have all of a value for the whole.
    spans: tuple[Span, ...]

    @property
    def splits(self) -> tuple[int, ...]:
        """Elements that each rank sends so that every one is sent once."""
        splits: list[int] = []
        for span in self.spans:
            splits.append(span.numel if span.start == sum(splits) else 0)
        return tuple(splits)

    def given_by(self, rank: int) -> Span:
        """The elements that a rank sends: all that it has, or none."""
        start = self.spans[rank].start
        return Span(start, start + self.splits[rank])


@frozen
class PlainEntry:
    """One value for the whole parameter that is no tensor."""

    # Value of a rank that keeps some of the parameter; None if no message can have it.
    value: Any

    def value_beside(self, own: Any) -> Any:
        """Return it, or this rank's own: one that keeps nothing may have counted otherwise."""
        return own if self.value is None else self.value


@frozen
class PerRankEntry:
    """Values of which no whole is known: each rank goes on with its own."""

    infos: tuple[EntryInfo | None, ...]
    # Rank whose value is the whole, as it keeps the whole parameter.
    owner: int | None = None


Entry: TypeAlias = TensorEntry | PlainEntry | PerRankEntry
# Shape of the whole entry; rank -> its elements of that.
Found: TypeAlias = tuple[Sequence[int], dict[int, Span]]


def plan_entry(
    param: ParameterPlan,
    key: str,
    kept: Sequence[Span | None],
    infos: Sequence[EntryInfo | None],
) -> Entry:
    """Return how an entry is divided over the ranks, from what they say; see NOTE(entries).

    Args:
        param: The parameter whose state it is.
        key: The entry.
        kept: Per rank, the elements of the parameter that it keeps; None if there are none.
        infos: Per rank, what it has; None where it has no such entry.

    Raises:
        StateError: A rank that should have it has not, ranks have different things, or a shape that
            the cut does not explain.
    """
    numel, none = param.shape.numel(), Span(0, 0)
    owners = [rank for rank, span in enumerate(kept) if has_state_of(param, span or none)]
    # Some optimizers have no state of a shard without elements, where others have an empty one.
    owners = [rank for rank in owners if infos[rank] is not None or kept[rank]] or owners
    parts = {rank: what for rank in owners if (what := infos[rank]) is not None}
    for rank in owners:
        if rank not in parts or parts[rank].kind != parts[owners[0]].kind:
            raise _refusal(param, key, infos, f"rank {rank} should have what the others have")
    # A rank that keeps some elements, if there is one: without elements, its entry may have another
    # shape.
    owner = next((rank for rank in owners if kept[rank]), owners[0])
    first, num_kept = parts[owner], (kept[owner] or none).numel
    if first.shape is None:
        if first.nest is not None and is_plain(first.nest):
            return PlainEntry(rebuild(first.nest, iter(())))
        if len(infos) == 1 and first.nest is None:
            return PlainEntry(None)
        if len(parts) < len(infos) and first.nest is None:
            raise _refusal(param, key, infos, f"a {first.kind} cannot be sent to those without it")
        if num_kept != numel or len(owners) > 1:
            raise _refusal(param, key, infos, f"the cut of tensors in a {first.kind} is unknown")
        return PerRankEntry(tuple(infos), owners[0])
    shard_shape = param.cut.shard_shape(param.shape, num_kept)
    is_as_kept = param.cut != Cut.FLAT and num_kept == numel and first.shape != shard_shape
    if is_as_kept or _is_for_whole(key, first.shape, shard_shape):
        found = _undivided(parts)
    else:
        found = _in_elements(param, parts, kept) or _in_slices(param, parts, kept)
        if found is None and math.prod(first.shape) == 1:
            found = _undivided(parts)
    if found is None:
        raise _refusal(
            param, key, infos, "that is neither one value, nor one per element, row or block"
        )
    whole, spans = found
    return TensorEntry(
        torch.Size(whole),
        getattr(torch, first.kind.removeprefix("torch.")),
        first.is_on_host,
        tuple(spans.get(rank, none) for rank in range(len(infos))),
    )


def has_state_of(param: ParameterPlan, span: Span) -> bool:
    """Return whether a rank that keeps `span` of a parameter has state of it.

    A rank that keeps nothing has none, unless the cut is flat or the parameter has no elements.
    """
    return param.cut == Cut.FLAT or bool(span.numel) or not param.shape.numel()


def keys_for_whole(states: Iterable[tuple[torch.Size, Mapping[str, Any]]]) -> frozenset[str]:
    """Entries with one element beside a parameter with more, by shapes; see NOTE(entries)."""
    return frozenset(
        key
        for of_param, state in states
        for key, value in state.items()
        if math.prod(getattr(value, "shape", (0,))) == 1 < of_param.numel()
    )


def part_of_entry(
    param: ParameterPlan, key: str, value: Any, span: Span, for_whole: Collection[str] = ()
) -> Any:
    """Return the part of a whole entry for a rank that keeps `span` of the parameter.

    See NOTE(entries).

    Args:
        param: The parameter whose state it is.
        key: The entry.
        value: All of it.
        span: The elements of the parameter that a rank keeps.
        for_whole: See `keys_for_whole`.

    Raises:
        PartitionError: A shape that the parameter's cut does not explain.
    """
    if param.cut != Cut.TENSOR and _holds_tensors(value):
        raise PartitionError(
            f"parameter {param.name!r}: optimizer state {key!r} is a {type(value).__name__} that "
            "contains tensors, and it is not known how to take a shard of them; keep them as "
            "entries of their own, call shard() before the first step, or use cut='tensor'"
        )
    if not isinstance(value, Tensor) or is_wrapper(value):
        return value
    part, shape = part_in_entry(param, key, value.shape, span, for_whole)
    is_whole = part.numel == value.numel() and tuple(value.shape) == shape
    # A view would keep the memory that it is a view of.
    if is_whole and base_of(value) is None:
        return value
    return value.reshape(-1)[part.as_slice()].view(shape).clone()


def part_in_entry(
    param: ParameterPlan,
    key: str,
    shape: Sequence[int],
    span: Span,
    for_whole: Collection[str] = (),
) -> tuple[Span, tuple[int, ...]]:
    """Return the elements of a whole entry for `span` of the parameter, and the part's shape.

    Arguments and errors are as for `part_of_entry`; the entry is a tensor of this shape.
    """
    shape, cut, numel = tuple(shape), param.cut, math.prod(shape)
    if _is_for_whole(key, shape, param.shape) or (key in for_whole and numel == 1):
        return Span(0, numel), shape
    if shape == tuple(param.shape) or (cut.kind == "block" and shape == (param.shape.numel(),)):
        return span, cut.shard_shape(param.shape, span.numel)
    if span.numel == param.shape.numel() and cut != Cut.FLAT:
        # An entry of the whole parameter, of any shape.
        return Span(0, numel), shape
    total, mine = _slices(param, Span(0, param.shape.numel())), _slices(param, span)
    if total is not None and mine is not None and shape and shape[0] == total.numel:
        inner = math.prod(shape[1:])
        return Span(mine.start * inner, mine.stop * inner), (mine.numel, *shape[1:])
    if numel == 1:
        return Span(0, numel), shape
    raise PartitionError(
        f"parameter {param.name!r}: optimizer state {key!r} has shape {shape}, "
        f"expected one element, the parameter's shape {tuple(param.shape)}, or one entry per row "
        f"or block where it is cut so: its cut is {str(cut)!r}. cut='tensor' keeps state of any "
        "shape"
    )


def _holds_tensors(value: Any) -> bool:
    if is_wrapper(value):
        return True
    is_nest = isinstance(value, list | tuple | dict | set) or is_made_of_attributes(value)
    return is_nest and any(True for _ in tensors_in(value))


def _is_for_whole(key: str, shape: Sequence[int], of: Sequence[int]) -> bool:
    """Return whether an entry of this shape is one value for a whole tensor of shape `of`."""
    return key == "step" or (len(shape) == 0 and len(of) > 0)


def _slices(param: ParameterPlan, span: Span) -> Span | None:
    """The rows or blocks that these elements of the parameter are; None if it is not cut so."""
    if param.cut.kind not in {"row", "block"}:
        return None
    grain = param.cut.grain(param.shape)
    return Span(span.start // grain, -(-span.stop // grain))


def _undivided(parts: Mapping[int, EntryInfo]) -> Found | None:
    whole = next(iter(parts.values())).shape or ()
    if any(part.shape != whole for part in parts.values()):
        return None
    return whole, dict.fromkeys(parts, Span(0, math.prod(whole)))


def _in_elements(
    param: ParameterPlan, parts: Mapping[int, EntryInfo], kept: Sequence[Span | None]
) -> Found | None:
    spans = {rank: kept[rank] or Span(0, 0) for rank in parts}
    for rank, span in spans.items():
        shapes = {(span.numel,), param.cut.shard_shape(param.shape, span.numel)}
        if not span.numel and param.shape.numel():
            # Where there are no elements, Prodigy has a number.
            shapes.add(())
        if parts[rank].shape not in shapes:
            return None
    return param.shape, spans


def _in_slices(
    param: ParameterPlan, parts: Mapping[int, EntryInfo], kept: Sequence[Span | None]
) -> Found | None:
    # Shape of the entry of one row or block.
    inner = (next(iter(parts.values())).shape or ())[1:]
    numel, spans = math.prod(inner), {}
    for rank, part in parts.items():
        slices = _slices(param, kept[rank] or Span(0, 0))
        if slices is None or part.shape != (slices.numel, *inner):
            return None
        spans[rank] = Span(slices.start * numel, slices.stop * numel)
    total = _slices(param, Span(0, param.shape.numel()))
    return None if total is None else ((total.numel, *inner), spans)


def _refusal(
    param: ParameterPlan, key: str, infos: Sequence[EntryInfo | None], reason: str
) -> StateError:
    have = "; ".join(
        f"rank {rank} has " + ("nothing" if what is None else f"{what.kind} {what.shape or ''}")
        for rank, what in enumerate(infos)
    )
    return StateError(
        f"parameter {param.name!r}: optimizer state {key!r} has no whole under the cut "
        f"{str(param.cut)!r}: {have}; {reason}. cut='tensor' keeps state of any shape; "
        "local_optimizer_state(param, key) reads this rank's"
    )


class ShardStates(defaultdict):
    """An optimizer's state by shard, which knows what is asked of it by parameter.

    Else `state[param]` would be an empty dict, and `param in state` false, without a word.
    """

    def __missing__(self, key: Any) -> Any:
        """Make a shard's state."""
        refuse_parameter(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        """Return whether a shard has state."""
        if super().__contains__(key):
            return True
        refuse_parameter(key)
        return False

    def __bool__(self) -> bool:
        """See `has_state`."""
        return has_state(len(self))

    def get(self, key: Any, default: Any = None) -> Any:  # type: ignore[override]
        """A shard's state, if it has one."""
        return super().get(key, default) if key in self else default


def watch_state(optimizer: torch.optim.Optimizer) -> None:
    """Tell a question about a model's parameter in `optimizer.state` where the answer is."""
    # Otherwise it is of the optimizer's own kind.
    if type(optimizer.state) is defaultdict:
        set_state(optimizer, ShardStates(dict, optimizer.state))


def leave_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo `watch_state`."""
    if type(optimizer.state) is ShardStates:
        set_state(optimizer, defaultdict(dict, optimizer.state))


def check_params_of(
    optimizer: torch.optim.Optimizer, known: Collection[int], model: nn.Module
) -> None:
    """Raise PartitionError where an optimizer has a parameter whose id is not among these.

    Args:
        optimizer: Of the user's, or one that is sharded.
        known: Ids of parameters that were sharded, and of their shards; or of all of the model's.
        model: May have others that were added since.
    """
    given = (id(param) for group in optimizer.param_groups for param in group["params"])
    by_both = (
        "For one optimizer over two models, shard them as one: nn.ModuleList([first, second]). "
        if any(each in known for each in given)
        else ""
    )
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) in known:
                continue
            where = f"param group {index} of the {type(optimizer).__name__}: parameter {position}"
            added = {id(each): name for name, each in model.named_parameters()}
            if name := added.get(id(param)):
                raise PartitionError(
                    f"{where} is {name!r}, which was added to the model after shard(): add modules "
                    "before shard(), or after unshard(), and shard the model again"
                )
            raise PartitionError(
                f"{where} of shape {tuple(param.shape)} is not in the model that shard() was "
                f"given. {by_both}Build the optimizer of parameters of the very model that is "
                "sharded, and add modules before shard(), or after unshard()"
            )


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, shards_state: bool
) -> None:
    """Raise PartitionError unless the optimizer is of this model, and can work on shards."""
    known = {id(param) for param in model.parameters()}
    check_params_of(optimizer, known, model)
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(param.requires_grad for param in given):
        raise PartitionError(
            f"expected an optimizer with something to train, got {type(optimizer).__name__} over "
            f"{len(given)} parameters, none of which requires a gradient; unfreeze something, or "
            "shard(model) without an optimizer for inference"
        )
    for member in members_of(optimizer):
        # LOMO has this method (arXiv 2306.09782).
        if callable(getattr(member, "fused_backward", None)):
            raise PartitionError(
                f"{type(member).__name__} updates parameters within backward, by each rank's own "
                "gradients; to train with little memory use stage 3, or offload state and "
                "parameters to the host: ZeroConfig(stage=3, offload=Offload(optimizer='host', "
                "params='host'))"
            )
    for member in members_of(optimizer) if shards_state else ():
        attribute = attribute_with_params(member, known)
        if attribute is not None:
            raise PartitionError(
                f"{type(member).__name__} keeps parameters in its attribute {attribute!r}, "
                "outside param_groups, and would go on updating the unsharded ones; use an "
                "elementwise optimizer (SGD, Adam, AdamW, Adagrad, Lion, ...), or one that "
                "needs whole tensors and finds them in param_groups (Muon, Adafactor). Stage 0 "
                "takes any optimizer, of a model without DTensors"
            )


def param_group_of(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Parameter id to the index of its param group."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {id(param): i for i, group in enumerate(groups) for param in group["params"]}


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Return facts about the optimizer that ranks must agree on, by name."""
    if optimizer is None:
        return {"optimizer": "none"}
    facts = {"optimizer": ", ".join(type(member).__name__ for member in members_of(optimizer))}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                facts[f"optimizer param group {index}"] = f"{len(value)} parameters"
            elif isinstance(value, int | float | str | bool | tuple | None):
                facts[f"optimizer param group {index}, {key}"] = repr(value)
    return facts


def describe_states(
    optimizer: torch.optim.Optimizer | None, *, among: Callable[[int], bool]
) -> dict[str, str]:
    """Return facts about the state of some parameters that ranks must agree on. Local.

    `among` returns whether the parameter with an id is one of them.
    """
    facts, states = dict[str, str](), {} if optimizer is None else optimizer.state
    chosen = (item for item in states.items() if among(id(item[0])))
    for index, (param, state) in enumerate(chosen):
        step = state.get("step") if isinstance(state, dict) else None
        step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        of = tuple(param.shape) if isinstance(param, Tensor) else param
        keys = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        facts[f"optimizer state {index}"] = f"{of}: {keys}, step {step}"
    return facts


@frozen(eq=False)
class SplitEntry:
    """An entry of state between two partitions: each rank has an even part of its elements."""

    shape: torch.Size
    # 1-D, as long on every rank; on the host where the entry was offloaded.
    part: Tensor
    group: Group
    # Device of the whole entry in the partition that follows.
    device: torch.device

    @classmethod
    def of(cls, value: Tensor, group: Group, device: torch.device | None = None) -> SplitEntry:
        """Keep this rank's part of a tensor that is the same on every rank. Local.

        Args:
            value: The whole entry.
            group: Ranks that keep the parts.
            device: Where `whole` puts it; None: where it is.
        """
        flat, length = value.reshape(-1), -(-value.numel() // group.world_size)
        part = flat.new_zeros(length)
        mine = flat[group.rank * length : (group.rank + 1) * length]
        part[: mine.numel()] = mine
        return cls(value.shape, part, group, value.device if device is None else device)

    def whole(self) -> Tensor:
        """Return the tensor. Collective."""
        shard = self.part.to(self.group.device)
        splits = [shard.numel()] * self.group.world_size
        flat = shard.new_empty(sum(splits))
        all_gather_flat(flat, splits=splits, group=self.group, shard=shard).wait()
        return flat[: self.shape.numel()].view(self.shape).to(self.device)


def split_state(
    state: Mapping[str, Any], group: Group, devices: Mapping[str, torch.device]
) -> dict[str, Any]:
    """Return a parameter's whole state with this rank's part of each of its tensors. Local.

    Args:
        state: Entry -> value.
        group: Ranks that keep the parts.
        devices: Entry -> device that it belongs on, if it is on another now, as offloaded ones are.
    """
    split = dict(state)
    for key, value in state.items():
        is_elsewhere = key in devices
        if (
            isinstance(value, Tensor)
            and value.numel() > 1
            and (group.world_size > 1 or is_elsewhere)
        ):
            split[key] = SplitEntry.of(value, group, devices.get(key))
        elif is_elsewhere:
            # It is too small to split, or has tensors in other values.
            split[key] = map_tensors(value, lambda tensor, to=devices[key]: tensor.to(to))
    return split


def join_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with whole tensors in place of split ones. Collective then."""
    return {k: v.whole() if isinstance(v, SplitEntry) else v for k, v in state.items()}


def join_states(optimizer: torch.optim.Optimizer | None) -> None:
    """Make all state whole that is split. Collective then."""
    for member in members_of(optimizer):
        for param, state in [*member.state.items()]:
            entries = flat_entries(state) if isinstance(state, dict) else {}
            if any(isinstance(value, SplitEntry) for value in entries.values()):
                member.state[param] = nested_entries(join_state(entries))


def shard_optimizer(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """Put shards in place of the parameters, and keep this rank's part of the state.

    Collective where entries are split, one parameter's at a time; else local.
    Param-group dicts and the optimizer keep their identity, so a scheduler built before goes on
    working. The order of parameters is kept; a shard may be empty.

    Raises:
        PartitionError: A state tensor has a shape that its parameter's cut does not explain.
    """
    places = {
        id(param): (buffer, position)
        for unit in units
        for buffer in unit.buffers
        for position, param in enumerate(buffer.params)
    }
    plans = {key: buffer.plan.params[position] for key, (buffer, position) in places.items()}
    for member in members_of(optimizer):
        for_whole = keys_for_whole(
            (plans[id(p)].shape, flat_entries(of))
            for p, of in member.state.items()
            if id(p) in plans
        )
        for group in member.param_groups:
            shards = []
            for param in group["params"]:
                buffer, position = places[id(param)]
                plan, piece = plans[id(param)], buffer.piece_of(position)
                shards.append(buffer.shard_params[position])
                span = Span(0, 0) if piece is None else piece.in_tensor
                split = member.state.pop(param, None)
                state = None if split is None else join_state(flat_entries(split))
                if state is not None and has_state_of(plan, span):
                    parts = {
                        key: part_of_entry(plan, key, value, span, for_whole)
                        for key, value in state.items()
                    }
                    member.state[shards[-1]] = nested_entries(parts)
            group["params"][:] = shards
