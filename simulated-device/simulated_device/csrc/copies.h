// Copies within a device, between devices, and between a device and the host.
#pragma once

#include <torch/library.h>

#include "device.h"
#include "operands.h"

namespace sim {

inline Point launch_copy(Lock& lock, StreamIndex stream, std::string_view name, const Tensor& to,
                         const Tensor& from, const c10::Storage& keeps_alive = {},
                         const std::vector<Moment>& after = {}) {
  auto run = [to, from, keeps_alive]() mutable { to.copy_(from); };
  Task task{.name = name, .run = std::move(run)};
  const Rates& rates = Engine::get().rates;
  double bytes = static_cast<double>(to.nbytes());
  if (Engine::get().is_timed()) {
    double moved = bytes + static_cast<double>(from.nbytes());
    task.seconds =
        name == "copy" ? rates.kernel(moved, 0, at::kFloat) : rates.host_copy(bytes);
    task.is_small = moved <= kSmallMovedBytes;
  }
  return Engine::get().launch(lock, stream, std::move(task), after);
}

inline void copy_within_device(const Tensor& target, const Tensor& source) {
  Tensor to = kernel_operand(target), from = kernel_operand(source);
  Lock lock;
  Point point = launch_copy(lock, current_stream(target.device().index()), "copy", to, from);
  note_use(source, false, point, "copy");
  note_use(target, true, point, "copy");
}

// Runs on the source's stream. As with CUDA, each device's stream waits for the other's.
inline void copy_across_devices(const Tensor& target, const Tensor& source) {
  Tensor to = kernel_operand(target), from = kernel_operand(source);
  Lock lock;
  auto& engine = Engine::get();
  StreamIndex there = current_stream(target.device().index());
  StreamIndex here = current_stream(source.device().index());
  Point point =
      launch_copy(lock, here, "copy across devices", to, from, {}, {engine.moment(there)});
  note_use(source, false, point, "copy across devices");
  note_use(target, true, point, "copy across devices");
  engine.wait(lock, there, engine.moment(here));
}

// What a copy keeps alive of the host's memory: nothing that a program must keep.
inline c10::Storage kept_by_copy(const Tensor& tensor) {
  Lock lock;
  return PinnedMemory::get().is_loan(tensor) ? c10::Storage() : tensor.storage();
}

inline bool is_pinned(const Tensor& tensor) {
  Lock lock;
  return PinnedMemory::get().contains(extent_of(tensor).start);
}

inline void copy_to_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  // A driver takes pageable memory before the call returns, by way of memory of its own. torch
  // converts on the host, into such memory.
  bool converts = source.scalar_type() != target.scalar_type();
  bool is_staged = non_blocking && (converts || !is_pinned(source));
  Tensor to = kernel_operand(target);
  Tensor from = is_staged ? source.detach().clone() : host_operand(source);
  c10::Storage kept = kept_by_copy(source);
  Lock lock;
  auto& engine = Engine::get();
  StreamIndex stream = current_stream(target.device().index());
  if (!non_blocking) engine.count_host_wait("copy H2D");
  Point point = launch_copy(lock, stream, "copy H2D", to, from, kept);
  if (!is_staged) PinnedMemory::get().note_copy(source, false, point, "copy H2D");
  note_use(target, true, point, "copy H2D");
  if (!non_blocking) engine.synchronize_stream(lock, stream);
}

inline void copy_to_host(const Tensor& target, const Tensor& source, bool non_blocking) {
  // torch converts on the host, of pageable memory into which the source is copied as it is.
  bool converts = source.scalar_type() != target.scalar_type();
  bool is_to_pageable = non_blocking && (converts || !is_pinned(target));
  Tensor to = host_operand(target), from = kernel_operand(source);
  c10::Storage kept = kept_by_copy(target);
  Lock lock;
  auto& engine = Engine::get();
  bool waits = !non_blocking || (is_to_pageable && !engine.options.strict_pageable);
  StreamIndex stream = current_stream(source.device().index());
  if (waits) engine.count_host_wait(non_blocking ? "copy D2H of pageable memory" : "copy D2H");
  Point point = launch_copy(lock, stream, "copy D2H", to, from, kept);
  note_use(source, false, point, "copy D2H");
  PinnedMemory::get().note_copy(target, true, point, "copy D2H");
  if (waits) engine.synchronize_stream(lock, stream);
}

inline Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  HostPause pause;
  if (self.is_same(given) || self.numel() == 0) return self;
  TORCH_CHECK_NOT_IMPLEMENTED(!given.is_meta(), "Cannot copy out of meta tensor; no data!");
  TORCH_CHECK((is_sim(self) || self.is_cpu()) && (is_sim(given) || given.is_cpu()),
              "sim: cannot copy from ", given.device(), " to ", self.device());
  Tensor source = given.expand_as(self);
  c10::DeviceGuard guard(is_sim(source) ? source.device() : self.device());
  if (!is_sim(source)) copy_to_device(self, source, non_blocking);
  else if (!is_sim(self)) copy_to_host(self, source, non_blocking);
  else if (self.device() == source.device()) copy_within_device(self, source);
  else copy_across_devices(self, source);
  return self;
}

inline Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, self, non_blocking);
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// Returns a tensor's only number to the host: item(), float(), bool().
inline at::Scalar local_scalar_dense(const Tensor& self) {
  HostPause pause;
  Tensor value = kernel_operand(self);
  Lock lock;
  auto& engine = Engine::get();
  StreamIndex stream = current_stream(self.device().index());
  engine.count_host_wait("item");
  Point point = engine.launch(lock, stream, {.name = "item"});
  note_use(self, false, point, "item");
  engine.synchronize_stream(lock, stream);
  KernelDispatch dispatch;
  return at::_local_scalar_dense(value);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace sim
