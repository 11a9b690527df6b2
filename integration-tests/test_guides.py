"""Every block of the guides, and of the pages for those who come from elsewhere, runs as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import scripts

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [
    *(ROOT / "README.md", ROOT / "packages" / "zero-engine" / "README.md"),
    *sorted([*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/coming-from/*.md")]),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_blocks_of_a_page_run_from_top_to_bottom_on_two_ranks(
    page: Path, ranks, tmp_path: Path
) -> None:
    """A reader pastes one after the other; what they write is in the folder they are run in."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks, "a guide without code"
    script = tmp_path / f"{page.stem}.py"
    enter = f"import os\nhere = os.getcwd()\nos.chdir({str(tmp_path)!r})"
    script.write_text("\n".join([enter, *blocks, "os.chdir(here)"]))

    scripts.on_ranks(ranks)(str(script), [])
