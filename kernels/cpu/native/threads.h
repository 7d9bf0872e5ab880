/* Distributes rows to the threads of torch's own OpenMP library, because a second pool of threads
 * would compete for the same processors. `connect_threads` receives that library's functions.
 */
#ifndef MOE_PLUGIN_THREADS_H
#define MOE_PLUGIN_THREADS_H

#include <stdint.h>

/* The work of one thread: rows from first to end - 1. */
typedef void (*Part)(const void *work, int64_t first, int64_t end);

typedef struct {
    Part part;
    const void *work;
    int64_t rows;
} Team;

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel;
static int (*thread_number)(void), (*team_size)(void);

/* Receives GOMP_parallel, omp_get_thread_num and omp_get_num_threads. Must be called once, before
 * any other function. */
void connect_threads(void *start, void *number, void *size) {
    parallel = (Parallel)start;
    thread_number = (int (*)(void))number;
    team_size = (int (*)(void))size;
}

static void share(void *data) {
    const Team *team = data;
    int64_t number = thread_number(), size = team_size();
    team->part(team->work, team->rows * number / size, team->rows * (number + 1) / size);
}

static void run(Part part, const void *work, int64_t rows, int threads) {
    Team team = {part, work, rows};
    if (threads > 1)
        parallel(share, &team, (unsigned)threads, 0);
    else
        part(work, 0, rows);
}

#endif
