"""The recipe: from csrc/ to one plain C-ABI library.

Standard library only, functions and one exception: the build hook runs this file by its path, where
neither torch nor this package can be imported.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

LIBRARY = "libzero_offload.so"
# Compiled only where nvcc is found.
CUDA_LIBRARY = "libzero_offload_cuda.so"
CUDA_FLAGS = ("-std=c++17", "-O3", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC")
# Compute capabilities of A100, H100 and B100. Later GPUs compile the PTX of the last themselves.
CUDA_ARCHITECTURES = ("80", "90", "100")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    # Without fused multiply-add, all instruction sets round alike and give equal results.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    # GCC warns falsely about its own intrinsics.
    "-Wno-maybe-uninitialized",
)
EVERYWHERE = {"dispatch.cpp": (), "scalar.cpp": (), "vector.cpp": (), "zero_io.cpp": ()}
ON_X86 = {
    "avx2.cpp": ("-mavx2", "-mf16c"),
    "avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"),
}


class CompileError(Exception):
    """No compiler was found, or it failed; the text has the command and its output."""


def is_current(csrc: Path, out_dir: Path) -> bool:
    """Return whether the CPU's library is in `out_dir` and no source in `csrc` is younger."""
    library = out_dir / LIBRARY
    if not library.exists():
        return False
    return library.stat().st_mtime >= max(path.stat().st_mtime for path in csrc.iterdir())


def why_stale(csrc: Path, out_dir: Path) -> str:
    """Say that the library in `out_dir` is older than `csrc`; empty if it is not, or not there."""
    if not csrc.is_dir() or not (out_dir / LIBRARY).exists() or is_current(csrc, out_dir):
        return ""
    return (
        f"{out_dir / LIBRARY} is stale: it was compiled before the last change in {csrc}; "
        "`python -m zero_offload.build` compiles it anew"
    )


def compile_all(csrc: Path, out_dir: Path, tell: Callable[[str], None] = print) -> list[Path]:
    """Compile everything this machine can; returns the libraries' paths, all in `out_dir`.

    The CPU's comes first. That for CUDA is optional: where it is left out, `tell` hears why.

    Raises:
        CompileError: There is no C++ compiler, or it failed.
    """
    compiler = find_compiler(os.environ)
    sources = EVERYWHERE | (ON_X86 if platform.machine() in ("x86_64", "AMD64") else {})
    with tempfile.TemporaryDirectory(prefix="zero-offload-") as folder:
        objects = [str(Path(folder, name).with_suffix(".o")) for name in sources]
        _run_all(
            [*compiler, *FLAGS, *flags, "-c", str(csrc / name), "-o", into]
            for (name, flags), into in zip(sources.items(), objects, strict=True)
        )
        with _appearing(out_dir / LIBRARY) as out:
            _run_all([[*compiler, "-shared", *objects, "-o", str(out)]])
    libraries = [out_dir / LIBRARY]
    try:
        libraries.append(compile_cuda(csrc, out_dir))
    except CompileError as error:
        tell(f"FusedAdam left out: {error}")
    return libraries


def compile_cuda(csrc: Path, out_dir: Path) -> Path:
    """Compile the CUDA kernels, for every architecture that this nvcc knows of ours.

    Raises:
        CompileError: There is no nvcc, or it failed.
    """
    nvcc = find_nvcc(os.environ)
    known = _run_all([[nvcc, "--list-gpu-arch"]])[0].replace("compute_", "").split()
    chosen = [name for name in CUDA_ARCHITECTURES if name in known]
    if not chosen:
        raise CompileError(f"{nvcc} knows none of sm_{', sm_'.join(CUDA_ARCHITECTURES)}")
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in chosen]
    codes.append(f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")
    with _appearing(out_dir / CUDA_LIBRARY) as out:
        _run_all([[nvcc, *CUDA_FLAGS, *codes, str(csrc / "zero_cuda.cu"), "-o", str(out)]])
    return out_dir / CUDA_LIBRARY


def find_nvcc(environment: Mapping[str, str]) -> str:
    """The CUDA compiler: what NVCC says, else on PATH, else in CUDA_HOME.

    Raises:
        CompileError: There is none.
    """
    cuda_root = environment.get("CUDA_HOME", "/usr/local/cuda")
    for command in (environment.get("NVCC"), "nvcc", f"{cuda_root}/bin/nvcc"):
        if command and shutil.which(command, path=environment.get("PATH")):
            return command
    raise CompileError("no nvcc on PATH, in NVCC or in CUDA_HOME")


@contextmanager
def _appearing(library: Path) -> Iterator[Path]:
    """Yield a temporary path to write a library to, and rename the file to `library` at the end.

    Other processes may load the library at any moment: they never find an incomplete file.
    """
    unfinished = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The C++ compiler's command: what CXX says, else the first of the usual ones.

    Raises:
        CompileError: There is none.
    """
    asked = shlex.split(environment.get("CXX", ""))
    for command in [asked] if asked else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0], path=environment.get("PATH")):
            return command
    looked_for = f"CXX={shlex.join(asked)!r}" if asked else "c++, g++ or clang++"
    raise CompileError(
        f"no C++ compiler: {looked_for} is not on PATH. Install one (Debian: apt install g++), or "
        f"name it in CXX"
    )


def _run_all(commands: Iterable[list[str]]) -> list[str]:
    """Run commands side by side and return their outputs. Raises for the first that fails."""
    running = []
    for command in commands:
        try:
            running.append(Popen(command, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"))
        except OSError as error:
            raise CompileError(f"{shlex.join(command)}: {error}") from error
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            command = shlex.join(process.args)  # type: ignore[arg-type]
            raise CompileError(f"{command} ended with {process.returncode}:\n{text}")
    return said
