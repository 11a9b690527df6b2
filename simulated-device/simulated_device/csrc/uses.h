// Which tasks used which bytes, and whether something orders them.
#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "streams.h"

namespace sim {

// One task's use of a range of a block's bytes.
struct Use {
  size_t begin, end;      // bytes from the block's start; strided tensors: with the gaps
  bool writes;            // a task that reads and writes is noted as a writer
  Point point;            // the task
  std::string_view task;  // its name

  bool overlaps(const Use& other) const { return begin < other.end && other.begin < end; }
  bool covers(const Use& other) const { return begin <= other.begin && other.end <= end; }
};

inline std::string describe(const Use& use) {
  std::ostringstream text;
  text << use.task << " on " << Engine::get().name_of(use.point.stream)
       << (use.writes ? " writes" : " reads") << " bytes " << use.begin << " to " << use.end;
  return text.str();
}

// The uses of one block that a later task may conflict with.
class UseLog {
 public:
  // Adds a use by a task that starts when `clock` holds, and reports what conflicts with it.
  void add(const Use& use, const Clock& clock) {
    std::vector<Use> kept;
    for (const Use& earlier : uses_) {
      bool is_ordered = clock.knows(earlier.point);
      if (!is_ordered && use.overlaps(earlier) && (use.writes || earlier.writes))
        Engine::get().report_unordered(describe(use) + ", which " + describe(earlier) +
                                       ": nothing orders the two");
      // What conflicts with `earlier` from now on conflicts with `use` as well.
      bool is_implied = is_ordered && use.covers(earlier) && (use.writes || !earlier.writes);
      if (!is_implied) kept.push_back(earlier);
    }
    kept.push_back(use);
    if (kept.size() > kMost) kept.erase(kept.begin());
    uses_.swap(kept);
  }

  // Returns a use that `clock` does not know to be over; null if there is none.
  const Use* find_unfinished(const Clock& clock) const {
    for (const Use& use : uses_)
      if (!clock.knows(use.point)) return &use;
    return nullptr;
  }

 private:
  static constexpr size_t kMost = 64;  // beyond, the oldest is forgotten, and conflicts with it
  std::vector<Use> uses_;              // oldest first
};

// The bytes from a tensor's first element to its last.
struct Extent {
  char* start;
  size_t size;
};

inline Extent extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  char* start = static_cast<char*>(const_cast<void*>(tensor.storage().data())) +
                tensor.storage_offset() * tensor.itemsize();
  return {start, static_cast<size_t>(last + 1) * tensor.itemsize()};
}

}  // namespace sim
