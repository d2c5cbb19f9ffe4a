// Adds a bias and learned positions, read between the rows of a square table, to patches; and the table's gradient.
// Defines of the backward: OUT (bf16 or float), ACCUMULATE.

#ifndef OUT
#define OUT bf16
#define ACCUMULATE 0
#endif

// Coordinate i of `side` among `table` rows: row before, row after, share of the row after.
struct Between {
    int low, high;
    float of_high;
    __device__ __forceinline__ Between(int i, int side, int table) {
        const int steps = max(side - 1, 1), last = table - 1;
        low = i * last / steps;
        high = min(low + 1, last);
        of_high = (float)(i * last % steps) / (float)steps;
    }
    __device__ __forceinline__ float share(int row) const {
        return (low == row ? 1.f - of_high : 0.f) + (high == row ? of_high : 0.f);
    }
};
__device__ __forceinline__ void add8(const bf16* from, float weight, float sum[8]) {
    float v[8];
    load8(from, v);
    #pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = fmaf(weight, v[e], sum[e]);
}

// One block a patch. Patches come in blocks of 2 x 2.
extern "C" __global__ void __launch_bounds__(256) patch_position_fwd(const bf16* x, const bf16* bias, const bf16* table, bf16* y,
    int side, int table_side, int hidden) {
    const i64 row = blockIdx.x;
    const int i = (int)(row % (side * side)), block = i / 4, blocks = side / 2;
    const Between r(block / blocks * 2 + i % 4 / 2, side, table_side), c(block % blocks * 2 + i % 2, side, table_side);
    for (int v = threadIdx.x; v < hidden / 8; v += blockDim.x) {
        float sum[8];
        load8(x + row * hidden + 8 * v, sum);
        add8(bias + 8 * v, 1.f, sum);
        add8(table + (i64)(r.low * table_side + c.low) * hidden + 8 * v, (1.f - r.of_high) * (1.f - c.of_high), sum);
        add8(table + (i64)(r.low * table_side + c.high) * hidden + 8 * v, (1.f - r.of_high) * c.of_high, sum);
        add8(table + (i64)(r.high * table_side + c.low) * hidden + 8 * v, r.of_high * (1.f - c.of_high), sum);
        add8(table + (i64)(r.high * table_side + c.high) * hidden + 8 * v, r.of_high * c.of_high, sum);
        store8(y + row * hidden + 8 * v, sum);
    }
}

// dtable[row] (+)= the patches that were read from it, by their shares. One block a row of the table; few rows and columns
// of an image take from it.
extern "C" __global__ void __launch_bounds__(256) patch_position_bwd(const bf16* dy, OUT* dtable, int images, int side, int table_side,
    int hidden) {
    const int row = blockIdx.x / table_side, column = blockIdx.x % table_side, blocks = side / 2;
    for (int v = threadIdx.x; v < hidden / 8; v += blockDim.x) {
        float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        for (int r = 0; r < side; ++r) {
            const float of_row = Between(r, side, table_side).share(row);
            if (of_row == 0.f) continue;
            for (int c = 0; c < side; ++c) {
                const float weight = of_row * Between(c, side, table_side).share(column);
                if (weight == 0.f) continue;
                const int i = (r / 2 * blocks + c / 2) * 4 + r % 2 * 2 + c % 2;
                for (int image = 0; image < images; ++image)
                    add8(dy + ((i64)image * side * side + i) * hidden + 8 * v, weight, sum);
            }
        }
        OUT* const out = dtable + (i64)blockIdx.x * hidden + 8 * v;
#if ACCUMULATE
        float old[8];
        load8(out, old);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += old[e];
#endif
        store8(out, sum);
    }
}
