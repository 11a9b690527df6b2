"""The fixed commit: which it is, its worktree, and how to run a script with it or the tree."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("zero-comm", "zero-partition", "zero-offload", "zero-ckpt", "zero-engine")
PAGE: Final = "docs/decisions/0043-the-new-house.md"


def reference_commit() -> str:
    """What the page about the new house names."""
    found = re.search(r"^Reference: ([0-9a-f]{7,40})$", (ROOT / PAGE).read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PAGE}: expected a line 'Reference: <hash>', found none")
    return found[1]


def reference_worktree(given: Path | None = None) -> Path:
    """A folder with the fixed commit, its native libraries built; made where there is none."""
    folder = given
    if folder is None:
        commit = reference_commit()
        folder = Path(tempfile.gettempdir(), f"zero-house-{commit[:12]}")
        if not (folder / "pyproject.toml").exists():
            subprocess.run(
                ["git", "worktree", "add", "--force", "--detach", str(folder), commit],
                cwd=ROOT,
                check=True,
                stdout=sys.stderr,
            )
    if not (folder / "packages").is_dir():
        raise SystemExit(f"expected a worktree with packages/, got {folder}")
    build_native(folder)
    return folder.resolve()


def build_native(folder: Path) -> None:
    """Compile what is compiled there. Without a compiler plain torch does the work."""
    for package in ("zero_comm", "zero_offload"):
        command = [sys.executable, "-m", f"{package}.build", "--if-needed"]
        subprocess.run(command, env=environment(folder), check=False, stdout=sys.stderr)


def environment(folder: Path) -> dict[str, str]:
    """In which Python imports the packages of that folder."""
    paths = [str(folder / "packages" / package / "src") for package in PACKAGES]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def check_source(folder: Path) -> None:
    """Make sure that this process has imported that folder's packages, and no installed ones."""
    for name in (package.replace("-", "_") for package in PACKAGES):
        file = Path(str(importlib.import_module(name).__file__)).resolve()
        if not file.is_relative_to(folder):
            raise SystemExit(f"expected {name} from {folder}, got {file}")
