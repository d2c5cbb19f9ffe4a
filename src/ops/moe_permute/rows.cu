// Rows by index. One warp moves 512 elements (two 16-byte vectors a lane) of one row; neighbouring warps take
// the segments of a row in turn. Constants: TOPK, PROBS, RESIDUAL, SHARED (0 or 1).

#define WARPS 8
#define VECTOR 8
#define SEGMENT 512
#define LANE_VECTORS 2

// x [pairs/div, H], src [rows], probs [pairs] -> out [rows, H], row_probs [rows]
extern "C" __global__ void __launch_bounds__(256) gather_rows(
    const bf16* x, const int* src, const float* probs, bf16* out, float* row_probs, int rows, int pairs,
    int hidden, int div) {
    const int lane = threadIdx.x & 31;
    const int segments = (hidden + SEGMENT - 1) / SEGMENT;
    const int task = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int row = task / segments, segment = task % segments;
    if (row >= rows) return;

    const int pair = src[row];
    const bool there = pair >= 0 && pair < pairs;
    const int from = there ? pair / div : 0;
    uint4 v[LANE_VECTORS];
    #pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i) {
        const int col = segment * SEGMENT + (i * 32 + lane) * VECTOR;
        v[i] = make_uint4(0u, 0u, 0u, 0u);
        if (there && col < hidden) v[i] = *reinterpret_cast<const uint4*>(x + (i64)from * hidden + col);
    }
    #pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i) {
        const int col = segment * SEGMENT + (i * 32 + lane) * VECTOR;
        if (col < hidden) *reinterpret_cast<uint4*>(out + (i64)row * hidden + col) = v[i];
    }
#if PROBS
    if (segment == 0 && lane == 0) row_probs[row] = there ? probs[pair] : 0.f;
#endif
}

// rows [R, H], dest [T, TOPK], residual, shared [T, H], drow_probs [R] -> out [T, H], dprobs [T, TOPK]
extern "C" __global__ void __launch_bounds__(256) combine_rows(
    const bf16* rows, const int* dest, const bf16* residual, const bf16* shared, const float* drow_probs,
    bf16* out, float* dprobs, int tokens, int row_count, int hidden) {
    const int lane = threadIdx.x & 31;
    const int segments = (hidden + SEGMENT - 1) / SEGMENT;
    const int task = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int t = task / segments, segment = task % segments;
    if (t >= tokens) return;
    const int* mine = dest + (i64)t * TOPK;

    float sum[LANE_VECTORS][VECTOR];
    #pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i)
        #pragma unroll
        for (int c = 0; c < VECTOR; ++c) sum[i][c] = 0.f;

    // Eight rows a round: all their loads are in flight before the first is added.
    for (int base = 0; base < TOPK; base += 8) {
        uint4 v[8][LANE_VECTORS];
        #pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int r = base + k < TOPK ? mine[base + k] : -1;
            #pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) {
                const int col = segment * SEGMENT + (i * 32 + lane) * VECTOR;
                v[k][i] = make_uint4(0u, 0u, 0u, 0u);
                if (r >= 0 && r < row_count && col < hidden)
                    v[k][i] = *reinterpret_cast<const uint4*>(rows + (i64)r * hidden + col);
            }
        }
        #pragma unroll
        for (int k = 0; k < 8; ++k)
            #pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) {
                const uint4 q = v[k][i];
                sum[i][0] += bf16_lo(q.x); sum[i][1] += bf16_hi(q.x);
                sum[i][2] += bf16_lo(q.y); sum[i][3] += bf16_hi(q.y);
                sum[i][4] += bf16_lo(q.z); sum[i][5] += bf16_hi(q.z);
                sum[i][6] += bf16_lo(q.w); sum[i][7] += bf16_hi(q.w);
            }
    }
    #pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i) {
        const int col = segment * SEGMENT + (i * 32 + lane) * VECTOR;
        if (col >= hidden) continue;
        const i64 at = (i64)t * hidden + col;
#if RESIDUAL
        {
            float v[VECTOR];
            load8(residual + at, v);
            #pragma unroll
            for (int c = 0; c < VECTOR; ++c) sum[i][c] += v[c];
        }
#endif
#if SHARED
        {
            float v[VECTOR];
            load8(shared + at, v);
            #pragma unroll
            for (int c = 0; c < VECTOR; ++c) sum[i][c] += v[c];
        }
#endif
        store8(out + at, sum[i]);
    }
#if PROBS
    if (segment == 0)
        for (int k = lane; k < TOPK; k += 32) {
            const int r = mine[k];
            dprobs[(i64)t * TOPK + k] = r >= 0 && r < row_count ? drow_probs[r] : 0.f;
        }
#endif
}
