// SPDX-License-Identifier: Apache-2.0
//
// Moves bytes between many ranges of this process's memory and of another's, without that process taking part.
//
// process_vm_readv and process_vm_writev name the other process by its number, and a number says little: the process
// may have ended and its number been given to another, or it may run another program by now. So every call is tied to
// a proof: a few random bytes at a known address that only the right process's memory has. A read takes the proof
// along in the same system call, which works on one address space from beginning to end: what it read is from the
// right one, or it is not used. A write is preceded by a read of the proof.
//
// A cursor walks over the ranges; each call goes on where the last one stopped. The two sides of a system call may be
// divided differently, so neighbours are merged on each side by itself.

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define MAX_IOVECS 1024 // UIO_MAXIOV: the kernel takes no more
#define PROOF_BYTES 32
#define PROOF_GONE (-1)

// Mirrored by cma.py.
typedef struct {
    const int64_t *local;
    const int64_t *remote;
    const int64_t *sizes;
    int64_t n;
    int64_t index;  // the range to go on with
    int64_t offset; // bytes of it that are done
} datadist_remote_cursor;

// Mirrored by cma.py.
typedef struct {
    int64_t pid;
    int64_t proof_address;
    unsigned char proof[PROOF_BYTES];
} datadist_remote_process;

#ifdef __linux__

typedef struct {
    struct iovec entries[MAX_IOVECS];
    size_t used;
} vector;

static char *to_pointer(int64_t address) { return (char *)(uintptr_t)address; }

static int fits(const vector *list, const char *base) {
    if (list->used < MAX_IOVECS)
        return 1;
    const struct iovec *last = &list->entries[list->used - 1];
    return (char *)last->iov_base + last->iov_len == base;
}

static void append(vector *list, char *base, size_t size, size_t first) {
    if (list->used > first) {
        struct iovec *last = &list->entries[list->used - 1];
        if ((char *)last->iov_base + last->iov_len == base) {
            last->iov_len += size;
            return;
        }
    }
    list->entries[list->used].iov_base = base;
    list->entries[list->used++].iov_len = size;
}

// Add up to `budget` bytes from the cursor on to both lists. The entries before `first` are none of its business.
static void gather(const datadist_remote_cursor *cursor, int64_t budget, vector *local, vector *remote, size_t first) {
    int64_t offset = cursor->offset;
    for (int64_t i = cursor->index; i < cursor->n && budget > 0; i++, offset = 0) {
        char *here = to_pointer(cursor->local[i] + offset), *there = to_pointer(cursor->remote[i] + offset);
        int64_t size = cursor->sizes[i] - offset;
        if (size > budget)
            size = budget;
        if (!fits(local, here) || !fits(remote, there))
            return;
        append(local, here, (size_t)size, first);
        append(remote, there, (size_t)size, first);
        budget -= size;
    }
}

static void advance(datadist_remote_cursor *cursor, int64_t moved) {
    while (cursor->index < cursor->n) {
        int64_t left = cursor->sizes[cursor->index] - cursor->offset;
        if (moved < left) {
            cursor->offset += moved;
            return;
        }
        moved -= left;
        cursor->index++;
        cursor->offset = 0;
    }
}

static ssize_t transfer(pid_t pid, const vector *local, const vector *remote, int writing) {
    ssize_t moved;
    do {
        moved = writing ? process_vm_writev(pid, local->entries, local->used, remote->entries, remote->used, 0)
                        : process_vm_readv(pid, local->entries, local->used, remote->entries, remote->used, 0);
    } while (moved < 0 && errno == EINTR);
    return moved;
}

static int32_t check_proof(const datadist_remote_process *process) {
    unsigned char seen[PROOF_BYTES];
    struct iovec here = {seen, PROOF_BYTES}, there = {to_pointer(process->proof_address), PROOF_BYTES};
    ssize_t moved;
    do {
        moved = process_vm_readv((pid_t)process->pid, &here, 1, &there, 1, 0);
    } while (moved < 0 && errno == EINTR);
    if (moved < 0)
        return errno == EFAULT ? PROOF_GONE : errno;
    return moved == PROOF_BYTES && memcmp(seen, process->proof, PROOF_BYTES) == 0 ? 0 : PROOF_GONE;
}

// One system call's worth. Returns the bytes moved, or -1 with *error set.
static int64_t read_once(const datadist_remote_process *process, const datadist_remote_cursor *cursor, int64_t budget,
                         vector *local, vector *remote, int32_t *error) {
    unsigned char seen[PROOF_BYTES];
    local->entries[0].iov_base = seen;
    remote->entries[0].iov_base = to_pointer(process->proof_address);
    local->entries[0].iov_len = remote->entries[0].iov_len = PROOF_BYTES;
    local->used = remote->used = 1;
    gather(cursor, budget, local, remote, 1);
    ssize_t moved = transfer((pid_t)process->pid, local, remote, 0);
    if (moved < 0)
        *error = errno == EFAULT ? PROOF_GONE : errno; // the proof is the first to be read
    else if (moved < PROOF_BYTES || memcmp(seen, process->proof, PROOF_BYTES) != 0)
        *error = PROOF_GONE;
    else if (moved == PROOF_BYTES)
        *error = EFAULT;
    return *error ? -1 : (int64_t)moved - PROOF_BYTES;
}

static int64_t write_once(const datadist_remote_process *process, const datadist_remote_cursor *cursor,
                          int64_t budget, vector *local, vector *remote, int32_t *error) {
    *error = check_proof(process);
    if (*error)
        return -1;
    local->used = remote->used = 0;
    gather(cursor, budget, local, remote, 0);
    ssize_t moved = transfer((pid_t)process->pid, local, remote, 1);
    if (moved <= 0)
        *error = moved < 0 ? errno : EFAULT;
    return *error ? -1 : (int64_t)moved;
}

// Moves up to `budget` bytes and returns how many that were. *error is 0, an errno, or PROOF_GONE.
int64_t datadist_remote_move(const datadist_remote_process *process, datadist_remote_cursor *cursor, int64_t budget,
                             int32_t writing, int32_t *error) {
    vector local, remote;
    int64_t total = 0;
    *error = 0;
    while (total < budget && cursor->index < cursor->n) {
        int64_t moved = (writing ? write_once : read_once)(process, cursor, budget - total, &local, &remote, error);
        if (moved < 0)
            break;
        advance(cursor, moved);
        total += moved;
    }
    return total;
}

// 0 if the process still has its proof; else an errno, or PROOF_GONE.
int32_t datadist_remote_check(const datadist_remote_process *process) { return check_proof(process); }

#else

int64_t datadist_remote_move(const datadist_remote_process *process, datadist_remote_cursor *cursor, int64_t budget,
                             int32_t writing, int32_t *error) {
    (void)process, (void)cursor, (void)budget, (void)writing;
    *error = ENOSYS;
    return 0;
}

int32_t datadist_remote_check(const datadist_remote_process *process) {
    (void)process;
    return ENOSYS;
}

#endif
