/* The threads of the kernels. */
#pragma once

/* Call run(context, i) for every i of 0 .. count - 1, on up to `threads` threads, the caller's
   included. The order of the calls, and the thread of each, are not defined. */
void parallel_for(long count, int threads, void (*run)(void *context, long i), void *context);
