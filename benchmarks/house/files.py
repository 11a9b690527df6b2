"""Write the fixtures of the gate of files anew, with the fixed commit.

    python benchmarks/house/files.py

`integration-tests/test_written_files.py` reads them with the tree.
"""

from __future__ import annotations

import subprocess
import sys

from reference import ROOT, environment, reference_worktree


def main() -> int:
    """Run the tree's script with the fixed commit's packages. Returns the exit status."""
    script = ROOT / "integration-tests" / "written.py"
    command = [sys.executable, str(script)]
    return subprocess.run(command, env=environment(reference_worktree()), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
