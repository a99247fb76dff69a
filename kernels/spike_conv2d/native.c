/* Convolution over what is not zero. Every row of a picture is written once as a list of its nonzeros; an output pixel
   then walks, for each row of its window, the part of that list that lies in the window, and adds value * weights for
   64 output channels, which stay in registers.

   A nonzero's place in its row, column * channels + channel, minus the window's left edge is also the row of weights
   that it meets: (window_height, window_width, channels) lie in this order. Where a window hangs over the picture's
   edge its list is shorter, and nothing is padded. */

#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "../common.h"

#define BLOCK 64   /* output channels of a pixel whose sums stay in registers */
#define PADDED 16  /* weights are filled up to a multiple of so many channels */
/* floats of a register: compilers keep a longer vector in memory */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS (BLOCK / LANES)
#define TILE 128 /* output pixels of a task: for all of them, one row of the window's weights stays in the cache */
#define SMALL_TILE 8
#define CACHE_LINE 16 /* floats */
#define FEW 4 /* the share of the weights, one in so many, below which they are not read ahead */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

typedef struct {
    uint32_t place;
    float value;
} nonzero;

/* x (images, height, width, channels) and y (images, out_height, out_width, out_channels) dense; weight as `pack` of
   native.py makes it; bias (out_channels,) or null. `lists` is scratch for `group` images, for each row: where a
   column's nonzeros begin, width + 1 numbers, then the nonzeros, width * channels at most. */
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
static uint8_t set_bits[256][AT_ONCE]; /* the numbers of a byte's set bits, the lowest first */

__attribute__((constructor)) static void fill_set_bits(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, n = 0; bit < AT_ONCE; bit++)
            if (byte >> bit & 1) set_bits[byte][n++] = (uint8_t)bit;
}

/* Writes the nonzeros of the AT_ONCE values at `place` to the front of as many entries of `list`; returns their number. */
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

/* NaN is not equal to zero and stays; without a branch, because a spike cannot be foretold */
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

INLINE void walk(
    lanes *sums, const nonzero *restrict list, int64_t n, const float *restrict weight, int64_t shift, int vectors) {
    for (int64_t i = 0; i < n; i++) {
        const lanes *row = (const lanes *)(weight + (shift + list[i].place) * vectors * LANES);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sums[v] += list[i].value * row[v];
    }
}

/* where the window of an output pixel begins in its picture, whose first row is `origin` */
typedef struct {
    int64_t origin, top, left;
} corner;

/* Fills `corners` of `n` output pixels from `first`, numbered over the group's images. */
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

/* Adds row k of the window of one output pixel. */
INLINE void add_row(lanes *sums, const corner *at, int64_t k, const float *weight, const problem *p, int vectors) {
    int64_t left = at->left, row = at->top + k;
    if (row < 0 || row >= p->height) return;
    const int64_t *starts = starts_of(p, at->origin + row);
    int64_t first = starts[clipped(left, p->width)], last = starts[clipped(left + p->window_width, p->width)];
    const nonzero *list = (const nonzero *)(starts + p->width + 1) + first;
    walk(sums, list, last - first, weight, (k * p->window_width - left) * p->channels, vectors);
}

/* The nonzeros that row k of the windows of `n` output pixels holds. */
static int64_t count_row(const corner *corners, int64_t n, int64_t k, const problem *p) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t left = corners[i].left, row = corners[i].top + k;
        if (row < 0 || row >= p->height) continue;
        const int64_t *starts = starts_of(p, corners[i].origin + row);
        count += starts[clipped(left + p->window_width, p->width)] - starts[clipped(left, p->width)];
    }
    return count;
}

/* Reads the weights of row k of the window that some output pixel needs, one after the other: they come from memory
   faster in this order than in that of the spikes, unless few of them are needed. */
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

/* `n` output pixels from `first` of the group that begins at image `origin`, and the channels of a block */
INLINE void convolve(int64_t origin, int64_t first, int64_t n, int64_t block, const problem *p, int vectors) {
    lanes sums[TILE][VECTORS];
    const float *weight = p->weight + block * BLOCK * p->window_height * p->window_width * p->channels;
    corner corners[TILE];
    find_corners(corners, first, n, p);
    memset(sums, 0, (size_t)n * sizeof sums[0]);
    for (int64_t k = 0; k < p->window_height; k++) {
        if (origin + first == 0 && FEW * count_row(corners, n, k, p) >= p->window_width * p->channels)
            fetch_row(weight, k, p, vectors * LANES);
        for (int64_t i = 0; i < n; i++) {
            lanes kept[VECTORS];
            for (int v = 0; v < vectors; v++) kept[v] = sums[i][v];
            add_row(kept, corners + i, k, weight, p, vectors);
            for (int v = 0; v < vectors; v++) sums[i][v] = kept[v];
        }
    }
    int64_t channel = block * BLOCK, channels = at_most(p->out_channels - channel, BLOCK);
    float *y = p->y + (origin * p->out_height * p->out_width + first) * p->out_channels + channel;
    for (int64_t i = 0; i < n; i++)
        emit(y + i * p->out_channels, (const float *)sums[i], p->bias ? p->bias + channel : 0, channels);
}

/* the number of vectors is known in each call: sums in an array of a length of its own would not stay in registers */
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
        /* block by block: a thread reads its part of the weights for all pixels before the next part */
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * tiles; task++) {
            int64_t first = task % tiles * tile;
            convolve_any(origin, first, at_most(pixels - first, tile), task / tiles, p);
        }
    }
}
