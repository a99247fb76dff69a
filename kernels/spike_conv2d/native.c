/* Convolution over nonzeros. Every row of an image is written once as a list of its nonzeros; for each row of its window,
   an output pixel then goes through the part of that list within the window, and adds value * weights for
   64 output channels, which stay in registers.

   A nonzero's place in its row, column * channels + channel, minus the window's left edge is also its row of weights,
   because these are ordered (window_height, window_width, channels). Where a window extends beyond the edge of the
   image its list is shorter, so that no padding is needed. */

#include <omp.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "../common.h"

#define BLOCK 64   /* output channels per pixel whose sums stay in registers */
#define PADDED 16  /* weights are padded to a multiple of this number of channels */
/* floats per register, because compilers keep longer vectors in memory */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS (BLOCK / LANES)
#define TILE 128 /* output pixels per task: one row of the window's weights stays in the cache for all of them */
#define SMALL_TILE 8
#define CACHE_LINE 16 /* floats */
#define FEW 4 /* weights are prefetched unless fewer than one in this many is used */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

typedef struct {
    uint32_t place;
    float value;
} nonzero;

/* x (images, height, width, channels) and y (images, out_height, out_width, out_channels) contiguous; weight from `pack`
   in native.py; bias (out_channels,) or null. `lists` is scratch for `group` images, for each row: where each
   column's nonzeros begin, width + 1 numbers, then up to width * channels nonzeros. */
typedef struct {
    const float *x, *weight, *bias;
    float *y;
    int64_t *lists;
    int64_t images, channels, height, width, out_channels, window_height, window_width, stride, padding, out_height,
        out_width, group, threads;
} problem;

static int64_t *starts_of(const problem *p, int64_t row) {
    return p->lists + row * (p->width + 1 + p->width * p->channels);
}

#ifdef __AVX2__
#define AT_ONCE 8
static uint8_t set_bits[256][AT_ONCE]; /* the indices of a byte's set bits, lowest first */

__attribute__((constructor)) static void fill_set_bits(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, n = 0; bit < AT_ONCE; bit++)
            if (byte >> bit & 1) set_bits[byte][n++] = (uint8_t)bit;
}

/* Writes the nonzeros among the AT_ONCE values at `place` to the start of `list`; returns their number. */
INLINE int64_t list_some(nonzero *list, const float *x, int64_t place) {
    __m256 values = _mm256_loadu_ps(x + place);
    int mask = _mm256_movemask_ps(_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_NEQ_UQ));
    __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)set_bits[mask]));
    __m256i kept = _mm256_castps_si256(_mm256_permutevar8x32_ps(values, order));
    __m256i places = _mm256_add_epi32(order, _mm256_set1_epi32((int)place));
    __m256i low = _mm256_unpacklo_epi32(places, kept), high = _mm256_unpackhi_epi32(places, kept);
    _mm256_storeu_si256((__m256i *)list, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i *)list + 1, _mm256_permute2x128_si256(low, high, 0x31));
    return __builtin_popcount((unsigned)mask);
}
#endif

/* keeps NaN, which is not equal to zero; branchless, because spikes cannot be predicted */
static void list_row(const float *restrict x, int64_t *restrict starts, const problem *p) {
    nonzero *restrict list = (nonzero *)(starts + p->width + 1);
    int64_t n = 0, place = 0;
    for (int64_t column = 0; column < p->width; column++) {
        int64_t end = place + p->channels;
        starts[column] = n;
#ifdef __AVX2__
        for (; end - place >= AT_ONCE; place += AT_ONCE) n += list_some(list + n, x, place);
#endif
        for (; place < end; place++) {
            list[n] = (nonzero){(uint32_t)place, x[place]};
            n += x[place] != 0;
        }
    }
    starts[p->width] = n;
}

/* where the window of an output pixel begins in its image, whose first row is `origin` */
typedef struct {
    int64_t origin, top, left;
} corner;

/* Fills `corners` for `n` output pixels from `first`, numbered over the group's images. */
static void find_corners(corner *corners, int64_t first, int64_t n, const problem *p) {
    int64_t column = first % p->out_width, line = first / p->out_width % p->out_height;
    int64_t image = first / p->out_width / p->out_height;
    for (int64_t i = 0; i < n; i++) {
        corners[i] = (corner){image * p->height, line * p->stride - p->padding, column * p->stride - p->padding};
        if (++column < p->out_width) continue;
        column = 0;
        if (++line < p->out_height) continue;
        line = 0;
        image++;
    }
}

/* the nonzeros in a row of an output pixel's window, and the offset of the weights for place 0 from row 0 */
typedef struct {
    const nonzero *list;
    int64_t n, shift;
} segment;

/* Fills `segments` for row k of the windows of `n` output pixels; returns their number of nonzeros. */
static int64_t find_segments(segment *segments, const corner *corners, int64_t n, int64_t k, const problem *p) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t left = corners[i].left, row = corners[i].top + k;
        segments[i] = (segment){0};
        if (row < 0 || row >= p->height) continue;
        const int64_t *starts = starts_of(p, corners[i].origin + row);
        int64_t first = starts[clipped(left, p->width)], last = starts[clipped(left + p->window_width, p->width)];
        const nonzero *list = (const nonzero *)(starts + p->width + 1) + first;
        segments[i] = (segment){list, last - first, (k * p->window_width - left) * p->channels};
        count += last - first;
    }
    return count;
}

INLINE void walk(lanes *sums, segment s, const float *weight, int vectors) {
    const lanes *from = (const lanes *)(weight + s.shift * vectors * LANES);
    for (const nonzero *at = s.list, *end = at + s.n; at < end; at++) {
        const lanes *row = from + (int64_t)at->place * vectors;
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sums[v] += at->value * row[v];
    }
}

/* Reads, in sequence, the weights of row k of the window that any output pixel needs: memory is faster in this order
   than in that of the spikes, unless few weights are needed. */
static void fetch_row(const float *weight, int64_t k, const problem *p, int64_t block) {
    int64_t lowest = p->padding - (p->out_height - 1) * p->stride, highest = p->height + p->padding;
    if (k < lowest || k >= highest) return;
    int64_t left = clipped(p->padding - (p->out_width - 1) * p->stride, p->window_width);
    int64_t right = at_most(p->width + p->padding, p->window_width), column = p->channels * block;
    const volatile float *row = weight + k * p->window_width * column;
    for (int64_t i = left * column; i < right * column; i += CACHE_LINE) (void)row[i];
}

INLINE void emit(float *restrict y, const float *restrict sums, const float *restrict bias, int64_t n) {
    if (bias)
        for (int64_t i = 0; i < n; i++) y[i] = sums[i] + bias[i];
    else memcpy(y, sums, (size_t)n * sizeof(float));
}

/* Convolves `n` output pixels for a block's channels; `reads_ahead` if no earlier pixel has read its weights. */
INLINE void add_windows(
    lanes (*sums)[VECTORS], const corner *corners, segment *segments, int64_t n, int64_t block, int reads_ahead,
    const problem *p, int vectors) {
    const float *weight = p->weight + block * BLOCK * p->window_height * p->window_width * p->channels;
    memset(sums, 0, (size_t)n * sizeof sums[0]);
    for (int64_t k = 0; k < p->window_height; k++) {
        int64_t count = find_segments(segments, corners, n, k, p);
        if (reads_ahead && FEW * count >= p->window_width * p->channels) fetch_row(weight, k, p, vectors * LANES);
        for (int64_t i = 0; i < n; i++) {
            lanes kept[VECTORS];
            for (int v = 0; v < vectors; v++) kept[v] = sums[i][v];
            walk(kept, segments[i], weight, vectors);
            for (int v = 0; v < vectors; v++) sums[i][v] = kept[v];
        }
    }
}

/* `n` output pixels from `first` in the group that begins at image `origin`, for a block's channels */
INLINE void convolve(int64_t origin, int64_t first, int64_t n, int64_t block, const problem *p, int vectors) {
    lanes sums[TILE][VECTORS];
    corner corners[TILE];
    segment segments[TILE];
    find_corners(corners, first, n, p);
    add_windows(sums, corners, segments, n, block, origin + first == 0, p, vectors);
    int64_t channel = block * BLOCK, channels = at_most(p->out_channels - channel, BLOCK);
    float *y = p->y + (origin * p->out_height * p->out_width + first) * p->out_channels + channel;
    for (int64_t i = 0; i < n; i++)
        emit(y + i * p->out_channels, (const float *)sums[i], p->bias ? p->bias + channel : 0, channels);
}

/* the number of vectors is constant in each call: sums in a variable-length array would not stay in registers */
static void convolve_any(int64_t origin, int64_t first, int64_t n, int64_t block, const problem *p) {
    switch ((at_most(p->out_channels - block * BLOCK, BLOCK) + PADDED - 1) / PADDED) {
    case 1: convolve(origin, first, n, block, p, 1 * PADDED / LANES); break;
    case 2: convolve(origin, first, n, block, p, 2 * PADDED / LANES); break;
    case 3: convolve(origin, first, n, block, p, 3 * PADDED / LANES); break;
    default: convolve(origin, first, n, block, p, VECTORS);
    }
}

static int64_t tiles_of(int64_t pixels, int64_t tile) { return (pixels + tile - 1) / tile; }

static int64_t tile_for(int64_t pixels, int64_t blocks, int64_t threads) {
    int64_t tile = TILE;
    while (tile > SMALL_TILE && tiles_of(pixels, tile) * blocks < threads) tile /= 2;
    return tile;
}

PUBLIC void spike_conv2d(const problem *p) {
    int64_t row = p->width * p->channels, blocks = (p->out_channels + BLOCK - 1) / BLOCK;
    int threads = (int)p->threads;
#pragma omp parallel num_threads(threads)
    for (int64_t origin = 0; origin < p->images; origin += p->group) {
        int64_t images = at_most(p->images - origin, p->group), pixels = images * p->out_height * p->out_width;
        int64_t tile = tile_for(pixels, blocks, threads), tiles = tiles_of(pixels, tile);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < images * p->height; i++)
            list_row(p->x + (origin * p->height + i) * row, starts_of(p, i), p);
        /* block by block: a thread uses its part of the weights for all pixels before the next part */
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * tiles; task++) {
            int64_t first = task % tiles * tile;
            convolve_any(origin, first, at_most(pixels - first, tile), task / tiles, p);
        }
    }
}

/* Reads `n` channels, from `channel` on, of two lines of an image at all steps, (steps, 2, out_width, n), and pools
   them to line `at` of all steps; implemented by the neurons' library. */
typedef void reader(const void *neurons, const float *lines, int64_t n, int64_t channel, int64_t at);

/* A task: two lines of one image at all steps, numbered from the group's first, for the channels of a block. */
static void convolve_lines(
    lanes (*sums)[VECTORS], int64_t steps, int64_t first, int64_t image, int64_t line, int64_t block, const problem *p) {
    int64_t n = steps * 2 * p->out_width;
    corner *corners = (corner *)(sums + n);
    segment *segments = (segment *)(corners + n);
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i / p->out_width / 2, row = 2 * line + i / p->out_width % 2, column = i % p->out_width;
        corners[i] = (corner){
            (image * steps + t) * p->height, row * p->stride - p->padding, column * p->stride - p->padding};
    }
    add_windows(sums, corners, segments, n, block, first + image + line == 0, p, VECTORS);
}

/* x is (steps, images, height, width, channels), and `read` writes the output; out_channels is a multiple of BLOCK.
   `scratch` has `room` bytes per thread, for the sums, corners and segments of a task. */
PUBLIC void spike_conv2d_lines(
    const problem *p, int64_t steps, reader *read, const void *neurons, char *scratch, int64_t room) {
    int64_t row = p->width * p->channels, blocks = p->out_channels / BLOCK, lines = p->out_height / 2;
    int threads = (int)p->threads;
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < p->images; first += p->group) {
        lanes(*sums)[VECTORS] = (lanes(*)[VECTORS])(scratch + omp_get_thread_num() * room);
        int64_t images = at_most(p->images - first, p->group);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < images * steps * p->height; i++) {
            int64_t image = first + i / p->height / steps, t = i / p->height % steps;
            list_row(p->x + ((t * p->images + image) * p->height + i % p->height) * row, starts_of(p, i), p);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < images * lines * blocks; task++) {
            int64_t image = task / blocks / lines, line = task / blocks % lines, block = task % blocks;
            convolve_lines(sums, steps, first, image, line, block, p);
            read(neurons, (const float *)sums, BLOCK, block * BLOCK, (first + image) * lines + line);
        }
    }
}
