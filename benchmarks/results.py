"""Where figures go: one JSON file per invocation, with the machine and versions they hold for."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

OUR_PACKAGES: Final = ("zero-comm", "zero-partition", "zero-ckpt", "zero-offload", "zero-engine")


def write_results(
    suite: str,
    rows: list[dict[str, Any]],
    *,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Path:
    """Write `<date>-<suite>.json` and return its path; a second one of a day gets a number.

    Args:
        suite: Name of the benchmark.
        rows: The figures, one flat dict per line of its table.
        folder: Made if missing.
        settings: What was asked for.
        versions: Of libraries that ran in another environment, which this process cannot see.
    """
    now = datetime.now().astimezone()
    record = {
        "suite": suite,
        "time": now.isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": machine(),
        "versions": own_versions() | dict(versions or {}),
        "settings": dict(settings or {}),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{suite}.json"
    count = 1
    while path.exists():
        count += 1
        path = folder / f"{now:%Y-%m-%d}-{suite}-{count}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def machine() -> dict[str, Any]:
    """The processor, the cores we may use, and the memory."""
    lines = _read_fields(Path("/proc/cpuinfo"))
    return {
        "cpu": lines.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def available_bytes() -> int:
    """Memory that may be taken without swapping."""
    return int(_read_fields(Path("/proc/meminfo"))["MemAvailable"].split()[0]) * 1024


def own_versions() -> dict[str, str]:
    """Python, torch and our packages, installed or on the path."""
    packages = {name: _version(name) for name in ("torch", *OUR_PACKAGES)}
    return {"python": platform.python_version(), **packages}


def git_commit() -> str:
    """The commit these figures were made at, marked where files differ from it; or empty."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("-dirty" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=Path(__file__).parent,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return importlib.import_module(f"{name.replace('-', '_')}.__about__").__version__
    except ImportError:
        return ""


def _read_fields(file: Path) -> dict[str, str]:
    """The first `key: value` of each key."""
    fields: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields
