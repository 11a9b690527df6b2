"""Makes the neighbours of the tests importable."""

import sys
from pathlib import Path

# Under --import-mode=importlib a test's folder is not importable.
sys.path.insert(0, str(Path(__file__).parent))
