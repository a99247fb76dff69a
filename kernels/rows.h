/* Rows of numbers in registers, for kernels on channels-last tokens; in float32, or in bfloat16 outside registers.
   Everything is static, because each kernel's only file includes this one. */

#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "common.h"

#define CHANNELS 16 /* numbers per row: a cache line of a token in float32 */

/* LANES numbers with C's operators: one register, because compilers split longer vectors badly */
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

#ifdef BF16 /* the type in memory: the upper half of a float */
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES)));
#else
typedef float number;
typedef lanes numbers;
#endif
typedef numbers unaligned __attribute__((aligned(sizeof(number)), may_alias));

typedef struct {
    lanes part[PARTS];
} row;

/* x + ROUND contains round(x) in its low bits; the bits of ROUND itself are lost when shifted into the exponent */
#define ROUND 12582912.0f
#define LOG2_E 1.44269504f
#define LOG2_E_REST 1.92596303e-8f /* log2(e) - LOG2_E */

INLINE lanes every(float x) {
    return (lanes){0} + x;
}

INLINE lanes chosen(whole mask, lanes yes, lanes no) {
    return (lanes)((mask & (whole)yes) | (~mask & (whole)no));
}

/* the larger of a and b; a NaN in b is kept */
INLINE lanes larger(lanes a, lanes b) {
#ifdef __AVX512F__
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return chosen(a > b, a, b);
#endif
}

/* 2^rest for |rest| <= 1/2 with a relative error of 3e-7, also relative to its distance from 1, so that
   the part that a slow state forgets is as exact as the part that it keeps. For bfloat16, which rounds to 4e-3, the
   error is 4e-4. */
INLINE lanes near_power(lanes rest) {
#ifdef BF16
    lanes p = 2.42028881e-1f + rest * 5.55038201e-2f;
    return 1.0f + rest * (6.93178310e-1f + rest * p);
#else
    lanes p = 9.66637295e-3f + rest * 1.34004366e-3f;
    p = 2.40223490e-1f + rest * (5.55033318e-2f + rest * p);
    return 1.0f + rest * (6.93147196e-1f + rest * p);
#endif
}

/* 2^(n + rest) for shifted = n + ROUND */
INLINE lanes power(lanes rest, lanes shifted) {
    return (lanes)((whole)near_power(rest) + ((whole)shifted << 23));
}

/* -|x|, but at least -87, where e^x is still a normal number; keeps NaN */
INLINE lanes exponent_of(lanes x) {
    return larger(every(-87.0f), (lanes)((whole)x | INT32_MIN));
}

/* e^x for x from `exponent_of`; a rounded x log2(e) would add an error of |x| half units in the last place */
INLINE lanes exp_of(lanes x) {
    lanes shifted = x * LOG2_E + ROUND;
    return power((x * LOG2_E - (shifted - ROUND)) + x * LOG2_E_REST, shifted);
}

/* x / (1 + e^-x), constant at -1e-36 below -87; 1 / (1 + e) for 0 <= e <= 1 starts as a parabola with relative error
   1/99, which each Newton step squares */
INLINE lanes silu_of(lanes x) {
    lanes low = exponent_of(x), e = exp_of(low), d = 1.0f + e;
#ifdef __AVX512F__
    lanes r = (lanes)_mm512_rcp14_ps((__m512)d);
#else
    lanes r = 9.89898990e-1f + e * (e * 3.23232323e-1f - 8.08080808e-1f);
    r *= 2.0f - d * r;
#endif
#ifndef BF16
    r *= 2.0f - d * r;
#endif
    return chosen(x >= 0.0f, x, low * e) * r;
}

#ifdef BF16
/* GCC splits a conversion between vectors of different lengths in two, although AVX-512 has an instruction for it */
INLINE lanes widened(numbers x) {
#ifdef __AVX512F__
    whole bits = (whole)_mm512_cvtepu16_epi32((__m256i)x);
#else
    whole bits = __builtin_convertvector(x, whole);
#endif
    return (lanes)(bits << 16);
}

INLINE numbers rounded(lanes x) {
#ifdef __AVX512BF16__
    return (numbers)_mm512_cvtneps_pbh((__m512)x); /* 0 for values below 1.2e-38 */
#else
    whole bits = (whole)x, even = bits + 0x7fff + (bits >> 16 & 1);
    bits = (whole)chosen(x == x, (lanes)even, (lanes)(bits | 1 << 22)) >> 16;
    return __builtin_convertvector(bits, numbers);
#endif
}
#else
INLINE lanes widened(numbers x) {
    return x;
}

INLINE numbers rounded(lanes x) {
    return x;
}
#endif

/* Moves a whole row in registers: memcpy would move half registers, which an immediately following load waits for. */
INLINE row read_row(const number *from, int64_t width) {
    numbers at[PARTS] = {0};
    row to;
    if (width == CHANNELS)
        for (int64_t i = 0; i < PARTS; i++) at[i] = ((const unaligned *)from)[i];
    else memcpy(at, from, (size_t)width * sizeof *from);
    for (int64_t i = 0; i < PARTS; i++) to.part[i] = widened(at[i]);
    return to;
}

INLINE void write_row(number *to, const row *from, int64_t width) {
    numbers at[PARTS];
    for (int64_t i = 0; i < PARTS; i++) at[i] = rounded(from->part[i]);
    if (width == CHANNELS)
        for (int64_t i = 0; i < PARTS; i++) ((unaligned *)to)[i] = at[i];
    else memcpy(to, at, (size_t)width * sizeof *to);
}
