"""Run what takes too long for every change, and write how it ended to docs/release.md.

The commands are those of the table in CONTRIBUTING.md, section "Before a release". Each row of
docs/release.md is the last run of one: date, commit, minutes, status, the last line it printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "release.md"
HEAD: Final = """# Runs before a release

The last run of each command that [CONTRIBUTING](../CONTRIBUTING.md) keeps for a release.
`hatch run release` writes this page; `hatch run release crash soak` only its rows with these words.

| command | run | commit | minutes | ended | last line |
|---|---|---|---|---|---|
"""


def commands() -> list[str]:
    """Those of the table, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("### Before a release\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def rows() -> dict[str, str]:
    """Each command's line of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    return {each.split("`")[1]: each for each in lines if each.startswith("| `")}


def run(command: str, log: Path) -> str:
    """Its line of the page; what it prints goes to a file and to the terminal."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        git, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"== {command}, printing to {log}", flush=True)
    begun = time.monotonic()
    with log.open("w") as out:
        code = subprocess.run(
            command, shell=True, cwd=ROOT, stdout=out, stderr=out, check=False
        ).returncode
    minutes = (time.monotonic() - begun) / 60
    said = [each.strip("= ") for each in log.read_text().splitlines() if each.strip("= ")]
    last = (said[-1] if said else "").replace("|", "/")[:200]
    ended = "passed" if code == 0 else f"exit status {code}"
    return f"| `{command}` | {date.today()} | {commit} | {minutes:.0f} | {ended} | {last} |"


def main() -> None:
    """Run all, or those with a word; the status is 1 if one failed."""
    asked = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    asked.add_argument("words", nargs="*", help="of commands to run; all if none")
    args = asked.parse_args()
    table, known = rows(), commands()
    chosen = [each for each in known if not args.words or any(w in each for w in args.words)]
    logs = ROOT / "runs" / f"release-{time.strftime('%Y%m%d-%H%M%S')}"
    logs.mkdir(parents=True)
    for number, command in enumerate(chosen):
        table[command] = run(command, logs / f"{number}.txt")
        print(table[command], flush=True)
        lines = "\n".join(table[each] for each in known if each in table)
        PAGE.write_text(f"{HEAD}{lines}\n", encoding="utf-8")
    sys.exit(any("| passed |" not in table[command] for command in chosen))


if __name__ == "__main__":
    main()
