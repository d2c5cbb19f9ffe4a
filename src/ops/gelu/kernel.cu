// y = f(x + bias) with f the tanh form of GELU, or SiLU (SILU); and its gradient. BIAS: there is one. Grid: rows *
// column_blocks blocks, as in swiglu/kernel.cu.

#ifndef SILU
#define SILU 0
#define BIAS 0
#endif

// As in swiglu/kernel.cu: approximate functions are far below a bf16 rounding.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// sqrt(2 / pi), and the weight of the cube.
#define SLOPE 0.79788456080286536f
#define CUBE 0.044715f

// tanh u = 2 sigmoid(2u) - 1, so 0.5 z (1 + tanh u) = z sigmoid(2u).
__device__ __forceinline__ float gate(float z) { return SILU ? sigmoid(z) : sigmoid(2.f * SLOPE * fmaf(CUBE * z * z, z, z)); }
__device__ __forceinline__ float slope(float z) {
    const float s = gate(z);
    const float inner = SILU ? 1.f : 2.f * SLOPE * fmaf(3.f * CUBE * z, z, 1.f);
    return fmaf(z * s * (1.f - s), inner, s);
}

__device__ __forceinline__ void at_columns(const bf16* x, const bf16* bias, const bf16* dy, bf16* out, int cols, int column_blocks, bool backward) {
    const i64 row = blockIdx.x / column_blocks;
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < cols / 8; c += step) {
        float v[8], d[8];
        load8(x + row * cols + 8 * c, v);
#if BIAS
        float b[8];
        load8(bias + 8 * c, b);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += b[e];
#endif
        if (backward) load8(dy + row * cols + 8 * c, d);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = backward ? slope(v[e]) * d[e] : v[e] * gate(v[e]);
        store8(out + row * cols + 8 * c, v);
    }
}

#if BIAS
extern "C" __global__ void __launch_bounds__(256) curve_bias_fwd(const bf16* x, const bf16* bias, bf16* y, int cols, int column_blocks) {
    at_columns(x, bias, x, y, cols, column_blocks, false);
}
extern "C" __global__ void __launch_bounds__(256) curve_bias_bwd(const bf16* x, const bf16* bias, const bf16* dy, bf16* dx, int cols, int column_blocks) {
    at_columns(x, bias, dy, dx, cols, column_blocks, true);
}
#else
extern "C" __global__ void __launch_bounds__(256) curve_fwd(const bf16* x, bf16* y, int cols, int column_blocks) {
    at_columns(x, x, x, y, cols, column_blocks, false);
}
extern "C" __global__ void __launch_bounds__(256) curve_bwd(const bf16* x, const bf16* dy, bf16* dx, int cols, int column_blocks) {
    at_columns(x, x, dy, dx, cols, column_blocks, true);
}
#endif
