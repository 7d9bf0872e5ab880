/* Passes over an expert's inner values between two products, for one activation; see functions.py.
 *
 * Plain C that compilers turn into vector instructions. Compiled once per activation (build.py),
 * where ACTIVATION is the name of one of the functions below.
 */
#include <math.h>
#include <stddef.h>

#include "numbers.h"
#include "threads.h"

typedef struct {
    float value, slope; /* act(x), act'(x) */
} Point;

/* Beyond the limits act(x) is x or 0, so clamping prevents overflow, and -inf gives 0. A NaN stays
 * a NaN here and below, because every comparison with NaN is false. */
static inline float at_least(float x, float limit) { return x < limit ? limit : x; }

static inline float at_most(float x, float limit) { return x > limit ? limit : x; }

/* 2^y for y from -120 to 0, with a relative error of 2e-9, or 3e-6 if not `exact`. The polynomials
 * are fitted on [-1/2, 1/2] to the smallest maximum error. */
static inline float power_of_two(float y, int exact) {
    float whole = rintf(y), f = y - whole, p;
    if (exact) {
        p = 1.53458221e-4f;
        p = p * f + 1.33999357e-3f;
        p = p * f + 9.61848896e-3f;
        p = p * f + 5.55032877e-2f;
        p = p * f + 2.40226469e-1f;
        p = p * f + 6.93147206e-1f;
        p = p * f + 1.0f;
    } else {
        p = 9.57010358e-3f;
        p = p * f + 5.59179042e-2f;
        p = p * f + 2.40247452e-1f;
        p = p * f + 6.93121809e-1f;
        p = p * f + 9.99999261e-1f;
    }
    return from_bits(to_bits(p) + ((uint32_t)(int32_t)whole << 23));
}

/* x times the normal distribution function at x. The probability above |x| is exp(-x^2 / 2) times
 * a polynomial of 1 / (1 + c |x|), fitted on [0, 16] with a relative error of 3e-8, or 4e-5 if not
 * `exact`. The error is relative, so that small results for negative x stay precise. */
static inline Point gelu(float x, int exact) {
    x = at_least(x, -16.0f);
    float near = at_most(x, 16.0f), distance = fabsf(near);
    float y = near * near * -0.721347520f; /* log2(e) / 2 */
    float bell = power_of_two(at_least(y, -120.0f), exact), t, p;
    if (exact) {
        t = 1.0f / (1.0f + 0.35f * distance);
        p = -2.91648136e-2f;
        p = p * t + 1.44065385e-1f;
        p = p * t - 2.55911898e-1f;
        p = p * t + 1.59405050e-1f;
        p = p * t - 2.32726780e-2f;
        p = p * t + 1.05578761e-1f;
        p = p * t + 1.19814438e-1f;
        p = p * t + 1.39864491e-1f;
        p = p * t + 1.39621249e-1f;
    } else {
        t = 1.0f / (1.0f + 0.375f * distance);
        p = -8.94362266e-2f;
        p = p * t + 1.97596635e-1f;
        p = p * t + 8.56351971e-2f;
        p = p * t + 1.57087795e-1f;
        p = p * t + 1.49128756e-1f;
    }
    float above = p * t * bell, share = x < 0.0f ? above : 1.0f - above;
    return (Point){x * share, share + near * bell * 0.398942280f}; /* 1 / sqrt(2 pi) */
}

/* x sigmoid(v), where dv / dx = slope; near: x, clamped to the largest value used for v */
static inline Point gated_by_sigmoid(float x, float near, float v, float slope, int exact) {
    float y = fabsf(v) * -1.44269504f; /* log2(e) */
    float e = power_of_two(at_least(y, -120.0f), exact), t = 1.0f / (1.0f + e);
    float share = v < 0.0f ? e * t : t;
    return (Point){x * share, share + near * slope * e * t * t};
}

static inline Point silu(float x, int exact) {
    x = at_least(x, -128.0f);
    float near = at_most(x, 128.0f);
    return gated_by_sigmoid(x, near, near, 1.0f, exact);
}

static inline Point quick_gelu(float x, int exact) {
    x = at_least(x, -64.0f);
    float near = at_most(x, 64.0f);
    return gated_by_sigmoid(x, near, 1.702f * near, 1.702f, exact);
}

/* (x / 2) (1 + tanh(u)) = x sigmoid(2 u) */
static inline Point gelu_tanh(float x, int exact) {
    x = at_least(x, -16.0f);
    float near = at_most(x, 16.0f), square = near * near;
    float v = 1.59576912f * near * (1.0f + 0.044715f * square); /* 2 sqrt(2 / pi) */
    return gated_by_sigmoid(x, near, v, 1.59576912f * (1.0f + 0.134145f * square), exact);
}

static inline Point relu(float x, int exact) {
    (void)exact;
    return (Point){at_least(x, 0.0f), x <= 0.0f ? 0.0f : 1.0f};
}

static inline Point squared_relu(float x, int exact) {
    (void)exact;
    float half = at_least(x, 0.0f);
    return (Point){half * half, half + half};
}

/* The work of one call on values [rows, width]. Pointers that a pass does not use are NULL. */
typedef struct {
    int64_t width;
    void *grad, *before, *up, *after, *grad_up;
    const float *scale; /* [rows] */
    float *dots;        /* [rows] */
} Work;

#define VALUE float
#define NAMED(name) name##_float32
#define EXACT 1
#include "passes.h"
#undef VALUE
#undef NAMED
#undef EXACT

#define VALUE uint16_t
#define NAMED(name) name##_bfloat16
#define EXACT 0
#include "passes.h"
