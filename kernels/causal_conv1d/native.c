/* The short causal convolution with its bias and SiLU in one pass over channels-last tokens; nothing is padded. */

#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define TILE 8     /* tokens of a task; the rows that they share stay in the first-level cache */
#define UNROLLED 4 /* the usual width, for which the taps of a channel are added up in registers */

/* x (images, length, channels), the last dimension without gaps, the other distances in elements; taps (width,
   channels); bias (channels,); y dense. The taps reach back, or ahead where `reverse`. */
typedef struct {
    const float *x;
    int64_t image, token;
    const float *taps, *bias;
    float *y;
    int64_t images, length, channels, width, silu, reverse, threads;
} problem;

/* x + ROUND has round(x) in its low bits, and those of ROUND itself leave when they are shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

/* e^x to 1e-7 of itself, clamped to what a float holds */
INLINE float exp_of(float x) {
    x = -87.0f > x ? -87.0f : x; /* in this order a NaN stays */
    x = 88.0f < x ? 88.0f : x;
    union {
        float real;
        uint32_t bits;
    } n = {x * LOG2_E + ROUND}, p;
    float rest = (x * LOG2_E - (n.real - ROUND)) + x * LOG2_E_REST;
    p.real = 1.33988750e-3f + rest * 1.53533328e-4f;
    p.real = 5.55033237e-2f + rest * (9.61843785e-3f + rest * p.real);
    p.real = 1.0f + rest * (6.93147182e-1f + rest * (2.40226477e-1f + rest * p.real));
    p.bits += n.bits << 23;
    return p.real;
}

INLINE float silu_of(float x) {
    return x / (1.0f + exp_of(-x));
}

/* One token of the usual width in one pass; tap k meets the token (UNROLLED - 1 - k) `step`s from x. */
INLINE void convolve_four(
    float *restrict y, const float *restrict x, const float *restrict taps, const float *restrict bias, int64_t step,
    int64_t channels, int silu) {
#pragma omp simd
    for (int64_t i = 0; i < channels; i++) {
        float sum = bias[i];
#pragma GCC unroll 4
        for (int64_t k = 0; k < UNROLLED; k++) sum += taps[k * channels + i] * x[(UNROLLED - 1 - k) * step + i];
        y[i] = silu ? silu_of(sum) : sum;
    }
}

/* One token of any width, or near an end, where the taps before `first` meet no token. */
static void convolve_any(
    float *restrict y, const float *restrict x, const float *restrict taps, const float *restrict bias, int64_t step,
    int64_t channels, int64_t first, int64_t width, int silu) {
    memcpy(y, bias, (size_t)channels * sizeof(float));
    for (int64_t k = first; k < width; k++)
#pragma omp simd
        for (int64_t i = 0; i < channels; i++) y[i] += taps[k * channels + i] * x[(width - 1 - k) * step + i];
    if (!silu) return;
#pragma omp simd
    for (int64_t i = 0; i < channels; i++) y[i] = silu_of(y[i]);
}

static void convolve(const problem *p, int64_t image, int64_t t) {
    float *y = p->y + (image * p->length + t) * p->channels;
    const float *x = p->x + image * p->image + t * p->token;
    int64_t seen = p->reverse ? p->length - t : t + 1, step = p->reverse ? p->token : -p->token;
    int64_t first = seen < p->width ? p->width - seen : 0;
    if (p->width != UNROLLED || first)
        convolve_any(y, x, p->taps, p->bias, step, p->channels, first, p->width, (int)p->silu);
    else if (p->silu) convolve_four(y, x, p->taps, p->bias, step, p->channels, 1);
    else convolve_four(y, x, p->taps, p->bias, step, p->channels, 0);
}

PUBLIC void causal_conv1d(const problem *p) {
    int threads = (int)p->threads;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t image = 0; image < p->images; image++)
        for (int64_t start = 0; start < p->length; start += TILE)
            for (int64_t t = start; t < start + TILE && t < p->length; t++) convolve(p, image, t);
}
