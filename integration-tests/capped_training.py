"""A training in an address space that ends soon after what imports take: run by test_offload_bytes.

Args: the folder to use, or "" to offload nothing; most bytes for parameters, gradients, optimizer
state and all that passes through memory.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import parity
import torch
import zero_engine
import zero_partition
from parity import ZeroConfig
from zero_comm import Group
from zero_engine import Offload
from zero_offload import CPUAdam, DiskSettings

NUM_BLOCKS = 64
WIDTH = 512
NUM_PARAMS = NUM_BLOCKS * WIDTH * WIDTH


def main(folder: str, cap: int) -> None:
    """Two steps; and first two of a tiny model, for which torch imports what it puts off."""
    torch.set_num_threads(1)
    threading.stack_size(2**18)  # address space as well
    _train(folder, num_blocks=1, width=4)
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (taken + cap, taken + cap))
    print(f"trained to a loss of {_train(folder, NUM_BLOCKS, WIDTH)}")


def _train(folder: str, num_blocks: int, width: int) -> float:
    offload, group = None, Group.solo()
    if folder:
        # What a store moves passes through blocks of its own; see `DiskStore`.
        disk = DiskSettings(block_bytes=2**18, queue_depth=2, uses_uring=False)
        offload = Offload(
            optimizer="disk",
            params="disk",
            path=Path(folder),
            subgroup_bytes=2**20,
            read_ahead=1,
            disk=disk,
        )
    config = ZeroConfig(3, offload=offload, window=1)
    with zero_partition.Init(group=group, batch_bytes=2**20):
        model = parity.Chain(num_blocks, width)
    optimizer = CPUAdam(model.parameters(), lr=1e-4)
    zero_engine.shard(model, optimizer, config, group=group)
    for _ in range(2):
        loss = model(torch.ones(1, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zero_engine.unshard(model, optimizer) if num_blocks == 1 else None
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
