/* Run functions of the kernels under qemu: read buffers and one call from a file, write what the
   call returned and the buffers to another.

   The file consists of numbers of 64 bits: the number of buffers; for each its size and the number
   of its pointers, then (offset, buffer, offset in it) for each pointer, then its content; then the
   name of the function in 64 bytes, the numbers of its integer and float arguments, and those: an
   integer as (kind, value, offset), where kind 1 means a pointer to a buffer, a float as a double.

   A call with more arguments than the function has is defined on this system (AAPCS64): integers
   and pointers are passed in registers and then on the stack, in order, each in 8 bytes, and up to
   eight floats in registers of their own. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INTEGERS 40
#define NAME_BYTES   64

typedef int64_t (*any_function)(int64_t, ...);
extern const struct { const char *name; any_function function; } kernel_table[]; /* table.c */

static void fail(const char *what) {
    fprintf(stderr, "runner: %s\n", what);
    exit(1);
}

static void read_bytes(FILE *file, void *to, size_t size) {
    if (size && fread(to, size, 1, file) != 1) fail("the file of calls is too short");
}

static int64_t read_number(FILE *file) {
    int64_t number;
    read_bytes(file, &number, sizeof number);
    return number;
}

#define I(n) integer[n]
#define TEN(n)                                                                                     \
    I(n), I(n + 1), I(n + 2), I(n + 3), I(n + 4), I(n + 5), I(n + 6), I(n + 7), I(n + 8), I(n + 9)
#define INTEGERS                                                                                   \
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t

static int64_t call(any_function function, const int64_t *integer, const float *number) {
    int64_t (*full)(INTEGERS, INTEGERS, INTEGERS, INTEGERS, float, float, float, float) =
        (void *)function;
    return full(TEN(0), TEN(10), TEN(20), TEN(30), number[0], number[1], number[2], number[3]);
}

struct buffer { char *data; int64_t size, pointer_count, (*pointers)[3]; };

int main(int count, char **path) {
    FILE *in = count == 3 ? fopen(path[1], "rb") : 0, *out = in ? fopen(path[2], "wb") : 0;
    if (!out) fail("usage: runner CALL RESULT");
    int64_t buffer_count = read_number(in);
    struct buffer *buffers = calloc(buffer_count + 1, sizeof *buffers);
    for (struct buffer *b = buffers; b < buffers + buffer_count; b++) {
        b->size = read_number(in), b->pointer_count = read_number(in);
        b->pointers = malloc(b->pointer_count * sizeof *b->pointers + 1);
        read_bytes(in, b->pointers, b->pointer_count * sizeof *b->pointers);
        b->data = aligned_alloc(64, (b->size + 127) / 64 * 64);
        read_bytes(in, b->data, b->size);
    }
    for (struct buffer *b = buffers; b < buffers + buffer_count; b++)
        for (int64_t i = 0; i < b->pointer_count; i++) {
            char *to = buffers[b->pointers[i][1]].data + b->pointers[i][2];
            memcpy(b->data + b->pointers[i][0], &to, sizeof to);
        }
    char name[NAME_BYTES];
    read_bytes(in, name, sizeof name);
    int64_t integer[MAX_INTEGERS] = {0}, integers = read_number(in), floats = read_number(in);
    float number[4] = {0};
    if (integers > MAX_INTEGERS || floats > 4) fail("too many arguments");
    for (int64_t i = 0; i < integers; i++) {
        int64_t kind = read_number(in), value = read_number(in), offset = read_number(in);
        integer[i] = kind ? (int64_t)(buffers[value].data + offset) : value;
    }
    for (int64_t i = 0; i < floats; i++) {
        double wide;
        read_bytes(in, &wide, sizeof wide);
        number[i] = wide;
    }
    long at = 0;
    while (kernel_table[at].name && strcmp(kernel_table[at].name, name)) at++;
    if (!kernel_table[at].name) fail(name);
    int64_t result = call(kernel_table[at].function, integer, number);
    fwrite(&result, sizeof result, 1, out);
    char text[NAME_BYTES] = {0}; /* of a function that returns a string */
    if (count == 3 && !integers && result > 4096) strncpy(text, (const char *)result, NAME_BYTES - 1);
    fwrite(text, sizeof text, 1, out);
    for (struct buffer *b = buffers; b < buffers + buffer_count; b++)
        if (b->size && fwrite(b->data, b->size, 1, out) != 1) fail("the result was not written");
    return fclose(out);
}
