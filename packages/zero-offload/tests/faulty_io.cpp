/* zero_io.cpp over a kernel that misbehaves: every few requests come to another result. */

#include <errno.h>
#include <stdint.h>
#include <string.h>

static int32_t fault_of(int32_t result, char *address, int64_t nbytes, int32_t writes);
#define ZERO_IO_FAULT(result, address, nbytes, writes) fault_of(result, address, nbytes, writes)
#include "zero_io.cpp"

static int32_t fault_number, fault_every = 1, fault_count, fault_most = 1 << 30;

/* Every `every`th request ends with -number; each of the others moves at most `most` bytes. */
extern "C" ZERO_IO_API void zero_set_fault(int32_t number, int32_t every, int32_t most) {
  fault_number = number;
  fault_every = every;
  fault_most = most;
  fault_count = 0;
}

static int32_t fault_of(int32_t result, char *address, int64_t nbytes, int32_t writes) {
  const bool faulty = fault_number && ++fault_count % fault_every == 0;
  if (faulty) result = -fault_number;
  const int64_t moved = result < 0 ? 0 : result < fault_most ? result : fault_most;
  if (!writes) memset(address + moved, '?', nbytes - moved); /* what was not moved is not there */
  return result < 0 ? result : (int32_t)moved;
}
