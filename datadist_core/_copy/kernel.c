// SPDX-License-Identifier: Apache-2.0
//
// Copies many byte ranges, one after the other.
//
// A plain store first reads the cache line that it is about to overwrite, and leaves it in the cache in place of
// something else. KV blocks are large, are not read again by the copying core, and together exceed its caches, so
// both are waste: streaming (non-temporal) stores avoid them and move the same bytes in 55 to 75 % of the time.
// glibc's memcpy streams only when a single call is larger than about a whole cache, which a block never is.
//
// Measured on Sapphire Rapids, GB/s, blocks at random places of 512 MiB, memcpy / this:
//     256 MiB in blocks of  1 KiB  3.6 / 6.9     4 KiB  5.0 / 9.1     64 KiB  6.4 / 9.6
// When the destination is read straight afterwards, streaming loses below about 1 MiB in all (the reader would have
// found it in the cache) and wins above. Hence the two limits below. Within a block the hardware prefetches well by
// itself; the jump to the next block it cannot foresee, so that is what is prefetched by hand.
//
// A streaming store is not ordered with the plain store or the message that announces it; the fence at the end is
// what makes "the call returned" mean "visible to whoever is told".

#include "ranges.h"

#include <string.h>

#define STREAM_MIN_TOTAL_BYTES (1 << 20)
#define STREAM_MIN_RANGE_BYTES 512
#define LINE_BYTES 64
#define PREFETCH_LINES 4
#define PREFETCH_AHEAD 2
#define SHORT_BYTES 512
#define PREFETCH_AHEAD_OF_SHORT 12

static inline char *to_pointer(int64_t address) { return (char *)(uintptr_t)address; }

static void copy_plain(const copy_list *list) {
    for (int64_t i = 0; i < list->n; i++)
        memcpy(to_pointer(list->dst[i]), to_pointer(list->src[i]), (size_t)list->num_bytes[i]);
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// Each of these copies whole lines to an aligned destination and returns how many bytes that were.
#define STEP_BYTES (4 * LINE_BYTES)

__attribute__((target("avx512f"))) static size_t stream_avx512(char *dst, const char *src, size_t size) {
    size_t at = 0;
    for (; at + STEP_BYTES <= size; at += STEP_BYTES) {
        __m512i a = _mm512_loadu_si512(src + at);
        __m512i b = _mm512_loadu_si512(src + at + 64);
        __m512i c = _mm512_loadu_si512(src + at + 128);
        __m512i d = _mm512_loadu_si512(src + at + 192);
        _mm512_stream_si512((void *)(dst + at), a);
        _mm512_stream_si512((void *)(dst + at + 64), b);
        _mm512_stream_si512((void *)(dst + at + 128), c);
        _mm512_stream_si512((void *)(dst + at + 192), d);
    }
    for (; at + LINE_BYTES <= size; at += LINE_BYTES)
        _mm512_stream_si512((void *)(dst + at), _mm512_loadu_si512(src + at));
    return at;
}

__attribute__((target("avx2"))) static size_t stream_avx2(char *dst, const char *src, size_t size) {
    size_t at = 0;
    for (; at + LINE_BYTES <= size; at += LINE_BYTES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + at + 32));
        _mm256_stream_si256((__m256i *)(dst + at), a);
        _mm256_stream_si256((__m256i *)(dst + at + 32), b);
    }
    return at;
}

static size_t stream_sse2(char *dst, const char *src, size_t size) {
    size_t at = 0;
    for (; at + LINE_BYTES <= size; at += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)(src + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(src + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(src + at + 48));
        _mm_stream_si128((__m128i *)(dst + at), a);
        _mm_stream_si128((__m128i *)(dst + at + 16), b);
        _mm_stream_si128((__m128i *)(dst + at + 32), c);
        _mm_stream_si128((__m128i *)(dst + at + 48), d);
    }
    return at;
}

typedef size_t (*stream_lines)(char *dst, const char *src, size_t size);

// Numbered as in `datadist_scatter_copy_variant`. NULL where this processor lacks it, and for memcpy.
static stream_lines stream_variant(int number) {
    __builtin_cpu_init();
    switch (number) {
    case 1: return stream_sse2;
    case 2: return __builtin_cpu_supports("avx2") ? stream_avx2 : NULL;
    case 3: return __builtin_cpu_supports("avx512f") ? stream_avx512 : NULL;
    default: return NULL;
    }
}

// Whether a range fills whole lines, so that streaming it wastes nothing however small it is.
static inline int is_whole_lines(const char *dst, size_t size) { return (((uintptr_t)dst | size) % LINE_BYTES) == 0; }

static void stream_range(char *dst, const char *src, size_t size, stream_lines stream) {
    size_t head = (size_t)(-(uintptr_t)dst) % LINE_BYTES; // smaller than any range that comes here
    memcpy(dst, src, head);
    size_t done = head + stream(dst + head, src + head, size - head);
    memcpy(dst + done, src + done, size - done);
}

// The beginning of a range that comes soon: the shorter ranges are, the more of them are under way.
static inline void prefetch_later(const copy_list *list, int64_t i) {
    int64_t later = i + (list->num_bytes[i] < SHORT_BYTES ? PREFETCH_AHEAD_OF_SHORT : PREFETCH_AHEAD);
    if (later >= list->n)
        return;
    const char *src = to_pointer(list->src[later]);
    int64_t size = list->num_bytes[later];
    for (int64_t at = 0; at < PREFETCH_LINES * LINE_BYTES && at < size; at += LINE_BYTES)
        _mm_prefetch(src + at, _MM_HINT_T0);
}

static void copy_streaming(const copy_list *list, stream_lines stream) {
    for (int64_t i = 0; i < list->n; i++) {
        prefetch_later(list, i);
        char *dst = to_pointer(list->dst[i]);
        const char *src = to_pointer(list->src[i]);
        size_t size = (size_t)list->num_bytes[i];
        if (is_whole_lines(dst, size))
            stream(dst, src, size);
        else if (size < STREAM_MIN_RANGE_BYTES)
            memcpy(dst, src, size);
        else
            stream_range(dst, src, size, stream);
    }
    _mm_sfence();
}

static void copy_with(int variant, const copy_list *list) {
    stream_lines stream = stream_variant(variant);
    if (stream)
        copy_streaming(list, stream);
    else
        copy_plain(list);
}

static int has_variant(int number) { return number == 0 || stream_variant(number) != NULL; }

#else // On other processors (aarch64) the C library's memcpy is the best known; it needs no fence of ours.

static void copy_with(int variant, const copy_list *list) {
    (void)variant;
    copy_plain(list);
}

static int has_variant(int number) { return number == 0; }

#endif

#define NUM_VARIANTS 4

static int best_variant(void) {
    int number = NUM_VARIANTS - 1;
    while (!has_variant(number))
        number--;
    return number;
}

// The number of the sources this library was built from; the loader compares it.
int64_t datadist_native_abi(void) { return DATADIST_NATIVE_ABI; }

void datadist_copy_list(const copy_list *list, int64_t total_bytes) {
    if (total_bytes < STREAM_MIN_TOTAL_BYTES)
        copy_plain(list);
    else
        copy_with(best_variant(), list);
}

// Copy num_bytes[i] from address src[i] to address dst[i] for i in 0..n-1. No state: a caller may split the arrays
// and give the parts to several threads.
void datadist_scatter_copy(const int64_t *dst, const int64_t *src, const int64_t *num_bytes, int64_t n) {
    copy_list list = {dst, src, num_bytes, n};
    int64_t total_bytes = 0;
    for (int64_t i = 0; i < n; i++)
        total_bytes += num_bytes[i];
    datadist_copy_list(&list, total_bytes);
}

// For tests and measurements: the same copy by one instruction set (0 memcpy, 1 SSE2, 2 AVX2, 3 AVX-512), whatever
// its size. Returns 0, or -1 if this processor lacks it.
int datadist_scatter_copy_variant(int variant, const int64_t *dst, const int64_t *src, const int64_t *num_bytes,
                                  int64_t n) {
    if (variant < 0 || variant >= NUM_VARIANTS || !has_variant(variant))
        return -1;
    copy_list list = {dst, src, num_bytes, n};
    copy_with(variant, &list);
    return 0;
}
