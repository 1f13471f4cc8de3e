// SPDX-License-Identifier: Apache-2.0
//
// Sums buffers of many sizes, whole and in pieces at random places, and prints one number over all sums, which
// test_checksum_c.py compares with the library's. Each buffer is exactly as large as what is summed.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PIECES 7

// As in checksum.c.
typedef struct {
    int64_t num_grids, num_parts, items_per_sum;
    const int64_t *address, *stride, *part_offset, *part_bytes;
} sum_plan;

int datadist_checksum_items(const sum_plan *plan, const int64_t *items, int64_t n, int helpers,
                            const _Atomic int32_t *stop, uint64_t *sums);

static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u, state >> 8; }

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t sum_in_pieces(const unsigned char *bytes, int64_t size, int num_pieces) {
    int64_t ends[MAX_PIECES], offsets[MAX_PIECES], sizes[MAX_PIECES], used = 0, at = 0;
    for (int i = 0; i < num_pieces; i++)
        ends[i] = i ? next() % (size + 1) : size;
    qsort(ends, num_pieces, sizeof ends[0], compare);
    for (int i = 0; i < num_pieces; i++)
        if (ends[i] > at) {
            offsets[used] = at;
            sizes[used++] = ends[i] - at;
            at = ends[i];
        }
    int64_t address = (int64_t)(uintptr_t)bytes, stride = size, item = 0;
    sum_plan plan = {1, used, 1, &address, &stride, offsets, sizes};
    uint64_t sum = 0;
    if (datadist_checksum_items(&plan, &item, 1, 0, NULL, &sum))
        abort();
    return sum;
}

int main(void) {
    uint64_t over_all = 0;
    for (int64_t size = 1; size < 70000; size += size < 1200 ? 1 : 4999) {
        unsigned char *bytes = malloc(size);
        for (int64_t i = 0; i < size; i++)
            bytes[i] = (unsigned char)(i * 131 + size);
        uint64_t sum = sum_in_pieces(bytes, size, 1);
        for (int pieces = 2; pieces <= MAX_PIECES; pieces++)
            if (sum_in_pieces(bytes, size, pieces) != sum) {
                printf("%d pieces of %lld bytes\n", pieces, (long long)size);
                return 1;
            }
        over_all = over_all * 31 + sum;
        free(bytes);
    }
    printf("%llu\n", (unsigned long long)over_all);
    return 0;
}
