/* The selective scan, serial in tokens: a task owns the states of LANES channels of one image and direction and walks
   the sequence tile by tile, so that only u, delta, B, C, z are read and y is written, each once for every 16 states.

   A direction that runs in reverse reads its tokens from the last to the first; nothing is flipped. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16  /* channels of a task, one a vector lane: a cache line of a token */
#define STATES 16 /* states that a pass carries; more are summed up in further passes */
#define TILE 16   /* tokens between reading and writing: their inputs stay in the first-level cache */

/* (directions, images, length, n), the last dimension without gaps; distances in elements, `at` null where absent */
typedef struct {
    const float *at;
    int64_t direction, image, token;
} tokens;

/* A (directions, channels, states); D and bias (directions, channels) or null; y (directions, images, length, channels)
   `reverse` is that of the first direction, a second one runs the other way */
typedef struct {
    tokens u, delta, B, C, z;
    const float *A, *D, *bias;
    float *y;
    int64_t directions, images, length, channels, states, softplus, reverse, threads;
} problem;

typedef struct {
    int64_t direction, image, channel, width, first, count; /* channels [channel, + width), states [first, + count) */
} task;

typedef struct {
    float rate[STATES][LANES], h[STATES][LANES]; /* A log2(e), and the states */
    float fastest[LANES], D[LANES], bias[LANES]; /* fastest: max |rate| of a channel */
    float u[TILE][LANES], delta[TILE][LANES], x[TILE][LANES], y[TILE][LANES]; /* x = delta u */
    float B[TILE][STATES], C[TILE][STATES];
} workspace;

#define REACH 125.0f /* 2^x needs no clamp for |x| below it */
/* x + ROUND has round(x) in its low bits, and those of ROUND itself leave when they are shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

INLINE float clamped(float x, float low, float high) {
    x = low > x ? low : x; /* in this order a NaN stays */
    return high < x ? high : x;
}

/* 2^(n + rest) for |rest| <= 1/2 and shifted = n + ROUND, to 9e-8 of itself */
INLINE float power(float rest, float shifted) {
    union {
        float real;
        uint32_t bits;
    } n = {shifted}, p;
    p.real = 1.33988750e-3f + rest * 1.53533328e-4f;
    p.real = 5.55033237e-2f + rest * (9.61843785e-3f + rest * p.real);
    p.real = 1.0f + rest * (6.93147182e-1f + rest * (2.40226477e-1f + rest * p.real));
    p.bits += n.bits << 23;
    return p.real;
}

/* 2^x; `wild` says that |x| may reach REACH: the ends of the clamp are as good as 0 and infinity in what follows */
INLINE float exp2_of(float x, int wild) {
    x = wild ? clamped(x, -126.0f, 127.0f) : x;
    float shifted = x + ROUND;
    return power(x - (shifted - ROUND), shifted);
}

/* e^x; x log2(e) is not rounded on the way, which would cost |x| half units in the last place */
INLINE float exp_of(float x) {
    x = clamped(x, -87.0f, 88.0f);
    float shifted = x * LOG2_E + ROUND;
    return power((x * LOG2_E - (shifted - ROUND)) + x * LOG2_E_REST, shifted);
}

/* max(x, 0) + log(1 + e^-|x|), the logarithm as 2 atanh(e / (2 + e)): nothing cancels for small e */
INLINE float softplus_of(float x) {
    float e = exp_of(x < 0 ? x : -x), s = e / (2.0f + e), q = s * s;
    float rest = 4.00215685e-1f + q * (2.80010343e-1f + q * 2.80160964e-1f);
    float series = 2.0f + q * (6.66664183e-1f + q * rest);
    return (x > 0 ? x : 0) + s * series;
}

INLINE float silu_of(float x) {
    return x / (1.0f + exp_of(-x));
}

static void read_row(float *restrict to, const float *restrict from, int64_t width, int64_t room) {
    if (width == room) {
        memcpy(to, from, LANES * sizeof(float));
        return;
    }
    memset(to, 0, LANES * sizeof(float));
    memcpy(to, from, (size_t)width * sizeof(float));
}

_Static_assert(LANES == STATES, "read_row reads rows of either");

static const float *row_of(const tokens *from, const task *k, int64_t t) {
    return from->at + k->direction * from->direction + k->image * from->image + t * from->token;
}

static void begin(workspace *w, const problem *p, const task *k) {
    memset(w, 0, sizeof *w);
    int64_t channel = k->direction * p->channels + k->channel;
    for (int64_t i = 0; i < k->width; i++) {
        for (int64_t n = 0; n < k->count; n++) {
            float rate = p->A[(channel + i) * p->states + k->first + n] * LOG2_E;
            w->rate[n][i] = rate;
            w->fastest[i] = fabsf(rate) <= w->fastest[i] ? w->fastest[i] : fabsf(rate);
        }
        if (p->D) w->D[i] = p->D[channel + i];
        if (p->bias) w->bias[i] = p->bias[channel + i];
    }
}

/* token[r] is where row r of the tile lies in the sequence */
static void read_tile(workspace *w, const problem *p, const task *k, const int64_t *token, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        read_row(w->u[r], row_of(&p->u, k, token[r]) + k->channel, k->width, LANES);
        read_row(w->delta[r], row_of(&p->delta, k, token[r]) + k->channel, k->width, LANES);
        read_row(w->B[r], row_of(&p->B, k, token[r]) + k->first, k->count, STATES);
        read_row(w->C[r], row_of(&p->C, k, token[r]) + k->first, k->count, STATES);
    }
}

/* Make delta and x of what was read; return whether an exponent of the tile may reach REACH. */
static int step_sizes(workspace *w, int64_t rows, int softplus) {
    int wild = 0;
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd reduction(| : wild)
        for (int64_t i = 0; i < LANES; i++) {
            float delta = w->delta[r][i] + w->bias[i];
            delta = softplus ? softplus_of(delta) : delta;
            w->delta[r][i] = delta;
            w->x[r][i] = delta * w->u[r][i];
            wild |= !(fabsf(delta) * w->fastest[i] < REACH);
        }
    return wild;
}

INLINE void advance(workspace *w, int64_t rows, int wild) {
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t i = 0; i < LANES; i++) {
            float delta = w->delta[r][i], x = w->x[r][i], y = 0;
#pragma GCC unroll 16
            for (int64_t n = 0; n < STATES; n++) {
                float h = exp2_of(delta * w->rate[n][i], wild) * w->h[n][i] + x * w->B[r][n];
                w->h[n][i] = h;
                y += h * w->C[r][n];
            }
            w->y[r][i] = y;
        }
}

static void gate(float *restrict y, const float *restrict z, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) y[i] *= silu_of(z[i]);
}

static void write_tile(const workspace *w, const problem *p, const task *k, const int64_t *token, int64_t rows) {
    int64_t sequence = k->direction * p->images + k->image;
    for (int64_t r = 0; r < rows; r++) {
        float *y = p->y + (sequence * p->length + token[r]) * p->channels + k->channel;
        for (int64_t i = 0; i < k->width; i++) {
            float before = k->first ? y[i] : w->D[i] * w->u[r][i];
            y[i] = before + w->y[r][i];
        }
        if (p->z.at && k->first + k->count == p->states) gate(y, row_of(&p->z, k, token[r]) + k->channel, k->width);
    }
}

static void scan_states(const problem *p, const task *k) {
    workspace w;
    begin(&w, p, k);
    int64_t backward = (p->reverse + k->direction) % 2;
    for (int64_t start = 0; start < p->length; start += TILE) {
        int64_t token[TILE], rows = p->length - start < TILE ? p->length - start : TILE;
        for (int64_t r = 0; r < rows; r++) token[r] = backward ? p->length - 1 - start - r : start + r;
        read_tile(&w, p, k, token, rows);
        if (step_sizes(&w, rows, (int)p->softplus)) advance(&w, rows, 1);
        else advance(&w, rows, 0);
        write_tile(&w, p, k, token, rows);
    }
}

PUBLIC void selective_scan(const problem *p) {
    int64_t blocks = (p->channels + LANES - 1) / LANES, tasks = p->directions * p->images * blocks;
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++) {
        task k = {i / blocks / p->images, i / blocks % p->images, i % blocks * LANES, 0, 0, 0};
        k.width = p->channels - k.channel < LANES ? p->channels - k.channel : LANES;
        do { /* also once without states */
            k.count = p->states - k.first < STATES ? p->states - k.first : STATES;
            scan_states(p, &k);
            k.first += STATES;
        } while (k.first < p->states);
    }
}
