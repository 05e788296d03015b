// Decodes a weight on a CPU, group by group, to float32 values for a `Sink`. In dequantize_cpu.cpp the sink is memory,
// in weight_mm_cpu.cpp the sums of a product. Either file is compiled together with this one, once for each format:
//
// BITS      1 .. 8 bits of a code. Codes below 8 bits are a little-endian bit stream: 8 codes fill BITS bytes
// LOW       the smallest code, which a bit stream stores as 0. Codes of 8 bits are int8 or, if LOW is 0, uint8
// EXPONENT  0 for integers; 4 or 5 exponent bits for float8
// TABLE     if defined, the value of each code, separated by commas
// SCALE_BYTES  1 if scales are bytes, which Weight::of_byte gives a value each
// ZERO      zero points: 0 none, 1 codes of the weight's own format, 2 float32 values of the code MID
//
// The compiler vectorizes loops over bytes. Other loops use the compilers' vector types, 8 codes or more at a time, and
// so need no header of any processor. Every operation is rounded by itself, as in PyTorch (-ffp-contract=off): the
// values equal those of PyTorch's operations to the bit.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef TO_MEMORY  // sums of products use FMA
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif
#endif

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER
// Unrolled loops keep their arrays in registers.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

static inline uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

#if ZERO == 2
typedef float Zero;
#elif LOW < 0
typedef int8_t Zero;
#else
typedef uint8_t Zero;
#endif

// `rows` rows of `columns` codes, `row_bytes` bytes each. `group` columns and `scale_rows` rows share a scale.
struct Layout {
    int64_t rows, columns, row_bytes, group, groups, scale_rows;
};

// The index of the first scale of a row.
static inline int64_t first_group(const Layout& l, int64_t row) {
    return (l.scale_rows == 1 ? row : row / l.scale_rows) * l.groups;
}

#if SCALE_BYTES
typedef uint8_t Scale;
#else
typedef float Scale;
#endif

struct Weight {
    const Layout* layout;
    const uint8_t* codes;
    const Scale* scale;
    const Zero* zero;
    const float* of_byte;  // 256 scales; null for float32 scales
    bool half_scales;      // scales are bfloat16
};

static inline float scale_at(const Weight& weight, int64_t index) {
#if SCALE_BYTES
    return weight.of_byte[weight.scale[index]];
#else
    if (!weight.half_scales) return weight.scale[index];
    return bits_float((uint32_t)((const uint16_t*)weight.scale)[index] << 16);
#endif
}

static inline float value(float number, float scale, Zero zero) {
#if ZERO == 2 && !defined(TO_MEMORY)
    return (number - MID) * scale + zero;
#elif ZERO == 2
    return (float)((double)(number - MID) * (double)scale + (double)zero);
#elif ZERO == 1
    return (number - (float)zero) * scale;
#else
    return number * scale;
#endif
}

static constexpr int MASK = (1 << BITS) - 1;
static constexpr int FLIP = BITS == 8 && LOW < 0 ? 128 : 0;  // int8 codes are stored without subtracting LOW

#ifdef TABLE
static const float TABLE_VALUES[1 << BITS] = {TABLE};
#endif

#if EXPONENT
static constexpr int MANTISSA = 7 - EXPONENT;
// Codes of this magnitude and above are NaN or infinities. e4m3 has one NaN and no infinity.
static constexpr int SPECIAL = EXPONENT == 4 ? 0x7f : 0x7c;
static constexpr int SPECIAL_BITS = EXPONENT == 4 ? 0x7fc00000 : 0x7f800000;
// The bits of a code, moved to the sign, exponent and mantissa of a float32, are its number divided by UNIT, exactly.
static constexpr uint32_t MOVED = 0x80000000u | 0x7fu << (23 - MANTISSA);
static constexpr float UNIT = EXPONENT == 4 ? 0x1p120f : 0x1p112f;

// Small numbers pass as denormal float32 numbers, which torch.set_flush_denormal(True) would make zero.
struct Denormals {
#ifdef __SSE__
    const unsigned mode = __builtin_ia32_stmxcsr();
    Denormals() { __builtin_ia32_ldmxcsr(mode & ~0x40u); }
    ~Denormals() { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
    uint64_t mode;
    Denormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        __asm__ volatile("msr fpcr, %0" : : "r"(mode & ~(1ull << 24)));
    }
    ~Denormals() { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
};
#else
struct Denormals {};
#endif

// The number that a code, as it is stored, stands for.
static inline float number(int code) {
#if defined(TABLE)
    return TABLE_VALUES[code];
#elif EXPONENT
    const uint32_t moved = (uint32_t)((int32_t)((uint32_t)code << 24) >> (8 - EXPONENT)) & MOVED;
    return bits_float(float_bits(bits_float(moved) * UNIT) | ((code & 0x7f) >= SPECIAL ? SPECIAL_BITS : 0));
#else
    return (float)((code ^ FLIP) + LOW);
#endif
}

// `number` of each element of a vector of 32-bit integers.
template <typename Numbers, typename Codes>
INLINE Numbers numbers_of(Codes codes) {
#if defined(TABLE)
    Numbers found;
    for (int i = 0; i < (int)(sizeof(Codes) / 4); i++) found[i] = TABLE_VALUES[codes[i]];
    return found;
#elif EXPONENT
    const Numbers found = (Numbers)((codes << 24) >> (8 - EXPONENT) & (int32_t)MOVED) * UNIT;
    const Codes special = (Codes)((codes & 0x7f) >= SPECIAL);
    return (Numbers)((Codes)found | (special & SPECIAL_BITS));
#else
    return __builtin_convertvector((codes ^ FLIP) + LOW, Numbers);
#endif
}

#if BITS == 8 && defined(TO_MEMORY)
#define BYTES

// ---- bytes -------------------------------------------------------------------------------------------------------

template <int R, typename Sink>
INLINE void decode_group(const uint8_t* __restrict codes, int64_t row_bytes, int64_t k, int64_t stop, int64_t,
                                int64_t, const float* scale, const Zero* zero, Sink& sink) {
    UNROLL for (int r = 0; r < R; r++)
        for (int64_t i = k; i < stop; i++) sink(r, i, value(number(codes[r * row_bytes + i]), scale[r], zero[r]));
}

static inline int64_t readable(const Layout& l, int64_t, int) { return l.columns; }

#else

// ---- a bit stream ------------------------------------------------------------------------------------------------

typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
typedef double Doubles __attribute__((vector_size(64)));

typedef uint32_t Word16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef float Float16 __attribute__((vector_size(64)));
typedef float UnalignedFloat16 __attribute__((vector_size(64), aligned(4)));

static constexpr int B = BITS;

// The numbers of all codes of up to 4 bits. Those of fewer repeat, so that the bits above a code in its word do not matter.
static inline Float16 numbers_of_all() {
    return numbers_of<Float16>(Int16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} & MASK);
}

// The number of columns, from the first of a row, that can be decoded `count` at a time. Each step reads 4 or 8 bytes;
// `after` bytes beyond the row may be read.
static inline int64_t readable(const Layout& l, int64_t after, int count) {
    const int loaded = BITS <= 4 && count == 8 ? 4 : 8, used = count / 8 * BITS;
    if (after >= loaded) return l.columns;
    const int64_t most = l.row_bytes + after - loaded;
    return most < 0 ? 0 : (most / used + 1) * count;
}

template <typename Numbers, typename Wide>
static inline Numbers values(Numbers numbers, float scale, Zero zero) {
#if ZERO == 2 && !defined(TO_MEMORY)
    return (numbers - (float)MID) * scale + zero;
#elif ZERO == 2
    const Wide steps = __builtin_convertvector(numbers - (float)MID, Wide);
    return __builtin_convertvector(steps * (double)scale + (double)zero, Numbers);
#elif ZERO == 1
    return (numbers - (float)zero) * scale;
#else
    return numbers * scale;
#endif
}

// The numbers of the 8 codes at `p`.
static inline Floats eight(const uint8_t* p) {
#if BITS <= 4
    uint32_t w;
    memcpy(&w, p, 4);
    const Words words = Words{w, w, w, w, w, w, w, w} >> Words{0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B};
#else
    uint64_t both;
    memcpy(&both, p, 8);
    const uint32_t w = (uint32_t)both, v = (uint32_t)(both >> 4 * B);
    const Words words = Words{w, w, w, w, v, v, v, v} >> Words{0, B, 2 * B, 3 * B, 0, B, 2 * B, 3 * B};
#endif
    return numbers_of<Floats>((Ints)(words & MASK));
}

// The number at column k; reads only the bytes of its code.
static inline float one(const uint8_t* row, int64_t k) {
    const int64_t byte = k * BITS / 8;
    const int shift = (int)(k * BITS % 8);
    int word = row[byte];
    if (shift + BITS > 8) word |= row[byte + 1] << 8;
    return number(word >> shift & MASK);
}

// With AVX-512, the values of up to 4 bits are a table in one register: one instruction looks up 16 values.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_SHUFFLE
#endif
#if BITS <= 4 && defined(HAS_SHUFFLE)
#define HAS_TABLE
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef double Doubles16 __attribute__((vector_size(128)));

// The values of the 16 codes at `p`, from the table of all values; reads 8 bytes.
static inline Float16 sixteen(const uint8_t* p, Float16 table) {
    uint64_t w;
    memcpy(&w, p, 8);
    if (BITS < 4) w = (w & ((1ull << 8 * BITS) - 1)) | w >> 8 * BITS << 32;
    Word16 words = (Word16)Longs{w, w, w, w, w, w, w, w};
    words = __builtin_shuffle(words, Word16{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
    words = words >> Word16{0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B,
                            0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B};
    return __builtin_shuffle(table, (Int16)words);
}
#endif

template <int R, typename Sink>
INLINE void decode_group(const uint8_t* codes, int64_t row_bytes, int64_t k, int64_t stop, int64_t eights,
                                int64_t sixteens, const float* scale, const Zero* zero, Sink& sink) {
    for (; k < stop && k % 8; k++)
        UNROLL for (int r = 0; r < R; r++) sink(r, k, value(one(codes + r * row_bytes, k), scale[r], zero[r]));
    const uint8_t* p = codes + k / 8 * BITS;
#ifdef HAS_TABLE
    Float16 tables[R];
    UNROLL for (int r = 0; r < R; r++) tables[r] = values<Float16, Doubles16>(numbers_of_all(), scale[r], zero[r]);
    for (const int64_t last = (stop < sixteens ? stop : sixteens) - 16; k <= last; k += 16, p += 2 * BITS)
        UNROLL for (int r = 0; r < R; r++) sink(r, k, sixteen(p + r * row_bytes, tables[r]));
#endif
    for (const int64_t last = (stop < eights ? stop : eights) - 8; k <= last; k += 8, p += BITS)
        UNROLL for (int r = 0; r < R; r++) sink(r, k, values<Floats, Doubles>(eight(p + r * row_bytes), scale[r], zero[r]));
    for (; k < stop; k++)
        UNROLL for (int r = 0; r < R; r++) sink(r, k, value(one(codes + r * row_bytes, k), scale[r], zero[r]));
}

#endif

// ---- rows --------------------------------------------------------------------------------------------------------

// Decodes the columns from `k` to `end` of R rows from `row` on; numbers without their scales if not SCALED. The sink gets
// (row - first row, column, values), in the order of the columns.
template <int R, bool SCALED = true, typename Sink>
INLINE void decode_columns(const Weight& weight, int64_t row, int64_t k, int64_t end, Sink& sink) {
    const Layout& l = *weight.layout;
    const uint8_t* codes = weight.codes + row * l.row_bytes;
    const int64_t after = (l.rows - row - R) * l.row_bytes;
    const int64_t eights = readable(l, after, 8), sixteens = readable(l, after, 16);
    int64_t first[R];
    UNROLL for (int r = 0; r < R; r++) first[r] = first_group(l, row + r);
    for (int64_t g = k / l.group; k < end; g++) {
        const int64_t last = (g + 1) * l.group, stop = last < end ? last : end;
        float scale[R];
        Zero zero[R] = {};
        UNROLL for (int r = 0; r < R; r++) scale[r] = SCALED ? scale_at(weight, first[r] + g) : 1;
        UNROLL for (int r = 0; ZERO && r < R; r++) zero[r] = weight.zero[first[r] + g];
        decode_group<R>(codes, l.row_bytes, k, stop, eights, sixteens, scale, zero, sink);
        k = stop;
    }
}

template <int R, typename Sink>
INLINE void decode_rows(const Weight& weight, int64_t row, Sink& sink) {
    decode_columns<R>(weight, row, 0, weight.layout->columns, sink);
}

// OpenMP's GOMP_parallel, which runs a function on PyTorch's threads; or null.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// Runs `job.rows(first, end)` for the rows from `first` to `end`, in parts of whole `unit`s, on `threads` threads.
template <typename Job>
static void all_rows(Job& job, int64_t first, int64_t end, Parallel parallel, int64_t threads, int64_t unit = 4) {
    struct Shared {
        Job* job;
        int64_t end, step, next;
        static void work(void* given) {
            Shared& shared = *(Shared*)given;
            for (;;) {
                const int64_t first = __atomic_fetch_add(&shared.next, shared.step, __ATOMIC_RELAXED);
                if (first >= shared.end) return;
                const int64_t last = first + shared.step;
                shared.job->rows(first, last < shared.end ? last : shared.end);
            }
        }
    };
    if (!parallel || threads < 2) return job.rows(first, end);
    Shared shared = {&job, end, ((end - first + threads - 1) / threads + unit - 1) / unit * unit, first};
    parallel(Shared::work, &shared, (unsigned)threads, 0);
}
