/* Compiled with -mavx2 -mf16c; called only where the processor has both. */

#include <immintrin.h>

#include "kernels.h"

namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int64_t width = 8;
  static inline F set(float x) { return _mm256_set1_ps(x); }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F root(F a) { return _mm256_sqrt_ps(a); }
  static inline F max(F a, F b) { /* the second where either is a nan */
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static inline F sign(F a) {
    const F zero = _mm256_setzero_ps(), one = set(1.0f);
    return sub(_mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), one),
               _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), one));
  }
  static inline F load(const float *from) { return _mm256_loadu_ps(from); }
  static inline F load_bf16(const uint16_t *from) {
    const __m128i half = _mm_loadu_si128((const __m128i *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static inline F load_f16(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
  }
  static inline void store(float *to, F a) { _mm256_storeu_ps(to, a); }
  static inline void store_upper(uint16_t *to, __m256i words) { /* the upper half of each */
    const __m256i upper = _mm256_srli_epi32(words, 16);
    const __m256i packed = _mm256_packus_epi32(upper, upper);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(ordered));
  }
  static inline void store_bf16(uint16_t *to, F a) {
    const __m256i bits = _mm256_castps_si256(a), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    store_upper(to, _mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, is_nan));
  }
  static inline void store_f16(uint16_t *to, F a) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline void store_bf16_stochastic(uint16_t *to, F a, uint32_t index, uint32_t seed) {
    uint32_t random[width];
    for (uint32_t j = 0; j < width; ++j) random[j] = scramble(index + j, seed);
    const __m256i noise = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)random), 16);
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i finite =
        _mm256_castps_si256(_mm256_cmp_ps(sub(a, a), _mm256_setzero_ps(), _CMP_EQ_OQ));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x400000));
    const __m256i added = _mm256_add_epi32(bits, _mm256_and_si256(finite, noise));
    store_upper(to, _mm256_or_si256(added, quiet));
  }
  static inline int add_squares(double *sums, int at, F a) {
    const F mask = _mm256_cmp_ps(sub(a, a), _mm256_setzero_ps(), _CMP_EQ_OQ);
    const F kept = _mm256_and_ps(a, mask);
    for (int j = 0; j < 2; ++j) {
      const __m256d part =
          _mm256_cvtps_pd(j ? _mm256_extractf128_ps(kept, 1) : _mm256_castps256_ps128(kept));
      double *to = sums + at + 4 * j;
      _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_mul_pd(part, part)));
    }
    return 8 - __builtin_popcount((unsigned)_mm256_movemask_ps(mask));
  }
};

}  // namespace

ZERO_KERNELS(Avx2, avx2)
