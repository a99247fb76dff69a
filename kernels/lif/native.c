/* LIF over all time steps: a block's membranes stay in registers while t runs, so that each current is read once.

   REAL is the state's type, float or double; the caller compiles the file for each. Blocks are always inlined with
   their width, layout and reset known, so that a membrane block becomes vectors and its loops vectorise. */

#include "../common.h"

#ifndef REAL
#define REAL float
#endif
#define LANES 16 /* windows a pooling block; four membranes each */
#define BLOCK 16 /* membranes a block without pooling: a line of floats of each step; wider ones were slower */
#define LINE ((int64_t)(64 / sizeof(REAL)))

typedef struct {
    REAL decay, gain, threshold;
} neuron;

/* T, and the distance of two time steps in the current and in the output, in elements; `from` is 0 where one current
   is read at all of them */
typedef struct {
    int64_t steps, from, to;
} walk;

INLINE REAL fire(REAL *v, REAL current, neuron p, int subtract) {
    REAL charged = p.decay * *v + p.gain * current;
    int fired = charged >= p.threshold;
    *v = fired ? (subtract ? charged - p.threshold : (REAL)0) : charged;
    return fired ? (REAL)1 : (REAL)0;
}

/* Starts loads that a later block needs: T steps are as many streams, too many for a CPU to foresee. Into the second
   level, because the streams lie a power of two apart and would throw each other out of the first. */
INLINE void fetch(const REAL *current, int64_t n) {
    for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(current + i, 0, 2);
}

INLINE void spike_block(const REAL *current, REAL *spikes, walk w, int64_t n, neuron p, int subtract) {
    REAL v[BLOCK] = {0};
    for (int64_t t = 0; t < w.steps; t++, current += w.from, spikes += w.to) {
        fetch(current + 16 * BLOCK, n);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) spikes[i] = fire(&v[i], current[i], p, subtract);
    }
}

INLINE void spike_blocks(const REAL *current, REAL *spikes, walk w, int64_t n, neuron p, int subtract, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) {
        if (n - i >= BLOCK) spike_block(current + i, spikes + i, w, BLOCK, p, subtract);
        else spike_block(current + i, spikes + i, w, n - i, p, subtract);
    }
}

/* current (T, n) or (n,), spikes (T, n) */
PUBLIC void lif(
    const REAL *current, REAL *spikes, int64_t steps, int64_t step, int64_t n, double decay, double gain,
    double threshold, int subtract, int threads) {
    neuron p = {(REAL)decay, (REAL)gain, (REAL)threshold};
    walk w = {steps, step, n};
    if (subtract) spike_blocks(current, spikes, w, n, p, 1, threads);
    else spike_blocks(current, spikes, w, n, p, 0, threads);
}

/* A row of `n` windows: channels last the channels of a pooled pixel, else the pooled line of a channel. `pitch` lies
   between the corners of two windows, `right` and `below` between a corner and its neighbours, `ahead` between a corner
   and that of a row worth fetching. */
typedef struct {
    int64_t n, pitch, right, below, ahead;
} row;

/* the output holds counts (uint8_t) or means (REAL) */
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
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int lanes, int subtract, int counts) {
    REAL v[4][LANES] = {0};
    for (int64_t t = 0; t < w.steps; t++, current += w.from, at += w.to) {
        if (lanes > 1) fetch_windows(current + r.ahead, r, lanes);
#pragma omp simd
        for (int i = 0; i < lanes; i++) {
            const REAL *corner = current + i * r.pitch;
            REAL count = fire(&v[0][i], corner[0], p, subtract) + fire(&v[1][i], corner[r.right], p, subtract);
            count += fire(&v[2][i], corner[r.below], p, subtract);
            count += fire(&v[3][i], corner[r.below + r.right], p, subtract);
            put(pooled, at + i, count, counts);
        }
    }
}

/* the last block of a row overlaps the one before, where it would be ragged: it writes the same again */
INLINE void pool_blocks(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int lanes, int subtract, int counts) {
    for (int64_t i = 0; i < r.n; i += lanes) {
        int64_t first = i + lanes <= r.n ? i : r.n - lanes;
        pool_block(current + first * r.pitch, pooled, at + first, w, r, p, lanes, subtract, counts);
    }
}

INLINE void pool_row(const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int subtract, int counts) {
    if (r.n >= LANES) pool_blocks(current, pooled, at, w, r, p, LANES, subtract, counts);
    else if (r.n >= LANES / 2) pool_blocks(current, pooled, at, w, r, p, LANES / 2, subtract, counts);
    else pool_blocks(current, pooled, at, w, r, p, 1, subtract, counts);
}

INLINE void pool_layout(
    const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int subtract, int counts) {
    if (subtract && counts) pool_row(current, pooled, at, w, r, p, 1, 1);
    else if (subtract) pool_row(current, pooled, at, w, r, p, 1, 0);
    else if (counts) pool_row(current, pooled, at, w, r, p, 0, 1);
    else pool_row(current, pooled, at, w, r, p, 0, 0);
}

static void pool_any(const REAL *current, void *pooled, int64_t at, walk w, row r, neuron p, int subtract, int counts) {
    row last = {r.n, 1, r.right, r.below, r.ahead}, first = {r.n, 2, 1, r.below, r.ahead};
    if (r.pitch == 1) pool_layout(current, pooled, at, w, last, p, subtract, counts);
    else pool_layout(current, pooled, at, w, first, p, subtract, counts);
}

/* current (T, B, C, H, W) or (B, C, H, W), pooled (T, B, C, H/2, W/2); channels last both lie as (..., H, W, C) */
PUBLIC void lif_pool(
    const REAL *current, void *pooled, int64_t steps, int64_t step, int64_t batch, int64_t channels, int64_t height,
    int64_t width, int channels_last, double decay, double gain, double threshold, int subtract, int counts,
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
                pool_any(start, pooled, at, w, r, p, subtract, counts);
            }
}
