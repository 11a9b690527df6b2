"""How docstrings and comments sound, in figures that may only fall: `hatch run prose`.

A docstring opens with a verb or a noun. One that opens with a pronoun or a relative word, such as
"What" or "Whether", says what it is about in its second half or nowhere. A comment at the end of a
line is short, and the reader has to complete it; one of its own line can be a sentence.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PACKAGES: Final = Path(__file__).parents[1] / "packages"
OPENER: Final = re.compile(
    r"(Of|What|Which|Whose|Whom?|That|The same|As|By|Where|Whether|It|Its|These|Those|Such|So|Or"
    r"|And|Likewise|Theirs|There|Here|Nothing|None|Beside|All)\b(?! ranks)"
)
# Of a package: lines with a comment at the end, in a thousand. Lower these as they fall.
MOST_TRAILING: Final = {
    "zero-ckpt": 6,
    "zero-comm": 8,
    "zero-deepspeed": 5,
    "zero-engine": 3,
    "zero-offload": 2,
    "zero-partition": 6,
}


class Found(NamedTuple):
    """One file."""

    num_lines: int
    num_docstrings: int
    openers: list[str]  # where, and the first line
    num_trailing: int  # comments at the end of a line


def read(path: Path) -> Found:
    """Count what one file has."""
    text = path.read_text()
    docstrings = [*_docstrings(ast.parse(text))]
    openers = [
        f"{path}:{line}: {first}" for line, first in docstrings if OPENER.match(first) is not None
    ]
    comments = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and token.line.split("#")[0].strip()
    ]
    return Found(len(text.splitlines()), len(docstrings), openers, len(comments))


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "lineno", 1), docstring.partition("\n")[0]


def main() -> int:
    """Print a line for each package, and what is over its limit. Returns the exit status."""
    status = 0
    for name, most_trailing in MOST_TRAILING.items():
        files = [read(path) for path in sorted((PACKAGES / name / "src").rglob("*.py"))]
        openers = [each for found in files for each in found.openers]
        num_docstrings = sum(found.num_docstrings for found in files)
        trailing = 1000 * sum(f.num_trailing for f in files) / sum(f.num_lines for f in files)
        print(
            f"{name}: {len(openers)} of {num_docstrings} docstrings open with a pronoun or a "
            f"relative word; {trailing:.1f} comments at the end of 1,000 lines"
        )
        if openers:
            print("open with a verb or a noun:", *openers, sep="\n  ")
            status = 1
        if trailing > most_trailing:
            print(f"more comments at ends of lines than {most_trailing}: write sentences instead")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
