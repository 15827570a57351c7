/* Memory bandwidth: threads read a buffer that no cache holds. Prints bytes per second.

       read_loop THREADS BYTES PASSES

   The buffer asks for huge pages: with small ones, address translation is part of the time. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE (2 << 20) /* bytes of a huge page */
#define LANES 64 /* independent sums, so that additions do not wait for each other */

struct part {
    const uint64_t *start;
    size_t words;
    uint64_t sum;
    pthread_t thread;
};

static void *read_part(void *argument)
{
    struct part *part = argument;
    uint64_t sums[LANES] = {0};
    for (size_t i = 0; i + LANES <= part->words; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += part->start[i + lane];
    part->sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        part->sum += sums[lane];
    return NULL;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    int threads = argc == 4 ? atoi(argv[1]) : 0;
    if (threads < 1)
        return 2;
    size_t bytes = strtoull(argv[2], NULL, 10) / (threads * PAGE) * (threads * PAGE);
    int passes = atoi(argv[3]);
    uint64_t *buffer = aligned_alloc(PAGE, bytes);
    struct part *parts = calloc(threads, sizeof *parts);
    if (!buffer || !parts)
        return 1;
#ifdef MADV_HUGEPAGE
    madvise(buffer, bytes, MADV_HUGEPAGE); /* only a hint: it may fail */
#endif
    memset(buffer, 1, bytes); /* gives every page memory of its own */
    double best = 0;
    uint64_t sum = 0;
    for (int pass = 0; pass < passes; pass++) {
        double start = seconds();
        for (int i = 0; i < threads; i++) {
            parts[i].words = bytes / threads / 8;
            parts[i].start = buffer + i * parts[i].words;
            if (pthread_create(&parts[i].thread, NULL, read_part, &parts[i]))
                return 1;
        }
        for (int i = 0; i < threads; i++) {
            pthread_join(parts[i].thread, NULL);
            sum += parts[i].sum;
        }
        double speed = bytes / (seconds() - start);
        best = speed > best ? speed : best;
    }
    fprintf(stderr, "%llu\n", (unsigned long long)sum); /* keeps the compiler from dropping it */
    printf("%.0f\n", best);
    return 0;
}
