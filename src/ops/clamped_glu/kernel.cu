// The clamped gated unit of gpt-oss, forward and backward; bias and routing as asked. Defines: ROUTED, BIAS, EXPERTS (of
// routed rows). Grids as in swiglu/kernel.cu. bias/expert.cuh stands before this file.

#ifndef ROUTED
#define ROUTED 1
#define BIAS 1
#define EXPERTS 32
#endif

// 1.702: the sigmoid's factor with which x * sigmoid(a x) is nearest to GELU.
#ifndef ALPHA
#define ALPHA 1.702f
#endif
// Approximate, as in swiglu/kernel.cu: within 1e-6.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Gate and up of eight columns, with their biases.
__device__ __forceinline__ void load_gate_up(const bf16* gate_up, const bf16* bias, int ffn, int c, float g[8], float u[8]) {
    load8(gate_up + 8 * c, g);
    load8(gate_up + ffn + 8 * c, u);
#if BIAS
    float b[8];
    load8(bias + 8 * c, b);
    #pragma unroll
    for (int e = 0; e < 8; ++e) g[e] += b[e];
    load8(bias + ffn + 8 * c, b);
    #pragma unroll
    for (int e = 0; e < 8; ++e) u[e] += b[e];
#endif
}

// h[row] = quick_gelu(min(gate, limit)) * (clamp(up, -limit, limit) + shift) * prob; zeros for rows of no expert.
extern "C" __global__ void __launch_bounds__(256) clamped_glu_fwd(const bf16* gate_up, const bf16* bias, const float* probs, const int* offsets,
    bf16* h, int ffn, int column_blocks, float limit, float shift) {
    const int row = blockIdx.x / column_blocks;
    gate_up += (i64)row * 2 * ffn;
    h += (i64)row * ffn;
    float prob = 1.f;
    bool padding = false;
#if ROUTED
    padding = row >= offsets[EXPERTS];
    prob = probs[row];
    #if BIAS
    if (!padding) bias += (i64)expert_of(offsets, EXPERTS, row) * 2 * ffn;
    #endif
#endif
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step) {
        float o[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (!padding) {
            float g[8], u[8];
            load_gate_up(gate_up, bias, ffn, c, g, u);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float x = fminf(g[e], limit), y = fminf(fmaxf(u[e], -limit), limit);
                o[e] = x * sigmoid(ALPHA * x) * (y + shift) * prob;
            }
        }
        store8(h + 8 * c, o);
    }
}

// With x and y the clamped gate and up, s = sigmoid(a x), q = dh * prob: dup = q x s where up was not clamped, dgate =
// q (y + shift) s (1 + a x (1 - s)) where gate was not, dprob = sum of dh x s (y + shift). Routed rows have one block each.
extern "C" __global__ void __launch_bounds__(256) clamped_glu_bwd(const bf16* gate_up, const bf16* bias, const bf16* dh, const float* probs,
    const int* offsets, bf16* dgate_up, float* dprobs, int ffn, int column_blocks, float limit, float shift) {
    const int row = blockIdx.x / column_blocks;
    gate_up += (i64)row * 2 * ffn;
    dgate_up += (i64)row * 2 * ffn;
    dh += (i64)row * ffn;
    float prob = 1.f;
    bool padding = false;
#if ROUTED
    padding = row >= offsets[EXPERTS];
    prob = probs[row];
    #if BIAS
    if (!padding) bias += (i64)expert_of(offsets, EXPERTS, row) * 2 * ffn;
    #endif
#endif
    const int step = blockDim.x * column_blocks;
    float dprob = 0.f;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < ffn / 8; c += step) {
        float g[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, u[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (!padding) {
            float d[8];
            load_gate_up(gate_up, bias, ffn, c, g, u);
            load8(dh + 8 * c, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float x = fminf(g[e], limit), y = fminf(fmaxf(u[e], -limit), limit) + shift;
                const float s = sigmoid(ALPHA * x), act = x * s, q = d[e] * prob;
                dprob = fmaf(d[e] * act, y, dprob);
                const float slope = fmaf(ALPHA * act, 1.0f - s, s);
                g[e] = g[e] <= limit ? q * y * slope : 0.f;
                u[e] = fabsf(u[e]) <= limit ? q * act : 0.f;
            }
        }
        store8(dgate_up + 8 * c, g);
        store8(dgate_up + ffn + 8 * c, u);
    }
#if ROUTED
    __shared__ float scratch[32];
    dprob = block_sum(dprob, scratch);
    if (threadIdx.x == 0) dprobs[row] = dprob;
#endif
}
