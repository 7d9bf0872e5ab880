/* Conversions between stored values and float32, the type of all computations. */
#ifndef MOE_PLUGIN_NUMBERS_H
#define MOE_PLUGIN_NUMBERS_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define CHUNK 1024 /* values computed before they are stored; fits the L1 cache */

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float read_float32(float x) { return x; }

static inline void write_float32(float *restrict to, const float *restrict from, int count) {
    memcpy(to, from, (size_t)count * sizeof *to);
}

static inline float read_bfloat16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* Rounds to nearest, ties to even; a NaN stays a NaN. AVX-512's instruction turns float32
 * subnormals (below 2^-126) into 0. */
static inline void write_bfloat16(uint16_t *restrict to, const float *restrict from, int count) {
    int done = 0;
#ifdef __AVX512BF16__
    for (; done + 16 <= count; done += 16)
        _mm256_storeu_si256((__m256i *)(to + done),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + done)));
#endif
#pragma omp simd
    for (int i = done; i < count; i++) {
        uint32_t bits = to_bits(from[i]), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        to[i] = (uint16_t)(from[i] == from[i] ? rounded : 0x7fc0u);
    }
}

#endif
