"""Inputs split over ranks, on the host or in permanent memory: the same numbers, for as long."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from same_numbers import assert_equal, plainly
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from zero_ckpt import Checkpointer, CheckpointError, PackedSaver
from zero_ckpt.testing import late
from zero_comm import DivergenceError, Group, even_splits, record_traffic
from zero_comm.testing import assert_close, equal, rely_on

CPU = torch.device("cpu")
NUMEL = 7354  # of which half is the size of nothing else

OPTIONS: list[dict[str, Any]] = [
    {"splits": splits, "on_host": on_host, "num_slots": num_slots}
    for splits, on_host, num_slots in itertools.product((False, True), (False, True), (None, 3))
]


def _any_of(options: list[dict[str, Any]]) -> pytest.MarkDecorator:
    names = ["-".join(name for name, value in each.items() if value) for each in options]
    return pytest.mark.parametrize("options", options, ids=names)


def _saver(
    group: Group | None = None,
    *,
    splits: bool = False,
    on_host: bool = False,
    num_slots: int | None = None,
) -> PackedSaver:
    saver = PackedSaver(group=group if splits else None, on_host=on_host, num_slots=num_slots)
    if on_host and torch.get_default_device().type == "cpu":  # else there is a host apart
        late(saver)
    return saver


def _with_one_slot(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"num_slots": options["num_slots"] and 1}


def _bytes(saver: PackedSaver) -> int:
    return sum(saver.kept_bytes().values())


# ---- The law ----


@_any_of(OPTIONS)
def test_the_callers_tensors_stay_as_they_are(group: Group, options: dict[str, Any]) -> None:
    """Elsewhere their memory is taken from them, or pointed at other memory, for good."""
    saver = _saver(group, **_with_one_slot(options))
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    hidden, mask = x * 1, torch.ones(4, 6, dtype=torch.bool)
    given = (hidden, weight, mask)
    facts = [(t.data_ptr(), t._version, t.shape, t.stride(), t.grad_fn) for t in given]
    values = [t.detach().clone() for t in given]

    out = Checkpointer(saver=saver).checkpoint(lambda h, w, m: (h * w).sin() * m, *given)
    out.sum().backward()

    assert [(t.data_ptr(), t._version, t.shape, t.stride(), t.grad_fn) for t in given] == facts
    assert_equal([t.detach() for t in given], values)


def _forms() -> list[Tensor]:
    """Inputs of one function, all that they can be."""
    whole = torch.randn(7, 9)
    return [
        whole.t(),
        whole[:, 2:9:2],
        torch.randn(6, 1).expand(6, 10),
        torch.randn(31).unfold(0, 5, 2),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.randn(3),  # elements, for four ranks
        torch.randn(13, dtype=torch.float64),
        torch.randn(7).bfloat16(),
        torch.arange(40),
        torch.tensor([True, False]),
        torch.randn(5, 5, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        *(_any_view(random.Random(seed)) for seed in range(50)),
    ]


def _any_view(rng: random.Random) -> Tensor:
    """Of a random tensor: sliced, transposed, expanded, overlapping."""
    tensor = torch.randn([rng.randint(1, 5) for _ in range(rng.randint(0, 4))])
    for _ in range(rng.randint(0, 4)):
        if tensor.dim() == 0:
            tensor = tensor[None].expand(rng.randint(1, 4))
        dim = rng.randrange(tensor.dim())
        match rng.randrange(5):
            case 0:
                tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
            case 1:
                start, step = rng.randrange(tensor.shape[dim]), rng.randint(1, 3)
                tensor = tensor.transpose(0, dim)[start::step].transpose(0, dim)
            case 2:
                tensor = tensor.unsqueeze(dim).transpose(0, dim)
                tensor = tensor.expand(rng.randint(1, 4), *tensor.shape[1:])
            case 3:
                tensor = tensor.unfold(dim, rng.randint(1, tensor.shape[dim]), 1)
            case 4:
                tensor = tensor.select(dim, rng.randrange(tensor.shape[dim]))
    return tensor


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """Pairs of dims of which the first takes larger steps; dims of one element take none."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return [(a, b) for a in dims for b in dims if tensor.stride(a) > tensor.stride(b)]


@_any_of(OPTIONS)
@pytest.mark.ranks(4)
def test_inputs_come_back_as_they_were(group: Group, options: dict[str, Any]) -> None:
    """With the order of their strides: kernels add up in it, and another one is another sum."""
    inputs = _forms()
    before = [tensor.clone() for tensor in inputs]
    kept = _saver(group, **options).save(inputs, "it")
    for _ in range(2):
        with record_traffic(group) as traffic:
            restored = kept.restore()

        num_dtypes = 3  # of floating point; a message carries all tensors of one
        num_messages = sum(seen.calls for seen in traffic.operations.values())
        assert num_messages == (num_dtypes if options["splits"] else 0)
        for found, tensor, old in zip(restored, inputs, before, strict=True):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert equal(found.to_dense(), old.to_dense())
            assert equal(tensor.to_dense(), old.to_dense())
            if not tensor.is_sparse:
                assert all(found.stride(a) > found.stride(b) for a, b in _order(tensor))


@_any_of(OPTIONS[1:4])
def test_a_graph_of_gradients_outlives_what_was_kept(options: dict[str, Any]) -> None:
    """A slot that is given to the next layer must not be what a second derivative reads."""
    saver = _saver(**options)
    run = Checkpointer(saver=saver).checkpoint
    x = torch.randn(5, requires_grad=True)
    (slope,) = torch.autograd.grad(run(lambda y: y**3, x).sum(), x, create_graph=True)
    gc.collect()

    assert _bytes(saver) == 0
    run(lambda y: y * 2, torch.full((5,), torch.nan, requires_grad=True))  # takes the slot
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    assert_close(curvature, 6 * x)


@_any_of(OPTIONS[1:])
def test_inputs_that_were_written_by_their_maker_are_no_surprise(
    group: Group, options: dict[str, Any]
) -> None:
    """New memory at an old address, with another count of writes, is not a write meanwhile."""
    x = torch.zeros(4).add_(1).add_(1)
    (back,) = _saver(group, **options).save([x], "it").restore()
    assert back._version == x._version == 2  # for all views of it

    run = Checkpointer(saver=_saver(group, **options)).checkpoint
    linear = nn.Linear(64, 64)
    for _ in range(5):
        x = torch.randn(64, 64)
        for _ in range(3):
            x = run(linear, x).add_(1)  # which nobody else keeps
        x.sum().backward()


# ---- What is kept ----


class _Watching:
    """Which memory the inputs of calls lie in, and whether it is still there."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.storages = run, list[StorageWeakRef]()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in args]
        return self.run(function, *args, **kwargs)

    def num_alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def _chain(run: Callable[..., Any], depth: int = 3, numel: int = 40) -> Tensor:
    x = torch.randn(numel) * torch.ones(1, requires_grad=True)
    for _ in range(depth):
        x = run(torch.tanh, x)
    return x


@_any_of(OPTIONS)
@pytest.mark.ranks(4)
def test_bytes_kept_are_those_of_the_inputs(group: Group, options: dict[str, Any]) -> None:
    """Of shards where they are split, which differ by an element; the memory before is let go."""
    for numel in (64, 37, 3):
        saver = _saver(group, **options)
        watching = _Watching(Checkpointer(saver=saver).checkpoint)
        output = _chain(watching, numel=numel)
        is_split = options["splits"] and numel >= group.world_size
        own = even_splits(numel, group.world_size)[group.rank] if is_split else numel
        num_leaving = int(options["on_host"])  # the last one's copy is under way still
        is_copied = is_split or options["on_host"] or options["num_slots"]

        assert _bytes(saver) == (3 * own + num_leaving * numel) * 4
        assert watching.num_alive() == (num_leaving if is_copied else 3)
        saver.save([], "the next")  # lets go of what was copied away last
        assert _bytes(saver) == 3 * own * 4
        output.sum().backward()
        del output
        assert saver.kept_bytes() == {}
        assert watching.num_alive() == 0


def test_one_storage_counts_once() -> None:
    """A mask that goes to every layer is there once."""
    saver = PackedSaver()
    run = Checkpointer(saver=saver).checkpoint
    x, mask = torch.randn(4, requires_grad=True), torch.ones(100)
    kept = [run(lambda y, m: y * m.sum(), x, part) for part in (mask, mask[10:], mask[None])]

    assert len(kept) == 3
    assert _bytes(saver) == 100 * 4 + 4 * 4


def test_elements_of_a_view_are_kept_once() -> None:
    """An expanded mask costs what it did, and not a hundred times as much."""

    def num_kept(tensor: Tensor) -> int:
        saver = PackedSaver(num_slots=1)
        kept = saver.save([tensor], "it")
        assert equal(kept.restore()[0], tensor)
        return _bytes(saver)

    for seed in range(200):
        tensor = _any_view(random.Random(seed))
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        once = tensor[tuple(slice(0, 1 if step == 0 else size) for size, step in steps)]

        assert num_kept(tensor) <= tensor.nbytes
        assert num_kept(tensor) <= max(once.nbytes, tensor.untyped_storage().nbytes())
    column = torch.randn(4, 1000)[:, :1]
    assert num_kept(column.expand(4, 10)) == column.nbytes


def test_what_has_no_gaps_is_copied_once() -> None:
    """To the host, from where it lies: another copy of each input would be a pass over memory."""
    for tensor in (
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(6).expand(5, 6),
        torch.randn(40).unfold(0, 8, 2),
        torch.randn(40)[8:32].view(4, 6),
    ):
        saver = PackedSaver(on_host=True)
        host = late(saver)
        kept = saver.save([tensor], "it")

        assert host.read_from == [tensor.data_ptr()]
        saver.save([], "the next")  # the first one's copy is over
        assert kept.restore()[0].stride() == tensor.stride()


@_any_of(OPTIONS[1:])
def test_what_is_marked_and_what_is_a_parameter_stays_where_it_is(
    group: Group, options: dict[str, Any]
) -> None:
    """A copy of what is there anyway is memory lost; and the mark is DeepSpeed's way to say so."""
    saver = _saver(group, **options)
    x, weight, marked = torch.randn(8), nn.Parameter(torch.randn(8)), torch.randn(8)
    marked.no_checkpointing = True  # type: ignore[attr-defined]
    given = (x, weight, marked)
    output = Checkpointer(saver=saver).checkpoint(lambda a, b, c: a * b * c, *given)

    restored = _saver(group, **options).save(given, "it").restore()

    pairs = zip(restored, given, strict=True)
    assert [a.data_ptr() == b.data_ptr() for a, b in pairs] == [False, True, True]
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(CheckpointError, match="written in place"):
        output.sum().backward()


def test_a_group_of_one_keeps_inputs_as_they_are() -> None:
    """There is nobody to share with, and a copy would be for nothing."""
    x = torch.randn(6, requires_grad=True)

    kept = PackedSaver(group=Group.solo()).save([x.detach()], "it")

    assert kept.restore()[0].data_ptr() == x.data_ptr()


@_any_of(OPTIONS)
def test_an_enclosing_checkpoint_drops_what_inner_ones_keep(
    group: Group, options: dict[str, Any]
) -> None:
    """Else checkpoints inside of checkpoints would cost the memory that they are to save."""
    saver = _saver(group, **_with_one_slot(options))
    run = Checkpointer(saver=saver).checkpoint
    inner = _Watching(run)
    x = torch.randn(NUMEL, requires_grad=True)
    own = NUMEL // 2 if options["splits"] else NUMEL
    num_leaving = int(options["on_host"])

    def num_shards() -> int:
        return sum(type(t) is Tensor and t.shape == (NUMEL // 2,) for t in gc.get_objects())

    def deep(y: Tensor, run: Callable[..., Any]) -> Tensor:
        for _ in range(4):
            y = run(torch.tanh, y * 2)
        return y

    (expected,) = torch.autograd.grad(deep(x, plainly).sum(), x)
    output = run(deep, x, inner)

    assert _bytes(saver) == (own + num_leaving * NUMEL) * 4
    assert inner.num_alive() == 0
    assert num_shards() == (1 + num_leaving if options["splits"] else 0)
    output.sum().backward()
    assert equal(x.grad, expected)  # type: ignore[arg-type]
    assert num_shards() == 0


def test_hooks_of_others_decide_where_inputs_rest() -> None:
    """save_on_cpu() and its like must not be defeated, nor slots be read after their time."""
    saver = PackedSaver(num_slots=1)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = _chain(Checkpointer(saver=saver).checkpoint)

    assert len(packed) >= 3
    assert saver.kept_bytes() == saver.reserved_bytes() == {}
    output.sum().backward()


# ---- Slots ----


def test_slots_are_permanent_memory_of_which_each_layer_takes_one() -> None:
    """Memory that comes and goes with every layer is what fragments."""
    saver = PackedSaver(on_host=True, num_slots=3)
    host = late(saver)
    run = Checkpointer(saver=saver).checkpoint
    for step in range(4):
        output = _chain(run)
        if step % 2:
            output.sum().backward()
        else:
            del output  # a graph that is dropped gives slots back as well

    assert host.num_allocations == 1
    assert saver.reserved_bytes() == {CPU: 3 * 40 * 4}


def test_what_does_not_fit_into_the_slots_is_refused() -> None:
    """Memory of another layer would be written over, or a smaller batch be cut out of it."""
    saver = PackedSaver(num_slots=2)
    run = Checkpointer(saver=saver).checkpoint
    with pytest.raises(CheckpointError, match=r"expected 2 layers at most.*set_num_layers"):
        _chain(run)
    assert _bytes(saver) == 0

    for other in (torch.randn(35), torch.randn(40).double()):
        held = _chain(run, depth=2)
        with pytest.raises(CheckpointError, match=r"expected 40 elements of torch.float32.*reset"):
            run(torch.tanh, other.requires_grad_())
        assert _bytes(saver) == 2 * 40 * 4
        saver.reset()
        run(torch.tanh, other).sum().backward()
        held.sum().backward()
        saver.reset()


@_any_of(OPTIONS)
def test_exceptions_give_slots_back_and_leave_the_ranks_in_step(
    group: Group, options: dict[str, Any]
) -> None:
    """One bad batch must not cost a slot for good; who catches it on every rank goes on."""
    saver = _saver(group, **_with_one_slot(options))
    run = Checkpointer(saver=saver).checkpoint
    for fails_in in (1, 2, 2):
        outcomes = iter([torch.sin] * (fails_in - 1) + [_fail, torch.sin])

        def function(x: Tensor, outcomes: Any = outcomes) -> Tensor:
            return next(outcomes)(x)

        x = torch.randn(9, requires_grad=True)
        with pytest.raises(KeyError):
            output = run(function, x)
            output.sum().backward()
        if fails_in == 2:
            output.sum().backward()
            assert equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
        assert saver.kept_bytes() == {}


def _fail(x: Tensor) -> Tensor:
    raise KeyError("a bad batch")


# ---- The host ----


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_are_over_a_layer_later_and_begin_a_layer_ahead(depth: int) -> None:
    """Else computation waits for the bus; and memory of inputs is held no longer than a layer.

    Inside a checkpoint, the call before in time is one that has nothing on the host.
    """
    saver = PackedSaver(on_host=True)
    host = late(saver)
    run = Checkpointer(saver=saver).checkpoint
    output = _chain(run if depth == 1 else partial(run, run))
    forward, host.log[:] = list(host.log), []

    output.sum().backward()

    assert forward == [
        ("away", 0),
        ("away is over", 0),
        ("away", 1),
        ("away is over", 1),
        ("away", 2),
    ]
    assert host.log == [
        ("away is over", 2),
        ("back", 2),
        ("back", 1),
        ("back is over", 2),
        ("back", 0),
        ("back is over", 1),
        ("back is over", 0),
    ]


def test_a_graph_that_is_dropped_ends_its_copies_first() -> None:
    """Memory that is written behind the allocator's back belongs to somebody else by then."""
    saver = PackedSaver(on_host=True)
    host = late(saver)
    kept = [saver.save([torch.randn(40)], "it") for _ in range(3)]
    saver.save([], "the next")  # lets go of what was copied away last
    kept[-1].prefetch()
    del kept
    gc.collect()

    assert host.log[-1] == ("back is over", 2)
    assert _bytes(saver) == 0


def test_an_input_that_is_written_on_its_way_is_noticed() -> None:
    """Half of the old values and half of the new ones are nobody's; once it is over, it may be."""
    run = Checkpointer(saver=_saver(on_host=True)).checkpoint
    x, y, weight = torch.randn(4), torch.randn(4), torch.ones(4, requires_grad=True)
    expected = x.clone()
    outputs = [run(torch.mul, x, weight), run(torch.mul, y, weight)]
    x.zero_()
    y.zero_()

    with pytest.raises(CheckpointError, match="input 0 was written in place while it was being"):
        outputs[1].sum().backward()
    outputs[0].sum().backward()
    assert equal(weight.grad, expected)  # type: ignore[arg-type]


# ---- Ranks ----


def test_one_message_carries_a_shard_of_every_input(group: Group) -> None:
    """A message per tensor costs its latency each; integers are kept whole."""
    inputs = [torch.randn(5, 5), torch.randn(20), torch.arange(9)]
    kept = _saver(group, splits=True).save(inputs, "it")
    with record_traffic(group) as traffic:
        kept.restore()

    assert traffic.operations["all_gather"].calls == 1
    assert traffic.payload_numel() == (13 + 10, 12 + 10)[group.rank]


def test_ranks_that_go_backward_through_other_calls_are_told(group: Group) -> None:
    """Values of one layer taken for those of another would be gradients of nothing."""
    group = Group.from_process_group(group.process_group, patience_s=0.4)
    run = Checkpointer(saver=_saver(group, splits=True)).checkpoint
    x = torch.randn(8, requires_grad=True)
    outputs = [run(torch.sin, x), run(torch.cos, x)]

    with pytest.raises(
        DivergenceError, match=r"gathering the inputs of the checkpoint of .*(sin|cos)"
    ):
        outputs[group.rank].sum().backward()
        rely_on(group)


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "messages"])
def test_ranks_that_were_called_with_other_sizes_are_told(group: Group, reads: bool) -> None:
    """Split inputs are the same on all ranks: a batch of its own on each is a mistake."""
    with mock.patch.dict(os.environ, {} if reads else {"ZERO_COMM_PEER_MEMORY": "0"}):
        group = Group.from_process_group(dist.new_group(), patience_s=0.4)
    if group.device.type == "cpu":
        assert group.exchanges.reads_peers == reads
    x = torch.randn(8 + 2 * group.rank, requires_grad=True)
    output = Checkpointer(saver=_saver(group, splits=True)).checkpoint(torch.sin, x)

    with pytest.raises(
        DivergenceError, match=r"elements: 8 of .*\n.*elements: 10 of .*\n.*same inputs"
    ):
        output.sum().backward()
        rely_on(group)
