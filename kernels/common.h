/* Attributes and sizes shared by all kernels; everything is static. */

#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

static inline int64_t clipped(int64_t at, int64_t end) {
    return at < 0 ? 0 : at < end ? at : end;
}

INLINE int64_t at_most(int64_t n, int64_t limit) {
    return n < limit ? n : limit;
}
