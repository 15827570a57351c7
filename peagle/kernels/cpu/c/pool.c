/* The threads of the kernels: a pool of our own, which also serves a machine whose cores are busy.

   A job is cut into chunks, which the caller and the workers claim one by one. The caller waits
   only for chunks that a worker has claimed, never for a worker that has not begun.

   Whoever waits spins for a few microseconds, because the next job of a layer follows within them;
   then yields the core to other processes again and again, because the next step follows within a
   millisecond; and then sleeps. Waking a sleeping core takes up to half a millisecond in a virtual
   machine.

   `claim` holds the number of the job and how many of its chunks are left. A worker that is late
   finds another number or no chunk, so it cannot touch a job that has ended. The fields of a job
   change only while no chunk is left and all are done. */

#include "pool.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MAX_WORKERS       255
#define CHUNKS_PER_THREAD 32          /* at most: a chunk is a run of consecutive indices */
#define STACK_BYTES       (4l << 20)  /* attention keeps its blocks on the stack */
#define SPIN_NANOSECONDS  25000
#define YIELD_NANOSECONDS 1000000
#define PAUSES            32 /* between two looks at the clock */

struct worker {
    long number;
    pthread_mutex_t mutex;
    pthread_cond_t wakeup;
    atomic_int asleep;
};

static struct {
    atomic_flag in_use;
    atomic_uint_fast64_t claim; /* number of the job << 32 | chunks left */
    atomic_long done;           /* chunks */
    _Atomic int helpers;        /* workers that may take part */
    _Atomic int wanted;         /* workers that the next job may need: the others sleep */
    void (*run)(void *context, long i);
    void *context;
    long count, chunks, chunk_size;
    pthread_mutex_t mutex;
    pthread_cond_t finished;
    atomic_int caller_asleep;
    long worker_count, max_workers; /* of the caller that holds `in_use` */
} pool = {.in_use = ATOMIC_FLAG_INIT,
          .mutex = PTHREAD_MUTEX_INITIALIZER,
          .finished = PTHREAD_COND_INITIALIZER,
          .max_workers = MAX_WORKERS};

static struct worker workers[MAX_WORKERS];
static pthread_once_t fork_handler = PTHREAD_ONCE_INIT;

static uint32_t job_number(uint64_t claim) { return claim >> 32; }

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` takes no time on most ARM cores */
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* A child process has the memory of the pool, but none of its threads. */
static void empty_pool(void) {
    pool.worker_count = 0;
    pool.max_workers = MAX_WORKERS;
    atomic_store(&pool.caller_asleep, 0);
    pthread_mutex_init(&pool.mutex, 0);
    pthread_cond_init(&pool.finished, 0);
    atomic_store(&pool.claim, (uint64_t)job_number(atomic_load(&pool.claim)) << 32);
    atomic_flag_clear(&pool.in_use);
}

static void handle_forks(void) { pthread_atfork(0, 0, empty_pool); }

/* Claim chunks of a job and run them, until none is left. */
static void run_chunks(uint32_t number) {
    uint64_t claim = atomic_load(&pool.claim);
    while (job_number(claim) == number && (uint32_t)claim) {
        if (!atomic_compare_exchange_weak(&pool.claim, &claim, claim - 1)) continue;
        long start = (pool.chunks - (long)(uint32_t)claim) * pool.chunk_size,
             end = start + pool.chunk_size < pool.count ? start + pool.chunk_size : pool.count,
             chunks = pool.chunks;
        for (long i = start; i < end; i++) pool.run(pool.context, i);
        if (atomic_fetch_add(&pool.done, 1) + 1 == chunks && atomic_load(&pool.caller_asleep)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.mutex);
        }
        claim = atomic_load(&pool.claim);
    }
}

static int has_new_job(uint32_t seen) { return job_number(atomic_load(&pool.claim)) != seen; }

/* Wait until ready() is true, without sleeping; returns whether it is. */
static int spin_until(int (*ready)(uint32_t argument), uint32_t argument) {
    int64_t start = nanoseconds(), waited = 0;
    while (waited < YIELD_NANOSECONDS) {
        for (int i = 0; i < PAUSES; i++) {
            if (ready(argument)) return 1;
            relax();
        }
        waited = nanoseconds() - start;
        if (waited > SPIN_NANOSECONDS) sched_yield();
    }
    return 0;
}

static void wait_for_job(struct worker *me, uint32_t seen) {
    if (me->number < atomic_load(&pool.wanted) && spin_until(has_new_job, seen)) return;
    pthread_mutex_lock(&me->mutex);
    atomic_store(&me->asleep, 1);
    while (!has_new_job(seen)) pthread_cond_wait(&me->wakeup, &me->mutex);
    atomic_store(&me->asleep, 0);
    pthread_mutex_unlock(&me->mutex);
}

static void *work(void *argument) {
    struct worker *me = argument;
    uint32_t seen = job_number(atomic_load(&pool.claim)) - 1; /* the job that needs this worker */
    for (;;) {
        wait_for_job(me, seen);
        seen = job_number(atomic_load(&pool.claim));
        if (me->number < atomic_load(&pool.helpers)) run_chunks(seen);
    }
    return 0;
}

/* Signals belong to the threads of the program. */
static int start_worker(struct worker *worker, long number) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    worker->number = number;
    atomic_store(&worker->asleep, 0);
    pthread_mutex_init(&worker->mutex, 0);
    pthread_cond_init(&worker->wakeup, 0);
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&attributes);
    return !error;
}

/* A system that refuses a thread is not asked again. */
static void add_workers(long wanted) {
    if (wanted > pool.max_workers) wanted = pool.max_workers;
    while (pool.worker_count < wanted) {
        if (start_worker(workers + pool.worker_count, pool.worker_count)) pool.worker_count++;
        else pool.max_workers = wanted = pool.worker_count;
    }
}

static int is_done(uint32_t unused) {
    (void)unused;
    return atomic_load(&pool.done) == pool.chunks;
}

static void wait_until_done(void) {
    if (spin_until(is_done, 0)) return;
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.caller_asleep, 1);
    while (!is_done(0)) pthread_cond_wait(&pool.finished, &pool.mutex);
    atomic_store(&pool.caller_asleep, 0);
    pthread_mutex_unlock(&pool.mutex);
}

static void wake_workers(long helpers) {
    for (long i = 0; i < helpers; i++) {
        if (!(uint32_t)atomic_load(&pool.claim)) return; /* all chunks are claimed */
        if (!atomic_load(&workers[i].asleep)) continue;
        pthread_mutex_lock(&workers[i].mutex);
        pthread_cond_signal(&workers[i].wakeup);
        pthread_mutex_unlock(&workers[i].mutex);
    }
}

/* If the pool is in use, by another thread or by the caller of this call, the caller computes
   alone. */
void parallel_for(long count, int threads, void (*run)(void *context, long i), void *context) {
    int alone = count < 2 || threads < 2;
    if (!alone) {
        pthread_once(&fork_handler, handle_forks); /* before the pool is in use */
        alone = atomic_flag_test_and_set(&pool.in_use);
    }
    if (alone) {
        for (long i = 0; i < count; i++) run(context, i);
        return;
    }
    long helpers = (threads < count ? threads : count) - 1,
         most = (helpers + 1) * CHUNKS_PER_THREAD;
    if (helpers > MAX_WORKERS) helpers = MAX_WORKERS;
    pool.run = run, pool.context = context, pool.count = count;
    pool.chunk_size = (count + most - 1) / most;
    pool.chunks = (count + pool.chunk_size - 1) / pool.chunk_size;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.helpers, helpers);
    atomic_store(&pool.wanted, threads - 1);
    uint32_t number = job_number(atomic_load(&pool.claim)) + 1;
    atomic_store(&pool.claim, (uint64_t)number << 32 | (uint32_t)pool.chunks);
    add_workers(helpers);
    wake_workers(helpers < pool.worker_count ? helpers : pool.worker_count);
    run_chunks(number);
    wait_until_done();
    atomic_flag_clear(&pool.in_use);
}
