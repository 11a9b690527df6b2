"""`python -m zero_offload.build`: compile the kernels for this installation, and report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ._native import CHECKOUT_SOURCES, HERE, native_status
from ._native.library import AbiError, open_library
from ._native.recipe import (
    LIBRARY,
    CompileError,
    compile_all,
    compile_cuda,
    find_compiler,
    is_current,
)

__all__ = [
    "LIBRARY",
    "CompileError",
    "build",
    "compile_all",
    "compile_cuda",
    "find_compiler",
    "is_current",
    "main",
]

# In an installed package the sources are beside the library, in a checkout beside src/.
SOURCES: Final = (HERE / "csrc", CHECKOUT_SOURCES)


def build(csrc: Path, out_dir: Path) -> list[Path]:
    """Compile every library of `csrc` that this machine can, into `out_dir`.

    Raises:
        CompileError: There is no compiler, or it failed, or its library cannot be loaded.
    """
    try:
        libraries = compile_all(csrc, out_dir)
        open_library(libraries[0])
    except OSError as error:
        raise CompileError(f"cannot write to {out_dir}: {error}") from error
    except AbiError as error:
        raise CompileError(str(error)) from error
    return libraries


def main(argv: Sequence[str]) -> int:
    """Build where the package lies and print what runs then. Returns the exit status.

    With `--if-needed`, nothing is compiled that is younger than its sources.
    """
    if unknown := [word for word in argv if word != "--if-needed"]:
        print(f"expected nothing or --if-needed, got {' '.join(unknown)}", file=sys.stderr)
        return 2
    csrc = next((folder for folder in SOURCES if folder.is_dir()), None)
    if csrc is None:
        print(f"no sources: neither {SOURCES[0]} nor {SOURCES[1]} exists", file=sys.stderr)
        return 1
    if argv and is_current(csrc, HERE):
        return 0
    started = time.perf_counter()
    try:
        libraries = build(csrc, HERE)
    except CompileError as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    print(f"compiled in {time.perf_counter() - started:.1f} s:")
    for library in libraries:
        print(f"  {library}")
    print(native_status())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
