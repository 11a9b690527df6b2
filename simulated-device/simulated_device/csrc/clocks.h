// Vector clocks: which tasks of which streams are known to have finished.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sim {

using StreamIndex = size_t;  // a stream's place in Engine::streams; never reused
using Position = uint64_t;   // a task's number within its stream, from 1

// One task of one stream.
struct Point {
  StreamIndex stream = 0;
  Position position = 0;
};

// For each stream, the last task that has certainly finished where the clock is held: before the
// next task of a stream starts, or from the host's next statement on.
class Clock {
 public:
  bool knows(Point point) const { return reached(point.stream) >= point.position; }

  Position reached(StreamIndex stream) const {
    return stream < positions_.size() ? positions_[stream] : 0;
  }

  void learn(Point point) {
    if (point.stream >= positions_.size()) positions_.resize(point.stream + 1);
    positions_[point.stream] = std::max(positions_[point.stream], point.position);
  }

  void learn(const Clock& other) {
    if (other.positions_.size() > positions_.size()) positions_.resize(other.positions_.size());
    for (size_t i = 0; i < other.positions_.size(); i++)
      positions_[i] = std::max(positions_[i], other.positions_[i]);
  }

 private:
  std::vector<Position> positions_;  // by stream; streams beyond its end are at 0; only grows
};

// A task together with all that has finished when it has: what an event or a collective stands for.
struct Moment {
  Point point;
  Clock clock;  // knows `point` itself
};

}  // namespace sim
