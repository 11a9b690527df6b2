/* Disk I/O through io_uring: raw system calls, plain C. A ring is the only state, and serves one
   thread at a time; whoever opened it closes it. */

#ifndef ZERO_IO_H
#define ZERO_IO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZERO_IO_API __attribute__((visibility("default")))

#define ZERO_IO_ABI 1 /* of what follows; Python compares */

typedef struct zero_ring zero_ring;

typedef struct {
  int32_t fd;
  int32_t writes;     /* 1: memory to file; 0: file to memory */
  void *memory;       /* of nbytes; borrowed until the call returns */
  int64_t nbytes;
  int64_t offset;     /* in the file; a multiple of `align` */
  int64_t block_bytes; /* of one request; a multiple of `align` */
  int64_t align;      /* what O_DIRECT asks of addresses, offsets and sizes; 1 without */
  void *bounce;       /* depth blocks, aligned: for memory that is not, and for odd ends */
  int32_t depth;      /* requests in flight, at most what the ring was opened with */
} zero_transfer;

ZERO_IO_API int zero_io_abi(void);

/* 0 and the ring, or -errno. */
ZERO_IO_API int zero_ring_open(int32_t depth, zero_ring **ring);
ZERO_IO_API void zero_ring_close(zero_ring *ring);

/* Move all of it; partial and interrupted requests are completed. An odd end is written padded with
   zeros to `align`, and read so. Returns the bytes moved, fewer where the file ends early, or -errno;
   in either case nothing of it is in flight any more. */
ZERO_IO_API int64_t zero_ring_move(zero_ring *ring, const zero_transfer *transfer);

/* CRC-32C (Castagnoli) going on from `crc` (0 at first). */
ZERO_IO_API int zero_has_crc32c(void);
ZERO_IO_API uint32_t zero_crc32c(uint32_t crc, const void *from, int64_t nbytes);

#ifdef __cplusplus
}
#endif
#endif
