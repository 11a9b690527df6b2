// What a launch of a collective consists of, and what the program gets to wait for it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device.h"
#include "operands.h"
#include "peers.h"

namespace sim {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using WorkPtr = intrusive_ptr<Work>;

// Keeps the tensors of a launch alive until the stream that waits for it may reuse their memory.
using Stash = std::shared_ptr<Tensors>;

// One pairing of all ranks. A coalesced launch has several.
struct Transfer {
  Header header;
  std::function<void(Peers&)> move;  // after the headers have met
};

// What the host launches as one task.
struct Launch {
  std::string_view name;  // as launches() counts it
  OpType type = OpType::UNKNOWN;
  Tensors reads, writes;  // of the device
  std::vector<Transfer> transfers;
  std::vector<Message> messages;  // to and from single ranks; exchanged after the transfers
  bool blocks_host = false;       // in wait(), as a barrier does

  void append(Launch other) {
    name = transfers.empty() && messages.empty() ? other.name : name;
    if (name != other.name) name = "coalesced";
    std::move(other.reads.begin(), other.reads.end(), std::back_inserter(reads));
    std::move(other.writes.begin(), other.writes.end(), std::back_inserter(writes));
    std::move(other.transfers.begin(), other.transfers.end(), std::back_inserter(transfers));
    std::move(other.messages.begin(), other.messages.end(), std::back_inserter(messages));
  }
};

class SimWork final : public Work {
 public:
  SimWork(int rank, OpType type, DeviceIndex device, Moment moment, Stash stash, bool blocks_host)
      : Work(rank, type),
        device_(device),
        moment_(std::move(moment)),
        stash_(std::move(stash)),
        blocks_host_(blocks_host) {}

  bool isCompleted() override {
    Lock lock;
    auto& engine = Engine::get();
    if (!engine.is_finished(moment_.point)) return false;
    engine.host_learns(moment_.clock);
    return true;
  }
  bool isSuccess() const override {
    Lock lock;
    return !Engine::get().is_dropped(moment_.point);
  }

  void synchronize() override { wait(kNoTimeout); }

  bool wait(std::chrono::milliseconds timeout) override {
    Tensors released;  // destroyed after the lock
    Lock lock;
    auto& engine = Engine::get();
    engine.wait(lock, current_stream(device_), moment_);
    if (blocks_host_ || timeout != kNoTimeout) block_host(lock, timeout);
    released.swap(*stash_);
    return true;
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // As NCCL's future: it is complete at once, and orders streams by events on the group's stream.
  void complete_future(c10::Stream stream, const Tensors& values) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{stream.device()});
    DeviceGuardImpl guard;
    c10::Stream before = guard.exchangeStream(stream);
    future_->markCompleted(IValue(values));
    guard.exchangeStream(before);
  }

 private:
  void block_host(Lock& lock, std::chrono::milliseconds timeout) {
    auto& engine = Engine::get();
    engine.count_host_wait(blocks_host_ ? "barrier" : "work.wait(timeout)");
    std::optional<Time> deadline;
    if (timeout != kNoTimeout) deadline = now() + timeout;
    bool is_over = engine.run_until(lock, moment_.point, deadline);
    TORCH_CHECK_WITH(DistBackendError, is_over, "simccl: no end of ", c10d::opTypeToString(opType_),
                     " after ", timeout.count(), " ms");
    engine.host_learns(moment_.clock);
    engine.raise_error();
    TORCH_CHECK_WITH(DistBackendError, !engine.is_dropped(moment_.point),
                     "simccl: the group was aborted");
  }

  DeviceIndex device_;
  Moment moment_;  // its end
  Stash stash_;    // emptied by wait()
  bool blocks_host_;
  intrusive_ptr<c10::ivalue::Future> future_;
};

// Stands for one operation of an open coalescing block; the block's work is the one to wait for.
class CoalescedWork final : public Work {
 public:
  using Work::Work;
  bool isCompleted() override { return false; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
};

// ---- operands -----------------------------------------------------------------------------------

// Returns an alias of a tensor's elements in the order of memory.
inline Tensor flat_operand(const Tensor& tensor) {
  TORCH_CHECK(is_sim(tensor), "simccl takes tensors of device sim, got ", tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty({0}, options);
  char* start = kernel_view(extent_of(tensor).start);
  return at::from_blob(start, {tensor.numel()}, [](void*) {}, options);
}

inline Tensors flat_operands(const Tensors& tensors) {
  Tensors aliases;
  for (const Tensor& tensor : tensors) aliases.push_back(flat_operand(tensor));
  return aliases;
}

inline int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

inline std::vector<int64_t> bytes_of_each(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const Tensor& tensor : tensors) sizes.push_back(bytes_of(tensor));
  return sizes;
}

}  // namespace sim
