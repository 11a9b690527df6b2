"""What holds for every host in `zero_engine.integrations`."""

from __future__ import annotations

import subprocess
import sys
from functools import reduce
from importlib import import_module

import pytest
from zero_engine.integrations import PRIVATE_METHODS


@pytest.mark.parametrize("host", PRIVATE_METHODS)
def test_each_private_method_of_a_host_exists_in_the_installed_version(host: str) -> None:
    """A host that renames one is found here, and not in somebody's training."""
    pytest.importorskip(host)
    for name in PRIVATE_METHODS[host]:
        module, path = name.split(":")
        found = reduce(getattr, path.split("."), import_module(module))
        assert callable(found) or isinstance(found, property), name


def test_no_host_is_imported_by_the_engine() -> None:
    """Extras stay extras."""
    hosts = "'transformers', 'accelerate', 'lightning', 'torchdata'"
    code = f"import sys, zero_engine; assert not {{{hosts}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
