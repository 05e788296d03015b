// Quantizes rows to int8 or e4m3, each with its own scale, for sm_90.
//
// quantize_rows_sm90.py compiles this file once for each combination of
//   X          BF16 or FP16
//   CODES      INT8 or E4M3
//   OUT        the dtype in which codes are written: CODES, or as numbers BF16 or FP16
//   VECTORS    vectors of eight elements that a thread keeps
//   TURNED     1: codes are written in the order of w4a8_mm_sm90.cu, in rows of whole 128 codes; the rest is 0. Loud rows
//              of int8 have a negative scale; see `is_loud`
// and puts ptx.cuh, sm90.cuh and row_codes.cuh before it.
//
// One block per row. Each thread issues all its loads at once to hide the latency of memory, and keeps the loaded words
// in registers until the scale is known. The start of this launch overlaps with the end of the previous one.

enum { BF16, FP16, INT8, E4M3 };

static constexpr int MAX_WARPS = 32;
static constexpr int BYTES = OUT == CODES ? 1 : 2;  // of a code
static constexpr int ENDS = CODES == E4M3 ? 1 : 2;  // extremes that the scale depends on: |x|, or max and -min
static constexpr bool HALF = X == FP16;
static constexpr bool MARKED = TURNED && CODES == INT8;  // whether the scales of loud rows are negative
static_assert(!TURNED || OUT == CODES, "");

// The codes of two neighbours: as bytes in the lower half of the word, or as numbers in all of it.
DEVICE uint32 coded(uint32 pair, float inverse) {
    if constexpr (BYTES == 2) return rounded_pair<CODES == E4M3, HALF, OUT == FP16>(pair, inverse);
    const float low = low_half<HALF>(pair), high = high_half<HALF>(pair);
    if constexpr (CODES == E4M3) return to_e4m3x2(multiply_exactly(low, inverse), multiply_exactly(high, inverse));
    return permute(float_bits(integer_of(low, inverse)), float_bits(integer_of(high, inverse)), 0x40);
}

// Returns the sum of the squares of int8 codes with TURNED, and 0 otherwise.
DEVICE int store_codes(unsigned char *row, int i, uint4 x, float inverse) {
    const uint32 a = coded(x.x, inverse), b = coded(x.y, inverse), c = coded(x.z, inverse), d = coded(x.w, inverse);
    if constexpr (TURNED) {
        const uint32 first = permute(a, b, 0x5410), second = permute(c, d, 0x5410);
        uint32 *to = (uint32 *)row + i / 4 * 8 + i % 4;
        to[0] = CODES == INT8 ? permute(first, second, 0x6420) : first;
        to[4] = CODES == INT8 ? permute(first, second, 0x7531) : second;
        if constexpr (MARKED) return dot_of_four(first, first, dot_of_four(second, second, 0));
    } else if constexpr (BYTES == 1) {
        ((uint2 *)row)[i] = make_uint2(permute(a, b, 0x5410), permute(c, d, 0x5410));
    } else {
        ((uint4 *)row)[i] = make_uint4(a, b, c, d);
    }
    return 0;
}

// A row is loud if the magnitudes of its codes in some SPAN of k may add up to more than 2^16, which is as far as
// w4a8_int4_sm90.cuh holds sums of their products with 4-bit codes: if their squares add up to more than QUIET. By Cauchy's
// inequality the square of a sum of SPAN magnitudes is at most SPAN times the sum of their squares.
static constexpr int SPAN = 1024, QUIET = 1 << 22, WARP_SPAN = 32 * 8;
static constexpr int PARTS = MARKED ? MAX_WARPS * VECTORS : 1;  // of a row, each of WARP_SPAN

// Whether a row is loud, for a warp. `sums`: of the row's `count` parts.
DEVICE bool is_loud(const int (&sums)[PARTS], int count) {
    int most = 0;
    for (int first = 0; first < count; first += SPAN / WARP_SPAN) {
        const int lane = threadIdx.x % 32, part = first + lane;
        most = max(most, warp_sum(lane < SPAN / WARP_SPAN && part < count ? sums[part] : 0));
    }
    return most > QUIET;
}

// One row for a block of whole warps. Rows of x have `vectors` vectors and are `stride` elements apart. codes [m, 8 *
// vectors], scale [m]. With TURNED `vectors` is rounded up to a multiple of 16 for codes.
DEVICE void quantize_row(const unsigned char *x, long long stride, unsigned char *codes, float *scale, int vectors) {
    __shared__ uint32 found[ENDS][MAX_WARPS];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x;
    const uint4 *from = (const uint4 *)(x + row * stride * 2);

    uint4 kept[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        kept[j] = i < vectors ? from[i] : make_uint4(0, 0, 0, 0);
    }
    // As signed integers, the bits of positive numbers are ordered like the numbers, above all negative numbers.
    uint32 low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const uint32 pairs[4] = {kept[j].x, kept[j].y, kept[j].z, kept[j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high = larger_signed_halves(high, pairs[i]);
            low = larger_signed_halves(low, pairs[i] ^ 0x80008000u);
        }
    }
    if constexpr (ENDS == 1) high = larger_halves(low, high);
    uint32 ends[2] = {warp_max(larger_half<HALF>(high)), ENDS == 2 ? warp_max(larger_half<HALF>(low)) : 0};
    if (warps > 1) {
        if (lane == 0)
            for (int i = 0; i < ENDS; ++i) found[i][warp] = ends[i];
        __syncthreads();
        for (int i = 0; i < ENDS; ++i) ends[i] = warp_max(lane < warps ? found[i][lane] : 0);
    }

    const float own = scale_of<CODES == E4M3>(ends[0], ends[1]), inverse = inverse_of(own);
    if (own != own) {
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) kept[j] = make_uint4(0, 0, 0, 0);
    }
    __shared__ int sums[PARTS];
    if (!MARKED && threadIdx.x == 0) scale[row] = own;
    const int stored = TURNED ? (vectors + 15) / 16 * 16 : vectors;
    unsigned char *to = codes + row * stored * 8 * BYTES;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        const int squares = i < stored ? store_codes(to, i, kept[j], inverse) : 0;
        if constexpr (MARKED) {
            const int sum = warp_sum(squares);
            if (lane == 0) sums[warp + j * warps] = sum;
        }
    }
    if constexpr (MARKED) {
        __syncthreads();
        if (warp > 0) return;
        const bool loud = is_loud(sums, VECTORS * warps);
        if (lane == 0) scale[row] = loud ? -own : own;
    }
}

// Grid: one block per row. Blocks with a vector a thread take few registers, so that they fit beside those of products.
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32, VECTORS == 1 ? 2 : 1)
    quantize_rows(const unsigned char *x, long long stride, unsigned char *codes, float *scale, int vectors) {
    let_next_start();  // it waits for this launch, which waits for the one before
    wait_for_previous();
    quantize_row(x, stride, codes, scale, vectors);
}

// ---- ranges of exponents ------------------------------------------------------------------------------------------------

static constexpr int SPAN_ROWS = 32, AT_ONCE = 8;  // rows of a block; rows whose exponents a warp reads at once
static constexpr int OCTAVES = 15;                 // as in w4a8_tiles_sm90.cuh

struct Range {
    uint32 high = 0, low = 0;  // in each 16 bits: the largest exponent; 255 - the smallest one

    MEMBER void add(uint32 four) {
        const uint32 even = four & 0x00ff00ff, odd = four >> 8 & 0x00ff00ff;
        high = larger_halves(high, larger_halves(even, odd));
        low = larger_halves(low, larger_halves(even ^ 0x00ff00ff, odd ^ 0x00ff00ff));
    }
    MEMBER int largest() const { return warp_max(max(high & 0xffff, high >> 16)); }
    MEMBER int smallest() const { return 255 - (int)warp_max(max(low & 0xffff, low >> 16)); }
};

// The largest exponent of a row of MXFP4, and the passes that it needs. Groups of zeros do not count, unless they are NaN.
DEVICE int range_of(const Range &found, const unsigned char *codes, const unsigned char *exponents, int groups, int &passes) {
    int largest = found.largest(), smallest = found.smallest();
    passes = 1;
    if (largest == 255 || largest - smallest < OCTAVES) return largest;
    Range other;
    for (int i = threadIdx.x % 32; i < groups; i += 32) {
        const uint4 own = ((const uint4 *)codes)[i];
        if ((own.x | own.y | own.z | own.w) & 0x77777777) other.add(exponents[i] * 0x01010101u);
    }
    largest = other.largest(), smallest = other.smallest();
    passes = largest < smallest ? 1 : (largest - smallest) / OCTAVES + 1;
    return largest;
}

// `quantize_row` in blocks 0 .. m - 1, and in others, of SPAN_ROWS rows of MXFP4 each, ranges of exponents: the most passes
// of a block's rows in ranges[block], and each row's largest exponent behind them. codes of the weight [n, 16 * groups] in
// rows `pitch` bytes apart, exponents [n, groups]. The number of the other blocks is a multiple of 8.
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32)
    quantize_rows_and_ranges(const unsigned char *x, long long stride, unsigned char *codes, float *scale, int vectors,
                             int m, const unsigned char *weight, long long pitch, const unsigned char *exponents,
                             unsigned char *ranges, int n, int groups) {
    let_next_start();
    wait_for_previous();
    if (blockIdx.x < m) return quantize_row(x, stride, codes, scale, vectors);
    __shared__ uint32 passes[MAX_WARPS];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block = blockIdx.x - m, blocks = gridDim.x - m;
    int most = 1;
    for (int first = warp * AT_ONCE; first < SPAN_ROWS; first += warps * AT_ONCE) {
        Range found[AT_ONCE];
        for (int i = lane * 4; i < groups; i += 128)
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int row = min(block * SPAN_ROWS + first + j, n - 1);
                const unsigned char *from = exponents + (long long)row * groups;
                if (groups % 4 == 0) {
                    found[j].add(*(const uint32 *)(from + i));
                } else {
                    uint32 four = 0;
                    for (int part = 0; part < 4; ++part) four |= from[min(i + part, groups - 1)] << 8 * part;
                    found[j].add(four);
                }
            }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int row = block * SPAN_ROWS + first + j;
            const long long at = min(row, n - 1);
            int own;
            const int largest = range_of(found[j], weight + at * pitch, exponents + at * groups, groups, own);
            if (row < n && lane == 0) ranges[blocks + row] = largest;
            most = max(most, own);
        }
    }
    if (lane == 0) passes[warp] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < warps; ++i) most = max(most, (int)passes[i]);
        ranges[block] = most;
    }
}
