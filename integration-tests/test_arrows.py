"""Imports point down, so that each package can be released on its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch.utils._device

ROOT: Final = Path(__file__).parents[1]
ALLOWED: Final[dict[str, set[str]]] = {
    "zero_comm": set(),
    "zero_partition": {"zero_comm"},
    "zero_ckpt": {"zero_comm"},
    "zero_offload": set(),
    "zero_engine": {"zero_comm", "zero_partition", "zero_ckpt", "zero_offload"},
    "zero_deepspeed": {"zero_comm", "zero_partition", "zero_ckpt", "zero_offload", "zero_engine"},
}


def test_every_package_has_its_arrows() -> None:
    """A package that this file forgets could import anything."""
    packages = {path.name for path in ROOT.glob("packages/*/src/*") if (path / "py.typed").exists()}

    assert packages == ALLOWED.keys()


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_point_down(package: str) -> None:
    """A package that imports a sibling it may not is no longer released on its own."""
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package

    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names
    }

    assert imported & ALLOWED.keys() - {package} <= ALLOWED[package]


def test_one_file_of_zero_engine_names_what_is_above_it() -> None:
    """The table of old paths. All else finds zero_deepspeed by its entry point."""
    source = ROOT / "packages/zero-engine/src/zero_engine"

    naming = [file.name for file in source.rglob("*.py") if "zero_deepspeed" in file.read_text()]

    assert naming == ["moved.py"]


CUDA_ALONE: Final = {
    "zero-comm/src/zero_comm/codecs/kernels.py": "which kernels a device has: Triton's are CUDA's",
    "zero-comm/src/zero_comm/codecs/triton.py": "a launch of Triton goes to the current device",
    "zero-comm/src/zero_comm/testing/kernels.py": "compiles for an architecture of CUDA",
    "zero-deepspeed/src/zero_deepspeed/accelerator.py": "which dtypes a GPU computes in",
    "zero-deepspeed/src/zero_deepspeed/zero.py": "a value of `remote_device` in DeepSpeed's words",
    "zero-engine/src/zero_engine/cli.py": "a plan is made for a GPU that need not be here",
    "zero-engine/src/zero_engine/planning/plan.py": "the same",
    "zero-offload/src/zero_offload/adam/fused.py": "FusedAdam's kernel",
    "zero-offload/src/zero_offload/memory/arena.py": "cudaHostRegister",
    "zero-partition/src/zero_partition/stand_in.py": "`Tensor.cuda` moves a tensor",
}


def test_cuda_is_named_only_where_no_other_device_would_do() -> None:
    """What every accelerator has is asked of torch.accelerator, so that XPU and NPU work too."""
    named = re.compile(r'torch\.cuda|is_cuda|"cuda[:"]')
    packages = ROOT / "packages"

    found = {
        str(file.relative_to(packages))
        for file in packages.glob("*/src/**/*.py")
        if named.search(file.read_text())
    }

    assert found == CUDA_ALONE.keys()


def test_whatever_is_made_in_a_package_names_its_device() -> None:
    """Under torch.set_default_device() it would be elsewhere than the code around it expects."""
    makers = {of.__name__ for of in torch.utils._device._device_constructors()}
    packages, found = ROOT / "packages", []
    for file in packages.glob("*/src/**/*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            named = {keyword.arg for keyword in call.keywords}  # None: of **options
            module, _, name = ast.unparse(call.func).partition(".")
            if module == "torch" and name in makers and not named & {"device", None}:
                found.append(f"{file.relative_to(packages)}:{call.lineno}")

    assert not found


@pytest.mark.parametrize("package", ALLOWED)
def test_layers_point_down_and_no_imports_go_in_circles(package: str) -> None:
    """Who knows the layers below understands a file: types and late imports count, too."""
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package
    said = re.search(
        r"(?m)^# Layers, lowest first: ([^.]*)\.", (source / "__init__.py").read_text()
    )
    assert said is not None
    layers = re.findall(r"\w+", said[1])
    imports = _imports_inside(package, source)

    assert {module.split(".")[0] for module in imports} == {*layers}
    for module, found in imports.items():
        above = {to for to in found if _layer(layers, to) > _layer(layers, module)}
        assert not above, f"{module} imports what is above it"
    while ready := {module for module, found in imports.items() if not found & imports.keys()}:
        imports = {module: found for module, found in imports.items() if module not in ready}
    assert not imports, "circles"


def _layer(layers: list[str], module: str) -> int:
    return layers.index(module.split(".", maxsplit=1)[0])


def _imports_inside(package: str, source: Path) -> dict[str, set[str]]:
    """By module of a package, without its name: the others that it imports, anywhere in it."""
    names = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for file in source.rglob("*.py")
        if file.parent != source or not file.name.startswith("__")
    }
    found: dict[str, set[str]] = {}
    for name, file in names.items():
        inside = name if file.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = ".".join(filter(None, (package, inside, base)))
                targets = [f"{base}.{alias.name}" for alias in node.names] + [base]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            inner = (to.removeprefix(f"{package}.") for to in targets if to.startswith(package))
            found[name].update(to for to in inner if to in names and to != name)
    return found


# All may import torch, which takes long: once, before each child imports a package of its own.
PROGRAM: Final = """
import os, sys, torch
for package in sys.argv[1:]:
    if not os.fork():
        found = __import__(package)
        print(package, *sys.modules, flush=True)
        for name in found.__all__:  # most are loaded on first use
            getattr(found, name)
        print(package, *sys.modules, flush=True)
        os._exit(0)
    _, status = os.wait()
    assert not status, package
if not os.fork():
    import zero_engine
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(stage=3))
    print("shard", *sys.modules, flush=True)
    os._exit(0)
assert not os.wait()[1]
"""
WINGS: Final = {
    *("zero_engine.checkpoint", "zero_engine.engine", "zero_engine.planning"),
    *("zero_engine.integrations", "zero_engine.cli", "zero_engine.commands"),
    *("zero_deepspeed", "tabulate"),
}


@pytest.mark.slow
def test_packages_load_only_what_they_may_and_only_when_it_is_used() -> None:
    """The source may be clean and a late import not; who shards pays for no checkpoints."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ALLOWED],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    lines = [(line.split()[0], set(line.split()[1:])) for line in ran.stdout.splitlines()]
    of_package, (_, with_shard) = lines[:-1], lines[-1]
    assert {package for package, _ in of_package} == ALLOWED.keys()
    for package, names in of_package:
        assert package in names
        assert names & ALLOWED.keys() <= ALLOWED[package] | {package}
    at_import = dict(reversed(of_package))
    assert not WINGS & with_shard
    assert not {name for name in at_import["zero_engine"] if name.startswith("zero_partition")}


# Attributes of torch's and the standard library's objects that a class of ours has, too: an
# optimizer's state, what GradScaler sets for a step, a module's forward, a record of logging.
OTHERS: Final = {"state", "grad_scale", "found_inf", "forward", "rank"}


def _stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def test_no_module_sets_an_attribute_of_another_modules_object() -> None:
    """State that others set has no owner: to know who changes it, one must read every module.

    A class gives a method for it, which says what the change means. Modules for tests may replace
    anything. Objects are told apart by the names of their attributes alone.
    """
    files = [
        file
        for file in sorted(ROOT.glob("packages/*/src/**/*.py"))
        if "testing" not in file.with_suffix("").parts
    ]
    trees = {file: ast.parse(file.read_text()) for file in files}
    owners: dict[str, set[Path]] = {}
    for file, tree in trees.items():
        for of in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            fields = [node.target for node in of.body if isinstance(node, ast.AnnAssign)]
            names = {target.id for target in fields if isinstance(target, ast.Name)}
            names |= {store.attr for store in _stores(of) if ast.unparse(store.value) == "self"}
            for name in names - OTHERS:
                owners.setdefault(name, set()).add(file)

    found = [
        f"{file.relative_to(ROOT)}:{store.lineno}: {ast.unparse(store)}"
        for file, tree in trees.items()
        for store in _stores(tree)
        if file not in owners.get(store.attr, {file})
        and ast.unparse(store.value) not in ("self", "cls", "ctx")
    ]

    assert not found, found
