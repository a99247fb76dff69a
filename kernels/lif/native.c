/* LIF over all time steps: a tile's membranes stay in the cache while t runs, so that each current is read once.

   REAL is the state's type, float or double; the caller compiles the file for each. `step` is the distance of two time
   steps of the current in elements, 0 where one current is read at all of them. */

#include <stdint.h>

#ifndef REAL
#define REAL float
#endif
#define PUBLIC __attribute__((visibility("default")))
#define TILE 1024   /* membranes a tile */
#define COLUMNS 64  /* columns of a row a pooling tile; four membranes each */
#define ROWS 8

typedef struct {
    REAL decay, gain, threshold;
    int subtract; /* reset by subtraction, else to zero */
} neuron;

/* always inlined, with `subtract` known, so that the loops around it vectorise */
static inline __attribute__((always_inline)) REAL fire(REAL *v, REAL current, neuron p, int subtract) {
    REAL charged = p.decay * *v + p.gain * current;
    int fired = charged >= p.threshold;
    *v = fired ? (subtract ? charged - p.threshold : (REAL)0) : charged;
    return fired ? (REAL)1 : (REAL)0;
}

static inline __attribute__((always_inline)) void spike_row(
    REAL *restrict v, const REAL *restrict current, REAL *restrict spikes, int64_t n, neuron p, int subtract) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) spikes[i] = fire(&v[i], current[i], p, subtract);
}

static void spike_tile(
    const REAL *current, REAL *spikes, int64_t steps, int64_t step, int64_t stride, int64_t n, neuron p) {
    REAL v[TILE] = {0};
    for (int64_t t = 0; t < steps; t++) {
        if (p.subtract) spike_row(v, current + t * step, spikes + t * stride, n, p, 1);
        else spike_row(v, current + t * step, spikes + t * stride, n, p, 0);
    }
}

/* current (T, n) or (n,), spikes (T, n) */
PUBLIC void lif(
    const REAL *current, REAL *spikes, int64_t steps, int64_t step, int64_t n, double decay, double gain,
    double threshold, int subtract, int threads) {
    neuron p = {(REAL)decay, (REAL)gain, (REAL)threshold, subtract};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < n; first += TILE) {
        int64_t width = n - first < TILE ? n - first : TILE;
        spike_tile(current + first, spikes + first, steps, step, n, width, p);
    }
}

/* Where a pooled element's window lies: `pitch` between two outputs of a row, then to its right and lower neighbours. */
typedef struct {
    int64_t pitch, right, below;
} window;

static inline __attribute__((always_inline)) void pool_row(
    REAL (*restrict v)[COLUMNS], const REAL *restrict current, REAL *restrict pooled, int64_t n, window w,
    int64_t pitch, neuron p, int subtract) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const REAL *corner = current + i * pitch;
        REAL count = fire(&v[0][i], corner[0], p, subtract) + fire(&v[1][i], corner[w.right], p, subtract);
        count += fire(&v[2][i], corner[w.below], p, subtract);
        count += fire(&v[3][i], corner[w.below + w.right], p, subtract);
        pooled[i] = count * (REAL)0.25;
    }
}

/* the pitch and the reset are known in each call: a loop with a pitch of its own does not vectorise well */
static void pool_any(
    REAL (*v)[COLUMNS], const REAL *current, REAL *pooled, int64_t n, window w, neuron p) {
    if (w.pitch == 1 && p.subtract) pool_row(v, current, pooled, n, w, 1, p, 1);
    else if (w.pitch == 1) pool_row(v, current, pooled, n, w, 1, p, 0);
    else if (p.subtract) pool_row(v, current, pooled, n, (window){2, 1, w.below}, 2, p, 1);
    else pool_row(v, current, pooled, n, (window){2, 1, w.below}, 2, p, 0);
}

/* Pooled rows of `n` elements, numbered over images, `planes` and `lines`; `image`, `plane`, `line` are the distances
   of the currents. Channels last a row is a pooled pixel, else the pooled line of a channel. */
typedef struct {
    int64_t planes, lines, n, image, plane, line;
    window w;
} layout;

static const REAL *row_start(const REAL *current, int64_t row, const layout *l) {
    int64_t line = row % l->lines, plane = row / l->lines % l->planes, image = row / l->lines / l->planes;
    return current + image * l->image + plane * l->plane + line * l->line;
}

static void pool_tile(
    const REAL *current, REAL *pooled, int64_t steps, int64_t step, int64_t stride, int64_t first, int64_t rows,
    int64_t column, const layout *l, neuron p) {
    REAL v[ROWS][4][COLUMNS] = {0};
    int64_t n = l->n - column < COLUMNS ? l->n - column : COLUMNS;
    for (int64_t t = 0; t < steps; t++)
        for (int64_t row = 0; row < rows; row++) {
            const REAL *start = row_start(current, first + row, l) + column * l->w.pitch + t * step;
            pool_any(v[row], start, pooled + t * stride + (first + row) * l->n + column, n, l->w, p);
        }
}

/* current (T, B, C, H, W) or (B, C, H, W), pooled (T, B, C, H/2, W/2); channels last both lie as (..., H, W, C) */
PUBLIC void lif_pool(
    const REAL *current, REAL *pooled, int64_t steps, int64_t step, int64_t batch, int64_t channels, int64_t height,
    int64_t width, int channels_last, double decay, double gain, double threshold, int subtract, int threads) {
    neuron p = {(REAL)decay, (REAL)gain, (REAL)threshold, subtract};
    int64_t image = channels * height * width;
    layout first = {channels, height / 2, width / 2, image, height * width, 2 * width, {2, 1, width}};
    layout last = {height / 2,           width / 2,    channels, image, 2 * width * channels,
                   2 * channels, {1, channels, width * channels}};
    layout l = channels_last ? last : first;
    int64_t rows = batch * l.planes * l.lines;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t column = 0; column < l.n; column += COLUMNS) {
            int64_t count = rows - row < ROWS ? rows - row : ROWS;
            pool_tile(current, pooled, steps, step, rows * l.n, row, count, column, &l, p);
        }
}
