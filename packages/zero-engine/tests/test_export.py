"""What is exported is what was saved, as other programs read it, and nothing half."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_engine
import zero_engine.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from zero_engine import ConfigError, FileError
from zero_engine.testing import damage, write_manifest


def _stored(name: str, value: Tensor, file: str, *, cut: int) -> tuple[dict, dict[str, Tensor]]:
    """What a manifest says of a tensor in two pieces, and the pieces."""
    flat, pieces, said = value.reshape(-1), {}, []
    for start, stop in ((0, min(cut, flat.numel())), (cut, flat.numel())):
        if start < stop:
            pieces[f"{name}@{start}"] = flat[start:stop].clone()
            said.append({"file": file, "key": f"{name}@{start}", "start": start, "stop": stop})
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "pieces": said}, pieces


def _save_checkpoint(
    folder: Path,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    tag: str = "step-1",
    serial: int = 1,
) -> Path:
    """A folder in format 1, written by the safetensors library."""
    path = folder / tag
    path.mkdir(parents=True)
    pieces: dict[str, Tensor] = {}
    said: dict[str, Any] = {"params": {}, "buffers": {}}
    for kind, tensors in (("params", params), ("buffers", buffers)):
        for name, value in tensors.items():
            said[kind][name], more = _stored(name, value, "rank-00000-00.safetensors", cut=5)
            pieces |= more
    moments, more = _stored("moment", torch.ones(3), "rank-00001-00.safetensors", cut=2)
    files = {"rank-00000-00.safetensors": pieces, "rank-00001-00.safetensors": more}
    for name, tensors in files.items():
        save_file(tensors, path / name)
    contents = {name: (path / name).read_bytes() for name in files}
    empty = {"rank_buffers": {}, "rngs": {}, "scheduler": None, "engine": None, "extra": None}
    content = {
        **empty,
        **said,
        "tag": tag,
        "serial": serial,
        "step": 1,
        "world_size": 1,
        "stage": 3,
        "ties": {"head": "embed"},
        "optimizer": {"embed": {"exp_avg": moments}},
        "param_groups": [],
        "excludes_frozen": False,
        "files": {n: {"bytes": len(c), "crc32": zlib.crc32(c)} for n, c in contents.items()},
    }
    write_manifest(path, content)
    return path


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(11, 7, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "last": torch.randn(2, 2, 5, generator=generator),
    }


def _buffers() -> dict[str, Tensor]:
    return {"mask": torch.tensor([True, False]), "count": torch.tensor(7)}


def _read(folder: Path) -> dict[str, Tensor]:
    """As the safetensors library reads it."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 300, 1])
def test_other_readers_find_every_value(tmp_path: Path, dtype, max_shard_bytes: int) -> None:
    """Rounded as torch rounds, whole numbers as they are, each tensor once."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    out = tmp_path / "out"

    report = zero_engine.export(
        tmp_path / "saved", out, dtype=dtype, max_shard_bytes=max_shard_bytes
    )

    expected = {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in {**_params(), **_buffers()}.items()
    }
    _assert_equal(_read(out), expected)
    assert report.num_tensors == len(expected)
    assert report.num_bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert set(report.files) == set(out.glob("*.safetensors"))


def test_one_file_is_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    """Byte for byte, so that no reader can stumble over our way of writing."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())

    zero_engine.export(tmp_path / "saved", tmp_path / "out")

    save_file({**_params(), **_buffers()}, tmp_path / "theirs", {"format": "pt"})
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()


def test_several_files_keep_to_their_size_and_the_index_to_the_files(tmp_path: Path) -> None:
    """Uploads are limited by file, and readers open only what the index names."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    out = tmp_path / "out"

    zero_engine.export(tmp_path / "saved", out, max_shard_bytes=320)

    files = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    sizes = {}
    for file in files:
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            names = set(opened.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file}
        sizes[file] = sum(value.nbytes for value in load_file(out / file).values())
    assert max(sizes.values()) <= 320
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_load_pretrained_reads_what_export_wrote(tmp_path: Path) -> None:
    """The way back into training."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())

    zero_engine.export(tmp_path / "saved", tmp_path / "out", max_shard_bytes=300)

    readers = zero_engine.checkpoint.open_weights(tmp_path / "out")
    found = {n: r.read(0, r.shape.numel()).view(r.shape).clone() for n, r in readers.items()}
    _assert_equal(found, {**_params(), **_buffers()})


def test_chunks_are_of_no_consequence(tmp_path: Path) -> None:
    """Tensors larger than what is read at a time are the reason for all of this."""
    params = {"embed": torch.randn(1_300_001), "half": torch.randn(3_000_003).bfloat16()}
    _save_checkpoint(tmp_path / "saved", params, {})
    written = []

    zero_engine.export(tmp_path / "saved", tmp_path / "out", progress=written.append)

    _assert_equal(_read(tmp_path / "out"), params)
    assert max(written) <= 2 * 2**20
    assert sum(written) == sum(value.nbytes for value in params.values())


def test_a_tag_or_the_newest_is_exported(tmp_path: Path) -> None:
    """A run leaves several behind; the best one need not be the last."""
    for serial, value in ((1, 1.0), (2, 2.0)):
        params = {"embed": torch.full((2,), value)}
        _save_checkpoint(tmp_path, params, {}, tag=f"step-{serial}", serial=serial)

    for source, tag, value in (
        (tmp_path, None, 2.0),
        (tmp_path, "step-1", 1.0),
        (tmp_path / "step-1", None, 1.0),
    ):
        out = tmp_path / f"out-{value}-{tag}"
        if not out.exists():
            zero_engine.export(source, out, tag=tag)
            assert _read(out)["embed"][0] == value


def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """Weights with one wrong bit are published, and nobody ever knows."""
    path = _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    damage(path / "rank-00000-00.safetensors", -3)

    with pytest.raises(FileError, match=r"rank-00000-00\.safetensors: expected .* crc32"):
        zero_engine.export(tmp_path / "saved", tmp_path / "out")

    assert _names(tmp_path) == ["saved"]


def test_state_that_is_not_exported_need_not_be_there(tmp_path: Path) -> None:
    """The optimizer's files are two thirds of a checkpoint: they are neither read nor needed."""
    path = _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    (path / "rank-00001-00.safetensors").unlink()

    zero_engine.export(tmp_path / "saved", tmp_path / "out")

    _assert_equal(_read(tmp_path / "out"), {**_params(), **_buffers()})


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    """An export over another model's folder would mix the two."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    with pytest.raises(FileError, match="out: expected no folder or an empty one"):
        zero_engine.export(tmp_path / "saved", out)
    with pytest.raises(FileError, match="it is a file"):
        zero_engine.export(tmp_path / "saved", out / "notes.txt")

    assert _names(out) == ["notes.txt"]
    (out / "notes.txt").unlink()
    zero_engine.export(tmp_path / "saved", out)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_export_that_ends_early_leaves_nothing(tmp_path: Path, error) -> None:
    """A folder that is there is taken for complete."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    calls = []

    def stop(num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 3:
            raise error

    expected = FileError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        zero_engine.export(
            tmp_path / "saved", tmp_path / "new" / "out", max_shard_bytes=100, progress=stop
        )

    assert _names(tmp_path / "new") == []


@pytest.mark.slow
def test_a_killed_export_is_no_folder_of_that_name(tmp_path: Path) -> None:
    """Between the first byte and the last there is nothing that could be loaded."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    out = tmp_path / "new" / "out"
    script = (
        "import os, sys, zero_engine\n"
        "zero_engine.export(*sys.argv[1:], max_shard_bytes=1, "
        "progress=lambda num_bytes: num_bytes == 6 and os._exit(9))"  # the 3 elements of `half`
    )

    status = subprocess.run([sys.executable, "-c", script, tmp_path / "saved", out], check=False)

    assert status.returncode == 9
    assert not out.exists()
    assert len(_names(out.parent)) == 1


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.int8}, {"dtype": "bf16"}, {"max_shard_bytes": 0}, {"max_shard_bytes": "5GB"}],
    ids=repr,
)
def test_choices_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        zero_engine.export(tmp_path, tmp_path / "out", **options)


# ---- The command ----


def test_the_command_exports(zero, tmp_path: Path, capsys) -> None:
    """What runs on a login node, after the job."""
    _save_checkpoint(tmp_path / "saved", _params(), _buffers())
    out = tmp_path / "out"

    arguments = ["--format", "safetensors", "--dtype", "bf16", "--max-shard-size", "0.1KB"]
    status = zero("export", tmp_path / "saved", out, *arguments)

    assert status == 0
    expected = {n: v.bfloat16() for n, v in _params().items()} | _buffers()
    _assert_equal(_read(out), expected)
    assert f"{out}: 7 tensors" in capsys.readouterr().out
