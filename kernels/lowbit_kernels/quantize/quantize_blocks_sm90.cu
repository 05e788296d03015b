// Quantizes a matrix to e4m3 with a scale for each 128 elements of a row and of a column, or for each tile of 128 x 128.
//
// quantize_blocks_sm90.py compiles this file once for each combination of
//   INPUT              BF16, FP16 or FP32
//   TILES              a scale for each tile
//   ROWS, COLUMNS      which copies are written
//   POWER_OF_TWO       scales are rounded up to powers of two
//   ALIGNED            rows begin at multiples of 16 bytes
// and puts quantize_rowcol_sm90.cu before it, whose loads, codes and transposed stores it uses.
//
// All elements that share a scale lie in one tile. So a block reads its tile once, keeps it in registers, finds the
// scales, and writes both copies.

// A lane's part of a tile: four columns of 16 rows.
struct BlockPart {
    Raw<4> row[HEIGHT];
};

struct BlockShared {
    union {
        uint4 transposed[TILE][WARPS];  // for each column, 16 codes a warp
        Extremes column_max[WARPS][TILE];
    };
    Scale row[TILE], column[TILE];
};

DEVICE void fetch_block(const Job &job, long long tile, BlockPart &part) {
    const Position at(job, tile);
    const long long row = at.row + threadIdx.x / 32 * HEIGHT, column = at.column + threadIdx.x % 32 * 4;
    if (ALIGNED && at.row + TILE <= job.m && at.column + TILE <= job.k) {
        const unsigned char *from = job.x + (row * job.stride + column) * SIZE;
        const long long step = job.stride * SIZE;
#pragma unroll
        for (int i = 0; i < HEIGHT; ++i) load_aligned(from + i * step, part.row[i]);
    } else {
        for (int i = 0; i < HEIGHT; ++i) load(job, row + i, column, part.row[i]);
    }
}

// The largest magnitude of column threadIdx.x of a tile, for threads below TILE. `columns`: those of the lane's four
// columns, in its warp's rows.
DEVICE uint32 largest_of_column(BlockShared &shared, const Extremes (&columns)[Raw<4>::WORDS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Extremes own = columns[SIZE == 4 ? j : j / 2];
        const int shift = SIZE == 4 ? 0 : j % 2 * 16;
        const uint32 mask = SIZE == 4 ? ~0u : 0xffff;
        shared.column_max[warp][lane * 4 + j] = {widened(own.high >> shift & mask), widened(own.low >> shift & mask)};
    }
    __syncthreads();
    Extremes largest = {};
    if (threadIdx.x < TILE) {
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const Extremes own = shared.column_max[i][threadIdx.x];
            largest.high = max(largest.high, own.high), largest.low = max(largest.low, own.low);
        }
    }
    return largest.bits();
}

// Chunk w of a column lies at w ^ (column / 4 % 8). So neither writes by lanes four columns apart nor reads of whole
// columns have bank conflicts.
DEVICE void store_block_transposed(const Job &job, BlockShared &shared, const Position &at, const uint32 (&codes_t)[4][HEIGHT / 4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 4; ++c)
        shared.transposed[lane * 4 + c][warp ^ lane % 8] =
            make_uint4(codes_t[c][0], codes_t[c][1], codes_t[c][2], codes_t[c][3]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE * WARPS / THREADS; ++i) {
        const int chunk = threadIdx.x % WARPS, own = threadIdx.x / WARPS + i * (THREADS / WARPS);
        const long long column = at.column + own, row = at.row + chunk * HEIGHT;
        const uint4 codes = shared.transposed[own][chunk ^ own / 4 % 8];
        if (column < job.k && row < job.end_t())
            stream_store((uint4 *)(job.codes_t + column * job.pitch_t() + row), codes);
    }
}

DEVICE Scale block_scale(uint32 largest) {
    if (largest >= INFINITE) return {-1.0f, 0.0f};
    float value = fmaxf(divide_exactly(bits_float(largest), LARGEST), 0x1p-126f);
    if constexpr (POWER_OF_TWO) value = bits_float((float_bits(value) + 0x7fffff) & 0xff800000);
    return {-value, divide_exactly(1.0f, value)};
}

// Writes the scales of the tile to shared memory and to the results. Returns whether the tile holds a NaN or an infinity.
DEVICE bool find_block_scales(const Job &job, BlockShared &shared, const Position &at, const BlockPart &part) {
    constexpr int WORDS = Raw<4>::WORDS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long across = at.column / TILE, down = at.row / TILE;
    Extremes columns[WORDS] = {};
    uint32 row = 0;
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
        uint32 all = 0;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            const uint32 magnitude = part.row[i].word[j] & MAGNITUDE;
            if constexpr (COLUMNS && !TILES) columns[j].take(magnitude);
            all = larger(all, magnitude);
        }
        if constexpr (TILES) {
            row = larger(row, all);
        } else if constexpr (ROWS) {
            all = warp_max(largest_of(all));
            if (lane == i) row = all;
        }
    }
    bool bad = false;
    if constexpr (TILES) {
        row = warp_max(largest_of(row));
        if (lane == 0) shared.column_max[warp][0] = {row, 0};
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WARPS; ++i) row = max(row, shared.column_max[i][0].high);
        const Scale own = block_scale(widened(row));
        if (threadIdx.x < TILE) shared.row[threadIdx.x] = shared.column[threadIdx.x] = own;
        if (threadIdx.x == 0) {
            if constexpr (ROWS) job.scale[down * job.tiles_across() + across] = shown(own);
            if constexpr (COLUMNS) job.scale_t[across * ((job.m + TILE - 1) / TILE) + down] = shown(own);
        }
        bad = own.inverse == 0.0f;
    } else {
        if constexpr (ROWS) {
            if (lane < HEIGHT) {
                const Scale own = block_scale(widened(row));
                const long long to = at.row + warp * HEIGHT + lane;
                shared.row[warp * HEIGHT + lane] = own;
                if (to < job.m) job.scale[across * job.m + to] = shown(own);
                bad = own.inverse == 0.0f;
            }
        }
        if constexpr (COLUMNS) {
            const uint32 largest = largest_of_column(shared, columns);
            if (threadIdx.x < TILE) {
                const Scale own = block_scale(largest);
                const long long to = at.column + threadIdx.x;
                shared.column[threadIdx.x] = own;
                if (to < job.k) job.scale_t[down * job.k + to] = shown(own);
                bad |= own.inverse == 0.0f;
            }
        }
    }
    return __syncthreads_or(bad);
}

DEVICE uint32 encode_scaled(const float (&x)[4], const Scale (&scale)[4]) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = multiply_exactly(x[i], scale[i].inverse);
    return encode(y, nullptr);
}

DYNAMIC_SHARED(tile_memory);

// One block per tile. Codes have k128 (m128) columns: k (m) rounded up to a multiple of 128.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_blocks(const unsigned char *x, long long stride, unsigned char *codes, float *scale, unsigned char *codes_t,
                    float *scale_t, long long m, long long k) {
    Job job = {};
    job.x = x, job.stride = stride, job.m = m, job.k = k;
    job.codes = codes, job.scale = scale, job.codes_t = codes_t, job.scale_t = scale_t;
    BlockShared &shared = *(BlockShared *)tile_memory;
    const Position at(job, blockIdx.x);
    BlockPart part;
    fetch_block(job, blockIdx.x, part);
    if (find_block_scales(job, shared, at, part)) {  // NaN and infinities get code 0
#pragma unroll
        for (int i = 0; i < HEIGHT; ++i) part.row[i] = finite(part.row[i]);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = at.row + warp * HEIGHT, k128 = job.tiles_across() * TILE;
    const int rows = (int)min((long long)HEIGHT, m - row);  // to write
    unsigned char *to = codes + row * k128 + at.column + lane * 4;
    uint32 codes_of_columns[4][HEIGHT / 4];
#pragma unroll
    for (int i = 0; i < HEIGHT; i += 4) {
        if constexpr (ROWS) {
#pragma unroll
            for (int r = 0; r < 4; ++r, to += k128) {
                const Scale own = shared.row[warp * HEIGHT + i + r];
                const Raw<4> &raw = part.row[i + r];
                const uint32 code = encode_scaled({raw[0], raw[1], raw[2], raw[3]}, {own, own, own, own});
                if (i + r < rows) stream_store((uint32 *)to, code);
            }
        }
        if constexpr (COLUMNS) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const Scale own = shared.column[lane * 4 + c];
                const float own_rows[4] = {part.row[i][c], part.row[i + 1][c], part.row[i + 2][c], part.row[i + 3][c]};
                codes_of_columns[c][i / 4] = encode_scaled(own_rows, {own, own, own, own});
            }
        }
    }
    if constexpr (COLUMNS) {
        Job padded = job;
        padded.m = (m + TILE - 1) / TILE * TILE;
        store_block_transposed(padded, shared, at, codes_of_columns);
    }
}
