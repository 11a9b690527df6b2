"""Files of torch.save are read as tensors and plain values, and whatever else they are is said."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import zero_engine
from safetensors.torch import save_file
from torch import Tensor, nn
from zero_engine import FileError
from zero_engine._deepspeed_layout import Run, locate_cut_params, locate_whole_groups
from zero_engine._joined_range import JoinedRange
from zero_engine._torch_file import read_torch_file


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(5, 4, generator=generator)
    return {
        "shared": shared,
        "tied": shared,
        "transposed": torch.randn(4, 3, generator=generator).t(),
        "part": torch.randn(6, 6, generator=generator)[1:4, ::2],
        "half": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin"])
def test_any_run_of_elements_is_read(tmp_path: Path, name: str) -> None:
    """Of views and tied tensors too, as state dicts are full of them."""
    torch.save(_weights(), tmp_path / name)

    readers = zero_engine.open_weights(tmp_path / name)

    assert readers.keys() == _weights().keys()
    for key, value in _weights().items():
        reader, flat = readers[key], value.reshape(-1)
        assert (reader.shape, reader.dtype) == (value.shape, value.dtype)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                assert torch.equal(reader.read(start, stop), flat[start:stop]), key


def test_a_model_is_loaded_from_what_torch_saved(tmp_path: Path) -> None:
    """What people have is `torch.save(model.state_dict(), path)`."""
    saved, model = nn.Linear(3, 5), nn.Linear(3, 5)
    torch.save(saved.state_dict(), tmp_path / "model.pt")

    report = zero_engine.load_pretrained(model, tmp_path / "model.pt")

    assert not report.missing
    assert torch.equal(model.weight, saved.weight)
    assert torch.equal(model.bias, saved.bias)


def test_folders_of_torchs_files_are_read_where_there_are_no_better_ones(tmp_path: Path) -> None:
    """Hugging Face's older models; what is of safetensors comes first."""
    for index in range(2):
        torch.save({f"w{index}": torch.full((2,), index)}, tmp_path / f"pytorch_model-{index}.bin")
    index = {f"w{index}": f"pytorch_model-{index}.bin" for index in range(2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))

    found = zero_engine.open_weights(tmp_path)
    assert [found[key].read(0, 2).tolist() for key in ("w0", "w1")] == [[0, 0], [1, 1]]

    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(zero_engine.open_weights(tmp_path)) == ["other"]


class _Runs:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("which", ["eval", "touch", "nested"])
def test_a_pickle_that_would_run_something_is_named_and_not_run(tmp_path: Path, which: str) -> None:
    """Model hubs hold thousands of those."""
    marker = tmp_path / "marker"
    evil = {
        "eval": _Runs(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
        "touch": _Runs(Path.touch, marker),
        "nested": {"a": [_Runs(os.mkdir, str(marker))]},
    }[which]
    torch.save({"weight": torch.ones(2), "evil": evil}, tmp_path / "model.pt")

    with pytest.raises(FileError, match=r"model\.pt: .* nothing of it was run: it asks for .*\w\."):
        zero_engine.load_pretrained(nn.Linear(3, 5), tmp_path / "model.pt")

    assert not marker.exists()
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert marker.exists(), "the file does what it is meant not to do here"


class _Thing:
    """Pickled under a name that only the writer has."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()


class _StandIn:
    """Of ours."""


def test_a_stand_in_gets_attributes_and_nothing_of_the_class(tmp_path: Path, monkeypatch) -> None:
    """A name that is let in must not let in what comes with it, here or anywhere."""
    thing = type("Thing", (_Thing,), {"__module__": "elsewhere"})
    elsewhere = ModuleType("elsewhere")
    elsewhere.Thing = thing
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    path, marker = tmp_path / "a.pt", tmp_path / "marker"
    torch.save([thing(marker)], path)

    (found,) = read_torch_file(path, stand_ins={"elsewhere.Thing": _StandIn})

    assert type(found) is _StandIn
    assert vars(found) == {"marker": str(marker)}
    assert not marker.exists()
    with pytest.raises(FileError, match=r"asks for elsewhere\.Thing"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "got a list"),
        ({"epoch": 3, "model": {}}, "'epoch' is a int"),
        ({"model": {"w": torch.ones(1)}}, "'model' is a dict"),
        ({3: torch.ones(1)}, "3 is a Tensor"),
        ({"w": torch.ones(3).to_sparse()}, "'w' is a torch.sparse_coo torch.float32 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_state_dict_is_said(tmp_path: Path, content: Any, message: str) -> None:
    """Whole training states are saved under the same suffix."""
    torch.save(content, tmp_path / "model.pt")

    with pytest.raises(FileError) as caught:
        zero_engine.open_weights(tmp_path / "model.pt")

    assert "model.pt: expected a state dict" in str(caught.value)
    assert message.split(" is a ", maxsplit=1)[0] in str(caught.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Downloads are cut short, and copies of copies are of anything."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    good = path.read_bytes()
    old = pickle.dumps({"w": 1})

    for content in (good[:-30], good[: len(good) // 2], b"", b"PK\x03\x04", good[:100], old):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"model\.pt: expected a whole file"):
            zero_engine.open_weights(path)
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        zero_engine.open_weights(path)


# ---- Where DeepSpeed's partitions have what ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_partitions_give_every_parameter_back(world_size: int, stage: int, seed: int) -> None:
    """Cut by the words of NOTE(partitions), and put together again."""
    generator = torch.Generator().manual_seed(seed)

    def number(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    names = [f"p{i}" for i in range(2 + number(5))]
    whole = {name: torch.randn(number(12), generator=generator) for name in names}
    groups = [names[::2], names[1::2]]
    numels = [{name: whole[name].numel() for name in group} for group in groups]
    gaps = [[number(3) for _ in group] for group in groups]
    flats: list[list[Tensor]] = [[] for _ in range(world_size)]
    for group, gap in zip(groups, gaps, strict=True):
        if stage == 3:
            parts = [_padded(whole[name], world_size).chunk(world_size) for name in group]
            for rank in range(world_size):
                pieces = [p[rank] if rank < len(p) else p[0][:0] for p in parts]
                flats[rank].append(torch.cat(pieces))
        else:
            ends = [torch.cat([whole[n], torch.zeros(g)]) for n, g in zip(group, gap, strict=True)]
            flat = torch.cat(ends)
            step = _padded(flat, 2 * world_size).numel() // world_size
            for rank in range(world_size):
                flats[rank].append(flat[rank * step : (rank + 1) * step])
    lengths = [[flat.numel() for flat in of_rank] for of_rank in flats]

    if stage == 3:
        runs = locate_cut_params(numels, lengths)
    else:
        runs = locate_whole_groups(numels, gaps, lengths)

    for name, value in whole.items():
        parts = tuple((flats[run.rank][run.group], run.start, run.stop) for run in runs[name])
        reader = JoinedRange(value.shape, value.dtype, parts)
        for start in range(value.numel() + 1):
            stop = start + number(value.numel() - start + 1)
            assert torch.equal(reader.read(start, stop), value[start:stop])


def _padded(value: Tensor, multiple: int) -> Tensor:
    return torch.cat([value, torch.zeros(-value.numel() % multiple)])


def test_what_is_not_there_is_not_invented() -> None:
    """Runs that end early are how a reader finds out."""
    runs = locate_whole_groups([{"a": 3, "b": 4}], [[0, 0]], [[4], [1]])

    assert runs == {"a": (Run(0, 0, 0, 3),), "b": (Run(0, 0, 3, 4), Run(1, 0, 0, 1))}
