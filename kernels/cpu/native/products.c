/* Products of float32 matrices with the library that torch uses, several at a time, each on one
 * thread. The library would distribute each product to all threads. This takes longer the fewer
 * rows there are, and after each product all threads wait for the last one.
 */
#include "threads.h"

/* Fortran's sgemm. Integers below 2^31 have the same low bytes in 32 and 64 bits, so int64_t works
 * for both variants of the library. */
typedef void (*Gemm)(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                     const float *, const float *, const int64_t *, const float *, const int64_t *,
                     const float *, float *, const int64_t *);

/* out [rows, columns] = a [rows, inner] b [inner, columns], added to old values if `adds` */
typedef struct {
    const float *a, *b;
    float *out;
    int64_t rows, inner, adds;
} Product;

/* The layout of the matrices: the step from line to line, and whether lines are rows or columns */
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
    (void)first, (void)end; /* any free thread takes the next product */
    const Work *work = data;
    const float one = 1.0f, none = 0.0f;
    for (int64_t i; (i = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < work->number;) {
        const Product *p = work->products + i;
        const float *before = p->adds ? &one : &none;
        const char *a_form = form(work->a_by_row, work->out_by_row);
        const char *b_form = form(work->b_by_row, work->out_by_row);
        if (work->out_by_row) /* Fortran stores by column: compute the transposed product */
            work->gemm(b_form, a_form, &work->columns, &p->rows, &p->inner, &one, p->b,
                       &work->b_step, p->a, &work->a_step, before, p->out, &work->out_step);
        else
            work->gemm(a_form, b_form, &p->rows, &work->columns, &p->inner, &one, p->a,
                       &work->a_step, p->b, &work->b_step, before, p->out, &work->out_step);
    }
}

/* Returns 1 if the lines of a matrix are rows, 0 if they are columns, -1 if the matrix has another
 * layout. */
static int lie(int64_t by_row, int64_t by_column, int64_t rows, int64_t columns) {
    if (by_column == 1 && by_row >= columns)
        return 1;
    return by_row == 1 && by_column >= rows ? 0 : -1;
}

/* Computes products of matrices with the given strides, which all products share. Returns 0 and
 * does nothing if a matrix has an unsupported layout.
 */
int products(void *gemm, int64_t number, const Product *products, int64_t columns, int64_t a_row,
             int64_t a_column, int64_t b_row, int64_t b_column, int64_t out_row,
             int64_t out_column, int threads) {
    int64_t next = 0;
    Work work = {.gemm = (Gemm)gemm, .products = products, .number = number, .columns = columns,
                 .next = &next};
    for (const Product *p = products; p < products + number; p++) {
        int a = lie(a_row, a_column, p->rows, p->inner);
        int b = lie(b_row, b_column, p->inner, columns);
        int out = lie(out_row, out_column, p->rows, columns);
        int same = p == products || (a == work.a_by_row && b == work.b_by_row &&
                                     out == work.out_by_row);
        if (a < 0 || b < 0 || out < 0 || !same)
            return 0;
        work.a_by_row = a, work.b_by_row = b, work.out_by_row = out;
    }
    work.a_step = work.a_by_row ? a_row : a_column;
    work.b_step = work.b_by_row ? b_row : b_column;
    work.out_step = work.out_by_row ? out_row : out_column;
    run(multiply, &work, number, threads);
    return 1;
}
