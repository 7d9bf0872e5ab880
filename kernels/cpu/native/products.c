/* Products of float32 matrices by the library that torch multiplies with, each by one thread and
 * several at a time: that library shares out each product to all threads, which takes longer the
 * fewer rows there are, and all of them wait for the last one after each.
 */
#include "threads.h"

/* Fortran's sgemm; values below 2^31 read alike as 32 and 64 bits */
typedef void (*Gemm)(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                     const float *, const float *, const int64_t *, const float *, const int64_t *,
                     const float *, float *, const int64_t *);

/* out [rows, columns] = a [rows, inner] b [inner, columns], added to what is there or not */
typedef struct {
    const float *a, *b;
    float *out;
    int64_t rows, inner, adds;
} Product;

/* How matrices lie: steps from line to line, whose lines are rows, or columns */
typedef struct {
    Gemm gemm;
    const Product *products;
    int64_t number, columns, a_step, b_step, out_step;
    int a_by_row, b_by_row, out_by_row;
    int64_t *next;
} Work;

static const char *form(int by_row, int out_by_row) {
    return by_row == out_by_row ? "N" : "T";
}

static void multiply(const void *data, int64_t first, int64_t end) {
    (void)first, (void)end; /* whoever is free takes the next one */
    const Work *work = data;
    const float one = 1.0f, none = 0.0f;
    for (int64_t i; (i = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < work->number;) {
        const Product *p = work->products + i;
        const float *before = p->adds ? &one : &none;
        const char *a_form = form(work->a_by_row, work->out_by_row);
        const char *b_form = form(work->b_by_row, work->out_by_row);
        if (work->out_by_row) /* Fortran's matrices lie by column: the transposed product */
            work->gemm(b_form, a_form, &work->columns, &p->rows, &p->inner, &one, p->b,
                       &work->b_step, p->a, &work->a_step, before, p->out, &work->out_step);
        else
            work->gemm(a_form, b_form, &p->rows, &work->columns, &p->inner, &one, p->a,
                       &work->a_step, p->b, &work->b_step, before, p->out, &work->out_step);
    }
}

static int lies(int64_t step, int by_row, int64_t rows, int64_t columns) {
    return step >= (by_row ? columns : rows);
}

/* 0: a matrix does not lie as it is said, and nothing is done */
int products(void *gemm, int64_t number, const Product *products, int64_t columns, int64_t a_step,
             int64_t b_step, int64_t out_step, int a_by_row, int b_by_row, int out_by_row,
             int threads) {
    for (const Product *p = products; p < products + number; p++)
        if (!lies(a_step, a_by_row, p->rows, p->inner) ||
            !lies(b_step, b_by_row, p->inner, columns) ||
            !lies(out_step, out_by_row, p->rows, columns))
            return 0;
    int64_t next = 0;
    Work work = {(Gemm)gemm, products, number,   columns,    a_step, b_step,
                 out_step,   a_by_row, b_by_row, out_by_row, &next};
    run(multiply, &work, number, threads);
    return 1;
}
