"""The `zero` command in this process, and files by hand; `ranks` comes with zero-comm."""

import itertools
import runpy
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from zero_engine.testing import write_manifest


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`zero("plan", ...)` runs `python -m zero_engine plan ...` and returns its exit status."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["zero", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("zero_engine", run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run


@pytest.fixture(scope="session")
def by_hand() -> Callable[..., Path]:
    """Writes a checkpoint in format 1, with the safetensors library.

    Pieces go to the files of two ranks by turns, in no order; a third has a moment and no more.
    """

    def write(
        path: Path,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        cuts: tuple[int, ...] = (5,),
        serial: int = 1,
    ) -> Path:
        path.mkdir(parents=True)
        files: list[dict[str, Tensor]] = [{}, {}, {"optimizer/moment/0": torch.ones(3)}]
        said: dict[str, Any] = {}
        for kind, tensors in (("params", params), ("buffers", buffers)):
            said[kind] = {}
            for name, value in tensors.items():
                edges = [0, *(cut for cut in cuts if cut < value.numel()), value.numel()]
                pieces = []
                for index, (start, stop) in enumerate(itertools.pairwise(edges)):
                    if start < stop:
                        key = f"{kind}/{name}/{start}"
                        files[index % 2][key] = value.reshape(-1)[start:stop].clone()
                        where = {"file": f"rank-{index % 2:05}-00.safetensors", "key": key}
                        pieces.insert(0, where | {"start": start, "stop": stop})
                dtype = str(value.dtype).removeprefix("torch.")
                about = {"dtype": dtype, "shape": list(value.shape), "pieces": pieces}
                said[kind][name] = about
        facts = {}
        for index, tensors in enumerate(files):
            save_file(tensors, path / (name := f"rank-{index:05}-00.safetensors"))
            content = (path / name).read_bytes()
            facts[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
        moment = {"dtype": "float32", "shape": [3]}
        where = {"file": name, "key": "optimizer/moment/0", "start": 0, "stop": 3}
        said |= {name: {} for name in ("ties", "rank_buffers", "rngs")}
        said |= dict.fromkeys(("scheduler", "engine", "extra"))
        said |= {"tag": path.name, "serial": serial, "step": 7, "world_size": 2, "stage": 3}
        said |= {"excludes_frozen": False, "param_groups": [], "files": facts}
        said["optimizer"] = {next(iter(params)): {"exp_avg": moment | {"pieces": [where]}}}
        write_manifest(path, said)
        return path

    return write
