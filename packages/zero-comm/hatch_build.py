"""Compile the codecs into a plain C-ABI library, or ship pure Python and say so."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE: Final = "src/zero_comm/_native"


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled codecs to the wheel when a compiler is found."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files; `version` is "standard" or "editable"."""
        switch = os.environ.get("ZERO_COMM_NATIVE", "auto")
        folder = Path(self.root, NATIVE)
        recipe = runpy.run_path(str(folder / "_compile.py"))
        if version == "standard":
            (folder / recipe["LIBRARY"]).unlink(missing_ok=True)  # a stale one must never ship
        if switch == "off":
            return
        try:
            library = recipe["compile_library"](folder, folder)
        except recipe["CompileError"] as error:
            if switch == "require":
                raise
            (folder / recipe["LIBRARY"]).unlink(missing_ok=True)
            self.app.display_warning(f"zero-comm: no compiled codecs in this build: {error}")
            return
        if version == "editable":
            return  # found beside the sources; editable wheels ignore the tag

        # Nothing of CPython's API inside, so one wheel serves every Python 3 on this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())
