"""Processes that run functions of test files together, each as one rank of a new group."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Ranks:
    """A few processes, started when they are first used, and again after one was lost."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, program: Callable[..., Any], *arguments: Any, timeout_s: float = 60) -> list[Any]:
        """Run `program(rank, *arguments)` on all ranks; return what each returned.

        Every rank is in a group of "cpu:gloo,sim:simccl" meanwhile. An exception on a rank, or no
        answer in time, fails the test.
        """
        if not self._processes:
            self._start()
        file = inspect.getfile(program)
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((file, program.__name__, f"{folder}/store", arguments))
            answers = [self._answer(rank, timeout_s) for rank in range(self.size)]
        if errors := [text for text, _ in answers if text]:
            self.close()
            pytest.fail("\n".join(errors), pytrace=False)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, self.size), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _answer(self, rank: int, timeout_s: float) -> tuple[str, Any]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(timeout_s):
                return pipe.recv()
        except EOFError:
            process = self._processes[rank]
            process.join()
            return f"rank {rank} ended with {process.exitcode}", None
        return f"rank {rank} did not answer within {timeout_s} s", None


def serve(pipe: Connection, rank: int, size: int) -> None:
    """Run the programs that come through the pipe; for ever, as rank `rank`."""
    import simulated_device
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            file, name, store, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if file not in modules:
                modules[file] = _load(Path(file))
            with contextlib.suppress(RuntimeError):  # of a group that the last program aborted
                torch.accelerator.synchronize()
            simulated_device.set_mode("late")
            simulated_device.take_unordered_uses()
            torch.manual_seed(0)
            dist.init_process_group(
                "cpu:gloo,sim:simccl",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=60),
            )
            value = getattr(modules[file], name)(rank, *arguments)
            dist.destroy_process_group()
            pipe.send(("", value))
        except BaseException:
            pipe.send((f"rank {rank}:\n{traceback.format_exc()}", None))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
