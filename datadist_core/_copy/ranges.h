// SPDX-License-Identifier: Apache-2.0
// A list of byte ranges, and the loops that copy one. See kernel.c.
#ifndef DATADIST_RANGES_H
#define DATADIST_RANGES_H

#include <stdint.h>

typedef struct {
    const int64_t *dst;
    const int64_t *src;
    const int64_t *num_bytes;
    int64_t n;
} copy_list;

// Copy a list that is part of a transfer of `total_bytes`, which decides how.
void datadist_copy_list(const copy_list *list, int64_t total_bytes);

#endif
