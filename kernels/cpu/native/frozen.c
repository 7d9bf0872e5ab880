/* Frozen weights: decodes codes, and multiplies bfloat16 rows by them with AMX; see cpu/frozen.py.
 *
 * A weight is decoded in panels that fit the L2 cache. Each panel is a sequence of AMX tiles, which
 * are multiplied by the tiles of all rows of the expert before the next panel is decoded.
 */
#include <stdlib.h>

#include "numbers.h"
#include "threads.h"

#define RUN 32     /* values of an output that are decoded at once, and that a tile spans */
#define ACROSS 16  /* rows of a tile */
#define TILE (ACROSS * RUN)
#define PANEL 8    /* tiles across a panel: 128 outputs, or 128 inputs if the weight is transposed */

enum { NF4, NF4_DOUBLE, MXFP4, FP8, INT8 };

/* One expert's weight [outer, inner]. `numbers` contains the numbers of a byte: two for 4-bit
 * codes, otherwise one. `dynamic` contains the numbers of 8-bit scales. The float32 scales of
 * 8-bit scales are those of a whole expert, of which this weight may be a part: the part's first
 * scale has the index `first_scale`, and the next output's is `apart` later. `added` is the index
 * of the number that is added to all scales. */
typedef struct {
    int64_t kind, inner, outer, first_scale, apart, added;
    const float *numbers, *dynamic;
    const uint8_t *codes, *scales, *nested;
} Weight;

static inline int is_4_bits(int kind) { return kind <= MXFP4; }

static inline float float_at(const uint8_t *bytes, int64_t at) {
    float x; /* the bytes may start anywhere */
    memcpy(&x, bytes + at * (int64_t)sizeof x, sizeof x);
    return x;
}

static inline float scale_of(int kind, const Weight *w, int64_t output, int64_t input) {
    int64_t inputs = kind == MXFP4 ? 32 : kind == FP8 ? 128 : 64;
    int64_t blocks = (w->inner + inputs - 1) / inputs;
    int64_t at = kind == INT8 ? output
        : (kind == FP8 ? output / 128 : output) * blocks + input / inputs;
    if (kind == MXFP4) /* a code of 0 stands for 2^-127, a subnormal number */
        return from_bits(w->scales[at] ? (uint32_t)w->scales[at] << 23 : 1u << 22);
    if (kind != NF4_DOUBLE)
        return float_at(w->scales, at);
    int64_t index = w->first_scale + output * w->apart + input / inputs;
    float product = w->dynamic[w->scales[at]] * float_at(w->nested, index / 256);
    __asm__("" : "+x"(product)); /* rounded before the sum, as in torch */
    return product + float_at(w->nested, w->added);
}

/* Decodes `count` values, at most RUN, of one block. */
static inline void decode_plain(int kind, const Weight *w, int64_t output, int64_t input, int count,
                                float *to) {
    float scale = scale_of(kind, w, output, input);
    if (is_4_bits(kind)) {
        const uint8_t *codes = w->codes + (output * w->inner + input) / 2;
        for (int i = 0; i < count / 2; i++)
            memcpy(to + 2 * i, w->numbers + 2 * codes[i], 2 * sizeof *to);
    } else {
        const uint8_t *codes = w->codes + output * w->inner + input;
        for (int i = 0; i < count; i++)
            to[i] = kind == INT8 ? (float)(int8_t)codes[i] : w->numbers[codes[i]];
    }
#pragma omp simd
    for (int i = 0; i < count; i++)
        to[i] *= scale;
}

#ifdef __AVX512BF16__
static inline __m512i rounded(__m512 low, __m512 high, float scale) {
    __m512 all = _mm512_set1_ps(scale);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, all), _mm512_mul_ps(low, all));
}

/* Decodes RUN values. The 16 values of 4-bit codes are scaled and rounded before codes are read. */
static inline __m512i decode_run(int kind, const Weight *w, int64_t output, int64_t input) {
    float scale = scale_of(kind, w, output, input);
    if (is_4_bits(kind)) {
        const uint8_t *codes = w->codes + (output * w->inner + input) / 2;
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        /* bits above the lowest four of each word have no effect, because both halves are equal */
        __m512i index = kind == MXFP4
            ? _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12))
            : _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
        __m512 numbers = _mm512_loadu_ps(w->numbers + 512);
        __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(numbers, _mm512_set1_ps(scale)));
        return _mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(values));
    }
    const uint8_t *codes = w->codes + output * w->inner + input;
    if (kind == INT8) {
        const __m128i *signed_codes = (const __m128i *)codes;
        return rounded(
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(signed_codes))),
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(signed_codes + 1))), scale);
    }
    /* e4m3 bits are float16 bits whose value is 2^8 too small; 127 is a NaN */
    __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(127));
    __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(127));
    __m512i half = _mm512_or_si512(_mm512_slli_epi16(magnitude, 7), _mm512_slli_epi16(
        _mm512_sub_epi16(words, magnitude), 8));
    half = _mm512_mask_set1_epi16(half, is_nan, 0x7e00);
    return rounded(_mm512_cvtph_ps(_mm512_castsi512_si256(half)),
                   _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), scale * 256.0f);
}
#endif

typedef struct {
    Weight weight;
    int64_t first;  /* the first output */
    void *to;       /* [outputs, inner], bfloat16 or float32 */
    int is_bfloat16;
} Decoding;

static inline __attribute__((always_inline)) void decode_outputs(int kind, const Decoding *d,
                                                                 int64_t first, int64_t end) {
    const Weight *w = &d->weight;
    for (int64_t row = first; row < end; row++)
        for (int64_t input = 0; input < w->inner; input += RUN) {
            int count = w->inner - input < RUN ? (int)(w->inner - input) : RUN;
            int64_t at = row * w->inner + input;
            float values[RUN];
#ifdef __AVX512BF16__
            if (d->is_bfloat16 && count == RUN) {
                _mm512_storeu_si512((uint16_t *)d->to + at,
                                    decode_run(kind, w, d->first + row, input));
                continue;
            }
#endif
            decode_plain(kind, w, d->first + row, input, count, values);
            if (d->is_bfloat16)
                write_bfloat16((uint16_t *)d->to + at, values, count);
            else
                write_float32((float *)d->to + at, values, count);
        }
}

/* Calls a function with a constant kind, for which the compiler removes all other kinds. */
#define FOR_EACH_KIND(kind, call, ...)                                                             \
    switch (kind) {                                                                                \
    case NF4: call(NF4, __VA_ARGS__); break;                                                       \
    case NF4_DOUBLE: call(NF4_DOUBLE, __VA_ARGS__); break;                                         \
    case MXFP4: call(MXFP4, __VA_ARGS__); break;                                                   \
    case FP8: call(FP8, __VA_ARGS__); break;                                                       \
    default: call(INT8, __VA_ARGS__);                                                              \
    }

static void decode_part(const void *work, int64_t first, int64_t end) {
    const Decoding *d = work;
    FOR_EACH_KIND(d->weight.kind, decode_outputs, d, first, end)
}

void decode(const Weight *weight, int64_t first, int64_t outputs, void *to, int is_bfloat16,
            int threads) {
    Decoding work = {*weight, first, to, is_bfloat16};
    run(decode_part, &work, outputs, threads);
}

/* The rows of one expert, and their products. */
typedef struct {
    Weight weight;
    const uint16_t *rows; /* [count, depth] */
    uint16_t *out;        /* [count, breadth] */
    int64_t count;
    uint16_t *packed;     /* the tiles of the rows, [tiles of 16 rows, depth / RUN, TILE] */
} Job;

/* depth is the number of values of a row, breadth that of a product. */
typedef struct {
    Job *jobs;
    int64_t depth, breadth, panels, panel_size, number, *next;
    int back; /* whether rows are multiplied by transposed weights */
    uint16_t *memory; /* a panel of `panel_size` values for each thread */
} Products;

#if defined(AMX) && defined(__AVX512BF16__)
#define TILES __attribute__((target("amx-tile,amx-bf16")))

static inline void transpose(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 8; i++) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            y[8 * j + i] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + 4 + i], 0x88);
            y[8 * j + 4 + i] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
    }
}

/* Copies rows to tiles. The second operand of an AMX product contains pairs of values of a row in
 * each column, so rows that are multiplied from the right are transposed. */
static void pack(const void *work, int64_t first, int64_t end) {
    const Products *p = work;
    (void)first, (void)end;
    for (int64_t i; (i = __atomic_fetch_add(p->next, 1, __ATOMIC_RELAXED)) < p->number;) {
        const Job *job = p->jobs + i;
        uint16_t *to = job->packed;
        for (int64_t row = 0; row < job->count; row += ACROSS)
            for (int64_t at = 0; at < p->depth; at += RUN, to += TILE) {
                __m512i x[ACROSS];
                for (int r = 0; r < ACROSS; r++)
                    x[r] = row + r < job->count
                        ? _mm512_loadu_si512(job->rows + (row + r) * p->depth + at)
                        : _mm512_setzero_si512();
                if (!p->back)
                    transpose(x);
                for (int r = 0; r < ACROSS; r++)
                    _mm512_storeu_si512(to + r * RUN, x[r]);
            }
    }
}

#define AHEAD 64 /* outputs whose codes are fetched while others are decoded */

/* Fetches the codes of an output; `size` is the number of bytes of all codes. */
static inline void fetch(const uint8_t *codes, int64_t at, int64_t bytes, int64_t size) {
    for (int64_t line = 0; line < bytes && at + line < size; line += 64)
        __builtin_prefetch(codes + at + line);
}

/* Decodes the columns of the product from `start` on: tiles [depth / RUN, across, TILE]. */
static inline __attribute__((always_inline)) void decode_panel(
    int kind, const Weight *w, int back, int64_t start, int64_t across, uint16_t *to) {
    int64_t step = across * TILE, each = is_4_bits(kind) ? w->inner / 2 : w->inner;
    int64_t run_bytes = is_4_bits(kind) ? RUN / 2 : RUN, size = w->outer * each;
    if (!back) {
        /* a few runs of each output, because runs of a whole output have the same place in the
         * cache */
        for (int64_t o = 0; o < across * ACROSS; o += ACROSS)
            for (int64_t input = 0; input < w->inner; input += 4 * RUN)
                for (int64_t r = o; r < o + ACROSS; r++) {
                    fetch(w->codes, (start + r + ACROSS) * each + input / RUN * run_bytes,
                          4 * run_bytes, size);
                    for (int64_t i = input; i < input + 4 * RUN && i < w->inner; i += RUN)
                        _mm512_storeu_si512(to + i / RUN * step + r * RUN,
                                            decode_run(kind, w, start + r, i));
                }
        return;
    }
    /* each row of a tile contains the values of two outputs in turn */
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                   39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t o = 0; o < w->outer; o += 2) {
        for (int64_t next = o + AHEAD; next < o + AHEAD + 2; next++)
            fetch(w->codes, next * each + start / RUN * run_bytes, across / 2 * run_bytes, size);
        uint16_t *row = to + o / RUN * step + o % RUN / 2 * RUN;
        for (int64_t i = 0; i < across; i += 2, row += 2 * TILE) {
            __m512i a = decode_run(kind, w, o, start + i * ACROSS);
            __m512i b = decode_run(kind, w, o + 1, start + i * ACROSS);
            _mm512_storeu_si512(row, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(row + TILE, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

#define ZERO(tile) _tile_zero(tile);
#define LOAD(tile, from) _tile_loadd(tile, from, 64);
#define STORE(tile) _tile_stored(tile, sums + 256 * tile, 64);
#define MULTIPLY(sum, w, x)                                                                        \
    if (back) {                                                                                    \
        _tile_dpbf16ps(sum, x, w);                                                                 \
    } else {                                                                                       \
        _tile_dpbf16ps(sum, w, x);                                                                 \
    }

/* Sums products of tiles: two tiles across the weight, and one or two tiles of rows. */
TILES static inline __attribute__((always_inline)) void tile_products(
    const uint16_t *w, int64_t w_step, const uint16_t *x, int64_t x_next, int64_t steps, int back,
    int both, float *sums) {
    ZERO(0) ZERO(1) ZERO(2) ZERO(3)
    for (int64_t k = 0; k < steps; k++, w += w_step, x += TILE) {
        LOAD(4, w) LOAD(5, w + TILE) LOAD(6, x)
        MULTIPLY(0, 4, 6) MULTIPLY(1, 5, 6)
        if (!both)
            continue;
        LOAD(7, x + x_next) MULTIPLY(2, 4, 7) MULTIPLY(3, 5, 7)
    }
    STORE(0) STORE(1)
    if (both) {
        STORE(2) STORE(3)
    }
}

static void store(const Products *p, const Job *job, int64_t row, int64_t column,
                  const float *sums) {
    for (int half = 0; half < 2; half++) {
        __m512i x[ACROSS];
        for (int r = 0; r < ACROSS; r++)
            x[r] = _mm512_loadu_si512(sums + 256 * half + ACROSS * r);
        if (!p->back)
            transpose(x);
        for (int r = 0; r < ACROSS && row + r < job->count; r++)
            _mm256_storeu_si256(
                (__m256i *)(job->out + (row + r) * p->breadth + column + ACROSS * half),
                (__m256i)_mm512_cvtneps_pbh((__m512)x[r]));
    }
}

TILES static void multiply(const void *work, int64_t first, int64_t end) {
    const Products *p = work;
    (void)first, (void)end; /* any free thread takes the next panel */
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++)
        shape.bytes[i] = 64, shape.rows[i] = ACROSS;
    _tile_loadconfig(&shape);
    uint16_t *panel = p->memory + p->panel_size * thread_number();
    float sums[4 * 256] __attribute__((aligned(64)));
    int64_t steps = p->depth / RUN;
    for (int64_t i; (i = __atomic_fetch_add(p->next, 1, __ATOMIC_RELAXED)) < p->number;) {
        const Job *job = p->jobs + i / p->panels;
        int64_t start = i % p->panels * PANEL * ACROSS, left = (p->breadth - start) / ACROSS;
        int64_t across = left < PANEL ? left : PANEL;
        FOR_EACH_KIND(job->weight.kind, decode_panel, &job->weight, p->back, start, across, panel)
        for (int64_t row = 0; row < job->count; row += 2 * ACROSS)
            for (int64_t tile = 0; tile < across; tile += 2) {
                const uint16_t *w = panel + tile * TILE, *x = job->packed + row * p->depth;
                int both = row + ACROSS < job->count;
                if (p->back && both)
                    tile_products(w, across * TILE, x, steps * TILE, steps, 1, 1, sums);
                else if (p->back)
                    tile_products(w, across * TILE, x, 0, steps, 1, 0, sums);
                else if (both)
                    tile_products(w, across * TILE, x, steps * TILE, steps, 0, 1, sums);
                else
                    tile_products(w, across * TILE, x, 0, steps, 0, 0, sums);
                store(p, job, row, start + tile * ACROSS, sums);
                if (both)
                    store(p, job, row + ACROSS, start + tile * ACROSS, sums + 512);
            }
    }
    _tile_release();
}

/* Multiplies the rows of all jobs. All rows are packed first; packing again for each panel would
 * take longer than some products. */
void multiply_rows(Job *jobs, int64_t number, int64_t depth, int64_t breadth, int back,
                   uint16_t *panels, int64_t panel_size, int threads) {
    int64_t next = 0, across = (breadth + PANEL * ACROSS - 1) / (PANEL * ACROSS);
    Products work = {jobs, depth, breadth, across, panel_size, number, &next, back, panels};
    run(pack, &work, number, threads);
    next = 0, work.number = number * across;
    run(multiply, &work, work.number, threads);
}

#include <sys/syscall.h>
#include <unistd.h>

/* Asks the system for permission to use AMX tiles, once per process. */
int multiplies(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#else
int multiplies(void) { return 0; }
#endif
