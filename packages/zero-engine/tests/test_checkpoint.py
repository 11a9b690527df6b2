"""What a saved folder says is what is read of it, and what is damaged is named."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from zero_engine._checkpoint import Checkpoint
from zero_engine._errors import ConfigError, FileError
from zero_engine._manifest import MANIFEST, seal
from zero_engine._plain_values import from_json, name_of, to_json
from zero_engine._tensor_file import PlannedTensor, TensorFilePlan

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64)


def _bytes_of(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    plan = TensorFilePlan.of(PlannedTensor(k, v.dtype, v.numel()) for k, v in tensors.items())
    content = plan.header
    for padding, value in zip(plan.paddings, tensors.values(), strict=True):
        content += bytes(padding) + _bytes_of(value)
    assert len(content) == plan.num_bytes
    path.write_bytes(content)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _cut(value: Tensor, cuts: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0, *cuts, value.numel()]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def write_checkpoint(
    folder: Path,
    params: Mapping[str, Tensor],
    *,
    tag: str = "one",
    serial: int | None = 1,
    step: int = 7,
    cuts: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint of two ranks, whose pieces go to their files by turns."""
    path = folder / tag
    path.mkdir(parents=True)
    files: list[dict[str, Tensor]] = [{}, {}]
    said = {}
    for name, value in params.items():
        pieces = []
        for index, (start, stop) in enumerate(_cut(value, [c for c in cuts if c < value.numel()])):
            key = f"params/{name}/{start}"
            files[index % 2][key] = value.reshape(-1)[start:stop]
            pieces.append(
                {"file": f"rank-{index % 2:05}.safetensors", "key": key, "start": start}
                | {"stop": stop}
            )
        said[name] = {"dtype": name_of(value.dtype), "shape": list(value.shape), "pieces": pieces}
    content = {
        "tag": tag,
        "serial": serial,
        "step": step,
        "world_size": 2,
        "stage": 3,
        "params": said,
        "ties": {},
        "excludes_frozen": False,
        "buffers": {},
        "rank_buffers": {},
        "optimizer": {},
        "param_groups": [],
        "rngs": {},
        "scheduler": None,
        "engine": None,
        "extra": None,
        "files": {
            f"rank-{index:05}.safetensors": _write_file(
                path / f"rank-{index:05}.safetensors", tensors
            )
            for index, tensors in enumerate(files)
        },
    }
    (path / MANIFEST).write_bytes(seal(content | dict(changes or {})))
    return path


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(dtype): (torch.randn(7, 5, generator=generator) * 9).to(dtype) for dtype in DTYPES
    }
    return values | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}


@pytest.mark.parametrize("cuts", [(), (1,), (3, 4, 17)])
def test_any_run_of_elements_is_read_whatever_files_it_lies_in(tmp_path: Path, cuts) -> None:
    """Another world size asks for other runs than were written."""
    params = _params()
    write_checkpoint(tmp_path, params, cuts=cuts)

    checkpoint = Checkpoint.open(tmp_path)

    assert checkpoint is not None
    assert (checkpoint.tag, checkpoint.step, checkpoint.world_size) == ("one", 7, 2)
    assert checkpoint.verify() == sum(f.num_bytes for f in checkpoint.files.values())
    for name, value in params.items():
        reader = checkpoint.params[name]
        assert (reader.shape, reader.dtype) == (value.shape, value.dtype)
        assert torch.equal(reader.whole(), value)
        flat = value.reshape(-1)
        for start in range(0, value.numel(), 3):
            for stop in range(start, value.numel() + 1, 4):
                assert torch.equal(reader.read(start, stop), flat[start:stop])


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    """Whoever has only that library must get at the tensors."""
    params = _params()
    _write_file(tmp_path / "some.safetensors", params)

    found = load_file(tmp_path / "some.safetensors")

    for name, value in params.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value.reshape(-1))


@pytest.mark.parametrize("content", [None, [], ["one/"], [".one.partial-12/", "latest"]])
def test_a_folder_without_a_complete_checkpoint_is_no_error(tmp_path: Path, content) -> None:
    """The first start of a job that is to resume when it can."""
    folder = tmp_path / "there"
    for name in content or ():
        folder.mkdir(exist_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir()
            (folder / name / "rank-00000.safetensors").touch()
            if name.startswith("."):
                (folder / name / MANIFEST).write_bytes(seal({}))
        else:
            (folder / name).write_text("one")

    assert Checkpoint.open(folder) is None


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """Steps begin anew, clocks differ, and `latest` is written after the checkpoint."""
    for serial, tag, step in ((1, "b", 300), (3, "a", 100), (2, "c", 200)):
        write_checkpoint(tmp_path, {}, tag=tag, serial=serial, step=step)
    write_checkpoint(tmp_path, {}, tag="aside", serial=None, step=400)
    (tmp_path / "latest").write_text("b")

    newest, by_tag = Checkpoint.open(tmp_path), Checkpoint.open(tmp_path, "aside")

    assert newest is not None and newest.tag == "a"
    assert by_tag is not None and by_tag.step == 400
    with pytest.raises(FileError, match=r"expected a checkpoint 'd', got a, aside, b, c"):
        Checkpoint.open(tmp_path, "d")


def test_one_that_was_about_to_be_replaced_is_still_there(tmp_path: Path) -> None:
    """Between two renames there is no folder of the tag's name."""
    write_checkpoint(tmp_path, {}).rename(tmp_path / ".one.replaced-ab12")

    found = Checkpoint.open(tmp_path)

    assert found is not None and found.tag == "one"


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    """Disks and links flip bits, and a training that goes on from them shows nothing."""
    path = write_checkpoint(tmp_path, _params(), cuts=(9,))
    draw = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(200):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        position, bit = draw.randrange(len(content)), draw.randrange(1, 256)
        content[position] ^= bit
        good = file.read_bytes()
        file.write_bytes(content)

        with pytest.raises(FileError, match=file.name):
            opened = Checkpoint.open(tmp_path)
            assert opened is not None
            opened.verify()

        file.write_bytes(good)


def test_white_space_counts(tmp_path: Path) -> None:
    """Else a flip in it would go unseen, and two files of one checksum would differ."""
    path = write_checkpoint(tmp_path, {}) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"\n", b" ", 1))

    with pytest.raises(FileError, match="damaged"):
        Checkpoint.open(tmp_path)


def test_a_damaged_manifest_is_passed_over_only_if_it_is_not_the_newest(tmp_path: Path) -> None:
    """To go back a day without a word would be worse than to stop."""
    write_checkpoint(tmp_path, {}, tag="old", serial=1)
    write_checkpoint(tmp_path, {}, tag="new", serial=2)
    (tmp_path / "latest").write_text("new")
    for tag in ("old", "new"):
        (tmp_path / tag / MANIFEST).rename(tmp_path / "aside")
        (tmp_path / tag / MANIFEST).write_text("{")
        if tag == "new":
            with pytest.raises(FileError, match=r"new.*it is damaged"):
                Checkpoint.open(tmp_path)
        else:
            assert Checkpoint.open(tmp_path).tag == "new"
        (tmp_path / "aside").rename(tmp_path / tag / MANIFEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../x": {"bytes": 1, "crc32": 1}}}, "beside the manifest"),
        ({"params": {"w": {"dtype": "load", "shape": [], "pieces": []}}}, "torch.dtype"),
        ({"params": {"w": {"dtype": "uint8", "shape": [2], "pieces": []}}}, "of 2 elements, got 0"),
        ({"step": None}, "expected a manifest"),
        ({"version": 2}, "another version"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, change, message) -> None:
    """A checksum says that it is as it was written, not that it is good."""
    write_checkpoint(tmp_path, {}, changes=change)

    with pytest.raises(FileError, match=message):
        Checkpoint.open(tmp_path)


def test_values_come_back_as_they_were() -> None:
    """Betas are a tuple, and a learning rate may be a tensor."""
    value = {
        "betas": (0.9, 0.95),
        "lr": torch.tensor(1e-3, dtype=torch.float64),
        "milestones": {3: 1, 6: 2},
        "$": [None, True, "é", float("inf"), 0.1 + 0.2],
        "flags": torch.tensor([[True], [False]]),
        "nothing": torch.empty(0, 2, dtype=torch.bfloat16),
    }

    again = from_json(json.loads(json.dumps(to_json(value, "extra"))))

    assert list(again) == list(value)
    for key in ("lr", "flags", "nothing"):
        mine, theirs = value.pop(key), again.pop(key)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine, theirs)
    assert again == value


def test_what_would_have_to_be_pickled_is_refused_by_name() -> None:
    """A checkpoint that runs code when it is read is what this format is there to avoid."""
    with pytest.raises(ConfigError, match=r"extra\['a'\]\[1\]: expected .* got a Path"):
        to_json({"a": [1, object.__new__(type("Path", (), {}))]}, "extra")
