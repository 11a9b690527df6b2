// Streams are queues of tasks; the engine has all of them. progress.h says when tasks run, and
// workers.h how ranks exchange data.
//
// A task runs on the thread that must have its result: kernels and copies take no thread of their
// own, so that a run of one process is repeatable. Only exchanges with other ranks do, since a
// device goes on with them while its host is busy: each collective stream has a worker.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "clocks.h"
#include "host_watch.h"
#include "rates.h"

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::StreamId;
using Time = std::chrono::steady_clock::time_point;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMaxDevices = 16;

inline Time now() { return std::chrono::steady_clock::now(); }

// Dispatches as a kernel does: without autograd, autocast, and modes of the calling thread.
struct KernelDispatch {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

constexpr double kSmallBytes = 1 << 18;        // of kernels
constexpr double kSmallMovedBytes = 16 << 20;  // of copies and collectives

inline double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Lock;

// What a stream does next: a kernel, a copy, a collective, or the mark of an event.
struct Task {
  std::string_view name;  // lives as long as the process
  // A kernel or a copy, run under the lock; empty for the marks of events.
  std::function<void()> run;
  // Instead of `run`, for collectives: lets go of the lock while it waits for other ranks.
  std::function<void(Lock&)> exchange;
  std::shared_ptr<Time> finished_at;  // set when the task has finished; null where nobody asks
  std::optional<double> seconds;      // in the timed mode: how long it runs; marks take no time
  bool is_small = false;              // in the timed mode: it runs; see `Mode`
  std::vector<Point> after;           // tasks that must have finished before this one starts
  std::vector<std::function<void()>> then;  // run when this one finishes, as a part of it
};

// A stream: tasks that run one after another, in the order of their launches.
struct StreamState {
  DeviceIndex device = 0;
  StreamId id = 0;         // torch's number; 0 is a device's default stream
  Position launched = 0;   // number of tasks launched so far
  Position finished = 0;   // number of tasks finished so far, at most `launched`
  std::deque<Task> tasks;  // launched and not finished, oldest first: `launched - finished` of them
  Clock clock;             // what has finished when the next task starts; knows `launched`
  std::vector<double> ends;  // in the timed mode: when each task ended, by position from 1

  // Of streams whose tasks are exchanges only:
  bool has_worker = false;  // a thread serves this stream; set by start_worker()
  Position requested = 0;   // the worker must run tasks up to here at once; raised by who waits
  bool is_closed = false;   // no more launches: the worker ends when nothing is left
  bool is_stuck = false;    // the oldest task is an exchange that does not fit other ranks'
  bool is_aborted = false;  // the tasks were dropped: the worker ends at once
  Position last_run = 0;    // before that
  std::condition_variable wake;  // notified when the worker must look at one of these again
};

// In the timed mode each task ends at once, at a time that the rates say. Only small ones run: what
// the host decides by, such as flags and sizes, comes of those.
enum class Mode { eager, late, random, timed };

// When a task ran, in the timed mode.
struct Span {
  std::string_view name;
  StreamIndex stream;
  double start, end;  // seconds since the mode began
};
enum class SyncDebug { none, warn, error };

struct Options {
  bool poison = true;            // overwrite memory by 0xff when it is new or handed on
  bool orders = true;            // look for unordered uses of the same bytes
  bool strict_pageable = false;  // a non-blocking copy into pageable memory does not wait either
  SyncDebug sync_debug = SyncDebug::none;
};

// The state of all devices of this process. One lock guards everything in it and in the allocator.
class Engine {
 public:
  // Never destroyed: workers and tensors may outlive static destruction.
  static Engine& get() {
    static auto* engine = new Engine();
    return *engine;
  }

  // ---- streams
  StreamIndex index_of(DeviceIndex device, StreamId id);
  StreamState& stream(StreamIndex index) { return *streams_[index]; }
  std::string name_of(StreamIndex index) const;
  StreamId new_stream_id() { return next_stream_id_++; }
  Moment moment(StreamIndex index) const;

  // ---- launches, by the host
  Point launch(Lock& lock, StreamIndex index, Task task, const std::vector<Moment>& after = {});
  void wait(Lock& lock, StreamIndex index, const Moment& moment);
  void run_after(Point point, std::function<void()> action);

  // ---- progress
  bool is_finished(Point point) const { return stream_at(point).finished >= point.position; }
  bool try_advance(Lock& lock, Point goal) { return run_until(lock, goal, Time::min()); }
  bool run_until(Lock& lock, Point goal, std::optional<Time> deadline = std::nullopt);

  // ---- the host
  const Clock& host() const { return host_; }
  void host_learns(const Clock& clock);
  void count_host_wait(const std::string& kind, bool is_plain_synchronization = false);
  void synchronize(Lock& lock, const Moment& moment);
  void synchronize_stream(Lock& lock, StreamIndex index) { synchronize(lock, moment(index)); }
  void synchronize_device(Lock& lock, std::optional<DeviceIndex> device);
  void raise_error();
  void report_unordered(std::string text);
  void raise_unordered();
  std::vector<std::string> take_unordered();

  // ---- workers of collective streams
  void start_worker(StreamIndex index);
  void abort(StreamIndex index);
  bool is_dropped(const Point& point) const;
  void close(StreamIndex index);
  template <typename Wait>
  void without_lock(Lock& lock, Wait wait);
  void wait_for_abort(Lock& lock, StreamIndex index);
  void drain(Lock& lock, StreamIndex index, Time deadline);

  // ---- the process
  void end_process();
  void mark_used() { is_used_ = true; }
  bool is_forked() const { return is_forked_; }
  void check_not_forked() const {
    TORCH_CHECK(!is_forked_, "Cannot use device sim in a forked process; start it with 'spawn'");
  }
  DeviceIndex num_devices() const { return num_devices_; }
  void set_mode(Lock& lock, Mode mode, uint64_t seed, double chance);

  // ---- the timed mode
  bool is_timed() const { return mode_ == Mode::timed; }
  double end_of(Point point) const;
  void host_waits_until(double seconds) { host_s = std::max(host_s, seconds); }

  Options options;
  HostWatch host_watch;                            // pinned memory that tasks still use
  std::map<std::string, uint64_t> host_waits;      // kind -> count since it was last taken
  std::map<std::string_view, uint64_t> launches;   // task's name -> count since the start
  std::map<std::string, uint64_t> without_meta;    // operators that waited to learn their shapes
  std::vector<std::string> unordered_uses;         // since they were last taken
  Rates rates;                                     // of the timed mode, in which also:
  double host_s = 0;                               // how far the host is
  std::vector<Span> spans;   // since they were last taken

 private:
  friend class Lock;

  Engine();
  const StreamState& stream_at(Point point) const { return *streams_[point.stream]; }
  const Point* unfinished_dependency(const StreamState& stream) const;
  void run_front(StreamState& stream);
  void finish_front(StreamState& stream);
  void finish_timed(StreamIndex index);
  void react(Lock& lock, StreamIndex launched_on);
  void take_random_steps(Lock& lock);
  void run_all_ready(Lock& lock);
  void request(StreamState& stream, Position position);
  void wait_for_progress(Lock& lock, std::optional<Time> deadline);
  void stop_at_end(Lock& lock);
  bool serve_once(Lock& lock, StreamIndex index);
  bool is_host_idle() const;
  void run_exchange(Lock& lock, StreamIndex index);
  void note_error(std::string_view task, const std::exception& error);

  std::mutex mutex_;
  std::condition_variable progress_;  // a collective stream's task finished, or never will
  std::vector<std::unique_ptr<StreamState>> streams_;  // only grows
  std::map<std::pair<DeviceIndex, StreamId>, StreamIndex> by_id_;
  std::vector<Task> remains_;  // finished tasks, whose tensors are destroyed without the lock
  Clock host_;                 // what the host knows to have finished
  std::string error_;          // the first that a task raised and no host wait has reported
  StreamId next_stream_id_ = 1;
  DeviceIndex num_devices_ = 1;
  Mode mode_ = Mode::late;
  std::mt19937_64 random_{0};
  double chance_ = 0.3;  // of one more step after a launch, in random mode
  Time last_launch_ = now();
  pid_t last_launcher_ = 0;  // the thread
  bool is_ending_ = false;  // the interpreter is about to end: threads stop where they wait
  std::thread::id ending_thread_;  // which set that
  bool is_used_ = false;    // streams or memory exist, which a forked child cannot share
  bool is_forked_ = false;  // this process is a fork of one that had used the device
};

// Holds the engine's lock. What tasks held is destroyed after it has been given up, because
// destroying a tensor of the device takes the lock again. For the same reason, tensors in the scope
// of a Lock must be declared before it.
class Lock {
 public:
  Lock() : lock_(Engine::get().mutex_) {}
  ~Lock() {
    std::vector<Task> remains;
    remains.swap(Engine::get().remains_);
    lock_.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  friend class Engine;
  std::unique_lock<std::mutex> lock_;
};

// While it lives, the host's time is the simulation's own, and does not count in the timed mode.
class HostPause {
 public:
  HostPause() {
    if (depth_++ > 0) return;
    auto& engine = Engine::get();
    if (!engine.is_timed() || left_s_ < 0) return;
    Lock lock;
    engine.host_s += engine.rates.host_factor * (thread_seconds() - left_s_);
  }
  ~HostPause() {
    if (--depth_ == 0 && Engine::get().is_timed()) left_s_ = thread_seconds();
  }
  HostPause(const HostPause&) = delete;
  HostPause& operator=(const HostPause&) = delete;

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local double left_s_ = -1;  // processor time when it was here last
};

// ---- current device and stream of a thread ------------------------------------------------------

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::map<DeviceIndex, StreamId> current_streams;  // missing: the default stream

inline StreamId current_stream_id(DeviceIndex device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

inline c10::Stream stream_of(DeviceIndex device, StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kSim, device), id);
}

inline StreamIndex current_stream(DeviceIndex device) {
  return Engine::get().index_of(device, current_stream_id(device));
}

// ---- streams and launches -----------------------------------------------------------------------

inline Engine::Engine() {
  if (const char* count = getenv("SIM_DEVICES"))
    num_devices_ = static_cast<DeviceIndex>(std::clamp(atoi(count), 1, int{kMaxDevices}));
  // Workers do not exist in a forked child, and the lock must be in a known state there. A parent
  // that has not used the device has nothing that the child could lack, as with CUDA.
  pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                 [] {
                   get().is_forked_ |= get().is_used_;
                   get().mutex_.unlock();
                 });
}

inline StreamIndex Engine::index_of(DeviceIndex device, StreamId id) {
  auto [entry, is_new] = by_id_.emplace(std::pair(device, id), streams_.size());
  if (is_new) {
    mark_used();
    streams_.push_back(std::make_unique<StreamState>());
    streams_.back()->device = device;
    streams_.back()->id = id;
  }
  return entry->second;
}

inline std::string Engine::name_of(StreamIndex index) const {
  const auto& stream = *streams_[index];
  std::ostringstream text;
  if (num_devices_ > 1) text << "sim:" << int{stream.device} << "'s ";
  if (stream.has_worker) text << "collective ";
  if (stream.id == 0) text << "default ";
  text << "stream";
  if (stream.id != 0) text << ' ' << stream.id;
  return text.str();
}

inline Moment Engine::moment(StreamIndex index) const {
  return {{index, streams_[index]->launched}, streams_[index]->clock};
}

// Adds a task to a stream, to start after the tasks that it has and after the moments.
inline Point Engine::launch(Lock& lock, StreamIndex index, Task task,
                            const std::vector<Moment>& after) {
  check_not_forked();
  launches[task.name]++;
  auto& stream = *streams_[index];
  stream.clock.learn(host_);
  for (const Moment& moment : after) {
    stream.clock.learn(moment.clock);
    task.after.push_back(moment.point);
  }
  Point point{index, ++stream.launched};
  stream.clock.learn(point);
  stream.tasks.push_back(std::move(task));
  last_launch_ = now();
  last_launcher_ = gettid();
  if (is_timed()) {
    finish_timed(index);
    return point;
  }
  if (stream.has_worker) stream.wake.notify_one();
  react(lock, index);
  return point;
}

// Has the tasks that are launched on a stream from now on start after `moment`.
inline void Engine::wait(Lock& lock, StreamIndex index, const Moment& moment) {
  if (index == moment.point.stream) return;
  launch(lock, index, Task{.name = "wait"}, {moment});
}

// Adds an action to a task that has been launched; runs it at once where that has finished.
inline void Engine::run_after(Point point, std::function<void()> action) {
  auto& stream = *streams_[point.stream];
  if (is_finished(point)) return action();
  stream.tasks[point.position - stream.finished - 1].then.push_back(std::move(action));
}

}  // namespace sim
