// Quantizes a matrix along its rows and, transposed, along its columns, for sm_90.
//
// quantize_rowcol_sm90.py compiles this file once for each combination of
//   INPUT              BF16, FP16 or FP32
//   FORMAT             INT8, E4M3 or E5M2
//   ROWS, COLUMNS      which copies are written
//   TENSORWISE         one scale for the matrix
//   STOCHASTIC         stochastic rounding
//   OWN_SEED           the seed is made here, by `absmax`, as `seeds.seed_of` says
//   FACTOR             columns of the row copy are multiplied by factors
//   ROW_SCALES         the transposed copy has the codes and scales of the row copy
//   ALIGNED            rows begin at multiples of 16 bytes
//   STEPS              how many times 2048 elements of a row a block keeps (kernel `rows`; 0: `rows` is not compiled)
// and puts ptx.cuh and random_bits.h before it.
//
// A scale depends on a whole row or column, so the matrix is read twice: once for the largest magnitudes, once to
// quantize. `absmax` and `quantize` do so in two launches. The second runs backwards from the end, where the L2 cache
// still holds data of the first. `rows` quantizes rows only: a block keeps its row in registers.
//
// A tile is 128 x 128. A lane has eight neighbouring columns of eight rows, which share hashes of random bits; half a warp
// has these rows. Codes of the transposed copy pass through shared memory: a warp writes 128 bytes to four of its rows.

#ifndef GIVEN
#define GIVEN 0  // `row_max` holds the scales of rows, and no first pass runs
#endif
#ifndef OWN_SEED
#define OWN_SEED 0
#endif

enum { BF16, FP16, FP32 };
enum { INT8, E4M3, E5M2 };

static constexpr int TILE = 128, THREADS = 256, WARPS = THREADS / 32, HEIGHT = TILE / WARPS;
static constexpr int SPAN = 8, HALF_WARPS = THREADS / 16;  // a lane's rows and columns of a tile
static constexpr int SIZE = INPUT == FP32 ? 4 : 2;  // bytes of an element
static constexpr float LARGEST = FORMAT == INT8 ? 127.0f : FORMAT == E4M3 ? 448.0f : 57344.0f;
static constexpr uint32 INFINITE = 0x7f800000;
static constexpr bool TWO_SIDED = FORMAT == INT8;  // the scale has a code more for negative numbers
static constexpr bool BY_ROW = ROWS || ROW_SCALES, BY_COLUMN = COLUMNS && !ROW_SCALES;  // scales to find

// The matrix x, m x k with rows `stride` elements apart, and the results. `row_max` and `column_max` hold the float32
// bits of the largest magnitudes, for int8 of the scales; they are zero before the first pass.
struct Job {
    const unsigned char *x;
    long long stride;
    unsigned char *codes;    // [m, k16]
    float *scale;            // [m]
    unsigned char *codes_t;  // [k, m16]
    float *scale_t;          // [k], or [m] if ROW_SCALES
    uint32 *row_max, *column_max;
    long long *seed;         // if OWN_SEED, 0 before the first pass, which adds to it
    const float *factor;     // [k], if FACTOR
    long long m, k;
    // Where x is a part of a matrix, as quantize_grouped_sm90.cu takes it: the rows before, and the columns of codes_t.
    long long before = 0, columns_t = 0;
    // If OWN_SEED: the distance of the rows whose bits make the seed, and the number that is added to them.
    long long seed_step = 0, seed_start = 0;

    MEMBER long long k16() const { return (k + 15) / 16 * 16; }
    MEMBER long long m16() const { return (m + 15) / 16 * 16; }
    // Columns of codes_t, and those to write. For a part, zeros follow up to the next tile.
    MEMBER long long pitch_t() const { return columns_t ? columns_t : m16(); }
    MEMBER long long end_t() const { return columns_t ? (m + TILE - 1) / TILE * TILE : m16(); }
    MEMBER long long tiles_across() const { return (k16() + TILE - 1) / TILE; }
};

// ---- elements --------------------------------------------------------------------------------------------------------

// N neighbouring elements, as in memory.
template <int N>
struct Raw {
    static constexpr int WORDS = N * SIZE / 4;
    uint32 word[WORDS];

    MEMBER float operator[](int i) const {
        if constexpr (INPUT == FP32) return bits_float(word[i]);
        else if constexpr (INPUT == BF16) return bits_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
        else return from_half(i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xffff);
    }
};

template <int N>
DEVICE void load_aligned(const unsigned char *from, Raw<N> &raw) {
    if constexpr (Raw<N>::WORDS == 2) {
        const uint2 v = __ldg((const uint2 *)from);
        raw.word[0] = v.x, raw.word[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < Raw<N>::WORDS; i += 4) {
            const uint4 v = __ldg((const uint4 *)from + i / 4);
            raw.word[i] = v.x, raw.word[i + 1] = v.y, raw.word[i + 2] = v.z, raw.word[i + 3] = v.w;
        }
    }
}

// Loads the elements from (row, column) on; zeros outside the matrix.
template <int N>
DEVICE void load(const Job &job, long long row, long long column, Raw<N> &raw) {
    const unsigned char *from = job.x + (row * job.stride + column) * SIZE;
    const long long left = row < job.m ? job.k - column : 0;
    if (ALIGNED && left >= N) {
        load_aligned(from, raw);
        return;
    }
#pragma unroll
    for (int i = 0; i < Raw<N>::WORDS; ++i) raw.word[i] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i >= left) continue;
        if constexpr (SIZE == 4) raw.word[i] = ((const uint32 *)from)[i];
        else raw.word[i / 2] |= (uint32)((const unsigned short *)from)[i] << i % 2 * 16;
    }
}

// Masks signs off. The bits of magnitudes are ordered like the magnitudes, with NaN last; a word has two of 16 bits.
static constexpr uint32 MAGNITUDE = SIZE == 4 ? 0x7fffffff : 0x7fff7fff;

DEVICE uint32 larger(uint32 a, uint32 b) { return SIZE == 4 ? max(a, b) : larger_halves(a, b); }

DEVICE uint32 larger_signed(uint32 a, uint32 b) {
    return SIZE == 4 ? (uint32)max((int)a, (int)b) : larger_signed_halves(a, b);
}

// The larger magnitude of a word, and a magnitude as float32 bits.
DEVICE uint32 largest_of(uint32 word) { return SIZE == 4 ? word : max(word & 0xffff, word >> 16); }
DEVICE uint32 widened(uint32 magnitude) {
    if constexpr (INPUT == FP32) return magnitude;
    else if constexpr (INPUT == BF16) return magnitude << 16;
    else return float_bits(from_half(magnitude)) & 0x7fffffff;
}

// The largest magnitudes of the words that it has taken, in `high`; TWO_SIDED: in `low` those of negative numbers. As
// signed integers, the bits of positive numbers are ordered like the numbers, above those of all negative ones.
struct Extremes {
    uint32 high, low;

    MEMBER void take(uint32 word) {
        if constexpr (TWO_SIDED) high = larger_signed(high, word), low = larger_signed(low, word ^ ~MAGNITUDE);
        else high = larger(high, word & MAGNITUDE);
    }
    MEMBER void take(const Extremes &other) { high = larger(high, other.high), low = larger(low, other.low); }
    // x * factor. It is multiplied twice, since the units for products have more time than those for bits.
    MEMBER void take_product(float x, float factor) {
        const uint32 product = float_bits(multiply_exactly(x, factor));
        if constexpr (TWO_SIDED) {
            high = (uint32)max((int)high, (int)product);
            low = (uint32)max((int)low, (int)float_bits(multiply_exactly(x, -factor)));
        } else high = max(high, product & 0x7fffffff);
    }
    // Of whole words: the float32 bits of one magnitude each.
    MEMBER Extremes as_floats() const { return {widened(largest_of(high)), TWO_SIDED ? widened(largest_of(low)) : 0}; }
    MEMBER Extremes of_warp() const { return {warp_max(high), TWO_SIDED ? warp_max(low) : 0}; }
    // The bits that `scale_of` takes, from float32 bits.
    MEMBER uint32 bits() const {
        if constexpr (!TWO_SIDED) return high;
        const uint32 above = float_bits(divide_exactly(bits_float(high), 127.0f));
        const uint32 below = float_bits(divide_exactly(bits_float(low), 128.0f));
        // more than 0 unless all are 0, also where the quotients are not
        return max(max(above & 0x7fffffff, below & 0x7fffffff), (uint32)((high | low) != 0));
    }
};

// ---- codes -----------------------------------------------------------------------------------------------------------

struct Scale {
    float negative, inverse;  // -scale and 1 / scale; inverse is 0 if a number is NaN or infinite, then codes are 0
};

DEVICE Scale scale_of(uint32 largest) {
    if (largest == 0) return {-1.0f, 1.0f};
    if (largest >= INFINITE) return {-1.0f, 0.0f};
    const float found = bits_float(largest);
    const float value = fmaxf(TWO_SIDED ? found : divide_exactly(found, LARGEST), 0x1p-126f);
    return {-value, divide_exactly(1.0f, value)};
}
// A scale that `shown` has given.
DEVICE Scale given_scale(float value) {
    return value == value ? Scale{-value, divide_exactly(1.0f, value)} : Scale{-1.0f, 0.0f};
}
DEVICE float shown(Scale scale) { return scale.inverse == 0.0f ? bits_float(0x7fc00000) : -scale.negative; }

// x * (1 / scale). STOCHASTIC: x / scale, rounded to nearest even, by the residual of that product; so no quotient is
// beyond the codes.
DEVICE float quotient_of(float x, Scale scale) {
    const float near = multiply_exactly(x, scale.inverse);
    if constexpr (!STOCHASTIC) return near;
    return fma_exactly(fma_exactly(near, scale.negative, x), scale.inverse, near);
}

// Random bits for stochastic rounding. Eight neighbouring elements of a row share one hash (quantize_rowcol.py).
struct Draws {
    uint32 keys[2];

    MEMBER explicit Draws(const Job &job) {
        if constexpr (STOCHASTIC) {
            const long long seed = *job.seed + job.seed_start;
            keys[0] = mix(0x243f6a88u, seed), keys[1] = mix(0x85a308d3u, seed);
        }
    }
    MEMBER uint32 octet(const Job &job, long long row, long long column) const {
        return hash(keys, (row + job.before) * ((job.k + 7) >> 3) + (column >> 3));
    }
};

// Rounds a quotient stochastically to a number of the float8 format.
DEVICE float rounded_stochastically(float x, uint32 draw) {
    constexpr int DROPPED = FORMAT == E4M3 ? 20 : 21;  // bits of a float32 that the format lacks
    constexpr float NORMAL = FORMAT == E4M3 ? 0x1p-6f : 0x1p-14f;
    const float magnitude = fabsf(x);
    // Below NORMAL, the format's numbers are as far apart as between NORMAL and 2 * NORMAL.
    const float shift = magnitude < NORMAL ? NORMAL : 0.0f;
    const uint32 bits = float_bits(magnitude + shift) + (draw >> 32 - DROPPED);
    return copysignf(bits_float(bits & ~0u << DROPPED) - shift, x);
}

// Four quotients to four codes in a word, the first in the lowest byte; `draws` only if STOCHASTIC.
DEVICE uint32 encode(const float *x, const uint32 *draws) {
    if constexpr (FORMAT == INT8) {
        // Adding 1.5 * 2**23, whose unit in the last place is 1, puts an integer in the lowest bits.
        uint32 code[4];
        if constexpr (STOCHASTIC) {
            // x * 2**16, to a multiple of 2, 16 random bits, and 128 * 2**16: the code is the third byte.
#pragma unroll
            for (int i = 0; i < 4; ++i)
                code[i] = 2 * float_bits(fma_exactly(x[i], 32768.0f, 12582912.0f)) + permute(draws[i], 0x80, 0x5432);
            return permute(permute(code[0], code[1], 0x0062), permute(code[2], code[3], 0x0062), 0x5410);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) code[i] = float_bits(x[i] + 12582912.0f);
        return permute(permute(code[0], code[1], 0x0040), permute(code[2], code[3], 0x0040), 0x5410);
    } else {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = STOCHASTIC ? rounded_stochastically(x[i], draws[i]) : x[i];
        if constexpr (FORMAT == E4M3) return to_e4m3x2(y[0], y[1]) | to_e4m3x2(y[2], y[3]) << 16;
        else return to_e5m2x2(y[0], y[1]) | to_e5m2x2(y[2], y[3]) << 16;
    }
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

struct Part { Raw<SPAN> row[SPAN]; };  // a lane's part of a tile

struct Shared {
    union {
        uint32 transposed[TILE][TILE / 4];  // for each column, codes of four rows a word
        struct { Extremes row[TILE][TILE / SPAN], column[HALF_WARPS][TILE * SIZE / 4]; } largest;
    };
    Scale row[TILE], column[TILE];  // columns in the order of `spread`
    float factor[TILE];             // of the columns, in the same order
};

// The place of a column's scale, so that lanes that need those of columns eight apart have no bank conflicts.
DEVICE int spread(int column) { return column % SPAN * (TILE / SPAN) + column / SPAN; }

DEVICE int lane_row() { return threadIdx.x / (TILE / SPAN) * SPAN; }
DEVICE int lane_column() { return threadIdx.x % (TILE / SPAN) * SPAN; }

struct Position {
    long long row, column;  // of a tile's first element

    MEMBER Position(const Job &job, long long tile)
        : row(tile / job.tiles_across() * TILE), column(tile % job.tiles_across() * TILE) {}
};

DEVICE void fetch(const Job &job, long long tile, Part &part) {
    const Position at(job, tile);
    const long long row = at.row + lane_row(), column = at.column + lane_column();
    if (ALIGNED && at.row + TILE <= job.m && at.column + TILE <= job.k) {
        const unsigned char *from = job.x + (row * job.stride + column) * SIZE;
        const long long step = job.stride * SIZE;
#pragma unroll
        for (int i = 0; i < SPAN; ++i) load_aligned(from + i * step, part.row[i]);
    } else {
        for (int i = 0; i < SPAN; ++i) load(job, row + i, column, part.row[i]);
    }
}

// Adds the bits of a lane's elements in each `seed_step`-th row, as signed integers, to the seed. Few tiles have such a
// row, so it is read again: to look for it among those in registers would cost every tile instructions.
DEVICE void find_seed(const Job &job, long long tile) {
    const Position at(job, tile);
    const uint32 row = (uint32)at.row + threadIdx.x / 32 * HEIGHT, step = (uint32)job.seed_step;
    uint32 next = (row + step - 1) / step * step - row;
    if (!for_warp(next < HEIGHT)) return;
    int low = 0, high = 0;       // sums of the lower and the upper halves of words; rows outside of x are zeros
    for (; for_warp(next < HEIGHT); next += step) {
        Raw<4> own;
        load(job, row + next, at.column + threadIdx.x % 32 * 4, own);
#pragma unroll
        for (int j = 0; j < Raw<4>::WORDS; ++j) {
            low += SIZE == 4 ? (int)(own.word[j] & 0xffff) : (int)(short)(own.word[j] & 0xffff);
            high += (int)own.word[j] >> 16;
        }
    }
    low = warp_sum(low), high = warp_sum(high);
    if (threadIdx.x % 32 == 0) add_to(job.seed, SIZE == 4 ? low + (long long)high * 65536 : (long long)low + high);
}

// The bits of the largest magnitude of the tile's row threadIdx.x, or of its column threadIdx.x - TILE. Those of a lane's
// rows and columns meet in shared memory. Pairs of the 16 ends of a row lie at pair ^ (row % 8), so that neither writes
// nor reads of eight rows have bank conflicts.
DEVICE uint32 largest_of_line(const Job &job, Shared &shared, const Position &at, const Part &part) {
    constexpr int WORDS = Raw<SPAN>::WORDS;
    const int row = lane_row(), across = threadIdx.x % (TILE / SPAN), i = threadIdx.x % TILE;
    float factors[SPAN];
    if constexpr (FACTOR && BY_ROW) {
#pragma unroll
        for (int c = 0; c < SPAN; ++c) {
            const long long column = at.column + across * SPAN + c;
            factors[c] = column < job.k ? __ldg(job.factor + column) : 0.0f;
        }
    }
    Extremes columns[WORDS] = {};
#pragma unroll
    for (int r = 0; r < SPAN; ++r) {
        Extremes own = {};
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            if constexpr (BY_COLUMN) columns[j].take(part.row[r].word[j]);
            if constexpr (!FACTOR) own.take(part.row[r].word[j]);
        }
        if constexpr (BY_ROW) {
            if constexpr (FACTOR) {
#pragma unroll
                for (int c = 0; c < SPAN; ++c) own.take_product(part.row[r][c], factors[c]);
            }
            shared.largest.row[row + r][across ^ r * 2] = own;  // r is row % 8
        }
    }
    if constexpr (BY_COLUMN) {
#pragma unroll
        for (int j = 0; j < WORDS; ++j) shared.largest.column[threadIdx.x / 16][across * WORDS + j] = columns[j];
    }
    __syncthreads();
    Extremes largest = {};
    if (threadIdx.x < TILE) {
        if constexpr (BY_ROW) {
#pragma unroll
            for (int j = 0; j < TILE / SPAN; j += 2) {
                const uint4 two = *(const uint4 *)&shared.largest.row[i][j ^ i % 8 * 2];
                if constexpr (FACTOR) {  // float32 bits
                    largest.high = max(largest.high, max(two.x, two.z)), largest.low = max(largest.low, max(two.y, two.w));
                } else largest.take({two.x, two.y}), largest.take({two.z, two.w});
            }
        }
        return (FACTOR ? largest : largest.as_floats()).bits();
    }
    if constexpr (BY_COLUMN) {
#pragma unroll
        for (int j = 0; j < HALF_WARPS; ++j) largest.take(shared.largest.column[j][i * SIZE / 4]);
    }
    const int shift = SIZE == 4 ? 0 : i % 2 * 16;
    const uint32 mask = SIZE == 4 ? ~0u : 0xffff;
    return Extremes{widened(largest.high >> shift & mask), TWO_SIDED ? widened(largest.low >> shift & mask) : 0}.bits();
}

// The largest magnitudes of a lane's part, as halves or floats.
DEVICE Extremes extremes_of(const Part &part) {
    Extremes all = {};
#pragma unroll
    for (int r = 0; r < SPAN; ++r) {
#pragma unroll
        for (int j = 0; j < Raw<SPAN>::WORDS; ++j) all.take(part.row[r].word[j]);
    }
    return all;
}

// The first pass over a tile: the largest magnitudes.
DEVICE void find_largest(const Job &job, Shared &shared, long long tile, const Part &part) {
    const Position at(job, tile);
    if constexpr (TENSORWISE) {
        const uint32 largest = extremes_of(part).as_floats().of_warp().bits();
        if (threadIdx.x % 32 == 0 && largest != 0) atomicMax(job.row_max, largest);
        return;
    }
    const uint32 largest = largest_of_line(job, shared, at, part);
    const bool of_row = threadIdx.x < TILE;
    const long long to = (of_row ? at.row : at.column) + threadIdx.x % TILE;
    if (largest != 0 && to < (of_row ? job.m : job.k)) atomicMax((of_row ? job.row_max : job.column_max) + to, largest);
}

// Computes the scales of a tile into shared memory; tiles of the first column and row also write them to the results.
// Returns whether the tile's rows or columns hold a NaN or an infinity.
DEVICE bool find_scales(const Job &job, Shared &shared, const Position &at) {
    const int i = threadIdx.x % TILE;
    const bool for_rows = threadIdx.x < TILE;
    const long long index = for_rows ? at.row + i : at.column + i;
    const bool wanted = for_rows ? BY_ROW : BY_COLUMN, inside = index < (for_rows ? job.m : job.k);
    uint32 largest = 0;
    if (TENSORWISE) largest = __ldcg(job.row_max);
    else if (wanted && inside) largest = __ldcg(for_rows ? job.row_max + index : job.column_max + index);
    const Scale scale = GIVEN && for_rows && inside ? given_scale(bits_float(largest)) : scale_of(largest);
    if (for_rows) shared.row[i] = scale;
    else shared.column[spread(i)] = scale;
    if (FACTOR && !for_rows) shared.factor[spread(i)] = inside ? __ldg(job.factor + index) : 0.0f;
    if (wanted && inside && (for_rows ? at.column : at.row) == 0 && (!TENSORWISE || index == 0)) {
        if (for_rows ? ROWS : COLUMNS) (for_rows ? job.scale : job.scale_t)[index] = shown(scale);
        if (ROW_SCALES && COLUMNS && for_rows) job.scale_t[index] = shown(scale);
    }
    return __syncthreads_or(scale.inverse == 0.0f);
}

// Replaces NaN and infinities by zeros.
template <int N>
DEVICE Raw<N> finite(Raw<N> raw) {
#pragma unroll
    for (int j = 0; j < Raw<N>::WORDS; ++j) {
        constexpr uint32 EXPONENT = INPUT == FP32 ? INFINITE : INPUT == BF16 ? 0x7f80 : 0x7c00;
        if constexpr (SIZE == 4) {
            if ((raw.word[j] & EXPONENT) == EXPONENT) raw.word[j] = 0;
        } else {
            if ((raw.word[j] & EXPONENT) == EXPONENT) raw.word[j] &= 0xffff0000u;
            if ((raw.word[j] >> 16 & EXPONENT) == EXPONENT) raw.word[j] &= 0xffffu;
        }
    }
    return raw;
}

DEVICE void clear_infinities(Part &part) {  // and NaN: their codes are 0
#pragma unroll
    for (int i = 0; i < SPAN; ++i) part.row[i] = finite(part.row[i]);
}

// Words of a column, with codes of four rows each, lie at word ^ swizzle. So neither writes of one word by lanes of a
// warp, eight columns and eight rows apart, nor reads of whole columns have bank conflicts.
DEVICE int swizzle(int column) { return column / SPAN & 1 | column / SPAN >> 1 << 2; }

DEVICE void store_transposed(const Job &job, const Shared &shared, const Position &at) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE * 8 / THREADS; ++i) {
        const int chunk = threadIdx.x % 8, own = threadIdx.x / 8 + i * (THREADS / 8), moved = swizzle(own);
        const long long column = at.column + own, row = at.row + chunk * 16;
        uint4 codes = *(const uint4 *)&shared.transposed[own][chunk * 4 ^ moved & ~1];
        if (moved & 1) codes = make_uint4(codes.y, codes.x, codes.w, codes.z);
        if (column < job.k && row < job.end_t())
            stream_store((uint4 *)(job.codes_t + column * job.pitch_t() + row), codes);
    }
}

// The codes of a tile whose scales, and factors, are in shared memory. Rows of codes are `pitch` apart.
DEVICE void store_codes(const Job &job, Shared &shared, const Draws &draws, const Position &at, const Part &part,
                        long long pitch) {
    const int own_row = lane_row(), own_column = lane_column(), across = own_column / SPAN;
    const long long row = at.row + own_row, column = at.column + own_column;
    const int rows = column < pitch ? (int)min((long long)SPAN, job.m - row) : 0;  // to write
    unsigned char *codes = job.codes + row * pitch + column;
    const int moved = swizzle(own_column);
#pragma unroll
    for (int i = 0; i < SPAN; i += 4) {
        uint32 hashes[4] = {}, words[4][2];
        if constexpr (STOCHASTIC) {
#pragma unroll
            for (int r = 0; r < 4; ++r) hashes[r] = draws.octet(job, row + i + r, column);
        }
#pragma unroll
        for (int c = 0; c < SPAN; c += 4) {
            uint32 drawn[4][4] = {};
            if constexpr (STOCHASTIC) {
#pragma unroll
                for (int e = 0; e < 16; ++e) drawn[e / 4][e % 4] = hashes[e / 4] * multiplier(c + e % 4);
            }
            if constexpr (ROWS) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const Scale scale = shared.row[own_row + i + r];
                    float y[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float x = part.row[i + r][c + j];
                        y[j] = quotient_of(FACTOR ? multiply_exactly(x, shared.factor[spread(c + j) + across]) : x, scale);
                    }
                    words[r][c / 4] = encode(y, drawn[r]);
                    if (FACTOR && scale.inverse == 0.0f) words[r][c / 4] = 0;  // a factor made a number NaN or infinite
                }
            }
            if constexpr (COLUMNS) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float y[4];
                    uint32 own[4];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const Scale scale = ROW_SCALES ? shared.row[own_row + i + r] : shared.column[spread(c + j) + across];
                        y[r] = quotient_of(part.row[i + r][c + j], scale), own[r] = drawn[r][j];
                    }
                    shared.transposed[own_column + c + j][(own_row + i) / 4 ^ moved] = encode(y, own);
                }
            }
        }
        if constexpr (ROWS) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
                stream_store_if(i + r < rows, (uint2 *)(codes + (i + r) * pitch), make_uint2(words[r][0], words[r][1]));
        }
    }
    if constexpr (COLUMNS) store_transposed(job, shared, at);
}

// The second pass over a tile: the codes.
DEVICE void quantize_tile(const Job &job, Shared &shared, const Draws &draws, long long tile, Part &part) {
    const Position at(job, tile);
    if (find_scales(job, shared, at)) clear_infinities(part);
    store_codes(job, shared, draws, at, part, job.k16());
}

// ---- kernels -----------------------------------------------------------------------------------------------------------

DYNAMIC_SHARED(memory);

#define PARAMETERS                                                                                                     \
    const unsigned char *x, long long stride, unsigned char *codes, float *scale, unsigned char *codes_t,              \
        float *scale_t, uint32 *row_max, uint32 *column_max, long long *seed, const float *factor,                  \
        long long m, long long k
#define JOB                                                                                                            \
    Job job = { x, stride, codes, scale, codes_t, scale_t, row_max, column_max, seed, factor, m, k }

#if STEPS == 0  // one block per tile
extern "C" __global__ void __launch_bounds__(THREADS) absmax(PARAMETERS, long long seed_step, long long seed_start) {
    JOB;
    Part part;
    fetch(job, blockIdx.x, part);
    if constexpr (OWN_SEED) {
        job.seed_step = seed_step;
        find_seed(job, blockIdx.x);
    }
    find_largest(job, *(Shared *)memory, blockIdx.x, part);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(PARAMETERS, long long seed_step, long long seed_start) {
    JOB;
    job.seed_start = seed_start;
    const long long tile = gridDim.x - 1 - blockIdx.x;
    Part part;
    fetch(job, tile, part);
    quantize_tile(job, *(Shared *)memory, Draws(job), tile, part);
}
#endif

#if STEPS > 0
DEVICE void store_row(const Job &job, long long row, long long column, const Raw<8> &raw, Scale scale,
                      const Draws &draws) {
    if (column >= job.k16()) return;
    uint32 word[2], octet = 0;
    if constexpr (STOCHASTIC) octet = draws.octet(job, row, column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float y[4];
        uint32 drawn[4] = {};
#pragma unroll
        for (int c = 0; c < 4; ++c) y[c] = quotient_of(raw[i * 4 + c], scale);
        if constexpr (STOCHASTIC) {
#pragma unroll
            for (int c = 0; c < 4; ++c) drawn[c] = octet * multiplier(i * 4 + c);
        }
        word[i] = scale.inverse == 0.0f ? 0 : encode(y, drawn);
    }
    stream_store((uint2 *)(job.codes + row * job.k16() + column), make_uint2(word[0], word[1]));
}

// One block per row.
extern "C" __global__ void __launch_bounds__(THREADS) rows(PARAMETERS) {
    JOB;
    constexpr int WORDS = Raw<8>::WORDS, STEP = THREADS * 8;
    __shared__ Extremes found[WARPS];
    const long long row = blockIdx.x, first = threadIdx.x * 8;
    Raw<8> raw[STEPS], more;
    Extremes largest = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) load(job, row, first + i * STEP, raw[i]);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int j = 0; j < WORDS; ++j) largest.take(raw[i].word[j]);
    }
    for (long long at = first + STEPS * STEP; at < job.k; at += STEP) {
        load(job, row, at, more);
#pragma unroll
        for (int j = 0; j < WORDS; ++j) largest.take(more.word[j]);
    }
    largest = largest.as_floats().of_warp();
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
        largest.high = max(largest.high, found[i].high), largest.low = max(largest.low, found[i].low);
    const Scale own = scale_of(largest.bits());
    if (threadIdx.x == 0) job.scale[row] = shown(own);

    const Draws draws(job);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) store_row(job, row, first + i * STEP, raw[i], own, draws);
    for (long long at = first + STEPS * STEP; at < job.k16(); at += STEP) {
        load(job, row, at, more);
        store_row(job, row, at, more, own, draws);
    }
}
#endif
