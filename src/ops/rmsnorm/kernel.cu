// RMSNorm forward and backward, and the column sum that finishes weight gradients.
// Defines: THREADS (a block), VECS (16-byte vectors a thread holds of one row), OUT (dtype of column_sum), ZERO_CENTERED (the
// weight is stored less one).
// A row stays in registers between its two uses: x, dy, y and dx cross device memory once.

#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECS
#define VECS 2
#endif
#ifndef OUT
#define OUT bf16
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
// p, p + gridDim.x, ... and sums dy * n over them, in that order, into dw_partial[p].
template <bool RESIDUAL>
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
            if (next < tokens) {
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
                dw[i][e] = fmaf(d[e], n, dw[i][e]);
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

extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    bf16* dx, float* dw_partial, int tokens, int hidden) {
    backward<false>(x, weight, rstd, dy, dy, dx, dw_partial, tokens, hidden);
}
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_bwd_residual(const bf16* x, const bf16* weight, const float* rstd, const bf16* dy,
    const bf16* dres, bf16* dx, float* dw_partial, int tokens, int hidden) {
    backward<true>(x, weight, rstd, dy, dres, dx, dw_partial, tokens, hidden);
}

// dw[col] += sum over rows of partial[row][col]. A block of 256 threads sums 32 columns: 8 threads of four
// columns side by side, 32 row groups; group g takes rows g, g + 32, ..., then the groups are added in order.
extern "C" __global__ void __launch_bounds__(256) column_sum(const float* partial, OUT* dw, int rows, int width, int first, int cols, int accumulate) {
    __shared__ float4 groups[32][8];
    const int lane = threadIdx.x & 7, group = threadIdx.x >> 3;
    const int col = blockIdx.x * 32 + lane * 4;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
    if (col < cols) {
        #pragma unroll 4
        for (int row = group; row < rows; row += 32) {
            const float4 v = *reinterpret_cast<const float4*>(partial + (i64)row * width + first + col);
            s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
        }
    }
    groups[group][lane] = s;
    __syncthreads();
    const int mine = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.x < 32 && mine < cols) {
        const float* flat = reinterpret_cast<const float*>(groups);
        float sum = 0.f;
        for (int g = 0; g < 32; ++g) sum += flat[g * 32 + threadIdx.x];
        dw[mine] = Store<OUT>::of(accumulate ? to_f32(dw[mine]) + sum : sum);
    }
}
