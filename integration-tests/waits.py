"""Take away one wait for a device at a time: does a test see it?

`hatch run waits`, or with parts of their names below, changes a copy of the packages, in which that
call is missing, and runs the test that is to see it on the simulated device. With `--all` it is all
of `test_waits.py`, for waits that are new.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from attrs import frozen

ROOT: Final = Path(__file__).resolve().parent.parent
_CALLS: Final = {"wait_stream", "wait_event", "record_stream", "synchronize", "record_event"}
_ALSO: Final = {"query", "record"}  # of events, and so written
_TIMEOUT_S: Final = 120


@frozen
class Wait:
    """A call that orders streams, or the host, or says where a stream is."""

    path: str  # below packages/
    where: str  # qualified name of the function
    method: str
    lines: tuple[int, int]
    columns: tuple[int, int]

    @property
    def key(self) -> str:
        """Its name in the tables below."""
        return f"{'/'.join(self.path.split('/')[2:])} {self.where}: {self.method}"

    def without(self, source: str) -> str:
        """Return the module in which it is missing."""
        lines = source.encode().splitlines(keepends=True)
        first, last = (line - 1 for line in self.lines)
        start, stop = self.columns
        # An event that is new was never recorded, and nobody waits for it.
        is_event = self.method == "record_event"
        instead = b"torch.Event(torch.accelerator.current_accelerator())" if is_event else b"True"
        lines[first : last + 1] = [lines[first][:start] + instead + lines[last][stop:]]
        return b"".join(lines).decode()


def find() -> list[Wait]:
    """Return all waits of the packages, but those that tests and drivers of CUDA's own make."""
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        tree = ast.parse(path.read_text())
        relative = str(path.relative_to(ROOT / "packages"))
        if "/testing/" not in relative:
            _find(tree, relative, [], found)
    return found


def _find(node: ast.AST, path: str, where: list[str], found: list[Wait]) -> None:
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef)
        _find(child, path, [*where, child.name] if is_named else where, found)
        if not isinstance(child, ast.Call) or not isinstance(child.func, ast.Attribute):
            continue
        name, of = child.func.attr, ast.unparse(child.func.value)
        of_event = of.rstrip("])").endswith(("event", "_is_ready", "arrived", "end", "_last_copy"))
        of_work = name == "wait" and of.endswith("work")
        if name in _CALLS or (name in _ALSO and of_event) or of_work:
            assert child.end_lineno is not None and child.end_col_offset is not None
            found.append(
                Wait(
                    path,
                    ".".join(where),
                    name,
                    (child.lineno, child.end_lineno),
                    (child.col_offset, child.end_col_offset),
                )
            )


# By test of `test_waits.py`: the waits that it must see.
SEES: Final[dict[str, list[str]]] = {
    "test_inputs_that_are_kept_are_waited_for": [
        "zero_ckpt/inputs/packed.py PinnedHost._copy: wait_stream",
        "zero_ckpt/inputs/packed.py PinnedHost._copy: record_event",
        "zero_ckpt/inputs/packed.py PinnedHost._copy: wait_event",
        "zero_ckpt/inputs/packed.py PackedSaver._take_slot: wait_stream",
    ],
    "test_collectives_are_waited_for": [
        "zero_comm/handle.py Message._wait: wait",
    ],
    "test_a_save_in_the_background_is_waited_for": [
        "zero_engine/checkpoint/background.py Copying.follow: record",
        "zero_engine/checkpoint/background.py Copying._copy: wait_event",
        "zero_engine/checkpoint/background.py Copying._copy: synchronize",
        "zero_engine/checkpoint/background.py HostSnapshot.capture: synchronize",
    ],
    "test_whether_a_step_was_applied_is_waited_for": [
        "zero_engine/engine/loss_scale.py PendingOverflow.of: record",
        "zero_engine/engine/loss_scale.py PendingOverflow.resolve: synchronize",
    ],
    "test_page_locked_memory_is_given_back_after_the_copies_of_its_device": [
        "zero_offload/memory/arena.py _drop: synchronize",
    ],
    "test_what_rests_on_the_host_is_waited_for": [
        "zero_offload/memory/copies.py copy_beside: wait_stream",
        "zero_offload/memory/copies.py copy_beside: record",
        "zero_offload/residence/shards.py OffloadedShards._take: query",
        "zero_offload/residence/shards.py OffloadedShards._take: synchronize",
        "zero_offload/residence/shards.py _let_wait: wait_event",
        "zero_offload/state/gradients.py HostGradients._land: synchronize",
        "zero_offload/state/staging.py Staging.wait: synchronize",
        "zero_offload/state/staging.py Staging.end: record",
        "zero_offload/state/staging.py Staging._wait_for_sent: synchronize",
    ],
    "test_states_that_are_offloaded_are_waited_for": [
        "zero_offload/residence/backup.py HostBackup.write: record_stream",
    ],
    "test_a_delayed_update_waits_and_is_waited_for": [
        "zero_offload/residence/delayed.py DelayedState._begin: wait_stream",
        "zero_offload/residence/delayed.py DelayedState._step: synchronize",
    ],
    "test_the_host_opens_a_shard_after_what_the_device_wrote": [
        "zero_offload/residence/shards.py OffloadedShards.write: record_event",
    ],
    "test_memory_of_a_copy_that_nobody_waits_for_is_not_used_again": [
        "zero_offload/memory/copies.py copy_beside: record_stream",
    ],
    "test_a_forward_before_the_step_computes_with_what_was_before": [
        "zero_offload/residence/shards.py OffloadedShards.open: synchronize",
    ],
}
# By reason: calls without which all values are right.
NO_ORDER: Final[dict[str, list[str]]] = {
    "an option, which test_default.py of zero-ckpt sees": [
        "zero_ckpt/frame.py _wait: synchronize",
    ],
    "of times": [
        "zero_ckpt/profile.py _TimeSpan.is_over: query",
        "zero_ckpt/profile.py _TimeSpan.whole_s: synchronize",
        "zero_ckpt/profile.py Profile._moment: record",
        "zero_engine/observe/timeline.py Clock.__attrs_post_init__: synchronize",
        "zero_engine/observe/timeline.py Clock._now: record",
        "zero_engine/observe/timeline.py Clock.pop_ranges: synchronize",
    ],
    "whether a device makes progress, asked by a thread": [
        "zero_comm/order.py OrderWatch._stuck_since: query",
        "zero_comm/order.py OrderWatch._stuck_since: record_event",
    ],
    "of messages that nobody waits for, in a thread": [
        "zero_comm/handle.py _outlive: wait",
    ],
    "an end of gloo's connections": [
        "zero_comm/circles.py break_connections: wait",
    ],
    "a function of DeepSpeed's, as it is": [
        "zero_deepspeed/accelerator.py Accelerator.synchronize: synchronize",
    ],
    "of CUDA's own registration; as that of _drop": [
        "zero_offload/memory/arena.py _unregister: synchronize",
    ],
    "else the host waits for it, in place of a thread": [
        "zero_offload/residence/backup.py HostBackup.close: query",
        "zero_offload/residence/backup.py HostBackup._copy: record",
    ],
}


def _run(copy: Path, wait: Wait, tests: list[str]) -> str | None:
    """Return the first test that sees that a wait is missing in this copy of the packages."""
    module = copy / "packages" / wait.path
    source = module.read_text()
    module.write_text(wait.without(source))
    folders = [ROOT / "simulated-device", *sorted((copy / "packages").glob("*/src"))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SIM_DEVICES": "2",
        "SIM_UNORDERED": "raise",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--device", "sim", "--tb=no", *tests]
    try:
        ran = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    finally:
        module.write_text(source)
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ran.returncode not in (0, 1):
        raise SystemExit(
            f"{wait.key}: pytest ended with {ran.returncode}\n{ran.stdout}{ran.stderr}"
        )
    return failed[0].partition("::")[2] if failed else None


def main() -> None:
    """Try all waits, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="of the names of waits")
    parser.add_argument("--all", action="store_true", help="run all tests, whatever the table says")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    seen_by = {key: test for test, keys in SEES.items() for key in keys}
    chosen = [
        wait
        for wait in find()
        if not given.parts or any(part in wait.key for part in given.parts)
        if given.all or wait.key in seen_by
    ]
    copies: SimpleQueue[Path] = SimpleQueue()
    unseen = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.workers) as pool:
        for number in range(given.workers):
            copy = Path(scratch, str(number))
            shutil.copytree(ROOT / "packages", copy / "packages")
            copies.put(copy)

        def try_without(wait: Wait) -> tuple[Wait, str | None]:
            here = "integration-tests/test_waits.py"
            tests = [here, "-k", "not table"] if given.all else [f"{here}::{seen_by[wait.key]}"]
            copy = copies.get()
            try:
                return wait, _run(copy, wait, tests)
            finally:
                copies.put(copy)

        for wait, by in pool.map(try_without, chosen):
            print(f"{'seen' if by else 'NOT SEEN':8}  {wait.key}  {by or ''}", flush=True)
            unseen += [] if by else [wait]
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} waits are seen when they are missing")
    sys.exit(bool(unseen))


if __name__ == "__main__":
    main()
