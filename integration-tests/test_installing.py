"""Wheels and editable builds leave the source tree alone; no page names a stranger's project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
COMPILED: Final = {"zero-comm": "zero_comm/_native", "zero-offload": "zero_offload/_native"}
BUILDS: Final = {
    "wheel": "from hatchling.build import build_wheel as build",
    "editable": "from hatchling.build import build_editable as build",
}
# Writes what it was asked for with a word in it, in the time of a shell.
COMPILER: Final = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
echo compiled > "$2"
"""


def _contents(folder: Path) -> dict[str, bytes]:
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False], ids=["compiler", "no-compiler"])
@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("package", COMPILED)
def test_only_an_editable_build_that_compiles_writes_to_the_tree(
    package: str, kind: str, has_compiler: bool, tmp_path: Path
) -> None:
    """A wheel that was built beside an editable installation took its kernels away."""
    pytest.importorskip("hatchling")
    source, out, compiler = tmp_path / "source", tmp_path / "out", tmp_path / "compiler"
    ignored = shutil.ignore_patterns("*.so", "dist", "__pycache__")
    shutil.copytree(ROOT / "packages" / package, source, ignore=ignored)
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    library = f"lib{package.replace('-', '_')}.so"
    in_tree = source / "src" / COMPILED[package] / library
    in_tree.write_text("of an earlier build")
    os.utime(in_tree, (1, 1))
    before = _contents(source)
    environment = {"CXX": str(compiler) if has_compiler else "/nowhere/c++", "PATH": "/nowhere"}
    environment |= {"CUDA_HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}

    program = f"{BUILDS[kind]}\nbuild({str(out)!r})"
    out.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    after = _contents(source)
    if kind == "editable" and has_compiler:
        assert after.pop(str(in_tree.relative_to(source))) == b"compiled\n"
        before.pop(str(in_tree.relative_to(source)))
    assert after == before
    said = ran.stdout + ran.stderr
    assert ("/nowhere/c++" in said) is not has_compiler
    assert ("is stale" in said) is (kind == "editable" and not has_compiler)
    (wheel,) = (zipfile.ZipFile(path) for path in out.iterdir())
    shipped = [wheel.read(name) for name in wheel.namelist() if name.endswith(".so")]
    assert shipped == ([b"compiled\n"] if kind == "wheel" and has_compiler else [])


# ---- The package index has a project of somebody else under the name zero-engine ----


def _project(package: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def test_no_text_tells_anyone_to_install_by_name() -> None:
    """`pip install zero-engine` installs a stranger's code."""
    paths = [
        *(path for kind in ("md", "py", "toml") for path in ROOT.glob(f"packages/**/*.{kind}")),
        *(path for kind in ("md", "py", "html") for path in ROOT.glob(f"docs/**/*.{kind}")),
        *(path for name in ("benchmarks", "examples") for path in ROOT.glob(f"{name}/**/*.*")),
        *ROOT.glob("integration-tests/*.py"),
        *ROOT.glob("*.md"),
    ]
    # A name that is not the end of a path: what pip would look for in an index.
    by_name = re.compile(rf"pip install[^\n`]*?[\s'\"]({'|'.join(PACKAGES)})\b")
    joined_strings = re.compile(r"(['\"])\s*\n\s*f?\1")

    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path != Path(__file__) and path.is_file() and "_build" not in path.parts
        for match in by_name.finditer(joined_strings.sub("", path.read_text(errors="replace")))
    ]

    assert len(paths) > 400
    assert not found
    assert by_name.search("pip install 'zero-engine[tables]'"), "what is searched for is found"
    assert not by_name.search('pip install "./packages/zero-engine[tables]"')


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_how_it_is_installed_and_is_not_uploaded(package: str) -> None:
    """The line that works from a clone, with every package of ours that it depends on."""
    project = _project(package)
    needs, new = set[str](), {package}
    while new - needs:
        needs |= new
        names = (re.match(r"[\w-]+", line)[0] for n in new for line in _project(n)["dependencies"])  # type: ignore[index]
        new = {name for name in names if name in PACKAGES}
    readme = (ROOT / "packages" / package / "README.md").read_text()

    assert "Private :: Do Not Upload" in project["classifiers"]
    (line,) = re.findall(r"(?m)^    pip install (.*)$", readme)
    assert set(re.findall(r"\./packages/([\w-]+)", line)) == needs
    assert "not on the package index" in readme


def test_pages_that_say_how_to_install_give_one_command() -> None:
    """Readers of several pages would otherwise have to find out which packages they need."""
    pages = ("README.md", "docs/start.md", "packages/zero-engine/README.md")
    lines = {
        page: re.findall(r"(?m)^    pip install \./.*$", (ROOT / page).read_text())
        for page in pages
    }

    assert all(len(found) == 1 for found in lines.values())
    assert len({*map(tuple, lines.values())}) == 1
