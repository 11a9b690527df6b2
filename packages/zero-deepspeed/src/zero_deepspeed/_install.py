"""install(): `import deepspeed` finds this package, where DeepSpeed itself is not installed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final, final

from zero_engine import ConfigError

_THEIRS: Final = "deepspeed"
_OURS: Final = __name__.rpartition(".")[0]


def install() -> None:
    """Let `import deepspeed` and `from deepspeed.x import y` find this package. Local.

    For the whole process, from now on: call it first in the script, in every process of the job.
    Modules are the same objects by both names. Twice is as good as once. What looks for
    DeepSpeed's distribution (`importlib.metadata`), as transformers and accelerate do, finds none.

    Raises:
        zero_engine.ConfigError: DeepSpeed itself is installed; or another module has its name.
    """
    if sys.modules.get(_THEIRS) is sys.modules[_OURS]:
        return
    loaded = sys.modules.get(_THEIRS)
    spec = None if loaded is not None else find_spec(_THEIRS)
    origin = getattr(loaded, "__file__", loaded) if spec is None else spec.origin
    if origin is not None:  # a folder without __init__.py, "deepspeed/ds_config.json", has none
        raise ConfigError(
            f"deepspeed.install(): expected that DeepSpeed is not installed, got {origin}; remove "
            "it (pip uninstall deepspeed), or leave install() out and write `import "
            f"{_OURS} as deepspeed`"
        )
    sys.meta_path.insert(0, _Aliases())  # first: others would load our files a second time
    sys.modules[_THEIRS] = sys.modules[_OURS]


@final
class _Aliases(MetaPathFinder, Loader):
    """Finds `deepspeed.x` as the module that this package has by that name."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        head, *parts = fullname.split(".")
        if head != _THEIRS:
            return None
        ours = ".".join([_OURS, *parts])
        try:
            if any(part.startswith("_") for part in parts):
                raise ModuleNotFoundError(name=ours)
            importlib.import_module(ours)
        except ModuleNotFoundError as error:
            if not f"{ours}.".startswith(f"{error.name}."):
                raise  # another package, which one of ours needs
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: `import deepspeed` is {_OURS} here, by "
                f"deepspeed.install(); what there is: {', '.join(_public())}",
                name=fullname,
            ) from None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[_OURS + spec.name.removeprefix(_THEIRS)]
        spec.loader_state = module.__spec__  # which the import system is about to replace
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "the import system has just set it"
        module.__spec__ = module.__spec__.loader_state


def _public() -> list[str]:
    found = pkgutil.walk_packages(sys.modules[_OURS].__path__, f"{_THEIRS}.")
    return [module.name for module in found if "._" not in module.name]
