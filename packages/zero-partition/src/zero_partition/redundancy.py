"""Any torch optimizer under DistributedDataParallel, with its state sharded by whole parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from zero_comm import (
    AgreementError,
    Group,
    Purpose,
    all_gather_flat,
    all_gather_json,
    check_agreement,
    gather_flat,
)

from zero_partition.optimizer.needs import Sample, find_dependence, need_of
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import ALIGN_BYTES, Balance, FlatLayout, Span

from .chained import options_of
from .errors import LoadError, PartitionError, StateError
from .nested import describe, map_tensors, rebuild, tensors_said


@define(eq=False)
class Consolidated:
    """State of all parameters as of one moment."""

    state: dict[Tensor, dict[str, Any]]
    live: list[Tensor]  # parameters whose state here is still the optimizer's own memory

    @classmethod
    def of(
        cls, params: list[Tensor], whole: Mapping[int, dict[str, Any]], mine: Mapping[int, Any]
    ) -> Consolidated:
        """Of state by the number of the parameter; `mine` is that of this rank."""
        state = {params[number]: of_param for number, of_param in whole.items()}
        return cls(state, [params[number] for number in mine])

    def detach(self) -> None:
        """Give it memory of its own, before the optimizer writes to what it shares.

        In place, since a caller may have it by now.
        """
        for param in self.live:
            state = self.state[param]
            state.update(map_tensors(state, torch.clone))
        self.live.clear()


# ---- Tensors that travel together, each from the one rank that has it to the others ----


PARCEL_BYTES = 32 * 2**20  # what is packed together; a larger tensor is a parcel of its own


@frozen
class Parcel:
    """Which tensors travel, in the order of their owners, and where their bytes lie."""

    positions: tuple[int, ...]  # in the list of tensors that was planned
    owners: tuple[int, ...]  # ascending ranks
    layout: FlatLayout  # in bytes

    @classmethod
    def plan(
        cls,
        positions: Sequence[int],
        sizes: Sequence[int],
        owners: Sequence[int],
        *,
        world_size: int,
    ) -> Parcel:
        """All of these in one.

        Args:
            positions: Which of the tensors.
            sizes: Bytes of every tensor.
            owners: The rank that has each tensor.
            world_size: Of the group.
        """
        positions = sorted(positions, key=lambda position: owners[position])  # stable
        ranks = [owners[position] for position in positions]
        numels = [sizes[position] for position in positions]
        layout = FlatLayout.plan_whole(numels, ranks, world_size=world_size, align=ALIGN_BYTES)
        return cls(tuple(positions), tuple(ranks), layout)

    def places(self) -> Iterator[tuple[int, int, Span]]:
        """Each tensor's position, its owner, and the bytes it has in the buffer."""
        return zip(self.positions, self.owners, self.layout.spans, strict=True)


def plan_parcels(
    sizes: Sequence[int], owners: Sequence[int], *, world_size: int, limit: int = PARCEL_BYTES
) -> tuple[Parcel, ...]:
    """Deal tensors into parcels, in each of which every rank has about as much to send.

    Args:
        sizes: Bytes of each tensor.
        owners: The rank that has each tensor.
        world_size: Of the group.
        limit: In bytes; no parcel of several tensors is larger.
    """
    totals, so_far, progress = [0] * world_size, [0] * world_size, []
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    for size, owner in zip(sizes, owners, strict=True):
        progress.append(so_far[owner] / max(totals[owner], 1))
        so_far[owner] += size
    dealt: list[list[int]] = []
    room = -1
    for position in sorted(range(len(sizes)), key=progress.__getitem__):
        if sizes[position] > room:
            dealt.append([])
            room = limit
        dealt[-1].append(position)
        room -= sizes[position]
    return tuple(Parcel.plan(each, sizes, owners, world_size=world_size) for each in dealt)


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def seen_as(bytes_: Tensor, span: Span, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """These bytes of a buffer as a contiguous tensor."""
    return bytes_[span.as_slice()].view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, 1-D; its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


# ---- How parameters that one rank each has updated reach all ranks ----


TAG: Final = 2**22  # above those of any sharded model on the same group
AGREE_TAG: Final = TAG + 1
_IN_FLIGHT: Final = 2  # wire buffers at a time
PURPOSES: Final = {
    TAG: Purpose(
        "exchanging the parameters, or the state, of a ZeroRedundancyOptimizer",
        "call its step() and consolidate_state_dict() on every rank",
    ),
    AGREE_TAG: Purpose(
        "comparing the parameters of a ZeroRedundancyOptimizer between ranks",
        "make it, add param groups, freeze and unfreeze parameters alike on every rank",
    ),
}


class Facts(NamedTuple):
    """What a plan rests on, for one parameter; equal on all ranks. Made in every step: a tuple."""

    travels: bool  # it trains, or has a gradient all the same: its owner may change it
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, param: Tensor) -> Facts:
        """As it is now."""
        travels = param.requires_grad or param.grad is not None
        return cls(travels, param.shape, param.stride(), param.dtype, param.device)


@define(eq=False)
class Publication:
    """Parameters, their owners, and the memory through which they travel."""

    group: Group
    params: list[Tensor]
    owners: list[int]
    facts: tuple[Facts, ...]  # per parameter
    in_place: Parcel | None = None  # of parameters that are views of `buffer`
    buffer: Tensor | None = None
    _views: dict[int, Tensor] = field(factory=dict, init=False)  # by position: its place there
    _packed: tuple[Parcel, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        placed = set(self.in_place.positions) if self.in_place is not None else set()
        rest = [
            position
            for position, facts in enumerate(self.facts)
            if facts.travels and position not in placed
        ]
        self._packed = self.parcels_of(rest)
        if self.in_place is not None and self.buffer is not None:
            for position, _, span in self.in_place.places():
                param = self.params[position]
                place = self.buffer[span.as_slice()].view(param.dtype)
                self._views[position] = place.as_strided(param.shape, _dense_stride(param))

    @classmethod
    def plan(
        cls, group: Group, params: Sequence[Tensor], owners: Sequence[int], *, in_place: bool
    ) -> Publication:
        """Of these parameters, as they are now, which it makes views. Local.

        Args:
            group: The ranks.
            params: All that there are, in an order that ranks share.
            owners: The rank that updates each.
            in_place: Whether those that travel become views of one buffer, if they lie on the
                group's device.
        """
        params, facts = list(params), tuple(map(Facts.of, params))
        if not in_place:
            return cls(group, params, list(owners), facts)
        sizes = [size_of(param) for param in params]
        chosen = [
            position
            for position, of_param in enumerate(facts)
            if of_param.travels and of_param.device == group.device and sizes[position]
        ]
        parcel = Parcel.plan(chosen, sizes, owners, world_size=group.world_size)
        # Zeros: padding travels too, and uninitialised bytes of a process are nobody's business.
        buffer = torch.zeros(parcel.layout.numel, dtype=torch.uint8, device=group.device)
        planned = cls(group, params, list(owners), facts, parcel, buffer)
        planned.install()
        planned.facts = tuple(map(Facts.of, params))  # views are dense
        return planned

    @torch.no_grad()
    def install(self) -> None:
        """Make parameters views of the buffer, where they are not. Local; values stay."""
        for position, place in self._views.items():
            param = self.params[position]
            if param.data_ptr() != place.data_ptr():
                place.copy_(param)
                param.data = place

    @torch.no_grad()
    def release(self) -> None:
        """Give parameters memory of their own again, where they are views of the buffer. Local."""
        for position, place in self._views.items():
            param = self.params[position]
            if param.data_ptr() == place.data_ptr():
                param.data = place.clone()

    def publish(self) -> None:
        """Give every rank the values of each parameter that its owner has. Collective; blocks."""
        if self.group.world_size == 1:
            return
        waits: deque[Callable[[], Any]] = deque()
        if self.in_place is not None and self.buffer is not None:
            self.install()  # a user may have given a parameter other memory
            handle = all_gather_flat(
                self.buffer, splits=self.in_place.layout.splits, group=self.group, tag=TAG
            )
            waits.append(handle.wait)
        for parcel in self._packed:
            waits.append(self.launch(parcel))
            if len(waits) > _IN_FLIGHT:
                waits.popleft()()
        for wait in waits:
            wait()

    def parcels_of(self, positions: Sequence[int]) -> tuple[Parcel, ...]:
        """How these parameters travel when they are packed. Local."""
        found = plan_parcels(
            [size_of(self.params[position]) for position in positions],
            [self.owners[position] for position in positions],
            world_size=self.group.world_size,
        )
        return tuple(
            Parcel(tuple(positions[i] for i in each.positions), each.owners, each.layout)
            for each in found
        )

    @torch.no_grad()
    def launch(self, parcel: Parcel) -> Callable[[], None]:
        """Send what this rank owns of a parcel. Collective; the result waits, and unpacks."""
        rank = self.group.rank
        wire = torch.empty(parcel.layout.numel, dtype=torch.uint8, device=self.group.device)
        for position, owner, span in parcel.places():
            if owner == rank:
                param = self.params[position]
                seen_as(wire, span, param.dtype, param.shape).copy_(param)
        handle = all_gather_flat(wire, splits=parcel.layout.splits, group=self.group, tag=TAG)

        @torch.no_grad()
        def wait() -> None:
            handle.wait()
            for position, owner, span in parcel.places():
                if owner != rank:
                    param = self.params[position]
                    param.copy_(seen_as(wire, span, param.dtype, param.shape))

        return wait


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Its strides where it fills its memory, in whatever order of dims; else contiguous ones."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= length
    return tensor.stride()


# ---- The whole state of an optimizer whose ranks have a part of the parameters each ----


_PACKED_BYTES: Final = 2**20  # larger tensors travel alone, from where they are to where they stay


@frozen
class _Sent:
    """A tensor of some rank's state."""

    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def consolidate(
    states: Mapping[int, dict[str, Any]], *, to: int | None, group: Group
) -> dict[int, dict[str, Any]] | None:
    """Put all ranks' state together on one rank, or on all. Collective.

    Beside the result there are a tensor, or 1 MiB of small ones, in flight. What is this rank's
    own is not copied, where it is in host memory: the result has those very tensors.

    Args:
        states: This rank's, by the number of the parameter.
        to: The rank that receives it, a position in the group; None for all.
        group: The ranks.

    Returns:
        State in host memory, by number, ascending; None on ranks that do not receive it.

    Raises:
        StateError: On every rank, if the state of one holds what cannot travel.
    """
    own: list[Tensor] = []
    said, problem = [], ""
    for number, state in states.items():
        try:
            said.append([number, describe(state, own)])
        except StateError as error:
            problem = f"state of parameter {number} on rank {group.rank}: {error}"
            break
    answers = all_gather_json([problem, said], group=group, tag=TAG)
    problem = next((problem for problem, _ in answers if problem), "")
    if problem:
        raise StateError(f"consolidate_state_dict(): {problem} (seen on rank {group.rank})")
    sent = [
        _Sent(rank, dtype, shape)
        for rank, (_, of_rank) in enumerate(answers)
        for _, of_param in of_rank
        for dtype, shape in tensors_said(of_param)
    ]
    receives = to is None or to == group.rank
    values = _exchange(sent, own, to=to, group=group)
    if not receives:
        return None
    whole = {
        number: rebuild(of_param, values) for _, of_rank in answers for number, of_param in of_rank
    }
    return dict(sorted(whole.items()))


def _exchange(
    sent: Sequence[_Sent], own: Sequence[Tensor], *, to: int | None, group: Group
) -> Iterator[Tensor]:
    """Every rank's tensors, in order. Collective."""
    values: dict[int, Tensor] = {}
    mine = iter(own)
    for index, one in enumerate(sent):
        if one.owner == group.rank:
            values[index] = next(mine)
    travels = [i for i, one in enumerate(sent) if one.owner != to and one.num_bytes]
    small = [index for index in travels if sent[index].num_bytes <= _PACKED_BYTES]
    for parcel in plan_parcels(
        [sent[index].num_bytes for index in small],
        [sent[index].owner for index in small],
        world_size=group.world_size,
        limit=_PACKED_BYTES,
    ):
        _send_packed(parcel, small, sent, values, to=to, group=group)
    for index in travels:
        if sent[index].num_bytes > _PACKED_BYTES:
            _send_alone(index, sent[index], values, to=to, group=group)
    if to is None or to == group.rank:
        for index, one in enumerate(sent):
            if index not in values:  # it has no elements
                values[index] = torch.empty(one.shape, dtype=one.dtype)
            values[index] = values[index].cpu()
    return (values[index] for index in range(len(values)))


def _send_packed(
    parcel: Parcel,
    small: Sequence[int],
    sent: Sequence[_Sent],
    values: dict[int, Tensor],
    *,
    to: int | None,
    group: Group,
) -> None:
    rank, splits = group.rank, parcel.layout.splits
    shard = parcel.layout.shards[rank]
    mine = torch.zeros(shard.numel, dtype=torch.uint8, device=group.device)
    for position, owner, span in parcel.places():
        if owner == rank:
            value = values[small[position]]
            seen_as(mine, span.shifted(-shard.start), value.dtype, value.shape).copy_(value)
    wire = _gather(mine, splits, None, to=to, group=group)
    if wire is None:
        return
    for position, owner, span in parcel.places():
        if owner != rank:
            one = sent[small[position]]
            values[small[position]] = seen_as(wire, span, one.dtype, one.shape).to("cpu", copy=True)


def _send_alone(
    index: int, one: _Sent, values: dict[int, Tensor], *, to: int | None, group: Group
) -> None:
    splits = [one.num_bytes if rank == one.owner else 0 for rank in range(group.world_size)]
    if one.owner == group.rank:
        mine = bytes_of(values[index]).to(group.device)
        _gather(mine, splits, mine if to is None else None, to=to, group=group)
        return
    receives = to is None or to == group.rank
    out = torch.empty(one.num_bytes, dtype=torch.uint8, device=group.device) if receives else None
    nothing = torch.empty(0, dtype=torch.uint8, device=group.device)
    _gather(nothing, splits, out, to=to, group=group)
    if out is not None:
        # To the host at once, or a device would have all of it in the end.
        values[index] = seen_as(out, Span(0, one.num_bytes), one.dtype, one.shape).cpu()


def _gather(
    shard: Tensor,
    splits: Sequence[int],
    out: Tensor | None,
    *,
    to: int | None,
    group: Group,
) -> Tensor | None:
    if to is not None:
        return gather_flat(shard, splits=splits, to=to, group=group, out=out, tag=TAG).wait()
    out = shard.new_empty(sum(splits)) if out is None else out
    return all_gather_flat(
        out, splits=splits, group=group, shard=None if out is shard else shard, tag=TAG
    ).wait()


# ---- Whether a state dict fits an optimizer, seen before anything is written ----


Expected = dict[str, tuple[int, ...] | None]  # by entry: a tensor's shape, or that it is none


def check_state(
    given: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    make: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
) -> None:
    """Raise LoadError unless the optimizer can go on from this state. Local, and the same anywhere.

    Which entries a parameter should have, and of what shape, says a trial: another optimizer of the
    same class takes one step on zeros of its shape. Memory for one parameter at a time.

    Args:
        given: What `torch.optim.Optimizer.state_dict()` returns.
        optimizer: Has the parameters and param groups.
        make: The class that makes the state.
        defaults: What it is constructed with, beside param groups.
    """
    kind = getattr(make, "__name__", repr(make))
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise LoadError(
            f"expected a state dict of a {kind} with 'state' and 'param_groups', got "
            f"{sorted(given) if isinstance(given, Mapping) else type(given).__name__}"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given_sizes = [len(group["params"]) for group in given["param_groups"]]
    if sizes != given_sizes:
        raise LoadError(
            f"expected param groups of {sizes} parameters, as this {kind} has, got {given_sizes}"
        )
    names, seen = names_of(optimizer), set()
    known: dict[Any, Expected | None] = {}
    problems: list[str] = []
    position = 0
    for index, (group, given_group) in enumerate(
        zip(optimizer.param_groups, given["param_groups"], strict=True)
    ):
        for param, number in zip(group["params"], given_group["params"], strict=True):
            name, position = names[position], position + 1
            state = given["state"].get(number)
            seen.add(number)
            if not state:
                continue  # no step has had a gradient for it: it begins anew, as in plain torch
            key = (index, param.shape, param.dtype, param.device)
            if key not in known:
                options = {**options_of(group), **options_of(given_group)}
                known[key] = _try(param, options, defaults, make)
            problems += _compare(name, state, known[key])
    extra = [number for number in given["state"] if number not in seen]
    if extra:
        problems.append(f"state of parameters {extra}, which are in no param group")
    if problems:
        raise LoadError(f"cannot load, and nothing was written: {'; '.join(problems)}")


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """What to call each parameter in messages: its name, where the optimizer was given names."""
    names = []
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        for position in range(len(group["params"])):
            where = f"parameter {len(names)} (param group {index}, position {position})"
            names.append(where if known is None else f"parameter {known[position]!r}")
    return names


def _compare(name: str, state: Any, expected: Expected | None) -> list[str]:
    if not isinstance(state, Mapping):
        return [f"{name}: expected a dict of entries, got a {type(state).__name__}"]
    if expected is None:
        return []
    problems = [f"{name}: {key!r} is missing" for key in expected if key not in state]
    problems += [f"{name}: {key!r} is unexpected" for key in state if key not in expected]
    for key, shape in expected.items():
        value = state.get(key)
        if value is None or shape is None:
            continue
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if got != shape and not (shape == () and isinstance(value, int | float)):
            problems.append(f"{name}: expected {key!r} of shape {shape}, got {got}")
    return problems


def _try(
    param: Tensor,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    make: type[torch.optim.Optimizer],
) -> Expected | None:
    """Entries after a step on zeros; None where that cannot be tried, and nothing is known."""
    twin = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    twin.grad = torch.zeros_like(twin)
    devices = [param.device.index] if param.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            other = make([{**map_tensors(options, torch.clone), "params": [twin]}], **defaults)
            other.step()
        except Exception:  # it needs a closure, sparse gradients, a warmed-up model
            return None
    state = other.state.get(twin, {})
    return {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in state.items()}


def own_state(
    given: Mapping[str, Any], is_own: Sequence[bool]
) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """The state of a rank's own parameters, in memory of its own, and the param groups.

    Args:
        given: A state dict of all parameters.
        is_own: For each parameter, in the order of the groups.
    """
    groups = [dict(group) for group in given["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    state = {
        number: map_tensors(given["state"][number], torch.clone)
        for number, own in zip(numbers, is_own, strict=True)
        if own and given["state"].get(number)
    }
    return state, groups


# ---- Whether an optimizer treats parameters one by one, so that ranks may divide them ----


def check_params(optimizer: torch.optim.Optimizer) -> None:
    """Raise PartitionError unless every parameter is dense and has values."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name, param in zip(names_of(optimizer), params, strict=True):
        if param.layout is not torch.strided or param.is_meta:
            got = "on the meta device" if param.is_meta else f"of layout {param.layout}"
            raise PartitionError(f"{name}: expected a dense tensor with values, got one {got}")


def check_independence(own: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Raise PartitionError if an update of one parameter depends on others.

    Args:
        own: Is looked at, and tried in a copy; may have some of the parameters only.
        optimizer: Has all of them, in as many param groups.
    """
    kind = type(own).__name__
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(own).items():
        if isinstance(value, list | tuple) and any(id(item) in known for item in value):
            raise PartitionError(
                f"a {kind} keeps parameters in its attribute {name!r}, outside param_groups: it "
                "updates all of them together (one search for the length of the step, say), and "
                "each rank would have only some; use it unsharded, or an optimizer that treats "
                "parameters one by one"
            )
    names = iter(names_of(optimizer))
    samples: list[list[Sample]] = []
    for group in optimizer.param_groups:
        of_group = [Sample(next(names), p.shape, p.device, Cut.TENSOR) for p in group["params"]]
        samples.append(of_group if need_of(own, group) is None else [])
    reason = find_dependence(own, samples, must_be_tried=False) if any(samples) else None
    if reason is not None:
        raise PartitionError(
            f"a {kind} does not treat parameters one by one: {reason}. Use it unsharded; or, if "
            f"you know better, say so by its attribute: {kind}.needs_cut = 'tensor'"
        )


# ---- Steps of an optimizer while the gradients of DistributedDataParallel are still being r ----


@define(eq=False)
class StepInBackward:
    """What a communication hook does with each bucket of gradients.

    While one bucket is being reduced, the parameters of the one before are updated by their owners
    and sent. After the last bucket every rank has all parameters.
    """

    publication: Publication
    update: Callable[[Mapping[Tensor, Tensor]], None]  # local; gets reduced gradients
    reduce: Callable[[Any, Any], torch.futures.Future]
    _positions: dict[Tensor, int] = field(init=False)
    _parcels: dict[tuple[int, ...], tuple[Parcel, ...]] = field(factory=dict, init=False)
    _reducing: deque[tuple[Any, torch.futures.Future]] = field(factory=deque, init=False)
    _sending: deque[Callable[[], None]] = field(factory=deque, init=False)

    def __attrs_post_init__(self) -> None:
        self.follow(self.publication)

    def follow(self, publication: Publication) -> None:
        """Go on with other parameters. Local."""
        self.publication = publication
        self._positions = {param: at for at, param in enumerate(publication.params)}
        self._parcels.clear()

    def take(self, state: Any, bucket: Any) -> torch.futures.Future:
        """Reduce a bucket, and update what the one before has. Collective."""
        if bucket.index() == 0:  # what a backward that raised has left
            self._reducing.clear()
            self._sending.clear()
        future = self.reduce(state, bucket)
        self._reducing.append((bucket, future))
        while len(self._reducing) > (0 if bucket.is_last() else 1):
            self._step(*self._reducing.popleft())
        while len(self._sending) > (0 if bucket.is_last() else 1):
            self._sending.popleft()()
        return future

    def _step(self, bucket: Any, future: torch.futures.Future) -> None:
        """Update and send the parameters of a bucket. Collective."""
        reduced = future.wait()
        if isinstance(reduced, list):
            reduced = reduced[0]
        if reduced.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(reduced)  # as DDP itself will
        given = zip(bucket.parameters(), bucket.gradients(), strict=True)
        grads = {param: grad for param, grad in given if param in self._positions}
        positions = tuple(self._positions[param] for param in grads)
        rank, owners = self.publication.group.rank, self.publication.owners
        own = {p: g for p, g in grads.items() if owners[self._positions[p]] == rank}
        if own:
            self.update(own)
        if self.publication.group.world_size == 1:
            return
        if positions not in self._parcels:
            self._parcels[positions] = self.publication.parcels_of(positions)
        self._sending += map(self.publication.launch, self._parcels[positions])


@contextmanager
def only(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let an optimizer see no parameters but these, with these gradients."""
    kept = [group["params"] for group in optimizer.param_groups]
    grads_before = {param: param.grad for param in grads}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param in grads]
        for param, grad in grads.items():
            param.grad = grad
        yield
    finally:
        for param, grad in grads_before.items():
            param.grad = grad
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params


# ---- Which rank updates which whole parameter, and keeps its optimizer state. No collectives ----


@define(eq=False)
class Ownership:
    """The owner of each parameter, once dealt for good."""

    rank: int
    balance: Balance
    owners: dict[Tensor, int] = field(factory=dict, init=False)

    def deal(self, params: Sequence[Tensor]) -> None:
        """Give each an owner, the largest first; those that train before, to be even alone."""
        for trains in (True, False):
            chosen = [param for param in params if param.requires_grad is trains]
            ranks = self.balance.give_whole([size_of(param) for param in chosen])
            self.owners.update(zip(chosen, ranks, strict=True))

    def forget(self, params: Iterable[Tensor]) -> None:
        """Take back what was dealt."""
        for param in params:
            self.balance.bytes_per_rank[self.owners.pop(param)] -= size_of(param)

    def owner_of(self, param: Tensor) -> int:
        """Its rank; PartitionError if it was not dealt."""
        if param not in self.owners:
            raise PartitionError(
                f"expected a parameter of this optimizer, got a tensor of shape "
                f"{tuple(param.shape)} that is in none of its param groups"
            )
        return self.owners[param]

    def own(self, params: Iterable[Tensor], rank: int | None = None) -> list[Tensor]:
        """Those of this rank, or of another."""
        rank = self.rank if rank is None else rank
        return [param for param in params if self.owners[param] == rank]

    def own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A param group, with this rank's parameters only."""
        return {**options_of(group), "params": self.own(group["params"])}


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Make the options of param groups those of others, which have the same order."""
    for mine, theirs in zip(source, target, strict=True):
        theirs.update(options_of(mine))


# ---- Any torch optimizer under DistributedDataParallel, with its state sharded by whole par ----


_TIMEOUT_S: Final = 60.0


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Stage 1 in one line, for a loop with DistributedDataParallel.

    Each parameter belongs to one rank, whose optimizer updates it and has its state; after each
    step its owner sends it to the others. Parameters are dealt whole, the largest first, to the
    rank that has least, so any optimizer works that treats them one by one, matrix-wise ones too.
    No rank keeps more state than the N-th part and that of one parameter, where state is as large
    as its parameter or a multiple of it.

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank makes it, steps, adds param groups and freezes or unfreezes parameters alike. The
    weights are those of plain DDP with the same optimizer.

    Attributes:
        optim: This rank's optimizer, over its own parameters.
        group: The ranks.
        state: This rank's, by its own parameters. `param_groups` have those of all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        group: Group | Any = None,
        parameters_as_bucket_view: bool = False,
        *,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        """Deal the parameters and make this rank's optimizer. Collective.

        Args:
            params: Parameters, (name, parameter) pairs, or dicts of them and options, as any
                optimizer takes them; generators too. Dicts given are not changed. Names are used in
                messages.
            optimizer_class: What to make, of any optimizer that treats parameters one by one.
            group: A zero_comm.Group or torch's ProcessGroup; the default process group when None.
            parameters_as_bucket_view: Whether trainable parameters become views of one buffer, from
                which they are sent and into which they are received without a copy. `param.data`
                then changes its address; if it is given another later, its values are copied back.
            process_group: Torch's name for `group`.
            **defaults: Options of `optimizer_class`.

        Raises:
            PartitionError: The optimizer updates parameters together, not one by one (LBFGS), or a
                parameter is sparse or on the meta device.
            TypeError: Both `group` and `process_group`, or torch's `overlap_with_ddp`.
            zero_comm.AgreementError: Ranks have different parameters, or one cannot make its
                optimizer; that one raises what its optimizer raised.
            zero_comm.CommError: torch.distributed is not initialised and `group` is None, or a rank
                did not take part within 60 s.
        """
        if "overlap_with_ddp" in defaults:
            raise TypeError(
                "expected options of the optimizer, got overlap_with_ddp: call "
                "optimizer.overlap_with_ddp(ddp_model, allreduce_hook) instead, once"
            )
        if group is not None and process_group is not None:
            raise TypeError("expected group or process_group, which are one, got both")
        group = process_group if group is None else group
        self.group = group if isinstance(group, Group) else Group.from_process_group(group)
        self._optimizer_class, self._options = optimizer_class, defaults
        self._kind = getattr(optimizer_class, "__name__", repr(optimizer_class))
        self._in_place = parameters_as_bucket_view
        self._ownership = Ownership(self.group.rank, Balance.of(self.group.world_size))
        self._whole: Consolidated | None = None
        self._in_backward: StepInBackward | None = None
        self._is_made = False
        self.group.explain(PURPOSES)
        super().__init__(params, dict(defaults))
        self._ownership.deal(self._all_params())
        self._together(self._make)
        copy_options(self.optim.param_groups, self.param_groups)
        self.defaults = dict(self.optim.defaults)
        self.state = self.optim.state
        self._publication = self._plan()
        self._is_made = True

    # ---- Parameters ----

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of the parameters that each rank updates, in rank order: how even they are."""
        return tuple(self._ownership.balance.bytes_per_rank)

    def owner_of(self, param: Tensor) -> int:
        """The rank that updates a parameter and has its state. Local.

        Raises:
            PartitionError: It is in no param group.
        """
        return self._ownership.owner_of(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Deal the parameters of one more group. Collective; the dict is not changed.

        Those that were dealt before stay with their rank.

        Raises:
            zero_comm.AgreementError: Ranks add different parameters, or the optimizer of one cannot
                take them; that one raises what its optimizer raised. Nothing was added.
        """
        is_dict = isinstance(param_group, dict)
        super().add_param_group(dict(param_group) if is_dict else param_group)
        if not self._is_made:
            return  # called by torch's constructor
        group = self.param_groups[-1]
        self._ownership.deal(group["params"])
        try:
            self._together(self._extend)
        except BaseException:
            self._ownership.forget(group["params"])
            del self.param_groups[-1]
            del self.optim.param_groups[len(self.param_groups) :]  # where it took them
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self._plan_again()

    # ---- The step ----

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's parameters and give every rank all of them. Collective; blocks.

        Changes of `param_groups` (a scheduler's) reach the optimizer, and its changes of them come
        back. A parameter may have been frozen or unfrozen since the last step, on all ranks.

        Args:
            closure: Computes the loss again, with gradients; called as often as the optimizer calls
                it, on each rank.
            **options: For the optimizer's own `step`.

        Returns:
            What the optimizer's `step` returns.
        """
        if self._in_backward is not None:  # backward has stepped
            with torch.enable_grad():
                return None if closure is None else closure()
        loss = self._update(closure, **options)
        self._follow()
        self._publication.publish()
        return loss

    def overlap_with_ddp(
        self,
        model: Any,
        reduce: Callable[[Any, Any], torch.futures.Future],
        state: Any = None,
    ) -> None:
        """Step within backward from now on: bucket by bucket, while DDP reduces the next. Local.

        It registers a communication hook. Every backward that synchronises gradients then updates
        all parameters, from the first one on, by the options they have in `param_groups` by then;
        `step()` has nothing left to do and may stay in the loop, and accumulation needs
        `model.no_sync()`. Gradients cannot be clipped or unscaled before they are used. The
        optimizer steps once per bucket, on the parameters of that bucket: one that counts its steps
        elsewhere than in the state of each parameter counts too many. Under
        `find_unused_parameters` an unused parameter steps with a gradient of zeros.

            optimizer.overlap_with_ddp(model, default_hooks.allreduce_hook)

        Args:
            model: The DistributedDataParallel, on every rank.
            reduce: The communication hook that reduces a bucket, such as those of
                `torch.distributed.algorithms.ddp_comm_hooks`.
            state: What that hook gets as its first argument.

        Raises:
            StateError: Called twice.
        """
        if self._in_backward is not None:
            raise StateError("overlap_with_ddp() was called before; make another optimizer")
        self._in_backward = StepInBackward(self._publication, self._update_some, reduce)
        take = self._in_backward.take

        def hook(state, bucket):  # no annotations: DDP compares them with types, and they are text
            return take(state, bucket)

        model.register_comm_hook(state, hook)

    def _update_some(self, grads: Mapping[Tensor, Tensor]) -> None:
        with only(self.optim, grads):
            self._update()

    def _update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step this rank's optimizer. Local, but for a closure."""
        if self._whole is not None:
            self._whole.detach()
        copy_options(self.param_groups, self.optim.param_groups)
        given = () if closure is None else (closure,)
        loss = self.optim.step(*given, **options)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _follow(self) -> None:
        """Plan again if parameters were frozen, unfrozen, moved or converted. Collective then."""
        if self._publication.facts != tuple(map(Facts.of, self._publication.params)):
            self._agree()
            self._plan_again()

    # ---- State ----

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Put the whole state together in host memory, for `state_dict()`. Collective; blocks.

        Tensors travel one at a time and without pickling. The receiver needs memory for what it
        lacks and one tensor more; what it has itself is copied only if it steps again.

        Args:
            to: The rank that receives it, a position in the group; None for all ranks.

        Raises:
            StateError: The state of some parameter holds what is no tensor, number, string, or
                list, tuple or dict of these; or `to` is no rank. On every rank.
        """
        if to is not None and not 0 <= to < self.group.world_size:
            raise StateError(
                f"consolidate_state_dict(): expected a rank below {self.group.world_size}, or None "
                f"for all, got {to}"
            )
        self._whole = None
        params = self._all_params()
        mine = {
            number: self.optim.state[param]
            for number, param in enumerate(params)
            if param in self.optim.state
        }
        whole = consolidate(mine, to=to, group=self.group)
        if whole is not None:
            self._whole = Consolidated.of(params, whole, mine)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters as of the last consolidation, and the options as of now.

        It is that of the plain optimizer, which loads it, as does a ZeroRedundancyOptimizer of any
        number of ranks. Local.

        Raises:
            StateError: It was not consolidated on this rank.
        """
        mine = self.state
        self.state = self._consolidated().state  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def local_state_dict(self) -> dict[str, Any]:
        """The state of this rank's own parameters, numbered among themselves. Local."""
        copy_options(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def rank_local_state_dict(self, rank: int) -> dict[str, Any]:
        """What `local_state_dict()` of a rank was when the state was consolidated here. Local.

        Raises:
            StateError: It was not consolidated on this rank, or there is no such rank.
        """
        whole = self._consolidated().state
        if not 0 <= rank < self.group.world_size:
            raise StateError(f"expected a rank below {self.group.world_size}, got {rank}")
        state: dict[int, Any] = {}
        groups, count = [], 0
        for group in self.param_groups:
            own = self._ownership.own(group["params"], rank)
            numbers = range(count, count + len(own))
            count += len(own)
            state.update({n: whole[p] for n, p in zip(numbers, own, strict=True) if p in whole})
            groups.append({**options_of(group), "params": list(numbers)})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole state, each rank that of its own parameters. Local; call it on all.

        The state may come from the plain optimizer, or from any number of ranks. It is copied: the
        dict and its tensors are neither changed now nor by later steps. A parameter without state
        begins anew, as in the plain optimizer.

        Raises:
            LoadError: Names each parameter with entries that are missing, unexpected or of another
                shape, or param groups of other sizes; the same on every rank. Nothing was written.
        """
        check_state(state_dict, self, self._optimizer_class, self._options)
        params = self._all_params()
        is_own = [self.owner_of(param) == self.group.rank for param in params]
        state, groups = own_state(state_dict, is_own)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        own = [param for group in self.optim.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(own)}
        state = {numbers[param]: of_param for param, of_param in self.state.items()}
        groups = self.optim.state_dict()["param_groups"]
        copy_options(self.param_groups, groups)
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.optim.state

    # ---- Inside ----

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _make(self) -> None:
        """Make this rank's optimizer. Local."""
        check_params(self)
        groups = [self._ownership.own_part(group) for group in self.param_groups]
        self.optim = self._optimizer_class(groups, **self._options)  # type: ignore[arg-type]
        check_independence(self.optim, self)

    def _extend(self) -> None:
        """Give this rank's optimizer its part of the last param group. Local."""
        check_params(self)
        self.optim.add_param_group(self._ownership.own_part(self.param_groups[-1]))

    def _together(self, attempt: Callable[[], None]) -> None:
        """Do what may fail on some ranks alone; if it does, all raise. Collective."""
        problem: Exception | None = None
        try:
            attempt()
        except Exception as error:
            problem = error
        said = "" if problem is None else f"{type(problem).__name__}: {problem}"
        try:
            self._agree({f"what speaks against {self._kind}": said})
        except AgreementError:
            if problem is None:
                raise
        if problem is not None:
            raise problem

    def _agree(self, facts: Mapping[str, str] | None = None) -> None:
        """Raise unless all ranks have the same parameters in the same groups. Collective."""
        facts = dict(facts or {})
        facts["optimizer"] = self._kind
        sizes = [len(group["params"]) for group in self.param_groups]
        facts["parameters in param groups"] = str(sizes)
        for name, param in zip(names_of(self), self._all_params(), strict=True):
            of = Facts.of(param)
            how = "trains" if of.travels else "is frozen"
            facts[name] = f"{how}, {tuple(of.shape)} with strides {of.stride}, {of.dtype}"
        check_agreement(facts, group=self.group, tag=AGREE_TAG, timeout_s=_TIMEOUT_S)

    def _plan(self) -> Publication:
        params = self._all_params()
        owners = [self._ownership.owners[param] for param in params]
        return Publication.plan(self.group, params, owners, in_place=self._in_place)

    def _plan_again(self) -> None:
        before, self._publication = self._publication, self._plan()
        before.release()
        if self._in_backward is not None:
            self._in_backward.follow(self._publication)

    def _consolidated(self) -> Consolidated:
        if self._whole is None:
            rank = self.group.rank
            raise StateError(
                "Optimizer state has not been consolidated on this rank. Call "
                f"`consolidate_state_dict(to={rank})` on all ranks beforehand, or "
                "`local_state_dict()` for what this rank has"
            )
        return self._whole
