// The allocator of the devices' memory: like CUDA's, it hands memory on within a stream at once.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory.h"
#include "streams.h"
#include "uses.h"

namespace sim {

// Memory that a tensor's storage owns.
struct Block {
  char* start;         // in the program's mapping
  size_t size;         // bytes, rounded by block_size()
  size_t requested;    // bytes that were asked for
  StreamIndex stream;  // the current one when it was allocated: it may use the memory next
  std::vector<StreamIndex> recorded;  // those of record_stream(), which the next use waits for
  UseLog uses;
};

// Memory that was freed while other streams than its own may use it.
struct FreedBlock {
  Block block;
  std::vector<Point> last_uses;  // on recorded streams; nobody may use the memory before them
};

// Memory that its stream may use at once.
struct CachedBlock {
  char* start;
  UseLog uses;  // of earlier owners: those of the next one must come after them
};

// CUDA's small blocks are multiples of 512 bytes; coarser large ones find each other more often.
inline size_t block_size(size_t requested) {
  constexpr size_t kSmall = 512, kLarge = 256 << 10, kLargeFrom = 1 << 20;
  size_t size = round_up(requested, kSmall);
  return size > kLargeFrom ? round_up(size, kLarge) : size;
}

inline size_t device_bytes() {
  const char* gib = getenv("SIM_GIB");
  return static_cast<size_t>((gib ? atof(gib) : 8.0) * (1ull << 30)) / kPage * kPage;
}

// The memory of one device. All functions but arena() are called under the engine's lock.
//
// Memory that only its own stream has used is handed on at once. That which other streams have used
// is handed on at the next allocation on its stream, of whatever size, because CUDA's allocator may
// split what it has: uses that the stream does not know to be over by then are reported.
class Heap {
 public:
  explicit Heap(DeviceIndex device) : device_(device), arena_("sim", device_bytes(), PROT_NONE) {
    arena_.hide_from_children();
  }

  const Arena& arena() const { return arena_; }

  char* allocate(Lock& lock, size_t requested, StreamIndex stream);
  void free(char* start);
  void empty_cache(Lock& lock);
  void record_stream(const void* address, StreamIndex stream);
  Block* block_of(const void* address);

  void set_limit(int64_t bytes) { limit_ = bytes; }
  const c10::CachingDeviceAllocator::DeviceStats& stats() const { return stats_; }
  void reset_peak_stats();
  void reset_accumulated_stats();
  std::pair<size_t, size_t> free_and_total() const;

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  void check_limit(size_t requested, size_t size);
  static CachedBlock take_last(std::vector<CachedBlock>& blocks);
  CachedBlock reserve(Lock& lock, size_t size);
  std::function<void()> poison(char* start, size_t size) const;
  void recycle(Block block);
  void recycle_freed(StreamIndex stream);
  void report_unordered_uses(const FreedBlock& freed);
  void count(const Block& block, bool is_allocated);

  // Statistics without division into small and large pools.
  static c10::CachingAllocator::Stat& total(c10::CachingAllocator::StatArray& stats) {
    return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }
  auto all_totals() {
    return std::array{&total(stats_.allocation),     &total(stats_.active),
                      &total(stats_.allocated_bytes), &total(stats_.active_bytes),
                      &total(stats_.requested_bytes), &total(stats_.reserved_bytes)};
  }

  DeviceIndex device_;
  Arena arena_;
  std::map<const char*, Block> blocks_;  // by start; owned by storages
  std::map<StreamIndex, std::vector<FreedBlock>> freed_;  // since the stream's last allocation
  // By stream and size; the last one of each is used first.
  std::map<std::pair<StreamIndex, size_t>, std::vector<CachedBlock>> cache_;
  Stats stats_;
  int64_t limit_ = 0;  // bytes that may be allocated; 0: as many as the arena has
};

inline char* Heap::allocate(Lock& lock, size_t requested, StreamIndex stream) {
  recycle_freed(stream);
  size_t size = block_size(requested);
  check_limit(requested, size);
  auto cached = cache_.find({stream, size});
  bool has_cached = cached != cache_.end() && !cached->second.empty();
  CachedBlock memory = has_cached ? take_last(cached->second) : reserve(lock, size);
  Block block{memory.start, size, requested, stream, {}, std::move(memory.uses)};
  count(block, true);
  blocks_.emplace(memory.start, std::move(block));
  return memory.start;
}

inline void Heap::check_limit(size_t requested, size_t size) {
  int64_t allocated = total(stats_.allocated_bytes).current;
  if (limit_ == 0 || allocated + static_cast<int64_t>(size) <= limit_) return;
  stats_.num_ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory: tried to allocate ", requested,
                   " bytes; ", allocated, " of ", limit_, " are allocated");
}

inline CachedBlock Heap::take_last(std::vector<CachedBlock>& blocks) {
  CachedBlock block = std::move(blocks.back());
  blocks.pop_back();
  return block;
}

// Takes memory that no stream uses.
inline CachedBlock Heap::reserve(Lock& lock, size_t size) {
  char* start = arena_.take(size);
  if (!start) {
    empty_cache(lock);
    stats_.num_alloc_retries++;
    start = arena_.take(size);
  }
  if (!start) stats_.num_ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, start, "sim: out of memory: no free range of ", size,
                   " bytes (SIM_GIB says how much there is)");
  stats_.num_device_alloc++;
  total(stats_.reserved_bytes).increase(size);
  poison(start, size)();
  return {start, {}};
}

// Returns what makes reads NaN that come before a write.
inline std::function<void()> Heap::poison(char* start, size_t size) const {
  if (!Engine::get().options.poison) return [] {};
  return [target = arena_.kernel_view(start), size] { memset(target, 0xff, size); };
}

inline void Heap::free(char* start) {
  auto found = blocks_.find(start);
  if (found == blocks_.end()) return;
  Block block = std::move(found->second);
  blocks_.erase(found);
  count(block, false);
  auto& engine = Engine::get();
  if (block.recorded.empty() && block.uses.is_only_on(block.stream))
    return recycle(std::move(block));
  FreedBlock freed{std::move(block), {}};
  for (StreamIndex stream : freed.block.recorded)
    freed.last_uses.push_back({stream, engine.stream(stream).launched});
  freed_[freed.block.stream].push_back(std::move(freed));
}

// Hands on memory that only its own stream has used. The poison is part of the last use: another
// stream that waits for that may use the memory next, whatever is launched meanwhile.
inline void Heap::recycle(Block block) {
  auto overwrite = poison(block.start, block.size);
  if (block.uses.is_empty()) overwrite();
  else Engine::get().run_after(block.uses.last(), std::move(overwrite));
  block.uses.pass_on();
  cache_[{block.stream, block.size}].push_back({block.start, std::move(block.uses)});
}

// Hands on what a stream has freed and other streams have used, except what recorded streams still
// use.
inline void Heap::recycle_freed(StreamIndex stream) {
  auto& engine = Engine::get();
  std::vector<FreedBlock> kept;
  for (FreedBlock& freed : std::exchange(freed_[stream], {})) {
    bool is_in_use = std::any_of(freed.last_uses.begin(), freed.last_uses.end(),
                                 [&](Point point) { return !engine.is_finished(point); });
    if (is_in_use) {
      kept.push_back(std::move(freed));
      continue;
    }
    Block& block = freed.block;
    report_unordered_uses(freed);
    Point last{stream, engine.stream(stream).launched};
    engine.run_after(last, poison(block.start, block.size));
    UseLog uses;
    uses.add({0, block.size, true, last, "the allocation"}, engine.stream(stream).clock);
    cache_[{stream, block.size}].push_back({block.start, std::move(uses)});
  }
  freed_[stream] = std::move(kept);
}

inline void Heap::report_unordered_uses(const FreedBlock& freed) {
  auto& engine = Engine::get();
  Clock known = engine.host();
  known.learn(engine.stream(freed.block.stream).clock);
  for (Point point : freed.last_uses) known.learn(point);
  if (const Use* use = freed.block.uses.find_unfinished(known))
    engine.report_unordered("memory of " + engine.name_of(freed.block.stream) +
                            " was freed while in use: " + describe(*use) +
                            "; neither a wait nor record_stream()");
}

// Returns cached memory to the arena, for any stream; like cudaFree, it waits for the device.
inline void Heap::empty_cache(Lock& lock) {
  auto& engine = Engine::get();
  engine.synchronize_device(lock, device_);
  for (auto& [stream, freed] : freed_) recycle_freed(stream);
  for (auto& [key, blocks] : cache_)
    for (const CachedBlock& block : blocks) {
      arena_.give_back(block.start, key.second);
      total(stats_.reserved_bytes).decrease(key.second);
      stats_.num_device_free++;
    }
  cache_.clear();
}

inline void Heap::record_stream(const void* address, StreamIndex stream) {
  Block* block = block_of(address);
  if (!block || stream == block->stream) return;
  auto& recorded = block->recorded;
  if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end())
    recorded.push_back(stream);
}

inline Block* Heap::block_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  auto next = blocks_.upper_bound(at);
  if (next == blocks_.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return at < block.start + block.size ? &block : nullptr;
}

inline void Heap::count(const Block& block, bool is_allocated) {
  auto change = [&](c10::CachingAllocator::StatArray& stats, size_t amount) {
    if (is_allocated) total(stats).increase(amount);
    else total(stats).decrease(amount);
  };
  change(stats_.allocation, 1);
  change(stats_.active, 1);
  change(stats_.allocated_bytes, block.size);
  change(stats_.active_bytes, block.size);
  change(stats_.requested_bytes, block.requested);
}

inline void Heap::reset_peak_stats() {
  for (auto* stat : all_totals()) stat->reset_peak();
}

inline void Heap::reset_accumulated_stats() {
  for (auto* stat : all_totals()) stat->reset_accumulated();
  stats_.num_alloc_retries = stats_.num_ooms = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

inline std::pair<size_t, size_t> Heap::free_and_total() const {
  size_t total_bytes = limit_ ? static_cast<size_t>(limit_) : device_bytes();
  auto allocated = stats_.allocated_bytes[0].current;
  return {total_bytes - static_cast<size_t>(allocated), total_bytes};
}

// ---- all devices --------------------------------------------------------------------------------

// Returns a device's memory. Those of all devices are made together, at the first use of one.
inline Heap& heap(DeviceIndex device) {
  static auto* heaps = [] {
    Engine::get().mark_used();
    auto* made = new std::vector<std::unique_ptr<Heap>>();
    for (DeviceIndex index = 0; index < Engine::get().num_devices(); index++)
      made->push_back(std::make_unique<Heap>(index));
    return made;
  }();
  return *heaps->at(device);
}

// Returns the device whose memory an address is in.
inline std::optional<DeviceIndex> device_of(const void* address) {
  for (DeviceIndex device = 0; device < Engine::get().num_devices(); device++)
    if (heap(device).arena().contains(address)) return device;
  return std::nullopt;
}

// Translates an address of a device into that of the same byte for kernels.
inline char* kernel_view(const void* address) {
  if (!address) return nullptr;
  auto device = device_of(address);
  TORCH_CHECK(device, "sim: not an address of the device: ", address);
  return heap(*device).arena().kernel_view(address);
}

// Notes that a task uses bytes of a device. Under the engine's lock, after the task's launch.
inline void note_use(DeviceIndex device, Extent extent, bool writes, Point point,
                     std::string_view task) {
  Block* block = heap(device).block_of(extent.start);
  if (!block) return;
  size_t begin = extent.start - block->start;
  block->uses.add({begin, begin + extent.size, writes, point, task},
                  Engine::get().stream(point.stream).clock);
}

inline void note_use(const at::Tensor& tensor, bool writes, Point point, std::string_view task) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  note_use(tensor.device().index(), extent_of(tensor), writes, point, task);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(kSim, current_device);
    if (size == 0) return {nullptr, nullptr, &free, device};
    Engine::get().check_not_forked();
    HostPause pause;
    Lock lock;
    char* start = heap(current_device).allocate(lock, size, current_stream(current_device));
    return {start, start, &free, device};
  }

  static void free(void* start) {
    if (!start || Engine::get().is_forked()) return;
    Lock lock;
    heap(*device_of(start)).free(static_cast<char*>(start));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  bool initialized() override { return true; }

  void copy_data(void* target, const void* source, size_t size) const override {
    Lock lock;
    char *to = kernel_view(target), *from = kernel_view(source);
    Task task{.name = "copy", .run = [=] { memcpy(to, from, size); }};
    if (Engine::get().is_timed())
      task.seconds = Engine::get().rates.kernel(2.0 * static_cast<double>(size), 0, at::kFloat);
    Point point = Engine::get().launch(lock, current_stream(current_device), std::move(task));
    auto extent = [&](const void* address) {
      return Extent{static_cast<char*>(const_cast<void*>(address)), size};
    };
    note_use(current_device, extent(source), false, point, "copy");
    note_use(current_device, extent(target), true, point, "copy");
  }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    for (DeviceIndex device = 0; device < Engine::get().num_devices(); device++)
      heap(device).empty_cache(lock);
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Lock lock;
    if (!memory.get()) return;
    heap(stream.device_index())
        .record_stream(memory.get(), Engine::get().index_of(stream.device_index(), stream.id()));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock;
    return heap(device).stats();
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Lock lock;
    heap(device).reset_accumulated_stats();
  }
  void resetPeakStats(DeviceIndex device) override {
    Lock lock;
    heap(device).reset_peak_stats();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock;
    return heap(device).free_and_total();
  }
};

inline DeviceAllocator device_allocator;

}  // namespace sim
