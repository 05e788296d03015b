// The primitives of fused_step.h for a CPU, where the machine's own compiler compiles it.

#include <math.h>
#include <pthread.h>
#include <string.h>
// <immintrin.h> takes longer to compile than everything else together
#if defined(__AVX512VBMI__) && defined(__AVX512DQ__) && CELLS_0 + CELLS_1 + CELLS_2 > 0
#define HAS_AVX512
#include <immintrin.h>
#endif

#define DEVICE static inline

DEVICE float bits_float(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
DEVICE unsigned int float_bits(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float limit_magnitude(float x, float most) { return fabsf(x) > most ? copysignf(most, x) : x; }
