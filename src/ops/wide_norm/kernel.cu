// Bias, RMSNorm over a whole part and rotation of interleaved pairs, for the parts of a fused product; and backward.
// Defines: THREADS (a block; a thread holds eight columns of a row), HEAD_DIM, PARTS, NORMED (the first of them);
// AXES, AXES_FIRST, AXES_SECOND, AXIS_OF_PAIR, INV_FREQ as in rope/kernel.cu where pairs turn with the axes of a video.

#ifndef THREADS
#define THREADS 256
#define HEAD_DIM 64
#define PARTS 1
#define NORMED 1
#endif
#define PAIRS (HEAD_DIM / 2)

#ifdef AXES
__device__ const double inv_freq[] = { INV_FREQ };
__device__ const int axis_of_pair[] = { AXIS_OF_PAIR };
#endif
// Fills the block's table with the cosines and sines of row `row`; rope/kernel.cu says why in double.
__device__ __forceinline__ void fill_angles(int row, int seq, int start0, int len0, int start1, float (*table)[PAIRS]) {
#ifdef AXES
    const int i = row % seq, pos = i < len0 ? start0 + i : start1 + (i - len0);
    for (int p = threadIdx.x; p < PAIRS; p += THREADS) {
        const int axis = axis_of_pair[p];
        const int at = axis == 0 ? pos / (AXES_FIRST * AXES_SECOND) : axis == 1 ? pos / AXES_SECOND % AXES_FIRST : pos % AXES_SECOND;
        const double angle = (double)at * inv_freq[p];
        const double turns = rint(angle * 0.15915494309189535);           // 1 / (2 pi)
        float s, c;
        __sincosf((float)fma(turns, -6.283185307179586, angle), &s, &c);
        table[0][p] = c;
        table[1][p] = s;
    }
#endif
}
// Turns this thread's four pairs, forward (1) or back (-1).
__device__ __forceinline__ void rotate(float v[8], int column, float (*table)[PAIRS], float direction) {
#ifdef AXES
    const int first = column % HEAD_DIM / 2;
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float c = table[0][first + p], s = direction * table[1][first + p], a = v[2 * p], b = v[2 * p + 1];
        v[2 * p] = a * c - b * s;
        v[2 * p + 1] = b * c + a * s;
    }
#endif
}
// One of three by the block's part, without an array in local memory.
template <typename T>
__device__ __forceinline__ T pick(T a, T b, T c) { return blockIdx.y == 0 ? a : blockIdx.y == 1 ? b : c; }

// Block (row, part).
extern "C" __global__ void __launch_bounds__(THREADS) wide_norm_fwd(const bf16* x, const bf16* bias, const bf16* weight0, const bf16* weight1,
    bf16* out0, bf16* out1, bf16* out2, float* rstd, int rows, int width, int seq, int start0, int len0, int start1, float eps) {
    __shared__ float scratch[32];
    __shared__ float table[2][PAIRS];
    const i64 row = blockIdx.x;
    const int part = blockIdx.y, c = threadIdx.x * 8;
    const bool there = c < width;
    float v[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (there) {
        float b[8];
        load8(x + (row * PARTS + part) * width + c, v);
        load8(bias + (i64)part * width + c, b);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += b[e];
    }
    if (part < NORMED) {
        fill_angles((int)row, seq, start0, len0, start1, table);
        float sum = 0.f;
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
        const float r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)width + eps);   // and the table is there
        if (threadIdx.x == 0) rstd[row * NORMED + part] = r;
        if (there) {
            float w[8];
            load8(pick(weight0, weight1, weight1) + c, w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = v[e] * r * w[e];
            rotate(v, c, table, 1.f);
        }
    }
    if (there) store8(pick(out0, out1, out2) + row * width + c, v);
}

// Block (p, part): rows p, p + gridDim.x, ... in that order; sums of the weight's and the bias' gradients.
extern "C" __global__ void __launch_bounds__(THREADS) wide_norm_bwd(const bf16* d0, const bf16* d1, const bf16* d2, const bf16* x, const bf16* bias,
    const bf16* weight0, const bf16* weight1, const float* rstd, bf16* dx, float* partial, int rows, int width, int seq, int start0, int len0,
    int start1) {
    __shared__ float scratch[32];
    __shared__ float table[2][PAIRS];
    const int part = blockIdx.y, c = threadIdx.x * 8;
    const bool there = c < width;
    const bf16* const gradient = pick(d0, d1, d2);
    float dw[8], db[8], w[8], b[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) dw[e] = db[e] = w[e] = b[e] = 0.f;
    if (there && part < NORMED) load8(pick(weight0, weight1, weight1) + c, w);
    if (there) load8(bias + (i64)part * width + c, b);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float g[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (there) load8(gradient + row * width + c, g);
        if (part < NORMED) {
            float n[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            const float r = rstd[row * NORMED + part];
            if (there) load8(x + (row * PARTS + part) * width + c, n);
            __syncthreads();                      // the table may still be read for the row before
            fill_angles((int)row, seq, start0, len0, start1, table);
            __syncthreads();
            if (there) rotate(g, c, table, -1.f);
            float sum = 0.f;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                n[e] = (n[e] + b[e]) * r;
                dw[e] = fmaf(g[e], n[e], dw[e]);
                g[e] *= w[e];
                sum = fmaf(g[e], n[e], sum);
            }
            const float mean = block_sum(sum, scratch) / (float)width;
            #pragma unroll
            for (int e = 0; e < 8; ++e) g[e] = r * (g[e] - n[e] * mean);
        }
        #pragma unroll
        for (int e = 0; e < 8; ++e) db[e] += g[e];
        if (there) store8(dx + (row * PARTS + part) * width + c, g);
    }
    if (!there) return;
    float* const out = partial + (i64)blockIdx.x * (NORMED + PARTS) * width + c;
    if (part < NORMED) store8(out + (i64)part * width, dw);
    store8(out + (i64)(NORMED + part) * width, db);
}
