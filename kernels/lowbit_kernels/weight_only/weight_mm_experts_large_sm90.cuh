// Stacked weights of experts for weight_mm_large_batch_sm90.cu, which this file comes behind.
//
//   EXPERTS            the number of stacked weights [n, k], each of which multiplies tokens of its own: those of expert e
//                      end at ends[e], later ones have no expert, and their results are 0. Token i's result is row
//                      order[i] of out; i without an order. SPLIT is 1, and a block's warp groups have own rows
//   GATED              1: the first half of a weight's rows is `gate`, the second is `up`, and the result is
//                      silu(gate) * up. Half of a block's rows are of each. TOKENS is a multiple of 32
//
// codes [EXPERTS * n, bytes], scale and zero [EXPERTS * n, groups], bias [EXPERTS, n]; no residual and token_scale. A tile
// has tokens of one expert. `tiles` in shared memory has the number of columns of tiles up to each expert's last one, so
// nothing waits for the host.

// Adds up the columns of the experts' tiles; for the first warp of a block.
DEVICE void count_tiles(int *tiles, const int *ends, int m) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first <= EXPERTS; first += 32) {
        const int expert = first + lane, start = expert > 0 && expert <= EXPERTS ? min(ends[expert - 1], m) : 0;
        const int end = expert < EXPERTS ? min(ends[expert], m) : expert == EXPERTS ? m : start;
        int own = max(end - start + TOKENS - 1, 0) / TOKENS;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_sync(0xffffffff, own, (lane - i) & 31);
            own += lane >= i ? other : 0;
        }
        if (expert <= EXPERTS) tiles[expert] = before + own;
        before += __shfl_sync(0xffffffff, own, 31);
    }
}

// Moves on to the block's present tile, whose expert it finds. Returns false behind the last one.
MEMBER bool Schedule::take_of_expert() {
    const int column = tile / shape.rows;
    if (column >= shape.tiles[EXPERTS]) return false;
    int expert = 0;  // the first one that has more than `column` columns with those before it
#pragma unroll
    for (int step = 1 << 15; step > 0; step /= 2)
        if (step <= EXPERTS && expert + step <= EXPERTS && shape.tiles[expert + step - 1] <= column) expert += step;
    const int start = expert ? min(shape.ends[expert - 1], shape.m) : 0;
    end = expert < EXPERTS ? min(shape.ends[expert], shape.m) : shape.m;
    token = start + (column - (expert ? shape.tiles[expert - 1] : 0)) * TOKENS;
    row = (tile % shape.rows * BESIDE + rank % BESIDE) * (ROWS / SPREAD);
    above = expert < EXPERTS ? expert * shape.n : 0;
    last = expert < EXPERTS ? shape.chunks : 0;
    return true;
}

// Turns a warp's sums in a subtile into results, transposed through shared memory, where four matrices of
// 8 x 8 are 16 rows of 16 tokens, or GATED 8 rows of 32 tokens.
DEVICE void finish_pairs(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const Schedule &schedule,
                         const float (&sums)[SUMS], int row) {
    constexpr int TOGETHER = 16 * SPREAD, PITCH_OF_BOX = GATED ? 16 : BOX_PITCH;
    const int lane = threadIdx.x % 32, width = shape.n / SPREAD, column = row + (GATED ? 0 : lane % 2 * 8);
    const int own = GATED ? lane : lane / 2, at = GATED ? lane : lane / 16 * 8 + lane % 8;
    const uint32 matrix = shared_address(box) + at * PITCH_OF_BOX + (GATED ? 0 : lane / 8 % 2 * 16);
    const unsigned short *mine = (unsigned short *)(box + own * PITCH_OF_BOX + (GATED ? 0 : lane % 2 * 16));
    const bool exists = schedule.last > 0;
    int pairs[TOKENS / TOGETHER];  // -1: none
#pragma unroll
    for (int j = 0; j < TOKENS / TOGETHER; ++j) {
        const int token = schedule.token + j * TOGETHER + own;
        pairs[j] = token >= schedule.end ? -1 : epilogue.order ? epilogue.order[token] : token;
    }
    const Rows rows(epilogue, shape, row, schedule.above);
#pragma unroll
    for (int j = 0; j < TOKENS / TOGETHER; ++j) {
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float y[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float *sum = &sums[GATED ? j * 16 + i * 4 + k : j * 8 + i * 2 + k];
                y[k] = fmaf(sum[0], rows.scale[GATED ? 0 : i % 2], rows.bias[GATED ? 0 : i % 2]);
                if constexpr (GATED)
                    y[k] = quotient(y[k], 1.0f + exponential(-y[k])) * fmaf(sum[2], rows.scale[1], rows.bias[1]);
            }
            result[i] = exists ? packed<OUT>(y[0], y[1]) : 0;
        }
        store_matrices_transposed(matrix, result);
        __syncwarp();
        if (pairs[j] >= 0) {
            unsigned short *to = epilogue.out + (long long)pairs[j] * width + column;
            if (epilogue.wide && column + 8 <= width) *(uint4 *)to = *(const uint4 *)mine;
            else
                for (int i = 0; i < min(width - column, 8); ++i) to[i] = mine[i];
        }
        __syncwarp();
    }
}
