/* LIF over all time steps: a block's membranes stay in registers while t runs, so that each current is read once.

   REAL is the state's type, float or double; the caller compiles the file for each. Blocks are always inlined with
   their width, layout and reset known, so that a membrane block becomes vectors and its loops vectorise. */

#include <string.h>

#include "../common.h"

#ifndef REAL
#define REAL float
#endif
#define LANES 16 /* windows per pooling block, with four membranes each */
#define BLOCK 16 /* membranes per block without pooling: a cache line of floats per step; wider blocks were slower */
#define LINE ((int64_t)(64 / sizeof(REAL)))

typedef struct {
    REAL decay, gain, threshold;
} neuron;

/* T, and the stride of a time step in the current and in the output, in elements; `from` is 0 if all steps read the
   same current */
typedef struct {
    int64_t steps, from, to;
} walk;

/* the reset of a membrane after it fires; a SILENCED one never fires again */
enum reset { TO_ZERO, BY_THRESHOLD, SILENCED };

INLINE REAL fire(REAL *v, REAL current, neuron p, enum reset reset) {
    REAL charged = p.decay * *v + p.gain * current;
    int fired = charged >= p.threshold;
    REAL left = reset == BY_THRESHOLD ? charged - p.threshold : reset == SILENCED ? -(REAL)__builtin_inf() : (REAL)0;
    *v = fired ? left : charged;
    return fired ? (REAL)1 : (REAL)0;
}

/* Prefetches for a later block: T steps are T streams, too many for a CPU's prefetcher. Into the second-level cache,
   because the streams are a power of two apart and would evict each other from the first. */
INLINE void fetch(const REAL *current, int64_t n) {
    for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(current + i, 0, 2);
}

INLINE void spike_block(const REAL *current, REAL *spikes, walk w, int64_t n, neuron p, enum reset reset) {
    REAL v[BLOCK] = {0};
    for (int64_t t = 0; t < w.steps; t++, current += w.from, spikes += w.to) {
        fetch(current + 16 * BLOCK, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) spikes[i] = fire(&v[i], current[i], p, reset);
    }
}

INLINE void spike_blocks(
    const REAL *current, REAL *spikes, walk w, int64_t n, neuron p, enum reset reset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) {
        if (n - i >= BLOCK) spike_block(current + i, spikes + i, w, BLOCK, p, reset);
        else spike_block(current + i, spikes + i, w, n - i, p, reset);
    }
}

/* current (T, n) or (n,), spikes (T, n) */
PUBLIC void lif(
    const REAL *current, REAL *spikes, int64_t steps, int64_t step, int64_t n, double decay, double gain,
    double threshold, int subtract, int threads) {
    neuron p = {(REAL)decay, (REAL)gain, (REAL)threshold};
    walk w = {steps, step, n};
    if (subtract) spike_blocks(current, spikes, w, n, p, BY_THRESHOLD, threads);
    else spike_blocks(current, spikes, w, n, p, TO_ZERO, threads);
}

/* A row of `n` windows: with channels last, the channels of a pooled pixel, else the pooled line of a channel. `pitch`
   is the distance between the corners of two windows, `right` and `below` from a corner to its neighbours, and `ahead`
   to the corner of a row to prefetch. */
typedef struct {
    int64_t n, pitch, right, below, ahead;
} row;

/* the output contains counts (uint8_t) or means (REAL) */
INLINE void put(void *pooled, int64_t i, REAL count, int counts) {
    if (counts) ((uint8_t *)pooled)[i] = (uint8_t)count;
    else ((REAL *)pooled)[i] = count * (REAL)0.25;
}

INLINE void fetch_windows(const REAL *corner, row r, int lanes) {
    fetch(corner, lanes * r.pitch);
    fetch(corner + r.below, lanes * r.pitch);
    if (r.pitch == 2) return;
    fetch(corner + r.right, lanes);
    fetch(corner + r.below + r.right, lanes);
}

INLINE void pool_block(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int lanes, enum reset reset, int counts) {
    REAL v[4][LANES] = {0};
    for (int64_t t = 0; t < w.steps; t++, current += w.from, at += w.to) {
        if (lanes > 1) fetch_windows(current + r.ahead, r, lanes);
#pragma omp simd
        for (int i = 0; i < lanes; i++) {
            const REAL *corner = current + i * r.pitch;
            REAL count = fire(&v[0][i], corner[0], p, reset) + fire(&v[1][i], corner[r.right], p, reset);
            count += fire(&v[2][i], corner[r.below], p, reset);
            count += fire(&v[3][i], corner[r.below + r.right], p, reset);
            put(pooled, at + i, count, counts);
        }
    }
}

/* instead of being ragged, a row's last block overlaps the previous one and rewrites the same values */
INLINE void pool_blocks(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int lanes, enum reset reset, int counts) {
    for (int64_t i = 0; i < r.n; i += lanes) {
        int64_t first = i + lanes <= r.n ? i : r.n - lanes;
        pool_block(current + first * r.pitch, pooled, at + first, w, r, p, lanes, reset, counts);
    }
}

INLINE void pool_row(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, enum reset reset, int counts) {
    if (r.n >= LANES) pool_blocks(current, pooled, at, w, r, p, LANES, reset, counts);
    else if (r.n >= LANES / 2) pool_blocks(current, pooled, at, w, r, p, LANES / 2, reset, counts);
    else pool_blocks(current, pooled, at, w, r, p, 1, reset, counts);
}

INLINE void pool_layout(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, enum reset reset, int counts) {
    if (reset == SILENCED) pool_row(current, pooled, at, w, r, p, SILENCED, 0);
    else if (reset && counts) pool_row(current, pooled, at, w, r, p, BY_THRESHOLD, 1);
    else if (reset) pool_row(current, pooled, at, w, r, p, BY_THRESHOLD, 0);
    else if (counts) pool_row(current, pooled, at, w, r, p, TO_ZERO, 1);
    else pool_row(current, pooled, at, w, r, p, TO_ZERO, 0);
}

static void pool_any(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, enum reset reset, int counts) {
    row last = {r.n, 1, r.right, r.below, r.ahead}, first = {r.n, 2, 1, r.below, r.ahead};
    if (r.pitch == 1) pool_layout(current, pooled, at, w, last, p, reset, counts);
    else pool_layout(current, pooled, at, w, first, p, reset, counts);
}

/* current (T, B, C, H, W) or (B, C, H, W), pooled (T, B, C, H/2, W/2); with channels last both are (..., H, W, C) in
   memory; SILENCED neurons have no counts */
PUBLIC void lif_pool(
    const REAL *current, void *pooled, int64_t steps, int64_t step, int64_t batch, int64_t channels, int64_t height,
    int64_t width, int channels_last, double decay, double gain, double threshold, enum reset reset, int counts,
    int threads) {
    neuron p = {(REAL)decay, (REAL)gain, (REAL)threshold};
    int64_t lines = height / 2, columns = width / 2, pixel = channels_last ? channels : 1, line = width * pixel;
    int64_t planes = channels_last ? lines : channels, rows = channels_last ? columns : lines;
    int64_t plane = channels_last ? 2 * line : height * line, next = channels_last ? 2 * pixel : 2 * line;
    row r = {channels_last ? channels : columns, channels_last ? 1 : 2, pixel, line, 0};
    r.ahead = r.n ? next * ((4 * LANES + r.n - 1) / r.n) : 0;
    walk w = {steps, step, batch * planes * rows * r.n};
#pragma omp parallel for collapse(3) num_threads(threads) schedule(static)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < planes; i++)
            for (int64_t j = 0; j < rows; j++) {
                const REAL *start = current + b * channels * height * width + i * plane + j * next;
                int64_t at = ((b * planes + i) * rows + j) * r.n;
                pool_any(start, pooled, at, w, r, p, reset, counts);
            }
}

/* LANES channels of a window. The charges of their steps are kept, because later steps add them up; `divisors` lists
   each step's divisors, each list followed by an end. */
INLINE void pool_periods(
    const REAL *current, const REAL *bias, REAL *pooled, walk w, row r, neuron p, const int64_t *divisors) {
    REAL v[4][LANES] = {0}, kept[w.steps][4][LANES];
    const int64_t corners[4] = {0, r.right, r.below, r.below + r.right};
    for (int64_t t = 0; t < w.steps; t++, current += w.from, pooled += w.to, divisors++) {
        REAL charge[4][LANES];
        for (int c = 0; c < 4; c++) {
            fetch(current + corners[c] + r.ahead, LANES);
            memcpy(kept[t][c], current + corners[c], sizeof kept[t][c]);
            memcpy(charge[c], bias, sizeof charge[c]);
        }
        for (; *divisors; divisors++)
            for (int c = 0; c < 4; c++)
#pragma omp simd
                for (int i = 0; i < LANES; i++) charge[c][i] += kept[*divisors - 1][c][i];
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            REAL count = fire(&v[0][i], charge[0][i], p, TO_ZERO) + fire(&v[1][i], charge[1][i], p, TO_ZERO);
            count += fire(&v[2][i], charge[2][i], p, TO_ZERO) + fire(&v[3][i], charge[3][i], p, TO_ZERO);
            pooled[i] = count * (REAL)0.25;
        }
    }
}

/* Neurons that receive bias (channels,) + current[d - 1] for each d that divides their step t = 1 .. steps. `current`
   is (steps, batch, height, width, channels), `pooled` (steps, batch, height / 2, width / 2, channels); `divisors` lists
   each step's divisors, each list followed by a 0. */
typedef struct {
    const REAL *bias;
    REAL *pooled;
    const int64_t *divisors;
    int64_t steps, batch, height, width, channels;
    double decay, gain, threshold;
} periods;

/* Pools two lines of currents, `n` channels (at least LANES) from `channel` on; `at` counts the lines in pooled. */
INLINE void pool_line(const periods *l, const REAL *current, walk w, row r, int64_t n, int64_t channel, int64_t at) {
    neuron p = {(REAL)l->decay, (REAL)l->gain, (REAL)l->threshold};
    for (int64_t j = 0; j < l->width / 2; j++) {
        REAL *out = l->pooled + (at * (l->width / 2) + j) * l->channels + channel;
        for (int64_t c = 0; c < n; c += LANES) {
            int64_t first = c + LANES <= n ? c : n - LANES;
            const REAL *corner = current + 2 * j * r.right + first;
            pool_periods(corner, l->bias + channel + first, out + first, w, r, p, l->divisors);
        }
    }
}

static int64_t pooled_step(const periods *l) {
    return l->batch * (l->height / 2) * (l->width / 2) * l->channels;
}

/* at least LANES channels */
PUBLIC void lif_pool_periods(const periods *l, const REAL *current, int threads) {
    int64_t line = l->width * l->channels, lines = l->height / 2;
    row r = {.right = l->channels, .below = line, .ahead = 2 * LANES};
    walk w = {l->steps, l->batch * l->height * line, pooled_step(l)};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < l->batch * lines; at++) {
        const REAL *first = current + (at / lines * l->height + at % lines * 2) * line;
        pool_line(l, first, w, r, l->channels, 0, at);
    }
}

/* For spike_conv2d_lines: its input is (steps, 2, width, n) for the channels from `channel` on. */
PUBLIC void lif_pool_line(const periods *l, const REAL *lines, int64_t n, int64_t channel, int64_t at) {
    row r = {.right = n, .below = l->width * n, .ahead = 2 * LANES};
    pool_line(l, lines, (walk){l->steps, 2 * l->width * n, pooled_step(l)}, r, n, channel, at);
}
