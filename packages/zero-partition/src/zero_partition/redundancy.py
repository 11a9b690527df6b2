"""Any torch optimizer under DistributedDataParallel, with its state sharded by whole parameters."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.algorithms import Join, Joinable, JoinHook
from torch.nn.parameter import is_lazy
from zero_comm import (
    AgreementError,
    AnyRanks,
    Group,
    Purpose,
    all_gather_flat,
    all_gather_json,
    check_agreement,
    gather_flat,
)

from zero_partition.optimizer.needs import Sample, find_cuts, need_of, states_after_step
from zero_partition.plan.cuts import Cut
from zero_partition.plan.layout import ALIGN_BYTES, FlatLayout, Span, give_whole, in_batches
from zero_partition.plan.stages import shown_all

from .chained import attribute_with_params, options_of
from .dtensors import is_dtensor
from .errors import LoadError, PartitionError, StateError
from .nested import describe, described_tensors, map_tensors, rebuild

# Above the tags of all sharded models on the same group.
TAG: Final = 2**22
AGREE_TAG: Final = TAG + 1
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
_TIMEOUT_S: Final = 60.0
_PARAM_BUCKET_BYTES: Final = 32 * 2**20
_STATE_BUCKET_BYTES: Final = 2**20
# Number of buckets that are sent at a time.
_IN_FLIGHT: Final = 2

# A tensor, and the rank that has its values.
Owned: TypeAlias = tuple[Tensor, int]


@frozen(eq=False)
class Bucket:
    """Tensors that are sent together, in the order of the ranks that have them; of any dtypes."""

    owned: tuple[Owned, ...]
    layout: FlatLayout  # in bytes
    # On the group's device; None: tensors are packed for each exchange.
    memory: Tensor | None = None
    # Views of `memory`, one for each tensor.
    views: tuple[Tensor, ...] = ()

    @classmethod
    def plan(cls, owned: Iterable[Owned], world_size: int) -> Bucket:
        """Plan one bucket of all these tensors."""
        owned = tuple(sorted(owned, key=lambda each: each[1]))
        sizes, owners = [tensor.nbytes for tensor, _ in owned], [owner for _, owner in owned]
        align = ALIGN_BYTES if len(owned) > 1 else 1
        return cls(owned, FlatLayout.plan_whole(sizes, owners, world_size=world_size, align=align))

    def placed_on(self, device: torch.device) -> Bucket:
        """Return the bucket with memory for its tensors, and views in each one's order of dims."""
        # Zeros: padding is sent, too, and uninitialised memory must not leave the process.
        memory = torch.zeros(self.layout.numel, dtype=torch.uint8, device=device)
        views = []
        for (tensor, _), span in zip(self.owned, self.layout.spans, strict=True):
            dense = torch.empty_like(tensor, device="meta")
            view = _view_at(memory, span.start, tensor)
            views.append(view.as_strided(tensor.shape, dense.stride()))
        return evolve(self, memory=memory, views=tuple(views))

    @torch.no_grad()
    def install(self) -> None:
        """Make tensors views of the memory, where they are not. Local; values stay."""
        for (tensor, _), view in zip(self.owned, self.views, strict=False):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
                tensor.data = view

    @torch.no_grad()
    def remove(self) -> None:
        """Give tensors memory of their own again, where they are views of this. Local."""
        for (tensor, _), view in zip(self.owned, self.views, strict=False):
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone()

    @torch.no_grad()
    def launch(self, group: Group, *, to: int | None = None) -> Callable[[], None]:
        """Send this rank's tensors to all ranks, or only to the rank `to`. Collective.

        Returns:
            A function that waits, and fills the tensors that other ranks have sent.
        """
        # The user may have given a parameter other memory.
        self.install()
        memory = self._memory_on(group.device)
        mine = self.layout.shards[group.rank] if to is not None else Span(0, self.layout.numel)
        if memory is not None:
            wire = memory[mine.as_slice()]
        else:
            wire = torch.empty(mine.numel, dtype=torch.uint8, device=group.device)
            for (tensor, owner), span in zip(self.owned, self.layout.spans, strict=True):
                if owner == group.rank:
                    _view_at(wire, span.start - mine.start, tensor).copy_(tensor)
        splits = self.layout.splits
        if to is None:
            handle = all_gather_flat(wire, splits=splits, group=group, tag=TAG)
        else:
            handle = gather_flat(wire, splits=splits, to=to, group=group, out=memory, tag=TAG)

        @torch.no_grad()
        def wait() -> None:
            received = handle.wait()
            if received is None or memory is not None:
                return
            for (tensor, owner), span in zip(self.owned, self.layout.spans, strict=True):
                if owner != group.rank:
                    tensor.copy_(_view_at(received, span.start, tensor))

        return wait

    def _memory_on(self, device: torch.device) -> Tensor | None:
        """Return the bytes that tensors are sent from and received into without packing; else None.

        They are the bucket's memory, or that of a tensor that is alone. A parameter is copied
        instead, so that autograd sees that it is written.
        """
        tensor = self.owned[0][0]
        is_alone = len(self.owned) == 1 and tensor.device == device and not tensor.requires_grad
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if self.memory is not None or not (is_alone and is_plain):
            return self.memory
        return tensor.detach().view(-1).view(torch.uint8)


def plan_buckets(owned: Sequence[Owned], *, world_size: int, max_bytes: int) -> list[Bucket]:
    """Pack tensors into buckets, in each of which every rank sends a like share of its tensors.

    No bucket of several tensors is larger than `max_bytes`.
    """
    totals, sent, progress = Counter[int](), Counter[int](), list[float]()
    for tensor, owner in owned:
        totals[owner] += tensor.nbytes
    for tensor, owner in owned:
        progress.append(sent[owner] / max(totals[owner], 1))
        sent[owner] += tensor.nbytes
    in_turn = [owned[position] for position in sorted(range(len(owned)), key=progress.__getitem__)]
    batches = in_batches(in_turn, lambda each: each[0].nbytes, max_bytes=max_bytes)
    return [Bucket.plan(batch, world_size) for batch in batches]


def exchange(
    buckets: Iterable[Bucket], group: Group, *, to: int | None = None, in_flight: int
) -> None:
    """Send all buckets. Collective, blocking.

    After each launch it waits until at most `in_flight` buckets are under way.
    """
    waits: deque[Callable[[], None]] = deque()
    for bucket in buckets:
        waits.append(bucket.launch(group, to=to))
        if len(waits) > in_flight:
            waits.popleft()()
    for wait in waits:
        wait()


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from `start` on, as a contiguous tensor of the dtype and shape of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def facts_of(param: Tensor) -> tuple[bool, torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    """Return the facts on which buckets depend; but for the device, equal on all ranks.

    The first is whether the parameter's owner may change it.
    """
    travels = param.requires_grad or param.grad is not None
    return travels, param.shape, param.stride(), param.dtype, param.device


def named_params(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, int, Tensor]]:
    """Yield each parameter with its name for messages and the index of its param group.

    A parameter has its own name where the optimizer was given names.
    """
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        for position, param in enumerate(group["params"]):
            where = f"parameter {number} (param group {index}, position {position})"
            yield (where if known is None else f"parameter {known[position]!r}"), index, param
            number += 1


# Entry -> shape of the tensor; None if it is no tensor.
Expected = dict[str, tuple[int, ...] | None]


def check_state(
    given: Mapping[str, Any], optimizer: torch.optim.Optimizer, own: torch.optim.Optimizer
) -> None:
    """Raise LoadError unless the optimizer can go on from this state. Local; alike on all ranks.

    A trial step of a copy of `own`, which has a part of the parameters, says which entries a
    parameter should have, and of what shape: it steps a tensor of the parameter's shape. This takes
    memory for one tensor at a time.
    """
    kind = type(own).__name__
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise LoadError(
            f"expected a state dict of a {kind} with 'state' and 'param_groups', got "
            f"{sorted(given) if isinstance(given, Mapping) else type(given).__name__}"
        )
    sizes, given_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, given["param_groups"])
    )
    if sizes != given_sizes:
        raise LoadError(
            f"expected param groups of {sizes} parameters, as this {kind} has, got {given_sizes}"
        )
    left = dict(given["state"])
    options = [options_of(group) for group in given["param_groups"]]
    known: dict[Any, Expected | None] = {}
    problems: list[str] = []
    for (name, index, param), number in zip(
        named_params(optimizer), _numbers_in(given), strict=True
    ):
        state = left.pop(number, None)
        # No step has had a gradient for it: its state starts anew, as in plain torch.
        if not state:
            continue
        key = (index, param.shape, param.dtype, param.device)
        if key not in known:
            known[key] = _try(own, index, param, options)
        problems += _compare(name, state, known[key])
    if left:
        problems.append(f"state of parameters {list(left)}, which are in no param group")
    if problems:
        raise LoadError(f"cannot load, and nothing was written: {shown_all(problems)}")


def _numbers_in(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the numbers by which a state dict calls its parameters, in order."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _try(
    own: torch.optim.Optimizer, index: int, param: Tensor, options: Sequence[Mapping[str, Any]]
) -> Expected | None:
    """Return the entries after a trial step in this param group; None where the step fails."""
    twin = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    tried = [[twin] if at == index else [] for at in range(len(options))]
    states = states_after_step(own, tried, options)
    if states is None:
        return None
    entries = states.get(twin, {}).items()
    return {k: tuple(v.shape) if isinstance(v, Tensor) else None for k, v in entries}


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


def check_independence(own: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Raise PartitionError if `own`, which has a part of the parameters, updates them together."""
    kind, params = type(own).__name__, list(named_params(optimizer))
    attribute = attribute_with_params(own, {id(param) for *_, param in params})
    if attribute is not None:
        raise PartitionError(
            f"{kind} keeps parameters in its attribute {attribute!r}, outside param_groups: it "
            "updates all of them together (one search for the length of the step, say), and "
            "each rank would have only some; use it unsharded, or an optimizer that treats "
            "parameters one by one"
        )
    is_said = [need_of(own, group) is not None for group in optimizer.param_groups]
    samples = [
        Sample(name, param.shape, param.device, Cut.TENSOR, index)
        for name, index, param in params
        if not is_said[index]
    ]
    reason = find_cuts(own, samples, must_be_tried=False) if samples else None
    if isinstance(reason, str):
        raise PartitionError(
            f"{kind} does not treat parameters one by one: {reason}. Use it unsharded; or, if "
            f"you know better, say so by its attribute: {kind}.needs_cut = 'tensor'"
        )


@contextmanager
def only(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let an optimizer see only these parameters, with these gradients, inside the context."""
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


def copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy the options of param groups to others, which have the same order."""
    for mine, theirs in zip(source, target, strict=True):
        theirs.update(options_of(mine))


def _bytes_of(param: Tensor) -> int:
    # A sparse one has no `nbytes`, a lazy one no shape; both are refused later.
    return 0 if is_lazy(param) else param.numel() * param.element_size()


class _StepsAlong(JoinHook):
    """Join hook that steps on a rank that has run out of inputs, as long as others have some."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a step: this rank may own parameters of which others have gradients."""
        self._optimizer.step()


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Stage 1 in one line, for a loop with DistributedDataParallel.

    Each parameter belongs to one rank, whose optimizer updates it and has its state; after each
    step its owner sends it to the others. Parameters are assigned whole, the largest first, to the
    rank that has least. So any optimizer works that treats them one by one, matrix-wise ones too.
    No rank keeps more state than the N-th part and that of one parameter, where state is as large
    as its parameter or a multiple of it.

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Every rank makes it, steps, adds param groups and freezes or unfreezes parameters alike. The
    weights are those of plain DDP with the same optimizer.

    Attributes:
        optim: This rank's optimizer, over its own parameters.
        group: The ranks.
        state: The state of this rank's own parameters. `param_groups` have the parameters of all
            ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        group: AnyRanks | None = None,
        parameters_as_bucket_view: bool = False,
        *,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        """Assign parameters to ranks and construct this rank's optimizer. Collective.

        Args:
            params: Parameters, (name, parameter) pairs, or dicts of them and options, as any
                optimizer takes them; generators too. Dicts given are not changed. Names are used in
                messages.
            optimizer_class: What to make, of any optimizer that treats parameters one by one.
            group: A zero_comm.Group, torch's ProcessGroup, or a DeviceMesh, of which the last
                dimension counts; the default process group when None.
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
        if isinstance(group, dist.DeviceMesh):
            group = Group.from_mesh(group, group.ndim - 1)
        self.group = Group.from_process_group() if group is None else Group.of(group)
        self._kind = getattr(optimizer_class, "__name__", repr(optimizer_class))
        self._in_place = parameters_as_bucket_view
        self._owners: dict[Tensor, int] = {}
        # Whole state as of the last consolidation; None if this rank has none.
        self._whole: dict[Tensor, dict[str, Any]] | None = None
        # Parameters whose state in `_whole` may be the optimizer's own memory, until the next step.
        self._shared: list[Tensor] = []
        self._is_made = self._steps_in_backward = False
        # DDP's buckets that are being reduced.
        self._reducing: deque[tuple[Any, torch.futures.Future]] = deque()
        self._sending: deque[Callable[[], None]] = deque()
        # Buckets of all parameters that are sent after a step.
        self._buckets: list[Bucket] = []
        # Ids of the parameters in one of DDP's buckets -> buckets in which they are sent.
        self._ddp_buckets: dict[tuple[int, ...], list[Bucket]] = {}
        self.group.explain(PURPOSES)
        Joinable.__init__(self)
        super().__init__(params, dict(defaults))
        self._assign_params(self._all_params())

        def make() -> None:
            groups: Any = [self._part_of(group, self.group.rank) for group in self.param_groups]
            self.optim = optimizer_class(groups, **defaults)
            check_independence(self.optim, self)

        self._together(make)
        copy_options(self.optim.param_groups, self.param_groups)
        self.defaults = dict(self.optim.defaults)
        self.state = self.optim.state
        self._plan()
        self._is_made = True

    # ---- Parameters ----

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of the parameters that each rank updates, in rank order: how even they are."""
        sizes = [0] * self.group.world_size
        for param, rank in self._owners.items():
            sizes[rank] += _bytes_of(param)
        return tuple(sizes)

    def owner_of(self, param: Tensor) -> int:
        """Return the rank that updates a parameter and has its state. Local.

        Raises:
            PartitionError: It is in no param group.
        """
        if param not in self._owners:
            raise PartitionError(
                f"expected a parameter of this optimizer, got a tensor of shape "
                f"{tuple(param.shape)} that is in none of its param groups"
            )
        return self._owners[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Assign the parameters of one more group to ranks. Collective; the dict is not changed.

        Parameters that were assigned before stay with their rank.

        Raises:
            zero_comm.AgreementError: Ranks add different parameters, or the optimizer of one cannot
                take them; that one raises what its optimizer raised. Nothing was added.
        """
        is_dict = isinstance(param_group, dict)
        super().add_param_group(dict(param_group) if is_dict else param_group)
        # Torch's constructor calls this before this rank's optimizer exists.
        if not self._is_made:
            return
        group = self.param_groups[-1]
        self._assign_params(group["params"])
        try:
            own = self._part_of(group, self.group.rank)
            self._together(lambda: self.optim.add_param_group(own))
        except BaseException:
            for param in group["params"]:
                del self._owners[param]
            del self.param_groups[-1]
            # This rank's optimizer may have accepted the group.
            del self.optim.param_groups[len(self.param_groups) :]
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self._plan()

    # ---- The step ----

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's parameters and give every rank all of them. Collective; blocks.

        Changes of `param_groups` (a scheduler's) reach the optimizer, and its own changes of them
        are copied back. A parameter may have been frozen or unfrozen since the last step, on all
        ranks.

        Args:
            closure: Computes the loss again, with gradients; called as often as the optimizer calls
                it, on each rank.
            **options: For the optimizer's own `step`.

        Returns:
            What the optimizer's `step` returns.
        """
        Join.notify_join_context(self)
        self.group.compare_launches("ZeroRedundancyOptimizer.step()")
        if self._steps_in_backward:
            with torch.enable_grad():
                return None if closure is None else closure()
        loss = self._update(closure, **options)
        if self._facts != list(map(facts_of, self._owners)):
            self._agree()
            self._plan()
        if self.group.world_size > 1:
            exchange(self._buckets, self.group, in_flight=_IN_FLIGHT)
        return loss

    def join_hook(self, **_: Any) -> JoinHook:
        """Return what torch's `Join([ddp_model, optimizer])` calls on a rank without inputs. Local.

        Such a rank steps with the gradients that it has: those of its last backward, unless they
        were dropped, or other code, such as another Joinable, has set others.
        """
        return _StepsAlong(self)

    @property
    def join_device(self) -> torch.device:
        """Device on which `Join` communicates."""
        return self.group.device

    @property
    def join_process_group(self) -> Any:
        """Torch's process group in which `Join` communicates."""
        return self.group.process_group

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
        optimizer steps once per bucket, on the parameters of that bucket: an optimizer that counts
        its steps outside the state of each parameter counts too many. Under
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
        if self._steps_in_backward:
            raise StateError("overlap_with_ddp() was called before; make another optimizer")
        self._steps_in_backward = True

        # Without annotations: DDP compares them with types, and here they are text.
        def hook(state, bucket):
            # Drop buckets of an earlier backward that raised.
            if bucket.index() == 0:
                self._reducing.clear()
                self._sending.clear()
            future = reduce(state, bucket)
            self._reducing.append((bucket, future))
            self._advance(num_left=0 if bucket.is_last() else 1)
            return future

        model.register_comm_hook(state, hook)

    def _advance(self, *, num_left: int) -> None:
        """Update what DDP has reduced, and finish sending what was updated before. Collective.

        While one of its buckets is being reduced, the parameters of the one before are updated by
        their owners and sent. After the last one every rank has all parameters.
        """
        while len(self._reducing) > num_left:
            self._step_bucket(*self._reducing.popleft())
        while len(self._sending) > num_left:
            self._sending.popleft()()

    def _step_bucket(self, bucket: Any, future: torch.futures.Future) -> None:
        """Update and send the parameters of one of DDP's buckets. Collective."""
        reduced = future.wait()
        if isinstance(reduced, list):
            reduced = reduced[0]
        if reduced.data_ptr() != bucket.buffer().data_ptr():
            # DDP itself does the same afterwards.
            bucket.buffer().copy_(reduced)
        given = zip(bucket.parameters(), bucket.gradients(), strict=True)
        grads = {param: grad for param, grad in given if param in self._owners}
        own = {p: g for p, g in grads.items() if self._owners[p] == self.group.rank}
        if own:
            with only(self.optim, own):
                self._update()
        if self.group.world_size == 1:
            return
        key = tuple(map(id, grads))
        if key not in self._ddp_buckets:
            self._ddp_buckets[key] = self._pack(grads)
        self._sending += (each.launch(self.group) for each in self._ddp_buckets[key])

    def _update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step this rank's optimizer. Local, but for a closure."""
        # The dicts are updated in place, since a caller may have them already.
        for param in self._shared:
            state = self._consolidated()[param]
            state.update(map_tensors(state, torch.clone))
        self._shared = []
        copy_options(self.param_groups, self.optim.param_groups)
        given = () if closure is None else (closure,)
        loss = self.optim.step(*given, **options)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    # ---- State ----

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Put the whole state together in host memory, for `state_dict()`. Collective; blocks.

        Tensors travel one at a time and without pickling. The receiver needs memory for what it
        lacks and one tensor more; what it has itself is copied only if it steps again.

        Args:
            to: The rank that receives it, a position in the group; None for all ranks.

        Raises:
            StateError: The state of some parameter contains something other than a tensor, number,
                string, or list, tuple or dict of these; or `to` is no rank. On every rank.
        """
        if to is not None and not 0 <= to < self.group.world_size:
            raise StateError(
                f"consolidate_state_dict(): expected a rank below {self.group.world_size}, or None "
                f"for all, got {to}"
            )
        self._whole, self._shared = None, []
        params, group = self._all_params(), self.group
        own: list[Tensor] = []
        described, problem = [], ""
        for number, param in enumerate(params):
            try:
                if param in self.optim.state:
                    described.append([number, describe(self.optim.state[param], own)])
            except StateError as error:
                problem = problem or f"state of parameter {number} on rank {group.rank}: {error}"
        answers = all_gather_json([problem, described], group=group, tag=TAG)
        problem = next((problem for problem, _ in answers if problem), "")
        if problem:
            raise StateError(f"consolidate_state_dict(): {problem} (seen on rank {group.rank})")
        receives = to is None or to == group.rank
        device = "cpu" if receives else "meta"
        owned: list[Owned] = []
        for rank, (_, of_rank) in enumerate(answers):
            theirs = described_tensors(["list", [of_param for _, of_param in of_rank]])
            tensors = (torch.empty(shape, dtype=d, device=device) for d, shape in theirs)
            owned += [(tensor, rank) for tensor in (own if rank == group.rank else tensors)]
        travels = [(tensor, owner) for tensor, owner in owned if owner != to and tensor.nbytes]
        buckets = plan_buckets(travels, world_size=group.world_size, max_bytes=_STATE_BUCKET_BYTES)
        exchange(buckets, group, to=to, in_flight=0)
        if receives:
            values = (tensor.cpu() for tensor, _ in owned)
            # `map_tensors` makes tensors and objects of the `Parts` that `rebuild` returns.
            whole = {
                n: map_tensors(rebuild(of_param, values), lambda tensor: tensor)
                for _, of_rank in answers
                for n, of_param in of_rank
            }
            self._whole = {params[number]: whole[number] for number in sorted(whole)}
            self._shared = [params[number] for number, _ in described]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters as of the last consolidation, and the present options.

        It is the state dict of the plain optimizer, which can load it, as can a
        ZeroRedundancyOptimizer of any number of ranks. Local.

        Raises:
            StateError: State was not consolidated on this rank.
        """
        mine = self.state
        self.state = self._consolidated()  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's own parameters, numbered among themselves. Local."""
        copy_options(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def rank_local_state_dict(self, rank: int) -> dict[str, Any]:
        """Return a rank's `local_state_dict()` as of the last consolidation on this rank. Local.

        Options are the present ones.

        Raises:
            StateError: State was not consolidated on this rank, or there is no such rank.
        """
        whole = self._consolidated()
        if not 0 <= rank < self.group.world_size:
            raise StateError(f"expected a rank below {self.group.world_size}, got {rank}")
        numbers, state, groups = count(), {}, []
        for group in self.param_groups:
            part = self._part_of(group, rank)
            own = {next(numbers): param for param in part["params"]}
            state |= {number: whole[param] for number, param in own.items() if param in whole}
            groups.append({**part, "params": list(own)})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full state, each rank that of its own parameters. Local; call it on all.

        The state may come from the plain optimizer, or from any number of ranks. It is copied: the
        dict and its tensors are changed neither now nor by later steps. A parameter without state
        begins anew, as in the plain optimizer.

        Raises:
            LoadError: Names each parameter with entries that are missing, unexpected or of another
                shape, or param groups of other sizes; the same on every rank. Nothing was written.
        """
        check_state(state_dict, self, self.optim)
        groups = [dict(group) for group in state_dict["param_groups"]]
        state = {
            number: map_tensors(state_dict["state"][number], torch.clone)
            for number, param in zip(_numbers_in(state_dict), self._all_params(), strict=True)
            if self._owners[param] == self.group.rank and state_dict["state"].get(number)
        }
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        own = (param for *_, param in named_params(self.optim))
        state = {n: self.state[param] for n, param in enumerate(own) if param in self.state}
        self.optim.load_state_dict({**self.local_state_dict(), "state": state})
        self.state = self.optim.state

    # ---- Inside ----

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _assign_params(self, params: Sequence[Tensor]) -> None:
        """Assign parameters to ranks, the largest first.

        Trainable ones are assigned before frozen ones, so that they are balanced by themselves.
        """
        loads = list(self.bytes_per_rank)
        for trains in (True, False):
            chosen = [param for param in params if param.requires_grad is trains]
            ranks = give_whole(list(map(_bytes_of, chosen)), loads)
            self._owners.update(zip(chosen, ranks, strict=True))

    def _part_of(self, group: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return a param group with the parameters of one rank only."""
        own = [param for param in group["params"] if self._owners[param] == rank]
        return {**options_of(group), "params": own}

    def _together(self, attempt: Callable[[], None]) -> None:
        """Run `attempt`, which may fail on some ranks alone; if it does, all raise. Collective."""
        problem: Exception | None = None
        try:
            for name, _, param in named_params(self):
                if is_dtensor(param):
                    raise PartitionError(
                        f"{name}: expected a plain tensor, got a DTensor; shard its model with "
                        "zero_engine.shard(model, optimizer, ZeroConfig(stage=1)), which takes them"
                    )
                if param.layout is not torch.strided or param.is_meta or is_lazy(param):
                    got = "on the meta device" if param.is_meta else f"of layout {param.layout}"
                    got = "of a lazy module: run a forward first" if is_lazy(param) else got
                    raise PartitionError(
                        f"{name}: expected a dense tensor with values, got one {got}"
                    )
            attempt()
        except Exception as error:
            problem = error
        try:
            self._agree("" if problem is None else f"{type(problem).__name__}: {problem}")
        except AgreementError:
            if problem is None:
                raise
        if problem is not None:
            raise problem

    def _agree(self, problem: str = "") -> None:
        """Raise unless ranks have the same parameters, param groups and problem. Collective."""
        facts = {
            f"what speaks against {self._kind}": problem,
            "optimizer": self._kind,
            "parameters in param groups": str([len(g["params"]) for g in self.param_groups]),
        }
        for name, _, param in named_params(self):
            # It has no shape to compare, and is refused.
            if is_lazy(param):
                continue
            travels, shape, stride, dtype, _ = facts_of(param)
            how = "trains" if travels else "is frozen"
            facts[name] = f"{how}, {tuple(shape)} with strides {stride}, {dtype}"
        check_agreement(facts, group=self.group, tag=AGREE_TAG, timeout_s=_TIMEOUT_S)

    def _plan(self) -> None:
        """Plan the buckets in which parameters are sent, as they are now. Local."""
        packed, placed = list[Tensor](), list[Owned]()
        for param, owner in self._owners.items():
            travels, *_, device = facts_of(param)
            if travels and self._in_place and device == self.group.device and param.nbytes:
                placed.append((param, owner))
            elif travels:
                packed.append(param)
        before, self._buckets = self._buckets, self._pack(packed)
        if placed:
            bucket = Bucket.plan(placed, self.group.world_size).placed_on(self.group.device)
            bucket.install()
            self._buckets.insert(0, bucket)
        for bucket in before:
            bucket.remove()
        # After the installation, since strides change: views are dense.
        self._facts = list(map(facts_of, self._owners))
        self._ddp_buckets.clear()

    def _pack(self, params: Iterable[Tensor]) -> list[Bucket]:
        owned = [(param, self._owners[param]) for param in params]
        return plan_buckets(owned, world_size=self.group.world_size, max_bytes=_PARAM_BUCKET_BYTES)

    def _consolidated(self) -> dict[Tensor, dict[str, Any]]:
        if self._whole is None:
            raise StateError(
                "Optimizer state has not been consolidated on this rank. Call "
                f"`consolidate_state_dict(to={self.group.rank})` on all ranks beforehand, or "
                "`local_state_dict()` for what this rank has"
            )
        return self._whole
