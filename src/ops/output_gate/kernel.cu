// Gate on an attention's output: y = o * sigmoid(gate), eight values a thread. The gate lies in columns of rows of `stride`.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(256) output_gate_fwd(const bf16* o, const bf16* proj, bf16* y, long long pieces, int width,
    int stride, int first) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pieces) return;
    const i64 row = i / (width / 8), column = i % (width / 8) * 8;
    float a[8], g[8];
    load8(o + 8 * i, a);
    load8(proj + row * stride + first + column, g);
    #pragma unroll
    for (int e = 0; e < 8; ++e) a[e] *= sigmoid(g[e]);
    store8(y + 8 * i, a);
}

// do = dy sigmoid(gate), dgate = dy o sigmoid'(gate).
extern "C" __global__ void __launch_bounds__(256) output_gate_bwd(const bf16* o, const bf16* proj, const bf16* dy, bf16* dout, bf16* dgate,
    long long pieces, int width, int stride, int first) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pieces) return;
    const i64 row = i / (width / 8), column = i % (width / 8) * 8;
    float a[8], g[8], d[8];
    load8(o + 8 * i, a);
    load8(proj + row * stride + first + column, g);
    load8(dy + 8 * i, d);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float s = sigmoid(g[e]);
        g[e] = d[e] * a[e] * s * (1.f - s);
        d[e] *= s;
    }
    store8(dout + 8 * i, d);
    store8(dgate + 8 * i, g);
}
