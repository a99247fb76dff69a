// libcuda.so.1 for torch's launcher: what it launches is kept. The function that it launches is the sizes of its
// parameters in bytes, after how many there are.
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t grid[3], block[3], shared, stream, bytes;
    unsigned char parameters[512];
} launch;

static launch last;

launch *last_launch(void) { return &last; }

int cuLaunchKernel(const int64_t *sizes, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    (void)extra;
    last = (launch){{gx, gy, gz}, {bx, by, bz}, shared, (int64_t)stream, 0, {0}};
    for (int64_t i = 0; i < sizes[0]; ++i) {
        memcpy(last.parameters + last.bytes, parameters[i], (size_t)sizes[i + 1]);
        last.bytes += sizes[i + 1];
    }
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &last;
    return 0;
}

#define UNUSED(name) \
    int name(void) { return 1; }
UNUSED(cuCtxSetCurrent)
UNUSED(cuDeviceGet)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDevicePrimaryCtxGetState)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuGetErrorString)
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoad)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleLoadDataEx)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuPointerGetAttribute)
UNUSED(cuTensorMapEncodeTiled)
