"""`zero plan`: tables, JSON and a picture from the shell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zero_comm
import zero_engine
import zero_offload
from zero_engine import ZeroConfig
from zero_engine.planning import GPTSize, estimate_activations

SIZE = ["--layers", "4", "--hidden", "256"]


def test_what_fits_says_what_is_not_in_it_and_leaves_a_fifth(zero, capsys) -> None:
    """A device that a plan fills has no room for activations: the run would end in its first."""
    arguments = [
        "plan",
        *SIZE,
        "--world-size",
        "8",
        "--device-memory",
        "36MiB",
    ]  # stage 1: 29.5 MiB
    for further, expected, left in (
        ([], "stage 2", "20%"),
        (["--reserve", "0.15"], "stage 1", "15%"),
        (["--reserve", "0%"], "stage 1", "0%"),
    ):
        assert zero(*arguments, *further) == 0
        out = capsys.readouterr().out
        assert "stage 3 + host optimizer" in out  # all are listed
        assert "fits, activations apart" in out
        assert f"{expected} fits in 36.0 MiB" in out
        assert "Not included: activations, and what" in out
        assert f"; {left} of each device is left free" in out
        assert zero(*arguments[:-2], *further) == 0
        assert "fits, activations apart" not in capsys.readouterr().out  # in what?
        assert zero(*arguments, *further, "--json") == 0
        assert json.loads(capsys.readouterr().out)["recommended"] == expected
    assert zero(*arguments, "--activations-memory", "2MiB") == 0
    assert "Included: 2.00 MiB for activations. Not included: what" in capsys.readouterr().out
    for wrong in ("20", "-1%", "much"):
        assert zero(*arguments, f"--reserve={wrong}") == 2
        assert "expected a share such as 20% or 0.2" in capsys.readouterr().err


def test_one_stage_is_shown_in_detail(zero, capsys) -> None:
    """Alike units share a line: a model of 80 blocks has a table of a few lines."""
    arguments = ["--world-size", "8", "--ranks-per-node", "2", "--stage", "3"]

    status = zero("plan", *SIZE, "--dtype", "bf16", *arguments, "--optimizer-rests", "host")

    out = capsys.readouterr().out
    assert status == 0
    heading = "3,145,728 parameters, AdamW, bf16, fp32 masters: yes, rank 0 of 8"
    assert f"stage 3 + host optimizer, {heading}" in out
    assert "blocks.*" in out
    assert "of it to other nodes" in out
    # What room there is was given to know whether it fits.
    arguments = ["plan", *SIZE, "--world-size", "8", "--stage", "1", "--device-memory", "36MiB"]
    for further, fits in (([], False), (["--reserve", "0%"], True)):
        assert zero(*arguments, *further) == 0
        assert ("stage 1 fits in 36.0 MiB" in capsys.readouterr().out) is fits
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
        ([*plan, "--params", "7.5e9", "--layers", "2"], "got --layers, --params"),
        ([*plan, "--layers", "0", "--hidden", "8"], "GPTSize.layers: expected int of at least 1"),
        ([*plan, "config.json", "--layers", "2"], "got both: 'config.json' and --layers"),
        ([*plan, "nowhere"], "nowhere: cannot be read"),
        ([*plan, "7b"], "for a number of parameters, --params 7b"),
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
    assert zero(*plan, "--params", "7") == 2
    assert "for billions, write 7B" in capsys.readouterr().err


def test_sizes_are_decimal_but_for_those_with_an_i(zero, capsys) -> None:
    """As Hugging Face reads them: 38 MB are no 38 MiB."""
    outs = set()
    for text, num_bytes in (("0.038GB", 38 * 10**6), ("36.5 MiB", 73 * 2**19), ("7b", 7)):
        said = []
        for size in (text, f"{num_bytes}B"):
            assert zero("plan", *SIZE, "--world-size", "8", "--device-memory", size) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
        outs.add(said[0])
    assert len(outs) == 3


def test_memory_without_a_unit_is_in_gib_and_is_shown_so(zero, capsys) -> None:
    """Devices are known by a number; a number for bytes would be taken for much more."""
    plan = ["plan", *SIZE, "--world-size", "8", "--device-memory"]
    outs = []
    for size in ("80", "80GiB", "80 GB"):
        assert zero(*plan, size) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]
    assert "; device memory: 80.0 GiB" in outs[0]
    assert "; device memory: 74.5 GiB" in outs[2]
    assert not any(re.search(r"\d [KMGT]B\b", out) for out in outs)
    assert zero(*plan, str(80 * 10**9)) == 2
    assert "for bytes, write 80000000000B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("--dtype fp32", (4, 4, 8)),
        ("--dtype fp32 --optimizer sgd", (4, 4, 0)),
        ("--dtype bf16", (2, 4, 12)),
        ("--dtype bf16 --no-masters", (2, 2, 4)),
    ],
)
@pytest.mark.parametrize("world_size", [1, 8, 48])
def test_a_plan_of_a_number_is_by_the_formulas_of_states(
    zero, capsys, options: str, sizes: tuple[int, int, int], world_size: int
) -> None:
    """Bytes as in docs/memory.md, without the buffers of units: ZeRO, section 3.1."""
    p, g, o = sizes
    expected = {
        0: p + g + o,
        1: p + g + (g + o) / world_size,
        2: p + (g + o) / world_size,
        3: (p + g + o) / world_size,
    }
    if o == 12:  # stage 0 has no masters; at stage 3 a gather of several ranks rounds them
        del expected[0]
        expected[3] -= p / world_size if world_size > 1 else 0
    plan = ["plan", "--params", "7B", "--world-size", str(world_size), *options.split()]

    assert zero(*plan, "--json") == 0
    found = json.loads(capsys.readouterr().out)["stages"]
    assert [each["stage"] for each in found] == list(expected)
    for each, size in zip(found, expected.values(), strict=True):
        assert each["device_bytes"] == pytest.approx(size * 7 * 10**9, abs=1)
    assert zero(*plan) == 0
    out = capsys.readouterr().out
    assert "7,000,000,000 parameters" in out and "By formula" in out
    for stage, size in expected.items():
        assert re.search(rf"stage {stage} +{size:.2f} +{size * 7e9 / 2**30:.3g}", out)


def test_a_plan_of_a_number_says_which_stage_fits(zero, capsys) -> None:
    """Activations that are given count, and a fifth of the device stays free."""
    plan = ["plan", "--params", "1073741824", "--world-size", "8"]  # GiB are bytes per parameter
    for memory, further, expected in (
        ("80.1", [], 0),
        ("19.9", [], 1),
        ("19.9", ["--reserve", "0"], 0),
        ("19.9", ["--reserve", "0", "--activations-memory", "4"], 1),
        ("2.41", [], None),
        ("80.1", ["--stage", "3"], 3),
    ):
        assert zero(*plan, "--device-memory", memory, *further) == 0
        out = capsys.readouterr().out
        said = "None of these fits" if expected is None else f"stage {expected} fits"
        assert f"{said} in {float(memory):.3g}" in out
        assert zero(*plan, "--device-memory", memory, *further, "--json") == 0
        assert json.loads(capsys.readouterr().out)["recommended"] == expected


def test_a_number_of_parameters_has_a_letter_for_its_thousands(zero, capsys) -> None:
    """Models are called by it: 7B, 350M."""
    for text, number in (
        ("7B", 7 * 10**9),
        ("1.1b", 1_100_000_000),
        ("350M", 350 * 10**6),
        ("2 K", 2000),
        ("1.5T", 15 * 10**11),
        ("7.5e9", 75 * 10**8),
    ):
        assert zero("plan", "--params", text, "--world-size", "2") == 0
        assert capsys.readouterr().out.startswith(f"{number:,} parameters")
    for wrong in ("7Q", "B", "0", "0.5", "1.5", "nan", "inf", "-7B"):
        assert zero("plan", f"--params={wrong}", "--world-size", "2") == 2
        assert f"such as 7.5e9 or 7B (K, M, B or T), got '{wrong}'" in capsys.readouterr().err


def test_a_number_of_parameters_takes_no_option_that_needs_units(zero, capsys) -> None:
    """It would be ignored; the error says what to pass."""
    plan = ["plan", "--params", "7B", "--world-size", "8"]
    for further in (
        ["--ranks-per-node", "2"],
        ["--config", "ds.json"],
        ["--optimizer-rests", "host"],
        ["--params-rest", "disk"],
        ["--secondary"],
        ["--replicas"],
        ["--encode-params", "int8"],
        ["--encode-gradients", "int8"],
        ["--loco"],
        ["--host-memory", "0.5"],
        ["--disk-memory", "80"],
        ["--batch-size", "2"],
        ["--sequence-length", "8"],
        ["--picture", "plan.png"],
    ):
        assert zero(*plan, *further) == 1
        error = capsys.readouterr().err
        assert f"got {further[0]}; pass MODEL" in error
    for further, message in (
        (["--stage", "0", "--dtype", "bf16"], "pass --stage 1"),
        (["--world-size", "0"], "expected world_size to be at least 1"),
        (["--optimizer", "nothing"], "got 'nothing'"),
    ):
        assert zero(*plan, *further) == 1
        assert message in capsys.readouterr().err


def test_the_heading_says_dtypes_and_masters(zero, capsys) -> None:
    """Masters take more than twice what 16-bit parameters do: a plan says if they are in it."""
    plan = ["plan", *SIZE, "--world-size", "8"]
    for dtype, further, expected in (
        ("bf16", [], "AdamW, bf16, fp32 masters: yes, 8 ranks"),
        ("fp16", ["--no-masters"], "AdamW, fp16, fp32 masters: no, 8 ranks"),
        ("fp32", [], "AdamW, fp32, 8 ranks"),
        ("bf16", ["--optimizer", "none"], "none, bf16, 8 ranks"),
        ("bf16", ["--stage", "2"], "AdamW, bf16, fp32 masters: yes, rank 0 of 8"),
    ):
        assert zero(*plan, "--dtype", dtype, *further) == 0
        assert expected in capsys.readouterr().out.partition("\n")[0]


@pytest.mark.slow
def test_activations_of_a_configuration_are_estimated_and_called_so(
    zero, capsys, tmp_path: Path
) -> None:
    """The model of a 16-bit configuration is planned as shard() would take it: without masters."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config))
    plan = ["plan", path, "--world-size", "2"]
    size = ["--batch-size", "2", "--sequence-length", "16"]
    expected = estimate_activations(path, batch_size=2, sequence_length=16)

    assert zero(*plan, *size, "--device-memory", "8") == 0
    out = capsys.readouterr().out
    assert "bf16, fp32 masters: no" in out.partition("\n")[0]
    assert "fits with estimated activations" in out
    assert "for activations (an estimate). Not included: what" in out
    assert zero(*plan, *size, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["activations_bytes"], found["activations_are_estimated"]) == (expected, True)
    wide = estimate_activations(path, batch_size=2, sequence_length=16, dtype=torch.float32)
    assert zero(*plan, *size, "--json", "--dtype", "fp32") == 0
    assert json.loads(capsys.readouterr().out)["activations_bytes"] == wide > expected
    for wrong in (size[:2], [*size, "--activations-memory", "2MB"]):
        assert zero(*plan, *wrong) == 1
        assert "expected --batch-size with --sequence-length, or" in capsys.readouterr().err
    shapes = ["--layers", "2", "--hidden", "64", "--world-size", "2"]
    assert zero("plan", *shapes, *size) == 1
    assert "expected a config.json with --batch-size and" in capsys.readouterr().err


COMMAND = [sys.executable, "-m", "zero_engine"]


def test_help_is_shown_without_torch() -> None:
    """Torch takes a second or two to import, at each typing error."""
    for arguments in (["--help"], ["plan", "--help"], ["plan", "--world-size", "eight"]):
        program = f"""
import sys
from zero_engine.cli import main
try:
    main({arguments})
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert "usage: zero" in ran.stdout + ran.stderr
        assert "False\n" in ran.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_without_a_traceback() -> None:
    """`zero plan --json | head` is no error."""
    plan = [*COMMAND, "plan", *SIZE, "--world-size", "8", "--json"]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == b""
    assert ran.returncode == 128 + 13  # as of a program that SIGPIPE ended


def test_the_version_says_which_compiled_code_is_in_use(zero, capsys) -> None:
    """An installation without a compiler is slower, and says so where it is checked."""
    assert zero("--version") == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert str(zero_offload.native_status()) in said
    assert f"codecs on the CPU: {'plain' if zero_comm.native_status() else 'compiled'}" in said
