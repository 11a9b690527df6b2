"""Saving, loading and converting, and what these report."""

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
