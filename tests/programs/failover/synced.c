/* Notes up to where a server's append-only file is on the disk, so that a test can cut off what a
 * machine without power would have lost. Preloaded; the note is the file that SYNCED names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int fdatasync(int fd) {
    static int (*real)(int);
    char link[64], path[4096];
    struct stat before;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fdatasync");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    int is_log = strstr(path, ".incr.aof") && !fstat(fd, &before);
    int result = real(fd);
    if (is_log && !result) {
        int note = open(getenv("SYNCED"), O_WRONLY | O_CREAT, 0600);
        dprintf(note, "%020lld", (long long)before.st_size);
        close(note);
    }
    return result;
}
