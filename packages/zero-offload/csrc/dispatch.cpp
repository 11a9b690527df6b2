/* Which kernel runs: the caller says, this file knows which there are. */

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels.h"

namespace {

/* To nearest, with subnormal numbers, for as long as it lives: threads differ in their settings
   (torch.set_flush_denormal holds for the thread that calls it), results must not. */
struct Rounding {
#ifdef __x86_64__
  const unsigned before = _mm_getcsr();
  Rounding() { _mm_setcsr(0x1f80); }
  ~Rounding() { _mm_setcsr(before); }
#else
  Rounding() {}
#endif
};

const zero_kernels &kernels_of(int isa) {
  switch (isa) {
#ifdef __x86_64__
    case ZERO_AVX512: return kernels_avx512;
    case ZERO_AVX2: return kernels_avx2;
#endif
    case ZERO_VECTOR: return kernels_vector;
    default: return kernels_scalar;
  }
}

}  // namespace

extern "C" {

int zero_abi(void) { return ZERO_ABI; }

int zero_has(int isa) {
  if (isa == ZERO_SCALAR || isa == ZERO_VECTOR) return 1;
#ifdef __x86_64__
  __builtin_cpu_init();
  if (isa == ZERO_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == ZERO_AVX512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return 0;
}

void zero_step(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
               int64_t first, int64_t last) {
  const Rounding rounding;
  kernels_of(isa).step(tensors, count, rule, first, last);
}

void zero_count(float *const *numbers, int64_t count) {
  for (int64_t k = 0; k < count; ++k) *numbers[k] += 1.0f;
}

void zero_sum_squares(int isa, const void *from, int32_t dtype, int64_t numel, double *sum,
                      int64_t *num_not_finite) {
  const Rounding rounding;
  kernels_of(isa).sum_squares(from, dtype, numel, sum, num_not_finite);
}

}  /* extern "C" */
