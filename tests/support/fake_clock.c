/* Moves a process's clocks by the two offsets in the file FAKE_CLOCK, in seconds: of the wall clock and of the others.
 *
 * Waits until a time are moved back for the kernel; those of condition variables are monotonic, as CPython's are. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offsets;

__attribute__((constructor)) static void map(void) {
    int file = open(getenv("FAKE_CLOCK"), O_RDONLY);
    offsets = mmap(NULL, 2 * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static double offset_s(clockid_t clock) {
    if (offsets == NULL || offsets == MAP_FAILED) return 0.0;
    if (is_wall(clock)) return offsets[0];
    return clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID ? 0.0 : offsets[1];
}

static struct timespec moved(const struct timespec *t, double seconds) {
    long long ns = t->tv_sec * 1000000000LL + t->tv_nsec + (long long)(seconds * 1e9);
    return (struct timespec){ns / 1000000000LL, ns % 1000000000LL};
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    if (syscall(SYS_clock_gettime, clock, t)) return -1;
    *t = moved(t, offset_s(clock));
    return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *t, struct timespec *rest) {
    struct timespec until = flags & TIMER_ABSTIME ? moved(t, -offset_s(clock)) : *t;
    return NEXT(clock_nanosleep)(clock, flags, &until, rest);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict t) {
    struct timespec until = moved(t, -offset_s(clock));
    return NEXT(sem_clockwait)(semaphore, clock, &until);
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict t) {
    struct timespec until = moved(t, -offset_s(CLOCK_MONOTONIC));
    return NEXT(pthread_cond_timedwait)(condition, mutex, &until);
}
