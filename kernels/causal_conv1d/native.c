/* The short causal convolution with its bias and SiLU in one pass over channels-last tokens; nothing is padded.

   A task owns a block of channels of some tokens in a row, for one direction or both: what the taps of neighbouring
   tokens share, and what the directions do, is read from the first-level cache. */

#include <math.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define TOKENS 64    /* of a task, at most */
#define CHANNELS 128 /* of a task: its taps and the rows that they meet fill a quarter of the first-level cache */
#define TAPS 4       /* of a pass, the usual width; wider ones take more passes */

#ifdef BF16 /* of x and y: the upper half of a float; all taps fit a pass */
typedef uint16_t number;
#else
typedef float number;
#endif

/* x (images, length, channels), the last dimension without gaps; weight (directions, channels, width) in any layout;
   bias dense or null; y (directions, images, length, channels) dense. Distances are in elements. `reverse` is that of
   the first direction, a second one runs the other way. */
typedef struct {
    const number *x;
    int64_t image, token;
    const float *weight;
    int64_t direction, channel, tap;
    const float *bias;
    number *y;
    int64_t directions, images, length, channels, width, reverse, silu, threads;
} problem;

typedef struct {
    int64_t image, token, tokens, channel, channels;
} task;

/* x + ROUND has round(x) in its low bits, and those of ROUND itself leave when they are shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

/* e^-x for x >= 0 to 1e-7 of itself; beyond 87 it is that of 87 */
INLINE float decay_of(float x) {
    x = 87.0f < x ? -87.0f : -x; /* in this order a NaN stays */
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

/* x / (1 + e^-x); 1 / (1 + e) for 0 <= e <= 1 is a parabola to 1/99 of itself, squared by each step of Newton's: a
   division would take as long as all of it */
INLINE float silu_of(float x) {
    float e = decay_of(fabsf(x)), d = 1.0f + e, below = x * e;
    float r = 9.89898990e-1f + e * (e * 3.23232323e-1f - 8.08080808e-1f);
    r *= 2.0f - d * r;
    r *= 2.0f - d * r;
    return (x > 0.0f ? x : below) * r;
}

INLINE float widened(number x) {
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

INLINE number rounded(float x) {
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

/* y = sum + the taps times the rows that they meet; sum may be y */
INLINE void convolve(
    number *y, const float *sum, float (*taps)[CHANNELS], const number *const *rows, int64_t channels, int silu) {
#pragma omp simd
    for (int64_t i = 0; i < channels; i++) {
        float total = sum[i];
#pragma GCC unroll 4
        for (int64_t k = 0; k < TAPS; k++) total += taps[k][i] * widened(rows[k][i]);
        y[i] = rounded(silu ? silu_of(total) : total);
    }
}

/* The taps [first, + TAPS) of a direction, 0 beyond the last. */
static void read_taps(float (*taps)[CHANNELS], const problem *p, const task *a, int64_t direction, int64_t first) {
    const float *weight = p->weight + direction * p->direction + a->channel * p->channel;
    for (int64_t k = 0; k < TAPS; k++)
        for (int64_t i = 0; i < a->channels; i++)
            taps[k][i] = first + k < p->width ? weight[i * p->channel + (first + k) * p->tap] : 0.0f;
}

/* One pass over the tokens of a task in one direction. */
static void pass(const problem *p, const task *a, int64_t direction, int64_t first) {
    static const float no_bias[CHANNELS];
    static const number nothing[CHANNELS];
    _Alignas(64) float taps[TAPS][CHANNELS];
    read_taps(taps, p, a, direction, first);
    const number *x = p->x + a->image * p->image + a->channel;
    const float *bias = p->bias ? p->bias + direction * p->channels + a->channel : no_bias;
    int64_t back = (p->reverse + direction) % 2 ? 1 : -1, sequence = direction * p->images + a->image;
    int silu = p->silu && first + TAPS >= p->width;
    for (int64_t t = a->token; t < a->token + a->tokens; t++) {
        number *y = p->y + (sequence * p->length + t) * p->channels + a->channel;
        const number *rows[TAPS];
        for (int64_t k = 0; k < TAPS; k++) {
            int64_t source = t + back * (p->width - 1 - first - k);
            rows[k] = first + k < p->width && source >= 0 && source < p->length ? x + source * p->token : nothing;
        }
        const float *sum = first ? (const float *)y : bias;
        if (silu) convolve(y, sum, taps, rows, a->channels, 1);
        else convolve(y, sum, taps, rows, a->channels, 0);
    }
}

static int64_t at_most(int64_t n, int64_t limit) {
    return n < limit ? n : limit;
}

PUBLIC void causal_conv1d(const problem *p) {
    int threads = (int)p->threads;
    int64_t tiles = (p->length + TOKENS - 1) / TOKENS, even = tiles ? (p->length + tiles - 1) / tiles : 0;
#pragma omp parallel for collapse(3) num_threads(threads) schedule(static)
    for (int64_t image = 0; image < p->images; image++)
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t i = 0; i < p->channels; i += CHANNELS) {
                int64_t t = tile * even;
                task a = {image, t, at_most(p->length - t, even), i, at_most(p->channels - i, CHANNELS)};
                for (int64_t direction = 0; direction < p->directions; direction++)
                    for (int64_t first = 0; first < p->width; first += TAPS) pass(p, &a, direction, first);
            }
}
