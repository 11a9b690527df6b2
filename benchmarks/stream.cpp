/* The limit of an optimizer's step: its memory traffic, and next to no arithmetic. */

#include <stdint.h>

#define API extern "C" __attribute__((visibility("default")))

/* fp32 throughout: 4 reads, 3 writes, 28 bytes an element. */
API void stream_f32(float *__restrict param, const float *__restrict grad, float *__restrict first,
                    float *__restrict second, int64_t start, int64_t stop) {
  for (int64_t i = start; i < stop; ++i) {
    const float g = grad[i];
    first[i] = first[i] + g;
    second[i] = second[i] + g;
    param[i] = param[i] + g;
  }
}

/* 16-bit gradient and parameter, fp32 master and moments: 4 reads, 4 writes, 28 bytes an element. */
API void stream_16(float *__restrict master, const uint16_t *__restrict grad,
                   float *__restrict first, float *__restrict second, uint16_t *__restrict param,
                   int64_t start, int64_t stop) {
  for (int64_t i = start; i < stop; ++i) {
    const uint16_t g = grad[i];
    const float x = (float)g;
    first[i] = first[i] + x;
    second[i] = second[i] + x;
    master[i] = master[i] + x;
    param[i] = g;
  }
}
