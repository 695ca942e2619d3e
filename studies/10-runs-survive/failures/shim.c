/* Counts system calls that change files below a folder, and kills the process or fills its disk at one of them.
 *
 * Loaded with LD_PRELOAD. Settings, read at start and by `failures_arm`:
 *   FAILURES_PATH  part of a path; calls on other files are passed on
 *   FAILURES_DO    kill   SIGKILL before the call
 *                  tear   a write of the first half of the bytes, then SIGKILL
 *                  full   ENOSPC for this and all later writes, as on a full disk
 *   FAILURES_AT    number of the call, from 1
 *   FAILURES_LOG   file that gets one line per counted call: number, name, bytes, path
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { NOTHING, KILL, TEAR, FULL };

static enum action action = NOTHING;
static char part[PATH_MAX];
static long at;
static int log_fd = -1;
static atomic_long count;

__attribute__((constructor)) void failures_arm(void) {
    const char *path = getenv("FAILURES_PATH"), *what = getenv("FAILURES_DO"), *when = getenv("FAILURES_AT");
    const char *log = getenv("FAILURES_LOG");
    action = NOTHING;
    if (!path || !*path) return;
    snprintf(part, sizeof part, "%s", path);
    at = when ? atol(when) : 0;
    count = 0;
    log_fd = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    action = !what ? NOTHING : !strcmp(what, "kill") ? KILL : !strcmp(what, "tear") ? TEAR : FULL;
    if (!what) at = LONG_MAX, action = KILL; /* only counts */
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Returns 1 if the call's number is reached. */
static int reached(const char *name, const char *path, size_t bytes) {
    if (action == NOTHING || !path || !strstr(path, part)) return 0;
    long now = ++count;
    if (log_fd >= 0) {
        char line[PATH_MAX + 100];
        int length = snprintf(line, sizeof line, "%ld %s %zu %s\n", now, name, bytes, path);
        syscall(SYS_write, log_fd, line, length);
    }
    return action == FULL ? now >= at : now == at;
}

static int reached_fd(const char *name, int fd, size_t bytes) {
    if (action == NOTHING || fd == log_fd) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return reached(name, path, bytes);
}

ssize_t write(int fd, const void *data, size_t bytes) {
    if (reached_fd("write", fd, bytes)) {
        if (action == FULL) return errno = ENOSPC, -1;
        if (action == TEAR) syscall(SYS_write, fd, data, bytes / 2);
        die();
    }
    return syscall(SYS_write, fd, data, bytes);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) {
    if (reached_fd("pwrite", fd, bytes)) {
        if (action == FULL) return errno = ENOSPC, -1;
        if (action == TEAR) syscall(SYS_pwrite64, fd, data, bytes / 2, offset);
        die();
    }
    return syscall(SYS_pwrite64, fd, data, bytes, offset);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }

ssize_t writev(int fd, const struct iovec *parts, int number) {
    size_t bytes = 0;
    for (int i = 0; i < number; i++) bytes += parts[i].iov_len;
    if (reached_fd("writev", fd, bytes)) {
        if (action == FULL) return errno = ENOSPC, -1;
        if (action == TEAR) syscall(SYS_write, fd, parts[0].iov_base, parts[0].iov_len / 2);
        die();
    }
    return syscall(SYS_writev, fd, parts, number);
}

int fsync(int fd) {
    if (reached_fd("fsync", fd, 0) && action != FULL) die();
    return (int)syscall(SYS_fsync, fd);
}

static int renamed(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    if (reached("rename", to, 0) && action != FULL) die();
    return (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }

int renameat(int from_fd, const char *from, int to_fd, const char *to) { return renamed(from_fd, from, to_fd, to, 0); }

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    return renamed(from_fd, from, to_fd, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    if (reached("mkdir", path, 0)) {
        if (action == FULL) return errno = ENOSPC, -1;
        die();
    }
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlink(const char *path) {
    if (reached("unlink", path, 0) && action != FULL) die();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int unlinkat(int fd, const char *path, int flags) {
    if (reached_fd("unlinkat", fd, 0) && action != FULL) die();
    return (int)syscall(SYS_unlinkat, fd, path, flags);
}
