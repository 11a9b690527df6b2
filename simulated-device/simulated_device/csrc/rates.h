// How fast a device and its links are, and how long a task takes at these rates.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>

namespace sim {

// Of one kind of device, in a cluster of nodes with as many each. Bytes and operations by second.
struct Rates {
  double launch_s = 0;        // of the host, for each task
  double host_factor = 1;     // by which the host's own time counts
  double kernel_s = 0;        // what any kernel takes beside its work
  double memory = 0;          // bytes of the device's memory, read and written
  double host_link = 0;       // bytes between a device and its host, each way
  double node_link = 0;       // bytes between devices of a node: of one device, each way
  double network = 0;         // bytes between nodes: of one device, each way
  double node_hop_s = 0;      // latency of a message within a node
  double network_hop_s = 0;   // and between nodes
  std::map<at::ScalarType, double> products;  // operations of products of matrices
  double other_products = 0;                  // of other types

  double kernel(double bytes, double operations, at::ScalarType type) const {
    auto found = products.find(type);
    double rate = found == products.end() ? other_products : found->second;
    double computes = operations > 0 ? operations / rate : 0;
    return kernel_s + std::max(bytes / memory, computes);
  }

  double host_copy(double bytes) const { return kernel_s + bytes / host_link; }

  // Of a ring: each rank passes on `bytes` to its neighbour. `nodes` of them have equal numbers of
  // the ring's ranks, through whose links all that enters a node is divided.
  double ring(double bytes, int ranks, int nodes) const {
    if (ranks == 1) return kernel_s;
    int per_node = std::max(1, ranks / nodes);
    double whole = bytes * ranks / (ranks - 1);  // what every rank has in the end
    double inside = per_node > 1 ? bytes / node_link : 0;
    double across = nodes > 1 ? whole * (nodes - 1) / nodes / (per_node * network) : 0;
    double hops = (per_node - 1) * node_hop_s + (nodes - 1) * network_hop_s;
    return kernel_s + hops + std::max(inside, across);
  }
};

}  // namespace sim
