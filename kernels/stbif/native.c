/* ST-BIF over all time steps and the max pool of running sums: state stays in the cache while t runs.

   REAL is the state's type, float or double; the caller compiles the file for each. */

#include <stdint.h>

#ifndef REAL
#define REAL float
#endif
#define PUBLIC __attribute__((visibility("default")))
#define TILE 1024           /* neurons a tile */
#define PAD 80              /* rows of exactly a page would share their places in the cache */
#define LANES 64            /* channels a pooling tile */
#define WORTH_A_THREAD 16384 /* below so many elements a step, waking a thread costs more than it saves */

/* What a step adds to the membrane: current + bias[channel] + residual. A bias lies on `run` neighbours, then comes the
   next of `channels`. Null pointers are left out. */
typedef struct {
    const REAL *current, *bias, *residual;
    int64_t channels, run;
} charge;

static void add_bias(REAL *restrict x, int64_t first, int64_t n, const REAL *restrict bias, int64_t channels) {
    for (int64_t i = 0; i < n;) {
        int64_t channel = (first + i) % channels, left = channels - channel, m = left < n - i ? left : n - i;
        for (int64_t j = 0; j < m; j++) x[i + j] += bias[channel + j];
        i += m;
    }
}

static void add_bias_in_runs(REAL *restrict x, int64_t first, int64_t n, const REAL *restrict bias, const charge *c) {
    for (int64_t i = 0; i < n;) {
        int64_t at = first + i, left = c->run - at % c->run, m = left < n - i ? left : n - i;
        REAL b = bias[at / c->run % c->channels];
        for (int64_t j = 0; j < m; j++) x[i + j] += b;
        i += m;
    }
}

static void gather(REAL *restrict x, const charge *c, int64_t t, int64_t stride, int64_t first, int64_t n) {
    const REAL *restrict current = c->current + t * stride + first;
    for (int64_t i = 0; i < n; i++) x[i] = current[i];
    if (c->bias && c->run == 1) add_bias(x, first, n, c->bias + t * c->channels, c->channels);
    else if (c->bias) add_bias_in_runs(x, first, n, c->bias + t * c->channels, c);
    if (!c->residual) return;
    const REAL *restrict residual = c->residual + t * stride + first;
    for (int64_t i = 0; i < n; i++) x[i] += residual[i];
}

/* the tracer and the codes are REALs, so that every lane of the loop has one width */
static void fire(
    REAL *restrict v, REAL *restrict k, REAL *restrict codes, const REAL *restrict x, int64_t n, REAL s, REAL pos_max,
    REAL neg_min) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL charged = v[i] + x[i];
        REAL up = (charged >= s) & (k[i] < pos_max) ? (REAL)1 : (REAL)0;
        REAL q = (charged < 0) & (k[i] > neg_min) ? (REAL)-1 : up;
        v[i] = charged - s * q;
        k[i] += q;
        codes[i] = q;
    }
}

static void emit(const REAL *restrict q, int64_t n, REAL s, int8_t *restrict codes, REAL *restrict values) {
    if (codes)
        for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)q[i];
    else
        for (int64_t i = 0; i < n; i++) values[i] = s * q[i];
}

static void tile(
    const charge *c, int8_t *codes, REAL *values, int64_t steps, int64_t stride, int64_t first, int64_t n, REAL s,
    REAL pos_max, REAL neg_min) {
    REAL v[TILE + PAD], k[TILE + PAD], q[TILE + PAD], x[TILE + PAD];
    int adds = c->bias || c->residual;
    for (int64_t i = 0; i < n; i++) v[i] = s / 2, k[i] = 0;
    for (int64_t t = 0; t < steps; t++) {
        int64_t at = t * stride + first;
        if (adds) gather(x, c, t, stride, first, n);
        fire(v, k, q, adds ? x : c->current + at, n, s, pos_max, neg_min);
        emit(q, n, s, codes ? codes + at : 0, values ? values + at : 0);
    }
}

/* current, residual and either codes or values (T, n); bias (T, channels) */
PUBLIC void stbif(
    const REAL *current, const REAL *bias, const REAL *residual, int8_t *codes, REAL *values, int64_t steps, int64_t n,
    int64_t channels, int64_t run, const REAL *threshold, double pos_max, double neg_min, int threads) {
    charge c = {current, bias, residual, channels, run};
#pragma omp parallel for num_threads(threads) schedule(static) if (n >= WORTH_A_THREAD)
    for (int64_t first = 0; first < n; first += TILE) {
        int64_t width = n - first < TILE ? n - first : TILE;
        tile(&c, codes, values, steps, n, first, width, *threshold, (REAL)pos_max, (REAL)neg_min);
    }
}

/* Pictures (height, width, channels) and square windows; `sums` and `previous` are one image's state. */
typedef struct {
    int64_t height, width, channels, kernel, stride, padding, out_height, out_width;
} pooling;

static int64_t clipped(int64_t at, int64_t end) { return at < 0 ? 0 : at < end ? at : end; }

static void add_step(double *restrict sums, const REAL *restrict values, int64_t pixels, int64_t channels, int64_t n) {
    for (int64_t pixel = 0; pixel < pixels; pixel++)
        for (int64_t i = 0; i < n; i++) sums[pixel * channels + i] += values[pixel * channels + i];
}

static void largest(REAL *restrict best, const double *sums, int64_t y, int64_t x, int64_t n, const pooling *p) {
    int64_t top = y * p->stride - p->padding, left = x * p->stride - p->padding;
    int64_t y1 = clipped(top + p->kernel, p->height), x1 = clipped(left + p->kernel, p->width);
    for (int64_t i = 0; i < n; i++) best[i] = -__builtin_inff();
    for (int64_t row = clipped(top, p->height); row < y1; row++)
        for (int64_t column = clipped(left, p->width); column < x1; column++) {
            const double *restrict at = sums + (row * p->width + column) * p->channels;
            for (int64_t i = 0; i < n; i++) best[i] = (REAL)at[i] > best[i] ? (REAL)at[i] : best[i];
        }
}

static void emit_step(const double *sums, REAL *restrict previous, REAL *restrict out, int64_t n, const pooling *p) {
    for (int64_t y = 0; y < p->out_height; y++)
        for (int64_t x = 0; x < p->out_width; x++) {
            int64_t at = (y * p->out_width + x) * p->channels;
            REAL best[LANES];
            largest(best, sums, y, x, n, p);
            for (int64_t i = 0; i < n; i++) {
                out[at + i] = best[i] - previous[at + i];
                previous[at + i] = best[i];
            }
        }
}

/* values (T, B, H, W, C), out (T, B, H', W', C); sums (B, H, W, C) and previous (B, H', W', C) arrive as zeros */
PUBLIC void max_pool_delta(
    const REAL *values, REAL *out, double *sums, REAL *previous, int64_t steps, int64_t batch, int64_t height,
    int64_t width, int64_t channels, int64_t kernel, int64_t stride, int64_t padding, int64_t out_height,
    int64_t out_width, int threads) {
    pooling p = {height, width, channels, kernel, stride, padding, out_height, out_width};
    int64_t pixels = height * width, image = pixels * channels, out_image = out_height * out_width * channels;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (batch * image >= WORTH_A_THREAD)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t n = channels - c < LANES ? channels - c : LANES, at = b * image + c, out_at = b * out_image + c;
            for (int64_t t = 0; t < steps; t++) {
                add_step(sums + at, values + t * batch * image + at, pixels, channels, n);
                emit_step(sums + at, previous + out_at, out + t * batch * out_image + out_at, n, &p);
            }
        }
}
