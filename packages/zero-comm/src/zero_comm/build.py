"""`python -m zero_comm.build`: compile the codecs for this installation, and report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ._native import HERE, open_library
from ._native._compile import (
    LIBRARY,
    SOURCES,
    CompileError,
    compile_library,
    find_compiler,
    is_current,
)

__all__ = [
    "HERE",
    "LIBRARY",
    "SOURCES",
    "CompileError",
    "compile_library",
    "find_compiler",
    "is_current",
    "main",
]


def main(argv: Sequence[str]) -> int:
    """Build where the package lies. Returns the exit status.

    With `--if-needed`, nothing is compiled that is younger than its sources.
    """
    if unknown := [word for word in argv if word != "--if-needed"]:
        print(f"expected nothing or --if-needed, got {' '.join(unknown)}", file=sys.stderr)
        return 2
    if argv and is_current(HERE, HERE):
        return 0
    try:
        library = compile_library(HERE, HERE)
        open_library(library)
    except (CompileError, OSError) as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    print(f"compiled {library}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
