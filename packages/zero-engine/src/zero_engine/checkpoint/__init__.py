"""Checkpoints: saving, loading and converting them, and reports of these calls.

A checkpoint is a folder of safetensors files, of which every rank writes its own, and a manifest
(manifest.py) that lists, for each tensor, the files with its runs of elements. So any number of
ranks can read a checkpoint that any other number has written.

Saving: save.py asks `zero_partition` which runs this rank writes, writer.py writes them to a hidden
folder, and rank 0 renames that when every rank's files are on disk. background.py (`Saver`) does
the same from a copy while training goes on. Loading: folder.py finds complete checkpoints and
checks files, ranges.py reads any run of a tensor, and load.py writes values only when all ranks
have found that everything fits. pipeline.py joins the stages of a pipeline in one checkpoint.
export.py and pretrained.py convert weights to and from Hugging Face's files.

Read folder.py (NOTE(complete)) and manifest.py first. A folder with a tag's name must always be
complete, whichever process is killed at any time. An untrusted file must never run code or take
memory without limit (limits.py).
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
