/* Experts with few rows; see few_rows.py. passes.c includes this file once per type of the weights.
 *
 * A library's matmul is slow if one matrix has few rows. Here every weight is read once, in the
 * order of memory, and multiplies several rows in registers. Any free thread takes the next piece,
 * which is TILE columns of one expert. The number of threads does not change any result. All values
 * are float32, except weights, their gradients and the sums of rows. Pointers that are not needed
 * are NULL.
 */
#ifndef MOE_PLUGIN_FEW_H
#define MOE_PLUGIN_FEW_H

#define TILE 256
#define DEPTH 32 /* lines of a weight that stay in the L1 cache while all rows use them */
#define MOST 64  /* rows of an expert; few_rows.py has the same number */
#define VECTORS 4
#ifdef __AVX512F__
#define LANES 16
#define ROWS 4
#else
#define LANES 8
#define ROWS 2
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef const float *Row;

INLINE Vector load_float32(const float *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Vector load_bfloat16(const uint16_t *from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return (Vector)(__builtin_convertvector(x, Words) << 16);
}

/* A weight [experts, inputs, outputs] and its gradient, both stored with swapped axes if `turned` */
typedef struct {
    const void *values;
    void *grad;
    const float *bias; /* [experts, outputs] */
    float *bias_grad;
    int64_t turned;
} Weight;

/* Row r is choice source[r] of the tokens, or token r if source is NULL. */
typedef struct {
    int64_t tokens, choices, experts, width, inner;
    const int64_t *start, *source, *position; /* first row of each expert, choices, rows */
    const float *gates, *x, *grad_y;          /* [tokens, choices], [tokens, width] */
    float *before, *up, *after;               /* [rows, inner] */
    float *grad, *grad_up;                    /* [rows, inner] */
    float *rows, *grad_rows;                  /* [rows, width] */
    void *sums;                               /* [tokens, width] */
    float *grad_gates;
    Weight in, gate, out;
    int64_t next; /* the first piece that no thread has taken */
} Few;

typedef struct {
    int64_t expert, row, rows, first, count; /* rows row to row + rows, columns from first on */
} Piece;

static int take(Few *w, int64_t columns, Piece *piece) {
    int64_t tiles = (columns + TILE - 1) / TILE;
    int64_t number = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
    int64_t expert = number / tiles, first = number % tiles * TILE;
    if (expert >= w->experts)
        return 0;
    *piece = (Piece){expert, w->start[expert], w->start[expert + 1] - w->start[expert], first,
                     columns - first < TILE ? columns - first : TILE};
    return 1;
}

/* The piece's rows of x, which has one row per token or, with `by_row`, one row per row */
static void rows_of(const Few *w, const Piece *p, Row x, int64_t width, int by_row, Row *found) {
    for (int64_t r = 0; r < p->rows; r++) {
        int64_t row = p->row + r;
        found[r] = x + (by_row || !w->source ? row : w->source[row] / w->choices) * width;
    }
}

static float gate_of(const Few *w, int64_t row) { return w->gates ? w->gates[w->source[row]] : 1; }

static void bias_grad(const Weight *w, const Piece *p, const float *grad, int64_t outputs) {
    for (int64_t c = 0; c < p->count && w->bias_grad; c++) {
        float sum = 0;
        for (int64_t r = 0; r < p->rows; r++)
            sum += grad[r * outputs + c];
        w->bias_grad[p->expert * outputs + p->first + c] = sum;
    }
}

/* out[r, c] += sum over i of a[r, from + i] w[i, c], for lines of a few vectors */
INLINE void by_line(const Row *a, int64_t from, const float (*w)[VECTORS * LANES], int64_t depth,
                    float *out, int64_t out_step, int rows, int vectors) {
    Vector sum[ROWS][VECTORS], line[VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = load_float32(out + r * out_step + v * LANES);
    for (int64_t i = 0; i < depth; i++) {
        for (int v = 0; v < vectors; v++)
            line[v] = load_float32(w[i] + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] += a[r][from + i] * line[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            memcpy(out + r * out_step + v * LANES, &sum[r][v], sizeof(Vector));
}

/* Calls a function for all rows, with constant numbers of rows and of vectors or columns, so that
 * the compiler keeps the sums in registers. */
#define IN_REGISTERS(name, wide, ...)                                                              \
    for (int64_t r = 0, of; r < rows; r += of) {                                                   \
        of = rows - r >= ROWS ? ROWS : rows - r >= 2 ? 2 : 1;                                      \
        CALL_WITH(name, ROWS, wide, __VA_ARGS__)                                                   \
        else CALL_WITH(name, 2, wide, __VA_ARGS__)                                                 \
        else CALL_WITH(name, 1, wide, __VA_ARGS__)                                                 \
    }
#define CALL_WITH(name, number, wide, ...)                                                         \
    if (of == number) {                                                                            \
        if (wide)                                                                                  \
            name(a + r, __VA_ARGS__, out + r * out_step + at, out_step, number, VECTORS);          \
        else                                                                                       \
            name(a + r, __VA_ARGS__, out + r * out_step + at, out_step, number, 1);                \
    }

#endif

#define READ NAMED(read)
#define WRITE NAMED(write)
#define LOAD NAMED(load)

/* out[r, c] += sum over i of a[r, i] w[c, i] */
INLINE void NAMED(by_column)(const Row *a, const VALUE *w, int64_t depth, float *out,
                             int64_t out_step, int rows, int columns) {
    Vector sum[ROWS][VECTORS] = {0}, line[VECTORS];
    int64_t i = 0;
    for (; i + LANES <= depth; i += LANES) {
        for (int c = 0; c < columns; c++)
            line[c] = LOAD(w + c * depth + i);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sum[r][c] += load_float32(a[r] + i) * line[c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float total = 0;
            for (int l = 0; l < LANES; l++)
                total += sum[r][c][l];
            for (int64_t j = i; j < depth; j++)
                total += a[r][j] * READ(w[c * depth + j]);
            out[r * out_step + c] += total;
        }
}

/* Adds a w, or a w^T if `back`, to the piece's columns. out: the first of these values */
static void NAMED(multiply)(const Weight *weight, const Piece *p, const Row *a, int64_t inputs,
                            int64_t outputs, int back, float *out) {
    const VALUE *w = (const VALUE *)weight->values + p->expert * inputs * outputs;
    int64_t rows = p->rows, count = p->count, at = 0, wide;
    int64_t depth = back ? outputs : inputs, out_step = back ? inputs : outputs;
    if (weight->turned != back) {
        for (w += p->first * depth; at < count; at += wide ? VECTORS : 1) {
            wide = count - at >= VECTORS;
            IN_REGISTERS(NAMED(by_column), wide, w + at * depth, depth)
        }
        return;
    }
    for (int64_t from = 0; from < depth; from += DEPTH) {
        const VALUE *lines = w + from * out_step + p->first;
        int64_t some = depth - from < DEPTH ? depth - from : DEPTH;
        for (at = 0; at + LANES <= count; at += wide ? VECTORS * LANES : LANES) {
            float block[DEPTH][VECTORS * LANES];
            wide = count - at >= VECTORS * LANES;
            for (int64_t i = 0; i < some; i++)
                for (int64_t c = 0; c < (wide ? VECTORS * LANES : LANES); c += LANES) {
                    Vector values = LOAD(lines + i * out_step + at + c);
                    memcpy(block[i] + c, &values, sizeof values);
                    /* the processor does not foresee that these lines come next */
                    __builtin_prefetch(lines + (DEPTH + i) * out_step + at + c);
                }
            IN_REGISTERS(by_line, wide, from, block, some)
        }
        for (; at < count; at++)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < some; i++)
                    out[r * out_step + at] += a[r][from + i] * READ(lines[i * out_step + at]);
    }
}

static void NAMED(linear)(const Weight *weight, const Piece *p, const Row *a, int64_t inputs,
                          int64_t outputs, float *out) {
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t c = 0; c < p->count; c++)
            out[r * outputs + c] = weight->bias
                ? weight->bias[p->expert * outputs + p->first + c] : 0.0f;
    NAMED(multiply)(weight, p, a, inputs, outputs, 0, out);
}

/* out[i, c] = sum over r of a[r, i] b[r, c], rounded once */
static void NAMED(outer)(const Row *a, int64_t a_first, int64_t lines, const Row *b,
                         int64_t b_first, int64_t columns, int64_t rows, VALUE *out, int64_t step) {
    for (int64_t i = 0; i < lines; i += ROWS)
        for (int64_t at = 0; at < columns; at += VECTORS * LANES) {
            int some = lines - i < ROWS ? (int)(lines - i) : ROWS;
            int count = columns - at < VECTORS * LANES ? (int)(columns - at) : VECTORS * LANES;
            float sums[ROWS][VECTORS * LANES] = {{0}};
            if (some == ROWS && count == VECTORS * LANES) {
                Vector sum[ROWS][VECTORS] = {{{0}}};
                for (int64_t r = 0; r < rows; r++)
                    for (int v = 0; v < VECTORS; v++) {
                        Vector line = load_float32(b[r] + b_first + at + v * LANES);
                        for (int j = 0; j < ROWS; j++)
                            sum[j][v] += a[r][a_first + i + j] * line;
                    }
                memcpy(sums, sum, sizeof sums);
            } else {
                for (int64_t r = 0; r < rows; r++)
                    for (int j = 0; j < some; j++)
                        for (int c = 0; c < count; c++)
                            sums[j][c] += a[r][a_first + i + j] * b[r][b_first + at + c];
            }
            for (int j = 0; j < some; j++)
                WRITE(out + (i + j) * step + at, sums[j], count);
        }
}

/* The gradient a^T b of a weight for the piece's columns of a */
static void NAMED(weight_grad)(const Weight *w, const Piece *p, const Row *a, const Row *b,
                               int64_t inputs, int64_t outputs) {
    VALUE *out = (VALUE *)w->grad + p->expert * inputs * outputs;
    if (w->grad && w->turned)
        NAMED(outer)(b, 0, outputs, a, p->first, p->count, p->rows, out + p->first, inputs);
    else if (w->grad)
        NAMED(outer)(a, p->first, p->count, b, 0, outputs, p->rows, out + p->first * outputs,
                     outputs);
}

#define EACH_PIECE(columns, p)                                                                     \
    Few *w = (Few *)work;                                                                          \
    (void)start, (void)end;                                                                        \
    for (Piece piece, *p = &piece; take(w, columns, p);)

static void NAMED(activate)(const void *work, int64_t start, int64_t end) {
    EACH_PIECE(w->inner, p) {
        Row x[MOST];
        int64_t at = p->row * w->inner + p->first;
        rows_of(w, p, w->x, w->width, 0, x);
        if (w->up)
            NAMED(linear)(&w->in, p, x, w->width, w->inner, w->up + at);
        NAMED(linear)(w->up ? &w->gate : &w->in, p, x, w->width, w->inner, w->before + at);
        for (int64_t r = 0; r < p->rows; r++, at += w->inner) {
            const float *up = w->up ? w->up + at : NULL;
            float *before = w->before + at, *after = w->after + at;
#pragma omp simd
            for (int64_t c = 0; c < p->count; c++)
                after[c] = ACTIVATION(before[c], 1).value * (up ? up[c] : 1.0f);
        }
    }
}

static void NAMED(project)(const void *work, int64_t start, int64_t end) {
    EACH_PIECE(w->width, p) {
        Row after[MOST];
        rows_of(w, p, w->after, w->inner, 1, after);
        NAMED(linear)(&w->out, p, after, w->inner, w->width, w->rows + p->row * w->width + p->first);
    }
}

/* The (weighted) sums of the rows of each token, and the gradients of its gates */
static void NAMED(combine)(const void *work, int64_t first, int64_t end) {
    const Few *w = work;
    const float *rows = w->grad_rows ? w->grad_rows : w->rows;
    for (int64_t choice = first * w->choices; choice < end * w->choices && w->grad_gates; choice++) {
        int64_t row = w->position[choice], width = row < 0 ? 0 : w->width;
        const float *grad = w->grad_y + choice / w->choices * width, *of = w->rows + row * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t c = 0; c < width; c++)
            dot += grad[c] * of[c];
        w->grad_gates[choice] = dot;
    }
    for (int64_t token = first; token < end && w->sums; token++)
        for (int64_t at = 0; at < w->width; at += CHUNK) {
            int count = w->width - at < CHUNK ? (int)(w->width - at) : CHUNK;
            float sum[CHUNK] = {0};
            for (int64_t j = token * w->choices; j < (token + 1) * w->choices; j++) {
                float scale = w->gates && !w->grad_rows ? w->gates[j] : 1.0f;
                const float *row = rows + w->position[j] * w->width + at;
#pragma omp simd
                for (int c = 0; c < (w->position[j] < 0 ? 0 : count); c++)
                    sum[c] += scale * row[c];
            }
            WRITE((VALUE *)w->sums + token * w->width + at, sum, count);
        }
}

/* The gradients of the inner values and of the last weight. `after` becomes its value times the
 * row's gate. */
static void NAMED(grad_inner)(const void *work, int64_t start, int64_t end) {
    EACH_PIECE(w->inner, p) {
        Row grad_y[MOST], after[MOST];
        int64_t at = p->row * w->inner + p->first;
        rows_of(w, p, w->grad_y, w->width, 0, grad_y);
        rows_of(w, p, w->after, w->inner, 1, after);
        for (int64_t r = 0; r < p->rows; r++)
            memset(w->grad + at + r * w->inner, 0, (size_t)p->count * sizeof(float));
        NAMED(multiply)(&w->out, p, grad_y, w->inner, w->width, 1, w->grad + at);
        for (int64_t r = 0; r < p->rows; r++) {
            int64_t line = at + r * w->inner;
            float gate = gate_of(w, p->row + r), *grad = w->grad + line, *inner = w->after + line;
            float *grad_up = w->up ? w->grad_up + line : NULL;
            const float *before = w->before + line, *up = w->up ? w->up + line : NULL;
#pragma omp simd
            for (int64_t c = 0; c < p->count; c++) {
                Point point = ACTIVATION(before[c], 1);
                float factor = up ? up[c] : 1.0f, g = gate * grad[c];
                inner[c] = gate * point.value * factor;
                if (up)
                    grad_up[c] = g * point.value;
                grad[c] = g * factor * point.slope;
            }
        }
        NAMED(weight_grad)(&w->out, p, after, grad_y, w->inner, w->width);
        bias_grad(w->up ? &w->gate : &w->in, p, w->grad + at, w->inner);
        if (w->up)
            bias_grad(&w->in, p, w->grad_up + at, w->inner);
    }
}

/* The gradients of the rows and of the first weights */
static void NAMED(grad_rows)(const void *work, int64_t start, int64_t end) {
    EACH_PIECE(w->width, p) {
        Row x[MOST], grad[MOST];
        int64_t at = p->row * w->width + p->first;
        rows_of(w, p, w->x, w->width, 0, x);
        if (w->out.bias_grad) { /* grad_rows is overwritten below */
            rows_of(w, p, w->grad_y, w->width, 0, grad);
            for (int64_t r = 0; r < p->rows; r++)
                for (int64_t c = 0; c < p->count; c++)
                    w->grad_rows[at + r * w->width + c] =
                        gate_of(w, p->row + r) * grad[r][p->first + c];
            bias_grad(&w->out, p, w->grad_rows + at, w->width);
        }
        for (int64_t r = 0; r < p->rows; r++)
            memset(w->grad_rows + at + r * w->width, 0, (size_t)p->count * sizeof(float));
        for (int second = 0; second <= !!w->up; second++) {
            const Weight *of = second ? &w->gate : &w->in;
            rows_of(w, p, w->up && !second ? w->grad_up : w->grad, w->inner, 1, grad);
            NAMED(multiply)(of, p, grad, w->width, w->inner, 1, w->grad_rows + at);
            NAMED(weight_grad)(of, p, x, grad, w->width, w->inner);
        }
    }
}

void NAMED(few_forward)(Few *w, int threads) {
    w->next = 0, run(NAMED(activate), w, 1, threads);
    w->next = 0, run(NAMED(project), w, 1, threads);
    if (w->sums)
        run(NAMED(combine), w, w->tokens, threads);
}

void NAMED(few_backward)(Few *w, int threads) {
    w->next = 0, run(NAMED(grad_inner), w, 1, threads);
    w->next = 0, run(NAMED(grad_rows), w, 1, threads);
    if (w->sums || w->grad_gates)
        run(NAMED(combine), w, w->tokens, threads);
}

#undef READ
#undef WRITE
#undef LOAD
