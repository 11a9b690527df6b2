// How tasks come to run: because somebody waits for them, or because the mode says so.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "streams.h"

namespace sim {

inline void Engine::react(Lock& lock, StreamIndex launched_on) {
  if (mode_ == Mode::eager) {
    try_advance(lock, {launched_on, streams_[launched_on]->launched});
  } else if (mode_ == Mode::random) {
    take_random_steps(lock);
  }
}

inline void Engine::take_random_steps(Lock& lock) {
  std::uniform_real_distribution<> uniform(0, 1);
  while (uniform(random_) < chance_) {
    // Both numbers are drawn in any case, so that how far a worker is does not change later ones.
    uint64_t choice = random_();
    Position steps = 1 + random_() % 8;
    std::vector<StreamIndex> waiting;
    for (StreamIndex index = 0; index < streams_.size(); index++)
      if (!streams_[index]->tasks.empty()) waiting.push_back(index);
    if (waiting.empty()) continue;
    StreamIndex index = waiting[choice % waiting.size()];
    const auto& stream = *streams_[index];
    try_advance(lock, {index, std::min(stream.launched, stream.finished + steps)});
  }
}

inline const Point* Engine::unfinished_dependency(const StreamState& stream) const {
  for (const Point& point : stream.tasks.front().after)
    if (!is_finished(point)) return &point;
  return nullptr;
}

// Runs what `goal` needs and then `goal` itself, in the order of their dependencies. Exchanges are
// requested from their workers, and waited for until the deadline, or for ever where there is none.
// Returns whether all has run.
inline bool Engine::run_until(Lock& lock, Point goal, std::optional<Time> deadline) {
  std::vector<Point> goals{goal};
  while (!goals.empty()) {
    Point next = goals.back();
    auto& stream = *streams_[next.stream];
    if (stream.finished >= next.position) {
      goals.pop_back();
    } else if (const Point* missing = unfinished_dependency(stream)) {
      goals.push_back(*missing);
    } else if (!stream.tasks.front().exchange) {
      run_front(stream);
    } else {
      request(stream, next.position);
      if (deadline && now() >= *deadline) return false;
      wait_for_progress(lock, deadline);
    }
  }
  return true;
}

inline void Engine::run_front(StreamState& stream) {
  const Task& task = stream.tasks.front();
  if (task.run) {
    KernelDispatch dispatch;
    try {
      task.run();
    } catch (const std::exception& error) {
      note_error(task.name, error);
    }
  }
  finish_front(stream);
}

inline void Engine::finish_front(StreamState& stream) {
  Task& task = stream.tasks.front();
  for (const auto& action : task.then) action();
  if (task.finished_at && !is_timed()) *task.finished_at = now();
  remains_.push_back(std::move(task));
  stream.tasks.pop_front();
  stream.finished++;
  if (stream.has_worker) progress_.notify_all();
}

// When a task ended; before the mode began: at 0.
inline double Engine::end_of(Point point) const {
  const auto& ends = stream_at(point).ends;
  return point.position == 0 || point.position > ends.size() ? 0 : ends[point.position - 1];
}

// Ends the task that was just launched: after its stream's last one, what it waits for, and the
// host's launch.
inline void Engine::finish_timed(StreamIndex index) {
  auto& stream = *streams_[index];
  Task& task = stream.tasks.front();
  if (task.seconds) host_s += rates.launch_s;
  if (task.run && task.is_small) {
    KernelDispatch dispatch;
    try {
      task.run();
    } catch (const std::exception& error) {
      note_error(task.name, error);
    }
  }
  double start = std::max(stream.ends.empty() ? 0 : stream.ends.back(), host_s);
  for (const Point& point : task.after) start = std::max(start, end_of(point));
  double end = start + task.seconds.value_or(0);
  if (task.seconds) spans.push_back({task.name, index, start, end});
  stream.ends.push_back(end);
  if (task.finished_at)
    *task.finished_at =
        Time(std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(end)));
  finish_front(stream);
}

inline void Engine::note_error(std::string_view task, const std::exception& error) {
  if (!error_.empty()) return;
  auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  error_ = std::string(task) + ": " +
           (from_torch ? from_torch->what_without_backtrace() : error.what());
}

// Reports what a task raised, at the first host wait after it, as devices do.
inline void Engine::raise_error() {
  if (error_.empty()) return;
  std::string text;
  text.swap(error_);
  TORCH_CHECK(false, "sim, asynchronously: ", text);
}

inline void Engine::report_unordered(std::string text) {
  constexpr size_t kMost = 2000;  // one missing wait in a long run would fill the memory
  if (options.orders && unordered_uses.size() < kMost) unordered_uses.push_back(std::move(text));
}

// Raises what was found, where the environment asks for it. Only a synchronization of the device
// does: a program that makes one after each part of it learns which part lacks a wait.
inline void Engine::raise_unordered() {
  static const bool is_asked_for = getenv("SIM_UNORDERED") != nullptr;
  if (!is_asked_for) return;
  auto found = take_unordered();
  TORCH_CHECK(found.empty(), "sim: ", found.size(), " unordered uses, the first: ", found.front());
}

// Returns what was found since the last call: uses by tasks, and touches by the host.
inline std::vector<std::string> Engine::take_unordered() {
  auto found = std::exchange(unordered_uses, {});
  for (auto& line : host_watch.take_found()) found.push_back(std::move(line));
  return found;
}

inline void Engine::host_learns(const Clock& clock) {
  host_.learn(clock);
  host_watch.forget(host_);
}

// Counts a wait of the host. CUDA's sync debug mode lets synchronize() of events and devices pass.
inline void Engine::count_host_wait(const std::string& kind, bool is_plain_synchronization) {
  host_waits[kind]++;
  if (is_plain_synchronization) return;
  TORCH_CHECK(options.sync_debug != SyncDebug::error, "sim: the host waits for the device: ", kind);
  if (options.sync_debug == SyncDebug::warn)
    TORCH_WARN("sim: the host waits for the device: ", kind);
}

inline void Engine::synchronize(Lock& lock, const Moment& moment) {
  run_until(lock, moment.point);
  if (is_timed()) host_waits_until(end_of(moment.point));
  host_learns(moment.clock);
  raise_error();
}

inline void Engine::synchronize_device(Lock& lock, std::optional<DeviceIndex> device) {
  for (StreamIndex index = 0; index < streams_.size(); index++)
    if (!device || streams_[index]->device == *device) {
      Moment last = moment(index);
      run_until(lock, last.point);
      if (is_timed()) host_waits_until(end_of(last.point));
      host_learns(last.clock);
    }
  raise_error();
}

inline void Engine::set_mode(Lock& lock, Mode mode, uint64_t seed, double chance) {
  synchronize_device(lock, std::nullopt);
  mode_ = mode;
  host_s = 0;
  spans.clear();
  for (auto& stream : streams_) stream->ends.assign(is_timed() ? stream->launched : 0, 0);
  random_.seed(seed);
  chance_ = chance;
}

}  // namespace sim
