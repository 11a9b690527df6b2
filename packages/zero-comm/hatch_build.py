"""Compile the codecs into a plain C-ABI library, or ship pure Python and say so."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE: Final = "src/zero_comm/_native"


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled codecs to the wheel when a compiler is found."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files; `version` is "standard" or "editable".

        Only an editable build writes to the source tree: a wheel's library is compiled in a
        temporary folder. A build that fails deletes nothing.
        """
        switch = os.environ.get("ZERO_COMM_NATIVE", "auto")
        if switch == "off":
            return
        folder = Path(self.root, NATIVE)
        # Also what `python -m zero_comm.build` runs.
        recipe = runpy.run_path(str(folder / "_compile.py"))
        out_dir = folder
        if version == "standard":
            # Hatchling copies from it after this returns; it is deleted together with this hook.
            self.scratch = TemporaryDirectory(prefix="zero-comm-wheel-")
            out_dir = Path(self.scratch.name)
        try:
            library = recipe["compile_library"](folder, out_dir)
        except recipe["CompileError"] as error:
            if switch == "require":
                raise
            message = f"zero-comm: no compiled codecs in this build: {error}"
            if version == "editable" and (stale := recipe["why_stale"](folder, out_dir)):
                message += f"\nzero-comm: {stale}"
            self.app.display_warning(message)
            return
        if version == "editable":
            return  # found beside the sources; editable wheels ignore the tag

        # Nothing of CPython's API inside, so one wheel serves every Python 3 on this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["force_include"][str(library)] = f"zero_comm/_native/{library.name}"
