/* One float at a time: the specification, and the ends of vectors. */

#ifndef ZERO_SCALAR_H
#define ZERO_SCALAR_H

#include <stdint.h>
#include <string.h>

namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t to_bf16(float value) { /* to nearest, ties to even; a nan stays one */
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

inline float from_f16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) /* inf, nan: quiet, as the processor's own conversion makes it */
    return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | (rest > 0x7c00u ? 0x400000u : 0));
  if (rest >= 0x400u) return float_of(sign | ((rest << 13) + 0x38000000u));
  const float value = (float)rest * 5.9604644775390625e-8f; /* times 2^-24: exact */
  return sign ? -value : value;
}

inline uint16_t to_f16(float value) { /* to nearest, ties to even */
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
  uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above */
  if (rest < 0x38800000u) { /* below 2^-14: adding 0.5 rounds to a multiple of 2^-24 */
    const float shifted = float_of(rest) + 0.5f;
    return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000u));
  }
  rest += 0xfffu + ((rest >> 13) & 1u);
  return (uint16_t)(sign | ((rest - 0x38000000u) >> 13));
}

/* Random bits of an element: a finalizer of MurmurHash3's kind. */
constexpr uint32_t kSpread = 0x9e3779b9u, kMix = 0x85ebca6bu, kMixAgain = 0xc2b2ae35u;

inline uint32_t scramble(uint32_t index, uint32_t seed) {
  uint32_t x = index * kSpread + seed;
  x = (x ^ (x >> 16)) * kMix;
  x = (x ^ (x >> 13)) * kMixAgain;
  return x ^ (x >> 16);
}

/* Up with a probability of what is cut off, over the distance of the neighbours. */
inline uint16_t to_bf16_stochastic(float value, uint32_t index, uint32_t seed) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return to_bf16(value);
  return (uint16_t)((bits + (scramble(index, seed) >> 16)) >> 16);
}

inline bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

struct Scalar {
  using F = float;
  static constexpr int64_t width = 1;
  static inline F set(float x) { return x; }
  static inline F add(F a, F b) { return a + b; }
  static inline F sub(F a, F b) { return a - b; }
  static inline F mul(F a, F b) { return a * b; }
  static inline F div(F a, F b) { return a / b; }
  static inline F root(F a) { return __builtin_sqrtf(a); }
  static inline F max(F a, F b) { return (a != a || a > b) ? a : b; } /* a nan wins, as in torch */
  static inline F sign(F a) { return (float)((a > 0) - (a < 0)); }
  static inline F load(const float *from) { return *from; }
  static inline F load_bf16(const uint16_t *from) { return from_bf16(*from); }
  static inline F load_f16(const uint16_t *from) { return from_f16(*from); }
  static inline void store(float *to, F a) { *to = a; }
  static inline void store_bf16(uint16_t *to, F a) { *to = to_bf16(a); }
  static inline void store_f16(uint16_t *to, F a) { *to = to_f16(a); }
  static inline void store_bf16_stochastic(uint16_t *to, F a, uint32_t index, uint32_t seed) {
    *to = to_bf16_stochastic(a, index, seed);
  }
  static inline int add_squares(double *sums, int at, F a) {
    if (!is_finite(a)) return 1;
    sums[at] += (double)a * (double)a;
    return 0;
  }
};

}  // namespace

#endif
