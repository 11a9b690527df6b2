"""Changes that are argued away are changes of the code as it is now."""

from __future__ import annotations

from pathlib import Path

import mutate

PACKAGES = Path(__file__).resolve().parents[1] / "packages"


def test_every_change_that_makes_no_difference_is_one_of_a_line_that_there_is() -> None:
    """Else a line that has changed its meaning would stay excused."""
    equal = mutate.equal_changes()
    files = {name for name, _, _ in equal}
    found = {
        mutate.named(path, change)
        for path in PACKAGES.rglob("src/**/*.py")
        if f"{path.parent.name}/{path.name}" in files
        for change in mutate.changes(path.read_text(), {})[1]
    }

    assert equal.keys() - found == set()
    assert all(equal.values())
