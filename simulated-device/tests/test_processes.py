"""How processes begin and end: with queued work, in a fork, without the extension."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import simulated_device
from simulated_device import build

pytestmark = pytest.mark.drawn(2)

HERE = Path(simulated_device.__file__).parent.parent


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE), **changes}


def run(program: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import os, sys, torch, simulated_device\n" + program],
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=60,
        check=False,
    )


QUEUED = "t = torch.ones(1000, device='sim')\nfor _ in range(100): t = t + 1\n"


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError", "os._exit(3)"])
def test_a_process_with_queued_tasks_ends(ending: str):
    ran = run(QUEUED + ending)
    assert ran.returncode == {"": 0, "raise ValueError": 1}.get(ending, 3), ran.stderr
    assert ("Error" in ran.stderr) == (ending == "raise ValueError")


UNORDERED = {
    "tasks": "side = torch.Stream('sim'); t = torch.ones(9, device='sim') * 2\nwith side: t + 1\n",
    "the host": (
        "host = torch.zeros(4096, pin_memory=True)\n"
        "host.copy_(torch.ones(4096, device='sim'), non_blocking=True); host.sum()\n"
    ),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_a_synchronization_raises_for_unordered_uses_where_that_is_asked_for(name: str):
    program = UNORDERED[name] + "torch.accelerator.synchronize(); torch.accelerator.synchronize()"
    assert run(program).returncode == 0
    ran = run(program, SIM_UNORDERED="raise")
    assert ran.returncode == 1
    assert "unordered uses, the first: " in ran.stderr


# ---- ranks

BOTH = """
import torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(store, 2)
dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=rank, world_size=2)
"""

ENDINGS = {
    "nothing was waited for": "dist.all_reduce(torch.ones(3, device='sim'))",
    "a collective that fits": (
        "t = torch.ones(3, device='sim'); dist.all_reduce(t); t = t + 1; dist.barrier()"
    ),
    "a collective that does not fit": (
        "t = torch.ones(3 + rank, device='sim'); dist.all_reduce(t); t.add_(1)\n"
        "import time; time.sleep(0.5); dist.barrier()"
    ),
    "a collective of one rank": (
        "if rank: dist.all_reduce(torch.ones(3, device='sim'))\n"
        "import time; time.sleep(0.5); dist.barrier()"
    ),
    "a thread waits for ever": (
        "import threading, time\n"
        "t = torch.ones(3 + rank, device='sim'); dist.all_reduce(t)\n"
        "threading.Thread(target=t.tolist, daemon=True).start(); time.sleep(0.5); dist.barrier()"
    ),
    "destroyed with a collective that does not fit": (
        "dist.all_reduce(torch.ones(3 + rank, device='sim')); dist.destroy_process_group()"
    ),
}


def run_ranks(program: str) -> list[str]:
    """Run a program on two ranks; return what each wrote. Both must end with 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), f"{folder}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            for rank in range(2)
        ]
        try:
            written = [process.communicate(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
    errors = "\n".join(error for _, error in written)
    assert [process.returncode for process in processes] == [0, 0], errors
    return [output for output, _ in written]


@pytest.mark.parametrize("name", ENDINGS)
def test_ranks_end_whatever_their_streams_wait_for(name: str):
    start = time.monotonic()
    run_ranks("import os, sys, torch, simulated_device\n" + BOTH + ENDINGS[name])
    assert time.monotonic() - start < 40


def test_a_handler_that_waits_at_exit_gets_an_error():
    program = (
        "import atexit\n"
        "def handler():\n"
        "    try: tensor.tolist()\n"
        "    except RuntimeError as error: print(str(error).splitlines()[0])\n"
        "atexit.register(handler)\n"  # it runs after those that are registered later
        "import os, sys, torch, simulated_device\n"
        + BOTH
        + "tensor = torch.ones(3 + rank, device='sim'); dist.all_reduce(tensor); dist.barrier()\n"
    )
    expected = "sim: the process ends; other ranks are no longer waited for\n"
    assert run_ranks(program) == [expected] * 2


# ---- forks


def test_a_forked_child_cannot_use_the_device():
    program = QUEUED + (
        "kept = torch.full((1000,), 7.0, device='sim'); torch.accelerator.synchronize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del kept, t\n"
        "    assert torch.sim._is_in_bad_fork()\n"
        "    assert torch.ones(3).sum() == 3\n"
        "    try: torch.ones(3, device='sim')\n"
        "    except RuntimeError as error:\n"
        "        os._exit(5 if 'forked process' in str(error) else 6)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.waitstatus_to_exitcode(status) == 5, status\n"
        "assert not torch.sim._is_in_bad_fork()\n"
        "assert (kept == 7).all().item() and (t == 101).all().item()\n"
    )
    for mode in ("eager", "late"):
        ran = run(program, SIM_MODE=mode)
        assert ran.returncode == 0, ran.stderr


def test_a_fork_of_a_process_that_did_not_use_the_device_can():
    program = (
        "simulated_device.set_mode('eager')\n"
        "children = []\n"
        "for value in (1., 2.):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        pinned = torch.full((5000,), value).pin_memory()\n"
        "        t = pinned.to('sim', non_blocking=True)\n"
        "        import time; time.sleep(0.3)\n"
        "        os._exit(0 if (t == value).all().item() and (pinned == value).all() else 1)\n"
        "    children.append(child)\n"
        "statuses = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]\n"
        "assert statuses == [0, 0], statuses\n"
    )
    ran = run(program)
    assert ran.returncode == 0, ran.stderr


def test_workers_of_a_data_loader_fork_from_a_busy_process():
    program = QUEUED + (
        "loader = torch.utils.data.DataLoader(torch.arange(20.), batch_size=4, num_workers=2,\n"
        "    multiprocessing_context='fork', pin_memory=True)\n"
        "total = sum(batch.to('sim', non_blocking=True).sum() for batch in loader)\n"
        "assert total.item() == 190, total\n"
    )
    ran = run(program)
    assert ran.returncode == 0, ran.stderr


# ---- environment


def test_the_environment_says_mode_and_number_of_devices():
    program = (
        "assert torch.accelerator.device_count() == 2\n"
        "a, b = torch.arange(4., device='sim:0'), torch.ones(4, device='sim:1')\n"
        "assert torch.accelerator.current_stream().query()\n"
        "with torch.sim.device(1): assert torch.empty(1, device='sim').device.index == 1\n"
        "assert torch.sim.current_device() == 0\n"
        "for mode in ('eager', 'late'):\n"
        "    simulated_device.set_mode(mode)\n"
        "    moved = (a + 1).to('sim:1'); a.add_(0)\n"
        "    assert (moved + b).tolist() == [2, 3, 4, 5]\n"
        "    b.add_(1); b.copy_(a); b.mul_(2); assert b.tolist() == [0, 2, 4, 6]\n"
        "    b.fill_(1); del moved\n"
        "assert torch.accelerator.memory_allocated(torch.device('sim:0')) == 512\n"
        "try: a + b\n"
        "except RuntimeError as error: assert 'at least two devices' in str(error)\n"
        "else: raise AssertionError\n"
        "assert simulated_device.take_unordered_uses() == []\n"
    )
    ran = run(program, SIM_DEVICES="2", SIM_MODE="eager")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("imports", ["torch", "simulated_device", "simulated_device, torch"])
def test_torch_and_the_device_import_each_other(imports: str):
    program = f"import {imports}\nimport torch\nassert torch.ones(3, device='sim').sum() == 3"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


# ---- the default device


def test_a_context_creates_tensors_on_the_device():
    import torch

    with simulated_device.default_device():
        assert torch.ones(3).device.type == "sim"
        assert torch.tensor([1.0]).device.type == "sim"
        assert torch.ones(3, device="cpu").device.type == "cpu"
        assert torch.empty(3, pin_memory=True).is_pinned()
        generator = torch.Generator().manual_seed(3)
        expected = torch.randn(3, generator=torch.Generator().manual_seed(3), device="cpu")
        drawn = torch.randn(3, generator=generator)
        assert drawn.device.type == "sim"
        assert drawn.tolist() == expected.tolist()
        assert torch.nn.Linear(2, 2).weight.device.type == "sim"
    assert torch.ones(3).device.type == "cpu"


def test_a_context_can_be_entered_for_the_life_of_a_process():
    program = (
        "mode = simulated_device.default_device(); mode.__enter__()\n"
        "def later(): return torch.ones(3).device.type\n"
        "assert later() == 'sim'\n"
        "mode.__exit__(None, None, None)\n"
        "assert later() == 'cpu'\n"
        "simulated_device.default_device().__enter__()\n"
        "assert later() == 'sim'\n"
    )
    ran = run(program)
    assert ran.returncode == 0, ran.stderr


# ---- building


def build_in(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulated_device.build", *arguments],
        capture_output=True,
        text=True,
        env=environment(XDG_CACHE_HOME=str(folder), **changes),
        check=False,
    )


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{script}")
    path.chmod(0o755)
    return str(path)


WRITES = (
    "if '--version' not in sys.argv:\n"
    "    out = open(sys.argv[sys.argv.index('-o') + 1], 'w')\n"
    "    for _ in range(4): out.write('half'); out.flush(); time.sleep(0.2)\n"
)


def test_what_is_built_is_found_again(tmp_path: Path):
    compiler = fake_compiler(tmp_path, WRITES)
    first = build_in(tmp_path, CXX=compiler)
    assert (first.returncode, first.stdout[:9]) == (0, "compiled "), first.stderr
    again = build_in(tmp_path, "--if-needed", CXX=compiler)
    assert (again.returncode, again.stdout[:14]) == (0, "already built:")


def test_two_processes_may_build_at_once(tmp_path: Path):
    compiler = fake_compiler(tmp_path, WRITES)
    command = [sys.executable, "-m", "simulated_device.build"]
    settings = environment(XDG_CACHE_HOME=str(tmp_path), CXX=compiler)
    running = [subprocess.Popen(command, env=settings) for _ in range(2)]
    while any(process.poll() is None for process in running):
        for library in tmp_path.glob("simulated-device/*/*.so"):
            assert library.read_text() == "half" * 4
        time.sleep(0.02)
    assert [process.wait() for process in running] == [0, 0]
    assert len(list(tmp_path.glob("simulated-device/*/*"))) == 1


def test_without_a_compiler_if_needed_is_no_error(tmp_path: Path):
    optional = build_in(tmp_path, "--if-needed", CXX="no-such-compiler")
    assert optional.returncode == 0, optional.stderr
    assert len(optional.stdout.splitlines()) == 1
    assert "no C++ compiler" in optional.stdout
    needed = build_in(tmp_path, CXX="no-such-compiler")
    assert needed.returncode == 1
    assert "no C++ compiler" in needed.stderr


def test_a_compiler_that_fails_is_an_error(tmp_path: Path):
    compiler = fake_compiler(tmp_path, "sys.exit('--version' not in sys.argv and 'bad code')\n")
    ran = build_in(tmp_path, "--if-needed", CXX=compiler)
    assert ran.returncode == 1
    assert "bad code" in ran.stderr
    assert not list(tmp_path.glob("simulated-device/*/*"))


def test_an_import_without_the_extension_says_how_to_build_it(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", "import simulated_device"],
        capture_output=True,
        text=True,
        env=environment(XDG_CACHE_HOME=str(tmp_path)),
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        f"ImportError: the simulated device is not built; `{build.COMMAND}` builds it"
    )


def test_the_extension_of_this_process_is_the_one_that_is_found():
    assert build.find_extension() == Path(sys.modules[build.MODULE].__file__ or "")
