"""Files of torch.save are read as tensors and plain values, and whatever else they are is said."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_engine
import zero_engine.checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from zero_engine import FileError


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


def test_any_run_of_elements_is_read(tmp_path: Path) -> None:
    """Of views and tied tensors too, as state dicts are full of them."""
    torch.save(_weights(), tmp_path / "model.pt")

    readers = zero_engine.checkpoint.open_weights(tmp_path / "model.pt")

    assert readers.keys() == _weights().keys()
    for key, value in _weights().items():
        reader, flat = readers[key], value.reshape(-1)
        assert (reader.shape, reader.dtype) == (value.shape, value.dtype)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                assert torch.equal(reader.read(start, stop), flat[start:stop]), key


def test_folders_of_torchs_files_are_read_where_there_are_no_better_ones(tmp_path: Path) -> None:
    """Hugging Face's older models; what is of safetensors comes first."""
    for index in range(2):
        torch.save({f"w{index}": torch.full((2,), index)}, tmp_path / f"pytorch_model-{index}.bin")
    index = {f"w{index}": f"pytorch_model-{index}.bin" for index in range(2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))

    found = zero_engine.checkpoint.open_weights(tmp_path)
    assert [found[key].read(0, 2).tolist() for key in ("w0", "w1")] == [[0, 0], [1, 1]]

    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(zero_engine.checkpoint.open_weights(tmp_path)) == ["other"]


class _Runs:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_a_pickle_that_would_run_something_is_named_and_not_run(tmp_path: Path) -> None:
    """Model hubs hold thousands of those."""
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    for evil in (
        _Runs(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
        _Runs(Path.touch, marker),
        {"a": [_Runs(os.mknod, str(marker))]},
    ):
        torch.save({"weight": torch.ones(2), "evil": evil}, path)

        with pytest.raises(
            FileError, match=r"model\.pt: .* nothing of it was run: it asks for .*\w\."
        ):
            zero_engine.load_pretrained(nn.Linear(3, 5), path)

        assert not marker.exists()
        torch.load(path, weights_only=False)
        assert marker.exists(), "the file does what it is meant not to do here"
        marker.unlink()


def test_what_is_no_state_dict_is_said(tmp_path: Path) -> None:
    """Whole training states are saved under the same suffix."""
    path = tmp_path / "model.pt"
    for content, message in (
        ([torch.ones(1)], "got a list"),
        ({"epoch": 3, "model": {}}, "'epoch' is a"),
        ({"model": {"w": torch.ones(1)}}, "'model' is a"),
        ({3: torch.ones(1)}, "3 is a"),
        ({"w": torch.ones(3).to_sparse()}, "'w' is a"),
    ):
        torch.save(content, path)
        with pytest.raises(FileError, match="expected a state dict") as caught:
            zero_engine.checkpoint.open_weights(path)
        assert message.removesuffix(" is a") in str(caught.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Downloads are cut short, and copies of copies are of anything."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    good = path.read_bytes()
    old = pickle.dumps({"w": 1})

    for content in (good[:-30], good[: len(good) // 2], b"", b"PK\x03\x04", good[:100], old):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"model\.pt: expected a whole file"):
            zero_engine.checkpoint.open_weights(path)
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        zero_engine.checkpoint.open_weights(path)
