"""The zero command: what it refuses, and how it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_command_says_what_is_wrong_on_one_line(zero, tmp_path: Path, capsys) -> None:
    """A traceback is for those who wrote the program."""
    assert zero("export", tmp_path, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert error.startswith("zero: ")
    assert "complete checkpoint" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["export"],
        ["export", "a", "b", "--dtype", "int8"],
        ["export", "a", "b", "--max-shard-size", "large"],
        ["export", "a", "b", "--max-shard-size", "0GB"],
        ["export", "a", "b", "--format", "pickle"],
    ],
    ids=" ".join,
)
def test_the_command_refuses_arguments_that_make_no_sense(zero, arguments, capsys) -> None:
    """With the usage, and the status that shells expect."""
    assert zero(*arguments) == 2
    assert "usage: zero" in capsys.readouterr().err


def test_sizes_are_decimal_but_for_those_with_an_i(zero, capsys) -> None:
    """As Hugging Face reads them: 38 MB are no 38 MiB."""
    plan = ["plan", "--layers", "4", "--hidden", "256", "--world-size", "8"]
    outs = {}
    for text, num_bytes in (("0.038GB", 38 * 10**6), ("36.5 MiB", 73 * 2**19), ("7b", 7)):
        for size in (text, num_bytes):
            assert zero(*plan, "--device-memory", size) == 0
            outs[size] = capsys.readouterr().out
        assert outs[text] == outs[num_bytes]
    assert len(set(outs.values())) == 3


def test_the_module_is_the_command() -> None:
    """For where the script is not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "zero_engine", "export", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.startswith("usage: zero export")
