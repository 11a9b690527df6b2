/* zero_io.cpp over a kernel that misbehaves: every few requests come to another result. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define nanosleep(time, left) (void)(time) /* it is no less busy later */

static int32_t fault_of(int32_t result, char *address, int64_t nbytes, int32_t writes);
#define ZERO_IO_FAULT(result, address, nbytes, writes) fault_of(result, address, nbytes, writes)
#include "zero_io.cpp"

static int32_t fault_number, fault_every = 1, fault_count, fault_most = 1 << 30;

/* Every `every`th request ends with -number, and each of the others moves at most `most` bytes; with
   number 0, every `every`th moves at most `most`. */
extern "C" ZERO_API void zero_set_fault(int32_t number, int32_t every, int32_t most) {
  fault_number = number;
  fault_every = every;
  fault_most = most;
  fault_count = 0;
}

/* Requests that came to a result since then. */
extern "C" ZERO_API int32_t zero_num_results(void) { return fault_count; }

static int32_t fault_of(int32_t result, char *address, int64_t nbytes, int32_t writes) {
  const bool faulty = ++fault_count % fault_every == 0;
  if (faulty && fault_number) result = -fault_number;
  const int64_t most = faulty || fault_number ? fault_most : nbytes;
  const int64_t moved = result < 0 ? 0 : result < most ? result : most;
  if (!writes) memset(address + moved, '?', nbytes - moved); /* what was not moved is not there */
  return result < 0 ? result : (int32_t)moved;
}
