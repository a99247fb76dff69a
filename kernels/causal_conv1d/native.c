/* The short causal convolution with its bias and SiLU in one pass over channels-last tokens, without padding.

   A task owns a block of channels of several successive tokens, for one direction or both: inputs shared by the taps of
   neighbouring tokens, or by the directions, are read from the first-level cache. */

#include <string.h>

#include "../rows.h"

#define TOKENS 64 /* maximum tokens per task */
#define ROWS 8    /* blocks of CHANNELS channels per task: their taps fill a quarter of the first-level cache */
#define TAPS 4    /* taps per pass, the usual width; wider windows take several passes */
#define AHEAD 4   /* prefetch distance in tokens */

/* x (images, length, channels), with a contiguous last dimension; weight (directions, channels, width) in any layout;
   bias contiguous or null; y (directions, images, length, channels) contiguous. Strides are in elements. `reverse` is
   for the first direction, a second one runs the other way. In bfloat16 all taps fit in one pass. */
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

/* One number for each channel of a task. */
static void read_parameter(row *to, const float *from, int64_t distance, int64_t channels) {
    for (int64_t i = 0; i < channels; i++) ((float *)to)[i] = from[i * distance];
}

/* y = sum + the taps times their rows */
INLINE void convolve(
    number *y, row sum, row (*taps)[ROWS], const number *const *rows, int64_t i, int64_t width, int silu) {
    for (int64_t k = 0; k < TAPS; k++) {
        row x = read_row(rows[k] + i * CHANNELS, width);
        for (int64_t j = 0; j < PARTS; j++) sum.part[j] += taps[k][i].part[j] * x.part[j];
    }
    for (int64_t j = 0; silu && j < PARTS; j++) sum.part[j] = silu_of(sum.part[j]);
    write_row(y + i * CHANNELS, &sum, width);
}

/* One pass over a task's tokens in one direction. */
INLINE void pass(const problem *p, const task *a, int64_t direction, int64_t first, int silu) {
    static const number nothing[ROWS * CHANNELS];
    row taps[TAPS][ROWS] = {0}, bias[ROWS] = {0};
    const float *weight = p->weight + direction * p->direction + a->channel * p->channel;
    for (int64_t k = 0; k < at_most(p->width - first, TAPS); k++)
        read_parameter(taps[k], weight + (first + k) * p->tap, p->channel, a->channels);
    if (p->bias) read_parameter(bias, p->bias + direction * p->channels + a->channel, 1, a->channels);
    const number *x = p->x + a->image * p->image + a->channel;
    int64_t back = (p->reverse + direction) % 2 ? 1 : -1, sequence = direction * p->images + a->image;
    for (int64_t t = a->token; t < a->token + a->tokens; t++) {
        number *y = p->y + (sequence * p->length + t) * p->channels + a->channel;
        const number *rows[TAPS];
        for (int64_t k = 0; k < TAPS; k++) {
            int64_t source = t + back * (p->width - 1 - first - k);
            rows[k] = first + k < p->width && source >= 0 && source < p->length ? x + source * p->token : nothing;
        }
        for (int64_t i = 0, left = a->channels; left > 0; i++, left -= CHANNELS) {
            __builtin_prefetch(x + (t + AHEAD) * p->token + i * CHANNELS, 0);
            __builtin_prefetch(y + AHEAD * p->channels + i * CHANNELS, 1);
            row sum = first ? read_row(y + i * CHANNELS, at_most(left, CHANNELS)) : bias[i];
            if (left >= CHANNELS) convolve(y, sum, taps, rows, i, CHANNELS, silu);
            else convolve(y, sum, taps, rows, i, left, silu);
        }
    }
}

PUBLIC void causal_conv1d(const problem *p) {
    int threads = (int)p->threads;
    int64_t tiles = (p->length + TOKENS - 1) / TOKENS, even = tiles ? (p->length + tiles - 1) / tiles : 0;
#pragma omp parallel for collapse(3) num_threads(threads) schedule(static)
    for (int64_t image = 0; image < p->images; image++)
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t i = 0; i < p->channels; i += ROWS * CHANNELS) {
                int64_t t = tile * even;
                task a = {image, t, at_most(p->length - t, even), i, at_most(p->channels - i, ROWS * CHANNELS)};
                for (int64_t direction = 0; direction < p->directions; direction++)
                    for (int64_t first = 0; first < p->width; first += TAPS) {
                        if (p->silu && first + TAPS >= p->width) pass(p, &a, direction, first, 1);
                        else pass(p, &a, direction, first, 0);
                    }
            }
}
