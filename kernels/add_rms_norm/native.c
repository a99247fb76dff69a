/* The sum of two rows and its root mean square norm, computed row by row, so that the second read hits the cache. */

#include <math.h>

#include "../common.h"

#define WORTH_A_THREAD 4096 /* numbers per thread; with fewer, one thread finishes before a second has woken up */

#ifdef BF16 /* the type of hidden and normed: the upper half of a float */
typedef uint16_t number;
#else
typedef float number;
#endif

/* everything except weight (dim,) is (rows, dim), all contiguous; residual may be null */
typedef struct {
    const number *hidden;
    const float *residual, *weight;
    number *normed;
    float *total;
    int64_t rows, dim, threads;
    float eps;
} problem;

static inline float widened(number x) {
#ifdef BF16
    union {
        uint32_t bits;
        float real;
    } wide = {(uint32_t)x << 16};
    return wide.real;
#else
    return x;
#endif
}

static inline number rounded(float x) {
#ifdef BF16
    union {
        float real;
        uint32_t bits;
    } wide = {x};
    uint32_t even = wide.bits + 0x7fff + (wide.bits >> 16 & 1);
    return (number)((x == x ? even : wide.bits | 1 << 22) >> 16);
#else
    return x;
#endif
}

/* Writes the sum and returns the mean of its squares. */
static float add(float *restrict total, const number *restrict hidden, const float *restrict residual, int64_t dim) {
    float squares = 0;
    if (residual) {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; i++) {
            total[i] = residual[i] + widened(hidden[i]);
            squares += total[i] * total[i];
        }
    } else {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; i++) {
            total[i] = widened(hidden[i]);
            squares += total[i] * total[i];
        }
    }
    return squares / (float)dim;
}

static void scale(
    number *restrict normed, const float *restrict total, const float *restrict weight, int64_t dim, float by) {
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) normed[i] = rounded(total[i] * by * weight[i]);
}

PUBLIC void add_rms_norm(const problem *p) {
    int64_t worth = p->rows * p->dim / WORTH_A_THREAD + 1;
    int threads = (int)(worth < p->threads ? worth : p->threads);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < p->rows; row++) {
        float *total = p->total + row * p->dim;
        const float *residual = p->residual ? p->residual + row * p->dim : 0;
        float mean = add(total, p->hidden + row * p->dim, residual, p->dim);
        scale(p->normed + row * p->dim, total, p->weight, p->dim, 1.0f / sqrtf(mean + p->eps));
    }
}
