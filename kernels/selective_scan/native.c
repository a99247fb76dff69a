/* The selective scan, serial in tokens: a task owns the states of CHANNELS channels of one image and walks the sequence
   tile by tile, so that what comes in is read and y is written once for every 16 states.

   A direction that runs in reverse reads its tokens from the last to the first; nothing is flipped. Where the directions
   are summed, one task does both, and the second finds what the first wrote in its own core's cache. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define CHANNELS 16 /* of a task: a cache line of a token */
#define STATES 16   /* that a pass carries; more are summed up in further passes */
#define RANKS 64    /* columns of the projection that a pass keeps at hand; more are gathered for every group */
#define TILE 16     /* tokens between reading and writing: their inputs stay in the first-level cache */
#define GROUP 4     /* tokens whose step sizes are projected side by side, since a sum alone waits for itself */

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

typedef struct {
    lanes part[PARTS];
} row; /* one number of every channel */

/* (directions, images, length, n), the last dimension without gaps; distances in elements, `at` null where absent */
typedef struct {
    const float *at;
    int64_t direction, image, token;
} tokens;

/* `steps` is delta (n = channels), or with a `weight` what it projects to delta (n = rank). weight (directions, channels,
   rank) or null, A (directions, channels, states), D and bias (directions, channels) or null; y (directions, images,
   length, channels), or (images, length, channels) of the sum over directions, which then read the same z. `reverse` is
   that of the first direction, a second one runs the other way. */
typedef struct {
    tokens u, steps, B, C, z;
    const float *weight, *A, *D, *bias;
    float *y;
    int64_t directions, images, length, channels, rank, states, softplus, reverse, summed, threads;
} problem;

/* One walk over the sequence: channels [channel, + width), states [first, + count). */
typedef struct {
    int64_t direction, image, channel, width, first, count;
} pass;

typedef struct {
    row rate[STATES], h[STATES]; /* A log2(e), and the states */
    row fastest, D, bias;        /* fastest: max |rate| of a channel */
    row weight[RANKS];
    row u[TILE], delta[TILE], x[TILE], y[TILE]; /* x = delta u */
    float B[TILE][STATES], C[TILE][STATES];
} workspace;

#define REACH 125.0f /* 2^x needs no clamp for |x| below it */
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

INLINE lanes silu_of(lanes x) {
    lanes e = exp_of(-magnitude(x));
    return chosen(x > 0.0f, x, x * e) / (1.0f + e);
}

/* The usual size is a single move. */
INLINE void copy(void *to, const void *from, int64_t numbers) {
    if (numbers == CHANNELS) memcpy(to, from, CHANNELS * sizeof(float));
    else memcpy(to, from, (size_t)numbers * sizeof(float));
}

_Static_assert(CHANNELS == STATES, "copy takes either");

INLINE row read_row(const float *from, int64_t width) {
    row to = {0};
    copy(&to, from, width);
    return to;
}

INLINE const float *token_of(const tokens *from, const pass *k, int64_t t) {
    return from->at + k->direction * from->direction + k->image * from->image + t * from->token;
}

/* Column n of a parameter (directions, channels, columns). */
static row column(const problem *p, const pass *k, const float *from, int64_t n, int64_t columns) {
    float of_channels[CHANNELS] = {0};
    from += (k->direction * p->channels + k->channel) * columns + n;
    for (int64_t i = 0; i < k->width; i++) of_channels[i] = from[i * columns];
    return read_row(of_channels, CHANNELS);
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
    if (p->D && !k->first) w->D = column(p, k, p->D, 0, 1);
    if (p->bias) w->bias = column(p, k, p->bias, 0, 1);
    for (int64_t i = 0; p->weight && i < p->rank && i < RANKS; i++) w->weight[i] = column(p, k, p->weight, i, p->rank);
}

/* Set delta of the tile to the step sizes before their softplus; token[r] is where row r lies in the sequence. */
static void read_steps(workspace *w, const problem *p, const pass *k, const int64_t *token) {
    for (int64_t start = 0; start < TILE; start += GROUP) {
        const float *from[GROUP];
        row delta[GROUP];
        for (int64_t r = 0; r < GROUP; r++) {
            from[r] = token_of(&p->steps, k, token[start + r]);
            delta[r] = w->bias;
            row given = p->weight ? (row){0} : read_row(from[r] + k->channel, k->width);
            for (int64_t i = 0; i < PARTS; i++) delta[r].part[i] += given.part[i];
        }
        for (int64_t n = 0; p->weight && n < p->rank; n++) {
            row weight = n < RANKS ? w->weight[n] : column(p, k, p->weight, n, p->rank);
            for (int64_t r = 0; r < GROUP; r++)
                for (int64_t i = 0; i < PARTS; i++) delta[r].part[i] += from[r][n] * weight.part[i];
        }
        memcpy(w->delta + start, delta, sizeof delta);
    }
}

static void read_tile(workspace *w, const problem *p, const pass *k, const int64_t *token, int64_t rows) {
    read_steps(w, p, k, token);
    for (int64_t r = 0; r < rows; r++) {
        w->u[r] = read_row(token_of(&p->u, k, token[r]) + k->channel, k->width);
        copy(w->B[r], token_of(&p->B, k, token[r]) + k->first, k->count);
        copy(w->C[r], token_of(&p->C, k, token[r]) + k->first, k->count);
    }
}

/* Make delta and x of what was read; return whether an exponent of the tile may reach REACH. */
static int step_sizes(workspace *w, int64_t rows, int softplus) {
    whole wild = {0};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PARTS; i++) {
            lanes delta = softplus ? softplus_of(w->delta[r].part[i]) : w->delta[r].part[i];
            w->delta[r].part[i] = delta;
            w->x[r].part[i] = delta * w->u[r].part[i];
            wild |= ~(magnitude(delta) * w->fastest.part[i] < REACH);
        }
    int any = 0;
    for (int64_t i = 0; i < LANES; i++) any |= wild[i];
    return any;
}

INLINE void advance(workspace *w, int64_t rows, int wild) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < PARTS; i++) {
            lanes delta = w->delta[r].part[i], x = w->x[r].part[i], y = {0};
#pragma GCC unroll 16
            for (int64_t n = 0; n < STATES; n++) {
                lanes h = exp2_of(delta * w->rate[n].part[i], wild) * w->h[n].part[i] + x * w->B[r][n];
                w->h[n].part[i] = h;
                y += h * w->C[r][n];
            }
            w->y[r].part[i] = y;
        }
}

static void write_tile(const workspace *w, const problem *p, const pass *k, const int64_t *token, int64_t rows) {
    int64_t direction = p->summed ? 0 : k->direction, last = k->first + k->count == p->states;
    int adds = k->first || k->direction > direction;
    int gates = p->z.at && last && (!p->summed || k->direction + 1 == p->directions);
    float *sequence = p->y + (direction * p->images + k->image) * p->length * p->channels + k->channel;
    for (int64_t r = 0; r < rows; r++) {
        float *to = sequence + token[r] * p->channels;
        row y = adds ? read_row(to, k->width) : (row){0};
        row z = gates ? read_row(token_of(&p->z, k, token[r]) + k->channel, k->width) : (row){0};
        for (int64_t i = 0; i < PARTS; i++) {
            y.part[i] += w->D.part[i] * w->u[r].part[i] + w->y[r].part[i];
            if (gates) y.part[i] *= silu_of(z.part[i]);
        }
        copy(to, &y, k->width);
    }
}

/* Set token[r] to where row r of a tile lies, the last one again beyond the end; return the rows before that. */
static int64_t tile_of(int64_t *token, const problem *p, int64_t start, int64_t backward) {
    int64_t rows = p->length - start < TILE ? p->length - start : TILE;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t t = start + (r < rows ? r : rows - 1);
        token[r] = backward ? p->length - 1 - t : t;
    }
    return rows;
}

static void scan_states(const problem *p, const pass *k) {
    workspace w;
    begin(&w, p, k);
    for (int64_t start = 0; start < p->length; start += TILE) {
        int64_t token[TILE], rows = tile_of(token, p, start, (p->reverse + k->direction) % 2);
        read_tile(&w, p, k, token, rows);
        if (step_sizes(&w, rows, (int)p->softplus)) advance(&w, rows, 1);
        else advance(&w, rows, 0);
        write_tile(&w, p, k, token, rows);
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
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < tasks; i++) {
        pass k = block(p, i);
        for (int64_t last = k.direction + together; k.direction < last; k.direction++) scan_direction(p, k);
    }
}

/* y = the step sizes themselves, of a problem with a weight */
PUBLIC void delta_projection(const problem *p) {
    int64_t blocks = blocks_of(p, p->directions);
    int threads = (int)p->threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
        pass k = block(p, i);
        workspace w;
        begin(&w, p, &k);
        memset(w.u, 0, sizeof w.u);
        float *y = p->y + (k.direction * p->images + k.image) * p->length * p->channels + k.channel;
        for (int64_t start = 0; start < p->length; start += TILE) {
            int64_t token[TILE], rows = tile_of(token, p, start, 0);
            read_steps(&w, p, &k, token);
            step_sizes(&w, rows, 1);
            for (int64_t r = 0; r < rows; r++) copy(y + token[r] * p->channels, &w.delta[r], k.width);
        }
    }
}
