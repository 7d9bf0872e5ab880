/* Products of a router with few experts, for bfloat16 tokens and float32 weights; see
 * functions.py.
 *
 * A library's matmul needs the tokens in float32, and takes several times as long if one side of a
 * matrix is a few experts. Sums are float32, in an order that does not depend on the number of
 * threads.
 */
#include "numbers.h"
#include "threads.h"

typedef struct {
    int64_t tokens, width, experts;
    const uint16_t *x;    /* [tokens, width] */
    const float *weight;  /* [experts, width] */
    const float *grad;    /* [tokens, experts] */
    float *scores;        /* [tokens, experts] */
    uint16_t *grad_x;     /* [tokens, width] */
    float *sums;          /* [parts, experts, width] */
    int64_t parts;
} Router;

static inline void widen(const uint16_t *restrict from, float *restrict to, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++)
        to[i] = read_bfloat16(from[i]);
}

static inline int chunk_of(int64_t width, int64_t at) {
    return width - at < CHUNK ? (int)(width - at) : CHUNK;
}

static void scores_of(const void *work, int64_t first, int64_t end) {
    const Router *r = work;
    int64_t width = r->width, experts = r->experts;
    for (int64_t token = first; token < end; token++) {
        float *scores = r->scores + token * experts;
        memset(scores, 0, (size_t)experts * sizeof *scores);
        for (int64_t at = 0; at < width; at += CHUNK) {
            float x[CHUNK];
            int count = chunk_of(width, at);
            widen(r->x + token * width + at, x, count);
            const float *weight = r->weight + at;
            int64_t e = 0;
            /* Four independent sums, because each addition waits for the previous one. */
            for (; e + 4 <= experts; e += 4) {
                const float *w0 = weight + e * width, *w1 = w0 + width, *w2 = w1 + width,
                            *w3 = w2 + width;
                float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
                for (int i = 0; i < count; i++) {
                    s0 += x[i] * w0[i];
                    s1 += x[i] * w1[i];
                    s2 += x[i] * w2[i];
                    s3 += x[i] * w3[i];
                }
                scores[e] += s0;
                scores[e + 1] += s1;
                scores[e + 2] += s2;
                scores[e + 3] += s3;
            }
            for (; e < experts; e++) {
                float s = 0;
#pragma omp simd reduction(+ : s)
                for (int i = 0; i < count; i++)
                    s += x[i] * weight[e * width + i];
                scores[e] += s;
            }
        }
    }
}

static void grad_tokens_of(const void *work, int64_t first, int64_t end) {
    const Router *r = work;
    int64_t width = r->width, experts = r->experts;
    for (int64_t token = first; token < end; token++) {
        const float *grad = r->grad + token * experts;
        for (int64_t at = 0; at < width; at += CHUNK) {
            float sum[CHUNK] = {0};
            int count = chunk_of(width, at);
            const float *weight = r->weight + at;
            int64_t e = 0;
            for (; e + 4 <= experts; e += 4) {
                const float *w0 = weight + e * width, *w1 = w0 + width, *w2 = w1 + width,
                            *w3 = w2 + width;
                float g0 = grad[e], g1 = grad[e + 1], g2 = grad[e + 2], g3 = grad[e + 3];
#pragma omp simd
                for (int i = 0; i < count; i++)
                    sum[i] += g0 * w0[i] + g1 * w1[i] + g2 * w2[i] + g3 * w3[i];
            }
            for (; e < experts; e++) {
#pragma omp simd
                for (int i = 0; i < count; i++)
                    sum[i] += grad[e] * weight[e * width + i];
            }
            write_bfloat16(r->grad_x + token * width + at, sum, count);
        }
    }
}

static void grad_weight_of(const void *work, int64_t first, int64_t end) {
    const Router *r = work;
    int64_t width = r->width, experts = r->experts;
    for (int64_t part = first; part < end; part++) {
        float *sums = r->sums + part * experts * width;
        int64_t last = r->tokens * (part + 1) / r->parts;
        memset(sums, 0, (size_t)(experts * width) * sizeof *sums);
        /* four tokens at a time, so that sums are read and written once for four products */
        for (int64_t token = r->tokens * part / r->parts; token < last; token += 4) {
            int64_t some = last - token < 4 ? last - token : 4;
            for (int64_t at = 0; at < width; at += CHUNK) {
                float x[4][CHUNK];
                int count = chunk_of(width, at);
                for (int64_t j = 0; j < some; j++)
                    widen(r->x + (token + j) * width + at, x[j], count);
                for (int64_t e = 0; e < experts; e++) {
                    float *restrict into = sums + e * width + at;
                    const float *grad = r->grad + token * experts + e;
                    if (some == 4) {
                        float g0 = grad[0], g1 = grad[experts], g2 = grad[2 * experts],
                              g3 = grad[3 * experts];
#pragma omp simd
                        for (int i = 0; i < count; i++)
                            into[i] += g0 * x[0][i] + g1 * x[1][i] + g2 * x[2][i] + g3 * x[3][i];
                        continue;
                    }
                    for (int64_t j = 0; j < some; j++) {
#pragma omp simd
                        for (int i = 0; i < count; i++)
                            into[i] += grad[j * experts] * x[j][i];
                    }
                }
            }
        }
    }
}

/* scores = x weight^T */
void router_scores(int64_t tokens, int64_t width, int64_t experts, const uint16_t *x,
                   const float *weight, float *scores, int threads) {
    Router work = {.tokens = tokens, .width = width, .experts = experts, .x = x,
                   .weight = weight, .scores = scores};
    run(scores_of, &work, tokens, threads);
}

/* grad_x = grad weight */
void router_grad_tokens(int64_t tokens, int64_t width, int64_t experts, const float *grad,
                        const float *weight, uint16_t *grad_x, int threads) {
    Router work = {.tokens = tokens, .width = width, .experts = experts, .grad = grad,
                   .weight = weight, .grad_x = grad_x};
    run(grad_tokens_of, &work, tokens, threads);
}

/* The caller adds the sums of all parts; the result is grad^T x. */
void router_grad_weight(int64_t tokens, int64_t width, int64_t experts, const float *grad,
                        const uint16_t *x, float *sums, int64_t parts, int threads) {
    Router work = {.tokens = tokens, .width = width, .experts = experts, .grad = grad, .x = x,
                   .sums = sums, .parts = parts};
    run(grad_weight_of, &work, parts, threads);
}
