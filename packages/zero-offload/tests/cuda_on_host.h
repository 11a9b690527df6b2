/* What a CUDA kernel needs of its compiler and headers, for a processor: a block's threads are
   fibers of one thread, and blocks run one after the other. The last thread of a block begins, and
   each runs to its next barrier, so that a value that thread 0 shares without one is not there.
   Included before the source, whose launches are calls of `launch` (see test_fused_adam.py). */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#include "scalar.h"

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static /* of one block at a time */

struct Index {
  unsigned x;
};
static Index blockIdx, threadIdx;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done;
};

constexpr size_t kStackBytes = 1 << 16;
static std::vector<Fiber> fibers;
static ucontext_t launcher;
static std::function<void()> kernel_of_launch;

static void __syncthreads() { swapcontext(&fibers[threadIdx.x].context, &launcher); }

static void run_fiber() {
  kernel_of_launch();
  fibers[threadIdx.x].is_done = true;
}

static void begin(Fiber &fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  fiber.is_done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &launcher;
  makecontext(&fiber.context, run_fiber, 0);
}

template <class Kernel, class... Arguments>
static void launch(Kernel kernel, unsigned blocks, unsigned threads, Arguments... arguments) {
  kernel_of_launch = [&] { kernel(arguments...); };
  fibers.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (Fiber &fiber : fibers) begin(fiber);
    for (unsigned running = threads; running;)
      for (unsigned i = threads; i-- > 0;) {
        if (fibers[i].is_done) continue;
        threadIdx.x = i;
        swapcontext(&launcher, &fibers[i].context);
        running -= fibers[i].is_done;
      }
  }
}

typedef void *cudaStream_t;
typedef int cudaError_t;
static cudaError_t cudaGetLastError() { return 0; }
static const char *cudaGetErrorString(cudaError_t) { return "no error"; }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
static float __bfloat162float(__nv_bfloat16 x) { return from_bf16(x.bits); }
static float __half2float(__half x) { return from_f16(x.bits); }
static __nv_bfloat16 __float2bfloat16_rn(float x) { return {to_bf16(x)}; }
static __half __float2half_rn(float x) { return {to_f16(x)}; }
