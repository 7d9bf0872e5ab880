/* Sums of bfloat16 rows, computed in float32 and rounded once; see functions.py.
 *
 * torch.embedding_bag rounds ties away from zero. The sum of two bfloat16 values is often exactly
 * between two bfloat16 values, so that these sums would be too large by 0.08 % on average.
 */
#include "numbers.h"
#include "threads.h"

typedef struct {
    int64_t width, choices;
    const uint16_t *rows;     /* [rows, width] */
    const int64_t *position;  /* [tokens, choices], -1 for no row */
    uint16_t *sums;           /* [tokens, width] */
} Sums;

#define SOME 64  /* values whose sums stay in registers */
#define AHEAD 8  /* tokens whose rows are fetched while others are summed */

static void fetch(const Sums *s, int64_t token) {
    for (int64_t j = 0; j < s->choices; j++) {
        int64_t position = s->position[token * s->choices + j];
        for (int64_t at = 0; position >= 0 && at < s->width; at += 32)
            __builtin_prefetch(s->rows + position * s->width + at);
    }
}

/* With a constant `count`, the compiler keeps the sums in registers. */
static inline void sum_some(const Sums *s, int64_t token, int64_t at, int count) {
    const int64_t *position = s->position + token * s->choices;
    float sum[SOME] = {0};
    for (int64_t j = 0; j < s->choices; j++) {
        if (position[j] < 0)
            continue;
        const uint16_t *row = s->rows + position[j] * s->width + at;
#pragma omp simd
        for (int i = 0; i < count; i++)
            sum[i] += read_bfloat16(row[i]);
    }
    write_bfloat16(s->sums + token * s->width + at, sum, count);
}

static void sums_of(const void *work, int64_t first, int64_t end) {
    const Sums *s = work;
    for (int64_t token = first; token < end; token++) {
        if (token + AHEAD < end)
            fetch(s, token + AHEAD);
        int64_t at = 0;
        for (; at + SOME <= s->width; at += SOME)
            sum_some(s, token, at, SOME);
        if (at < s->width)
            sum_some(s, token, at, (int)(s->width - at));
    }
}

void sum_rows(int64_t tokens, int64_t width, int64_t choices, const uint16_t *rows,
              const int64_t *position, uint16_t *sums, int threads) {
    Sums work = {.width = width, .choices = choices, .rows = rows, .position = position,
                 .sums = sums};
    run(sums_of, &work, tokens, threads);
}
