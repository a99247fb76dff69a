/* The selective scan, serial in tokens: a task owns the states of CHANNELS channels of one image and walks the sequence
   tile by tile, so that what comes in is read and y is written once for every 16 states.

   A direction that runs in reverse reads its tokens from the last to the first; nothing is flipped. Where the directions
   are summed, one task does both, and the second finds what the first wrote in its own core's cache. */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define CHANNELS 16 /* of a task: a cache line of a token */
#define NEIGHBOURS (int64_t)(64 / (CHANNELS * sizeof(number))) /* tasks whose channels of a token share a cache line */
#define STATES 16   /* that a pass carries; more are summed up in further passes */
#define RANKS 64    /* columns of the projection that a pass keeps at hand; more are gathered for every group */
#define TILE 16     /* tokens between reading and writing: their inputs stay in the first-level cache */
#define GROUP 4     /* tokens whose step sizes are projected side by side, since a sum alone waits for itself */
#define TOGETHER 4  /* states that advance side by side, by one form of 2^x */

/* LANES numbers with the operators of C: one register, since compilers split a longer vector badly */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (CHANNELS / LANES)
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));

#ifdef BF16 /* of what a token reads and writes: the upper half of a float */
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES)));
#else
typedef float number;
typedef lanes numbers;
#endif

typedef struct {
    lanes part[PARTS];
} row; /* one number of every channel */

/* (directions, images, length, n), the last dimension without gaps; distances in elements, `at` null where absent */
typedef struct {
    const number *at;
    int64_t direction, image, token;
} tokens;

/* `steps` is delta (n = channels), or with a `weight` what it projects to delta (n = rank). weight (directions, channels,
   rank) or null, A (directions, channels, states), D and bias (directions, channels) or null; y (directions, images,
   length, channels), or (images, length, channels) of the sum over directions, which then read the same z. `reverse` is
   that of the first direction, a second one runs the other way. In bfloat16, `sums` (threads, length, CHANNELS) is for what
   of a y is not all of it yet. */
typedef struct {
    tokens u, steps, B, C, z;
    const float *weight, *A, *D, *bias;
    number *y;
    float *sums;
    int64_t directions, images, length, channels, rank, states, softplus, reverse, summed, threads;
} problem;

/* One walk over the sequence: channels [channel, + width), states [first, + count). */
typedef struct {
    int64_t direction, image, channel, width, first, count;
} pass;

/* Rows of a tile lie at token[r] in the sequence, the last one again beyond `rows`. */
typedef struct {
    int64_t token[TILE], rows;
} tile;

typedef struct {
    row rate[STATES], h[STATES]; /* A log2(e), and the states */
    row fastest, D, bias;        /* fastest: max |rate| of a channel */
    float reach[STATES / TOGETHER]; /* max -rate of some states over all channels, infinity if one of them grows */
    row weight[RANKS];
    row u[TILE], delta[TILE], x[TILE], y[TILE]; /* x = delta u */
    row B[TILE], C[TILE]; /* a number of every state */
} workspace;

#define REACH 125.0f /* 2^x needs no clamp for |x| below it */
#define SPAN 0.75f   /* 2^x needs no rounding of x for -SPAN <= x <= 0 */
/* x + ROUND has round(x) in its low bits, and those of ROUND itself leave when they are shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

INLINE lanes every(float x) {
    return (lanes){0} + x;
}

INLINE lanes chosen(whole mask, lanes yes, lanes no) {
    return (lanes)((mask & (whole)yes) | (~mask & (whole)no));
}

INLINE lanes magnitude(lanes x) {
    return (lanes)((whole)x & INT32_MAX);
}

/* 2^(n + rest) for |rest| <= 1/2 and shifted = n + ROUND, to 3e-7 of itself, and to as much of its distance from 1:
   what a slow state forgets is as exact as what it keeps. */
INLINE lanes power(lanes rest, lanes shifted) {
    lanes p = 9.66637295e-3f + rest * 1.34004366e-3f;
    p = 2.40223490e-1f + rest * (5.55033318e-2f + rest * p);
    p = 1.0f + rest * (6.93147196e-1f + rest * p);
    return (lanes)((whole)p + ((whole)shifted << 23));
}

/* 2^x; `wild` says that |x| may reach REACH: the ends of the clamp are as good as 0 and infinity in what follows */
INLINE lanes exp2_of(lanes x, int wild) {
    if (wild) {
        x = chosen(x < -126.0f, every(-126.0f), x); /* a NaN stays */
        x = chosen(x > 127.0f, every(127.0f), x);
    }
#ifdef __AVX512F__
    /* keeps x from melting into two fused multiply-adds, whose ports are the full ones */
    __asm__("" : "+v"(x));
#endif
    lanes shifted = x + ROUND;
    return power(x - (shifted - ROUND), shifted);
}

/* How 2^x is computed of the exponents of a tile: as it is for -SPAN <= x <= 0, as a square or a fourth power for twice
   and four times as much, else of any x, clamped where it is wild. */
typedef enum { NEAR, SQUARE, FOURTH, ANY, WILD } form;

INLINE lanes decay(lanes x, form how) {
    if (how > FOURTH) return exp2_of(x, how == WILD);
#ifdef BF16
    lanes p = 2.37517719e-1f + x * 4.57383353e-2f;
    p = 1.0f + x * (6.93030249e-1f + x * p);
#else
    lanes p = 9.45295769e-3f + x * 1.07452371e-3f;
    p = 2.40222316e-1f + x * (5.54599862e-2f + x * p);
    p = 1.0f + x * (6.93147116e-1f + x * p);
#endif
    if (how != NEAR) p *= p;
    return how == FOURTH ? p * p : p;
}

/* e^x for x <= 0; x log2(e) is not rounded on the way, which would cost |x| half units in the last place */
INLINE lanes exp_of(lanes x) {
    x = chosen(x < -87.0f, every(-87.0f), x);
    lanes shifted = x * LOG2_E + ROUND;
    return power((x * LOG2_E - (shifted - ROUND)) + x * LOG2_E_REST, shifted);
}

/* max(x, 0) + log(1 + e^-|x|), the logarithm as e times a polynomial: a division would take as long as all of it */
INLINE lanes softplus_of(lanes x) {
    lanes e = exp_of(-magnitude(x)), p = -3.01109641e-2f + e * 5.38406172e-3f;
    p = -1.37466220e-1f + e * (7.92107383e-2f + e * p);
    p = -2.48529457e-1f + e * (1.91451163e-1f + e * p);
    p = -4.99995526e-1f + e * (3.33203435e-1f + e * p);
    return chosen(x > 0.0f, x, every(0.0f)) + e * (9.99999975e-1f + e * p);
}

/* x / (1 + e^-x); 1 / (1 + e) for 0 <= e <= 1 is a parabola to 1/99 of itself, squared by each step of Newton's */
INLINE lanes silu_of(lanes x) {
    lanes e = exp_of(-magnitude(x)), d = 1.0f + e;
    lanes r = 9.89898990e-1f + e * (e * 3.23232323e-1f - 8.08080808e-1f);
    r *= 2.0f - d * r;
    r *= 2.0f - d * r;
    return chosen(x > 0.0f, x, x * e) * r;
}

/* The usual size is a single move. */
#define COPY(to, from, count)                                                                                          \
    do {                                                                                                               \
        if ((count) == CHANNELS) memcpy(to, from, CHANNELS * sizeof *(from));                                          \
        else memcpy(to, from, (size_t)(count) * sizeof *(from));                                                       \
    } while (0)

_Static_assert(CHANNELS == STATES, "COPY takes either");

INLINE lanes widened(numbers x) {
#ifdef BF16
    return (lanes)(__builtin_convertvector(x, whole) << 16);
#else
    return x;
#endif
}

INLINE numbers rounded(lanes x) {
#ifdef BF16
    whole bits = (whole)x, even = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector((whole)chosen(x == x, (lanes)even, (lanes)(bits | 1 << 22)) >> 16, numbers);
#else
    return x;
#endif
}

INLINE row read_row(const number *from, int64_t width) {
    numbers at[PARTS] = {0};
    row to;
    COPY(at, from, width);
    for (int64_t i = 0; i < PARTS; i++) to.part[i] = widened(at[i]);
    return to;
}

INLINE void write_row(number *to, const row *from, int64_t width) {
    numbers at[PARTS];
    for (int64_t i = 0; i < PARTS; i++) at[i] = rounded(from->part[i]);
    COPY(to, (number *)at, width);
}

/* `count` numbers as floats: where they lie, or at `to`. */
INLINE const float *floats(float *to, const number *from, int64_t count) {
#ifdef BF16
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
    return to;
#else
    return from;
#endif
}

INLINE const number *token_of(const tokens *from, const pass *k, int64_t t) {
    return from->at + k->direction * from->direction + k->image * from->image + t * from->token;
}

/* Column n of a parameter (directions, channels, columns). */
static row column(const problem *p, const pass *k, const float *from, int64_t n, int64_t columns) {
    union {
        float of_channels[CHANNELS];
        row all;
    } to = {{0}};
    from += (k->direction * p->channels + k->channel) * columns + n;
    for (int64_t i = 0; i < k->width; i++) to.of_channels[i] = from[i * columns];
    return to.all;
}

static void read_reach(workspace *w) {
    for (int64_t n = 0; n < STATES; n += TOGETHER) {
        float rates[CHANNELS], reach = 0;
        row slowest = {0}, fastest = {0};
        for (int64_t k = n; k < n + TOGETHER; k++)
            for (int64_t i = 0; i < PARTS; i++) {
                lanes rate = w->rate[k].part[i];
                fastest.part[i] = chosen(rate < fastest.part[i], rate, fastest.part[i]);
                slowest.part[i] = chosen(rate > slowest.part[i], rate, slowest.part[i]);
            }
        for (int64_t i = 0; i < PARTS; i++) fastest.part[i] = chosen(slowest.part[i] > 0.0f, every(-HUGE_VALF), fastest.part[i]);
        memcpy(rates, &fastest, sizeof rates);
        for (int64_t i = 0; i < CHANNELS; i++) reach = -rates[i] > reach ? -rates[i] : reach;
        w->reach[n / TOGETHER] = reach;
    }
}

static void begin(workspace *w, const problem *p, const pass *k) {
    memset(w, 0, offsetof(workspace, weight));
    memset(w->B, 0, sizeof w->B + sizeof w->C);
    for (int64_t n = 0; n < k->count; n++) {
        w->rate[n] = column(p, k, p->A, k->first + n, p->states);
        for (int64_t i = 0; i < PARTS; i++) {
            lanes rate = w->rate[n].part[i] *= LOG2_E, size = magnitude(rate);
            w->fastest.part[i] = chosen(size <= w->fastest.part[i], w->fastest.part[i], size);
        }
    }
    read_reach(w);
    if (p->D && !k->first) w->D = column(p, k, p->D, 0, 1);
    if (p->bias) w->bias = column(p, k, p->bias, 0, 1);
    for (int64_t i = 0; p->weight && i < p->rank && i < RANKS; i++) w->weight[i] = column(p, k, p->weight, i, p->rank);
}

/* Add what columns [first, + count) of the projection make of some tokens to their deltas. */
INLINE void project(row *delta, const workspace *w, const problem *p, const pass *k, const int64_t *token, int64_t first) {
    float room[GROUP][RANKS];
    const float *from[GROUP];
    int64_t count = p->rank - first < RANKS ? p->rank - first : RANKS;
    for (int64_t r = 0; r < GROUP; r++) from[r] = floats(room[r], token_of(&p->steps, k, token[r]) + first, count);
    for (int64_t n = 0; n < count; n++) {
        row weight = first ? column(p, k, p->weight, first + n, p->rank) : w->weight[n];
        for (int64_t r = 0; r < GROUP; r++)
            for (int64_t i = 0; i < PARTS; i++) delta[r].part[i] += from[r][n] * weight.part[i];
    }
}

/* Set delta of the tile to the step sizes before their softplus. */
static void read_steps(workspace *w, const problem *p, const pass *k, const tile *at) {
    for (int64_t start = 0; start < TILE; start += GROUP) {
        row delta[GROUP];
        for (int64_t r = 0; r < GROUP; r++) {
            delta[r] = w->bias;
            const number *given = token_of(&p->steps, k, at->token[start + r]) + k->channel;
            row steps = p->weight ? (row){0} : read_row(given, k->width);
            for (int64_t i = 0; i < PARTS; i++) delta[r].part[i] += steps.part[i];
        }
        for (int64_t first = 0; p->weight && first < p->rank; first += RANKS)
            project(delta, w, p, k, at->token + start, first);
        memcpy(w->delta + start, delta, sizeof delta);
    }
}

static void read_tile(workspace *w, const problem *p, const pass *k, const tile *at) {
    read_steps(w, p, k, at);
    for (int64_t r = 0; r < at->rows; r++) {
        w->u[r] = read_row(token_of(&p->u, k, at->token[r]) + k->channel, k->width);
        w->B[r] = read_row(token_of(&p->B, k, at->token[r]) + k->first, k->count);
        w->C[r] = read_row(token_of(&p->C, k, at->token[r]) + k->first, k->count);
    }
}

static tile tile_of(const problem *p, int64_t start, int64_t backward) {
    tile at = {.rows = p->length - start < TILE ? p->length - start : TILE};
    for (int64_t r = 0; r < TILE; r++) {
        int64_t t = start + (r < at.rows ? r : at.rows - 1);
        at.token[r] = backward ? p->length - 1 - t : t;
    }
    return at;
}

INLINE number *target(const problem *p, const pass *k, int64_t t) {
    int64_t image = (p->summed ? 0 : k->direction) * p->images + k->image;
    return p->y + (image * p->length + t) * p->channels + k->channel;
}

/* Does this walk make a y all of it? */
INLINE int ends(const problem *p, const pass *k) {
    return k->first + k->count == p->states && (!p->summed || k->direction + 1 == p->directions);
}

/* Bring the lines that rows [first, last) will need into the first-level cache while there is else to do. */
INLINE void fetch(const problem *p, const pass *k, const tile *next, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        __builtin_prefetch(token_of(&p->u, k, next->token[r]) + k->channel, 0);
        __builtin_prefetch(target(p, k, next->token[r]), 1);
        if (p->z.at && ends(p, k)) __builtin_prefetch(token_of(&p->z, k, next->token[r]) + k->channel, 0);
    }
}

/* Make delta and x of what was read; return the largest delta, infinity if one is negative or an exponent of the tile
   may reach REACH, and say which in `wild`. */
static float step_sizes(workspace *w, int64_t rows, int softplus, int *wild) {
    whole far = {0}, negative = {0};
    float sizes[LANES], largest = 0;
    lanes longest = {0};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PARTS; i++) {
            lanes delta = softplus ? softplus_of(w->delta[r].part[i]) : w->delta[r].part[i];
            w->delta[r].part[i] = delta;
            w->x[r].part[i] = delta * w->u[r].part[i];
            far |= ~(magnitude(delta) * w->fastest.part[i] < REACH);
            negative |= (whole)delta;
            longest = chosen(delta > longest, delta, longest);
        }
    memcpy(sizes, &longest, sizeof sizes);
    int32_t signs = 0;
    *wild = 0;
    for (int64_t i = 0; i < LANES; i++) {
        *wild |= far[i];
        signs |= negative[i];
        largest = sizes[i] > largest ? sizes[i] : largest;
    }
    return *wild || signs < 0 ? HUGE_VALF : largest;
}

/* Let the states [n, + TOGETHER) go through the tile, and add what they show to y. */
INLINE void advance_by(workspace *w, int64_t rows, int64_t n, form how) {
    float scale = how == SQUARE ? 0.5f : how == FOURTH ? 0.25f : 1.0f;
    for (int64_t i = 0; i < PARTS; i++) {
        lanes rate[TOGETHER], h[TOGETHER];
        for (int64_t k = 0; k < TOGETHER; k++) {
            rate[k] = w->rate[n + k].part[i] * scale;
            h[k] = w->h[n + k].part[i];
        }
        for (int64_t r = 0; r < rows; r++) {
            lanes delta = w->delta[r].part[i], x = w->x[r].part[i], y = w->y[r].part[i];
            const float *B = (const float *)&w->B[r], *C = (const float *)&w->C[r];
            for (int64_t k = 0; k < TOGETHER; k++) {
                h[k] = decay(delta * rate[k], how) * h[k] + x * B[n + k];
                y += h[k] * C[n + k];
            }
            w->y[r].part[i] = y;
        }
        for (int64_t k = 0; k < TOGETHER; k++) w->h[n + k].part[i] = h[k];
    }
}

static void advance(workspace *w, const problem *p, const pass *k, int64_t rows, const tile *next, float longest, int wild) {
    memset(w->y, 0, sizeof w->y);
    for (int64_t n = 0; n < STATES; n += TOGETHER) {
        fetch(p, k, next, n * TILE / STATES, (n + TOGETHER) * TILE / STATES);
        float reach = longest * w->reach[n / TOGETHER];
        if (reach <= SPAN) advance_by(w, rows, n, NEAR);
        else if (reach <= 2 * SPAN) advance_by(w, rows, n, SQUARE);
        else if (reach <= 4 * SPAN) advance_by(w, rows, n, FOURTH);
        else if (!wild) advance_by(w, rows, n, ANY);
        else advance_by(w, rows, n, WILD);
    }
}

#ifdef BF16
INLINE row read_sum(const problem *p, const pass *k, int64_t t) {
    row sum;
    memcpy(&sum, p->sums + (omp_get_thread_num() * p->length + t) * CHANNELS, sizeof sum);
    return sum;
}

INLINE void write_sum(const problem *p, const pass *k, int64_t t, const row *sum) {
    if (ends(p, k)) write_row(target(p, k, t), sum, k->width);
    else memcpy(p->sums + (omp_get_thread_num() * p->length + t) * CHANNELS, sum, sizeof *sum);
}
#else
INLINE row read_sum(const problem *p, const pass *k, int64_t t) {
    return read_row(target(p, k, t), k->width);
}

INLINE void write_sum(const problem *p, const pass *k, int64_t t, const row *sum) {
    write_row(target(p, k, t), sum, k->width);
}
#endif

static void write_tile(const workspace *w, const problem *p, const pass *k, const tile *at) {
    int adds = k->first || (p->summed && k->direction), gates = p->z.at && ends(p, k);
    for (int64_t r = 0; r < at->rows; r++) {
        row y = adds ? read_sum(p, k, at->token[r]) : (row){0};
        row z = gates ? read_row(token_of(&p->z, k, at->token[r]) + k->channel, k->width) : (row){0};
        for (int64_t i = 0; i < PARTS; i++) {
            y.part[i] += w->D.part[i] * w->u[r].part[i] + w->y[r].part[i];
            if (gates) y.part[i] *= silu_of(z.part[i]);
        }
        write_sum(p, k, at->token[r], &y);
    }
}

static void scan_states(const problem *p, const pass *k) {
    int64_t backward = (p->reverse + k->direction) % 2;
    workspace w;
    begin(&w, p, k);
    tile next = tile_of(p, 0, backward);
    for (int64_t start = 0; start < p->length; start += TILE) {
        tile at = next;
        next = tile_of(p, start + TILE, backward);
        read_tile(&w, p, k, &at);
        int wild;
        float longest = step_sizes(&w, at.rows, (int)p->softplus, &wild);
        advance(&w, p, k, at.rows, &next, longest, wild);
        write_tile(&w, p, k, &at);
    }
}

static void scan_direction(const problem *p, pass k) {
    do { /* also once without states */
        k.count = p->states - k.first < STATES ? p->states - k.first : STATES;
        scan_states(p, &k);
        k.first += STATES;
    } while (k.first < p->states);
}

/* Block i of the channels, in the image and direction where it lies; no states yet. */
static pass block(const problem *p, int64_t i) {
    int64_t blocks = (p->channels + CHANNELS - 1) / CHANNELS, left = p->channels - i % blocks * CHANNELS;
    pass k = {i / blocks / p->images, i / blocks % p->images, i % blocks * CHANNELS, left < CHANNELS ? left : CHANNELS, 0, 0};
    return k;
}

static int64_t blocks_of(const problem *p, int64_t directions) {
    return directions * p->images * ((p->channels + CHANNELS - 1) / CHANNELS);
}

PUBLIC void selective_scan(const problem *p) {
    int64_t together = p->summed ? p->directions : 1, tasks = blocks_of(p, p->directions / together);
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, NEIGHBOURS)
    for (int64_t i = 0; i < tasks; i++) {
        pass k = block(p, i);
        for (int64_t last = k.direction + together; k.direction < last; k.direction++) scan_direction(p, k);
    }
}

/* y = the step sizes themselves, of a problem with a weight */
PUBLIC void delta_projection(const problem *p) {
    int64_t blocks = blocks_of(p, p->directions);
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(static, NEIGHBOURS)
    for (int64_t i = 0; i < blocks; i++) {
        pass k = block(p, i);
        workspace w;
        begin(&w, p, &k);
        memset(w.u, 0, sizeof w.u);
        for (int64_t start = 0; start < p->length; start += TILE) {
            tile at = tile_of(p, start, 0);
            int wild;
            read_steps(&w, p, &k, &at);
            step_sizes(&w, at.rows, 1, &wild);
            for (int64_t r = 0; r < at.rows; r++) write_row(target(p, &k, at.token[r]), &w.delta[r], k.width);
        }
    }
}
