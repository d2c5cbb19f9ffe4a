// A sigmoid gate on every token, and its gradient. Defines: THREADS (a block), VECS (16-byte vectors a thread).

#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECS
#define VECS 2
#endif

// out[row] = x[row] * gate, gate = sigmoid(y[row] . weight). One block a row.
extern "C" __global__ void __launch_bounds__(THREADS) token_gate_fwd(const bf16* y, const bf16* weight, const bf16* x, bf16* out,
    float* gate, int tokens, int hidden) {
    __shared__ float scratch[32];
    const i64 at = (i64)blockIdx.x * hidden;
    const int vectors = hidden / 8;
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= vectors) break;
        float a[8], w[8];
        load8(y + at + 8 * c, a);
        load8(weight + 8 * c, w);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(a[e], w[e], sum);
    }
    sum = block_sum(sum, scratch);
    const float g = 1.0f / (1.0f + expf(-sum));
    if (threadIdx.x == 0) gate[blockIdx.x] = g;
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= vectors) break;
        float a[8];
        load8(x + at + 8 * c, a);
        #pragma unroll
        for (int e = 0; e < 8; ++e) a[e] *= g;
        store8(out + at + 8 * c, a);
    }
}

// With l = gate (1 - gate) (dout . x): dx = dout * gate, dy = dres + l * weight, dw = sum of l * y. Block p takes rows
// p, p + gridDim.x, ... and sums over them, in that order, into dw_partial[p].
extern "C" __global__ void __launch_bounds__(THREADS) token_gate_bwd(const bf16* y, const bf16* weight, const bf16* x, const float* gate,
    const bf16* dout, const bf16* dres, bf16* dx, bf16* dy, float* dw_partial, int tokens, int hidden) {
    __shared__ float scratch[32];
    const int vectors = hidden / 8;
    float dw[VECS][8];
    #pragma unroll
    for (int i = 0; i < VECS; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) dw[i][e] = 0.f;
    for (int row = blockIdx.x; row < tokens; row += gridDim.x) {
        const i64 at = (i64)row * hidden;
        const float g = gate[row];
        float sum = 0.f;
        #pragma unroll
        for (int i = 0; i < VECS; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c >= vectors) break;
            float a[8], d[8];
            load8(x + at + 8 * c, a);
            load8(dout + at + 8 * c, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                sum = fmaf(a[e], d[e], sum);
                d[e] *= g;
            }
            store8(dx + at + 8 * c, d);
        }
        const float l = block_sum(sum, scratch) * g * (1.0f - g);
        #pragma unroll
        for (int i = 0; i < VECS; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c >= vectors) break;
            float a[8], w[8], r[8];
            load8(y + at + 8 * c, a);
            load8(weight + 8 * c, w);
            load8(dres + at + 8 * c, r);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                dw[i][e] = fmaf(l, a[e], dw[i][e]);
                r[e] = fmaf(l, w[e], r[e]);
            }
            store8(dy + at + 8 * c, r);
        }
    }
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < vectors) store8(dw_partial + (i64)blockIdx.x * hidden + 8 * c, dw[i]);
    }
}
