// Streams are queues of tasks. The engine decides when a task runs, and who runs it.
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

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::StreamId;
using Time = std::chrono::steady_clock::time_point;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMaxDevices = 16;
constexpr auto kIdle = std::chrono::milliseconds(20);

inline Time now() { return std::chrono::steady_clock::now(); }

// Dispatches as a kernel does: without autograd, autocast, and modes of the calling thread.
struct KernelDispatch {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

class Lock;

struct Task {
  std::string_view name;  // lives as long as the process
  // A kernel or a copy, run under the lock; empty for the marks of events.
  std::function<void()> run;
  // Instead of `run`, for collectives: lets go of the lock while it waits for other ranks.
  std::function<void(Lock&)> exchange;
  std::shared_ptr<Time> finished_at;  // set when the task has finished; null where nobody asks
  std::vector<Point> after;           // tasks that must have finished before this one starts
};

struct StreamState {
  DeviceIndex device = 0;
  StreamId id = 0;            // torch's number; 0 is a device's default stream
  Position launched = 0;      // tasks so far
  Position finished = 0;      // of these; tasks finish in the order of their launches
  std::deque<Task> tasks;     // the others, `launched - finished` of them
  Clock clock;                // what has finished when the next task starts; knows `launched`
  bool has_worker = false;    // exchanges are launched here: a thread serves it
  Position requested = 0;     // the worker must run tasks up to here; set by those who wait
  bool is_closed = false;     // no more launches: the worker ends when nothing is left
  bool is_stuck = false;      // the first task is an exchange that other ranks do not fit
  bool is_aborted = false;    // tasks were dropped; the worker ends at once
  std::condition_variable wake;  // something changed that the worker must look at
};

enum class Mode { eager, late, random };
enum class SyncDebug { none, warn, error };

struct Options {
  bool poison = true;            // overwrite memory by 0xff when it is freed, and when it is new
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
  size_t num_streams() const { return streams_.size(); }
  std::string name_of(StreamIndex index) const;
  StreamId new_stream_id() { return next_stream_id_++; }
  Moment moment(StreamIndex index) const;

  // ---- launches, by the host
  Point launch(Lock& lock, StreamIndex index, Task task, const std::vector<Moment>& after = {});
  Point enqueue(Lock& lock, StreamIndex index, Task task, const std::vector<Moment>& after = {});
  void wait(Lock& lock, StreamIndex index, const Moment& moment);

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

  // ---- workers of collective streams
  void start_worker(StreamIndex index);
  void abort(StreamIndex index, const std::string& why);
  void close(StreamIndex index);
  template <typename Wait>
  void without_lock(Lock& lock, Wait wait);
  void wait_for_abort(Lock& lock, StreamIndex index);
  void drain(Lock& lock, StreamIndex index, Time deadline);

  // ---- the process
  void end_process();
  bool is_ending() const { return is_ending_; }
  bool is_forked() const { return is_forked_; }
  DeviceIndex num_devices() const { return num_devices_; }
  void set_mode(Lock& lock, Mode mode, uint64_t seed, double chance);

  Options options;
  HostWatch host_watch;                            // pinned memory that tasks still use
  std::map<std::string, uint64_t> host_waits;      // kind -> count since it was last taken
  std::map<std::string_view, uint64_t> launches;   // task's name -> count since the start
  std::map<std::string, uint64_t> without_meta;    // operators that waited to learn their shapes
  std::vector<std::string> unordered_uses;         // since they were last taken

 private:
  friend class Lock;

  Engine();
  const StreamState& stream_at(Point point) const { return *streams_[point.stream]; }
  const Point* unfinished_dependency(const StreamState& stream) const;
  void run_front(StreamState& stream);
  void finish_front(StreamState& stream);
  void react(Lock& lock, StreamIndex launched_on);
  void take_random_steps(Lock& lock);
  void run_all_ready(Lock& lock);
  void request(StreamState& stream, Position position);
  void wait_for_progress(Lock& lock, std::optional<Time> deadline);
  bool serve_once(Lock& lock, StreamIndex index);
  void run_exchange(Lock& lock, StreamIndex index);
  void note_error(std::string_view task, const std::exception& error);

  std::mutex mutex_;
  std::condition_variable progress_;  // a task with an exchange finished, or will never
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
  bool is_ending_ = false;  // the interpreter is about to end: workers stop where they are
  bool is_forked_ = false;  // this process is a fork of the one that used the device
};

// Holds the engine's lock. What tasks held is destroyed after it has been given up, because
// destroying a tensor of the device takes the lock again. For the same reason, tensors in the scope
// of a Lock must be declared before it.
class Lock {
 public:
  Lock() : lock_(Engine::get().mutex_) {}
  ~Lock() {
    if (!lock_.owns_lock()) return;
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

// ---- implementation -----------------------------------------------------------------------------

inline Engine::Engine() {
  if (const char* count = getenv("SIM_DEVICES"))
    num_devices_ = static_cast<DeviceIndex>(std::clamp(atoi(count), 1, int{kMaxDevices}));
  // Workers do not exist in a forked child, and the lock must be in a known state there.
  pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                 [] {
                   get().is_forked_ = true;
                   get().mutex_.unlock();
                 });
}

inline StreamIndex Engine::index_of(DeviceIndex device, StreamId id) {
  auto [entry, is_new] = by_id_.emplace(std::pair(device, id), streams_.size());
  if (is_new) {
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

// Adds a task to a stream, without counting it: the program did not ask for it.
inline Point Engine::enqueue(Lock& lock, StreamIndex index, Task task,
                             const std::vector<Moment>& after) {
  TORCH_CHECK(!is_forked_, "Cannot use device sim in a forked process; start it with 'spawn'");
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
  if (stream.has_worker) stream.wake.notify_one();
  react(lock, index);
  return point;
}

inline Point Engine::launch(Lock& lock, StreamIndex index, Task task,
                            const std::vector<Moment>& after) {
  launches[task.name]++;
  return enqueue(lock, index, std::move(task), after);
}

// Has the tasks that are launched on a stream from now on start after `moment`.
inline void Engine::wait(Lock& lock, StreamIndex index, const Moment& moment) {
  if (index == moment.point.stream) return;
  launch(lock, index, Task{.name = "wait"}, {moment});
}

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
    StreamIndex index = random_() % streams_.size();
    Position steps = 1 + random_() % 8;
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
      TORCH_CHECK(!is_ending_, "sim: the process ends; other ranks are no longer waited for");
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
  if (task.finished_at) *task.finished_at = now();
  remains_.push_back(std::move(task));
  stream.tasks.pop_front();
  stream.finished++;
}

inline void Engine::note_error(std::string_view task, const std::exception& error) {
  if (error_.empty()) error_ = std::string(task) + ": " + error.what();
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
  if (unordered_uses.size() < kMost) unordered_uses.push_back(std::move(text));
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
  if (options.sync_debug == SyncDebug::warn) TORCH_WARN("sim: the host waits for the device: ", kind);
}

inline void Engine::synchronize(Lock& lock, const Moment& moment) {
  run_until(lock, moment.point);
  host_learns(moment.clock);
  raise_error();
}

inline void Engine::synchronize_device(Lock& lock, std::optional<DeviceIndex> device) {
  for (StreamIndex index = 0; index < streams_.size(); index++)
    if (!device || streams_[index]->device == *device) {
      Moment last = moment(index);
      run_until(lock, last.point);
      host_learns(last.clock);
    }
  raise_error();
}

inline void Engine::set_mode(Lock& lock, Mode mode, uint64_t seed, double chance) {
  synchronize_device(lock, std::nullopt);
  mode_ = mode;
  random_.seed(seed);
  chance_ = chance;
}

// ---- workers

inline void Engine::request(StreamState& stream, Position position) {
  stream.requested = std::max(stream.requested, position);
  stream.wake.notify_one();
}

// Gives up the lock until an exchange has ended, or something else that ends a wait for it.
inline void Engine::wait_for_progress(Lock& lock, std::optional<Time> deadline) {
  if (deadline) progress_.wait_until(lock.lock_, *deadline);
  else progress_.wait(lock.lock_);
}

// Keeps an exchange that no rank can complete until its stream is aborted; always raises.
inline void Engine::wait_for_abort(Lock& lock, StreamIndex index) {
  auto& stream = *streams_[index];
  stream.is_stuck = true;
  progress_.notify_all();
  while (!stream.is_aborted && !is_ending_) wait_for_progress(lock, std::nullopt);
  TORCH_CHECK(false, "simccl: what ranks launched does not fit");
}

// Waits until a stream has no tasks, its exchange can never end, or the deadline has passed.
inline void Engine::drain(Lock& lock, StreamIndex index, Time deadline) {
  auto& stream = *streams_[index];
  while (!stream.tasks.empty() && !stream.is_stuck && now() < deadline) {
    request(stream, stream.launched);
    wait_for_progress(lock, deadline);
  }
}

// Gives up the lock while `wait` waits for other ranks.
template <typename Wait>
void Engine::without_lock(Lock& lock, Wait wait) {
  std::exception_ptr error;
  lock.lock_.unlock();
  try {
    wait();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock_.lock();
  if (is_ending_) {
    // Static objects may be gone: neither return into torch's code nor end the thread.
    lock.lock_.unlock();
    while (true) pause();
  }
  if (error) std::rethrow_exception(error);
}

inline void Engine::start_worker(StreamIndex index) {
  streams_[index]->has_worker = true;
  std::thread([this, index] {
    while (true) {
      Lock lock;
      if (!serve_once(lock, index)) return;
    }
  }).detach();
}

// Looks once at a stream's next task. Returns false when the worker is to end.
//
// Exchanges run when somebody waits for them, or when the host has launched nothing for a while:
// other ranks may wait for this one, whose host is busy with something else.
inline bool Engine::serve_once(Lock& lock, StreamIndex index) {
  constexpr auto kLook = std::chrono::milliseconds(5);
  auto& stream = *streams_[index];
  if (is_ending_ || stream.is_aborted) return false;
  if (stream.tasks.empty()) {
    if (stream.is_closed) return false;
    stream.wake.wait(lock.lock_);
    return true;
  }
  bool is_idle = now() - last_launch_ >= kIdle;
  if (stream.requested <= stream.finished && !is_idle && !stream.is_closed) {
    stream.wake.wait_for(lock.lock_, kLook);
    return true;
  }
  if (const Point* missing = unfinished_dependency(stream)) {
    if (!try_advance(lock, *missing)) wait_for_progress(lock, now() + kLook);
  } else if (stream.tasks.front().exchange) {
    run_exchange(lock, index);
  } else {
    run_front(stream);
  }
  return true;
}

inline void Engine::run_exchange(Lock& lock, StreamIndex index) {
  auto& stream = *streams_[index];
  // A copy: an abort drops the tasks while the lock is given up.
  auto exchange = stream.tasks.front().exchange;
  std::string_view name = stream.tasks.front().name;
  try {
    KernelDispatch dispatch;
    exchange(lock);
  } catch (const std::exception& error) {
    if (!stream.is_aborted && !is_ending_) note_error(name, error);
  }
  remains_.push_back(Task{.name = name, .exchange = std::move(exchange)});
  if (stream.is_aborted || is_ending_) return;
  finish_front(stream);
  progress_.notify_all();
  if (mode_ == Mode::eager) run_all_ready(lock);
}

// Runs all tasks that need no further exchange; for eager mode, after an exchange.
inline void Engine::run_all_ready(Lock& lock) {
  for (StreamIndex index = 0; index < streams_.size(); index++)
    try_advance(lock, {index, streams_[index]->launched});
}

// Drops a stream's tasks. Those who wait for them get an error instead.
inline void Engine::abort(StreamIndex index, const std::string& why) {
  auto& stream = *streams_[index];
  if (!stream.tasks.empty()) note_error(stream.tasks.front().name, std::runtime_error(why));
  while (!stream.tasks.empty()) finish_front(stream);
  stream.is_aborted = true;
  stream.wake.notify_all();
  progress_.notify_all();
}

inline void Engine::close(StreamIndex index) {
  streams_[index]->is_closed = true;
  streams_[index]->wake.notify_all();
}

// Ends the workers, before what they use is destroyed. Called once, when the interpreter ends.
inline void Engine::end_process() {
  Lock lock;
  is_ending_ = true;
  for (auto& stream : streams_) stream->wake.notify_all();
  progress_.notify_all();
}

}  // namespace sim
