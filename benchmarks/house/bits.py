"""The gate of bits: the fixed commit and the tree train alike, in every bit and every count.

    python benchmarks/house/bits.py                     # some minutes on two cores
    python benchmarks/house/bits.py --only "stage 3" --verbose
    python benchmarks/house/bits.py --reference FOLDER  # a worktree that is there

Exits with 1 where anything differs. What the fixed commit gave is kept beside its worktree, and
used again as long as these scripts stay as they are; `--afresh` runs it anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from reference import (
    ROOT,
    build_native,
    check_source,
    environment,
    reference_worktree,
)
from scenarios import as_dict, chosen_cases, full_name, run_case

_HERE: Final = Path(__file__).resolve().parent
_SHOWN: Final = 12  # differences of one case that are printed
Results = dict[str, dict[str, Any]]


def main() -> int:
    """Run both, compare. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, help="a worktree of the fixed commit")
    parser.add_argument("--tree", type=Path, default=ROOT, help="what is compared with it")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--afresh", action="store_true", help="run the fixed commit anew")
    parser.add_argument("--list", action="store_true", help="print the names of cases")
    parser.add_argument("--verbose", action="store_true", help="print every difference")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # the run of one side
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        return _write(options.write, options.source, options.only)
    if options.list:
        for case, by_messages in chosen_cases(options.only):
            print(full_name(case, by_messages=by_messages))
        return 0
    if not chosen_cases(options.only):
        raise SystemExit(f"no case has {options.only!r} in its name; --list prints them")
    reference = reference_worktree(options.reference)
    tree = options.tree.resolve()
    build_native(tree)
    expected = _run(reference, options.only, reuses=not options.afresh)
    found = _run(tree, options.only, reuses=False)
    return _compare(expected, found, is_verbose=options.verbose)


def _run(folder: Path, only: str, *, reuses: bool) -> Results:
    """All cases with the packages of one folder, in a process of its own."""
    scripts = [_HERE / f"{name}.py" for name in ("bits", "names", "scenarios", "trainings")]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in scripts) + only.encode())
    kept = folder.parent / f"{folder.name}-bits-{key.hexdigest()[:12]}.json"
    if reuses and kept.exists():
        return json.loads(kept.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, "results.json")
        command = [sys.executable, __file__, "--write", written, "--source", folder]
        begun = time.monotonic()
        subprocess.run([*command, "--only", only], env=environment(folder), check=True)
        results = json.loads(written.read_text())
    print(f"{folder}: {len(results)} cases in {time.monotonic() - begun:.0f} s", flush=True)
    if reuses:
        kept.write_text(json.dumps(results))
    return results


def _write(path: Path, source: Path, only: str) -> int:
    check_source(source)
    pool_of = importlib.import_module("zero_comm.testing").RankPool
    results: Results = {}
    cases = chosen_cases(only)
    for world_size in sorted({case.world_size for case, _ in cases}):
        with pool_of(world_size) as ranks:
            for case, by_messages in cases:
                if case.world_size != world_size:
                    continue
                name = full_name(case, by_messages=by_messages)
                with tempfile.TemporaryDirectory() as folder:
                    records = ranks.run(
                        run_case,
                        timeout_s=300,
                        case=as_dict(case),
                        folder=folder,
                        by_messages=by_messages,
                    )
                assert name not in results, f"two cases are called {name!r}"
                results[name] = {
                    f"rank {rank}: {key}": _without(value, folder)
                    for rank, record in enumerate(records)
                    for key, value in record.items()
                }
    path.write_text(json.dumps(results))
    return 0


def _without(value: Any, folder: str) -> Any:
    """Errors name files of a folder that is another in each run."""
    return value.replace(folder, "FOLDER") if isinstance(value, str) else value


def _is_saves_agreement(name: str, key: str) -> bool:
    """Whether it counts control messages of a step with a save, which agrees once and not twice."""
    has_save = ", save" in name or ", background" in name
    return has_save and ("agree.calls" in key or (" step 3" in key and "printed" in key))


def _compare(
    expected: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Mapping[str, Any]],
    *,
    is_verbose: bool,
) -> int:
    num_fields, differing = 0, 0
    for name in sorted(expected.keys() | found.keys()):
        before, now = expected.get(name, {}), found.get(name, {})
        num_fields += len(before)
        keys = [
            key
            for key in {**before, **now}
            if before.get(key, "-") != now.get(key, "-") and not _is_saves_agreement(name, key)
        ]
        refused = [key for key in before if key.endswith(": raises")]
        if refused:
            print(f"note: {name}: the fixed commit raises {before[refused[0]]}")
        if not keys:
            continue
        differing += 1
        print(f"\n{name}: {len(keys)} of {len(before)} fields differ")
        for key in keys if is_verbose else keys[:_SHOWN]:
            print(f"  {key}: {before.get(key, '-')} -> {now.get(key, '-')}")
        if len(keys) > _SHOWN and not is_verbose:
            print(f"  and {len(keys) - _SHOWN} more")
    print(f"\n{len(expected)} cases, {num_fields} fields: {differing} cases differ")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
