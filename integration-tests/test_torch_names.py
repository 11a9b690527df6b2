"""What is private in torch, or differs between its versions, is named in one file of a package."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import zero_comm
from torch import nn
from zero_ckpt import Checkpointer, RngTracker
from zero_comm.testing import equal
from zero_deepspeed import get_accelerator
from zero_offload import HostArena

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = {
    path.parent.name: path.parent for path in ROOT.glob("packages/*/src/*/torch_private.py")
}
OBJECTS: Final = (
    *(nn.BatchNorm1d(1), torch.optim.SGD([torch.zeros(1)]), torch.zeros(1).requires_grad_().exp()),
    *(torch.zeros(1).untyped_storage(), torch.ops.aten.add, torch.ops.aten.add.Tensor),
    *(torch.zeros(1).requires_grad_().exp().grad_fn, dist.ProcessGroup, dist.Work, dist.Store),
)
# Of torch's objects, and of nobody else that we call.
PRIVATE: Final = {name for found in OBJECTS for name in dir(found) if re.match(r"_[a-zA-Z]", name)}


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every private name of torch in a file, and every question which device there is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None)
            for alias in node.names:
                whole = f"{module}.{alias.name}" if module else alias.name
                if whole.startswith("torch.") and "._" in whole:
                    yield node.lineno, whole
        elif isinstance(node, ast.Attribute):
            whole, is_own = ast.unparse(node), ast.unparse(node.value) in ("self", "cls")
            is_private = re.match(r"(torch|dist|nn|functional)\b.*\._[a-zA-Z]", whole)
            asks = re.fullmatch(
                r"torch\.(cuda|accelerator)\.(is_available|current_accelerator)", whole
            )
            if is_private or asks or (node.attr in PRIVATE and not is_own):
                yield node.lineno, whole


@pytest.mark.parametrize("package", SOURCES)
def test_only_one_file_of_a_package_names_what_is_private_in_torch(package: str) -> None:
    """A version of torch that renames something is met in one place."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sorted(SOURCES[package].rglob("*.py"))
        if file.name != "torch_private.py"
        for line, name in _names(ast.parse(file.read_text()))
    ]

    assert not found
    assert len(SOURCES) == 5
    for program in ("torch._C.f()", "x._version", "m._buffers", "import torch._ops", "p._base"):
        assert [*_names(ast.parse(program))], f"{program} is found"
    assert [*_names(ast.parse("torch.cuda.is_available()"))]
    assert not [*_names(ast.parse("self._buffers = torch.zeros(1).names"))]


# ---- A torch that was built for an accelerator which is not there ----


@pytest.fixture
def _built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install torch` gives on a laptop: it names CUDA, and finds none when it looks."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")

    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)


@pytest.mark.usefixtures("_built_for_cuda")
def test_a_cuda_build_without_a_gpu_is_a_cpu_machine(tmp_path: Path) -> None:
    """Scripts died with "Found no NVIDIA driver" at their first line about a device."""
    deepspeeds, x = get_accelerator(), torch.ones(2, requires_grad=True)
    arena = HostArena("test")
    arena.allocate(64)
    asked: dict[str, Any] = {
        **{
            f"{package}.torch_private": getattr(
                import_module(f"{package}.torch_private"), "accelerator", lambda: None
            )()
            for package in SOURCES
        },
        "name": deepspeeds.device_name(),
        "name of a device": deepspeeds.device_name(0),
        "name of the current device": deepspeeds.current_device_name(),
        "is_available": deepspeeds.is_available(),
        "count": deepspeeds.device_count(),
        "backend": deepspeeds.communication_backend_name(),
        "dtypes": deepspeeds.supported_dtypes(),
        "pinned": deepspeeds.pin_memory(x) is x,
        "rng": RngTracker().device,
        "group": zero_comm.init().device,
        "page-locked": arena.pin_reason,
    }
    deepspeeds.set_device(0)
    deepspeeds.synchronize()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        Checkpointer(synchronizes=True).checkpoint(torch.exp, x).sum().backward()

    assert asked == {
        **dict.fromkeys((f"{package}.torch_private" for package in SOURCES), None),
        "name": "cpu",
        "name of a device": "cpu",
        "name of the current device": "cpu",
        "is_available": False,
        "count": 1,
        "backend": "gloo",
        "dtypes": [torch.float32, torch.float16, torch.bfloat16],
        "pinned": True,
        "rng": torch.device("cpu"),
        "group": torch.device("cpu"),
        "page-locked": "torch sees no accelerator",
    }
    assert equal(x.grad, torch.ones(2).exp())  # type: ignore[arg-type]


# ---- The versions that are declared ----


def test_each_declared_version_of_torch_was_run() -> None:
    """A bound that nobody ran is a promise to strangers: 230 tests failed at the lower one."""
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = {
        match[1]: match[2]
        for match in re.finditer(r"(?m)^\| (2\.\d+\.\d+) \|[^|]*\| (\d{4}-\d\d-\d\d) \|", page)
    }
    bounds = set()
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        bounds.update(re.findall(r"^torch>=([\d.]+)$", "\n".join(project["dependencies"]), re.M))
    matrix = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (versions,) = matrix["tool"]["hatch"]["envs"]["torch"]["matrix"]

    assert set(versions["torch"]) == rows.keys()
    assert all(date.fromisoformat(day) for day in rows.values())
    assert len(bounds) == 1, "one lower bound for all packages"
    for bound in bounds:
        assert any(version.startswith(f"{bound}.") for version in rows)
