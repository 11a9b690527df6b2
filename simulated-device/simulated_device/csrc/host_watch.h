// Sees the host touch pinned memory while a queued copy still needs it.
//
// Device memory is only used by tasks, which are ordered by clocks. Pinned memory is also used by
// the host's own instructions, which nothing announces. So its pages lose their rights from the
// launch of a copy until the host knows that the copy is over: a touch raises SIGSEGV, whose
// handler notes the address, gives the page its rights back, and lets the host go on.
//
// Only whole pages inside a copy's range are watched, so neighbours on a page cause no false finds.
#pragma once

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "clocks.h"
#include "memory.h"

namespace sim {

class HostWatch {
 public:
  // Watches `size` bytes from `start` on, in the program's mapping of `arena`, until the host knows
  // that the copy at `point` is over. A copy that only reads them lets the host read them, too.
  void watch(const Arena& arena, char* start, size_t size, bool is_written, Point point,
             std::string copy) {
    char* first = page_start(start + kPage - 1);
    char* last = page_start(start + size);
    if (first >= last) return;
    install_handler(arena);
    resolve_touches();
    watches_.push_back({first, last, is_written ? PROT_NONE : PROT_READ, point, std::move(copy)});
    set_rights(first, last);
  }

  // Ends the watches over copies that the host knows to be over.
  void forget(const Clock& host) {
    forget_if([&](const Watch& watch) { return host.knows(watch.point); });
  }

  // Ends the watches over memory that is freed.
  void forget(const char* start, size_t size) {
    forget_if([&](const Watch& watch) {
      return watch.first < start + size && start < watch.last;
    });
  }

  // Returns one line for each touch since the last call.
  std::vector<std::string> take_found() {
    resolve_touches();
    return std::exchange(found_, {});
  }

 private:
  struct Watch {
    char *first, *last;  // whole pages: [first, last)
    int rights;          // those left to the host
    Point point;         // the copy
    std::string copy;    // the same, in words
    bool is_reported = false;  // one line is enough for all pages
  };

  // Touches that the handler saw and resolve_touches() has not. The handler runs on any thread,
  // without the engine's lock, and may only write here.
  static constexpr size_t kMostTouches = 1024;  // further ones are lost
  inline static std::array<std::atomic<char*>, kMostTouches> touches_{};
  inline static std::atomic<size_t> num_touches_{0};
  inline static std::atomic<const Arena*> arena_{nullptr};  // of pinned memory; set once
  inline static struct sigaction previous_ {};              // the handler of all other faults

  static char* page_start(char* address) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / kPage * kPage);
  }

  static void install_handler(const Arena& arena) {
    if (arena_.exchange(&arena) != nullptr) return;
    struct sigaction action {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_);
  }

  static void on_fault(int signal, siginfo_t* info, void* context) {
    auto* address = static_cast<char*>(info->si_addr);
    bool is_fault = info->si_code == SEGV_ACCERR;
    if (!is_fault || !arena_.load()->contains(address)) return pass_on(signal, info, context);
    int saved = errno;
    mprotect(page_start(address), kPage, PROT_READ | PROT_WRITE);
    size_t index = num_touches_.fetch_add(1);
    if (index < kMostTouches) touches_[index].store(address);
    errno = saved;
  }

  static void pass_on(int signal, siginfo_t* info, void* context) {
    if (previous_.sa_flags & SA_SIGINFO) return previous_.sa_sigaction(signal, info, context);
    if (previous_.sa_handler != SIG_DFL && previous_.sa_handler != SIG_IGN)
      return previous_.sa_handler(signal);
    // The instruction faults again, and ends the process.
    sigaction(SIGSEGV, &previous_, nullptr);
    if (info->si_code <= 0) raise(signal);  // sent by a program: nothing would fault again
  }

  void resolve_touches() {
    size_t count = std::min(num_touches_.exchange(0), kMostTouches);
    for (size_t i = 0; i < count; i++) {
      // Null: another thread is in the handler, between counting and storing.
      char* address = touches_[i].exchange(nullptr);
      for (Watch& watch : watches_)
        if (watch.first <= address && address < watch.last) report(watch, address);
    }
  }

  void report(Watch& watch, const char* address) {
    if (std::exchange(watch.is_reported, true)) return;
    std::ostringstream text;
    text << "the host " << (watch.rights == PROT_NONE ? "uses" : "writes") << " pinned memory at "
         << static_cast<const void*>(address) << ", which " << watch.copy
         << (watch.rights == PROT_NONE ? " writes" : " reads") << ": nothing orders the two";
    found_.push_back(text.str());
  }

  template <typename Condition>
  void forget_if(Condition is_over) {
    if (watches_.empty()) return;
    resolve_touches();
    auto first_over = std::stable_partition(watches_.begin(), watches_.end(),
                                            [&](const Watch& watch) { return !is_over(watch); });
    std::vector<Watch> over(std::make_move_iterator(first_over),
                            std::make_move_iterator(watches_.end()));
    watches_.erase(first_over, watches_.end());
    for (const Watch& watch : over) set_rights(watch.first, watch.last);
  }

  // Gives pages the fewest rights that a watch over them leaves.
  void set_rights(char* first, char* last) const {
    mprotect(first, last - first, PROT_READ | PROT_WRITE);
    for (int rights : {PROT_READ, PROT_NONE})
      for (const Watch& watch : watches_) {
        char *from = std::max(first, watch.first), *to = std::min(last, watch.last);
        if (watch.rights == rights && from < to) mprotect(from, to - from, rights);
      }
  }

  std::vector<Watch> watches_;      // of copies that the host does not know to be over
  std::vector<std::string> found_;  // lines not taken yet
};

}  // namespace sim
