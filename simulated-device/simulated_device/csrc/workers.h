// Workers: the threads that exchange collectives with other ranks, and how they end.
#pragma once

#include <unistd.h>

#include <exception>
#include <fstream>
#include <string>
#include <thread>

#include "streams.h"

namespace sim {

inline void Engine::request(StreamState& stream, Position position) {
  stream.requested = std::max(stream.requested, position);
  stream.wake.notify_one();
}

// Gives up the lock until an exchange has ended, or something else that ends a wait for it.
inline void Engine::wait_for_progress(Lock& lock, std::optional<Time> deadline) {
  if (deadline) progress_.wait_until(lock.lock_, *deadline);
  else if (!is_ending_) progress_.wait(lock.lock_);
  if (is_ending_) stop_at_end(lock);
}

// Ends a wait when the process ends. The interpreter is on one thread by then, and gets an error;
// others stop here, because neither Python nor torch can be returned to.
inline void Engine::stop_at_end(Lock& lock) {
  TORCH_CHECK(std::this_thread::get_id() != ending_thread_,
              "sim: the process ends; other ranks are no longer waited for");
  lock.lock_.unlock();
  while (true) pause();
}

// Keeps an exchange that no rank can complete until its stream is aborted; always raises.
inline void Engine::wait_for_abort(Lock& lock, StreamIndex index) {
  auto& stream = *streams_[index];
  stream.is_stuck = true;
  progress_.notify_all();
  while (!stream.is_aborted) wait_for_progress(lock, std::nullopt);
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
  if (is_ending_) stop_at_end(lock);
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

// Whether a thread of this process sleeps or has ended, as opposed to computing or reading a disk.
inline bool is_thread_asleep(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  size_t name_end = text.rfind(')');  // "<id> (<name>) <state> ..."
  return name_end == std::string::npos || name_end + 2 >= text.size() || text[name_end + 2] == 'S';
}

// Whether other ranks may wait for an exchange while this host does something else. A host that
// computes is about to launch more, and on a busy machine one that waits for a core looks the same.
inline bool Engine::is_host_idle() const {
  constexpr auto kAsleep = std::chrono::milliseconds(20), kComputing = 25 * kAsleep;
  auto since = now() - last_launch_;
  return since >= kComputing || (since >= kAsleep && is_thread_asleep(last_launcher_));
}

// Looks once at a stream's next task. Returns false when the worker is to end. Exchanges run when
// somebody waits for them, or when the host is idle.
inline bool Engine::serve_once(Lock& lock, StreamIndex index) {
  constexpr auto kLook = std::chrono::milliseconds(5);
  auto& stream = *streams_[index];
  if (is_ending_ || stream.is_aborted) return false;
  if (stream.tasks.empty()) {
    if (stream.is_closed) return false;
    stream.wake.wait(lock.lock_);
    return true;
  }
  if (stream.requested <= stream.finished && !stream.is_closed && !is_host_idle()) {
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
    if (!stream.is_aborted) note_error(name, error);
  }
  remains_.push_back(Task{.name = name, .exchange = std::move(exchange)});
  if (stream.is_aborted) return;
  finish_front(stream);
  if (mode_ == Mode::eager) run_all_ready(lock);
}

// Runs all tasks that need no further exchange; for eager mode, after an exchange.
inline void Engine::run_all_ready(Lock& lock) {
  for (StreamIndex index = 0; index < streams_.size(); index++)
    try_advance(lock, {index, streams_[index]->launched});
}

// Drops a stream's tasks.
inline void Engine::abort(StreamIndex index) {
  auto& stream = *streams_[index];
  if (!stream.is_aborted) stream.last_run = stream.finished;
  stream.is_aborted = true;
  while (!stream.tasks.empty()) finish_front(stream);
  stream.wake.notify_all();
  progress_.notify_all();
}

// Whether an abort came before a task.
inline bool Engine::is_dropped(const Point& point) const {
  const auto& stream = *streams_[point.stream];
  return stream.is_aborted && point.position > stream.last_run;
}

inline void Engine::close(StreamIndex index) {
  streams_[index]->is_closed = true;
  streams_[index]->wake.notify_all();
}

// Stops the workers, before what they use is destroyed. Called once, when the interpreter ends.
inline void Engine::end_process() {
  Lock lock;
  is_ending_ = true;
  ending_thread_ = std::this_thread::get_id();
  for (auto& stream : streams_) stream->wake.notify_all();
  progress_.notify_all();
}

}  // namespace sim
