// SPDX-License-Identifier: Apache-2.0
//
// Moves bytes between a stream socket and many ranges of memory, without a buffer in between.
//
// A cursor walks over the ranges. Each call goes on where the last one stopped and ends when its budget is used up,
// when the ranges are, or when the socket would block: the caller tells the cases apart by the number it gets back.
// Both functions never block, and run without the GIL.

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MAX_IOVECS 1024
#define END_OF_STREAM (-1)

// Mirrored by backends/_tcp_memory.py.
typedef struct {
    const int64_t *addresses;
    const int64_t *sizes;
    int64_t n;
    int64_t index;   // the range to go on with
    int64_t offset;  // bytes of it that are done
} datadist_cursor;

// Describe up to `budget` bytes from the cursor on; returns how many entries that takes.
static size_t gather(const datadist_cursor *cursor, int64_t budget, struct iovec *entries) {
    size_t used = 0;
    int64_t offset = cursor->offset;
    for (int64_t i = cursor->index; i < cursor->n && budget > 0 && used < MAX_IOVECS; i++, offset = 0) {
        int64_t size = cursor->sizes[i] - offset;
        if (size > budget)
            size = budget;
        entries[used].iov_base = (void *)(uintptr_t)(cursor->addresses[i] + offset);
        entries[used++].iov_len = (size_t)size;
        budget -= size;
    }
    return used;
}

static void advance(datadist_cursor *cursor, int64_t moved) {
    while (moved > 0) {
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

static ssize_t move_once(int fd, struct msghdr *message, int sending) {
    ssize_t moved;
    do {
        moved = sending ? sendmsg(fd, message, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(fd, message, MSG_DONTWAIT);
    } while (moved < 0 && errno == EINTR);
    return moved;
}

static int64_t move_some(int fd, datadist_cursor *cursor, int64_t budget, int32_t *error, int sending) {
    struct iovec entries[MAX_IOVECS];
    int64_t total = 0;
    *error = 0;
    while (total < budget && cursor->index < cursor->n) {
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = entries;
        message.msg_iovlen = gather(cursor, budget - total, entries);
        ssize_t moved = move_once(fd, &message, sending);
        if (moved <= 0) {
            if (moved == 0)
                *error = END_OF_STREAM;
            else if (errno != EAGAIN && errno != EWOULDBLOCK)
                *error = errno;
            break;
        }
        advance(cursor, moved);
        total += moved;
    }
    return total;
}

// Both return the bytes moved. *error is 0, END_OF_STREAM, or an errno other than "would block".
int64_t datadist_send_some(int fd, datadist_cursor *cursor, int64_t budget, int32_t *error) {
    return move_some(fd, cursor, budget, error, 1);
}

int64_t datadist_receive_some(int fd, datadist_cursor *cursor, int64_t budget, int32_t *error) {
    return move_some(fd, cursor, budget, error, 0);
}
