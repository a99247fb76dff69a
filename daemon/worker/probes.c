/* The rates of memory and of exponentials on a CPU, each by the fastest forms known for it. */

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define PUBLIC __attribute__((visibility("default")))

/* Copies 64 bytes past the caches: an ordinary store first reads the line that it overwrites. */
static inline void stream(char *to, const char *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, _mm512_load_si512((const void *)from));
#elif defined(__AVX__)
    for (int part = 0; part < 64; part += 32)
        _mm256_stream_si256((__m256i *)(to + part), _mm256_load_si256((const __m256i *)(from + part)));
#elif defined(__SSE2__)
    for (int part = 0; part < 64; part += 16)
        _mm_stream_si128((__m128i *)(to + part), _mm_load_si128((const __m128i *)(from + part)));
#elif defined(__aarch64__)
    __asm__ volatile("ldp q0, q1, [%0]\n ldp q2, q3, [%0, 32]\n stnp q0, q1, [%1]\n stnp q2, q3, [%1, 32]"
                     :: "r"(from), "r"(to) : "v0", "v1", "v2", "v3", "memory");
#else
    memcpy(to, from, 64);
#endif
}

static inline void streamed(void) {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* to, from: `lines` lines of 64 bytes, aligned to them */
PUBLIC void copy_streaming(char *to, const char *from, int64_t lines, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
    {
#pragma omp for schedule(static)
        for (int64_t line = 0; line < lines; line++)
            stream(to + 64 * line, from + 64 * line);
        streamed();
    }
}

/* the sum of `lines` lines of 16 numbers, which only reads memory */
PUBLIC int32_t read_all(const int32_t *from, int64_t lines, int64_t threads) {
    int32_t total = 0;
#pragma omp parallel for simd schedule(static) num_threads((int)threads) reduction(+ : total)
    for (int64_t i = 0; i < 16 * lines; i++)
        total += from[i];
    return total;
}

#define ROUND 12582912.0f /* x + ROUND has round(x) in its low bits */

/* 2^rest for |rest| <= 1/2: to 8e-8 of itself, and to 8e-5, below the rounding of half precision */
static inline float power(float rest) {
    float p = 9.66637295e-3f + rest * 1.34004366e-3f;
    p = 2.40223490e-1f + rest * (5.55033318e-2f + rest * p);
    return 1.0f + rest * (6.93147196e-1f + rest * p);
}

static inline float rough_power(float rest) {
    return 9.99928074e-1f + rest * (6.93260985e-1f + rest * (2.42611122e-1f + rest * 5.51716691e-2f));
}

/* 2^x for |x| < 126: the whole part goes into the exponent's bits */
#define BY_BITS(name, polynomial)                                                                                     \
    static inline float name(float x) {                                                                               \
        union {                                                                                                        \
            float real;                                                                                                \
            uint32_t bits;                                                                                             \
        } n = {x + ROUND}, p;                                                                                          \
        p.real = polynomial(x - (n.real - ROUND));                                                                     \
        p.bits += n.bits << 23;                                                                                        \
        return p.real;                                                                                                 \
    }
BY_BITS(exp2_by_bits, power)
BY_BITS(rough_exp2_by_bits, rough_power)

/* Each task takes its numbers through x -> 2^-x again and again, which stays in [1/2, 1]; they fit the first-level
   cache. A width known to the compiler would tempt it to unroll the loop, at a seventh of the rate. */
#define CHAIN(name, exp2_of)                                                                                          \
    PUBLIC void name(float *x, int64_t tasks, int64_t width, int64_t steps, int64_t threads) {                         \
        _Pragma("omp parallel for schedule(static) num_threads((int)threads)")                                         \
        for (int64_t task = 0; task < tasks; task++) {                                                                 \
            float *own = x + task * width;                                                                             \
            for (int64_t step = 0; step < steps; step++)                                                               \
                _Pragma("omp simd")                                                                                    \
                for (int64_t i = 0; i < width; i++)                                                                    \
                    own[i] = exp2_of(-own[i]);                                                                         \
        }                                                                                                              \
    }
CHAIN(chain_by_bits, exp2_by_bits)
CHAIN(rough_chain_by_bits, rough_exp2_by_bits)

#ifdef __AVX512DQ__
/* AVX-512 has instructions for the fraction and for the exponent */
static inline __m512 lanes(float x) {
    return _mm512_set1_ps(x);
}

static inline __m512 exp2_by_scale(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = lanes(1.87758030e-3f);
    p = _mm512_fmadd_ps(p, rest, lanes(8.98933088e-3f));
    p = _mm512_fmadd_ps(p, rest, lanes(5.58263264e-2f));
    p = _mm512_fmadd_ps(p, rest, lanes(2.40153614e-1f));
    p = _mm512_fmadd_ps(p, rest, lanes(6.93153074e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, rest, lanes(9.99999925e-1f)), x);
}

static inline __m512 rough_exp2_by_scale(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = lanes(7.80245229e-2f);
    p = _mm512_fmadd_ps(p, rest, lanes(2.26067156e-1f));
    p = _mm512_fmadd_ps(p, rest, lanes(6.95833540e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, rest, lanes(9.99925219e-1f)), x);
}

/* a width that is a multiple of 16 */
#define WIDE_CHAIN(name, exp2_of)                                                                                     \
    PUBLIC void name(float *x, int64_t tasks, int64_t width, int64_t steps, int64_t threads) {                         \
        _Pragma("omp parallel for schedule(static) num_threads((int)threads)")                                         \
        for (int64_t task = 0; task < tasks; task++) {                                                                 \
            float *own = x + task * width;                                                                             \
            for (int64_t step = 0; step < steps; step++)                                                               \
                for (int64_t i = 0; i < width; i += 16)                                                                \
                    _mm512_storeu_ps(own + i, exp2_of(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(own + i))));  \
        }                                                                                                              \
    }
WIDE_CHAIN(chain_by_scale, exp2_by_scale)
WIDE_CHAIN(rough_chain_by_scale, rough_exp2_by_scale)
#endif
