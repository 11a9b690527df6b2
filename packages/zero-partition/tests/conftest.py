"""Makes the neighbours of the tests importable; the `ranks` fixture comes with zero-comm."""

import sys
from pathlib import Path

# Under --import-mode=importlib a test's folder is not importable. Workers add it by themselves.
sys.path.insert(0, str(Path(__file__).parent))
