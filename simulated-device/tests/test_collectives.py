"""Collectives of "simccl" give what gloo's give on the CPU, and pair by the order of launches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import simulated_device
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.distributed import ReduceOp

SIM = torch.device("sim", 0)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]


def group() -> Any:
    return dist.distributed_c10d._get_default_group()


def backend() -> Any:
    return group()._get_backend(SIM)


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


# Each collective works on tensors of any device, and returns those that it wrote.
def all_reduce(rank: int, dtype: torch.dtype, op: ReduceOp.RedOpType, **options: Any) -> list:
    tensor = numbers(rank, dtype, 3, 5).to(options["device"])
    return [tensor], dist.all_reduce(tensor, op, async_op=options["async_op"])


def reduce(rank: int, dtype: torch.dtype, op: ReduceOp.RedOpType, **options: Any) -> list:
    tensor = numbers(rank, dtype, 7).to(options["device"])
    work = dist.reduce(tensor, 1, op, async_op=options["async_op"])
    return [tensor] if rank == 1 else [], work


def reduce_scatter(rank: int, dtype: torch.dtype, op: ReduceOp.RedOpType, **options: Any) -> list:
    sent = [numbers(10 * i + rank, dtype, 4).to(options["device"]) for i in range(2)]
    result = torch.empty(4, dtype=dtype, device=options["device"])
    return [result], dist.reduce_scatter(result, sent, op, async_op=options["async_op"])


def reduce_scatter_single(
    rank: int, dtype: torch.dtype, op: ReduceOp.RedOpType, **options: Any
) -> list:
    sent = numbers(rank, dtype, 6, 2).to(options["device"])
    result = torch.empty(3, 2, dtype=dtype, device=options["device"])
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = op
    work = group()._reduce_scatter_base(result, sent, opts)
    return [result], _finish(work, options)


def broadcast(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 3, 5).to(options["device"])
    return [tensor], dist.broadcast(tensor, 1, async_op=options["async_op"])


def all_gather(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 5).to(options["device"])
    results = [torch.empty_like(tensor) for _ in range(2)]
    return results, dist.all_gather(results, tensor, async_op=options["async_op"])


def all_gather_single(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 5).to(options["device"])
    result = torch.empty(10, dtype=dtype, device=options["device"])
    return [result], _finish(group()._allgather_base(result, tensor), options)


def all_gather_in_place(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    result = numbers(rank, dtype, 10).to(options["device"])
    own = result[5 * rank : 5 * rank + 5]
    if options["device"] == "cpu":
        own = own.clone()
    return [result], _finish(group()._allgather_base(result, own), options)


def all_to_all_single(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    splits = [[1, 2], [3, 4]]
    tensor = numbers(rank, dtype, sum(splits[rank]), 3).to(options["device"])
    received = [splits[i][rank] for i in range(2)]
    result = torch.empty(sum(received), 3, dtype=dtype, device=options["device"])
    work = dist.all_to_all_single(
        result, tensor, received, splits[rank], async_op=options["async_op"]
    )
    return [result], work


def all_to_all_even(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 8).to(options["device"])
    result = torch.empty_like(tensor)
    return [result], dist.all_to_all_single(result, tensor, async_op=options["async_op"])


def gather(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 4).to(options["device"])
    results = [torch.empty_like(tensor) for _ in range(2)] if rank == 1 else []
    return results, dist.gather(tensor, results or None, 1, async_op=options["async_op"])


def scatter(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    sent = [numbers(i, dtype, 4).to(options["device"]) for i in range(2)] if rank == 0 else None
    result = torch.empty(4, dtype=dtype, device=options["device"])
    return [result], dist.scatter(result, sent, 0, async_op=options["async_op"])


def send_and_receive(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 4).to(options["device"])
    result = torch.empty_like(tensor)
    if rank == 0:
        works = [dist.isend(tensor, 1), dist.irecv(result, 1)]
    else:
        works = [dist.irecv(result, 0), dist.isend(tensor, 0)]
    for work in works:
        work.wait()
    return [result], None


def exchange_in_a_batch(rank: int, dtype: torch.dtype, op: None, **options: Any) -> list:
    tensor = numbers(rank, dtype, 4).to(options["device"])
    results = [torch.empty_like(tensor) for _ in range(2)]
    # Both ranks send first, which only a batch allows.
    operations = [
        dist.P2POp(dist.isend, tensor, 1 - rank),
        dist.P2POp(dist.isend, tensor.flip(0), 1 - rank),
    ]
    operations += [dist.P2POp(dist.irecv, result, 1 - rank) for result in results]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return results, None


def _finish(work: dist.Work, options: dict[str, Any]) -> dist.Work | None:
    if options["async_op"]:
        return work
    work.wait()
    return None


REDUCTIONS = [all_reduce, reduce, reduce_scatter, reduce_scatter_single]
MOVES = [
    *(broadcast, all_gather, all_gather_single, all_gather_in_place, all_to_all_single),
    *(all_to_all_even, gather, scatter, send_and_receive, exchange_in_a_batch),
]
OPS = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]


def compare_with_gloo(rank: int, name: str) -> int:
    """Check one collective over all types; return how many comparisons there were."""
    collective, count = globals()[name], 0
    reduces = collective in REDUCTIONS
    for mode in ("eager", "late", "random"):
        simulated_device.set_mode(mode, seed=rank)
        for dtype in FLOATS + INTEGERS + ([] if reduces else [torch.bool, torch.int16]):
            for op in OPS if reduces else [None]:
                for async_op in (True, False):
                    results = {}
                    # gloo moves neither of these types
                    oracle = torch.uint8 if dtype == torch.bool else dtype
                    oracle = torch.int32 if dtype == torch.int16 else oracle
                    for device, kind in (("cpu", oracle), ("sim", dtype)):
                        written, work = collective(rank, kind, op, device=device, async_op=async_op)
                        if work is not None:
                            work.wait()
                        results[device] = [tensor.cpu().to(dtype) for tensor in written]
                    for found, expected in zip(results["sim"], results["cpu"], strict=True):
                        assert torch.equal(found, expected), (mode, dtype, op, found, expected)
                        count += 1
    assert simulated_device.take_unordered_uses() == []
    return count


@pytest.mark.parametrize("collective", REDUCTIONS + MOVES, ids=lambda c: c.__name__)
def test_collectives_give_what_gloo_gives(collective: Callable, ranks: Ranks):
    assert max(ranks.run(compare_with_gloo, collective.__name__)) >= 3 * 7 * 2


def uneven(rank: int) -> list[list[float]]:
    own = torch.full((2 + rank,), float(rank), device=SIM)
    results = [torch.empty(2, device=SIM), torch.empty(3, device=SIM)]
    dist.all_gather(results, own)
    pieces = [torch.full((2,), rank + 1.0, device=SIM), torch.full((3,), rank + 2.0, device=SIM)]
    reduced = torch.empty(2 + rank, device=SIM)
    dist.reduce_scatter(reduced, pieces)
    return [tensor.tolist() for tensor in (*results, reduced)]


def test_pieces_of_a_list_may_have_different_sizes(ranks: Ranks):
    assert ranks.run(uneven) == [
        [[0, 0], [1, 1, 1], [3, 3]],
        [[0, 0], [1, 1, 1], [5, 5, 5]],
    ]


def means(rank: int) -> list[list[float]]:
    floats = torch.tensor([1.0, 2.0], device=SIM) * (rank + 1)
    integers = torch.tensor([3, -3], device=SIM) * (rank * 2)
    scaled = torch.tensor([1.0, 2.0], device=SIM) * (rank + 1)
    dist.all_reduce(floats, ReduceOp.AVG)
    dist.all_reduce(integers, ReduceOp.AVG)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    return [floats.tolist(), integers.tolist(), scaled.tolist()]


def test_means_and_factors_that_gloo_does_not_have(ranks: Ranks):
    assert ranks.run(means) == [[[1.5, 3.0], [3, -3], [1.5, 3.0]]] * 2


def refusals(rank: int) -> list[str]:
    errors = []
    for inputs, output in ((torch.ones(2, device=SIM), torch.ones(5, device=SIM)),):
        try:
            group()._allgather_base(output, inputs)
        except ValueError as error:
            errors.append(str(error).splitlines()[0])
    try:
        dist.all_reduce(torch.ones(4, 4, device=SIM)[:, 1])
    except RuntimeError as error:
        errors.append(str(error).splitlines()[0])
    return errors


def test_sizes_and_strides_that_nccl_refuses(ranks: Ranks):
    expected = "output tensor size must be equal to world_size times input tensor size"
    assert ranks.run(refusals) == [[expected, "Tensors must be contiguous"]] * 2


# ---- the host


def host_goes_on(rank: int) -> tuple[dict[str, int], list[float]]:
    """Rank 1 launches a second after rank 0, whose host must not wait meanwhile."""
    tensor = torch.ones(4, device=SIM)
    simulated_device.take_host_waits()
    if rank == 1:
        time.sleep(1)
    start = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    result = tensor * 2
    dist.all_reduce(result)
    assert time.perf_counter() - start < 0.7
    waits = simulated_device.take_host_waits()
    return waits, result.tolist()


def test_waiting_for_a_collective_does_not_block_the_host(ranks: Ranks):
    assert ranks.run(host_goes_on) == [({}, [8.0] * 4)] * 2


def idle_host(rank: int) -> list[float]:
    """Rank 0's host does something else while rank 1 needs the collective."""
    tensor = torch.full((4,), rank + 1.0, device=SIM)
    dist.all_reduce(tensor)
    if rank == 0:
        dist.barrier(group=group(), device_ids=None)  # of gloo: rank 1 comes there later
        return tensor.tolist()
    found = tensor.tolist()
    dist.barrier()
    return found


def test_a_device_goes_on_while_its_host_is_elsewhere(ranks: Ranks):
    assert ranks.run(idle_host) == [[3.0] * 4] * 2


def eager_dependents(rank: int) -> list[float]:
    """In eager mode, what waits for a collective runs when that ends, and nobody asks for it."""
    simulated_device.set_mode("eager")
    tensor = torch.full((4,), rank + 1.0, device=SIM)
    tensor = tensor * 1  # the first product imports torch's meta kernels, which takes a second
    if rank == 1:
        time.sleep(0.5)
    dist.all_reduce(tensor)
    result = tensor * 2
    stream, start = torch.accelerator.current_stream(), time.perf_counter()
    while not stream.query():
        assert time.perf_counter() - start < 10
        time.sleep(0.01)
    return result.tolist()


def test_eager_tasks_run_as_soon_as_their_collective_has_ended(ranks: Ranks):
    assert ranks.run(eager_dependents) == [[6.0] * 4] * 2


def blocking_barrier(rank: int) -> dict[str, int]:
    simulated_device.take_host_waits()
    backend().barrier().wait()
    work = backend().allreduce([torch.ones(2, device=SIM)])
    work.wait(timedelta(seconds=30))
    assert work.is_completed()
    return simulated_device.take_host_waits()


def test_barriers_and_timed_waits_block_the_host(ranks: Ranks):
    assert ranks.run(blocking_barrier) == [{"barrier": 1, "work.wait(timeout)": 1}] * 2


def without_wait(rank: int) -> list[Any]:
    """Nobody waits for the collective, nor keeps its tensor."""
    tensor = torch.full((1000,), rank + 1.0, device=SIM)
    address, result = tensor.data_ptr(), torch.zeros(1000, device=SIM)
    group()._allgather_base(torch.empty(2000, device=SIM), tensor)
    del tensor
    held = torch.empty(1000, device=SIM)
    is_held = held.data_ptr() != address
    time.sleep(0.3)  # the collective ends meanwhile
    torch.empty(1000, device=SIM)
    found = simulated_device.take_unordered_uses()
    dist.all_reduce(result)
    return [is_held, found]


def test_a_launch_keeps_its_tensors_until_it_has_ended(ranks: Ranks):
    assert ranks.run(without_wait) == [[True, []]] * 2


def futures(rank: int) -> list[float]:
    tensor = torch.full((4,), rank + 1.0, device=SIM)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return doubled.wait().tolist()


def test_futures_run_their_callbacks_after_the_collective(ranks: Ranks):
    assert ranks.run(futures) == [[6.0] * 4] * 2


# ---- pairing


def crossed_order(rank: int) -> list[list[float]]:
    """Two collectives of equal kind and sizes, launched in another order on each rank."""
    first, second = torch.full((2,), 1.0, device=SIM), torch.full((2,), 100.0, device=SIM)
    for tensor in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(tensor)
    return [first.tolist(), second.tolist()]


def test_equal_sizes_pair_without_a_word(ranks: Ranks):
    assert ranks.run(crossed_order) == [[[101.0] * 2, [101.0] * 2]] * 2


def other_dtype(rank: int) -> list[int]:
    tensor = torch.ones(2, dtype=torch.int32 if rank else torch.float32, device=SIM)
    dist.broadcast(tensor, 0)
    return tensor.view(torch.int32).tolist()


def test_equal_bytes_of_another_type_pair_without_a_word(ranks: Ranks):
    one = torch.ones(1).view(torch.int32).item()
    assert ranks.run(other_dtype) == [[one, one]] * 2


def all_reduce_of(size: int) -> dist.Work:
    return dist.all_reduce(torch.ones(size, device=SIM), async_op=True)


def mismatched_sizes(rank: int) -> dist.Work:
    return all_reduce_of(2 + rank)


def mismatched_kinds(rank: int) -> dist.Work:
    if rank == 0:
        return all_reduce_of(4)
    return dist.broadcast(torch.ones(4, device=SIM), 0, async_op=True)


def mismatched_roots(rank: int) -> dist.Work:
    return dist.broadcast(torch.ones(4, device=SIM), rank, async_op=True)


def mismatched_elements(rank: int) -> dist.Work:
    dtype = torch.float64 if rank else torch.float32
    return dist.all_reduce(torch.ones(4 // (rank + 1), dtype=dtype, device=SIM), async_op=True)


def mismatched_splits(rank: int) -> dist.Work:
    sent, received = torch.ones(4, device=SIM), torch.empty(4, device=SIM)
    splits = [1, 3] if rank else [2, 2]
    return dist.all_to_all_single(received, sent, splits, splits, async_op=True)


def mismatched_messages(rank: int) -> dist.Work:
    if rank == 0:
        return dist.isend(torch.ones(4, device=SIM), 1)
    return dist.irecv(torch.ones(5, device=SIM), 0)


def both_receive(rank: int) -> dist.Work:
    return dist.irecv(torch.ones(4, device=SIM), 1 - rank)


MISMATCHES = [
    *(mismatched_sizes, mismatched_kinds, mismatched_roots, mismatched_elements),
    *(mismatched_splits, mismatched_messages, both_receive),
]


def hang(rank: int, name: str, how: str) -> dict[str, Any]:
    """Launch what does not fit; return what the host still can do, and how its waits end."""
    seen: dict[str, Any] = {}
    work = globals()[name](rank)
    unrelated = torch.Stream(SIM)
    with unrelated:
        seen["another stream"] = torch.ones(3, device=SIM).tolist()
    start = time.perf_counter()
    work.wait()  # orders streams; does not block
    after = torch.ones(3, device=SIM) + 1
    event = torch.Event(SIM)
    event.record()
    seen["host goes on"] = time.perf_counter() - start < 0.3
    try:
        work.wait(timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        seen["timeout"] = "after 500 ms" in str(error)
    seen["is hung"] = not event.query() and not work.is_completed()
    ended: list[str] = []

    def read() -> None:
        after.tolist()
        ended.append("quietly")

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.3)
    seen["host wait blocks"] = thread.is_alive()
    dist.barrier()  # of gloo: no rank ends its group before the other has looked
    getattr(backend(), how)()
    thread.join(10)
    seen["ended"] = ended
    try:
        work.wait(timedelta(seconds=5))
    except dist.DistBackendError as error:
        seen["a wait for it"] = str(error)
    seen["succeeded"] = work.is_success()
    try:
        dist.all_reduce(torch.ones(3, device=SIM))
    except dist.DistBackendError as error:
        seen["later launches"] = str(error).splitlines()[0]
    return seen


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda m: m.__name__)
def test_what_does_not_fit_never_ends_until_the_group_is_aborted(mismatch: Callable, ranks: Ranks):
    for seen in ranks.run(hang, mismatch.__name__, "abort"):
        assert seen["another stream"] == [1, 1, 1]
        assert seen["host goes on"]
        assert seen["timeout"]
        assert seen["is hung"]
        assert seen["host wait blocks"]
        assert seen["ended"] == ["quietly"]
        assert "simccl: the group was aborted" in seen["a wait for it"]
        assert not seen["succeeded"]
        assert seen["later launches"] == "simccl: the group was aborted"


def test_shutting_down_a_group_ends_its_waits(ranks: Ranks):
    for seen in ranks.run(hang, "mismatched_sizes", "shutdown"):
        assert seen["host wait blocks"]
        assert seen["ended"] == ["quietly"]


def launched_by_one(rank: int) -> str:
    """Rank 1 never launches: rank 0 waits, and its abort need not wait for gloo."""
    message = ""
    if rank == 0:
        work = all_reduce_of(3)
        time.sleep(0.2)
        assert not work.is_completed()
        start = time.perf_counter()
        backend().abort()
        try:
            work.wait(timedelta(seconds=5))
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        assert time.perf_counter() - start < 2
    dist.barrier()
    return message


def test_an_abort_does_not_wait_for_the_peer(ranks: Ranks):
    assert ranks.run(launched_by_one) == [
        "simccl: the group was aborted",
        "",
    ]


def late_destroy(rank: int) -> list[float]:
    """Launch what nobody waits for before the group is destroyed: shutdown() completes it."""
    tensor = torch.full((3,), rank + 1.0, device=SIM)
    dist.all_reduce(tensor)
    backend().shutdown()
    return tensor.tolist()


def test_shutting_down_completes_what_all_ranks_launched(ranks: Ranks):
    assert ranks.run(late_destroy) == [[3.0] * 3] * 2


# ---- coalescing


def counted(function: Callable[[], Any]) -> dict[str, int]:
    before = simulated_device.launches()
    function()
    after = simulated_device.launches()
    names = ("record", "wait")
    return {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0) and name not in names
    }


def coalesced(rank: int) -> list[Any]:
    tensors = [torch.full((size,), rank + 1.0, device=SIM) for size in (2, 3, 4)]
    gathered = [torch.empty(2 * tensor.numel(), device=SIM) for tensor in tensors]
    scattered = [torch.empty(2, device=SIM) for _ in tensors]
    wide = [torch.full((4,), rank + float(i), device=SIM) for i in range(3)]

    def wait(work: dist.Work) -> None:
        work.wait()

    found = [
        counted(lambda: wait(group().allgather_into_tensor_coalesced(gathered, tensors))),
        counted(lambda: wait(group().reduce_scatter_tensor_coalesced(scattered, wide))),
        counted(lambda: wait(group().allreduce_coalesced(tensors))),
    ]
    return [
        *found,
        *([each.tolist() for each in list_] for list_ in (gathered, scattered, tensors)),
    ]


def test_a_coalesced_call_is_one_launch(ranks: Ranks):
    for found in ranks.run(coalesced):
        assert found[:3] == [
            {"all_gather_single": 1},
            {"reduce_scatter_single": 1},
            {"all_reduce": 1},
        ]
        assert found[3] == [[1] * n + [2] * n for n in (2, 3, 4)]
        assert found[4] == [[1.0] * 2, [3.0] * 2, [5.0] * 2]
        assert found[5] == [[3.0] * n for n in (2, 3, 4)]


def coalescing_manager(rank: int, with_device: bool) -> list[Any]:
    tensors = [torch.full((size,), rank + 1.0, device=SIM) for size in (2, 3)]
    others = [torch.full((2,), rank + 5.0, device=SIM) for _ in range(2)]
    manager = dist.distributed_c10d._coalescing_manager

    def reduce_all() -> None:
        with manager(device=SIM if with_device else None, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()

    def broadcast_all() -> None:
        with manager(device=SIM):
            for root, tensor in enumerate(others):
                dist.broadcast(tensor, root)

    found = [counted(reduce_all), counted(broadcast_all)]
    return [*found, [tensor.tolist() for tensor in tensors + others]]


@pytest.mark.parametrize("with_device", [True, False])
def test_the_coalescing_manager_makes_one_launch(with_device: bool, ranks: Ranks):
    for found in ranks.run(coalescing_manager, with_device):
        assert found[:2] == [{"all_reduce": 1}, {"broadcast": 1}]
        assert found[2] == [[3.0] * 2, [3.0] * 3, [5.0] * 2, [6.0] * 2]


def mismatched_part(rank: int) -> bool:
    """Only the second part does not fit; the launch as a whole never ends."""
    sizes = (2, 3) if rank else (2, 4)
    work = group().allreduce_coalesced([torch.ones(size, device=SIM) for size in sizes])
    try:
        work.wait(timedelta(seconds=0.3))
    except dist.DistBackendError:
        return True
    finally:
        dist.barrier()
        backend().abort()
    return False


def test_each_part_of_a_coalesced_launch_must_fit(ranks: Ranks):
    assert ranks.run(mismatched_part) == [True, True]


# ---- groups


def two_groups(rank: int) -> list[float]:
    """Groups have streams of their own: order between them is free."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.full((2,), 10.0**i * (rank + 1), device=SIM) for i in range(2)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return [tensor[0].item() for tensor in tensors]


def test_groups_pair_independently(ranks: Ranks):
    assert ranks.run(two_groups) == [[3.0, 30.0]] * 2


def group_of_one(rank: int) -> list[Any]:
    solo = [dist.new_group([i]) for i in range(2)][rank]
    tensor, gathered = torch.full((2,), 3.0, device=SIM), torch.empty(2, device=SIM)
    dist.all_reduce(tensor, ReduceOp.AVG, group=solo)
    dist.all_gather([gathered], tensor, group=solo)
    dist.broadcast(tensor, rank, group=solo)
    received = torch.empty(2, device=SIM)
    dist.all_to_all_single(received, tensor, group=solo)
    return [tensor.tolist(), gathered.tolist(), received.tolist()]


def test_a_group_of_one_needs_nobody(ranks: Ranks):
    assert ranks.run(group_of_one) == [[[3.0, 3.0]] * 3] * 2
