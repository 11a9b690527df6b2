"""What holds for every host in `zero_engine.integrations`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from zero_engine.integrations import PRIVATE_METHODS


@pytest.mark.parametrize("host", PRIVATE_METHODS)
def test_each_private_method_of_a_host_exists_in_the_installed_version(host: str) -> None:
    """A host that renames one is found here, and not in somebody's training."""
    module, name = host.split(":")
    pytest.importorskip(module.partition(".")[0])
    found = getattr(import_module(module), name)
    for method in PRIVATE_METHODS[host].split():
        assert callable(getattr(found, method)), method


def test_no_host_is_imported_by_the_engine() -> None:
    """Extras stay extras."""
    hosts = "'transformers', 'accelerate', 'lightning', 'torchdata'"
    code = f"import sys, zero_engine; assert not {{{hosts}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
