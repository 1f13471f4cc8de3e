// SPDX-License-Identifier: Apache-2.0
//
// Checksums of items of grids, gathered from where they lie: XXH3 (64 bits, seed 0), as its specification has it, so that any
// xxHash library gives the same numbers for the same bytes.
//
// Why not such a library: one call of it per item costs a KV block of 4 KiB as much again as its bytes, and it needs the
// interpreter's lock between any two items, for which it may wait milliseconds when another thread is busy. Here the
// lock is let go once, for thousands of items.

#include "threads.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define LANES 8
#define STRIPE_BYTES 64
#define STRIPES_PER_BLOCK 16 // the secret moves on by 8 bytes with each stripe
#define SHORT_BYTES 240      // up to here other formulas apply, which need all bytes at once
#define LINE_BYTES 64
#define PREFETCH_LINES 8
// How often a long part looks whether it is to stop.
#define PIECE_BYTES (4 << 20)

enum { OK = 0, STOPPED = 1 };

// Layout known to transfer/checksum.py.
typedef struct {
    int64_t num_grids;
    int64_t num_parts;
    int64_t items_per_sum;
    const int64_t *address;     // per grid: of item 0
    const int64_t *stride;
    const int64_t *part_offset; // per part of every item
    const int64_t *part_bytes;
} sum_plan;

typedef struct {
    const sum_plan *plan;
    const int64_t *items;
    int64_t n;
    int64_t sums_per_grid;
    int64_t bytes_per_item; // of all parts
    const _Atomic int32_t *stop;
    uint64_t *sums;
    _Atomic int64_t next;
} task;

// The specification's default secret.
static const unsigned char secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct {
    uint64_t lane[LANES];
    uint64_t num_bytes;
    int num_stripes; // of the block under way
    // The last stripe that was taken in, and what came behind it. The last stripe of all, which may overlap the one
    // before, has a key of its own, so that a full one waits until there is more.
    unsigned char tail[2 * STRIPE_BYTES];
    size_t num_waiting;
} state;

static inline uint64_t word(const unsigned char *at) {
    uint64_t x;
    memcpy(&x, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static inline uint64_t half_word(const unsigned char *at) {
    uint32_t x;
    memcpy(&x, at, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap32(x);
#endif
    return x;
}

static inline uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ULL;
    return h ^ h >> 32;
}

static inline uint64_t mix(const unsigned char *at, const unsigned char *key) {
    return fold(word(at) ^ word(key), word(at + 8) ^ word(key + 8));
}

static uint64_t sum_up_to_16(const unsigned char *at, size_t size) {
    uint64_t h;
    if (size > 8) {
        uint64_t low = word(at) ^ word(secret + 24) ^ word(secret + 32);
        uint64_t high = word(at + size - 8) ^ word(secret + 40) ^ word(secret + 48);
        return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (size >= 4) {
        h = (half_word(at + size - 4) + (half_word(at) << 32)) ^ word(secret + 8) ^ word(secret + 16);
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * 0x9FB21C651E98DF25ULL;
        h = (h ^ ((h >> 35) + size)) * 0x9FB21C651E98DF25ULL;
        return h ^ h >> 28;
    }
    h = (uint64_t)at[0] << 16 | (uint64_t)at[size / 2] << 24 | at[size - 1] | (uint64_t)size << 8;
    h ^= half_word(secret) ^ half_word(secret + 4);
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static uint64_t sum_short(const unsigned char *at, size_t size) {
    if (size <= 16)
        return sum_up_to_16(at, size);
    uint64_t h = size * P64_1;
    if (size <= 128) { // pairs from both ends towards the middle
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;)
            h += mix(at + 16 * i, secret + 32 * i) + mix(at + size - 16 * (i + 1), secret + 32 * i + 16);
        return avalanche(h);
    }
    for (size_t i = 0; i < 8; i++)
        h += mix(at + 16 * i, secret + 16 * i);
    h = avalanche(h);
    for (size_t i = 8; i < size / 16; i++)
        h += mix(at + 16 * i, secret + 16 * (i - 8) + 3);
    return avalanche(h + mix(at + size - 16, secret + 136 - 17));
}

static void start(state *s) {
    static const uint64_t lanes[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(s->lane, lanes, sizeof lanes);
    s->num_bytes = 0;
    s->num_stripes = 0;
    s->num_waiting = 0;
}

static inline void take_in(uint64_t *lane, const unsigned char *at, const unsigned char *key) {
    for (int i = 0; i < LANES; i++) {
        uint64_t x = word(at + 8 * i), keyed = x ^ word(key + 8 * i);
        lane[i ^ 1] += x;
        lane[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
}

static inline void scramble(uint64_t *lane) {
    for (int i = 0; i < LANES; i++)
        lane[i] = (lane[i] ^ lane[i] >> 47 ^ word(secret + 128 + 8 * i)) * P32_1;
}

static void add_stripes_plain(state *s, const unsigned char *at, int64_t n) {
    for (; n > 0; n--, at += STRIPE_BYTES) {
        take_in(s->lane, at, secret + 8 * s->num_stripes);
        if (++s->num_stripes == STRIPES_PER_BLOCK) {
            scramble(s->lane);
            s->num_stripes = 0;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx2"))) static inline
#define load(at) _mm256_loadu_si256((const __m256i *)(at))

// Half of `take_in`, and of `scramble`: four lanes.
WIDE __m256i take_in_wide(__m256i lanes, const unsigned char *at, const unsigned char *key) {
    __m256i x = load(at), keyed = _mm256_xor_si256(x, load(key));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, _mm256_shuffle_epi32(x, 0x4E)));
}

WIDE __m256i scramble_wide(__m256i lanes, const unsigned char *key) {
    __m256i prime = _mm256_set1_epi64x(P32_1);
    lanes = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), load(key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void add_stripes_wide(state *s, const unsigned char *at, int64_t n) {
    __m256i first = load(s->lane), second = load(s->lane + 4);
    for (; n > 0; n--, at += STRIPE_BYTES) {
        const unsigned char *key = secret + 8 * s->num_stripes;
        first = take_in_wide(first, at, key);
        second = take_in_wide(second, at + 32, key + 32);
        if (++s->num_stripes == STRIPES_PER_BLOCK) {
            first = scramble_wide(first, secret + 128);
            second = scramble_wide(second, secret + 160);
            s->num_stripes = 0;
        }
    }
    _mm256_storeu_si256((__m256i *)s->lane, first);
    _mm256_storeu_si256((__m256i *)(s->lane + 4), second);
}

static void add_stripes(state *s, const unsigned char *at, int64_t n) {
    if (__builtin_cpu_supports("avx2"))
        add_stripes_wide(s, at, n);
    else
        add_stripes_plain(s, at, n);
}

#else

static void add_stripes(state *s, const unsigned char *at, int64_t n) { add_stripes_plain(s, at, n); }

#endif

static void add(state *s, const unsigned char *at, int64_t size) {
    unsigned char *waiting = s->tail + STRIPE_BYTES;
    s->num_bytes += (uint64_t)size;
    if (s->num_waiting) {
        size_t room = STRIPE_BYTES - s->num_waiting, take = (size_t)size < room ? (size_t)size : room;
        memcpy(waiting + s->num_waiting, at, take);
        s->num_waiting += take;
        at += take;
        size -= (int64_t)take;
        if (size == 0)
            return;
        add_stripes(s, waiting, 1);
        memcpy(s->tail, waiting, STRIPE_BYTES);
    }
    int64_t n = (size - 1) / STRIPE_BYTES;
    if (n > 0) {
        add_stripes(s, at, n);
        at += n * STRIPE_BYTES;
        size -= n * STRIPE_BYTES;
        memcpy(s->tail, at - STRIPE_BYTES, STRIPE_BYTES);
    }
    memcpy(waiting, at, (size_t)size);
    s->num_waiting = (size_t)size;
}

static uint64_t finish(state *s) {
    take_in(s->lane, s->tail + s->num_waiting, secret + sizeof secret - STRIPE_BYTES - 7);
    uint64_t h = s->num_bytes * P64_1;
    for (int i = 0; i < LANES; i += 2)
        h += fold(s->lane[i] ^ word(secret + 11 + 8 * i), s->lane[i + 1] ^ word(secret + 11 + 8 * i + 8));
    return avalanche(h);
}

static int is_stopped(const task *of) { return of->stop && atomic_load_explicit(of->stop, memory_order_relaxed); }

static inline const unsigned char *item_at(const task *of, int64_t grid, int64_t i) {
    return (const unsigned char *)(uintptr_t)(of->plan->address[grid] + of->items[i] * of->plan->stride[grid]);
}

static void add_part(const task *of, state *s, const unsigned char *at, int64_t size) {
    for (; size > PIECE_BYTES && !is_stopped(of); at += PIECE_BYTES, size -= PIECE_BYTES)
        add(s, at, PIECE_BYTES);
    if (!is_stopped(of))
        add(s, at, size);
}

static uint64_t sum_of_short(const task *of, int64_t grid, int64_t first, int64_t end) {
    const sum_plan *plan = of->plan;
    unsigned char bytes[SHORT_BYTES];
    size_t size = 0;
    for (int64_t i = first; i < end; i++)
        for (int64_t part = 0; part < plan->num_parts; part++) {
            memcpy(bytes + size, item_at(of, grid, i) + plan->part_offset[part], (size_t)plan->part_bytes[part]);
            size += (size_t)plan->part_bytes[part];
        }
    return sum_short(bytes, size);
}

static uint64_t sum_of(const task *of, int64_t grid, int64_t first, int64_t end) {
    const sum_plan *plan = of->plan;
    if ((end - first) * of->bytes_per_item <= SHORT_BYTES)
        return sum_of_short(of, grid, first, end);
    state s;
    start(&s);
    for (int64_t i = first; i < end; i++) {
        const unsigned char *item = item_at(of, grid, i);
        if (i + 1 < of->n) // the jump to the next item is what the hardware cannot foresee
            for (int line = 0; line < PREFETCH_LINES; line++)
                __builtin_prefetch(item_at(of, grid, i + 1) + plan->part_offset[0] + line * LINE_BYTES);
        for (int64_t part = 0; part < plan->num_parts; part++)
            add_part(of, &s, item + plan->part_offset[part], plan->part_bytes[part]);
    }
    return finish(&s);
}

static void make_sums(void *arg, may_go_on going_on) {
    task *of = arg;
    int64_t num_sums = of->plan->num_grids * of->sums_per_grid, which;
    while (!is_stopped(of) && (!going_on || going_on()) && (which = atomic_fetch_add(&of->next, 1)) < num_sums) {
        int64_t first = which % of->sums_per_grid * of->plan->items_per_sum, end = first + of->plan->items_per_sum;
        of->sums[which] = sum_of(of, which / of->sums_per_grid, first, end < of->n ? end : of->n);
    }
}

// For every grid, and `items_per_sum` of the n items at a time: one number over all their parts, to sums[], grid after
// grid. The caller vouches for the items. `stop`, unless NULL, ends it early once it is not 0.
int datadist_checksum_items(const sum_plan *plan, const int64_t *items, int64_t n, int helpers,
                            const _Atomic int32_t *stop, uint64_t *sums) {
    task mine = {.plan = plan, .items = items, .n = n, .stop = stop, .sums = sums};
    for (int64_t part = 0; part < plan->num_parts; part++)
        mine.bytes_per_item += plan->part_bytes[part];
    mine.sums_per_grid = (n + plan->items_per_sum - 1) / plan->items_per_sum;
    datadist_run_together(make_sums, &mine, helpers);
    return is_stopped(&mine) ? STOPPED : OK;
}
