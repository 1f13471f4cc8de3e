// SPDX-License-Identifier: Apache-2.0
//
// Copies random items with the kernel and with a loop, and compares all of the memory. Built and run by
// test_copy_c.py in several ways: with sanitizers, and for another processor.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUM_PAIRS 3
#define NUM_ITEMS 64
#define GUARD 4096
#define ROUNDS 60
#define THREADS 3

// As in items.c.
typedef struct {
    int64_t num_pairs, num_slices, bytes_per_item, num_local_items, num_remote_items;
    const int64_t *local, *remote, *local_stride, *remote_stride, *mergeable, *slice_local, *slice_remote, *slice_bytes;
} item_plan;

int datadist_copy_items(const item_plan *plan, int to_local, const int64_t *local_items, const int64_t *remote_items,
                        int64_t n, int helpers, const _Atomic int32_t *stop, int connection);
int datadist_scatter_copy_variant(int variant, const int64_t *dst, const int64_t *src, const int64_t *num_bytes,
                                  int64_t n);

static uint32_t next(uint32_t *state) { return *state = *state * 1664525u + 1013904223u, *state >> 8; }

static void shuffled(int64_t *items, uint32_t *state) {
    for (int64_t i = 0; i < NUM_ITEMS; i++)
        items[i] = i;
    for (int64_t i = NUM_ITEMS - 1; i > 0 && next(state) % 4; i--) {
        int64_t other = next(state) % (i + 1), kept = items[i];
        items[i] = items[other];
        items[other] = kept;
    }
}

// Random bytes to take from: making each byte anew would take most of the time under a sanitizer.
#define NOISE 8191
static unsigned char noise[2 * NOISE];

static void make_noise(void) {
    uint32_t state = 7;
    for (int i = 0; i < 2 * NOISE; i++)
        noise[i] = (unsigned char)next(&state);
}

static void scribble(unsigned char *bytes, int64_t size, uint32_t *state) {
    for (int64_t at = 0; at < size; at += NOISE)
        memcpy(bytes + at, noise + next(state) % NOISE, (size_t)(size - at < NOISE ? size - at : NOISE));
}

static int round_of(uint32_t *state, int64_t item_bytes, int helpers) {
    int64_t stride = item_bytes + (next(state) % 2 ? 0 : 24), per_pair = NUM_ITEMS * stride;
    int64_t size = NUM_PAIRS * per_pair + 2 * GUARD;
    unsigned char *local = malloc(size), *remote = malloc(size), *expected = malloc(size);
    scribble(local, size, state);
    scribble(remote, size, state);
    memcpy(expected, local, (size_t)size);
    int64_t bases[2][NUM_PAIRS], strides[NUM_PAIRS], mergeable[NUM_PAIRS];
    int64_t zero = 0, whole = item_bytes, local_items[NUM_ITEMS], remote_items[NUM_ITEMS];
    for (int pair = 0; pair < NUM_PAIRS; pair++) {
        bases[0][pair] = (int64_t)(uintptr_t)local + GUARD + pair * per_pair;
        bases[1][pair] = (int64_t)(uintptr_t)remote + GUARD + pair * per_pair;
        strides[pair] = stride;
        mergeable[pair] = stride == item_bytes;
    }
    shuffled(local_items, state);
    shuffled(remote_items, state);
    int64_t n = next(state) % (NUM_ITEMS + 1);
    item_plan plan = {NUM_PAIRS, 1,       item_bytes, NUM_ITEMS, NUM_ITEMS, bases[0], bases[1],
                      strides,   strides, mergeable,  &zero,     &zero,     &whole};
    for (int pair = 0; pair < NUM_PAIRS; pair++)
        for (int64_t i = 0; i < n; i++)
            memcpy(expected + GUARD + pair * per_pair + local_items[i] * stride,
                   remote + GUARD + pair * per_pair + remote_items[i] * stride, (size_t)item_bytes);
    int status = datadist_copy_items(&plan, 1, local_items, remote_items, n, helpers, NULL, -1);
    int wrong = status != 0 || memcmp(local, expected, (size_t)size) != 0;
    free(local), free(remote), free(expected);
    return wrong;
}

static void *work(void *arg) {
    static const int64_t sizes[] = {1, 63, 512, 577, 4096, 16384, 20001};
    uint32_t state = (uint32_t)(uintptr_t)arg;
    for (int i = 0; i < ROUNDS; i++)
        if (round_of(&state, sizes[next(&state) % 7], (int)(next(&state) % 4)))
            return (void *)"items were copied wrongly";
    return NULL;
}

static int variants_differ(void) {
    enum { SIZE = 70001 };
    unsigned char *src = malloc(SIZE + 64), *dst = malloc(SIZE + 64);
    int wrong = 0;
    for (int i = 0; i < SIZE + 64; i++)
        src[i] = (unsigned char)(i * 31);
    for (int variant = 0; variant < 8; variant++)
        for (int shift = 0; shift < 64 && !wrong; shift += 7) {
            int64_t to = (int64_t)(uintptr_t)(dst + shift), from = (int64_t)(uintptr_t)(src + 63 - shift), size = SIZE;
            memset(dst, 0, SIZE + 64);
            if (datadist_scatter_copy_variant(variant, &to, &from, &size, 1) != 0)
                continue;
            wrong = memcmp(dst + shift, src + 63 - shift, SIZE) != 0 || (shift && dst[shift - 1]) || dst[shift + SIZE];
            if (shift == 0)
                printf("variant %d\n", variant);
        }
    free(src), free(dst);
    return wrong;
}

int main(void) {
    pthread_t threads[THREADS];
    void *failure = NULL, *each;
    if (variants_differ()) {
        puts("a variant copied wrongly");
        return 1;
    }
    make_noise();
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &each);
        failure = failure ? failure : each;
    }
    puts(failure ? (const char *)failure : "ok");
    return failure != NULL;
}
