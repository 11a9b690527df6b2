"""What `import zero_comm` costs and needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import sys
import torch, attrs
before = set(sys.modules)
import zero_comm
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(tops - sys.stdlib_module_names))
"""


@pytest.mark.slow
def test_only_torch_and_attrs_are_needed() -> None:
    """A leaf that loads a sibling, or pytest, is no longer installed on its own."""
    result = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, check=True, timeout=100
    )

    assert result.stdout.split() == ["zero_comm"]
