/* The passes for values of one type; passes.c includes this file once per type.
 *
 * One thread computes each row, from left to right in chunks, so that the number of threads does
 * not change any result. A pass receives a chunk of `count` values from index `at` on, and the
 * factor `scale` of the row's gradient. The pass returns the chunk's part of the row's dot product.
 */
#define READ NAMED(read)
#define WRITE NAMED(write)
#define AT(field) ((VALUE *)w->field + at)
#define PASS(name)                                                                                 \
    static inline float NAMED(chunk_##name)(const Work *w, int64_t at, int count, float scale);    \
    static void NAMED(name)(const void *work, int64_t first, int64_t end) {                        \
        NAMED(rows)(work, first, end, NAMED(chunk_##name));                                        \
    }                                                                                              \
    static inline float NAMED(chunk_##name)(const Work *w, int64_t at, int count, float scale)

static inline __attribute__((always_inline)) void NAMED(rows)(
    const Work *w, int64_t first, int64_t end, float (*chunk)(const Work *, int64_t, int, float)) {
    for (int64_t row = first; row < end; row++) {
        float scale = w->scale ? w->scale[row] : 1.0f, dot = 0.0f;
        for (int64_t column = 0; column < w->width; column += CHUNK) {
            int64_t left = w->width - column;
            dot += chunk(w, row * w->width + column, left < CHUNK ? (int)left : CHUNK, scale);
        }
        if (w->dots)
            w->dots[row] = dot;
    }
}

/* after = act(before); before = act'(before) */
PASS(forward_keeping_slope) {
    (void)scale;
    float value[CHUNK], slope[CHUNK];
    VALUE *restrict before = AT(before);
#pragma omp simd
    for (int i = 0; i < count; i++) {
        Point point = ACTIVATION(READ(before[i]), EXACT);
        value[i] = point.value;
        slope[i] = point.slope;
    }
    WRITE(AT(after), value, count);
    WRITE(before, slope, count);
    return 0.0f;
}

/* after = act(before) */
PASS(forward_plain) {
    (void)scale;
    float value[CHUNK];
    const VALUE *restrict before = AT(before);
#pragma omp simd
    for (int i = 0; i < count; i++)
        value[i] = ACTIVATION(READ(before[i]), EXACT).value;
    WRITE(AT(after), value, count);
    return 0.0f;
}

/* after = act(before) up */
PASS(forward_gated) {
    (void)scale;
    float value[CHUNK];
    const VALUE *restrict before = AT(before), *restrict up = AT(up);
#pragma omp simd
    for (int i = 0; i < count; i++)
        value[i] = ACTIVATION(READ(before[i]), EXACT).value * READ(up[i]);
    WRITE(AT(after), value, count);
    return 0.0f;
}

/* before contains act'. dots = grad . after; grad = scale grad before */
PASS(backward_from_slope) {
    float new_grad[CHUNK], dot = 0.0f;
    VALUE *restrict grad = AT(grad);
    const VALUE *restrict slope = AT(before), *restrict after = AT(after);
#pragma omp simd reduction(+ : dot)
    for (int i = 0; i < count; i++) {
        float g = READ(grad[i]);
        dot += g * READ(after[i]);
        new_grad[i] = scale * g * READ(slope[i]);
    }
    WRITE(grad, new_grad, count);
    return dot;
}

/* grad . after, with the stored (rounded) after, because the forward pass multiplied this value by
 * the last weight */
static float NAMED(dot_of)(const VALUE *restrict grad, const VALUE *restrict after, int count) {
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int i = 0; i < count; i++)
        dot += READ(grad[i]) * READ(after[i]);
    return dot;
}

/* after = act(before); dots = grad . after; grad = scale grad act'(before) */
PASS(backward_plain) {
    float value[CHUNK], new_grad[CHUNK];
    VALUE *restrict grad = AT(grad), *restrict after = AT(after);
    const VALUE *restrict before = AT(before);
#pragma omp simd
    for (int i = 0; i < count; i++) {
        Point point = ACTIVATION(READ(before[i]), EXACT);
        value[i] = point.value;
        new_grad[i] = scale * READ(grad[i]) * point.slope;
    }
    WRITE(after, value, count);
    float dot = NAMED(dot_of)(grad, after, count);
    WRITE(grad, new_grad, count);
    return dot;
}

/* after = act(before) up; dots = grad . after; grad_up = scale grad act(before);
 * grad = scale grad up act'(before) */
PASS(backward_gated) {
    float value[CHUNK], new_grad[CHUNK], new_grad_up[CHUNK];
    VALUE *restrict grad = AT(grad), *restrict after = AT(after);
    const VALUE *restrict before = AT(before), *restrict up = AT(up);
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float u = READ(up[i]), scaled = scale * READ(grad[i]);
        Point point = ACTIVATION(READ(before[i]), EXACT);
        value[i] = point.value * u;
        new_grad_up[i] = scaled * point.value;
        new_grad[i] = scaled * u * point.slope;
    }
    WRITE(after, value, count);
    WRITE(AT(grad_up), new_grad_up, count);
    float dot = NAMED(dot_of)(grad, after, count);
    WRITE(grad, new_grad, count);
    return dot;
}

/* grad = scale grad */
PASS(scaled) {
    float new_grad[CHUNK];
    VALUE *restrict grad = AT(grad);
#pragma omp simd
    for (int i = 0; i < count; i++)
        new_grad[i] = scale * READ(grad[i]);
    WRITE(grad, new_grad, count);
    return 0.0f;
}

/* up: NULL for plain experts; keep_slope: whether act' replaces before */
void NAMED(forward)(int64_t rows, int64_t width, void *before, void *up, void *after,
                    int keep_slope, int threads) {
    Work work = {.width = width, .before = before, .up = up, .after = after};
    run(up           ? NAMED(forward_gated)
        : keep_slope ? NAMED(forward_keeping_slope)
                     : NAMED(forward_plain),
        &work, rows, threads);
}

/* up and grad_up: NULL for plain experts; scale: NULL for 1; dots: NULL if not needed; has_slope:
 * whether before contains act' and after is read */
void NAMED(backward)(int64_t rows, int64_t width, void *grad, void *before, void *up, void *after,
                     void *grad_up, const float *scale, float *dots, int has_slope, int threads) {
    Work work = {width, grad, before, up, after, grad_up, scale, dots};
    run(up          ? NAMED(backward_gated)
        : has_slope ? NAMED(backward_from_slope)
                    : NAMED(backward_plain),
        &work, rows, threads);
}

void NAMED(scale)(int64_t rows, int64_t width, void *grad, const float *scale, int threads) {
    Work work = {.width = width, .grad = grad, .scale = scale};
    run(NAMED(scaled), &work, rows, threads);
}

#undef READ
#undef WRITE
#undef AT
#undef PASS
