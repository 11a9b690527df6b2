/* Which kernel runs: the caller says, this file knows which there are. */

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "zero_offload.h"

#define ZERO_DECLARE(suffix)                                                                      \
  void adam_##suffix(const zero_tensor *, int64_t, const zero_rule *, int64_t, int64_t);          \
  void adagrad_##suffix(const zero_tensor *, int64_t, const zero_rule *, int64_t, int64_t);       \
  void lion_##suffix(const zero_tensor *, int64_t, const zero_rule *, int64_t, int64_t);          \
  void take_##suffix(const void *, int32_t, float *, int32_t, int64_t, double *, int64_t *);

ZERO_DECLARE(scalar)
ZERO_DECLARE(vector)
#ifdef __x86_64__
ZERO_DECLARE(avx2)
ZERO_DECLARE(avx512)
#define ZERO_PICK_X86(name, ...)                         \
  case ZERO_AVX512: return name##_avx512(__VA_ARGS__);   \
  case ZERO_AVX2: return name##_avx2(__VA_ARGS__);
#else
#define ZERO_PICK_X86(name, ...)
#endif

#define ZERO_PICK(name, ...)                             \
  const Rounding rounding;                               \
  switch (isa) {                                         \
    ZERO_PICK_X86(name, __VA_ARGS__)                     \
    case ZERO_VECTOR: return name##_vector(__VA_ARGS__); \
    default: return name##_scalar(__VA_ARGS__);          \
  }

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

void zero_adam(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
               int64_t first, int64_t last) {
  ZERO_PICK(adam, tensors, count, rule, first, last)
}

void zero_adagrad(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
                  int64_t first, int64_t last) {
  ZERO_PICK(adagrad, tensors, count, rule, first, last)
}

void zero_lion(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
               int64_t first, int64_t last) {
  ZERO_PICK(lion, tensors, count, rule, first, last)
}

void zero_count(float *const *numbers, int64_t count) {
  for (int64_t k = 0; k < count; ++k) *numbers[k] += 1.0f;
}

void zero_take(int isa, const void *from, int32_t dtype, float *to, int32_t adds, int64_t numel,
               double *sum, int64_t *num_not_finite) {
  ZERO_PICK(take, from, dtype, to, adds, numel, sum, num_not_finite)
}

}  /* extern "C" */
