/* Gives a server the time and the entropy of a simulated world (LD_PRELOAD).
 *
 * The file SIMULATION_CLOCK holds Unix time in nanoseconds, SIMULATION_ENTROPY what
 * /dev/urandom returns. All clocks show the same time. The processor's frequency is hidden: a server
 * that knows it reads the processor's clock, which nobody can replace. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NANOSECONDS 1000000000LL

static const int64_t before = 0; /* the time until the clock is open */
static const volatile int64_t *now = &before;

__attribute__((constructor)) static void open_clock(void) {
  const char *path = getenv("SIMULATION_CLOCK");
  int file = path ? open(path, O_RDONLY) : -1;
  void *shared = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) {
    fputs("SIMULATION_CLOCK names no clock\n", stderr);
    _exit(1);
  }
  now = shared;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int64_t value = *now;
  (void)clock;
  time->tv_sec = value / NANOSECONDS;
  time->tv_nsec = value % NANOSECONDS;
  return 0;
}

int gettimeofday(struct timeval *time, void *zone) {
  int64_t value = *now;
  (void)zone;
  time->tv_sec = value / NANOSECONDS;
  time->tv_usec = value % NANOSECONDS / 1000;
  return 0;
}

time_t time(time_t *result) {
  time_t value = *now / NANOSECONDS;
  if (result) *result = value;
  return value;
}

pid_t getpid(void) { return 1000; } /* a server seeds its generator with it */

ssize_t getrandom(void *buffer, size_t size, unsigned flags) {
  (void)flags;
  memset(buffer, 7, size);
  return (ssize_t)size;
}

static FILE *open_file(const char *name, const char *path, const char *mode) {
  FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, name);
  if (!strcmp(path, "/dev/urandom")) path = getenv("SIMULATION_ENTROPY");
  if (!strcmp(path, "/proc/cpuinfo")) path = "/dev/null";
  return real(path, mode);
}

FILE *fopen(const char *path, const char *mode) { return open_file("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return open_file("fopen64", path, mode); }
