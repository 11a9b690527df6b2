"""The recipe, the loading and what is said where there are no kernels."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import stat
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest
from zero_offload import NativeUnavailableError, build
from zero_offload.testing import load

PACKAGE: Final = Path(__file__).parents[1]
COMPILER: Final = shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no c++ on PATH")


@pytest.mark.slow
@needs_compiler
def test_a_library_of_another_version_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read with shifted fields, which corrupts in silence."""
    monkeypatch.setenv("CXX", str(_hurried_compiler(tmp_path)))
    shutil.copytree(PACKAGE / "csrc", tmp_path / "csrc")
    header = tmp_path / "csrc" / "zero_offload.h"
    abi = int(re.search(r"#define ZERO_ABI (\d+)", header.read_text())[1])  # type: ignore[index]
    text = header.read_text().replace(f"ZERO_ABI {abi}", f"ZERO_ABI {abi + 1}")
    header.write_text(text)
    said = f"built for ABI {abi + 1}, this package calls ABI {abi}"

    with pytest.raises(build.CompileError, match=said):
        build.build(tmp_path / "csrc", tmp_path)
    found, status = load(tmp_path / build.LIBRARY, {})

    assert found is None
    assert said in status.reason


def test_the_recipe_needs_the_standard_library_only() -> None:
    """The build environment is isolated: it has neither torch nor attrs."""
    recipe = inspect.getsourcefile(build.compile_all)
    program = f"import runpy, sys; runpy.run_path({recipe!r}); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    )

    assert {"torch", "attrs", "numpy", "zero_offload"}.isdisjoint(ran.stdout.split())


def test_a_missing_compiler_is_named() -> None:
    """The remedy is to install one, or to say where it is."""
    with pytest.raises(build.CompileError, match=r"c\+\+, g\+\+ or clang\+\+ is not on PATH"):
        build.find_compiler({"PATH": "/nowhere"})
    with pytest.raises(build.CompileError, match="CXX='strange --flag' is not on PATH"):
        build.find_compiler({"PATH": "/nowhere", "CXX": "strange --flag"})


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the user sees a missing library and not why."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho this compiler is ill; exit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    out_dir = tmp_path / "out"
    out_dir.mkdir()

    with pytest.raises(build.CompileError, match=r"ended with 3:\nthis compiler is ill"):
        build.compile_all(PACKAGE / "csrc", out_dir)
    assert not list(out_dir.iterdir())


def test_there_is_a_reason_where_there_are_no_kernels(tmp_path: Path) -> None:
    """A slow run whose cause nobody can ask for is the complaint this package starts from."""
    missing = tmp_path / "libmissing.so"
    damaged = tmp_path / "libdamaged.so"
    damaged.write_text("not a library")

    for path, environment, reason in (
        (missing, {}, "python -m zero_offload.build"),
        (damaged, {}, "cannot be loaded"),
        (damaged, {"ZERO_OFFLOAD_NATIVE": "off"}, "ZERO_OFFLOAD_NATIVE=off"),
    ):
        found, status = load(path, environment)
        assert found is None
        assert reason in status.reason
        assert "plain torch" in str(status)


def test_kernels_that_are_required_and_missing_raise(tmp_path: Path) -> None:
    """A cluster job should end at start, not run ten times slower."""
    missing = tmp_path / "libmissing.so"
    for environment in ({"ZERO_OFFLOAD_NATIVE": "require"}, {"ZERO_OFFLOAD_ISA": "avx2"}):
        with pytest.raises(NativeUnavailableError, match=r"but .*libmissing\.so does not exist"):
            load(missing, environment)
    with pytest.raises(NativeUnavailableError, match="auto, require, off"):
        load(missing, {"ZERO_OFFLOAD_NATIVE": "maybe"})


@pytest.mark.slow
def test_plain_torch_says_so_once() -> None:
    """Once is enough, and never is too little."""
    program = (
        "import torch, warnings, zero_offload as z\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    z.CPUAdam([torch.zeros(1)]); z.CPULion([torch.zeros(1)])\n"
        "print(len(caught), caught[0].message, caught[0].filename)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ZERO_OFFLOAD_NATIVE": "off"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout.startswith("1 zero_offload steps with plain torch")
    assert ran.stdout.rstrip().endswith("<string>"), "it points at the caller's line"


@pytest.mark.drawn(3)
@pytest.mark.slow
def test_an_installation_works_with_a_compiler_and_without(tmp_path: Path) -> None:
    """Without one it says why it is slow, and one that comes later finds the sources."""
    pytest.importorskip("hatchling")
    source, made, home = tmp_path / "source", tmp_path / "dist", tmp_path / "venv"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("*.so", "dist", "__pycache__"))
    environment = os.environ | {"CXX": "/nowhere/c++"}
    environment.pop("PYTHONPATH", None)

    def run(*command: str | Path, cwd: Path = tmp_path) -> str:
        ran = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
        )
        return ran.stdout

    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", made, cwd=source)
    (sdist,) = made.iterdir()
    alone = ["--quiet", "--no-deps", "--no-build-isolation"]
    for has_compiler in (True, False) if COMPILER else (False,):
        environment["CXX"] = str(_hurried_compiler(tmp_path)) if has_compiler else "/nowhere/c++"
        out = tmp_path / f"wheel-{has_compiler}"
        run(sys.executable, "-m", "pip", "wheel", *alone, "-w", out, sdist)
        (wheel,) = out.iterdir()
        assert wheel.name.endswith("-py3-none-any.whl") != has_compiler
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith(build.LIBRARY) for name in names) == has_compiler

    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    # What it depends on is borrowed from this environment: only the package itself is fresh.
    borrowed = sorted({str(Path(p)) for p in sys.path if p.endswith("site-packages")})
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    run(sys.executable, "-m", "pip", "install", *alone, "--target", site, wheel)
    program = "import zero_offload as z; print(z.__file__); print(z.native_status())"
    said = run(python, "-W", "ignore", "-c", program)
    assert said.startswith(str(site))
    assert "plain torch steps" in said

    if COMPILER:
        environment["CXX"] = str(_hurried_compiler(tmp_path))
        later = run(python, "-m", "zero_offload.build")
        assert "compiled in" in later
        assert "plain torch" not in later
        _check_instruction_sets(next(site.rglob(build.LIBRARY)))


def _check_instruction_sets(library: Path) -> None:
    """One is chosen by name, to compare and to look for a fault."""
    found, status = load(library, {})
    scalar, chosen = load(library, {"ZERO_OFFLOAD_ISA": "scalar"})

    assert found is not None
    assert status.loaded
    assert {status.isa, *status.others} == {"scalar", "vector", "avx2", "avx512"}
    assert not list(library.parent.glob("*.o"))
    assert scalar is not None
    assert scalar.isa == chosen.isa == "scalar"
    assert set(chosen.others.values()) <= {"ZERO_OFFLOAD_ISA=scalar", "this processor lacks it"}
    with pytest.raises(NativeUnavailableError, match="'sse9' here; there are scalar, vector"):
        load(library, {"ZERO_OFFLOAD_ISA": "sse9"})


def _hurried_compiler(folder: Path) -> Path:
    """This machine's, but it does not optimise, which takes most of its time."""
    hurried = folder / "hurried"
    hurried.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    hurried.chmod(hurried.stat().st_mode | stat.S_IXUSR)
    return hurried


def test_a_library_is_current_until_a_source_is_younger(tmp_path: Path) -> None:
    """Kernels of yesterday's sources would be tested in place of today's."""
    csrc, out = tmp_path / "csrc", tmp_path / "out"
    for folder in (csrc, out):
        folder.mkdir()
    source, library = csrc / "a.cpp", out / build.LIBRARY
    source.touch()
    assert not build.is_current(csrc, out)

    library.touch()
    os.utime(source, (1, 1))
    assert build.is_current(csrc, out)

    os.utime(library, (0, 0))
    assert not build.is_current(csrc, out)
