"""`zero plan`: tables, JSON and a picture from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zero_engine
from zero_engine import ZeroConfig
from zero_engine.planning import GPTSize

SIZE = ["--layers", "4", "--hidden", "256"]


def test_what_fits_says_what_is_not_in_it_and_leaves_a_fifth(zero, capsys) -> None:
    """A device that a plan fills has no room for activations: the run would end in its first."""
    arguments = ["plan", *SIZE, "--world-size", "8", "--device-memory", "38MB"]  # stage 1: 30.9 MB
    for further, expected, left in (
        ([], "stage 2", "20%"),
        (["--reserve", "0.15"], "stage 1", "15%"),
        (["--reserve", "0%"], "stage 1", "0%"),
    ):
        assert zero(*arguments, *further) == 0
        out = capsys.readouterr().out
        assert "stage 3 + host optimizer" in out  # all are listed
        assert "fits, activations apart" in out
        assert f"{expected} fits in 38.0 MB" in out
        assert "Not in it are activations, and what" in out
        assert f"; {left} of each device is left free" in out
        assert zero(*arguments, *further, "--json") == 0
        assert json.loads(capsys.readouterr().out)["recommended"] == expected
    assert zero(*arguments, "--activations-memory", "2MB") == 0
    assert "In it are 2.00 MB for activations, and not what" in capsys.readouterr().out
    for wrong in ("20", "-1%", "much"):
        assert zero(*arguments, f"--reserve={wrong}") == 2
        assert "expected a share such as 20% or 0.2" in capsys.readouterr().err


def test_one_stage_is_shown_in_detail(zero, capsys) -> None:
    """Alike units share a line: a model of 80 blocks has a table of a few lines."""
    arguments = ["--world-size", "8", "--ranks-per-node", "2", "--stage", "3"]

    status = zero("plan", *SIZE, "--dtype", "bf16", *arguments, "--optimizer-rests", "host")

    out = capsys.readouterr().out
    assert status == 0
    assert "stage 3 + host optimizer, 3,145,728 parameters, AdamW, rank 0 of 8" in out
    assert "blocks.*" in out
    assert "of it to other nodes" in out
    # What room there is was given to know whether it fits.
    arguments = ["plan", *SIZE, "--world-size", "8", "--stage", "1", "--device-memory", "38MB"]
    for further, fits in (([], False), (["--reserve", "0%"], True)):
        assert zero(*arguments, *further) == 0
        assert ("stage 1 fits in 38.0 MB" in capsys.readouterr().out) is fits
        assert zero(*arguments, *further, "--json") == 0
        assert json.loads(capsys.readouterr().out)["fits"] is fits


def test_what_travels_is_asked_for_by_name(zero, capsys) -> None:
    """What all three of ZeRO++ bring is seen before they are tried."""
    arguments = [*SIZE, "--world-size", "8", "--ranks-per-node", "2", "--stage", "3", "--json"]
    near = ["--secondary", "--encode-params", "int8", "--encode-gradients", "int4", "--loco"]

    across = []
    for further in ([], near):
        assert zero("plan", *arguments, *further) == 0
        across.append(json.loads(capsys.readouterr().out)["across_bytes"])

    assert across[1] < across[0] / 4


def test_json_has_the_plan(zero, capsys) -> None:
    """Scripts read it."""
    config = ZeroConfig(2)
    expected = zero_engine.plan(GPTSize(4, 256), config, world_size=8).to_dict()
    assert expected["sent_bytes"] and expected["memory"]["at_rest"]["total_bytes"]

    for arguments in ([], ["--stage", "2"]):
        assert zero("plan", *SIZE, "--world-size", "8", "--json", *arguments) == 0
        found = json.loads(capsys.readouterr().out)
        one = found["options"][2]["plan"] if "options" in found else found
        assert one["config"]["stage"] == 2
        assert one["memory"]["at_rest"] == expected["memory"]["at_rest"]
        assert (one["numel"], one["sent_bytes"]) == (12 * 4 * 256**2, expected["sent_bytes"])


@pytest.mark.slow
def test_a_picture_is_written(zero, capsys, tmp_path: Path) -> None:
    """Beside the table."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"

    assert zero("plan", *SIZE, "--world-size", "8", "--picture", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_a_line_on_stderr(zero, tmp_path: Path, capsys) -> None:
    """No traceback for a typing error: what is missing is said, and what came."""
    plan = ["plan", "--world-size", "8"]
    for arguments, message in (
        (plan, "expected MODEL (a config.json of transformers), or --layers"),
        ([*plan, "--params", "7.5e9"], "got --params"),
        ([*plan, "--layers", "0", "--hidden", "8"], "GPTSize.layers: expected int of at least 1"),
        ([*plan, "config.json", "--layers", "2"], "got both: 'config.json' and --layers"),
        ([*plan, "nowhere"], "nowhere: cannot be read"),
        ([*plan, *SIZE, "--params-rest", "disk"], "expected --stage"),
        ([*plan, *SIZE, "--stage", "0", "--dtype", "bf16"], "use stage 1"),
        ([*plan, *SIZE, "--stage", "3", "--encode-params", "int7"], "int7"),
        (["export", tmp_path, tmp_path / "out"], "complete checkpoint"),
    ):
        assert zero(*arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("zero: ") and message in error and error.count("\n") == 1
    export = ["export", "a", "b"]
    for arguments in (
        [],
        ["export"],
        [*export, "--dtype", "int8"],
        [*export, "--format", "pickle"],
    ):
        assert zero(*arguments) == 2  # the status that shells expect
        assert "usage: zero" in capsys.readouterr().err
    assert zero(*export, "--max-shard-size", "large") == 2


def test_sizes_are_decimal_but_for_those_with_an_i(zero, capsys) -> None:
    """As Hugging Face reads them: 38 MB are no 38 MiB."""
    outs = set()
    for text, num_bytes in (("0.038GB", 38 * 10**6), ("36.5 MiB", 73 * 2**19), ("7b", 7)):
        said = []
        for size in (text, num_bytes):
            assert zero("plan", *SIZE, "--world-size", "8", "--device-memory", size) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
        outs.add(said[0])
    assert len(outs) == 3
