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

/* x (images, length, channels), the last dimension without gaps; weight (directions, channels, width) in any layout;
   bias dense or null; y (directions, images, length, channels) dense. Distances are in elements. `reverse` is that of
   the first direction, a second one runs the other way. */
typedef struct {
    const float *x;
    int64_t image, token;
    const float *weight;
    int64_t direction, channel, tap;
    const float *bias;
    float *y;
    int64_t directions, images, length, channels, width, reverse, silu, threads;
} problem;

typedef struct {
    int64_t image, token, tokens, channel, channels;
} task;

/* x + ROUND has round(x) in its low bits, and those of ROUND itself leave when they are shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

/* e^x to 1e-7 of itself for |x| <= 87, and beyond that of its nearer end; one bound on both sides, because of two GCC
   makes branches, which cost it the vectors */
INLINE float exp_of(float x) {
    float size = fabsf(x);
    x = copysignf(87.0f < size ? 87.0f : size, x); /* in this order a NaN stays */
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

/* y = sum + the taps times the rows that they meet; sum may be y */
INLINE void convolve(
    float *y, const float *sum, float (*taps)[CHANNELS], const float *const *rows, int64_t channels, int silu) {
#pragma omp simd
    for (int64_t i = 0; i < channels; i++) {
        float total = sum[i];
#pragma GCC unroll 4
        for (int64_t k = 0; k < TAPS; k++) total += taps[k][i] * rows[k][i];
        y[i] = silu ? silu_of(total) : total;
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
    static const float nothing[CHANNELS];
    _Alignas(64) float taps[TAPS][CHANNELS];
    read_taps(taps, p, a, direction, first);
    const float *x = p->x + a->image * p->image + a->channel;
    const float *bias = p->bias ? p->bias + direction * p->channels + a->channel : nothing;
    int64_t back = (p->reverse + direction) % 2 ? 1 : -1, sequence = direction * p->images + a->image;
    int silu = p->silu && first + TAPS >= p->width;
    for (int64_t t = a->token; t < a->token + a->tokens; t++) {
        float *y = p->y + (sequence * p->length + t) * p->channels + a->channel;
        const float *rows[TAPS];
        for (int64_t k = 0; k < TAPS; k++) {
            int64_t source = t + back * (p->width - 1 - first - k);
            rows[k] = first + k < p->width && source >= 0 && source < p->length ? x + source * p->token : nothing;
        }
        if (silu) convolve(y, first ? y : bias, taps, rows, a->channels, 1);
        else convolve(y, first ? y : bias, taps, rows, a->channels, 0);
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
