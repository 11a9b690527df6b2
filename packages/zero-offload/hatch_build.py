"""Compile csrc/ into a plain C-ABI library, or ship pure Python and say so."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RECIPE: Final = (
    "src/zero_offload/_native/recipe.py"  # also what `python -m zero_offload.build` runs
)


class NativeBuildHook(BuildHookInterface):
    """Adds compiled kernels to the wheel when a compiler is found."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files; `version` is "standard" or "editable"."""
        switch = os.environ.get("ZERO_OFFLOAD_NATIVE", "auto")
        root = Path(self.root)
        recipe = runpy.run_path(str(root / RECIPE))
        out_dir = root / "src" / "zero_offload" / "_native"
        if version == "standard":
            recipe["remove_libraries"](out_dir)  # a stale one must never ship
        if switch == "off":
            return
        try:
            libraries = recipe["compile_all"](
                csrc=root / "csrc", out_dir=out_dir, tell=self.app.display_info
            )
        except recipe["CompileError"] as error:
            if switch == "require":
                raise
            recipe["remove_libraries"](out_dir)
            self.app.display_warning(f"zero-offload: no native kernels in this build: {error}")
            return
        if version == "editable":
            return  # found beside the sources; editable wheels ignore the tag

        # Nothing of CPython's API inside, so one wheel serves every Python 3 on this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["artifacts"] += [library.relative_to(root).as_posix() for library in libraries]
