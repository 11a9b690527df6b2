// Page-locked host memory: what copies reach while the host goes on.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <optional>
#include <utility>

#include "memory.h"
#include "streams.h"
#include "uses.h"

namespace sim {

struct PinnedBlock {
  size_t size = 0;          // bytes, as asked for
  bool is_allocated = true;  // by us, in the arena; otherwise registered by the program
  UseLog uses;              // by copies
  std::vector<Use> loans;   // copies from or to tensors that torch's allocator does not know
};

// All pinned memory of the process. Guarded by the engine's lock.
class PinnedMemory {
 public:
  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }

  void* allocate(size_t size) {
    if (size == 0) return nullptr;
    Engine::get().mark_used();
    if (!arena_) arena_.emplace("sim-pinned", kAddresses, PROT_READ | PROT_WRITE);
    char* start = arena_->take(round_up(size, kPage));
    TORCH_CHECK(start, "sim: no pinned memory of ", size, " bytes left");
    blocks_[start] = {size, true, {}, {}};
    return start;
  }

  void free(char* start) {
    auto& engine = Engine::get();
    size_t size = round_up(blocks_.at(start).size, kPage);
    engine.host_watch.forget(start, size);
    for (const Use& use : blocks_.at(start).loans)
      if (!engine.host().knows(use.point))
        engine.report_unordered(describe(use) +
                                ", whose pinned memory is given back: nothing orders the two");
    blocks_.erase(start);
    arena_->give_back(start, size);
  }

  void add(char* start, size_t size) { blocks_[start] = {size, false, {}, {}}; }
  void remove(char* start) { blocks_.erase(start); }
  bool contains(const void* address) { return find(address) != blocks_.end(); }

  // Whether torch's allocator knows that a copy from or to this tensor is under way, and gives the
  // memory to others later. Not if a program made the tensor of memory that it had from there.
  bool is_loan(const at::Tensor& tensor) {
    auto found = find(extent_of(tensor).start);
    return found != blocks_.end() && found->second.is_allocated &&
           tensor.storage().data_ptr().get_context() != found->first;
  }

  // Where kernels reach an address of the host.
  char* kernel_view(void* address) const {
    bool is_ours = arena_ && arena_->contains(address);
    return is_ours ? arena_->kernel_view(address) : static_cast<char*>(address);
  }

  // Notes that a copy uses a tensor's bytes, and watches what the host does with them meanwhile.
  void note_copy(const at::Tensor& tensor, bool writes, Point point, std::string_view copy) {
    if (tensor.numel() == 0) return;
    auto& engine = Engine::get();
    Extent extent = extent_of(tensor);
    auto found = find(extent.start);
    if (found == blocks_.end()) return;
    auto& [start, block] = *found;
    size_t begin = extent.start - start;
    Use use{begin, begin + extent.size, writes, point, copy};
    block.uses.add(use, engine.stream(point.stream).clock);
    if (is_loan(tensor)) {
      std::erase_if(block.loans, [&](const Use& use) { return engine.host().knows(use.point); });
      block.loans.push_back(use);
    }
    // A strided tensor's gaps are the host's.
    if (engine.options.orders && block.is_allocated && tensor.is_non_overlapping_and_dense())
      engine.host_watch.watch(*arena_, extent.start, extent.size, writes, point, describe(use));
  }

 private:
  using Blocks = std::map<char*, PinnedBlock>;  // by start

  Blocks::iterator find(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto next = blocks_.upper_bound(at);
    if (next == blocks_.begin()) return blocks_.end();
    auto found = std::prev(next);
    return at < found->first + found->second.size ? found : blocks_.end();
  }

  static constexpr size_t kAddresses = 64ull << 30;  // bytes that are reserved, not used
  std::optional<Arena> arena_;  // of allocated blocks; made at the first allocation, then constant
  Blocks blocks_;               // allocated or registered, and not freed
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Engine::get().check_not_forked();
    Lock lock;
    void* start = PinnedMemory::get().allocate(size);
    return {start, start, &free, Device(c10::DeviceType::CPU)};
  }
  static void free(void* start) {
    if (!start || Engine::get().is_forked()) return;
    Lock lock;
    PinnedMemory::get().free(static_cast<char*>(start));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};

inline PinnedAllocator pinned_allocator;

}  // namespace sim
