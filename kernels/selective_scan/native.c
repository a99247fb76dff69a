/* The selective scan, serial in tokens: a task owns the states of a few channel blocks of one image and processes the
   sequence tile by tile, so that inputs are read and y is written once per 16 states.

   A reverse direction reads its tokens from the last to the first; nothing is flipped. If the directions
   are summed, one task runs both, and the second finds the first one's output in its own core's cache. */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <string.h>

#include "../rows.h"

#define BLOCKS 4   /* maximum blocks per task, which share a token's inputs for all channels */
#define STATES 16  /* states per pass; more are summed in further passes */
#define RANKS 64   /* columns of the projection kept per pass; more are gathered for every group */
#define TILE 16    /* tokens per tile: their inputs stay in the first-level cache */
#define GROUP 4    /* tokens whose step sizes are projected together: a single sum would wait for each addition */
#define TOGETHER 4 /* states that advance together, using one form of 2^x */

/* (directions, images, length, n), with a contiguous last dimension; strides in elements, `at` null if absent */
typedef struct {
    const number *at;
    int64_t direction, image, token;
} tokens;

/* (directions, channels, n) or null; strides in elements */
typedef struct {
    const float *at;
    int64_t direction, channel, column;
} parameter;

/* `steps` is delta (n = channels) or, with a `weight`, its input for projecting delta (n = rank). weight (n = rank) or
   null, A (n = states), D and bias (directions, channels) contiguous or null; y (directions, images, length, channels),
   or (images, length, channels) for the sum over directions, which then read the same z. `reverse` is for the first
   direction, a second one runs the other way. In bfloat16, `sums` (threads, length, BLOCKS, CHANNELS) holds partial
   sums of y. */
typedef struct {
    tokens u, steps, B, C, z;
    parameter weight, A;
    const float *D, *bias;
    number *y;
    float *sums;
    int64_t directions, images, length, channels, rank, states, softplus, reverse, summed, threads;
} problem;

/* One pass over the sequence: `blocks` blocks of channels, the first from `channel` on, and states [first, + count).
   `sums` belongs to its thread. */
typedef struct {
    int64_t direction, image, channel, blocks, first, count;
    float *sums;
} pass;

/* Rows of the sequence and where the pass begins; rows beyond `rows` repeat the last one. */
typedef struct {
    int64_t rows, token[TILE];
    const number *u[TILE], *z[TILE];
    number *y[TILE];
} tile;

/* The values that a block's channels keep from token to token. */
typedef struct {
    row rate[STATES], h[STATES]; /* A log2(e), and the states */
    row D, bias;
    float reach[STATES / TOGETHER]; /* max -rate of several states over all channels, infinity if any of them grows */
    row weight[RANKS];
} block;

typedef struct {
    block blocks[BLOCKS];
    row u[TILE], delta[TILE], x[TILE], y[TILE]; /* a single block's; x = delta u */
    row B[TILE], C[TILE];                       /* one number per state */
    const float *low[TILE];                     /* columns of the projection, up to RANKS */
    float room[TILE][RANKS];
} workspace;

#define REACH 125.0f /* 2^x needs no clamp for |x| below this */

/* Zen adds and multiplies in different units, so that a sum alongside a product is free. AVX2 code does not benefit. */
#if defined __AVX512F__ && (defined __znver3__ || defined __znver4__ || defined __znver5__)
#define ADDERS
#endif

#ifdef __AVX512DQ__
/* 2^x, using instructions for fraction and exponent, which accept any x */
INLINE lanes exp2_of(lanes x, int wild) {
    (void)wild;
    lanes rest = (lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (lanes)_mm512_scalef_ps((__m512)near_power(rest), (__m512)(x - rest));
}
#else
/* 2^x; `wild` is set if |x| may reach REACH: the ends of the clamp then serve as 0 and infinity */
INLINE lanes exp2_of(lanes x, int wild) {
    if (wild) {
        x = chosen(x < -126.0f, every(-126.0f), x); /* keeps NaN */
        x = chosen(x > 127.0f, every(127.0f), x);
    }
    lanes shifted = x + ROUND;
    return power(x - (shifted - ROUND), shifted);
}
#endif

/* How 2^x is computed for a tile's exponents: for -span[how] <= x <= 0 by polynomials in x unit[how], else for any
   x, clamped if it is wild. */
typedef enum { NEAR, FAR, FARTHER, ANY, WILD } form;

#ifdef ADDERS
/* Knuth's adapted coefficients, in the unit that makes the leading one 1: as few products at degrees 5 and 7 as
   Horner's rule at 3 and 4. The error relative to the distance from 1 is 4e-7; for bfloat16, at degrees 3 and 5, 2e-4. */
#ifdef BF16
static const float span[] = {0.75f, 3.3f, 6.6f}, unit[] = {3.57624126e-1f, 2.20869564e-1f, 1.10434782e-1f};
#else
static const float span[] = {0.75f, 2.45f, 4.9f}, unit[] = {2.54825681e-1f, 1.84616685e-1f, 9.23083425e-2f};
#endif

INLINE lanes near(lanes X) {
#ifdef BF16
    return 1.0f + X * (X * (X + 1.85713044f) + 1.93787331f);
#else
    lanes y = X * (X + 6.20894730e-1f) + 2.24325347f;
    return 1.0f + X * (y * (y + (X - 2.14132762f)) + 2.49143791f);
#endif
}

INLINE lanes far(lanes X) {
#ifdef BF16
    lanes y = X * (X + 1.09539029f) + 2.01075175f;
    return 1.0f + X * (y * (y + (X - 1.38018088f)) + 1.87000977f);
#else
    lanes y = X * (X + 1.43943238f) + 1.49829078f, w = (X - 2.95357406e-1f) * y + 3.04580903f;
    return 1.0f + X * (w * ((w + y) - 3.62892413f) + 2.52409577f);
#endif
}
#else
static const float span[] = {0.75f, 1.5f, 3.0f}, unit[] = {1.0f, 0.5f, 0.25f};

INLINE lanes near(lanes x) {
#ifdef BF16
    lanes p = 2.37517719e-1f + x * 4.57383353e-2f;
    return 1.0f + x * (6.93030249e-1f + x * p);
#else
    lanes p = 9.45295769e-3f + x * 1.07452371e-3f;
    p = 2.40222316e-1f + x * (5.54599862e-2f + x * p);
    return 1.0f + x * (6.93147116e-1f + x * p);
#endif
}

INLINE lanes far(lanes x) {
    lanes p = near(x);
    return p * p;
}
#endif

INLINE lanes decay(lanes x, form how) {
    if (how > FARTHER) return exp2_of(x, how == WILD);
    lanes p = how == NEAR ? near(x) : far(x);
    return how == FARTHER ? p * p : p;
}

/* max(x, 0) + log(1 + e^-|x|), the logarithm as e^-|x| times a polynomial, which takes no longer than a division */
INLINE lanes softplus_of(lanes x) {
    lanes e = exp_of(exponent_of(x));
#ifdef BF16
    lanes p = 3.06302650e-1f + e * (e * 4.13476900e-2f - 1.57428790e-1f);
    p = 9.99943340e-1f + e * (-4.96978440e-1f + e * p);
#else
    lanes p = -3.01109641e-2f + e * 5.38406172e-3f;
    p = -1.37466220e-1f + e * (7.92107383e-2f + e * p);
    p = -2.48529457e-1f + e * (1.91451163e-1f + e * p);
    p = -4.99995526e-1f + e * (3.33203435e-1f + e * p);
    p = 9.99999975e-1f + e * p;
#endif
    return larger(every(0.0f), x) + e * p;
}

_Static_assert(CHANNELS == STATES, "a row is of either");

INLINE float largest_of(const row *all) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)all->part[0]);
#else
    float each[CHANNELS], largest = 0;
    memcpy(each, all, sizeof each);
    for (int64_t i = 0; i < CHANNELS; i++) largest = each[i] > largest ? each[i] : largest;
    return largest;
#endif
}

/* `count` numbers as floats: in place, or copied to `to`. */
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

INLINE int64_t width_of(const problem *p, const pass *k, int64_t i) {
    int64_t left = p->channels - k->channel - i * CHANNELS;
    return left < CHANNELS ? left : CHANNELS;
}

/* Columns [first, + count) of a parameter for block i; entries beyond a narrow block are unchanged. */
static void read_columns(
    row *to, const problem *p, const pass *k, int64_t i, parameter of, int64_t first, int64_t count) {
    int64_t width = width_of(p, k, i);
    const float *from = of.at + k->direction * of.direction + (k->channel + i * CHANNELS) * of.channel;
    for (int64_t n = 0; n < count; n++) {
        const float *column = from + (first + n) * of.column;
        float *each = (float *)(to + n);
        if (of.channel == 1 && width == CHANNELS) memcpy(each, column, sizeof *to);
        else
            for (int64_t c = 0; c < width; c++) each[c] = column[c * of.channel];
    }
}

/* Computes the rates from A, and how fast they are. */
static void read_rates(block *b) {
    for (int64_t n = 0; n < STATES; n += TOGETHER) {
        row reach = {0};
        for (int64_t k = n; k < n + TOGETHER; k++)
            for (int64_t i = 0; i < PARTS; i++) {
                lanes rate = b->rate[k].part[i] *= LOG2_E;
                reach.part[i] = larger(chosen(rate > 0.0f, every(HUGE_VALF), -rate), reach.part[i]);
            }
        b->reach[n / TOGETHER] = largest_of(&reach);
    }
}

static void begin(workspace *w, const problem *p, const pass *k) {
    int64_t ranks = !p->weight.at ? 0 : p->rank < RANKS ? p->rank : RANKS;
    parameter D = {p->D, p->channels, 1, 0}, bias = {p->bias, p->channels, 1, 0};
    for (int64_t i = 0; i < k->blocks; i++) {
        block *b = &w->blocks[i];
        memset(b, 0, offsetof(block, weight) + (size_t)ranks * sizeof(row));
        read_columns(b->rate, p, k, i, p->A, k->first, k->count);
        read_rates(b);
        read_columns(&b->D, p, k, i, D, 0, p->D && !k->first);
        read_columns(&b->bias, p, k, i, bias, 0, p->bias != 0);
        read_columns(b->weight, p, k, i, p->weight, 0, ranks);
    }
}

/* Reads a tile's inputs for all channels. */
static void read_shared(workspace *w, const problem *p, const pass *k, const tile *at) {
    const number *B = token_of(&p->B, k, 0) + k->first, *C = token_of(&p->C, k, 0) + k->first;
    const number *steps = token_of(&p->steps, k, 0);
    int64_t ranks = !p->weight.at ? 0 : p->rank < RANKS ? p->rank : RANKS, count = k->count;
    int64_t to_B = p->B.token, to_C = p->C.token, to_steps = p->steps.token;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t t = at->token[r];
        w->B[r] = read_row(B + t * to_B, count);
        w->C[r] = read_row(C + t * to_C, count);
        w->low[r] = floats(w->room[r], steps + t * to_steps, ranks);
    }
}

INLINE void project(row *delta, const row *weight, const float *const *low, int64_t count) {
    for (int64_t n = 0; n < count; n++)
        for (int64_t r = 0; r < GROUP; r++)
            for (int64_t i = 0; i < PARTS; i++) delta[r].part[i] += low[r][n] * weight[n].part[i];
}

/* Adds the contribution of the columns beyond RANKS to several deltas. */
static void project_rest(row *delta, const problem *p, const pass *k, int64_t i, const int64_t *token) {
    for (int64_t n = RANKS; n < p->rank; n++) {
        float room[GROUP];
        const float *low[GROUP];
        row weight = {0};
        read_columns(&weight, p, k, i, p->weight, n, 1);
        for (int64_t r = 0; r < GROUP; r++) low[r] = floats(room + r, token_of(&p->steps, k, token[r]) + n, 1);
        project(delta, &weight, low, 1);
    }
}

/* Sets the tile's delta to the step sizes of block i before softplus. */
static void read_steps(workspace *w, const problem *p, const pass *k, int64_t i, const tile *at) {
    const block *b = &w->blocks[i];
    for (int64_t start = 0; start < TILE; start += GROUP) {
        row delta[GROUP];
        for (int64_t r = 0; r < GROUP; r++) {
            delta[r] = b->bias;
            if (p->weight.at) continue;
            const number *from = token_of(&p->steps, k, at->token[start + r]) + k->channel + i * CHANNELS;
            row given = read_row(from, width_of(p, k, i));
            for (int64_t j = 0; j < PARTS; j++) delta[r].part[j] += given.part[j];
        }
        if (p->weight.at) {
            project(delta, b->weight, w->low + start, p->rank < RANKS ? p->rank : RANKS);
            project_rest(delta, p, k, i, at->token + start);
        }
        memcpy(w->delta + start, delta, sizeof delta);
    }
}

static tile tile_of(const problem *p, const pass *k, int64_t start, int64_t backward) {
    tile at = {.rows = p->length - start < TILE ? p->length - start : TILE};
    int64_t image = (p->summed ? 0 : k->direction) * p->images + k->image;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t row = start + (r < at.rows ? r : at.rows - 1), t = backward ? p->length - 1 - row : row;
        at.token[r] = t;
        if (p->u.at) at.u[r] = token_of(&p->u, k, t) + k->channel;
        if (p->z.at) at.z[r] = token_of(&p->z, k, t) + k->channel;
        at.y[r] = p->y + (image * p->length + t) * p->channels + k->channel;
    }
    return at;
}

/* Whether this pass completes y. */
INLINE int ends(const problem *p, const pass *k) {
    return k->first + k->count == p->states && (!p->summed || k->direction + 1 == p->directions);
}

/* Prefetches the cache lines of block i for rows [first, last). */
INLINE void fetch(const problem *p, const pass *k, int64_t i, const tile *next, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        __builtin_prefetch(next->u[r] + i * CHANNELS, 0);
        __builtin_prefetch(next->y[r] + i * CHANNELS, 1);
        if (p->z.at && ends(p, k)) __builtin_prefetch(next->z[r] + i * CHANNELS, 0);
    }
}

/* Computes delta and x, and sets y to 0; returns the longest step, or infinity if any is negative. */
INLINE float read_tile(workspace *w, const tile *at, int64_t i, int64_t width, int softplus) {
    row longest = {0};
    for (int64_t r = 0; r < at->rows; r++) {
        w->u[r] = read_row(at->u[r] + i * CHANNELS, width);
        for (int64_t j = 0; j < PARTS; j++) {
            lanes delta = w->delta[r].part[j], size = chosen(delta < 0.0f, every(HUGE_VALF), delta);
            if (softplus) delta = size = softplus_of(delta);
            w->delta[r].part[j] = delta;
            w->x[r].part[j] = delta * w->u[r].part[j];
            w->y[r].part[j] = every(0.0f);
            longest.part[j] = larger(size, longest.part[j]);
        }
    }
    return largest_of(&longest);
}

/* Advances the states [n, + TOGETHER) of a block through the tile, and adds their outputs to y. */
INLINE void advance_by(workspace *w, block *b, int64_t rows, int64_t n, form how) {
    float scale = how > FARTHER ? 1.0f : unit[how];
    for (int64_t i = 0; i < PARTS; i++) {
        lanes rate[TOGETHER], h[TOGETHER];
        for (int64_t k = 0; k < TOGETHER; k++) {
            rate[k] = b->rate[n + k].part[i] * scale;
            h[k] = b->h[n + k].part[i];
        }
#pragma GCC unroll 2
        for (int64_t r = 0; r < rows; r++) {
            lanes delta = w->delta[r].part[i], x = w->x[r].part[i], y = w->y[r].part[i];
            const float *B = (const float *)&w->B[r], *C = (const float *)&w->C[r];
            for (int64_t k = 0; k < TOGETHER; k++) {
                h[k] = decay(delta * rate[k], how) * h[k] + x * B[n + k];
                y += h[k] * C[n + k];
            }
            w->y[r].part[i] = y;
        }
        for (int64_t k = 0; k < TOGETHER; k++) b->h[n + k].part[i] = h[k];
    }
}

static void advance(
    workspace *w, const problem *p, const pass *k, int64_t i, int64_t rows, const tile *next, float longest) {
    block *b = &w->blocks[i];
    for (int64_t n = 0; n < STATES; n += TOGETHER) {
        float reach = longest * b->reach[n / TOGETHER];
        fetch(p, k, i, next, n * TILE / STATES, (n + TOGETHER) * TILE / STATES);
        if (reach <= span[NEAR]) advance_by(w, b, rows, n, NEAR);
        else if (reach <= span[FAR]) advance_by(w, b, rows, n, FAR);
        else if (reach <= span[FARTHER]) advance_by(w, b, rows, n, FARTHER);
        else if (reach < REACH) advance_by(w, b, rows, n, ANY);
        else advance_by(w, b, rows, n, WILD);
    }
}

/* The partial sum of a token: in y, or separate if y would round it. */
#ifdef BF16
INLINE float *sum_of(const pass *k, int64_t i, int64_t t) {
    return k->sums + (t * BLOCKS + i) * CHANNELS;
}

INLINE row read_sum(const pass *k, const tile *at, int64_t i, int64_t r, int64_t width) {
    (void)width;
    row sum;
    memcpy(&sum, sum_of(k, i, at->token[r]), sizeof sum);
    return sum;
}

INLINE void write_sum(const problem *p, const pass *k, const tile *at, int64_t i, int64_t r, int64_t width, row sum) {
    if (ends(p, k)) write_row(at->y[r] + i * CHANNELS, &sum, width);
    else memcpy(sum_of(k, i, at->token[r]), &sum, sizeof sum);
}
#else
INLINE row read_sum(const pass *k, const tile *at, int64_t i, int64_t r, int64_t width) {
    (void)k;
    return read_row(at->y[r] + i * CHANNELS, width);
}

INLINE void write_sum(const problem *p, const pass *k, const tile *at, int64_t i, int64_t r, int64_t width, row sum) {
    (void)p, (void)k;
    write_row(at->y[r] + i * CHANNELS, &sum, width);
}
#endif

INLINE void write_tile(
    const workspace *w, const problem *p, const pass *k, int64_t i, int64_t width, const tile *at) {
    int adds = k->first || (p->summed && k->direction), gates = p->z.at && ends(p, k);
    row D = w->blocks[i].D;
    for (int64_t r = 0; r < at->rows; r++) {
        row y = adds ? read_sum(k, at, i, r, width) : (row){0};
        row z = gates ? read_row(at->z[r] + i * CHANNELS, width) : (row){0};
        for (int64_t j = 0; j < PARTS; j++) {
            y.part[j] += D.part[j] * w->u[r].part[j] + w->y[r].part[j];
            if (gates) y.part[j] *= silu_of(z.part[j]);
        }
        write_sum(p, k, at, i, r, width, y);
    }
}

INLINE void scan_tile(
    workspace *w, const problem *p, const pass *k, int64_t i, int64_t width, const tile *at, const tile *next) {
    read_steps(w, p, k, i, at);
    float longest = p->softplus ? read_tile(w, at, i, width, 1) : read_tile(w, at, i, width, 0);
    advance(w, p, k, i, at->rows, next, longest);
    write_tile(w, p, k, i, width, at);
}

static void scan_states(const problem *p, const pass *k) {
    int64_t backward = (p->reverse + k->direction) % 2;
    workspace w;
    begin(&w, p, k);
    tile next = tile_of(p, k, 0, backward);
    for (int64_t start = 0; start < p->length; start += TILE) {
        tile at = next;
        next = tile_of(p, k, start + TILE, backward);
        read_shared(&w, p, k, &at);
        for (int64_t i = 0; i < k->blocks; i++) {
            int64_t width = width_of(p, k, i);
            /* a loop that may call memcpy for a narrow row cannot keep constants in registers */
            if (width == CHANNELS) scan_tile(&w, p, k, i, CHANNELS, &at, &next);
            else scan_tile(&w, p, k, i, width, &at, &next);
        }
    }
}

static void scan_direction(const problem *p, pass k) {
    do { /* runs once even without states */
        k.count = p->states - k.first < STATES ? p->states - k.first : STATES;
        scan_states(p, &k);
        k.first += STATES;
    } while (k.first < p->states);
}

static int64_t parts_of(int64_t n, int64_t part) {
    return (n + part - 1) / part;
}

/* Blocks per task: many, but two tasks per thread if possible, and no cache line shared by tasks. */
static int64_t blocks_of_a_task(const problem *p, int64_t sequences) {
    int64_t blocks = BLOCKS, least = 64 / (CHANNELS * sizeof(number));
    while (blocks > least && sequences * parts_of(p->channels, blocks * CHANNELS) < 2 * p->threads) blocks--;
    return blocks / least * least;
}

/* Task i among those with `blocks` blocks, set to its image and direction, without states. */
static pass task_of(const problem *p, int64_t i, int64_t blocks) {
    int64_t tasks = parts_of(p->channels, blocks * CHANNELS), channel = i % tasks * blocks * CHANNELS;
    int64_t left = parts_of(p->channels - channel, CHANNELS);
    pass k = {i / tasks / p->images, i / tasks % p->images, channel, left < blocks ? left : blocks, 0, 0, p->sums};
    if (p->sums) k.sums += omp_get_thread_num() * p->length * BLOCKS * CHANNELS;
    return k;
}

PUBLIC void selective_scan(const problem *p) {
    int64_t together = p->summed ? p->directions : 1, sequences = p->directions / together * p->images;
    int64_t blocks = blocks_of_a_task(p, sequences), tasks = sequences * parts_of(p->channels, blocks * CHANNELS);
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++) {
        pass k = task_of(p, i, blocks);
        for (int64_t last = k.direction + together; k.direction < last; k.direction++) scan_direction(p, k);
    }
}

/* y = the step sizes themselves, for a problem with a weight */
PUBLIC void delta_projection(const problem *p) {
    int64_t sequences = p->directions * p->images, blocks = blocks_of_a_task(p, sequences);
    int64_t tasks = sequences * parts_of(p->channels, blocks * CHANNELS);
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
        pass k = task_of(p, task, blocks);
        workspace w;
        begin(&w, p, &k);
        for (int64_t start = 0; start < p->length; start += TILE) {
            tile at = tile_of(p, &k, start, 0);
            read_shared(&w, p, &k, &at);
            for (int64_t i = 0; i < k.blocks; i++) {
                read_steps(&w, p, &k, i, &at);
                for (int64_t r = 0; r < at.rows; r++) {
                    for (int64_t j = 0; j < PARTS; j++) w.delta[r].part[j] = softplus_of(w.delta[r].part[j]);
                    write_row(at.y[r] + i * CHANNELS, &w.delta[r], width_of(p, &k, i));
                }
            }
        }
    }
}
