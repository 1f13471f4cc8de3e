// SPDX-License-Identifier: Apache-2.0
//
// Copies items of grids: from two lists of indices straight to the bytes, without a list of addresses in between.
//
// A plan says what stays the same from one transfer to the next: for every pair of grids where item 0 lies at both
// ends and how far apart items are, and which slices of an item move. Ranges are made a few hundred at a time, while
// they fit into the cache, and copied at once. Where an item moves as a whole and items lie next to each other,
// neighbours in both lists become one range.
//
// The work is cut into pieces which all threads at it take, one by one, from a common counter.

#include "ranges.h"
#include "threads.h"

#include <poll.h>
#include <stdatomic.h>

#define PIECE_BYTES (512 << 10)
#define MAX_RANGES 512 // 12 KiB of the stack

enum { OK = 0, STOPPED = 1, BAD_LOCAL_ITEM = 2, BAD_REMOTE_ITEM = 3, HUNG_UP = 4 };

// Layout known to items.py.
typedef struct {
    int64_t num_pairs;
    int64_t num_slices;
    int64_t bytes_per_item;    // of all slices
    int64_t num_local_items;   // that exist
    int64_t num_remote_items;
    const int64_t *local;      // per pair: address of item 0
    const int64_t *remote;
    const int64_t *local_stride;
    const int64_t *remote_stride;
    const int64_t *mergeable;  // per pair: 1 where neighbouring items are neighbouring bytes at both ends
    const int64_t *slice_local; // per slice: offset in the item
    const int64_t *slice_remote;
    const int64_t *slice_bytes;
} item_plan;

typedef struct {
    const item_plan *plan;
    int to_local;
    const int64_t *local_items;
    const int64_t *remote_items;
    int64_t n;
    const _Atomic int32_t *stop;
    int64_t total_bytes;
    int64_t items_per_piece;
    int64_t pieces_per_pair;
    _Atomic int64_t next_piece;
} task;

typedef struct {
    int64_t local[MAX_RANGES];
    int64_t remote[MAX_RANGES];
    int64_t num_bytes[MAX_RANGES];
    int64_t n;
    int64_t total_bytes;
} range_buffer;

static void flush(const task *of, range_buffer *ranges) {
    copy_list list = {of->to_local ? ranges->local : ranges->remote, of->to_local ? ranges->remote : ranges->local,
                      ranges->num_bytes, ranges->n};
    datadist_copy_list(&list, of->total_bytes);
    ranges->n = 0;
    ranges->total_bytes = 0;
}

static inline void add(const task *of, range_buffer *ranges, int64_t local, int64_t remote, int64_t num_bytes) {
    if (ranges->n == MAX_RANGES)
        flush(of, ranges);
    ranges->local[ranges->n] = local;
    ranges->remote[ranges->n] = remote;
    ranges->num_bytes[ranges->n++] = num_bytes;
    ranges->total_bytes += num_bytes;
}

static void copy_runs(const task *of, int64_t pair, int64_t first, int64_t end, range_buffer *ranges) {
    const item_plan *plan = of->plan;
    const int64_t *local = of->local_items, *remote = of->remote_items;
    for (int64_t i = first; i < end;) {
        int64_t run = 1;
        while (i + run < end && local[i + run] == local[i] + run && remote[i + run] == remote[i] + run)
            run++;
        add(of, ranges, plan->local[pair] + local[i] * plan->local_stride[pair],
            plan->remote[pair] + remote[i] * plan->remote_stride[pair], run * plan->bytes_per_item);
        i += run;
    }
}

static void copy_slices(const task *of, int64_t pair, int64_t first, int64_t end, range_buffer *ranges) {
    const item_plan *plan = of->plan;
    for (int64_t i = first; i < end; i++) {
        int64_t local = plan->local[pair] + of->local_items[i] * plan->local_stride[pair];
        int64_t remote = plan->remote[pair] + of->remote_items[i] * plan->remote_stride[pair];
        for (int64_t s = 0; s < plan->num_slices; s++)
            add(of, ranges, local + plan->slice_local[s], remote + plan->slice_remote[s], plan->slice_bytes[s]);
    }
}

static void copy_piece(const task *of, int64_t piece, range_buffer *ranges) {
    int64_t pair = piece / of->pieces_per_pair;
    int64_t first = piece % of->pieces_per_pair * of->items_per_piece;
    int64_t end = first + of->items_per_piece < of->n ? first + of->items_per_piece : of->n;
    if (of->plan->mergeable[pair])
        copy_runs(of, pair, first, end, ranges);
    else
        copy_slices(of, pair, first, end, ranges);
}

static int is_stopped(const task *of) { return of->stop && atomic_load_explicit(of->stop, memory_order_relaxed); }

static void copy_pieces(void *arg, may_go_on going_on) {
    task *of = arg;
    range_buffer ranges;
    ranges.n = 0;
    ranges.total_bytes = 0;
    int64_t num_pieces = of->plan->num_pairs * of->pieces_per_pair, piece;
    while (!is_stopped(of) && (!going_on || going_on()) && (piece = atomic_fetch_add(&of->next_piece, 1)) < num_pieces) {
        copy_piece(of, piece, &ranges);
        if (ranges.total_bytes >= PIECE_BYTES)
            flush(of, &ranges);
    }
    flush(of, &ranges);
}

static int all_exist(const int64_t *items, int64_t n, int64_t num_items) {
    uint64_t largest = 0; // a negative index is larger than any
    for (int64_t i = 0; i < n; i++)
        largest = (uint64_t)items[i] > largest ? (uint64_t)items[i] : largest;
    return largest < (uint64_t)num_items;
}

// Whether the other end of a connection has gone, or sends no more; POLLHUP and POLLERR are reported unasked.
static int has_hung_up(int connection) {
    struct pollfd asked = {.fd = connection, .events = POLLRDHUP};
    return poll(&asked, 1, 0) != 0;
}

// Copy items local_items[i] and remote_items[i], i in 0..n-1, of every pair of the plan: to the local end, or from it.
// Nothing is copied if an item does not exist. `stop`, unless NULL, ends the copy early once it is not 0. `connection`,
// unless negative, is looked at afterwards: HUNG_UP if its other end has gone.
int datadist_copy_items(const item_plan *plan, int to_local, const int64_t *local_items, const int64_t *remote_items,
                        int64_t n, int helpers, const _Atomic int32_t *stop, int connection) {
    if (!all_exist(local_items, n, plan->num_local_items))
        return BAD_LOCAL_ITEM;
    if (!all_exist(remote_items, n, plan->num_remote_items))
        return BAD_REMOTE_ITEM;
    if (n == 0)
        return OK;
    int64_t per_piece = PIECE_BYTES / plan->bytes_per_item;
    task mine = {.plan = plan, .to_local = to_local, .local_items = local_items, .remote_items = remote_items, .n = n,
                 .stop = stop, .total_bytes = plan->num_pairs * n * plan->bytes_per_item};
    mine.items_per_piece = per_piece < 1 ? 1 : per_piece > n ? n : per_piece;
    mine.pieces_per_pair = (n + mine.items_per_piece - 1) / mine.items_per_piece;
    datadist_run_together(copy_pieces, &mine, helpers);
    if (is_stopped(&mine))
        return STOPPED;
    return connection >= 0 && has_hung_up(connection) ? HUNG_UP : OK;
}
