// RMSNorm forward and backward.
// Defines: THREADS (a block), VECS (16-byte vectors a thread holds of one row), ZERO_CENTERED (the weight is stored less
// one), GRAD (type of the weight's gradient: the kernels that write it whole).
// A row stays in registers between its two uses: x, dy, y and dx cross device memory once.

#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECS
#define VECS 2
#endif
// Loading the next row ahead hides its latency; with long rows the registers are needed for this one.
#define AHEAD (VECS <= 2)

__device__ __forceinline__ void unpack8(uint4 q, float v[8]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}
// Eight scales.
__device__ __forceinline__ void unpack_weight(uint4 q, float v[8]) {
    unpack8(q, v);
#ifdef ZERO_CENTERED
    #pragma unroll
    for (int e = 0; e < 8; ++e) v[e] += 1.f;
#endif
}
// This thread's vectors of a row of `vectors` vectors; zeros past its end.
__device__ __forceinline__ void load_row(const bf16* row, int vectors, uint4 v[VECS]) {
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        v[i] = c < vectors ? reinterpret_cast<const uint4*>(row)[c] : make_uint4(0, 0, 0, 0);
    }
}

// Vector i of this thread of the weight. Volatile, so that long rows load it again (from the first-level cache)
// instead of holding it in registers.
__device__ __forceinline__ uint4 weight_at(const bf16* weight, int vectors, int i) {
    const int c = threadIdx.x + i * THREADS;
    uint4 q = make_uint4(0, 0, 0, 0);
    if (c < vectors) asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(weight + 8 * c));
    return q;
}

// y[row] = x[row] * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps). One block a row.
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_fwd(const bf16* x, const bf16* weight, bf16* y, float* rstd, int hidden, float eps) {
    __shared__ float scratch[32];
    const i64 row = blockIdx.x;
    const int vectors = hidden / 8;
    uint4 xv[VECS], wv[VECS];
    load_row(x + row * hidden, vectors, xv);
    load_row(weight, vectors, wv);
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        float a[8];
        unpack8(xv[i], a);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(a[e], a[e], sum);
    }
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)hidden + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= vectors) break;
        float a[8], w[8];
        unpack8(xv[i], a);
        unpack_weight(wv[i], w);
        #pragma unroll
        for (int e = 0; e < 8; ++e) a[e] = a[e] * r * w[e];
        store8(y + row * hidden + 8 * c, a);
    }
}

// With g = dy * weight and n = x * rstd: dx = rstd * (g - n * mean(g * n)) (+ dres). Block p takes rows
// p, p + gridDim.x, ... and sums dy * n over them, in that order, into dw_partial[p]; without PARTIAL it takes row p alone
// and sums nothing.
template <bool RESIDUAL, bool PARTIAL>
__device__ __forceinline__ void backward(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy, const bf16* dres,
    bf16* dx, float* dw_partial, int tokens, int hidden) {
    __shared__ float scratch[32];
    const int vectors = hidden / 8;
    const float inv_hidden = 1.0f / (float)hidden;
    uint4 wv[VECS], xv[VECS], dyv[VECS];
    float dw[VECS][8];
    #pragma unroll
    for (int i = 0; i < VECS; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) dw[i][e] = 0.f;
    if (AHEAD) load_row(weight, vectors, wv);
    i64 row = blockIdx.x;
    float r = 0.f;
    if (AHEAD && row < tokens) {
        load_row(x + row * hidden, vectors, xv);
        load_row(dy + row * hidden, vectors, dyv);
        r = rstd[row];
    }
    for (; row < tokens; row += gridDim.x) {
        uint4 next_x[VECS], next_dy[VECS], dr[VECS];
        float next_r = 0.f;
        if (AHEAD) {
            const i64 next = row + gridDim.x;
            if (RESIDUAL) load_row(dres + row * hidden, vectors, dr);
            if (PARTIAL && next < tokens) {
                load_row(x + next * hidden, vectors, next_x);
                load_row(dy + next * hidden, vectors, next_dy);
                next_r = rstd[next];
            }
        } else {
            load_row(x + row * hidden, vectors, xv);
            load_row(dy + row * hidden, vectors, dyv);
            r = rstd[row];
        }
        float sum = 0.f;
        #pragma unroll
        for (int i = 0; i < VECS; ++i) {
            float a[8], d[8], w[8];
            unpack8(xv[i], a);
            unpack8(dyv[i], d);
            unpack_weight(AHEAD ? wv[i] : weight_at(weight, vectors, i), w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float n = a[e] * r;
                if (PARTIAL) dw[i][e] = fmaf(d[e], n, dw[i][e]);
                sum = fmaf(d[e] * w[e], n, sum);
            }
        }
        const float mean = block_sum(sum, scratch) * inv_hidden;
        #pragma unroll
        for (int i = 0; i < VECS; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c < vectors) {
                float a[8], d[8], w[8], o[8];
                unpack8(xv[i], a);
                unpack8(dyv[i], d);
                unpack_weight(AHEAD ? wv[i] : weight_at(weight, vectors, i), w);
                #pragma unroll
                for (int e = 0; e < 8; ++e) o[e] = r * (d[e] * w[e] - a[e] * r * mean);
                if (RESIDUAL) {
                    float q[8];
                    if (AHEAD) unpack8(dr[i], q); else load8(dres + row * hidden + 8 * c, q);
                    #pragma unroll
                    for (int e = 0; e < 8; ++e) o[e] += q[e];
                }
                store8(dx + row * hidden + 8 * c, o);
            }
        }
        if (!PARTIAL) return;
        if (AHEAD) {
            #pragma unroll
            for (int i = 0; i < VECS; ++i) { xv[i] = next_x[i]; dyv[i] = next_dy[i]; }
            r = next_r;
        }
    }
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < vectors) store8(dw_partial + (i64)blockIdx.x * hidden + 8 * c, dw[i]);
    }
}

#ifndef GRAD
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    bf16* dx, float* dw_partial, int tokens, int hidden) {
    backward<false, true>(x, weight, rstd, dy, dy, dx, dw_partial, tokens, hidden);
}
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd_residual(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    const bf16* dres, bf16* dx, float* dw_partial, int tokens, int hidden) {
    backward<true, true>(x, weight, rstd, dy, dres, dx, dw_partial, tokens, hidden);
}
#else
// dw[col] (+)= sum over rows of dy * n, for 32 columns a block: four lanes of eight columns side by side; group g of
// them takes rows g, g + THREADS / 4, .... Then the eight groups of a warp are added, then the warps, in a fixed order.
// The sum needs no other block: x and dy are read again, from the second-level cache where the rows' blocks have read them.
__device__ __forceinline__ void weight_gradient(const bf16* x, const float* rstd, const bf16* dy, GRAD* dw, int stripe, int tokens,
    int hidden, int accumulate) {
    __shared__ float sums[THREADS / 32][32];
    const int lane = threadIdx.x & 3, warp = threadIdx.x >> 5;
    const int col = stripe * 32 + lane * 8, mine = stripe * 32 + threadIdx.x;
    const bool writes = threadIdx.x < 32 && mine < hidden;
    const float old = writes && accumulate ? to_f32(dw[mine]) : 0.f;
    float s[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (col < hidden) {
        #pragma unroll 4
        for (int row = threadIdx.x >> 2; row < tokens; row += THREADS / 4) {
            float a[8], d[8];
            load8(x + (i64)row * hidden + col, a);
            load8(dy + (i64)row * hidden + col, d);
            const float r = rstd[row];
            #pragma unroll
            for (int e = 0; e < 8; ++e) s[e] = fmaf(d[e], a[e] * r, s[e]);
        }
    }
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        #pragma unroll
        for (int o = 4; o < 32; o <<= 1) s[e] += __shfl_xor_sync(0xffffffffu, s[e], o);
    }
    if ((threadIdx.x & 31) < 4) store8(&sums[warp][lane * 8], s);
    __syncthreads();
    if (!writes) return;
    float sum = 0.f;
    #pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[w][threadIdx.x];
    dw[mine] = Store<GRAD>::of(old + sum);
}

// dx and the whole dw in one launch of tokens + ceil(hidden / 32) blocks: first a row each, then 32 columns each. No block
// waits for another.
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd_whole(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    bf16* dx, GRAD* dw, int tokens, int hidden, int accumulate) {
    const int stripe = (int)blockIdx.x - tokens;
    if (stripe < 0) backward<false, false>(x, weight, rstd, dy, dy, dx, (float*)0, tokens, hidden);
    else weight_gradient(x, rstd, dy, dw, stripe, tokens, hidden, accumulate);
}
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd_whole_residual(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    const bf16* dres, bf16* dx, GRAD* dw, int tokens, int hidden, int accumulate) {
    const int stripe = (int)blockIdx.x - tokens;
    if (stripe < 0) backward<true, false>(x, weight, rstd, dy, dres, dx, (float*)0, tokens, hidden);
    else weight_gradient(x, rstd, dy, dw, stripe, tokens, hidden, accumulate);
}
#endif
