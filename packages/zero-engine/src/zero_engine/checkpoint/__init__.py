"""Saving, loading and converting, and what these report."""

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
