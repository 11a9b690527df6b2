// Blockwise codecs in one pass over memory. The loops are plain; the compiler makes vectors of them,
// once for each instruction set, and the loader picks one. Compiled without contraction of a product
// and a sum, so that every set gives the same bits.

#include "zero_comm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#ifndef EACH_ISA
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define EACH_ISA __attribute__((target_clones("avx2", "default")))
#else
#define EACH_ISA
#endif
#endif
#define EXPORTED __attribute__((visibility("default")))
#define INLINE __attribute__((always_inline)) static inline
#define RESTRICT __restrict__

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of integers are read as little-endian words"
#endif

namespace {

constexpr int64_t TILE = 512;              // integers of 4 bits pass through bytes, in cache
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2**23: added, the low bits are the integer
constexpr float LEAST_SCALE = std::numeric_limits<float>::min();
constexpr uint32_t INFINITE = 0x7f800000;
constexpr double LARGEST = std::numeric_limits<float>::max() * (1 - 1.0 / (1 << 23));

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The largest size, as bits: these order as sizes do, with inf and then nan above all.
INLINE uint32_t largest(const float *values, int64_t numel) {
    uint32_t most = 0;
    for (int64_t i = 0; i < numel; ++i) most = std::max(most, bits_of(values[i]) & 0x7fffffffu);
    return most;
}

INLINE void to_bytes(const float *RESTRICT values, int64_t numel, float inverse,
                     uint8_t *RESTRICT bytes) {
    for (int64_t i = 0; i < numel; ++i)
        bytes[i] = static_cast<uint8_t>(bits_of(values[i] * inverse + TO_INTEGER));
}

INLINE void to_halves(const float *values, int64_t numel, float inverse, uint8_t *RESTRICT halves) {
    uint8_t bytes[TILE];
    for (int64_t start = 0; start < numel; start += TILE) {
        const int64_t count = std::min(TILE, numel - start);
        to_bytes(values + start, count, inverse, bytes);
        if (count % 2) bytes[count] = 0;
        uint8_t *RESTRICT out = halves + start / 2;
        for (int64_t i = 0; i < (count + 1) / 2; ++i) {
            uint16_t pair;
            std::memcpy(&pair, bytes + 2 * i, sizeof pair);
            out[i] = static_cast<uint8_t>((pair & 15) | (pair >> 4 & 0xf0));
        }
    }
}

template <bool adds>
INLINE void from_bytes(const int8_t *RESTRICT bytes, int64_t numel, float scale,
                       float *RESTRICT out) {
    for (int64_t i = 0; i < numel; ++i) {
        const float value = static_cast<float>(bytes[i]) * scale;
        out[i] = adds ? out[i] + value : value;
    }
}

template <bool adds>
INLINE void from_halves(const uint8_t *RESTRICT halves, int64_t numel, float scale, float *out) {
    int8_t bytes[TILE];
    for (int64_t start = 0; start < numel; start += TILE) {
        const int64_t count = std::min(TILE, numel - start);
        const uint8_t *RESTRICT in = halves + start / 2;
        for (int64_t i = 0; i < (count + 1) / 2; ++i) {
            const uint16_t both = in[i];
            const uint16_t pair = static_cast<uint16_t>((both & 15) | (both & 0xf0) << 4);
            std::memcpy(bytes + 2 * i, &pair, sizeof pair);
        }
        for (int64_t i = 0; i < count; ++i)  // carry the sign up
            bytes[i] = static_cast<int8_t>((bytes[i] ^ 8) - 8);
        from_bytes<adds>(bytes, count, scale, out + start);
    }
}

template <bool adds>
INLINE void decode(const uint8_t *integers, const float *scales, int64_t numel, int bits,
                   int64_t block, float *out) {
    for (int64_t start = 0; start < numel; start += block) {
        const int64_t count = std::min(block, numel - start);
        const float scale = *scales++;
        if (bits == 8)
            from_bytes<adds>(reinterpret_cast<const int8_t *>(integers) + start, count, scale,
                             out + start);
        else
            from_halves<adds>(integers + start / 2, count, scale, out + start);
    }
}

}  // namespace

extern "C" {

EXPORTED int zero_comm_abi(void) { return ZERO_COMM_ABI; }

EXPORTED EACH_ISA void zero_comm_encode(const float *values, int64_t numel, int bits, int64_t block,
                                        uint8_t *integers, float *scales) {
    const float limit = bits == 8 ? 127.0f : 7.0f;
    const float most_scale = static_cast<float>(LARGEST / limit);
    for (int64_t start = 0; start < numel; start += block) {
        const int64_t count = std::min(block, numel - start);
        const uint32_t most = largest(values + start, count);
        if (most >= INFINITE) {  // all of it comes back as nan
            *scales++ = std::numeric_limits<float>::quiet_NaN();
            std::memset(integers + (bits == 8 ? start : start / 2), 0,
                        bits == 8 ? count : (count + 1) / 2);
            continue;
        }
        const float scale = std::min(std::max(float_of(most) / limit, LEAST_SCALE), most_scale);
        *scales++ = scale;
        if (bits == 8)
            to_bytes(values + start, count, 1.0f / scale, integers + start);
        else
            to_halves(values + start, count, 1.0f / scale, integers + start / 2);
    }
}

EXPORTED EACH_ISA void zero_comm_decode(const uint8_t *integers, const float *scales, int64_t numel,
                                        int bits, int64_t block, float *out, int adds) {
    if (adds)
        decode<true>(integers, scales, numel, bits, block, out);
    else
        decode<false>(integers, scales, numel, bits, block, out);
}

}  // extern "C"
