"""Old import paths, which work until zero 0.3 with a warning.

Only this file of the package names packages that depend on it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, final

# Old path -> new path. The longest old path that is a prefix is used, so that a module's entry
# covers all its names but those that have their own.
_MOVED: Final = {
    "zero_engine.DynamicLossScale": "zero_engine.engine.DynamicLossScale",
    "zero_engine.EngineConfig": "zero_engine.engine.EngineConfig",
    "zero_engine.LossScaler": "zero_engine.engine.LossScaler",
    "zero_engine.Room": "zero_engine.planning.Room",
    "zero_engine.StopSignals": "zero_engine.checkpoint.StopSignals",
    "zero_engine.plan_options": "zero_engine.planning.plan_options",
    "zero_engine.recommend": "zero_engine.planning.recommend",
    "zero_engine.checkpoint.DeepSpeedLoadReport": "zero_deepspeed.load.DeepSpeedLoadReport",
    "zero_engine.compat.deepspeed": "zero_deepspeed",
    "zero_engine.deepspeed": "zero_engine.engine",
    "zero_engine.deepspeed.LRRangeTest": "zero_deepspeed.schedules.LRRangeTest",
    "zero_engine.deepspeed.NamedSpec": "zero_deepspeed.engine_config.NamedOptimizer",
    "zero_engine.deepspeed.OneCycle": "zero_deepspeed.schedules.OneCycle",
    "zero_engine.deepspeed.WarmupCosineLR": "zero_deepspeed.schedules.WarmupCosineLR",
    "zero_engine.deepspeed.WarmupDecayLR": "zero_deepspeed.schedules.WarmupDecayLR",
    "zero_engine.deepspeed.WarmupLR": "zero_deepspeed.schedules.WarmupLR",
}


def _new_path(old: str) -> str | None:
    for prefix in sorted(_MOVED, key=len, reverse=True):
        if f"{old}.".startswith(f"{prefix}."):
            return _MOVED[prefix] + old.removeprefix(prefix)
    return None


@final
class OldPaths(MetaPathFinder, Loader):
    """Finder of modules by their old paths; names in these are looked up at new paths. Local."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a path that was a module, or a package with one; else None."""
        del path, target
        new = _new_path(fullname)
        if new is None:
            is_found = any(old.startswith(f"{fullname}.") for old in _MOVED)
        else:
            is_found = _is_module(fullname, new)
        return ModuleSpec(fullname, self, is_package=True) if is_found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module, whose `__getattr__` looks names up at their new paths."""
        module, old = ModuleType(spec.name), spec.name
        vars(module)["__getattr__"] = lambda name: find(old, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code to run."""


def _is_module(old: str, new: str) -> bool:
    try:
        return find_spec(new) is not None
    except ModuleNotFoundError as error:
        package = new.partition(".")[0]
        if error.name != package:
            # The new path is a name in a module that exists.
            return False
        raise ModuleNotFoundError(
            f"{old} is {new} now; install {package.replace('_', '-')}", name=package
        ) from error


def find(module: str, name: str) -> Any:
    """Return what an old name of a module refers to now, with a DeprecationWarning. Local.

    A name that was itself a module gives a module of old names, without a warning of its own.

    Raises:
        AttributeError: The module never had the name.
    """
    old = f"{module}.{name}"
    new_module, _, attribute = (_new_path(old) or "").rpartition(".")
    is_hidden = name.startswith("__") and name not in {"__all__", "__version__"}
    if is_hidden or not (new_module or old in _MOVED):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # The names of a module are looked up one by one, so that each warns for itself.
    if old in _MOVED and _is_module(old, _MOVED[old]):
        return import_module(old)
    found = getattr(import_module(new_module), attribute)
    warnings.warn(
        f"{old} is {new_module}.{attribute} now; zero 0.3 forgets the old name",
        DeprecationWarning,
        # The line that looks the name up; between are the module's `__getattr__` and this function.
        stacklevel=3,
    )
    vars(sys.modules[module])[name] = found
    return found


def install() -> None:
    """Let imports find old paths from now on, after modules that exist. Local."""
    sys.meta_path.append(OldPaths())
