// SwiGLU forward and backward; the routed kernels also weigh each row with its routing probability.
// A grid of rows * column_blocks blocks; block (row, b) takes vectors b*blockDim + thread of its row, then
// strides over the columns. The backward of routed rows has one column block, since it sums over the row.

// 1 / (1 + exp(-x)): approximate exponential and division are within 1e-6, far below a bf16 rounding; exact
// ones would make these kernels wait for arithmetic instead of memory. x -> -inf gives 0, never NaN.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// h[row] = silu(gate) * up * prob; gate_up[row] holds gate, then up. Rows >= total are padding: zeros.
__device__ __forceinline__ void forward(const bf16* gate_up, float prob, bool padding, bf16* h, int ffn, int column_blocks) {
    const i64 row = blockIdx.x / column_blocks;
    const bf16 *gate = gate_up + row * 2 * ffn, *up = gate + ffn;
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step) {
        float o[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (!padding) {
            float g[8], u[8];
            load8(gate + 8 * c, g);
            load8(up + 8 * c, u);
            #pragma unroll
            for (int e = 0; e < 8; ++e) o[e] = g[e] * sigmoid(g[e]) * u[e] * prob;
        }
        store8(h + row * ffn + 8 * c, o);
    }
}

extern "C" __global__ void __launch_bounds__(256) swiglu_fwd(const bf16* gate_up, bf16* h, int ffn, int column_blocks) {
    forward(gate_up, 1.0f, false, h, ffn, column_blocks);
}
extern "C" __global__ void __launch_bounds__(256) swiglu_routed_fwd(const bf16* gate_up, const float* probs, const int* offsets, bf16* h,
    int experts, int ffn, int column_blocks) {
    const int row = blockIdx.x / column_blocks;
    forward(gate_up, probs[row], row >= offsets[experts], h, ffn, column_blocks);
}

// With s = sigmoid(gate) and q = dh * prob: dup = q * gate * s, dgate = q * up * s * (1 + gate * (1 - s)).
// Returns this thread's part of dprob = sum of dh * silu(gate) * up.
__device__ __forceinline__ float backward(const bf16* gate_up, const bf16* dh, float prob, bool padding, bf16* dgate_up, int ffn, int column_blocks) {
    const i64 row = blockIdx.x / column_blocks;
    const bf16 *gate = gate_up + row * 2 * ffn, *up = gate + ffn;
    bf16 *dgate = dgate_up + row * 2 * ffn, *dup = dgate + ffn;
    const int step = blockDim.x * column_blocks;
    float dprob = 0.f;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step) {
        float g[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, u[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (!padding) {
            float d[8];
            load8(gate + 8 * c, g);
            load8(up + 8 * c, u);
            load8(dh + row * ffn + 8 * c, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float s = sigmoid(g[e]), silu = g[e] * s, q = d[e] * prob;
                dprob = fmaf(d[e] * silu, u[e], dprob);
                const float slope = fmaf(silu, 1.0f - s, s);
                g[e] = q * u[e] * slope;
                u[e] = q * silu;
            }
        }
        store8(dgate + 8 * c, g);
        store8(dup + 8 * c, u);
    }
    return dprob;
}

extern "C" __global__ void __launch_bounds__(256) swiglu_bwd(const bf16* gate_up, const bf16* dh, bf16* dgate_up, int ffn, int column_blocks) {
    backward(gate_up, dh, 1.0f, false, dgate_up, ffn, column_blocks);
}
// One block a row.
extern "C" __global__ void __launch_bounds__(256) swiglu_routed_bwd(const bf16* gate_up, const bf16* dh, const float* probs, const int* offsets,
    bf16* dgate_up, float* dprobs, int experts, int ffn) {
    __shared__ float scratch[32];
    const int row = blockIdx.x;
    const float part = backward(gate_up, dh, probs[row], row >= offsets[experts], dgate_up, ffn, 1);
    const float dprob = block_sum(part, scratch);
    if (threadIdx.x == 0) dprobs[row] = dprob;
}
