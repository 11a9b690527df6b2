"""The compiled extension, loaded from the cache; importing it makes the device known to torch."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from simulated_device.build import COMMAND, MODULE, find_extension


def _load() -> ModuleType:
    path = find_extension()
    if path is None:
        raise ImportError(f"the simulated device is not built; `{COMMAND}` builds it")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None, f"{path} is no module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


extension = _load()
