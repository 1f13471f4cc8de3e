// SPDX-License-Identifier: Apache-2.0
//
// A few threads, started when first needed, that help with long copies while processors are idle: a host that serves
// models has them busy, and a copy must not take them. So a helper looks, before each piece, how many threads run on the
// host, and leaves for a moment when that is more than there are processors. (The policy SCHED_IDLE would seem made for
// this. But a helper that loses its processor in the middle of a piece may then not get one again for a long time, and
// the caller, who must not return before, waits for it.)
//
// The caller never waits for a helper to begin: it works on its own from the first moment, and a helper that wakes up
// late, or never, because the processors are busy, finds the work done. Only a helper that has begun is waited for,
// and that takes as long as its piece.

#include "threads.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#define MAX_THREADS 16
#define STACK_BYTES (256 << 10)
// How often to look whether the helpers are done before going to sleep: a few microseconds, less than a sleep costs.
#define SPINS 2000
// A helper that has left looks again after this.
#define RETRY_US 50

typedef struct job {
    void (*work)(void *, may_go_on);
    void *arg;
    int wanted;         // helpers that may still join
    _Atomic int active; // helpers that are at it
    struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_to_do = PTHREAD_COND_INITIALIZER;
static pthread_cond_t helper_left = PTHREAD_COND_INITIALIZER;
static job *open_jobs;
static int num_threads;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// A forked child has this thread only.
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_to_do, NULL);
    pthread_cond_init(&helper_left, NULL);
    open_jobs = NULL;
    num_threads = 0;
}

static int loadavg = -1;
static long num_processors;

static void set_up(void) {
    pthread_atfork(NULL, NULL, in_child);
    loadavg = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    num_processors = sysconf(_SC_NPROCESSORS_ONLN);
}

// "0.20 0.18 0.12 3/80 11206": the fourth is how many threads run or wait for a processor, of how many. Reading it
// takes a microsecond or two. Where it cannot be read nobody helps.
static int processors_suffice(void) {
    char text[64];
    ssize_t length = pread(loadavg, text, sizeof text - 1, 0);
    int running;
    if (length <= 0)
        return 0;
    text[length] = 0;
    return sscanf(text, "%*s %*s %*s %d/", &running) == 1 && running <= num_processors;
}

static job *job_to_join(void) {
    job *found = open_jobs;
    while (found && found->wanted == 0)
        found = found->next;
    return found;
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        job *joined = job_to_join();
        if (!joined) {
            pthread_cond_wait(&work_to_do, &lock);
            continue;
        }
        joined->wanted--;
        joined->active++;
        pthread_mutex_unlock(&lock);
        joined->work(joined->arg, processors_suffice);
        pthread_mutex_lock(&lock);
        joined->wanted++; // should there be work left when processors are idle again
        // The caller may leave, and its job vanish, as soon as it sees 0: nothing of it is touched after this.
        if (--joined->active == 0)
            pthread_cond_broadcast(&helper_left);
        pthread_mutex_unlock(&lock);
        usleep(RETRY_US);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

// With the lock held. Signals are for the threads of the program.
static void start_threads(int needed) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (num_threads >= needed || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (num_threads < needed && pthread_create(&thread, &attributes, help, NULL) == 0) {
        pthread_setname_np(thread, "datadist-copy");
        num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void withdraw(job *mine) {
    job **at = &open_jobs;
    while (*at != mine)
        at = &(*at)->next;
    *at = mine->next;
    mine->wanted = 0;
}

void datadist_run_together(void (*work)(void *, may_go_on), void *arg, int helpers) {
    if (helpers <= 0) {
        work(arg, NULL);
        return;
    }
    if (helpers > MAX_THREADS)
        helpers = MAX_THREADS;
    job mine = {work, arg, helpers, 0, NULL};
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
    start_threads(helpers);
    mine.next = open_jobs;
    open_jobs = &mine;
    pthread_cond_broadcast(&work_to_do);
    pthread_mutex_unlock(&lock);
    work(arg, NULL);
    pthread_mutex_lock(&lock);
    withdraw(&mine);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < SPINS && atomic_load(&mine.active); i++)
        ;
    pthread_mutex_lock(&lock);
    while (mine.active)
        pthread_cond_wait(&helper_left, &lock);
    pthread_mutex_unlock(&lock);
}
