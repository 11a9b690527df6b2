// Which tasks used which bytes, and whether something orders them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
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
  bool is_of_earlier_owner = false;  // the block was freed and allocated again since

  bool overlaps(const Use& other) const { return begin < other.end && other.begin < end; }
  bool covers(const Use& other) const { return begin <= other.begin && other.end <= end; }
};

inline std::string describe(const Use& use) {
  std::ostringstream text;
  text << use.task << " on " << Engine::get().name_of(use.point.stream)
       << (use.writes ? " writes" : " reads") << " bytes " << use.begin << " to " << use.end;
  if (use.is_of_earlier_owner) text << " (of an earlier owner of the memory)";
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

  // Whether all uses were on one stream.
  bool is_only_on(StreamIndex stream) const {
    return std::all_of(uses_.begin(), uses_.end(),
                       [&](const Use& use) { return use.point.stream == stream; });
  }

  // Returns the last use that is known; only if there is one.
  Point last() const { return uses_.back().point; }
  bool is_empty() const { return uses_.empty(); }

  // Makes the uses those of an earlier owner: the block is allocated again.
  void pass_on() {
    for (Use& use : uses_) use.is_of_earlier_owner = true;
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
