"""Inputs kept on the host or in permanent memory: the same numbers, in less memory, for as long."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_numbers import assert_equal, plainly
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from zero_ckpt import Checkpointer, CheckpointError, PackedSaver
from zero_ckpt.testing import late
from zero_comm import Group

CPU = torch.device("cpu")


def _saver(*, moves: bool = False, num_slots: int | None = None) -> PackedSaver:
    saver = PackedSaver(on_host=moves, num_slots=num_slots)
    if moves:
        late(saver)
    return saver


OPTIONS: list[dict[str, Any]] = [
    {},
    {"moves": True},
    {"num_slots": 3},
    {"moves": True, "num_slots": 3},
]
COPYING = OPTIONS[1:]


def _with_one_slot(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "num_slots": 1} if "num_slots" in options else options


def _bytes(saver: PackedSaver) -> int:
    return saver.kept_bytes().get(CPU, 0)


# ---- The law ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_callers_tensors_stay_as_they_are(options: dict[str, Any]) -> None:
    """Elsewhere their memory is taken from them, or pointed at other memory, for good."""
    saver = _saver(**_with_one_slot(options))
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    hidden, mask = x * 1, torch.ones(4, 6, dtype=torch.bool)
    given = (hidden, weight, mask)
    facts = [(t.data_ptr(), t._version, t.shape, t.stride(), t.grad_fn) for t in given]
    values = [t.detach().clone() for t in given]

    out = Checkpointer(saver=saver).checkpoint(lambda h, w, m: (h * w).sin() * m, *given)
    out.sum().backward()

    assert [(t.data_ptr(), t._version, t.shape, t.stride(), t.grad_fn) for t in given] == facts
    assert_equal([t.detach() for t in given], values)


def _forms() -> dict[str, Tensor]:
    """Inputs of one function, all that they can be."""
    whole = torch.randn(6, 10)
    return {
        "transposed": whole.t(),
        "sliced": whole[:, 2:9:2],
        "expanded": torch.randn(6, 1).expand(6, 10),
        "windows": torch.randn(30).unfold(0, 5, 2),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "double": torch.randn(5, dtype=torch.float64),
        "half": torch.randn(7).bfloat16(),
        "integers": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_inputs_come_back_as_they_were(options: dict[str, Any]) -> None:
    """Shape, dtype and order of strides decide what a kernel computes."""
    inputs = _forms()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    saver = _saver(**options)

    kept = saver.save([tensor.detach() for tensor in inputs.values()], "it")
    restored = dict(zip(inputs, kept.restore(), strict=True))
    again = dict(zip(inputs, kept.restore(), strict=True))

    for name, tensor in inputs.items():
        for found in (restored[name], again[name], tensor):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.to_dense(), before[name].to_dense()), name
            if not tensor.is_sparse and name != "sliced":
                assert found.stride() == tensor.stride(), name
    assert restored["sliced"].stride() == ((4, 1) if options else inputs["sliced"].stride())


@pytest.mark.parametrize("options", COPYING, ids=str)
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
    torch.testing.assert_close(curvature, 6 * x)


@pytest.mark.parametrize("options", COPYING, ids=str)
def test_inputs_that_were_written_by_their_maker_are_no_surprise(options: dict[str, Any]) -> None:
    """New memory at an old address, with another count of writes, is not a write meanwhile."""
    x = torch.zeros(4).add_(1).add_(1)
    (back,) = _saver(**options).save([x], "it").restore()
    assert back._version == x._version == 2  # for all views of it

    run = Checkpointer(saver=_saver(**options)).checkpoint
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


def _chain(run: Callable[..., Any], depth: int = 3) -> Tensor:
    x = torch.randn(8, 5) * torch.ones(5, requires_grad=True)
    for _ in range(depth):
        x = run(torch.tanh, x)
    return x


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_kept_are_those_of_the_inputs(options: dict[str, Any]) -> None:
    """A figure that nobody checks is no figure."""
    saver = _saver(**options)
    watching = _Watching(Checkpointer(saver=saver).checkpoint)
    output = _chain(watching)
    num_leaving = 1 if options.get("moves") else 0  # the last one's copy is under way still

    assert _bytes(saver) == (3 + num_leaving) * 8 * 5 * 4
    assert watching.num_alive() == (num_leaving if options else 3)
    output.sum().backward()
    del output
    assert _bytes(saver) == 0
    assert watching.num_alive() == 0


def test_one_storage_counts_once() -> None:
    """A mask that goes to every layer is there once."""
    saver = PackedSaver()
    run = Checkpointer(saver=saver).checkpoint
    x, mask = torch.randn(4, requires_grad=True), torch.ones(100)
    kept = [run(lambda y, m: y * m.sum(), x, part) for part in (mask, mask[10:], mask[None])]

    assert len(kept) == 3
    assert _bytes(saver) == 100 * 4 + 4 * 4


@pytest.mark.parametrize("options", COPYING, ids=str)
def test_what_is_marked_and_what_is_a_parameter_stays_where_it_is(options: dict[str, Any]) -> None:
    """A copy of what is there anyway is memory lost; and the mark is DeepSpeed's way to say so."""
    saver = _saver(**options)
    x, weight, marked = torch.randn(8), nn.Parameter(torch.randn(8)), torch.randn(8)
    marked.no_checkpointing = True  # type: ignore[attr-defined]
    output = Checkpointer(saver=saver).checkpoint(lambda a, b, c: a * b * c, x, weight, marked)

    restored = _saver(**options).save([x, weight, marked], "it").restore()

    same = [
        a.data_ptr() == b.data_ptr() for a, b in zip(restored, (x, weight, marked), strict=True)
    ]
    assert same == [False, True, True]
    weight.data.zero_()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(CheckpointError, match="written in place"):
        output.sum().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_enclosing_checkpoint_drops_what_inner_ones_keep(options: dict[str, Any]) -> None:
    """Else checkpoints inside of checkpoints would cost the memory that they are to save."""
    saver = _saver(**_with_one_slot(options))
    outer, inner = Checkpointer(saver=saver), _Watching(Checkpointer(saver=saver).checkpoint)
    x = torch.randn(8, 5, requires_grad=True)

    def deep(y: Tensor, run: Callable[..., Any]) -> Tensor:
        for _ in range(4):
            y = run(torch.tanh, y * 2)
        return y

    (expected,) = torch.autograd.grad(deep(x, plainly).sum(), x)
    output = outer.checkpoint(deep, x, inner)

    assert _bytes(saver) == (2 if options.get("moves") else 1) * x.nbytes
    assert inner.num_alive() == 0
    output.sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


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
    assert saver.reserved_bytes() == {CPU: 3 * 8 * 5 * 4}


def test_more_layers_than_were_announced_are_refused() -> None:
    """Memory of another layer would be written over, silently."""
    saver = PackedSaver(num_slots=2)
    run = Checkpointer(saver=saver).checkpoint

    with pytest.raises(CheckpointError, match=r"expected 2 layers at most.*set_num_layers"):
        _chain(run)
    assert _bytes(saver) == 0

    _chain(run, depth=2).sum().backward()


@pytest.mark.parametrize(
    "other", [torch.randn(7, 5), torch.randn(8, 5).double()], ids=["shape", "dtype"]
)
def test_inputs_of_another_kind_than_the_slots_are_refused(other: Tensor) -> None:
    """A last batch that is smaller must not be cut out of memory for another."""
    saver = PackedSaver(num_slots=2)
    run = Checkpointer(saver=saver).checkpoint
    held = _chain(run, depth=1)
    before = _bytes(saver)

    with pytest.raises(CheckpointError, match=r"expected 40 elements of torch.float32.*reset"):
        run(torch.tanh, other.requires_grad_())

    assert _bytes(saver) == before
    saver.reset()
    run(torch.tanh, other).sum().backward()
    held.sum().backward()


@pytest.mark.parametrize("options", COPYING, ids=str)
@pytest.mark.parametrize("fails_in", [1, 2], ids=["forward", "second run"])
def test_exceptions_give_slots_back(options: dict[str, Any], fails_in: int) -> None:
    """One bad batch must not cost a slot for good."""
    saver = _saver(**_with_one_slot(options))
    run = Checkpointer(saver=saver).checkpoint
    for _ in range(3):
        runs = 0

        def fails(x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            if runs == fails_in:
                raise KeyError("a bad batch")
            return x.tanh()

        with pytest.raises(KeyError):
            run(fails, torch.randn(4, requires_grad=True)).sum().backward()

    assert _bytes(saver) == 0
    x = torch.randn(4, requires_grad=True)
    run(torch.sin, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


# ---- The host ----


def test_copies_are_over_a_layer_later_and_begin_a_layer_ahead() -> None:
    """Else computation waits for the bus; and memory of inputs is held no longer than a layer."""
    saver = PackedSaver(on_host=True)
    host = late(saver)
    output = _chain(Checkpointer(saver=saver).checkpoint)
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


def test_layers_inside_of_layers_do_not_keep_a_copy_from_beginning_ahead() -> None:
    """The call before in time may be one that has nothing on the host."""
    saver = PackedSaver(on_host=True)
    host = late(saver)
    run = Checkpointer(saver=saver).checkpoint
    output = _chain(partial(run, run))
    del host.log[:]

    output.sum().backward()

    backs = [what for what in host.log if what[0] == "back"]
    assert backs == [("back", 2), ("back", 1), ("back", 0)]
    assert host.log.index(("back", 1)) < host.log.index(("back is over", 2))


def test_a_graph_that_is_dropped_ends_its_copies_first() -> None:
    """Memory that is written behind the allocator's back belongs to somebody else by then."""
    saver = PackedSaver(on_host=True)
    host = late(saver)
    kept = [saver.save([torch.randn(8, 5)], "it") for _ in range(3)]
    saver.save([], "the next")  # lets go of what was copied away last
    kept[-1].prefetch()
    del kept
    gc.collect()

    assert host.log[-1] == ("back is over", 2)
    assert _bytes(saver) == 0


def test_an_input_that_is_written_on_its_way_is_noticed() -> None:
    """Half of the old values and half of the new ones are nobody's."""
    saver = PackedSaver(on_host=True)
    late(saver)
    run = Checkpointer(saver=saver).checkpoint
    x = torch.randn(4)
    weight = torch.ones(4, requires_grad=True)
    output = run(torch.mul, x, weight)
    x.zero_()

    with pytest.raises(CheckpointError, match="input 0 was written in place while it was being"):
        output.sum().backward()


def test_an_input_that_is_written_after_its_copy_does_not_matter() -> None:
    """What is kept is the copy."""
    saver = PackedSaver(on_host=True)
    late(saver)
    run = Checkpointer(saver=saver).checkpoint
    x, weight = torch.randn(4), torch.ones(4, requires_grad=True)
    expected = x.clone()
    output = run(torch.mul, run(torch.mul, x, weight), torch.ones(4))
    x.zero_()
    output.sum().backward()

    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]


# ---- Bad input ----


def test_a_group_of_one_keeps_inputs_as_they_are() -> None:
    """There is nobody to share with, and a copy would be for nothing."""
    saver = PackedSaver(group=Group.solo())
    x = torch.randn(6, requires_grad=True)

    kept = saver.save([x.detach()], "it")

    assert kept.restore()[0].data_ptr() == x.data_ptr()


# ---- Forms ----


def _any_tensor(rng: random.Random) -> Tensor:
    """A view of a random tensor: sliced, transposed, expanded, overlapping."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    tensor = torch.randn(shape)
    for _ in range(rng.randint(0, 4)):
        if tensor.dim() == 0:
            tensor = tensor[None].expand(rng.randint(1, 4))
        dim = rng.randrange(tensor.dim())
        match rng.randrange(5):
            case 0:
                tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
            case 1:
                step, start = rng.randint(1, 3), rng.randrange(tensor.shape[dim])
                size = (tensor.shape[dim] - start + step - 1) // step
                index = [slice(None)] * tensor.dim()
                index[dim] = slice(start, start + size * step, step)
                tensor = tensor[tuple(index)]
            case 2:
                tensor = tensor.unsqueeze(dim).transpose(0, dim)
                tensor = tensor.expand(rng.randint(1, 4), *tensor.shape[1:])
            case 3:
                tensor = tensor.unfold(dim, rng.randint(1, tensor.shape[dim]), 1)
            case 4:
                tensor = tensor.select(dim, rng.randrange(tensor.shape[dim]))
    return tensor


def _pairs(tensor: Tensor) -> list[tuple[int, int]]:
    """Dims of which the first takes larger steps; dims of one element take none."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return [(a, b) for a in dims for b in dims if tensor.stride(a) > tensor.stride(b)]


def _kept_bytes(tensor: Tensor) -> tuple[int, Tensor]:
    """What a slot for it takes, and what comes back."""
    saver = PackedSaver(num_slots=1)
    kept = saver.save([tensor], "it")
    (back,) = kept.restore()
    return sum(saver.kept_bytes().values()), back


def test_a_tensor_comes_back_with_its_values_and_its_order_of_strides() -> None:
    """Kernels add up in the order of memory: another order is another sum. Nothing is kept twice.

    An expanded mask costs what it did, and not a hundred times as much.
    """
    for seed in range(200):
        tensor = _any_tensor(random.Random(seed))
        repeated = [
            0 if step == 0 else size
            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        once = tensor[tuple(slice(0, size or 1) for size in repeated)]

        num_bytes, back = _kept_bytes(tensor)

        assert torch.equal(back, tensor)
        assert all(back.stride(a) > back.stride(b) for a, b in _pairs(tensor))
        assert num_bytes <= tensor.nbytes
        assert num_bytes <= max(once.nbytes, tensor.untyped_storage().nbytes())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(6).expand(5, 6),
        torch.randn(40).unfold(0, 8, 2),
        torch.randn(40)[8:32].view(4, 6),
    ],
    ids=["dense", "transposed", "expanded", "overlapping", "offset"],
)
def test_what_has_no_gaps_is_copied_once(tensor: Tensor) -> None:
    """To the host, from where it lies: another copy of each input would be a pass over memory."""
    saver = PackedSaver(on_host=True)
    host = late(saver)

    kept = saver.save([tensor], "it")

    assert host.read_from == [tensor.data_ptr()]
    saver.save([], "the next")  # the first one's copy is over
    assert kept.restore()[0].stride() == tensor.stride()


def test_what_is_repeated_and_has_gaps_is_kept_once() -> None:
    """A column of a matrix, expanded to a mask, is a column."""
    column = torch.randn(4, 1000)[:, :1]
    num_bytes, back = _kept_bytes(column.expand(4, 10))

    assert num_bytes == 4 * 4
    assert torch.equal(back, column.expand(4, 10))
    assert back.stride() == (1, 0)
