"""Files of safetensors and of torch.save: any run of what they hold, or what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_engine
from safetensors.torch import save_file
from torch import Tensor, nn
from zero_engine import FileError
from zero_engine.checkpoint import open_weights
from zero_engine.checkpoint.ranges import FileRun, TensorFile


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (5, 16), generator=generator, dtype=torch.uint8)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {str(dtype): raw.to(dtype) for dtype in dtypes}
    shapes = {"0-d": (), "1-d": (80,), "tall": (80, 1), "wide": (1, 80), "3-d": (2, 4, 10)}
    tensors |= {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {str(shape): torch.empty(shape) for shape in ((0,), (0, 3), (3, 0))}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_any_run_of_elements_is_what_was_written(tmp_path: Path, name: str) -> None:
    """A shard begins and ends inside rows; and state dicts are full of views and ties."""
    tensors = _tensors()
    if name == "model.pt":
        matrix = tensors["1-d"].view(8, 10)
        tensors |= {"tied": matrix, "part": matrix[1:5, ::2], "turned": matrix.t()}
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)

    readers = open_weights([tmp_path / name])

    assert readers.keys() == tensors.keys()
    for key, tensor in tensors.items():
        reader = readers[key]
        assert (reader.shape, reader.dtype) == (tensor.shape, tensor.dtype)
        for edges in ((0, 80), (3, 3), (2, 9), (7, 50), (79, 80)):
            start, stop = (min(edge, tensor.numel()) for edge in edges)
            found, expected = reader.read(start, stop), tensor.reshape(-1)[start:stop]
            assert found.dtype == expected.dtype
            assert torch.equal(found.double(), expected.double()), (key, edges)
            for memory in (
                torch.empty_like(expected),
                torch.empty(expected.shape, dtype=torch.float64),
                torch.empty(2 * expected.numel(), dtype=expected.dtype)[::2],
            ):
                version = memory._version
                reader.read_into(memory, start)
                assert torch.equal(memory.double(), expected.double()), (key, edges)
                assert memory._version > version or not memory.numel()  # autograd hears of it


def test_a_tensor_shorter_than_its_manifest_says_is_named(tmp_path: Path) -> None:
    """What lies behind its end in the file is the start of another tensor."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8), "b": torch.ones(8)}, path)
    run = FileRun(TensorFile(path), "a", torch.float32, numel=16)
    assert run.read(0, 8).sum() == 0
    with pytest.raises(FileError, match=r"expected 'a' to have at least 9 elements of .*float32"):
        run.read(4, 9)


def test_folders_of_torchs_files_are_read_where_there_are_no_better_ones(tmp_path: Path) -> None:
    """Hugging Face's older models; what is of safetensors comes first."""
    for index in range(2):
        torch.save({f"w{index}": torch.full((2,), index)}, tmp_path / f"pytorch_model-{index}.bin")
    index = {f"w{index}": f"pytorch_model-{index}.bin" for index in range(2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))

    found = open_weights(tmp_path)
    assert [found[key].read(0, 2).tolist() for key in ("w0", "w1")] == [[0, 0], [1, 1]]

    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_weights(tmp_path)) == ["other"]


def test_an_index_is_held_to_its_word(tmp_path: Path) -> None:
    """It may name tensors that its files lack, or files elsewhere."""
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, message in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "names 'b', which"),
        ({"a": "../one.safetensors"}, "beside the index"),
        ({"a": "two.safetensors"}, "json: names 'two.safetensors', but there is no such file"),
        ([], "expected a 'weight_map'"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FileError, match=message):
            open_weights(tmp_path)
    index.write_bytes(b"\xff{")
    with pytest.raises(FileError, match="expected JSON"):
        open_weights(index)
    index.unlink()
    with pytest.raises(FileError, match="json: no such file"):
        open_weights(index)


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
            open_weights(path)
        assert message.removesuffix(" is a") in str(caught.value)
    torch.save({"optimizer": {}, "model": {"w": torch.ones(1)}}, path)
    with pytest.raises(FileError, match=r"torch\.load\(path\)\['model'\]"):
        open_weights(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Downloads are cut short, and copies of copies are of anything."""
    path, other = tmp_path / "model.safetensors", tmp_path / "model.pt"
    save_file({"a": torch.arange(10.0)}, path)
    torch.save({"w": torch.arange(1000.0)}, other)
    good, of_torch = path.read_bytes(), other.read_bytes()
    damaged: dict[Path, tuple[bytes, ...]] = {
        path: (
            *(good[:-1], good + b"more", good[:20], b"x" * 4, b""),
            good[:8] + b"?" * int.from_bytes(good[:8], "little"),
            good.replace(b"F32", b"F99"),
            good.replace(b"[10]", b"[11]"),
        ),
        other: (
            *(of_torch[:-30], of_torch[: len(of_torch) // 2], of_torch[:100]),
            *(b"", b"PK\x03\x04", pickle.dumps({"w": 1})),
        ),
    }
    messages = (
        r"safetensors: expected a whole safetensors file \(.+\); .* again",
        r"pt: expected a whole file",
    )
    for (file, contents), message in zip(damaged.items(), messages, strict=True):
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(FileError, match=message):
                open_weights(file)
        file.unlink()
        with pytest.raises(FileError, match="no such file"):
            open_weights(file)
    with pytest.raises(FileError, match="found none"):
        open_weights(tmp_path)


@pytest.mark.parametrize("how", ["compressed", "shared"])
def test_an_archive_that_gives_more_than_it_has_is_refused(tmp_path: Path, how: str) -> None:
    """A zip bomb kept a load busy for minutes; torch.save compresses nothing."""
    path, plain = tmp_path / "pytorch_model.bin", tmp_path / "plain"
    torch.save({"w": torch.zeros(4 * 2**20)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(
            path, "w", zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
        ) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
        if how == "shared":  # the directory names the same bytes again and again
            target.filelist += 8 * target.filelist

    with pytest.raises(FileError, match=r"pytorch_model\.bin: expected an archive as torch\.save"):
        open_weights(tmp_path)
