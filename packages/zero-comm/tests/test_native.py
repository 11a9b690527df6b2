"""Compiled codecs: equal to plain torch bit for bit, and a reason where there are none."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from zero_comm import Blockwise, CodecError, build
from zero_comm.codecs import decode_blocks, encode_blocks
from zero_comm.testing import load_native, using_kernels

PACKAGE: Final = Path(__file__).parents[1]
COMPILER: Final = shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no c++ on PATH")

NUMELS = [0, 1, 2, 15, 16, 17, 255, 256, 257, 512, 513, 4001]
BLOCKS = [2, 6, 8, 128, 256, 1000, 1024]


@pytest.fixture(scope="module", params=["best", "plainest"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For the best instruction set here, and for the one that every processor has."""
    if COMPILER is None:
        pytest.skip("there is no c++ on PATH")
    out_dir = tmp_path_factory.mktemp(request.param)
    flags = ["-DEACH_ISA="] if request.param == "plainest" else []
    library = build.compile_library(build.HERE, out_dir, flags)
    found, reason = load_native(library, {})
    assert found is not None, reason
    return found


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_codecs_write_and_read_the_same_bits(compiled: Any, bits: int, block: int) -> None:
    """Ranks with and without a compiler train together, and their parameters must not differ."""
    for numel in NUMELS:
        for values in _kinds(numel):
            integers, scales = _wire(numel, bits, block)
            expected_integers, expected_scales = _wire(numel, bits, block)
            encode_blocks(values, expected_integers, expected_scales, bits=bits, block=block)
            compiled.encode(values, integers, scales, bits=bits, block=block)
            assert torch.equal(integers, expected_integers)
            assert torch.equal(scales, expected_scales)

            for adds in (False, True):
                out, expected = torch.full((2, numel), 0.1)
                how = {"bits": bits, "block": block, "adds": adds}
                decode_blocks(integers, scales, expected, **how)
                compiled.decode(integers, scales, out, **how)
                assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def _kinds(numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    usual = torch.randn(numel, generator=generator) * 10
    special = usual.clone()
    special[::40] = torch.nan
    special[1::40] = torch.inf
    ties = torch.arange(numel) % 255 / 2.0 - 63.5
    return [
        *(usual, special, ties),
        *(torch.zeros(numel), -torch.zeros(numel)),
        *(usual * 1e-40, usual * 2.0**-126, usual.clamp(-1, 1) * torch.finfo(torch.float32).max),
    ]


def _wire(numel: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    codec = Blockwise(bits, block)
    num_bytes = codec.value_bytes(numel), codec.scale_bytes(numel)
    integers, scales = (torch.full((n,), 77, dtype=torch.uint8) for n in num_bytes)
    return integers, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_codec_is_the_same_with_and_without_them(compiled: Any, dtype: torch.dtype) -> None:
    """Long ones too, which are cut so that passes over them stay in cache."""
    values = torch.randn(100_003).to(dtype)
    for codec in (Blockwise(8), Blockwise(4), Blockwise(8, block=100)):
        results = []
        for found in (compiled, None):
            with using_kernels(found):
                wire = codec.encode(values)
                results.append((wire, codec.decode(wire, torch.empty_like(values))))
        (wire, decoded), (expected_wire, expected) = results
        assert torch.equal(wire, expected_wire)
        assert torch.equal(decoded, expected)


# ---- Where there are none ----


def test_there_is_a_reason_where_there_are_none(tmp_path: Path) -> None:
    """A slow run whose cause nobody can ask for is hard to mend."""
    missing, damaged = tmp_path / "libmissing.so", tmp_path / "libdamaged.so"
    damaged.write_text("not a library")
    for path, environment, said in (
        (missing, {}, r"python -m zero_comm.build"),
        (damaged, {}, "cannot be loaded"),
        (damaged, {"ZERO_COMM_NATIVE": "off"}, "ZERO_COMM_NATIVE=off"),
    ):
        found, reason = load_native(path, environment)
        assert found is None
        assert said in reason
    with pytest.raises(CodecError, match=r"require, but .*libmissing\.so does not exist"):
        load_native(missing, {"ZERO_COMM_NATIVE": "require"})
    with pytest.raises(CodecError, match="'maybe': expected one of auto, require, off"):
        load_native(missing, {"ZERO_COMM_NATIVE": "maybe"})


@needs_compiler
def test_a_library_of_another_version_is_not_called(tmp_path: Path) -> None:
    """Its arguments would be taken for others, which corrupts in silence."""
    for name in build.SOURCES:
        shutil.copy(build.HERE / name, tmp_path)
    header = tmp_path / "zero_comm.h"
    abi = int(re.search(r"#define ZERO_COMM_ABI (\d+)", header.read_text())[1])  # type: ignore
    header.write_text(header.read_text().replace(f"COMM_ABI {abi}", f"COMM_ABI {abi + 1}"))
    library = build.compile_library(tmp_path, tmp_path)

    found, reason = load_native(library, {})

    assert found is None
    assert f"built for ABI {abi + 1}, this package calls ABI {abi}" in reason
    assert {path.name for path in tmp_path.iterdir()} == {*build.SOURCES, build.LIBRARY}


@pytest.mark.slow
def test_plain_torch_says_so_once() -> None:
    """Once is enough, and never is too little; import alone looks for nothing."""
    program = (
        "import torch, zero_comm as z\n"
        "print('imported', flush=True)\n"
        "for _ in range(2): z.Blockwise(8).encode(torch.zeros(9))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ZERO_COMM_NATIVE": "off"},
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    first, *said = ran.stdout.splitlines()
    assert first == "imported"
    assert said == [
        "codecs on cpu run in plain torch, several times slower, because ZERO_COMM_NATIVE=off"
    ]


# ---- The recipe ----


def test_the_recipe_needs_the_standard_library_only() -> None:
    """The build environment is isolated: it has neither torch nor attrs."""
    recipe = inspect.getsourcefile(build.compile_library)
    program = f"import runpy, sys; runpy.run_path({recipe!r}); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert {"torch", "attrs", "zero_comm"}.isdisjoint(ran.stdout.split())


def test_a_compiler_that_is_missing_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is to install one, or to say where it is; and nothing half made is left."""
    with pytest.raises(build.CompileError, match=r"c\+\+, g\+\+ or clang\+\+ is not on PATH"):
        build.find_compiler({"PATH": "/nowhere"})
    broken, out_dir = tmp_path / "broken", tmp_path / "out"
    broken.write_text("#!/bin/sh\necho this compiler is ill; exit 3\n")
    broken.chmod(0o700)
    out_dir.mkdir()
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.CompileError, match=r"ended with 3:\nthis compiler is ill"):
        build.compile_library(build.HERE, out_dir)
    assert not list(out_dir.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_has_the_library_if_there_was_a_compiler(
    tmp_path: Path, has_compiler: bool
) -> None:
    """And installs all the same if there was none, with the sources to build from later."""
    pytest.importorskip("hatchling")
    if has_compiler and COMPILER is None:
        pytest.skip("there is no c++ on PATH")
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("*.so", "dist", "__pycache__"))
    environment = os.environ | ({} if has_compiler else {"CXX": "/nowhere/c++"})
    environment.pop("ZERO_COMM_NATIVE", None)
    make = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "to")]
    subprocess.run(make, cwd=source, env=environment, check=True, capture_output=True)
    (wheel,) = (tmp_path / "to").iterdir()
    names = zipfile.ZipFile(wheel).namelist()

    assert wheel.name.endswith("-py3-none-any.whl") != has_compiler
    native = {Path(name).name for name in names}
    assert (build.LIBRARY in native) == has_compiler
    assert set(build.SOURCES) <= native
