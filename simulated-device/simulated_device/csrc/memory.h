// Memory that is mapped twice: where programs hold its addresses, and where kernels reach it.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <map>

namespace sim {

constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// A range of addresses, backed by one memfd. Tensors hold addresses of the program's mapping, whose
// rights the owner chooses: none for a device's memory, so that a host which touches it dies.
// Not thread-safe: the engine's lock, or the owner's, guards it.
class Arena {
 public:
  // Reserves addresses only; pages cost memory when they are first written.
  Arena(const char* name, size_t size, int program_rights) : size_(size), free_{{0, size}} {
    int file = memfd_create(name, MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "sim: no memfd");
    program_ = map(file, program_rights);
    kernel_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  bool contains(const void* address) const {
    return address >= program_ && address < program_ + size_;
  }

  // Translates an address of the program's mapping into that of the same byte for kernels.
  char* kernel_view(const void* address) const {
    return kernel_ + (static_cast<const char*>(address) - program_);
  }

  // Reserves the lowest free range of `size` bytes; nullptr where there is none.
  char* take(size_t size) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      auto [offset, length] = *range;
      if (length < size) continue;
      free_.erase(range);
      if (length > size) free_[offset + size] = length - size;
      return program_ + offset;
    }
    return nullptr;
  }

  void give_back(char* start, size_t size) {
    size_t offset = start - program_;
    // Whole pages return to the system, and read as zeros when they are taken again.
    size_t first = round_up(offset, kPage), last = (offset + size) / kPage * kPage;
    if (first < last) madvise(kernel_ + first, last - first, MADV_REMOVE);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += size;
        return;
      }
    }
    free_[offset] = size;
  }

  // A forked child gets no mapping: what it frees must not change its parent's memory.
  void hide_from_children() {
    madvise(program_, size_, MADV_DONTFORK);
    madvise(kernel_, size_, MADV_DONTFORK);
  }

 private:
  char* map(int file, int rights) const {
    void* start = mmap(nullptr, size_, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "sim: no address space for ", size_, " bytes");
    return static_cast<char*>(start);
  }

  size_t size_;                    // bytes of each mapping
  char* program_;                  // addresses that tensors hold
  char* kernel_;                   // the same bytes, readable and writable
  std::map<size_t, size_t> free_;  // offset -> bytes of free ranges; disjoint, none touch
};

}  // namespace sim
