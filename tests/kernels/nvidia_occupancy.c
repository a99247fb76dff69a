/* Asks NVIDIA's own occupancy calculator, a header that comes with the CUDA runtime, for the blocks of one SM. */
#include <stddef.h>
#include <cuda_occupancy.h>

int blocks(int major, int minor, int warps, int shared_of_sm, int reserved, int registers, int shared, int threads) {
    struct cudaOccDeviceProp device = {
        .computeMajor = major, .computeMinor = minor, .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiprocessor = warps * 32, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
        .warpSize = 32, .sharedMemPerBlock = 49152, .sharedMemPerMultiprocessor = shared_of_sm, .numSms = 1,
        .sharedMemPerBlockOptin = shared_of_sm - reserved, .reservedSharedMemPerBlock = reserved};
    struct cudaOccFuncAttributes kernel = {
        .maxThreadsPerBlock = 1024, .numRegs = registers, .partitionedGCConfig = PARTITIONED_GC_OFF,
        .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, .maxDynamicSharedSizeBytes = shared_of_sm, .numBlockBarriers = 1};
    struct cudaOccDeviceState state = {.cacheConfig = CACHE_PREFER_NONE, .carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT};
    struct cudaOccResult result;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    return error ? -1 : result.activeBlocksPerMultiprocessor;
}
