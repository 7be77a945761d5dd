/* Vectors of 16 floats, those of GCC and Clang; compilers map them to what the processor has. */

#ifndef CPLAYERS_VECTORS_H
#define CPLAYERS_VECTORS_H

#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint16_t elem;
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
static inline vec load(const elem *at) {
    return (vec)(__builtin_convertvector(*(const halves *)at, bits) << 16);
}
static inline float widen(elem x) {
    uint32_t wide = (uint32_t)x << 16;
    float result;
    memcpy(&result, &wide, 4);
    return result;
}
static inline elem narrow(float x) { /* to nearest, ties to even */
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (elem)((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}
#else
typedef float elem;
static inline vec load(const elem *at) { return *(const loose *)at; }
static inline float widen(elem x) { return x; }
static inline elem narrow(float x) { return x; }
#endif

static inline vec load_floats(const float *at) { return *(const loose *)at; }
static inline void store_floats(float *at, vec x) { *(loose *)at = x; }
/* Keeps a vector in a register, where a compiler would read it from memory once more. */
#ifdef __AVX512F__
#define HOLD(x) __asm__("" : "+v"(x))
#else
#define HOLD(x)
#endif
static inline vec splat(float x) { return x - (vec){0}; }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Halves of a and b added up, then quarters, and so on: four steps add up 16 vectors of 16. */
static inline vec fold8(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline vec fold4(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline vec fold2(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
static inline vec fold1(vec a, vec b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* e^x for x up to 80, within 2 units in the last place; 0 below -87, -infinity included. */
static inline vec exponential(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ints tiny = x < -87.0f;
    x = (vec)((ints)x & ~tiny);
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (vec)((ints)(p * (vec)power) & ~tiny);
}

static inline vec larger(vec a, vec b) { /* NaN if either is */
    ints more = (a > b) | (a != a);
    return (vec)(((ints)a & more) | ((ints)b & ~more));
}
static inline float largest(vec x) {
    x = larger(x, SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
}
static inline float total(vec x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

#endif
