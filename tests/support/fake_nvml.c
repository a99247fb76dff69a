/* A libnvidia-ml.so.1 without a GPU, under the real nvidia-ml-py: cards of a known load on CLOCK_MONOTONIC.

   $FAKE_NVML names a file of `key value` lines that is read at each call, so that a test may change it in between:
   tests/support/fake_nvml.py lists the keys and holds the same load as a formula. `fail CODE` makes every reading of a device
   return CODE (3 is a Jetson, 15 a GPU that is lost), `fail.FUNCTION CODE` that function alone. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_CARDS = 4, MAX_PIDS = 16, HISTORY = 100 };

typedef struct card { int index; } *device_t;
static struct card cards[MAX_CARDS] = {{0}, {1}, {2}, {3}};

static int setting(const char *key, char *value, size_t size) {
    char line[256], name[128];
    int found = 0, at;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    while (file && !found && fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %n", name, &at) == 1 && !strcmp(name, key)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + at);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static double number(const char *key, double otherwise) {
    char value[128];
    return setting(key, value, sizeof value) ? atof(value) : otherwise;
}

static int failure(const char *function) {
    char key[128];
    snprintf(key, sizeof key, "fail.%s", function);
    return (int)number(key, number("fail", SUCCESS));
}

#define DEVICE_CALL() do { int code = failure(__func__); if (code) return code; } while (0)

static double clock_s(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* `watts`, and `swing` more in every other half of `square_s`; the second card takes twice as much, and so on */
static double power_w(device_t device, double t) {
    double half = number("square_s", 1) / 2;
    return (device->index + 1) * (number("watts", 50) + (fmod(t, 2 * half) >= half ? number("swing", 0) : 0));
}

static double energy_j(device_t device, double t) {
    double half = number("square_s", 1) / 2, whole = floor(t / (2 * half));
    double high = whole * half + fmax(0, fmod(t, 2 * half) - half);
    return (device->index + 1) * (number("watts", 50) * t + number("swing", 0) * high);
}

static double last_tick(double t, const char *period, double otherwise) {
    double tick = number(period, otherwise);
    return floor(t / tick) * tick;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("init", SUCCESS); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("cards", 2); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) { *device = &cards[index]; return SUCCESS; }

int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned size) {
    char key[32];
    snprintf(key, sizeof key, "uuid.%d", device->index);
    if (!setting(key, uuid, size))
        snprintf(uuid, size, "GPU-%d%d%d%d1a2b-0000-4000-8000-00000000000%d", device->index, device->index,
                 device->index, device->index, device->index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, device_t *device) {
    char uuid[96];
    for (int i = 0; i < (int)number("cards", 2); i++) {
        nvmlDeviceGetUUID(&cards[i], uuid, sizeof uuid);
        if (!strcmp(uuid, wanted)) { *device = &cards[i]; return SUCCESS; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(device_t device, char *name, unsigned size) {
    char key[32];
    snprintf(key, sizeof key, "name.%d", device->index);
    if (!setting(key, name, size)) snprintf(name, size, "Fake GPU");
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    (void)device;
    DEVICE_CALL();
    int mig = (int)number("mig", -1);
    if (mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)mig;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *millijoules) {
    DEVICE_CALL();
    double t = number("stopped_s", 0);
    if (t == 0) t = last_tick(clock_s(CLOCK_MONOTONIC), "tick_s", 0.1);
    *millijoules = (unsigned long long)(1e3 * (energy_j(device, t) - number("reset_j", 0)));
    return SUCCESS;
}

typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value_t;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; unsigned type, code; value_t value; } field_t;

/* a sensor's noise of 10 mW: no two values in a row are the same */
static unsigned power_mw(device_t device, double t) {
    double tick = last_tick(t, "power_tick_s", 0.02);
    return (unsigned)(1e3 * power_w(device, tick)) + (unsigned)(llround(tick / number("power_tick_s", 0.02)) % 10);
}

int nvmlDeviceGetFieldValues(device_t device, int count, field_t *fields) {
    DEVICE_CALL();
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u.%u", fields[i].field, fields[i].scope);
        fields[i].code = (unsigned)number(key, fields[i].scope ? NOT_SUPPORTED : SUCCESS);
        fields[i].type = 1;
        fields[i].value.ui = power_mw(device, clock_s(CLOCK_MONOTONIC)) + (fields[i].scope ? 100000 : 0);
    }
    return SUCCESS;
}

typedef struct { unsigned long long time_us; value_t value; } sample_t;

int nvmlDeviceGetSamples(device_t device, int kind, unsigned long long since_us, unsigned *type, unsigned *count,
                         sample_t *samples) {
    DEVICE_CALL();
    static double utc_s;
    double tick = number("power_tick_s", 0.02), newest = last_tick(clock_s(CLOCK_MONOTONIC), "power_tick_s", 0.02);
    if (utc_s == 0) utc_s = clock_s(CLOCK_REALTIME) - clock_s(CLOCK_MONOTONIC);
    if (kind != 0) return INVALID_ARGUMENT;
    unsigned kept = 0;
    for (int i = HISTORY - 1; i >= 0; i--) {
        double t = newest - i * tick;
        unsigned long long time_us = (unsigned long long)llround((t + utc_s) * 1e6);
        if (time_us <= since_us) continue;
        if (samples && kept < *count) {
            samples[kept].time_us = time_us;
            samples[kept].value.ui = power_mw(device, t + tick / 2);
        }
        kept++;
    }
    *type = 1;
    *count = kept;
    return kept ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetClockInfo(device_t device, int kind, unsigned *megahertz) {
    (void)device;
    DEVICE_CALL();
    *megahertz = (unsigned)(kind == 2 ? number("memory_mhz", 9501) : number("sm_mhz", 1980));
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *mask) {
    (void)device;
    DEVICE_CALL();
    *mask = (unsigned long long)number("throttle", 0);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t device, unsigned rates[2]) {
    (void)device;
    DEVICE_CALL();
    rates[0] = (unsigned)number("utilization", 87);
    rates[1] = 12;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t device, unsigned long long memory[3]) {
    (void)device;
    DEVICE_CALL();
    memory[0] = 24ULL << 30;
    memory[1] = 21ULL << 30;
    memory[2] = 3ULL << 30;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *celsius) {
    (void)device, (void)sensor;
    DEVICE_CALL();
    *celsius = (unsigned)number("celsius", 61);
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_t;

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *processes) {
    (void)device;
    DEVICE_CALL();
    char pids[128] = "";
    unsigned found = 0, room = *count;
    setting("pids", pids, sizeof pids);
    for (char *pid = strtok(pids, ","); pid && found < MAX_PIDS; pid = strtok(NULL, ","), found++)
        if (found < room) processes[found] = (process_t){.pid = (unsigned)atoi(pid), .memory = 1 << 20};
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

typedef struct { unsigned version, supported; } gpm_support_t;
typedef struct { double t; } *gpm_sample_t;
typedef struct { unsigned id, code; double value; char *names[3]; } gpm_metric_t;
typedef struct { unsigned version, count; gpm_sample_t sample1, sample2; gpm_metric_t metrics[]; } gpm_query_t;

int nvmlGpmQueryDeviceSupport(device_t device, gpm_support_t *support) {
    (void)device;
    DEVICE_CALL();
    support->supported = (unsigned)number("gpm", 0);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(gpm_sample_t *sample) { *sample = calloc(1, sizeof **sample); return SUCCESS; }

int nvmlGpmSampleGet(device_t device, gpm_sample_t sample) {
    (void)device;
    DEVICE_CALL();
    sample->t = clock_s(CLOCK_MONOTONIC);
    return SUCCESS;
}

/* metric N reads N + 0.5 %; as on the hardware, two samples have to be 0.1 s apart, the older first */
int nvmlGpmMetricsGet(gpm_query_t *query) {
    DEVICE_CALL();
    if (query->sample2->t - query->sample1->t < 0.1) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < query->count; i++) {
        char key[32];
        snprintf(key, sizeof key, "gpm.%u", query->metrics[i].id);
        query->metrics[i].code = (unsigned)number(key, SUCCESS);
        query->metrics[i].value = query->metrics[i].id + 0.5;
    }
    return SUCCESS;
}
