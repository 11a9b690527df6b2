"""The zero command: what it refuses, and how it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from zero_engine._cli import main
from zero_engine._cli_values import num_bytes_of


def test_the_command_says_what_is_wrong_on_one_line(tmp_path: Path, capsys) -> None:
    """A traceback is for those who wrote the program."""
    status = main(["export", str(tmp_path), str(tmp_path / "out")])

    assert status == 1
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
def test_the_command_refuses_arguments_that_make_no_sense(arguments: list[str], capsys) -> None:
    """With the usage, and the status that shells expect."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "usage: zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("12", 12), ("7b", 7)]
)
def test_sizes_are_decimal_but_for_those_with_an_i(text: str, num_bytes: int) -> None:
    """As Hugging Face reads them."""
    assert num_bytes_of(text) == num_bytes


def test_the_module_is_the_command() -> None:
    """For where the script is not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "zero_engine", "export", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.startswith("usage: zero export")
