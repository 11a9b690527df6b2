"""Makes the oracle importable; the `ranks` fixture comes with zero-comm."""

import sys
from pathlib import Path

# Optimizers load it at their first step: so it is loaded once for all ranks.
import torch._dynamo  # noqa: F401

# Under --import-mode=importlib a test's folder is not importable. Workers add it by themselves.
sys.path.insert(0, str(Path(__file__).parent))
