"""What a job leaves on disk: nothing, and if it was killed, nothing for long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import evolve
from zero_offload import DiskStore
from zero_offload.testing import SYSTEM

JOB = """
import sys, torch
from zero_offload import DiskStore
store = DiskStore(sys.argv[1])
store.write("x", torch.zeros(2**22)).result()
print(store.folder, flush=True)
while len(sys.argv) > 2:
    store.write("x", torch.zeros(2**22)).result()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job that writes without end, and its folder."""
    command = [sys.executable, "-c", JOB, str(tmp_path), "writes on"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_the_next_job_removes_what_a_killed_one_left(
    tmp_path: Path, job: tuple[subprocess.Popen[str], Path]
) -> None:
    """Kill -9 runs no exit handler, and terabytes would stay; a live job's must not be touched."""
    process, left = job
    with DiskStore(tmp_path) as store:
        store.write("x", torch.ones(3)).result()

        assert list(left.iterdir())  # it lives
        assert store.folder != left

    process.kill()
    process.wait()
    assert list(left.iterdir())

    with DiskStore(tmp_path) as store:
        store.write("x", torch.ones(3)).result()

        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == [
            store.folder,
            store.folder.with_name(f"{store.folder.name}.lock"),
        ]

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_ends_leaves_nothing(tmp_path: Path) -> None:
    """Also one that never called close."""
    command = [sys.executable, "-c", JOB, str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.startswith(str(tmp_path))
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    """Weights and data are private, and disks for swapping are shared."""
    with DiskStore(tmp_path) as store:
        store.write("x", torch.ones(3)).result()

        assert store.folder.stat().st_mode & 0o777 == 0o700
        for path in (*store.folder.iterdir(), *tmp_path.glob("*.lock")):
            assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_was_taken_for_a_leftover_is_made_anew(tmp_path: Path) -> None:
    """Another job may look for leftovers after a lock was made and before it is taken."""
    others = iter([1])

    def flock(fd: int, how: int) -> None:
        if next(others, None):
            DiskStore(tmp_path).close()
        SYSTEM.flock(fd, how)

    with DiskStore(tmp_path, system=evolve(SYSTEM, flock=flock)) as store:
        assert store.folder.with_name(f"{store.folder.name}.lock").exists()
        DiskStore(tmp_path).close()

        assert store.folder.exists()


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    """The folder is the user's; others keep things there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (tmp_path / "zero-offload-without-lock").mkdir()
    (tmp_path / "zero-offload-link.lock").symlink_to(elsewhere / "precious")
    (tmp_path / "zero-offload-link").symlink_to(elsewhere)
    (tmp_path / "zero-offload-folder.lock").mkdir()
    (tmp_path / "zero-offload-linked.lock").write_text("")  # a dead job's lock, a link for a folder
    (tmp_path / "zero-offload-linked").symlink_to(elsewhere)

    before = sorted(tmp_path.iterdir())

    DiskStore(tmp_path).close()

    assert sorted(tmp_path.iterdir()) == before
    assert (elsewhere / "precious").read_text() == "x"
    assert (tmp_path / "zero-offload-without-lock").exists()


@pytest.mark.slow
def test_a_forked_child_has_no_store_and_removes_none(tmp_path: Path) -> None:
    """A data loader's worker inherits the object; its end must not be that of the files."""
    code = f"""
import os, sys, torch
from zero_offload import DiskStore, StoreError
store = DiskStore({str(tmp_path)!r})
store.write("x", torch.ones(3)).result()
child = os.fork()
if not child:
    try:
        store.read("x", torch.ones(3)).result()
    except StoreError as error:
        print("child:", error, flush=True)
    store.close()
    sys.exit(0)
os.waitpid(child, 0)
print(store.read("x", torch.zeros(3)).result().tolist())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "child: this DiskStore belongs to process" in done.stdout
    assert "[1.0, 1.0, 1.0]" in done.stdout
    assert list(tmp_path.iterdir()) == []
