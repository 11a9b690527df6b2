"""What is exported is what was saved, as other programs read it, and nothing half."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import zero_engine
import zero_engine.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from zero_engine import ConfigError, FileError
from zero_engine.testing import damage


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


@pytest.fixture
def saved(tmp_path: Path, by_hand) -> Path:
    """A folder of one checkpoint."""
    by_hand(tmp_path / "saved" / "step-1", _params(), _buffers())
    return tmp_path / "saved"


def _read(folder: Path) -> dict[str, Tensor]:
    """As the safetensors library reads it."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


def _names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("max_shard_bytes", [1, 160, 10**9])
def test_other_readers_find_every_value(saved: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    """Rounded as torch rounds, whole numbers as they are, each tensor once.

    Uploads are limited by file, and readers open only what the index names.
    """
    for dtype in (None, torch.bfloat16):
        out = tmp_path / f"out-{dtype}"

        report = zero_engine.export(saved, out, dtype=dtype, max_shard_bytes=max_shard_bytes)

        expected = {
            name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
            for name, value in {**_params(), **_buffers()}.items()
        }
        _assert_equal(_read(out), expected)
        assert report.num_tensors == len(expected)
        assert report.num_bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
        assert set(report.files) == set(out.glob("*.safetensors"))
        readers = zero_engine.checkpoint.open_weights(out)  # the way back into training
        _assert_equal({name: reader.whole() for name, reader in readers.items()}, expected)
        if max_shard_bytes < 10**9:
            _assert_index(out, max_shard_bytes)


def _assert_index(out: Path, max_shard_bytes: int) -> None:
    files = _names(out, "*.safetensors")
    count = len(files)
    assert count > 1
    assert files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    total = 0
    for file in files:
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            names = set(opened.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file}
        num_bytes = sum(value.nbytes for value in load_file(out / file).values())
        assert num_bytes <= max_shard_bytes or len(names) == 1
        total += num_bytes
    assert index["metadata"]["total_size"] == total


def test_one_file_is_what_the_safetensors_library_writes(saved, tmp_path: Path) -> None:
    """Byte for byte, so that no reader can stumble over our way of writing."""
    zero_engine.export(saved, tmp_path / "out")

    save_file({**_params(), **_buffers()}, tmp_path / "theirs", {"format": "pt"})
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()
    assert _names(tmp_path / "out") == ["model.safetensors"]  # no index, which is of several


def test_chunks_are_of_no_consequence(by_hand, tmp_path: Path) -> None:
    """Tensors larger than what is read at a time are the reason for all of this."""
    params = {"embed": torch.randn(1_300_001), "half": torch.randn(3_000_003).bfloat16()}
    by_hand(tmp_path / "saved" / "a", params, {})
    written = []

    zero_engine.export(tmp_path / "saved", tmp_path / "out", progress=written.append)

    _assert_equal(_read(tmp_path / "out"), params)
    assert max(written) <= 2 * 2**20
    assert sum(written) == sum(value.nbytes for value in params.values())


def test_a_tag_or_the_newest_is_exported(by_hand, tmp_path: Path) -> None:
    """A run leaves several behind; the best one need not be the last."""
    for serial, value in ((1, 1.0), (2, 2.0)):
        params = {"embed": torch.full((2,), value)}
        by_hand(tmp_path / f"step-{serial}", params, {}, serial=serial)

    for index, (source, tag, value) in enumerate(
        ((tmp_path, None, 2.0), (tmp_path, "step-1", 1.0), (tmp_path / "step-1", None, 1.0))
    ):
        zero_engine.export(source, tmp_path / f"out-{index}", tag=tag)
        assert _read(tmp_path / f"out-{index}")["embed"][0] == value


def test_what_is_damaged_is_named_and_state_need_not_be_there(saved: Path, tmp_path: Path) -> None:
    """Weights with one wrong bit are published, and nobody ever knows.

    The optimizer's files are two thirds of a checkpoint: they are neither read nor needed.
    """
    (saved / "step-1" / "rank-00002-00.safetensors").unlink()
    weights = saved / "step-1" / "rank-00000-00.safetensors"
    damage(weights, -3)
    with pytest.raises(FileError, match=r"rank-00000-00\.safetensors: expected .* crc32"):
        zero_engine.export(saved, tmp_path / "out")
    assert _names(tmp_path) == ["saved"]

    damage(weights, -3)
    zero_engine.export(saved, tmp_path / "out")
    _assert_equal(_read(tmp_path / "out"), {**_params(), **_buffers()})


def test_what_is_there_is_not_touched(saved: Path, tmp_path: Path) -> None:
    """An export over another model's folder would mix the two."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    with pytest.raises(FileError, match="out: expected no folder or an empty one"):
        zero_engine.export(saved, out)
    with pytest.raises(FileError, match="it is a file"):
        zero_engine.export(saved, out / "notes.txt")

    assert _names(out) == ["notes.txt"]
    (out / "notes.txt").unlink()
    zero_engine.export(saved, out)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("max_shard_bytes", [1, 10**9])
def test_a_folder_that_was_exported_is_no_checkpoint(
    saved: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    """It has weights, so that "no checkpoint" alone leaves the reader to guess."""
    zero_engine.export(saved, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    with pytest.raises(FileError, match=r"exported already: from_pretrained\(\).*load_pretrained"):
        zero_engine.export(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_export_that_ends_early_leaves_nothing(saved: Path, tmp_path: Path, error) -> None:
    """A folder that is there is taken for complete: until the last byte there is none."""
    calls, out = [], tmp_path / "new" / "out"

    def stop(num_bytes: int) -> None:
        calls.append(num_bytes)
        assert not out.exists() and len(_names(out.parent)) == 1  # it may be killed here
        if len(calls) == 3:
            raise error

    with pytest.raises(FileError if isinstance(error, OSError) else error):
        zero_engine.export(saved, out, max_shard_bytes=100, progress=stop)

    assert _names(out.parent) == []


def test_choices_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    for name, values in (("dtype", (torch.int8, "bf16")), ("max_shard_bytes", (0, "5GB"))):
        for value in values:
            with pytest.raises(ConfigError, match=name):
                zero_engine.export(tmp_path, tmp_path / "out", **{name: value})


def test_the_command_exports(zero, saved: Path, tmp_path: Path, capsys) -> None:
    """What runs on a login node, after the job."""
    out = tmp_path / "out"
    arguments = ["--format", "safetensors", "--dtype", "bf16", "--max-shard-size", "0.1KB"]

    assert zero("export", saved, out, *arguments) == 0

    expected = {n: v.bfloat16() for n, v in _params().items()} | _buffers()
    _assert_equal(_read(out), expected)
    assert f"{out}: 7 tensors" in capsys.readouterr().out


def test_a_path_without_a_checkpoint_is_said_to_be_what_it_is(saved: Path, tmp_path: Path) -> None:
    """A Trainer's folder, for example, has those of zero in a folder of its own."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "zero").symlink_to(saved)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, says in {
        "trainer": r"found none; did you mean .*trainer/zero\?$",
        "file": "it is a file$",
        "empty": "found none$",
        "nowhere": "there is no such folder$",
    }.items():
        with pytest.raises(FileError, match=says):
            zero_engine.export(tmp_path / name, tmp_path / "out")
