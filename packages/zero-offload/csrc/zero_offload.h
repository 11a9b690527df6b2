/* The whole native surface of zero-offload: plain C over pointers.

   Every kernel works on elements [first, last) of a list of tensors laid end to end, so that the
   caller divides the work among its threads. Results do not depend on how it does, nor on the
   instruction set: each operation is rounded on its own (nothing is contracted to fma), in the order
   that kernels.h shows, which is that of torch's optimizers. */

#ifndef ZERO_OFFLOAD_H
#define ZERO_OFFLOAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZERO_API __attribute__((visibility("default")))

#define ZERO_ABI 4 /* of the structs below; Python compares */

enum { ZERO_ADAM = 0, ZERO_ADAGRAD = 1, ZERO_LION = 2 };              /* formulas */
enum { ZERO_F32 = 0, ZERO_BF16 = 1, ZERO_F16 = 2, ZERO_NONE = 3 };     /* dtypes */
enum { ZERO_SCALAR = 0, ZERO_VECTOR = 1, ZERO_AVX2 = 2, ZERO_AVX512 = 3 }; /* instruction sets */

typedef struct {
  int64_t numel;
  void *param;      /* of param_dtype, updated in place: the master, where there is one */
  const void *grad; /* of grad_dtype */
  void *first;      /* Adam: exp_avg; Lion: exp_avg; Adagrad: sum of squares; of state_dtype */
  void *second;     /* Adam: exp_avg_sq, of state_dtype; else unused */
  void *largest;    /* Adam with amsgrad: max_exp_avg_sq, of state_dtype; else null */
  void *out;        /* the new parameter once more, of out_dtype; null without */
  int64_t index;    /* of the first element, for stochastic rounding */
  const float *step; /* on CUDA: the number of this step, from 1 */
} zero_tensor;

typedef struct {
  int32_t formula, param_dtype, grad_dtype, state_dtype, out_dtype;
  int32_t maximize, decoupled, stochastic; /* flags; stochastic: rounding of bf16 param and out */
  float factor;       /* what gradients are multiplied by first: unscaling and clipping */
  float weight_decay; /* added to the gradient times the parameter, unless decoupled */
  float shrink;       /* what the parameter is multiplied by, if decoupled: 1 - lr * weight_decay */
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float unbias;       /* Adam: 1 / sqrt(1 - beta2^t), what the root is multiplied by */
  float eps;
  float rate;         /* minus the step size: Adam -lr / (1 - beta1^t), Adagrad, Lion -lr */
  uint32_t seed;      /* of stochastic rounding */
} zero_rule;

ZERO_API int zero_abi(void);

/* Whether this processor has an instruction set, and the library a kernel for it. VECTOR is what
   the compiler makes of vectors of four floats: SSE2, NEON. */
ZERO_API int zero_has(int isa);

ZERO_API void zero_step(int isa, const zero_tensor *tensors, int64_t count, const zero_rule *rule,
                        int64_t first, int64_t last);

/* Add 1 to each of many numbers: step counts, of which every parameter has its own. */
ZERO_API void zero_count(float *const *numbers, int64_t count);

/* `sum` becomes the sum of squares, in double, of which inf and nan are left out and counted. */
ZERO_API void zero_sum_squares(int isa, const void *from, int32_t dtype, int64_t numel, double *sum,
                               int64_t *num_not_finite);

/* ---- Disk I/O through io_uring, by raw system calls. A ring is the only state, and serves one
   thread at a time; whoever opened it closes it. ---- */

typedef struct zero_ring zero_ring;

typedef struct {
  int32_t fd;
  int32_t writes;     /* 1: memory to file; 0: file to memory */
  void *memory;       /* of nbytes; borrowed until the call returns */
  int64_t nbytes;
  int64_t offset;     /* in the file; a multiple of `align` */
  int64_t block_bytes; /* of one request; a multiple of `align` */
  int64_t align;      /* what O_DIRECT asks of addresses, offsets and sizes; 1 without */
  void *bounce;       /* depth blocks, aligned: for memory that is not, and for odd ends */
  int32_t depth;      /* requests in flight, at most what the ring was opened with */
} zero_transfer;

/* 0 and the ring, or -errno. */
ZERO_API int zero_ring_open(int32_t depth, zero_ring **ring);
ZERO_API void zero_ring_close(zero_ring *ring);

/* Move all of it; partial and interrupted requests are completed. An odd end is written padded with
   zeros to `align`, and read so. Returns the bytes moved, fewer where the file ends early, or -errno;
   in either case nothing of it is in flight any more. */
ZERO_API int64_t zero_ring_move(zero_ring *ring, const zero_transfer *transfer);

/* CRC-32C (Castagnoli) going on from `crc` (0 at first). */
ZERO_API int zero_has_crc32c(void);
ZERO_API uint32_t zero_crc32c(uint32_t crc, const void *from, int64_t nbytes);

/* ---- The optional second library: Adam over a list of tensors, or pieces of them, on one CUDA
   device, in one launch. ---- */

ZERO_API int zero_cuda_abi(void);

/* Elements of a piece at most. */
ZERO_API int64_t zero_cuda_piece_numel(void);

/* Add 1 to each step, unless found_inf; before zero_cuda_adam, on the same stream. `steps` is a
   table in device memory. Returns a cudaError_t. */
ZERO_API int zero_cuda_advance(float *const *steps, int64_t count, const float *found_inf,
                               void *stream);

/* One block for each of `pieces`, a table in device memory. The rule's rate is -lr; its factor, shrink
   and unbias count for nothing: what changes from step to step is read on the device, so that a
   captured graph goes on being right. Pointers to one float32 each, null for none: lr, in place of
   the rule's; what gradients are divided by first; nothing is changed unless found_inf is 0. */
ZERO_API int zero_cuda_adam(const zero_tensor *pieces, int64_t count, const zero_rule *rule,
                            const float *lr, const float *divisor, const float *found_inf,
                            void *stream);

ZERO_API const char *zero_cuda_error(int code);

#ifdef __cplusplus
}
#endif
#endif
