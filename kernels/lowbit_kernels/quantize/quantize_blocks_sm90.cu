// Quantizes a matrix to e4m3 with a scale for each 128 elements of a row and of a column, or for each tile of 128 x 128.
//
// quantize_blocks_sm90.py compiles this file once for each combination of
//   INPUT              BF16, FP16 or FP32
//   TILES              a scale for each tile
//   ROWS, COLUMNS      which copies are written
//   POWER_OF_TWO       scales are rounded up to powers of two
//   TOKENS             rows are those of experts, and each expert's begin with a new tile
//   ALIGNED            rows begin at multiples of 16 bytes
// and puts quantize_rowcol_sm90.cu before it, whose loads, codes and transposed stores it uses.
//
// All elements that share a scale lie in one tile. So a block reads its tile once, keeps it in registers, finds the
// scales, and writes both copies.

DEVICE Scale block_scale(uint32 largest) {
    if (largest >= INFINITE) return {-1.0f, 0.0f};
    float value = fmaxf(divide_exactly(bits_float(largest), LARGEST), 0x1p-126f);
    if constexpr (POWER_OF_TWO) value = bits_float((float_bits(value) + 0x7fffff) & 0xff800000);
    return {-value, divide_exactly(1.0f, value)};
}

// Writes the scales of the tile to shared memory and to the results; those of a group index are `m` apart. Returns
// whether the tile holds a NaN or an infinity.
DEVICE bool find_block_scales(const Job &job, Shared &shared, const Position &at, const Part &part, long long m) {
    const int i = threadIdx.x % TILE;
    const bool of_row = threadIdx.x < TILE;
    const long long across = at.column / TILE, down = at.row / TILE;
    Scale own = {-1.0f, 1.0f};
    if constexpr (TILES) {
        const uint32 of_warp = extremes_of(part).as_floats().of_warp().high;
        if (threadIdx.x % 32 == 0) shared.largest.column[0][threadIdx.x / 32] = {of_warp, 0};
        __syncthreads();
        uint32 largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = max(largest, shared.largest.column[0][w].high);
        own = block_scale(largest);
        if (threadIdx.x == 0) {
            if constexpr (ROWS) job.scale[down * job.tiles_across() + across] = shown(own);
            if constexpr (COLUMNS) job.scale_t[across * ((job.m + TILE - 1) / TILE) + down] = shown(own);
        }
    } else {
        const uint32 largest = largest_of_line(job, shared, at, part);
        const long long to = (of_row ? at.row : at.column) + i, end = of_row ? job.m : job.k;
        if (of_row ? ROWS : COLUMNS) own = block_scale(largest);
        if ((of_row ? ROWS : COLUMNS) && to < end)
            (of_row ? job.scale + across * m : job.scale_t + down * job.k)[to] = shown(own);
    }
    (of_row ? shared.row[i] : shared.column[spread(i)]) = own;
    return __syncthreads_or(own.inverse == 0.0f);
}

DYNAMIC_SHARED(tile_memory);

static constexpr int EACH = 4;  // with TOKENS: the tiles beside each other that a block takes, so that fewer blocks walk

// One block per tile; with TOKENS, per EACH tiles. Codes have k128 (m128) columns: k (m) rounded up to a multiple of
// 128. With TILES, x is a stack of matrices m x k. With TOKENS, codes_t has `columns_t` columns, and those of an expert
// follow the tiles of the others (grouped_columns.py). A block beyond the last expert's tiles has nothing to do.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_blocks(const unsigned char *x, long long stride, unsigned char *codes, float *scale, unsigned char *codes_t,
                    float *scale_t, long long m, long long k, const int *offsets, long long experts,
                    long long columns_t) {
    Job job = {};
    job.x = x, job.stride = stride, job.m = m, job.k = k;
    job.codes = codes, job.scale = scale, job.codes_t = codes_t, job.scale_t = scale_t;
    job.columns_t = (m + TILE - 1) / TILE * TILE;
    long long tile = blockIdx.x, first = 0, last = 1;  // of the tiles of this block
    const long long across = job.tiles_across(), down = (m + TILE - 1) / TILE;
    if constexpr (TILES) {
        const long long own = tile / (down * across);
        tile -= own * down * across;
        job.x += own * m * stride * SIZE, job.codes += own * m * across * TILE, job.scale += own * down * across;
        job.codes_t += own * k * down * TILE, job.scale_t += own * down * across;
    }
    if constexpr (TOKENS) {
        int start = 0, end = 0, place = 0, next = 0;  // in rows, and in tiles
        const long long bands = (across + EACH - 1) / EACH, band = tile / bands;
        first = tile % bands * EACH, last = min(first + EACH, across);
        for (int e = 0; next <= band; ++e) {
            if (e == experts) return;
            start = end, place = next;
            end = min(max(__ldg(offsets + e), start), (int)m);
            next += (end - start + TILE - 1) / TILE;
        }
        tile = (band - place) * across + first;
        job.x += start * stride * SIZE, job.codes += start * across * TILE, job.scale += start;
        job.codes_t += place * TILE, job.scale_t += place * k, job.columns_t = columns_t, job.m = end - start;
    }
    Shared &shared = *(Shared *)tile_memory;
    for (; first < last; ++first, ++tile) {
        const Position at(job, tile);
        Part part;
        fetch(job, tile, part);
        if (find_block_scales(job, shared, at, part, m)) clear_infinities(part);
        store_codes(job, shared, Draws(job), at, part, across * TILE);
        if (TOKENS) __syncthreads();  // the next tile writes to the same shared memory
    }
}
