// LayerNorm with weight and bias, or modulated by a table and a time embedding; and backward.
// Defines: THREADS (a block), VECS (16-byte vectors a thread holds of one row); those of modulation.cuh, which stands
// before this file, where it is modulated.
// A row stays in registers between its uses: x, dy, y and dx cross device memory once.

#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECS
#define VECS 1
#endif

// This thread's vectors of a row of `vectors` vectors; zeros past its end.
__device__ __forceinline__ void load_row(const bf16* row, int vectors, float v[VECS][8]) {
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < vectors) load8(row + 8 * c, v[i]);
        else {
            #pragma unroll
            for (int e = 0; e < 8; ++e) v[i][e] = 0.f;
        }
    }
}
// y[row] = (x[row] - mean) * rstd * gain + shift. One block a row. `first` and `second`: weight and bias, or table and time.
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_fwd(const bf16* x, const bf16* first, const bf16* second, bf16* y, float* stats,
    int hidden, int rows_of_sequence, float eps) {
    __shared__ float scratch[32];
    const i64 row = blockIdx.x;
    const int vectors = hidden / 8;
    float v[VECS][8];
    load_row(x + row * hidden, vectors, v);
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < VECS; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum += v[i][e];
    const float mean = block_sum(sum, scratch) / (float)hidden;
    float squares = 0.f;
    #pragma unroll
    for (int i = 0; i < VECS; ++i)
        if (threadIdx.x + i * THREADS < vectors) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) squares = fmaf(v[i][e] - mean, v[i][e] - mean, squares);
        }
    const float rstd = 1.0f / sqrtf(block_sum(squares, scratch) / (float)hidden + eps);
    if (threadIdx.x == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = rstd;
    }
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= vectors) break;
        float gain[8], shift[8];
#ifdef TIME_SLOTS
        const i64 sequence = row / rows_of_sequence;
        slot8(first, second, sequence, SCALE, 1.f, hidden, c, gain);
        slot8(first, second, sequence, SHIFT, 0.f, hidden, c, shift);
#else
        load8(first + 8 * c, gain);
        load8(second + 8 * c, shift);
#endif
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[i][e] = fmaf((v[i][e] - mean) * rstd, gain[e], shift[e]);
        store8(y + row * hidden + 8 * c, v[i]);
    }
}

// With g = dy * gain: dx = rstd * (g - mean(g) - n * mean(g * n)) (+ dres). Block p of a sequence takes its rows p,
// p + parts, ... and sums dy * n and dy over them, in that order.
template <bool RESIDUAL>
__device__ __forceinline__ void backward(const bf16* x, const float* stats, const bf16* dy, const bf16* first, const bf16* second,
    const bf16* dres, bf16* dx, float* partial, int hidden, int rows_of_sequence, int parts) {
    __shared__ float scratch[32];
    const int vectors = hidden / 8;
    const float inv_hidden = 1.0f / (float)hidden;
    const i64 sequence = blockIdx.x / parts;
    float dgain[VECS][8], dshift[VECS][8], gain[VECS][8];
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        #pragma unroll
        for (int e = 0; e < 8; ++e) dgain[i][e] = dshift[i][e] = gain[i][e] = 0.f;
        if (c < vectors) {
#ifdef TIME_SLOTS
            slot8(first, second, sequence, SCALE, 1.f, hidden, c, gain[i]);
#else
            load8(first + 8 * c, gain[i]);
#endif
        }
    }
    for (int r = blockIdx.x % parts; r < rows_of_sequence; r += parts) {
        const i64 row = sequence * rows_of_sequence + r;
        const float mean = stats[2 * row], rstd = stats[2 * row + 1];
        float n[VECS][8], d[VECS][8];
        load_row(x + row * hidden, vectors, n);
        load_row(dy + row * hidden, vectors, d);
        float sum = 0.f, dot = 0.f;
        #pragma unroll
        for (int i = 0; i < VECS; ++i)
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                n[i][e] = (n[i][e] - mean) * rstd;           // past the row's end d is zero
                dgain[i][e] = fmaf(d[i][e], n[i][e], dgain[i][e]);
                dshift[i][e] += d[i][e];
                d[i][e] *= gain[i][e];
                sum += d[i][e];
                dot = fmaf(d[i][e], n[i][e], dot);
            }
        sum = block_sum(sum, scratch) * inv_hidden;
        dot = block_sum(dot, scratch) * inv_hidden;
        #pragma unroll
        for (int i = 0; i < VECS; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c >= vectors) break;
            #pragma unroll
            for (int e = 0; e < 8; ++e) d[i][e] = rstd * (d[i][e] - sum - n[i][e] * dot);
            if (RESIDUAL) {
                float q[8];
                load8(dres + row * hidden + 8 * c, q);
                #pragma unroll
                for (int e = 0; e < 8; ++e) d[i][e] += q[e];
            }
            store8(dx + row * hidden + 8 * c, d[i]);
        }
    }
    float* const out = partial + (i64)blockIdx.x * 2 * hidden;
    #pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= vectors) break;
        store8(out + 8 * c, dgain[i]);
        store8(out + hidden + 8 * c, dshift[i]);
    }
}

#ifndef TIME_SLOTS
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_bwd(const bf16* x, const float* stats, const bf16* dy, const bf16* weight,
    bf16* dx, float* partial, int hidden, int rows_of_sequence, int parts) {
    backward<false>(x, stats, dy, weight, weight, dy, dx, partial, hidden, rows_of_sequence, parts);
}
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_bwd_residual(const bf16* x, const float* stats, const bf16* dy, const bf16* weight,
    const bf16* dres, bf16* dx, float* partial, int hidden, int rows_of_sequence, int parts) {
    backward<true>(x, stats, dy, weight, weight, dres, dx, partial, hidden, rows_of_sequence, parts);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_modulated_bwd(const bf16* x, const float* stats, const bf16* dy,
    const bf16* table, const bf16* time, bf16* dx, float* partial, int hidden, int rows_of_sequence, int parts) {
    backward<false>(x, stats, dy, table, time, dy, dx, partial, hidden, rows_of_sequence, parts);
}
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_modulated_bwd_residual(const bf16* x, const float* stats, const bf16* dy,
    const bf16* table, const bf16* time, const bf16* dres, bf16* dx, float* partial, int hidden, int rows_of_sequence, int parts) {
    backward<true>(x, stats, dy, table, time, dres, dx, partial, hidden, rows_of_sequence, parts);
}
#endif
