// SPDX-License-Identifier: Apache-2.0
// Threads that help whoever calls. See threads.c.
#ifndef DATADIST_THREADS_H
#define DATADIST_THREADS_H

// Whether a helper may go on: false once others need its processor.
typedef int (*may_go_on)(void);

// Run `work(arg, NULL)` in this thread and, at the same time, `work(arg, may_go_on)` in up to `helpers` others, while
// processors are idle. Returns when nobody runs it any more. `work` must share out the task itself, and return when
// nothing is left of it; a helper also, between two pieces, when it may not go on.
void datadist_run_together(void (*work)(void *, may_go_on), void *arg, int helpers);

#endif
