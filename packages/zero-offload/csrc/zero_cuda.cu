/* One pass over memory: each thread takes four elements, a block one piece. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "zero_offload.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;
constexpr int64_t kPiece = 1 << 16;

template <class T>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline void narrow(float x, float *to) { *to = x; }
__device__ inline void narrow(float x, __nv_bfloat16 *to) { *to = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half *to) { *to = __float2half_rn(x); }

template <class T>
__device__ inline void load(const void *from, int64_t i, int count, float *to) {
  const T *place = (const T *)from + i;
  if (count == kWidth) {
    const Pack<T> pack = *(const Pack<T> *)place;
    for (int j = 0; j < kWidth; ++j) to[j] = widen(pack.at[j]);
  } else {
    for (int j = 0; j < count; ++j) to[j] = widen(place[j]);
  }
}

template <class T>
__device__ inline void store(void *to, int64_t i, int count, const float *from) {
  T *place = (T *)to + i;
  if (count == kWidth) {
    Pack<T> pack;
    for (int j = 0; j < kWidth; ++j) narrow(from[j], &pack.at[j]);
    *(Pack<T> *)place = pack;
  } else {
    for (int j = 0; j < count; ++j) narrow(from[j], &place[j]);
  }
}

__device__ inline void read(const void *from, int64_t i, int count, int dtype, float *to) {
  switch (dtype) {
    case ZERO_F32: load<float>(from, i, count, to); break;
    case ZERO_BF16: load<__nv_bfloat16>(from, i, count, to); break;
    default: load<__half>(from, i, count, to);
  }
}

__device__ inline void write(void *to, int64_t i, int count, int dtype, const float *from) {
  switch (dtype) {
    case ZERO_F32: store<float>(to, i, count, from); break;
    case ZERO_BF16: store<__nv_bfloat16>(to, i, count, from); break;
    default: store<__half>(to, i, count, from);
  }
}

__device__ inline bool is_aligned(const void *p, int dtype) {
  const int width = dtype == ZERO_F32 ? 16 : 8;
  return p == nullptr || (uintptr_t)p % width == 0;
}

struct Factors { /* the same for all elements of a step */
  float factor, shrink, decay, rate, correction;
};

__device__ Factors factors_of(const zero_rule &r, double lr, float divisor, double step) {
  Factors f;
  f.factor = (r.maximize ? -1.0f : 1.0f) / divisor;
  f.shrink = r.decoupled ? (float)(1.0 - lr * (double)r.weight_decay) : 1.0f;
  f.decay = r.decoupled ? 0.0f : r.weight_decay;
  /* 1 - beta was rounded to float near 0, where floats are dense: beta is exact to 1e-10. */
  const double beta1 = 1.0 - (double)r.one_minus_beta1, beta2 = 1.0 - (double)r.one_minus_beta2;
  f.rate = (float)(-lr / (1.0 - pow(beta1, step)));
  f.correction = (float)sqrt(1.0 - pow(beta2, step));
  return f;
}

__global__ void __launch_bounds__(kThreads)
    adam(const zero_tensor *pieces, const zero_rule r, const float *lr, const float *divisor,
         const float *found_inf) {
  if (found_inf && *found_inf != 0.0f) return;
  const zero_tensor p = pieces[blockIdx.x];
  __shared__ Factors shared;
  if (threadIdx.x == 0) /* double powers: once a block */
    shared = factors_of(r, lr ? *lr : -r.rate, divisor ? *divisor : 1.0f, *p.step);
  __syncthreads();
  const Factors f = shared;
  const bool aligned = is_aligned(p.param, r.param_dtype) && is_aligned(p.grad, r.grad_dtype) &&
                       is_aligned(p.first, r.state_dtype) && is_aligned(p.second, r.state_dtype) &&
                       is_aligned(p.largest, r.state_dtype) && is_aligned(p.out, r.out_dtype);
  const int width = aligned ? kWidth : 1;
  for (int64_t i = (int64_t)threadIdx.x * width; i < p.numel; i += (int64_t)kThreads * width) {
    const int count = p.numel - i < width ? (int)(p.numel - i) : width;
    float param[kWidth], grad[kWidth], first[kWidth], second[kWidth], largest[kWidth];
    read(p.param, i, count, r.param_dtype, param);
    read(p.grad, i, count, r.grad_dtype, grad);
    read(p.first, i, count, r.state_dtype, first);
    read(p.second, i, count, r.state_dtype, second);
    if (p.largest) read(p.largest, i, count, r.state_dtype, largest);
    for (int j = 0; j < kWidth; ++j) {
      if (j >= count) break;
      const float g = grad[j] * f.factor + f.decay * param[j];
      const float m = first[j] + r.one_minus_beta1 * (g - first[j]);
      const float v = r.beta2 * second[j] + r.one_minus_beta2 * g * g;
      float spread = v;
      if (p.largest) largest[j] = spread = (largest[j] != largest[j] || largest[j] > v) ? largest[j] : v;
      first[j] = m;
      second[j] = v;
      param[j] = f.shrink * param[j] + f.rate * m / (sqrtf(spread) / f.correction + r.eps);
    }
    write(p.param, i, count, r.param_dtype, param);
    write(p.first, i, count, r.state_dtype, first);
    write(p.second, i, count, r.state_dtype, second);
    if (p.largest) write(p.largest, i, count, r.state_dtype, largest);
    if (p.out) write(p.out, i, count, r.out_dtype, param);
  }
}

__global__ void advance(float *const *steps, int64_t count, const float *found_inf) {
  const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count && (!found_inf || *found_inf == 0.0f)) *steps[i] += 1.0f;
}

}  // namespace

extern "C" {

int zero_cuda_abi(void) { return ZERO_ABI; }

int64_t zero_cuda_piece_numel(void) { return kPiece; }

int zero_cuda_advance(float *const *steps, int64_t count, const float *found_inf, void *stream) {
  if (count == 0) return 0;
  const unsigned blocks = (unsigned)((count + kThreads - 1) / kThreads);
  advance<<<blocks, kThreads, 0, (cudaStream_t)stream>>>(steps, count, found_inf);
  return (int)cudaGetLastError();
}

int zero_cuda_adam(const zero_tensor *pieces, int64_t count, const zero_rule *rule,
                   const float *lr, const float *divisor, const float *found_inf, void *stream) {
  if (count == 0) return 0;
  adam<<<(unsigned)count, kThreads, 0, (cudaStream_t)stream>>>(pieces, *rule, lr, divisor,
                                                               found_inf);
  return (int)cudaGetLastError();
}

const char *zero_cuda_error(int code) { return cudaGetErrorString((cudaError_t)code); }

}  /* extern "C" */
