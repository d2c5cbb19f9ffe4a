// y = max(x, 0)^2 (* prob), and its gradient. Grid: rows * column_blocks blocks, as in swiglu/kernel.cu; the backward of
// routed rows has one block a row, since it sums over the row.

__device__ __forceinline__ void forward(const bf16* x, float prob, bool padding, bf16* y, int ffn, int column_blocks) {
    const i64 row = blockIdx.x / column_blocks;
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step) {
        float v[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (!padding) {
            load8(x + row * ffn + 8 * c, v);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float u = fmaxf(v[e], 0.f);
                v[e] = u * u * prob;
            }
        }
        store8(y + row * ffn + 8 * c, v);
    }
}
extern "C" __global__ void __launch_bounds__(256) squared_relu_fwd(const bf16* x, bf16* y, int ffn, int column_blocks) {
    forward(x, 1.0f, false, y, ffn, column_blocks);
}
extern "C" __global__ void __launch_bounds__(256) squared_relu_routed_fwd(const bf16* x, const float* probs, const int* offsets, bf16* y,
    int experts, int ffn, int column_blocks) {
    const int row = blockIdx.x / column_blocks;
    forward(x, probs[row], row >= offsets[experts], y, ffn, column_blocks);
}

// Vector c of a row; returns its share of dprob.
__device__ __forceinline__ float backward8(const bf16* x, const bf16* dy, bf16* dx, float prob, int c) {
    float v[8], d[8], dprob = 0.f;
    load8(x + 8 * c, v);
    load8(dy + 8 * c, d);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float u = fmaxf(v[e], 0.f);
        dprob += d[e] * u * u;
        d[e] *= 2.f * u * prob;
    }
    store8(dx + 8 * c, d);
    return dprob;
}
extern "C" __global__ void __launch_bounds__(256) squared_relu_bwd(const bf16* x, const bf16* dy, bf16* dx, int ffn, int column_blocks) {
    const i64 at = (i64)(blockIdx.x / column_blocks) * ffn;
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step)
        backward8(x + at, dy + at, dx + at, 1.f, c);
}
extern "C" __global__ void __launch_bounds__(256) squared_relu_routed_bwd(const bf16* x, const bf16* dy, const float* probs,
    const int* offsets, bf16* dx, float* dprobs, int experts, int ffn) {
    __shared__ float scratch[32];
    const int row = blockIdx.x;
    const i64 at = (i64)row * ffn;
    if (row >= offsets[experts]) {
        const float zero[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        for (int c = threadIdx.x; c < ffn / 8; c += blockDim.x) store8(dx + at + 8 * c, zero);
        if (threadIdx.x == 0) dprobs[row] = 0.f;
        return;
    }
    float dprob = 0.f;
    for (int c = threadIdx.x; c < ffn / 8; c += blockDim.x) dprob += backward8(x + at, dy + at, dx + at, probs[row], c);
    dprob = block_sum(dprob, scratch);
    if (threadIdx.x == 0) dprobs[row] = dprob;
}
