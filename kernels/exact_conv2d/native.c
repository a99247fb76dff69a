/* Integer convolution of small integers. An output pixel's window of codes is a row of one matrix, the weights are
   another matrix of 8-bit digits, and 32-bit sums of byte products are exact in any order.

   VNNI multiplies signed bytes by unsigned ones: 128 is added to each digit, and subtracted again by means of the sum of
   a row's codes. Rows with the same position in their images are neighbours, so that blocks of rows outside
   all images are entirely zero, and are skipped like any other zero block. */

#define _GNU_SOURCE /* syscall */
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "../common.h"

#define ROWS 16  /* output pixels per block */
#define DEPTH 64 /* codes per row of a block */
#define LANES 16 /* output channels per tile of digits */
#define TILES 3  /* tiles multiplied at once: the three digits of a weight, or 48 channels with one digit each */
#define TILE_BYTES (DEPTH * LANES)
#define SAMPLED 64 /* maximum number of image rows sampled to estimate the share of nonzero codes */
#define ON_GRID 0x1p-10f /* a float within this distance of an integer counts as that integer */
#define ROUND 12582912.0f /* (x + ROUND) - ROUND is the nearest integer */

enum path { AMX = 1, AVX512_VNNI = 2, AVX_VNNI = 4, DOTPROD = 8, UNSIGNED = AVX512_VNNI | AVX_VNNI };
enum status { DONE, NOT_WHOLE };

typedef int32_t whole __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t))));
typedef uint32_t wrapping __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t))));
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int8_t line __attribute__((vector_size(DEPTH), aligned(1)));
typedef uint64_t words __attribute__((vector_size(DEPTH), aligned(1)));
typedef int32_t block_sums[2][TILES][ROWS][LANES];

/* x (images, height, width, channels) and y (images, out_height, out_width, out_channels) contiguous; digits and unit
   from `pack` in whole.py; bias (out_channels,) or null. Scratch: `codes` like x, and for `group` images `rows`
   (blocks of 16 pixels, 16, depth), `used` (blocks, depth / 64) and, for VNNI, `sums` (blocks, 16). */
typedef struct {
    const float *x, *scale, *unit, *bias;
    const int8_t *digits;
    float *y;
    int8_t *codes, *rows;
    uint8_t *used;
    int32_t *sums;
    int64_t images, channels, height, width, out_channels, window_height, window_width, stride, padding, out_height,
        out_width, largest, per_weight, group, path, threads;
    int64_t status;
} problem;

static int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

static int64_t depth_of(const problem *p) {
    return blocks_of(p->window_height * p->window_width * p->channels, DEPTH) * DEPTH;
}

/* Writes x / scale to codes; returns whether all of them are integers up to `largest`. */
static int encode(const float *restrict x, int8_t *restrict codes, int64_t n, float scale, float largest) {
    float inverse = 1 / scale;
    int32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int64_t i = 0; i < n; i++) {
        float value = x[i] * inverse, nearest = (value + ROUND) - ROUND, off = value - nearest;
        int32_t right = off <= ON_GRID && off >= -ON_GRID && nearest <= largest && nearest >= -largest;
        wrong |= !right;
        codes[i] = (int8_t)(right ? (int32_t)nearest : 0);
    }
    return !wrong;
}

/* inlined memcpy and memset for mostly whole cache lines */
INLINE void copy(int8_t *restrict to, const int8_t *restrict from, int64_t n) {
    int64_t i = 0;
    for (; i + DEPTH <= n; i += DEPTH) *(line *)(to + i) = *(const line *)(from + i);
    if (i < n) memcpy(to + i, from + i, (size_t)(n - i));
}

INLINE void clear(int8_t *restrict to, int64_t n) {
    int64_t i = 0;
    for (; i + DEPTH <= n; i += DEPTH) *(line *)(to + i) = (line){0};
    if (i < n) memset(to + i, 0, (size_t)(n - i));
}

/* The codes of one row of an output pixel's window, with zeros beyond the edge of the image. */
INLINE void gather_line(int8_t *restrict to, const int8_t *restrict from, int64_t left, const problem *p) {
    int64_t first = clipped(left, p->width), last = clipped(left + p->window_width, p->width);
    int64_t before = (first - left) * p->channels, n = last > first ? (last - first) * p->channels : 0;
    if (!n) before = 0;
    clear(to, before);
    copy(to + before, from + first * p->channels, n);
    clear(to + before + n, p->window_width * p->channels - before - n);
}

static void gather_row(int8_t *restrict row, int64_t image, int64_t pixel, const problem *p) {
    int64_t top = pixel / p->out_width * p->stride - p->padding, pitch = p->width * p->channels;
    int64_t left = pixel % p->out_width * p->stride - p->padding, part = p->window_width * p->channels;
    for (int64_t k = 0; k < p->window_height; k++) {
        int64_t y = top + k;
        if (y < 0 || y >= p->height) clear(row + k * part, part);
        else gather_line(row + k * part, p->codes + (image * p->height + y) * pitch, left, p);
    }
    int64_t filled = p->window_height * part;
    clear(row + filled, depth_of(p) - filled);
}

/* Determines for each 16 x 64 codes in a block of rows whether any of them is nonzero. */
static void find_used(uint8_t *restrict used, const int8_t *restrict rows, int64_t depth) {
    for (int64_t at = 0; at < depth; at += DEPTH) {
        words any = {0};
        for (int r = 0; r < ROWS; r++) any |= *(const words *)(rows + r * depth + at);
        uint64_t all = 0;
        for (int i = 0; i < DEPTH / 8; i++) all |= any[i];
        used[at / DEPTH] = all != 0;
    }
}

static int32_t sum_of(const int8_t *codes, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += codes[i];
    return sum;
}

static void gather_block(int64_t block, int64_t origin, int64_t images, const problem *p) {
    int64_t depth = depth_of(p), pixels = images * p->out_height * p->out_width;
    int8_t *rows = p->rows + block * ROWS * depth;
    for (int64_t r = 0; r < ROWS; r++) {
        int64_t at = block * ROWS + r;
        if (at < pixels) gather_row(rows + r * depth, origin + at % images, at / images, p);
        else clear(rows + r * depth, depth);
    }
    find_used(p->used + block * (depth / DEPTH), rows, depth);
    if (p->path & UNSIGNED)
        for (int64_t r = 0; r < ROWS; r++) p->sums[block * ROWS + r] = sum_of(rows + r * depth, depth);
}

/* One block of rows, or two successive ones, times one to three tiles of digits. */
typedef struct {
    const int8_t *rows, *digits;
    const uint8_t *used;
    int64_t blocks, depth, tiles;
} product;

#if defined(__AMX_INT8__)
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_layout;

static int is_used(const product *m, int64_t k) {
    return m->used[k] | (m->blocks > 1 ? m->used[m->depth / DEPTH + k] : 0);
}

/* eight tiles of 16 rows of 64 bytes */
static void lay_out_tiles(void) {
    tile_layout layout = {.palette = 1};
    for (int i = 0; i < 8; i++) layout.row_bytes[i] = DEPTH, layout.rows[i] = ROWS;
    _tile_loadconfig(&layout);
}

#define PRODUCT(sum, a, b) _tile_dpbssd(sum, a, b)
#define STORE(sum, to) _tile_stored(sum, to, LANES * sizeof(int32_t))

/* sums in tiles 0 to 2 for the first block and 3 to 5 for the second, codes in 6, digits in 7; the order of the digit
   tiles alternates, so that one is used twice in a row */
INLINE void multiply_tiles(block_sums sums, const product *m, int tiles, int blocks) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    for (int64_t k = 0; k < m->depth / DEPTH; k++) {
        if (!is_used(m, k)) continue;
        const int8_t *codes = m->rows + k * DEPTH, *second = codes + ROWS * m->depth;
        const int8_t *digits = m->digits + k * TILES * TILE_BYTES;
        _tile_loadd(6, codes, m->depth);
        _tile_loadd(7, digits, DEPTH);
        PRODUCT(0, 6, 7);
        if (blocks == 2) {
            _tile_loadd(6, second, m->depth);
            PRODUCT(3, 6, 7);
        }
        if (tiles == 1) continue;
        _tile_loadd(7, digits + TILE_BYTES, DEPTH);
        if (blocks == 2) {
            PRODUCT(4, 6, 7);
            _tile_loadd(6, codes, m->depth);
        }
        PRODUCT(1, 6, 7);
        if (tiles == 2) continue;
        _tile_loadd(7, digits + 2 * TILE_BYTES, DEPTH);
        PRODUCT(2, 6, 7);
        if (blocks == 2) {
            _tile_loadd(6, second, m->depth);
            PRODUCT(5, 6, 7);
        }
    }
    STORE(0, sums[0][0]); STORE(1, sums[0][1]); STORE(2, sums[0][2]);
    if (blocks == 1) return;
    STORE(3, sums[1][0]); STORE(4, sums[1][1]); STORE(5, sums[1][2]);
}

INLINE void multiply_amx(block_sums sums, const product *m, int tiles) {
    if (m->blocks == 2) multiply_tiles(sums, m, tiles, 2);
    else multiply_tiles(sums, m, tiles, 1);
}
#endif

#if defined(__AVX512VNNI__)
/* eight rows times at most three vectors of sums fit in registers */
INLINE void multiply_vnni512(int32_t (*sums)[ROWS][LANES], const product *m, int64_t block, int64_t row, int tiles) {
    __m512i kept[8][TILES], sign = _mm512_set1_epi8(-128);
    for (int r = 0; r < 8; r++)
        for (int t = 0; t < tiles; t++) kept[r][t] = _mm512_setzero_si512();
    for (int64_t k = 0; k < m->depth / DEPTH; k++) {
        if (!m->used[block * (m->depth / DEPTH) + k]) continue;
        const int8_t *codes = m->rows + (block * ROWS + row) * m->depth + k * DEPTH;
        const int8_t *digits = m->digits + k * TILES * TILE_BYTES;
        for (int four = 0; four < DEPTH; four += 4) {
            __m512i weights[TILES];
            for (int t = 0; t < tiles; t++)
                weights[t] = _mm512_xor_si512(_mm512_loadu_si512(digits + t * TILE_BYTES + four * LANES), sign);
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                int32_t word;
                memcpy(&word, codes + r * m->depth + four, sizeof word);
                for (int t = 0; t < tiles; t++)
                    kept[r][t] = _mm512_dpbusd_epi32(kept[r][t], weights[t], _mm512_set1_epi32(word));
            }
        }
    }
    for (int r = 0; r < 8; r++)
        for (int t = 0; t < tiles; t++) _mm512_storeu_si512(sums[t][row + r], kept[r][t]);
}

INLINE void multiply_avx512_vnni(block_sums sums, const product *m, int tiles) {
    for (int64_t block = 0; block < m->blocks; block++)
        for (int64_t row = 0; row < ROWS; row += 8) multiply_vnni512(sums[block], m, block, row, tiles);
}
#endif

#if defined(__AVXVNNI__)
/* four rows times half a tile each: 12 sums, 3 weights and a code in 16 registers */
INLINE void multiply_vnni256(
    int32_t (*sums)[ROWS][LANES], const product *m, int64_t block, int64_t row, int half, int tiles) {
    __m256i kept[4][TILES], sign = _mm256_set1_epi8(-128);
    for (int r = 0; r < 4; r++)
        for (int t = 0; t < tiles; t++) kept[r][t] = _mm256_setzero_si256();
    for (int64_t k = 0; k < m->depth / DEPTH; k++) {
        if (!m->used[block * (m->depth / DEPTH) + k]) continue;
        const int8_t *codes = m->rows + (block * ROWS + row) * m->depth + k * DEPTH;
        const int8_t *digits = m->digits + k * TILES * TILE_BYTES + half * 32;
        for (int four = 0; four < DEPTH; four += 4) {
            __m256i weights[TILES];
            for (int t = 0; t < tiles; t++)
                weights[t] = _mm256_xor_si256(*(const __m256i_u *)(digits + t * TILE_BYTES + four * LANES), sign);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                int32_t word;
                memcpy(&word, codes + r * m->depth + four, sizeof word);
                for (int t = 0; t < tiles; t++)
                    kept[r][t] = _mm256_dpbusd_avx_epi32(kept[r][t], weights[t], _mm256_set1_epi32(word));
            }
        }
    }
    for (int r = 0; r < 4; r++)
        for (int t = 0; t < tiles; t++) _mm256_storeu_si256((__m256i *)(sums[t][row + r] + half * 8), kept[r][t]);
}

INLINE void multiply_avx_vnni(block_sums sums, const product *m, int tiles) {
    for (int64_t block = 0; block < m->blocks; block++)
        for (int64_t row = 0; row < ROWS; row += 4)
            for (int half = 0; half < 2; half++) multiply_vnni256(sums[block], m, block, row, half, tiles);
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
/* four rows times a tile: 16 sums in registers */
static void multiply_rows4(int32_t (*sums)[LANES], const product *m, int64_t block, int64_t row, int tile) {
    int32x4_t kept[4][4];
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++) kept[r][c] = vdupq_n_s32(0);
    for (int64_t k = 0; k < m->depth / DEPTH; k++) {
        if (!m->used[block * (m->depth / DEPTH) + k]) continue;
        const int8_t *codes = m->rows + (block * ROWS + row) * m->depth + k * DEPTH;
        const int8_t *digits = m->digits + k * TILES * TILE_BYTES + tile * TILE_BYTES;
        for (int four = 0; four < DEPTH; four += 4) {
            int8x16_t weights[4];
            for (int c = 0; c < 4; c++) weights[c] = vld1q_s8(digits + four * LANES + 16 * c);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                int32_t word;
                memcpy(&word, codes + r * m->depth + four, sizeof word);
                int8x16_t code = vreinterpretq_s8_s32(vdupq_n_s32(word));
                for (int c = 0; c < 4; c++) kept[r][c] = vdotq_s32(kept[r][c], weights[c], code);
            }
        }
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++) vst1q_s32(sums[row + r] + 4 * c, kept[r][c]);
}

INLINE void multiply_dotprod(block_sums sums, const product *m, int tiles) {
    for (int64_t block = 0; block < m->blocks; block++)
        for (int t = 0; t < tiles; t++)
            for (int64_t row = 0; row < ROWS; row += 4) multiply_rows4(sums[block][t], m, block, row, t);
}
#endif

INLINE void multiply_by(block_sums sums, const product *m, int tiles, int64_t path) {
    switch (path) {
#if defined(__AMX_INT8__)
    case AMX: multiply_amx(sums, m, tiles); break;
#endif
#if defined(__AVX512VNNI__)
    case AVX512_VNNI: multiply_avx512_vnni(sums, m, tiles); break;
#endif
#if defined(__AVXVNNI__)
    case AVX_VNNI: multiply_avx_vnni(sums, m, tiles); break;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    case DOTPROD: multiply_dotprod(sums, m, tiles); break;
#endif
    }
}

static void multiply(block_sums sums, const product *m, int64_t path) {
    if (m->tiles == 1) multiply_by(sums, m, 1, path);
    else if (m->tiles == 2) multiply_by(sums, m, 2, path);
    else multiply_by(sums, m, 3, path);
}

#define AT(sums) ((wrapping)*(const whole *)(sums))

/* Converts the sums of row r to numbers; VNNI has added `fill` to each sum. All except the rounding to float
   is exact; bits above the 32nd cancel out. */
INLINE lanes number(int32_t (*sums)[ROWS][LANES], int64_t r, uint32_t fill, int64_t per_weight) {
    if (per_weight == 1) return __builtin_convertvector((whole)(AT(sums[0][r]) - fill), lanes);
    whole upper = (whole)((AT(sums[0][r]) << 8) + AT(sums[1][r]) - 257 * fill), lower = (whole)(AT(sums[2][r]) - fill);
    return __builtin_convertvector(upper, lanes) * 256.0f + __builtin_convertvector(lower, lanes);
}

INLINE void emit(
    float *restrict y, lanes values, const float *restrict factor, const float *restrict bias, int64_t n) {
    values *= *(const lanes *)factor;
    if (n == LANES) {
        if (bias) values += *(const lanes *)bias;
        *(lanes *)y = values;
        return;
    }
    for (int64_t i = 0; i < n; i++) y[i] = bias ? values[i] + bias[i] : values[i];
}

/* Writes a row block's outputs for the 16 channels from `channel` on. */
static void emit_block(
    int32_t (*sums)[ROWS][LANES], int64_t block, int64_t origin, int64_t images, int64_t channel, const problem *p) {
    int64_t out_pixels = p->out_height * p->out_width, n = at_most(images * out_pixels - block * ROWS, ROWS);
    int64_t width = at_most(p->out_channels - channel, LANES), image = block * ROWS % images;
    int64_t pixel = block * ROWS / images;
    float factor[LANES];
    for (int i = 0; i < LANES; i++) factor[i] = p->unit[channel + i] * *p->scale;
    for (int64_t r = 0; r < n; r++) {
        uint32_t fill = p->path & UNSIGNED ? 128 * (uint32_t)p->sums[block * ROWS + r] : 0;
        float *y = p->y + ((origin + image) * out_pixels + pixel) * p->out_channels + channel;
        emit(y, number(sums, r, fill, p->per_weight), factor, p->bias ? p->bias + channel : 0, width);
        if (++image == images) image = 0, pixel++;
    }
}

/* The output channels of a panel: those of its three tiles of digits. */
static int64_t channels_of(const problem *p) { return p->per_weight == 1 ? TILES * LANES : LANES; }

/* All rows from block `first` to `last` times the channels of panel number `panel`. */
static void multiply_panel(
    int64_t panel, int64_t first, int64_t last, int64_t origin, int64_t images, const problem *p) {
    int64_t depth = depth_of(p), channel = panel * channels_of(p);
    int64_t groups = at_most(blocks_of(p->out_channels - channel, LANES), channels_of(p) / LANES);
    int64_t tiles = groups * p->per_weight;
    const int8_t *digits = p->digits + panel * TILES * depth * LANES;
    block_sums sums;
    for (int64_t block = first; block < last; block += 2) {
        product m = {
            p->rows + block * ROWS * depth, digits, p->used + block * (depth / DEPTH), at_most(last - block, 2), depth,
            tiles};
        multiply(sums, &m, p->path);
        for (int64_t i = 0; i < m.blocks; i++)
            for (int64_t g = 0; g < groups; g++)
                emit_block(sums[i] + g, block + i, origin, images, channel + g * LANES, p);
    }
}

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

/* A thread's part in the convolution of `images` images from `origin` on. */
static void convolve(int64_t origin, int64_t images, const problem *p) {
    int64_t blocks = blocks_of(images * p->out_height * p->out_width, ROWS);
    int64_t panels = blocks_of(p->out_channels, channels_of(p));
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) gather_block(block, origin, images, p);
    /* enough parts of the rows to balance the threads, because the last panel is smaller than the others */
    int64_t even = p->out_channels % channels_of(p) ? 1 : common_divisor(panels, p->threads);
    int64_t parts = at_most(p->threads / even, blocks_of(blocks, 2));
    int64_t part = blocks_of(blocks_of(blocks, parts), 2) * 2;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * parts; task++) {
        int64_t first = task / panels * part;
        multiply_panel(task % panels, first, at_most(first + part, blocks), origin, images, p);
    }
}

static void convolve_groups(const problem *p) {
#if defined(__AMX_INT8__)
    tile_layout others; /* other libraries that use tiles on this thread may rely on their own layout */
    if (p->path == AMX) _tile_storeconfig(&others), lay_out_tiles();
#endif
    for (int64_t origin = 0; origin < p->images; origin += p->group)
        convolve(origin, at_most(p->images - origin, p->group), p);
#if defined(__AMX_INT8__)
    if (p->path == AMX) _tile_loadconfig(&others);
#endif
}

/* Sampling step for `lines` rows: a step coprime to the height samples rows at all heights of an
   image. */
static int64_t sample_step(int64_t lines, int64_t height) {
    int64_t step = lines / SAMPLED + 1;
    while (common_divisor(step, height) > 1) step++;
    return step;
}

static int32_t count_line(const float *x, int64_t n) {
    int32_t count = 0; /* as wide as the counted values, so that the loop is vectorised */
    for (int64_t i = 0; i < n; i++) count += x[i] != 0;
    return count;
}

/* Whether less than the share `least_density` of x (`lines` rows of images with `height` rows) is nonzero, judged by a
   sample of the rows. */
PUBLIC int exact_is_sparse(const float *x, int64_t lines, int64_t length, int64_t height, double least_density) {
    int64_t seen = 0, count = 0;
    for (int64_t i = 0, step = sample_step(lines, height); i < lines; i += step, seen += length)
        count += count_line(x + i * length, length);
    return (double)count < least_density * (double)seen;
}

/* Leaves y unchanged unless p->status becomes DONE. */
PUBLIC void exact_conv2d(problem *p) {
    int64_t lines = p->images * p->height, length = p->width * p->channels, wrong = 0;
    int threads = (int)p->threads;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) reduction(+ : wrong)
        for (int64_t i = 0; i < lines; i++)
            wrong += !encode(p->x + i * length, p->codes + i * length, length, *p->scale, (float)p->largest);
#pragma omp single
        p->status = wrong ? NOT_WHOLE : DONE;
        if (p->status == DONE) convolve_groups(p);
    }
}

/* Writes which of this CPU's paths the system permits, and which it denies: tiles need permission. */
PUBLIC void exact_paths(int64_t *found, int64_t *refused) {
    *found = *refused = 0;
#if defined(__AVX512VNNI__)
    *found |= AVX512_VNNI;
#endif
#if defined(__AVXVNNI__)
    *found |= AVX_VNNI;
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    *found |= DOTPROD;
#endif
#if defined(__AMX_INT8__)
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) *refused |= AMX;
    else *found |= AMX;
#endif
}
