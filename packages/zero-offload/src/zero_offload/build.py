"""`python -m zero_offload.build`: compile the kernels for this installation, and report."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from ._native import HERE, native_status
from ._native._abi import AbiError, open_library
from ._native._compile import CompileError, compile_all

# In an installed package the sources lie beside the library, in a checkout beside src/.
SOURCES: Final = (HERE / "csrc", HERE.parents[2] / "csrc")


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


def main() -> int:
    """Build where the package lies and print what runs then. Returns the exit status."""
    csrc = next((folder for folder in SOURCES if folder.is_dir()), None)
    if csrc is None:
        print(f"no sources: neither {SOURCES[0]} nor {SOURCES[1]} exists", file=sys.stderr)
        return 1
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
    raise SystemExit(main())
