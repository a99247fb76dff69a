/* Products with a packed weight, y = x W^T: a tile of rows and outputs stays in registers over the inner dimension,
   and a panel of the weight, stored in the order in which it is read, is used for all rows before the next one. */

#include "../rows.h"

#if defined __AVX512F__ || defined __aarch64__ /* the sums, a step of the panel and a number of x fit in 32 registers */
#define ROWS 8
#else
#define ROWS 4
#endif
#define VECTORS 3
#define PANEL (VECTORS * LANES) /* outputs per panel; the last panel may have fewer vectors */
#define WIDEST 16               /* the number of packed outputs is a multiple of this, for any LANES */

/* A step of the inner dimension is one number or, in bfloat16, the two that an instruction multiplies and adds:
   its inner dimension is even. */
#ifdef BF16
#define STEP 2
typedef whole step;
#else
#define STEP 1
typedef lanes step;
#endif
typedef step unaligned_step __attribute__((aligned(4), may_alias));

/* x (groups, rows, inner) and y (groups, rows, outer), with a contiguous last dimension; packed (groups, panels, steps,
   outputs of the panel, STEP). Strides are in elements. */
typedef struct {
    const number *x;
    int64_t x_group, x_row;
    const number *packed;
    number *y;
    int64_t y_group, y_row;
    int64_t groups, rows, inner, outer, threads;
} problem;

static int64_t parts_of(int64_t n, int64_t part) {
    return (n + part - 1) / part;
}

static int64_t size_of_a_group(int64_t inner, int64_t outer) {
    return inner * parts_of(outer, WIDEST) * WIDEST;
}

static int64_t vectors_of(int64_t outer, int64_t first) {
    return at_most(parts_of(outer - first, LANES), VECTORS);
}

INLINE step same_step(const number *x) {
#ifdef BF16
    int32_t both;
    memcpy(&both, x, sizeof both);
    return (whole){0} + both;
#else
    return every(*x);
#endif
}

INLINE lanes added(lanes sum, step x, step weight) {
#if defined BF16 && defined __AVX512BF16__
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weight);
#elif defined BF16
    sum += (lanes)(x << 16) * (lanes)(weight << 16);
    return sum + (lanes)(x & ~0xffff) * (lanes)(weight & ~0xffff);
#else
    return sum + x * weight;
#endif
}

/* Adds the products of step i of the inner dimension to the sums. */
INLINE void advance(lanes (*sum)[VECTORS], const number *const *x, const number *weight, int64_t i, int64_t vectors) {
    step w[VECTORS];
    const number *at = weight + i * vectors * LANES * STEP;
    for (int64_t j = 0; j < vectors; j++) w[j] = *(const unaligned_step *)(at + j * LANES * STEP);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; r++) {
        step same = same_step(x[r] + i * STEP);
        for (int64_t j = 0; j < vectors; j++) sum[r][j] = added(sum[r][j], same, w[j]);
    }
}

INLINE void write(number *to, lanes sum, int64_t width) {
    numbers at = rounded(sum);
    if (width == LANES) *(unaligned *)to = at;
    else memcpy(to, &at, (size_t)width * sizeof *to);
}

INLINE void multiply(
    const number *const *x, const number *weight, number *const *y, int64_t steps, int64_t outer, int64_t vectors) {
    lanes sum[ROWS][VECTORS] = {0};
    int64_t last = at_most(outer - (vectors - 1) * LANES, LANES);
    for (int64_t i = 0; i < steps; i++) advance(sum, x, weight, i, vectors);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; r++) {
        for (int64_t j = 0; j + 1 < vectors; j++) write(y[r] + j * LANES, sum[r][j], LANES);
        write(y[r] + (vectors - 1) * LANES, sum[r][vectors - 1], last);
    }
}

/* A tile of ROWS rows, which may end with repetitions of the last row, and of the outputs [first, + vectors LANES). */
static void multiply_tile(const problem *p, int64_t group, int64_t row, int64_t first) {
    const number *x[ROWS], *weight = p->packed + group * size_of_a_group(p->inner, p->outer);
    number *y[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
        int64_t at = at_most(row + r, p->rows - 1);
        x[r] = p->x + group * p->x_group + at * p->x_row;
        y[r] = p->y + group * p->y_group + at * p->y_row + first;
    }
    weight += p->inner * first;
    int64_t steps = p->inner / STEP;
    switch (vectors_of(p->outer, first)) {
    case 1: multiply(x, weight, y, steps, p->outer - first, 1); break;
    case 2: multiply(x, weight, y, steps, p->outer - first, 2); break;
    default: multiply(x, weight, y, steps, p->outer - first, VECTORS);
    }
}

PUBLIC void packed_linear(const problem *p) {
    int threads = (int)p->threads;
#pragma omp parallel for collapse(3) num_threads(threads) schedule(static)
    for (int64_t group = 0; group < p->groups; group++)
        for (int64_t first = 0; first < p->outer; first += PANEL)
            for (int64_t row = 0; row < p->rows; row += ROWS) multiply_tile(p, group, row, first);
}

/* Packs a contiguous weight (groups, outer, inner), padded with zeros. */
PUBLIC void pack(const number *weight, number *packed, int64_t groups, int64_t outer, int64_t inner) {
    memset(packed, 0, (size_t)(groups * size_of_a_group(inner, outer)) * sizeof *packed);
    for (int64_t group = 0; group < groups; group++)
        for (int64_t n = 0; n < outer; n++) {
            int64_t first = n / PANEL * PANEL, width = vectors_of(outer, first) * LANES;
            number *to = packed + group * size_of_a_group(inner, outer) + inner * first;
            for (int64_t k = 0; k < inner; k++)
                to[(k / STEP * width + n - first) * STEP + k % STEP] = weight[(group * outer + n) * inner + k];
        }
}
