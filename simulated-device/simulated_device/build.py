"""`python -m simulated_device.build`: compile the extension for this torch, and report.

The extension lies in a cache folder whose name is a hash of the sources, the compiler, the flags,
and the versions of torch and Python. A second run, another checkout of the same sources, and a
second process therefore find it; a changed source asks for a new one.

With `--if-needed`, a machine without a compiler is no error.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

COMMAND = "python -m simulated_device.build"
SOURCES = Path(__file__).parent / "csrc"
MODULE = "_simulated_device"
FLAGS = (
    "-std=c++20",
    "-O1",  # kernels are torch's: more makes compiling slower, and nothing faster
    "-g0",
    "-fPIC",
    "-shared",
    "-Wno-attributes",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
)


class BuildError(Exception):
    """There is no compiler, or it refused; the text says which command and what it wrote."""


def find_extension() -> Path | None:
    """Return the compiled extension's path, or None where it has not been built."""
    try:
        path = _extension_path(_find_compiler(os.environ))
    except BuildError:
        path = None
    if path is not None and path.exists():
        return path
    # Built on another day: by another compiler, or one that is gone.
    built = sorted(_cache_folder().glob(f"{_hash_of_sources()}-*/{MODULE}.so"))
    return built[0] if built else None


def build() -> Path:
    """Compile the extension, and return its path.

    Two processes may build at the same time: each writes a file of its own, and renames it.

    Raises:
        BuildError: There is no C++ compiler, or it failed.
    """
    compiler = _find_compiler(os.environ)
    path = _extension_path(compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    command = _compile_command(compiler, unfinished)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ran.returncode:
            raise BuildError(
                f"{shlex.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
            )
        unfinished.replace(path)
    except OSError as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _compile_command(compiler: list[str], out: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    includes = (
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    )
    return [
        *(*compiler, *FLAGS),
        *(f"-I{folder}" for folder in includes),
        *(str(SOURCES / "module.cpp"), "-o", str(out)),
        *(f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        f"-Wl,-rpath,{libraries}",
    ]


def _extension_path(compiler: list[str]) -> Path:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    key = _hash([shlex.join(compiler), version])
    return _cache_folder() / f"{_hash_of_sources()}-{key}" / f"{MODULE}.so"


@cache
def _hash_of_sources() -> str:
    """Return a hash of all that must be equal for an extension to fit this process."""
    torch_parts = [torch.__version__, str(torch.version.git_version), torch.__file__]
    texts = [path.read_text() for path in sorted(SOURCES.iterdir())]
    return _hash([*FLAGS, *torch_parts, sys.version, *texts])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "simulated-device"


def _find_compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the C++ compiler's command: from CXX, or the first of the usual ones.

    Raises:
        BuildError: There is none.
    """
    asked = shlex.split(environment.get("CXX", ""))
    for command in [asked] if asked else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0], path=environment.get("PATH")):
            return command
    looked_for = f"CXX={shlex.join(asked)!r}" if asked else "g++, c++ or clang++"
    raise BuildError(f"no C++ compiler: {looked_for} is not on PATH")


def main(arguments: Sequence[str]) -> int:
    """Build where no extension is cached. Return the exit status."""
    if unknown := [word for word in arguments if word != "--if-needed"]:
        print(f"expected nothing or --if-needed, got {' '.join(unknown)}", file=sys.stderr)
        return 2
    if path := find_extension():
        print(f"already built: {path}")
        return 0
    if arguments:
        try:
            _find_compiler(os.environ)
        except BuildError as error:
            print(f"the simulated device is not built: {error}")
            return 0
    try:
        print(f"compiled {build()}")
    except BuildError as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
