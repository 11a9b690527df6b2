"""Compile csrc/ into a plain C-ABI library, or ship pure Python and say so."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE: Final = "src/zero_offload/_native"


class NativeBuildHook(BuildHookInterface):
    """Adds compiled kernels to the wheel when a compiler is found."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects files; `version` is "standard" or "editable".

        Only an editable build writes to the source tree: a wheel's libraries are compiled in a
        temporary folder. A build that fails deletes nothing.
        """
        switch = os.environ.get("ZERO_OFFLOAD_NATIVE", "auto")
        if switch == "off":
            return
        root = Path(self.root)
        # Also what `python -m zero_offload.build` runs.
        recipe = runpy.run_path(str(root / NATIVE / "recipe.py"))
        out_dir = root / NATIVE
        if version == "standard":
            # Hatchling copies from it after this returns; it is deleted together with this hook.
            self.scratch = TemporaryDirectory(prefix="zero-offload-wheel-")
            out_dir = Path(self.scratch.name)
        try:
            libraries = recipe["compile_all"](
                csrc=root / "csrc", out_dir=out_dir, tell=self.app.display_info
            )
        except recipe["CompileError"] as error:
            if switch == "require":
                raise
            message = f"zero-offload: no native kernels in this build: {error}"
            if version == "editable" and (stale := recipe["why_stale"](root / "csrc", out_dir)):
                message += f"\nzero-offload: {stale}"
            self.app.display_warning(message)
            return
        if version == "editable":
            return  # found beside the sources; editable wheels ignore the tag

        # Nothing of CPython's API inside, so one wheel serves every Python 3 on this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        for library in libraries:
            build_data["force_include"][str(library)] = f"zero_offload/_native/{library.name}"
