/* Makes one call, or all calls from one on, that would change something below a folder fail, in all processes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct control { atomic_int left, code, sticky, count; char name[32]; };
static struct control *shared;
static const char *below;

__attribute__((constructor)) static void start(void) {
    below = getenv("FAULTS_BELOW");
    const char *path = getenv("FAULTS_CONTROL");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (memory != MAP_FAILED) shared = memory;
}

static int fails(const char *name, const char *path) {
    if (!shared || !below || !path || strncmp(path, below, strlen(below))) return 0;
    atomic_fetch_add(&shared->count, 1);
    int left = atomic_fetch_sub(&shared->left, 1);
    if (left == 1) strncpy(shared->name, name, sizeof shared->name - 1);
    if (left == 1 || (left < 1 && left > -1000000 && shared->sticky)) { errno = shared->code; return 1; }
    return 0;
}

static int fails_at(const char *name, int folder, const char *path) {
    char link[64], whole[PATH_MAX * 2];
    if (!shared) return 0;
    if (path && path[0] == '/') return fails(name, path);
    if (folder == AT_FDCWD) { if (!getcwd(whole, PATH_MAX)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, whole, PATH_MAX - 1);
        if (size < 0) return 0;
        whole[size] = 0;
    }
    if (path && *path) { strcat(whole, "/"); strncat(whole, path, PATH_MAX - 1); }
    return fails(name, whole);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define ON_FILE(type, name, parameters, arguments) \
    type name parameters { REAL(name); return fails_at(#name, file, 0) ? -1 : real arguments; }
#define ON_PATH(name, parameters, arguments) \
    int name parameters { REAL(name); return fails_at(#name, AT_FDCWD, path) ? -1 : real arguments; }
#define ON_PATH_AT(name, parameters, arguments) \
    int name parameters { REAL(name); return fails_at(#name, folder, path) ? -1 : real arguments; }

ON_FILE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(ssize_t, writev, (int file, const struct iovec *data, int size), (file, data, size))
ON_FILE(ssize_t, sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size))
ON_FILE(ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))
ON_FILE(int, ftruncate, (int file, off_t size), (file, size))
ON_FILE(int, ftruncate64, (int file, off64_t size), (file, size))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH_AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
ON_PATH(unlink, (const char *path), (path))
ON_PATH_AT(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(rmdir, (const char *path), (path))
ON_PATH(rename, (const char *path, const char *target), (path, target))
ON_PATH_AT(renameat, (int folder, const char *path, int other, const char *target), (folder, path, other, target))
ON_PATH_AT(renameat2, (int folder, const char *path, int other, const char *target, unsigned flags), (folder, path, other, target, flags))
ON_PATH(link, (const char *path, const char *target), (path, target))
ON_PATH_AT(linkat, (int folder, const char *path, int other, const char *target, int flags), (folder, path, other, target, flags))

#define OPENS(name, has_folder, parameters, folder, forward) \
    int name parameters { \
        REAL(name); mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR) && fails_at(#name, folder, path)) return -1; \
        return real forward; }
OPENS(open, 0, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(open64, 0, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(openat, 1, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPENS(openat64, 1, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
