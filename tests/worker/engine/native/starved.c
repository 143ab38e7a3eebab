// Loaded before the C library: memory runs out where the function given to `starve_in` returns 1.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

static int (*is_starved)(void);

void starve_in(int (*place)(void)) { is_starved = place; }

int posix_memalign(void **place, size_t alignment, size_t size) {
  static int (*next)(void **, size_t, size_t);
  if (is_starved && is_starved()) return ENOMEM;
  if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  return next(place, alignment, size);
}
