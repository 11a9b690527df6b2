"""Where a group comes from, and that it knows its place in the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh
from zero_comm import (
    BACKENDS,
    CommError,
    Group,
    Reduction,
    all_gather_flat,
    all_reduce_flat,
    broadcast_flat,
    init,
    reduce_scatter_flat,
)


def test_alone_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python train.py` works on a laptop as it stands."""
    _forget_torchrun(monkeypatch)
    group = init(backend="gloo")

    assert (group.rank, group.world_size, group.backend.name) == (0, 1, "solo")
    assert group.device == torch.device("cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_job_is_an_error_that_names_the_other_half(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Training alone by accident, once per GPU, looks like success for hours."""
    _forget_torchrun(monkeypatch)
    for name, value in _environment(rank=0, port=1).items():
        if name != missing:
            monkeypatch.setenv(name, value)

    with pytest.raises(CommError, match=rf"WORLD_SIZE=2 is set but {missing} is not; .*torchrun"):
        init()


@pytest.mark.parametrize("is_alone", [True, False])
def test_nccl_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, is_alone: bool) -> None:
    """Alone it was a group on the CPU without a word; in a job, torch's own error far below."""
    _forget_torchrun(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for name, value in _environment(rank=0, port=1).items() if not is_alone else ():
        monkeypatch.setenv(name, value)

    with pytest.raises(
        CommError, match=r"'nccl': expected a device of cuda for each of . local ranks"
    ):
        init(backend="nccl")
    assert not dist.is_initialized()


def _forget_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _environment(rank=0, port=1):
        monkeypatch.delenv(name, raising=False)


def _environment(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


_SCRIPT = """
import torch, torch.distributed as dist
import zero_comm

group = zero_comm.init(backend="gloo", timeout_s=60)
again = zero_comm.init()
out = torch.full((2,), float(group.rank))
zero_comm.all_gather_flat(out, splits=[1, 1], group=group).wait()
print(group.rank, group.world_size, group.backend.name, again.process_group is group.process_group,
      out.tolist(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_init_joins_the_job_that_torchrun_describes(tmp_path: Path) -> None:
    """Its environment is the interface; nothing else is needed on one machine or on many."""
    script = Path(tmp_path, "script.py")
    script.write_text(_SCRIPT)
    # The store stays, as torchrun's does: a port that is free now may be another process's soon.
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    of_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ
            | _environment(rank, store.port)
            | {"GLOO_SOCKET_IFNAME": "lo", **of_agent},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    outputs = [process.communicate(timeout=100)[0] for process in started]

    assert outputs == [f"{rank} 2 gloo True [0.0, 1.0]\n" for rank in range(2)]


@pytest.mark.ranks(4)
def test_a_sub_group_counts_from_zero(group: Group) -> None:
    """Every splits, chunk and source is a position in the group; only torch counts in the job."""
    process_group = dist.new_group([1, 3])
    if group.rank not in (1, 3):
        with pytest.raises(CommError, match=rf"rank {group.rank} of the job is not a member"):
            Group.from_process_group(process_group)
        return
    odd = Group.from_process_group(process_group)
    out, source = torch.full((2,), 10.0 * group.rank), torch.tensor([float(group.rank)])
    assert odd.rank == (group.rank == 3)
    assert [odd.global_rank(rank) for rank in range(odd.world_size)] == [1, 3]
    assert all_gather_flat(out, splits=[1, 1], group=odd).wait().tolist() == [10.0, 30.0]
    assert broadcast_flat(source, src=1, group=odd).wait() == 3.0


@pytest.mark.ranks(4)
def test_an_axis_of_a_mesh_is_a_group(group: Group) -> None:
    """Replicate and shard axes come from torch's own meshes."""
    names = ("replica", "shard")
    mesh = init_device_mesh(group.device.type, (2, 2), mesh_dim_names=names)
    row, column = divmod(group.rank, 2)
    for axis, rank, members in (
        ("shard", column, [2.0 * row, 2.0 * row + 1]),
        ("replica", row, [float(column), column + 2.0]),
    ):
        of_axis = Group.from_mesh(mesh, axis)
        out = torch.full((2,), float(group.rank))
        all_gather_flat(out, splits=[1, 1], group=of_axis).wait()
        assert (of_axis.rank, out.tolist()) == (rank, members)


def test_a_mesh_of_one_axis_needs_no_name(group: Group) -> None:
    """There is only one group it can mean."""
    of_mesh = Group.from_mesh(init_device_mesh(group.device.type, (2,)))
    assert (of_mesh.rank, of_mesh.world_size) == (group.rank, 2)


def test_a_group_needs_torch_s() -> None:
    """Before init_process_group there is nothing to wrap, and torch's own error does not say so."""
    with pytest.raises(CommError, match=r"is not; call zero_comm.init\(\), or use Group.solo\(\)"):
        Group.from_process_group()


@pytest.mark.parametrize("names", [None, "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_backends_by_kind_of_device(monkeypatch, tmp_path: Path, names: str | None) -> None:
    """`init_process_group()` without a backend has one for each kind that torch finds."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    dist.init_process_group(names, init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        group = Group.from_process_group()
        assert (group.backend.name, group.device) == ("gloo", torch.device("cpu"))
        with pytest.raises(CommError, match="for tensors on xpu, got one with cpu:gloo"):
            Group.from_process_group(device="xpu")
    finally:
        dist.destroy_process_group()


def test_a_backend_without_a_row_has_its_own_collectives(group: Group) -> None:
    """What torch takes for a kind of device is taken here: xccl and hccl are refused by no name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=group.rank, world_size=2)

    fake = Group.from_process_group()
    assert fake.backend.name == "fake"
    assert not fake.backend.composes_from_peers
    all_gather_flat(torch.ones(6, device=fake.device), splits=[3, 3], group=fake).wait()


# ---- What a backend can do ----


@pytest.mark.cpu_only("gloo is the CPU's")
def test_gloo_can_do_what_its_row_says(group: Group) -> None:
    """Messages are matched by tag and not by order, which compositions rely on."""
    peer, out = 1 - group.rank, [torch.zeros(1), torch.zeros(1)]
    works = [dist.irecv(out[tag], peer, tag=tag) for tag in (0, 1)]
    works += [dist.isend(torch.full((1,), float(tag)), peer, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    assert ([each.item() for each in out] == [0.0, 1.0]) >= BACKENDS["gloo"].composes_from_peers


def test_torch_s_own_collectives_are_found_under_either_name(group: Group) -> None:
    """Torch 2.13 renames them and warns: `all_gather_single` was `all_gather_into_tensor`.

    As on nccl, which composes nothing; of gloo's own, a sum is what both know.
    """
    group = evolve(group, backend=evolve(BACKENDS["nccl"], name="gloo"))
    gathered, mine = (torch.full((2,), float(group.rank)) for _ in range(2))
    all_gather_flat(gathered, splits=[1, 1], group=group).wait()
    scattered = reduce_scatter_flat(mine, splits=[1, 1], group=group, op=Reduction.SUM).wait()
    assert gathered.tolist() == [0.0, 1.0]
    assert scattered.tolist() == [1.0]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_choice_can_be_asked_about(name: str) -> None:
    """A fallback that cannot say why is a slow run nobody understands."""
    assert BACKENDS[name].name == name
    assert BACKENDS[name].reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_solo_group_on_a_gpu_takes_its_tensors() -> None:
    """`cuda` and `cuda:0` are one device and two values."""
    group = Group.solo("cuda")
    buffer = torch.ones(3, device="cuda")

    assert all_reduce_flat(buffer, group=group, op=Reduction.SUM).wait().tolist() == [1, 1, 1]
