"""The recipe: from codec.cpp to one plain C-ABI library beside it.

Standard library only, functions and one exception: the build hook runs this file by its path, where
neither torch nor this package can be imported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARY = "libzero_comm.so"
SOURCES = ("codec.cpp", "zero_comm.h")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",  # equal results on every instruction set
    "-fno-math-errno",
    "-fvisibility=hidden",
)


class CompileError(Exception):
    """Error if there is no compiler, or it fails; the text has its command and its output."""


def is_current(folder: Path, out_dir: Path) -> bool:
    """Return whether the library is in `out_dir` and no source in `folder` is younger."""
    library = out_dir / LIBRARY
    if not library.exists():
        return False
    return library.stat().st_mtime >= max((folder / name).stat().st_mtime for name in SOURCES)


def why_stale(folder: Path, out_dir: Path) -> str:
    """Say that the library in `out_dir` is older than its sources; empty if not, or not there."""
    if not (out_dir / LIBRARY).exists() or is_current(folder, out_dir):
        return ""
    return (
        f"{out_dir / LIBRARY} is stale: it was compiled before the last change of its sources; "
        "`python -m zero_comm.build` compiles it anew"
    )


def compile_library(folder: Path, out_dir: Path, flags: Sequence[str] = ()) -> Path:
    """Compile the sources of `folder` into `out_dir`; returns the library's path.

    Raises:
        CompileError: There is no C++ compiler, or it failed.
    """
    out = out_dir / LIBRARY
    # Others may load the library at any moment, so it is moved to its place when it is complete.
    unfinished = out_dir / f".{LIBRARY}.{os.getpid()}"
    command = [*find_compiler(os.environ), *FLAGS, *flags]
    command += [str(folder / "codec.cpp"), "-o", str(unfinished)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ran.returncode:
            raise CompileError(
                f"{shlex.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
            )
        unfinished.replace(out)
    except OSError as error:
        raise CompileError(f"{shlex.join(command)}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The C++ compiler's command: what CXX says, else the first of the usual ones.

    Raises:
        CompileError: There is none.
    """
    asked = shlex.split(environment.get("CXX", ""))
    for command in [asked] if asked else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0], path=environment.get("PATH")):
            return command
    looked_for = f"CXX={shlex.join(asked)!r}" if asked else "c++, g++ or clang++"
    raise CompileError(
        f"no C++ compiler: {looked_for} is not on PATH. Install one (Debian: apt install g++), or "
        f"name it in CXX"
    )
