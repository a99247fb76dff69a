/* ST-BIF over all time steps and the max pool of running sums, forwards and backwards: the state stays in the cache over
   all steps.

   REAL is the state's type, float or double; the caller compiles the file for each. */

#define _DEFAULT_SOURCE /* madvise */
#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/mman.h>

#include "../common.h"

#ifndef REAL
#define REAL float
#endif
#define TILE 64              /* neurons per tile: few, so that its rows for all steps fit in the cache */
#define AHEAD (2 * TILE)     /* prefetch distance in neurons */
#define LINE ((int64_t)(64 / sizeof(REAL)))
#define LANES 64             /* channels per pooling tile */
#define WORTH_A_THREAD 16384 /* with fewer elements per step, waking a thread costs more than it saves */
#define FRESH (32 << 20)     /* bytes above which malloc gets new pages from the kernel in every call */

/* What a step adds to the membrane: current + bias[channel] + residual. A bias applies to `run` neighbours, then the
   next of `channels` follows. Null pointers are left out. */
typedef struct {
    const REAL *current, *bias, *residual;
    int64_t steps, n, channels, run;
} charge;

/* the tracer and its bounds are REALs, so that all lanes of the loops have the same width */
typedef struct {
    REAL s, pos_max, neg_min;
} neuron;

/* Requests huge pages for new memory: thousands of page faults would cost more than the kernel itself. */
static void expect_writes(void *start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page;
    if (bytes >= FRESH) madvise((void *)first, ((uintptr_t)start + bytes - first) / page * page, MADV_HUGEPAGE);
#endif
}

/* Returns the bias of `n` neurons from `first` on: in place if contiguous, else written to `row`. */
static const REAL *bias_row(REAL *restrict row, const charge *c, int64_t t, int64_t first, int64_t n) {
    const REAL *bias = c->bias + t * c->channels;
    int64_t channel = first / c->run % c->channels;
    if (c->run == 1 && channel + n <= c->channels) return bias + channel;
    for (int64_t i = 0; i < n;) {
        int64_t left = c->run == 1 ? c->channels - channel : c->run - (first + i) % c->run;
        int64_t m = left < n - i ? left : n - i;
        if (c->run == 1) memcpy(row + i, bias + channel, m * sizeof(REAL));
        else for (int64_t j = 0; j < m; j++) row[i + j] = bias[channel];
        channel = c->run == 1 || channel + 1 == c->channels ? 0 : channel + 1;
        i += m;
    }
    return row;
}

/* The biases of a tile's neurons: none, one for all, or a row. */
enum biases { NO_BIAS, ONE_BIAS, BIAS_ROW };

static enum biases biases_of(const charge *c, int64_t first, int64_t n) {
    if (!c->bias) return NO_BIAS;
    return first % c->run + n <= c->run ? ONE_BIAS : BIAS_ROW;
}

/* x = current + bias + residual; absent terms are compiled out if the caller passes literals */
INLINE REAL charge_of(const REAL *current, const REAL *bias, enum biases biases, const REAL *residual, int64_t i) {
    REAL x = current[i];
    if (biases) x += bias[biases == ONE_BIAS ? 0 : i];
    return residual ? x + residual[i] : x;
}

/* With k within its bounds, the two gated comparisons are one clamp. */
INLINE REAL next_tracer(REAL charged, REAL k, neuron p) {
    REAL next = k + (charged >= p.s ? (REAL)1 : (REAL)0) - (charged < 0 ? (REAL)1 : (REAL)0);
    next = next < p.neg_min ? p.neg_min : next;
    return next > p.pos_max ? p.pos_max : next;
}

/* One step of a tile, to codes or values; membranes and tracers before the spike go to `trace`, if given. */
INLINE void fire(
    REAL *restrict v, REAL *restrict k, const REAL *restrict current, const REAL *restrict bias, enum biases biases,
    const REAL *restrict residual, int8_t *restrict codes, REAL *restrict values, REAL *restrict trace, int64_t n,
    neuron p) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL charged = v[i] + charge_of(current, bias, biases, residual, i);
        REAL next = next_tracer(charged, k[i], p), q = next - k[i];
        if (trace) trace[i] = charged, trace[TILE + i] = k[i];
        v[i] = charged - p.s * q;
        k[i] = next;
        if (codes) codes[i] = (int8_t)(int32_t)q;
        if (values) values[i] = p.s * q;
    }
}

/* Prefetches for a later tile: T steps of two tensors are too many streams for a CPU's prefetcher. Into the second-level
   cache, because they are a power of two apart and would evict each other from the first. */
INLINE void fetch(const REAL *from, int64_t n) {
    for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

INLINE void fire_steps(
    const charge *c, int64_t first, int64_t n, int8_t *codes, REAL *values, REAL *trace, neuron p, enum biases biases,
    int shortcut) {
    REAL v[TILE], k[TILE], row[TILE];
    const REAL *one = biases == ONE_BIAS ? c->bias + first / c->run % c->channels : 0;
    for (int64_t i = 0; i < n; i++) v[i] = p.s / 2, k[i] = 0;
    for (int64_t t = 0; t < c->steps; t++) {
        int64_t at = t * c->n + first;
        const REAL *bias = biases == BIAS_ROW ? bias_row(row, c, t, first, n) : one ? one + t * c->channels : 0;
        const REAL *residual = shortcut ? c->residual + at : 0;
        fetch(c->current + at + AHEAD, n);
        if (shortcut) fetch(residual + AHEAD, n);
        fire(
            v, k, c->current + at, bias, biases, residual, codes ? codes + at : 0, values ? values + at : 0,
            trace ? trace + 2 * TILE * t : 0, n, p);
    }
}

/* A separate loop for each pair of terms: its conditions are constant, and with constant n state stays in registers. */
INLINE void fire_tile(const charge *c, int64_t first, int64_t n, int8_t *codes, REAL *values, REAL *trace, neuron p) {
    enum biases biases = biases_of(c, first, n);
    if (biases == BIAS_ROW && c->residual) fire_steps(c, first, n, codes, values, trace, p, BIAS_ROW, 1);
    else if (biases == BIAS_ROW) fire_steps(c, first, n, codes, values, trace, p, BIAS_ROW, 0);
    else if (biases == ONE_BIAS && c->residual) fire_steps(c, first, n, codes, values, trace, p, ONE_BIAS, 1);
    else if (biases == ONE_BIAS) fire_steps(c, first, n, codes, values, trace, p, ONE_BIAS, 0);
    else if (c->residual) fire_steps(c, first, n, codes, values, trace, p, NO_BIAS, 1);
    else fire_steps(c, first, n, codes, values, trace, p, NO_BIAS, 0);
}

static void spike_tile(const charge *c, int64_t first, int8_t *codes, REAL *values, neuron p) {
    if (c->n - first < TILE) fire_tile(c, first, c->n - first, codes, values, 0, p);
    else if (codes) fire_tile(c, first, TILE, codes, 0, 0, p);
    else fire_tile(c, first, TILE, 0, values, 0, p);
}

/* current, residual and either codes or values (T, n); bias (T, channels) */
PUBLIC void stbif(
    const REAL *current, const REAL *bias, const REAL *residual, int8_t *codes, REAL *values, int64_t steps, int64_t n,
    int64_t channels, int64_t run, const REAL *threshold, double pos_max, double neg_min, int threads) {
    charge c = {current, bias, residual, steps, n, channels, run};
    neuron p = {*threshold, (REAL)pos_max, (REAL)neg_min};
    expect_writes(codes ? (void *)codes : values, steps * n * (int64_t)(codes ? 1 : sizeof(REAL)));
#pragma omp parallel for num_threads(threads) schedule(static) if (n >= WORTH_A_THREAD)
    for (int64_t first = 0; first < n; first += TILE) spike_tile(&c, first, codes, values, p);
}

#define LOG2_E (REAL)1.44269504088896341
#define ROUND 12582912.0f /* x + ROUND has round(x) in its low bits */

/* e^x for x <= 0; results below 2^-125 serve as 0 here */
INLINE REAL exp_of(REAL x) {
    if (sizeof(REAL) == sizeof(double)) return (REAL)exp(x);
    float scaled = (float)(x * LOG2_E) < -125 ? -125 : (float)(x * LOG2_E);
    float shifted = scaled + ROUND, rest = scaled - (shifted - ROUND);
    union {
        float real;
        uint32_t bits;
    } whole = {shifted}, p;
    p.real = 1.33988750e-3f + rest * 1.53533328e-4f;
    p.real = 5.55033237e-2f + rest * (9.61843785e-3f + rest * p.real);
    p.real = 1.0f + rest * (6.93147182e-1f + rest * (2.40226477e-1f + rest * p.real));
    p.bits += whole.bits << 23;
    return p.real;
}

/* The derivative of sigmoid(slope x), which is even: no exponential overflows. */
INLINE REAL surrogate(REAL x, REAL slope) {
    REAL e = exp_of(x < 0 ? slope * x : -slope * x);
    return slope * e / ((1 + e) * (1 + e));
}

/* One step backwards: `carried` is the gradient of v after the spike, then that of the charge. */
INLINE void unfire(
    REAL *restrict carried, REAL *restrict to_s, const REAL *restrict grad, REAL *restrict to_charge,
    const REAL *restrict trace, int64_t n, neuron p) {
    REAL slope = 4 / p.s;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        REAL charged = trace[i], k = trace[TILE + i], q = next_tracer(charged, k, p) - k;
        REAL up = surrogate(charged - p.s, slope), down = surrogate(charged, slope);
        REAL fires = k < p.pos_max ? up : 0, retracts = k > p.neg_min ? down : 0;
        REAL to_value = grad[i] - carried[i], to_code = to_value * p.s;
        to_s[i] += to_value * q - to_code * fires;
        to_charge[i] = carried[i] += to_code * (fires + retracts);
    }
}

/* Recomputes the spikes with `trace` (steps, 2, TILE), then goes backwards; returns the threshold's gradient. */
static double unspike_tile(
    const charge *c, int64_t first, const REAL *grad, REAL *to_charge, REAL *trace, neuron p) {
    REAL carried[TILE] = {0}, to_s[TILE] = {0};
    int64_t n = c->n - first < TILE ? c->n - first : TILE;
    if (n < TILE) fire_tile(c, first, n, 0, 0, trace, p);
    else fire_tile(c, first, TILE, 0, 0, trace, p);
    for (int64_t t = c->steps - 1; t >= 0; t--) {
        int64_t at = t * c->n + first;
        unfire(carried, to_s, grad + at, to_charge + at, trace + 2 * TILE * t, n, p);
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += to_s[i] + carried[i] / 2;
    return sum;
}

/* grad and to_charge (T, n); `traces` (threads, T, 2, TILE) is scratch; to_threshold has an element per tile */
PUBLIC void stbif_backward(
    const REAL *grad, const REAL *current, const REAL *bias, const REAL *residual, REAL *to_charge, REAL *traces,
    double *to_threshold, int64_t steps, int64_t n, int64_t channels, int64_t run, const REAL *threshold,
    double pos_max, double neg_min, int threads) {
    charge c = {current, bias, residual, steps, n, channels, run};
    neuron p = {*threshold, (REAL)pos_max, (REAL)neg_min};
    expect_writes(to_charge, steps * n * (int64_t)sizeof(REAL));
#pragma omp parallel for num_threads(threads) schedule(static) if (n >= WORTH_A_THREAD)
    for (int64_t first = 0; first < n; first += TILE) {
        REAL *trace = traces + omp_get_thread_num() * steps * 2 * TILE;
        to_threshold[first / TILE] = unspike_tile(&c, first, grad, to_charge, trace, p);
    }
}

/* Images (height, width, channels) and square windows; `sums` and `previous` are the state of one image. */
typedef struct {
    int64_t height, width, channels, kernel, stride, padding, out_height, out_width;
} pooling;

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

/* values (T, B, H, W, C), out (T, B, H', W', C); sums (B, H, W, C) and previous (B, H', W', C) are initially zero */
PUBLIC void max_pool_delta(
    const REAL *values, REAL *out, double *sums, REAL *previous, int64_t steps, int64_t batch, int64_t height,
    int64_t width, int64_t channels, int64_t out_height, int64_t out_width, int64_t kernel, int64_t stride,
    int64_t padding, int threads) {
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

/* Finds each window's winner: the first pixel of `sums` with the window's maximum. */
static void find_winners(const double *sums, int32_t *restrict winners, int64_t n, const pooling *p) {
    for (int64_t y = 0; y < p->out_height; y++)
        for (int64_t x = 0; x < p->out_width; x++) {
            int64_t top = y * p->stride - p->padding, left = x * p->stride - p->padding;
            int64_t y1 = clipped(top + p->kernel, p->height), x1 = clipped(left + p->kernel, p->width);
            int32_t *restrict winner = winners + (y * p->out_width + x) * p->channels;
            REAL best[LANES];
            for (int64_t i = 0; i < n; i++) best[i] = -__builtin_inff(), winner[i] = 0;
            for (int64_t row = clipped(top, p->height); row < y1; row++)
                for (int64_t column = clipped(left, p->width); column < x1; column++) {
                    int32_t pixel = (int32_t)(row * p->width + column);
                    const double *restrict at = sums + pixel * p->channels;
                    for (int64_t i = 0; i < n; i++) {
                        winner[i] = (REAL)at[i] > best[i] ? pixel : winner[i];
                        best[i] = (REAL)at[i] > best[i] ? (REAL)at[i] : best[i];
                    }
                }
        }
}

/* to_values = later + the winners' gradient at a step: grad minus the later step's, which subtracted the pool */
static void scatter_step(
    const REAL *restrict grad, const REAL *restrict later_grad, const int32_t *restrict winners,
    const REAL *restrict later, REAL *restrict to_values, int64_t n, const pooling *p) {
    for (int64_t pixel = 0; pixel < p->height * p->width; pixel++)
        for (int64_t i = 0; i < n; i++)
            to_values[pixel * p->channels + i] = later ? later[pixel * p->channels + i] : 0;
    for (int64_t window = 0; window < p->out_height * p->out_width; window++)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = window * p->channels + i;
            to_values[winners[at] * p->channels + i] += later_grad ? grad[at] - later_grad[at] : grad[at];
        }
}

/* grad and winners (T, B, H', W', C), values and to_values (T, B, H, W, C); sums (B, H, W, C) is initially zero */
PUBLIC void max_pool_delta_backward(
    const REAL *grad, const REAL *values, REAL *to_values, double *sums, int32_t *winners, int64_t steps, int64_t batch,
    int64_t height, int64_t width, int64_t channels, int64_t out_height, int64_t out_width, int64_t kernel,
    int64_t stride, int64_t padding, int threads) {
    pooling p = {height, width, channels, kernel, stride, padding, out_height, out_width};
    int64_t pixels = height * width, image = pixels * channels, out_image = out_height * out_width * channels;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (batch * image >= WORTH_A_THREAD)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t n = channels - c < LANES ? channels - c : LANES, at = b * image + c, out_at = b * out_image + c;
            int64_t step = batch * image, out_step = batch * out_image;
            for (int64_t t = 0; t < steps; t++) {
                add_step(sums + at, values + t * step + at, pixels, channels, n);
                find_winners(sums + at, winners + t * out_step + out_at, n, &p);
            }
            for (int64_t t = steps - 1; t >= 0; t--) {
                const REAL *here = grad + t * out_step + out_at;
                REAL *to = to_values + t * step + at;
                int last = t == steps - 1;
                scatter_step(
                    here, last ? 0 : here + out_step, winners + t * out_step + out_at, last ? 0 : to + step, to, n, &p);
            }
        }
}
