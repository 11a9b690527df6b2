"""Checkpoints: saving, loading and converting, and what these report.

A checkpoint is a folder of safetensors files, of which every rank writes its own, and a manifest
(manifest.py) that says of each tensor in which files its runs of elements lie. So any number of
ranks can read what any number has written.

Saving: save.py asks `zero_partition` which runs this rank gives, writer.py writes them to a hidden
folder, and rank 0 renames that when every rank's files are on disk. background.py (`Saver`) does
the same from a copy while training goes on. Loading: folder.py finds what is complete and checks
files, ranges.py reads any run of a tensor, and load.py writes values only when all ranks have found
that everything fits. pipeline.py joins the stages of a pipeline in one checkpoint. export.py and
pretrained.py convert weights to and from Hugging Face's files.

Read folder.py (NOTE(complete)) and manifest.py first. What must never happen: a folder with a tag's
name is not whole, whatever was killed when; a file that a stranger wrote runs code or takes memory
without limit (limits.py).
"""

from typing import Any

from zero_engine import moved
from zero_engine.checkpoint.background import Snapshot, StopSignals
from zero_engine.checkpoint.export import ExportReport
from zero_engine.checkpoint.load import LoadReport
from zero_engine.checkpoint.pretrained import open_weights
from zero_engine.checkpoint.writer import SaveReport

__all__ = [
    "ExportReport",
    "LoadReport",
    "SaveReport",
    "Snapshot",
    "StopSignals",
    "open_weights",
]


def __getattr__(name: str) -> Any:
    return moved.find(__name__, name)
