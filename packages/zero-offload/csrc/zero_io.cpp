/* Disk I/O. Linux; elsewhere every ring is refused with ENOSYS. */

#include "zero_offload.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define ZERO_HAS_URING 1
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#ifndef ZERO_IO_FAULT /* tests put another result in place of a request's */
#define ZERO_IO_FAULT(result, address, nbytes, writes) (result)
#endif

#ifdef ZERO_HAS_URING

namespace {

constexpr int kMostRetries = 2000; /* of a request that the kernel is too busy for, 1 ms apart */
constexpr int kMostStalls = 3;     /* of a request that moves less than one unit */

struct Request { /* one block under way */
  int64_t start, nbytes; /* within the transfer; without padding */
  int64_t padded, done;
  char *address; /* where the kernel reads or writes: the memory itself, or a bounce block */
  bool bounced;
  int retries, stalls;
};

int64_t align_up(int64_t nbytes, int64_t align) { return (nbytes + align - 1) / align * align; }

void pause_ms() {
  const timespec time = {0, 1000000};
  nanosleep(&time, nullptr);
}

}  // namespace

struct zero_ring { /* its requests, and the indices of those that are idle, lie behind it */
  int fd;
  int32_t depth;
  void *rings;
  size_t rings_bytes, sqes_bytes;
  io_uring_sqe *sqes;
  uint32_t *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
  io_uring_cqe *cqes;
  Request *requests;
  int32_t *idle;
};

int zero_ring_open(int32_t depth, zero_ring **out) {
  if (depth < 1 || !out) return -EINVAL;
  io_uring_params params;
  memset(&params, 0, sizeof params);
  const int fd = (int)syscall(__NR_io_uring_setup, (unsigned)depth, &params);
  if (fd < 0) return -errno;
  if (!(params.features & IORING_FEAT_SINGLE_MMAP)) { /* Linux 5.4 */
    close(fd);
    return -ENOSYS;
  }
  zero_ring *ring =
      (zero_ring *)calloc(1, sizeof(zero_ring) + depth * (sizeof(Request) + sizeof(int32_t)));
  if (!ring) {
    close(fd);
    return -ENOMEM;
  }
  const size_t sq = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  const size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const int protection = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_POPULATE;
  ring->fd = fd;
  ring->depth = depth;
  ring->requests = (Request *)(ring + 1);
  ring->idle = (int32_t *)(ring->requests + depth);
  ring->rings_bytes = sq > cq ? sq : cq;
  ring->sqes_bytes = params.sq_entries * sizeof(io_uring_sqe);
  ring->rings = mmap(nullptr, ring->rings_bytes, protection, kind, fd, IORING_OFF_SQ_RING);
  ring->sqes = (io_uring_sqe *)mmap(nullptr, ring->sqes_bytes, protection, kind, fd,
                                    IORING_OFF_SQES);
  if (ring->rings == MAP_FAILED || ring->sqes == MAP_FAILED) {
    zero_ring_close(ring);
    return -ENOMEM;
  }
  char *base = (char *)ring->rings;
  ring->sq_tail = (uint32_t *)(base + params.sq_off.tail);
  ring->sq_mask = (uint32_t *)(base + params.sq_off.ring_mask);
  ring->sq_array = (uint32_t *)(base + params.sq_off.array);
  ring->cq_head = (uint32_t *)(base + params.cq_off.head);
  ring->cq_tail = (uint32_t *)(base + params.cq_off.tail);
  ring->cq_mask = (uint32_t *)(base + params.cq_off.ring_mask);
  ring->cqes = (io_uring_cqe *)(base + params.cq_off.cqes);
  *out = ring;
  return 0;
}

void zero_ring_close(zero_ring *ring) {
  if (!ring) return;
  if (ring->rings != MAP_FAILED) munmap(ring->rings, ring->rings_bytes);
  if (ring->sqes != MAP_FAILED) munmap(ring->sqes, ring->sqes_bytes);
  close(ring->fd);
  free(ring);
}

namespace {

/* The next block: whole blocks of aligned memory in place, an odd end or any other memory bounced. */
void begin(Request *request, int32_t index, const zero_transfer *t, int64_t start) {
  int64_t nbytes = t->nbytes - start < t->block_bytes ? t->nbytes - start : t->block_bytes;
  char *address = (char *)t->memory + start;
  const bool aligned = (uintptr_t)address % (uint64_t)t->align == 0;
  if (aligned && nbytes >= t->align) nbytes -= nbytes % t->align;
  const bool bounced = !aligned || nbytes < t->align;
  const int64_t padded = align_up(nbytes, t->align);
  char *block = (char *)t->bounce + index * t->block_bytes;
  if (bounced && t->writes) {
    memcpy(block, address, nbytes);
    memset(block + nbytes, 0, padded - nbytes);
  }
  *request = {start, nbytes, padded, 0, bounced ? block : address, bounced, 0, 0};
}

void push(zero_ring *ring, int32_t index, const zero_transfer *t) {
  const Request &r = ring->requests[index];
  const uint32_t tail = *ring->sq_tail; /* ours alone to write */
  const uint32_t at = tail & *ring->sq_mask;
  io_uring_sqe *sqe = &ring->sqes[at];
  memset(sqe, 0, sizeof *sqe);
  sqe->opcode = t->writes ? IORING_OP_WRITE : IORING_OP_READ;
  sqe->fd = t->fd;
  sqe->addr = (uint64_t)(uintptr_t)(r.address + r.done);
  sqe->len = (uint32_t)(r.padded - r.done);
  sqe->off = (uint64_t)(t->offset + r.start + r.done);
  sqe->user_data = (uint64_t)index;
  ring->sq_array[at] = at;
  __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
}

/* What a request came to. 0: it goes on; 1: it is over; else -errno. */
int settle(Request *r, const zero_transfer *t, int32_t result, bool *ends) {
  if (result == -EINTR || result == -EAGAIN) {
    if (result == -EAGAIN) {
      if (++r->retries > kMostRetries) return result;
      pause_ms();
    }
    return 0;
  }
  if (result < 0) return result;
  if (result == 0) {
    if (t->writes) return -EIO;
    *ends = true; /* of the file */
    return 1;
  }
  const int64_t before = r->done, reached = before + result;
  r->done = reached;
  if (reached >= r->padded) return 1;
  if (reached >= r->nbytes && !t->writes) return 1; /* the file is not padded */
  r->done -= reached % t->align;                    /* O_DIRECT goes on from where it may */
  r->stalls = r->done > before ? 0 : r->stalls + 1;
  if (r->stalls < kMostStalls) return 0;
  if (t->writes) return -EIO;
  r->done = reached; /* a short read that does not grow: an end that is not a multiple of align */
  *ends = true;
  return 1;
}

}  // namespace

int64_t zero_ring_move(zero_ring *ring, const zero_transfer *t) {
  if (!ring || !t || t->depth < 1 || t->depth > ring->depth || t->align < 1 ||
      t->block_bytes < t->align || t->block_bytes % t->align || t->offset % t->align ||
      t->block_bytes > (1 << 30) || (t->align > 1 && !t->bounce))
    return -EINVAL;
  int32_t num_idle = 0, num_busy = 0;
  for (int32_t i = t->depth; i-- > 0;) ring->idle[num_idle++] = i;
  int64_t next = 0, moved = 0, error = 0;
  uint32_t num_pushed = 0; /* and not yet taken by the kernel */
  bool ends = false;
  while (num_busy || (next < t->nbytes && !error && !ends)) {
    while (num_idle && next < t->nbytes && !error && !ends) {
      const int32_t index = ring->idle[--num_idle];
      begin(&ring->requests[index], index, t, next);
      next += ring->requests[index].nbytes;
      push(ring, index, t);
      ++num_pushed;
      ++num_busy;
    }
    const long taken = syscall(__NR_io_uring_enter, ring->fd, num_pushed, 1,
                               IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0)
      num_pushed -= (uint32_t)taken;
    else if (errno == EAGAIN || errno == EBUSY)
      pause_ms(); /* the kernel is short of memory, or of room for completions */
    else if (errno != EINTR) { /* withdraw what was not taken, and wait out what was */
      if (!error) error = -errno;
      __atomic_store_n(ring->sq_tail, *ring->sq_tail - num_pushed, __ATOMIC_RELEASE);
      num_busy -= (int32_t)num_pushed;
      num_pushed = 0;
      pause_ms();
    }
    uint32_t head = *ring->cq_head; /* ours alone to write */
    const uint32_t tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    bool copied = false; /* then let the device have its next request before the next copy */
    while (head != tail && !copied) {
      const io_uring_cqe *cqe = &ring->cqes[head++ & *ring->cq_mask];
      const int32_t index = (int32_t)cqe->user_data;
      Request *r = &ring->requests[index];
      const int32_t result = ZERO_IO_FAULT(cqe->res, r->address + r->done, r->padded - r->done,
                                           t->writes);
      const int verdict = settle(r, t, result, &ends);
      if (verdict == 0 && !error) {
        push(ring, index, t);
        ++num_pushed;
        continue;
      }
      if (verdict < 0 && !error) error = verdict;
      const int64_t payload = r->done < r->nbytes ? r->done : r->nbytes;
      if (r->bounced && !t->writes && payload > 0)
        memcpy((char *)t->memory + r->start, r->address, payload);
      copied = r->bounced;
      moved += payload;
      ring->idle[num_idle++] = index;
      --num_busy;
    }
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
  }
  return error ? error : moved;
}

#else

int zero_ring_open(int32_t, zero_ring **) { return -ENOSYS; }
void zero_ring_close(zero_ring *) {}
int64_t zero_ring_move(zero_ring *, const zero_transfer *) { return -ENOSYS; }

#endif

#if defined(__x86_64__)
#include <nmmintrin.h>

int zero_has_crc32c(void) { return __builtin_cpu_supports("sse4.2") ? 1 : 0; }

__attribute__((target("sse4.2"))) uint32_t zero_crc32c(uint32_t crc, const void *from,
                                                       int64_t nbytes) {
  const unsigned char *at = (const unsigned char *)from;
  uint64_t sum = ~crc;
  for (; nbytes >= 8; nbytes -= 8, at += 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    sum = _mm_crc32_u64(sum, word);
  }
  for (; nbytes; --nbytes, ++at) sum = _mm_crc32_u8((uint32_t)sum, *at);
  return ~(uint32_t)sum;
}
#else
int zero_has_crc32c(void) { return 0; }
uint32_t zero_crc32c(uint32_t, const void *, int64_t) { return 0; }
#endif
