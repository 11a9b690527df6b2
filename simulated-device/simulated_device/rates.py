"""Rates of devices and their links, for the timed mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Rates:
    """How fast one kind of device is, and the links of a cluster of them.

    Bytes and operations are by second. A kernel takes `kernel_s`, and the longer of its bytes over
    `memory` and, if it is a product of matrices, its operations over their rate. A collective goes
    round a ring: bytes over the link that takes longest, and `hop_s` for each step. The host needs
    `launch_s` for each launch, and its own processor time between launches, times `host_factor`.

    Args:
        memory: Bytes of the device's memory, read and written.
        products: Operations of products of matrices, by the name of the dtype.
        host_link: Bytes between a device and its host, each way.
        node_link: Bytes from a device to others of its node, each way.
        network: Bytes from a device to those of other nodes, each way.
        ranks_per_node: Devices of one node.
        memory_bytes: What one device has; nothing stops a program that takes more.
        efficiency: Of products of matrices: what is reached of their rate.
        launch_s: Of the host.
        host_factor: 0 lets only launches count.
        kernel_s: What any kernel takes beside its work.
        node_hop_s: Latency of one step of a ring within a node.
        network_hop_s: And between nodes.
    """

    memory: float
    products: dict[str, float]
    host_link: float
    node_link: float
    network: float
    ranks_per_node: int = 8
    memory_bytes: float = 80e9
    efficiency: float = 1.0
    launch_s: float = 4e-6
    host_factor: float = 1.0
    kernel_s: float = 2e-6
    node_hop_s: float = 2e-6
    network_hop_s: float = 5e-6

    def with_efficiency(self, efficiency: float) -> Rates:
        """Return the same, whose products of matrices reach so much of their rate."""
        return replace(self, efficiency=efficiency)


# What the makers' data sheets say, dense: A100 SXM 80 GB, H100 SXM, H200 SXM, Instinct MI300X.
# Links are one direction of all of a device's; the network is a port of 200 or 400 Gb/s for each.
_H100: Final = Rates(
    memory=3.35e12,
    products={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    host_link=50e9,
    node_link=450e9,
    network=50e9,
)
DEVICES: Final = {
    "a100": Rates(
        memory=2.039e12,
        products={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        host_link=25e9,
        node_link=300e9,
        network=25e9,
    ),
    "h100": _H100,
    # As torchtitan's report of December 2024 describes its own: HBM2e, 500 W.
    "h100-hbm2e": replace(_H100, memory=2.4e12, memory_bytes=96e9),
    "h200": replace(_H100, memory=4.8e12, memory_bytes=141e9),
    "mi300x": replace(
        _H100,
        memory=5.3e12,
        products={"bfloat16": 1307e12, "float16": 1307e12, "float32": 163.4e12},
        node_link=448e9,
        memory_bytes=192e9,
    ),
}
