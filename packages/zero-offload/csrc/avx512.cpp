/* Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq; called only where all are there. */

#include <immintrin.h>

#include "kernels.h"

namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int64_t width = 16;
  static inline F set(float x) { return _mm512_set1_ps(x); }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F root(F a) { return _mm512_sqrt_ps(a); }
  static inline F max(F a, F b) { /* the second where either is a nan */
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }
  static inline F sign(F a) {
    const F zero = _mm512_setzero_ps();
    const F above = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), set(1.0f));
    return _mm512_mask_mov_ps(above, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), set(-1.0f));
  }
  static inline F load(const float *from) { return _mm512_loadu_ps(from); }
  static inline F load_bf16(const uint16_t *from) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static inline F load_f16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
  }
  static inline void store(float *to, F a) { _mm512_storeu_ps(to, a); }
  static inline void store_upper(uint16_t *to, __m512i words) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
  }
  static inline void store_bf16(uint16_t *to, F a) {
    const __m512i bits = _mm512_castps_si512(a), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    store_upper(to, _mm512_mask_mov_epi32(_mm512_add_epi32(bits, up), is_nan, quiet));
  }
  static inline void store_f16(uint16_t *to, F a) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline void store_bf16_stochastic(uint16_t *to, F a, uint32_t index, uint32_t seed) {
    uint32_t random[width];
    for (uint32_t j = 0; j < width; ++j) random[j] = scramble(index + j, seed);
    const __m512i noise = _mm512_srli_epi32(_mm512_loadu_si512(random), 16);
    const __m512i bits = _mm512_castps_si512(a);
    const __mmask16 finite = _mm512_cmp_ps_mask(sub(a, a), _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __m512i quiet = _mm512_mask_or_epi32(bits, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), bits,
                                               _mm512_set1_epi32(0x400000));
    store_upper(to, _mm512_mask_add_epi32(quiet, finite, bits, noise));
  }
  static inline int add_squares(double *sums, int at, F a) {
    (void)at; /* a whole row of sums */
    const __mmask16 mask = _mm512_cmp_ps_mask(sub(a, a), _mm512_setzero_ps(), _CMP_EQ_OQ);
    const F kept = _mm512_maskz_mov_ps(mask, a);
    for (int j = 0; j < 2; ++j) {
      const __m512d row = _mm512_cvtps_pd(j ? _mm512_extractf32x8_ps(kept, 1)
                                            : _mm512_castps512_ps256(kept));
      double *to = sums + 8 * j;
      _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_mul_pd(row, row)));
    }
    return 16 - __builtin_popcount((unsigned)mask);
  }
};

}  // namespace

ZERO_KERNELS(Avx512, avx512)
