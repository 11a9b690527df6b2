/* The limit that a disk sets: pread and pwrite of aligned memory by threads, and nothing else. */

#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

namespace {

struct Work {
  int fd, writes;
  char *memory;
  int64_t nbytes, block_bytes;
  int64_t next; /* shared by the threads */
  int failed;
};

void *serve(void *argument) {
  Work *work = (Work *)argument;
  for (;;) {
    const int64_t start = __atomic_fetch_add(&work->next, work->block_bytes, __ATOMIC_RELAXED);
    if (start >= work->nbytes) return nullptr;
    const int64_t left = work->nbytes - start;
    const int64_t size = left < work->block_bytes ? left : work->block_bytes;
    const int64_t moved = work->writes ? pwrite(work->fd, work->memory + start, size, start)
                                       : pread(work->fd, work->memory + start, size, start);
    if (moved != size) work->failed = 1;
  }
}

}  // namespace

extern "C" int disk_move(int fd, int writes, void *memory, int64_t nbytes, int64_t block_bytes,
                         int num_threads) {
  Work work = {fd, writes, (char *)memory, nbytes, block_bytes, 0, 0};
  pthread_t threads[64];
  for (int i = 0; i < num_threads; ++i) pthread_create(&threads[i], nullptr, serve, &work);
  for (int i = 0; i < num_threads; ++i) pthread_join(threads[i], nullptr);
  return work.failed;
}
