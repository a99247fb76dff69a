/* The rate of exponentials: each task takes its numbers through x -> 2^-x again and again, which stays in [1/2, 1].
   They fit the first-level cache, and the arithmetic is that of the scan's kernel without its multiply-adds. */

#include <stdint.h>

#define ROUND 12582912.0f /* x + ROUND has round(x) in its low bits */

/* 2^x for |x| < 126, to 9e-8 of itself */
static inline float exp2_of(float x) {
    union {
        float real;
        uint32_t bits;
    } n = {x + ROUND}, p;
    float rest = x - (n.real - ROUND);
    p.real = 1.33988750e-3f + rest * 1.53533328e-4f;
    p.real = 5.55033237e-2f + rest * (9.61843785e-3f + rest * p.real);
    p.real = 1.0f + rest * (6.93147182e-1f + rest * (2.40226477e-1f + rest * p.real));
    p.bits += n.bits << 23;
    return p.real;
}

/* x (tasks, width); a width known to the compiler would tempt it to unroll the loop, at a seventh of the rate */
__attribute__((visibility("default"))) void exp2_chain(float *x, int64_t tasks, int64_t width, int64_t steps,
                                                       int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t task = 0; task < tasks; task++) {
        float *own = x + task * width;
        for (int64_t step = 0; step < steps; step++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                own[i] = exp2_of(-own[i]);
    }
}
