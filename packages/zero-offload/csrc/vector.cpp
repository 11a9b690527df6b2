/* Four floats in the compiler's own vectors: SSE2, NEON, or what the machine has. */

#include "kernels.h"

namespace {

struct Vector {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16))); /* also what a comparison gives */
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));
  static constexpr int64_t width = 4;
  static inline F set(float x) { return F{x, x, x, x}; }
  static inline F add(F a, F b) { return a + b; }
  static inline F sub(F a, F b) { return a - b; }
  static inline F mul(F a, F b) { return a * b; }
  static inline F div(F a, F b) { return a / b; }
  static inline F root(F a) {
    for (int j = 0; j < width; ++j) a[j] = __builtin_sqrtf(a[j]);
    return a;
  }
  static inline F pick(I which, F a, F b) { return (F)((which & (I)a) | (~which & (I)b)); }
  static inline F max(F a, F b) { return pick((I)(a != a) | (I)(a > b), a, b); }
  static inline F sign(F a) {
    const F zero = set(0.0f), one = set(1.0f);
    return pick((I)(a > zero), one, zero) - pick((I)(a < zero), one, zero);
  }
  static inline F load(const float *from) {
    F a;
    memcpy(&a, from, sizeof a);
    return a;
  }
  static inline F load_bf16(const uint16_t *from) {
    H half;
    memcpy(&half, from, sizeof half);
    return (F)(__builtin_convertvector(half, U) << 16);
  }
  static inline F load_f16(const uint16_t *from) {
    return F{from_f16(from[0]), from_f16(from[1]), from_f16(from[2]), from_f16(from[3])};
  }
  static inline void store(float *to, F a) { memcpy(to, &a, sizeof a); }
  static inline void store_bf16(uint16_t *to, F a) {
    const U bits = (U)a, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const F kept = pick((I)(a != a), (F)(bits | 0x400000u), (F)rounded);
    const H half = __builtin_convertvector((U)kept >> 16, H);
    memcpy(to, &half, sizeof half);
  }
  static inline void store_f16(uint16_t *to, F a) {
    for (int j = 0; j < width; ++j) to[j] = to_f16(a[j]);
  }
  static inline void store_bf16_stochastic(uint16_t *to, F a, uint32_t index, uint32_t seed) {
    for (int j = 0; j < width; ++j)
      to[j] = to_bf16_stochastic(a[j], index + (uint32_t)j, seed);
  }
  static inline int add_squares(double *sums, int at, F a) {
    int bad = 0;
    for (int j = 0; j < width; ++j) bad += Scalar::add_squares(sums, at + j, a[j]);
    return bad;
  }
};

}  // namespace

ZERO_KERNELS(Vector, vector)
