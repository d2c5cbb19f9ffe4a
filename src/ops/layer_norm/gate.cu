// Gated residuals, the gradients of modulation tables and time embeddings, and the latter in bf16. modulation.cuh stands
// before this file. Defines of the sums: OUT (bf16 or float), ACCUMULATE.

#ifndef OUT
#define OUT bf16
#define ACCUMULATE 0
#endif
#ifdef TIME_SLOTS

// out = x + (y + bias) * gate. A grid of rows * column_blocks blocks, as in swiglu/kernel.cu.
extern "C" __global__ void __launch_bounds__(256) gated_residual_fwd(const bf16* x, const bf16* y, const bf16* bias, const bf16* table,
    const bf16* time, bf16* out, int hidden, int rows_of_sequence, int column_blocks) {
    const i64 row = blockIdx.x / column_blocks, sequence = row / rows_of_sequence;
    const int step = blockDim.x * column_blocks;
    for (int c = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x; c < hidden / 8; c += step) {
        float v[8], w[8], b[8], gate[8];
        load8(x + row * hidden + 8 * c, v);
        load8(y + row * hidden + 8 * c, w);
        load8(bias + 8 * c, b);
        slot8(table, time, sequence, GATE, 0.f, hidden, c, gate);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = fmaf(w[e] + b[e], gate[e], v[e]);
        store8(out + row * hidden + 8 * c, v);
    }
}

// dy = dout * gate; block (p, columns) of a sequence sums dout * (y + bias), and dy, over its rows p, p + parts, ...
extern "C" __global__ void __launch_bounds__(128) gated_residual_bwd(const bf16* dout, const bf16* y, const bf16* bias, const bf16* table,
    const bf16* time, bf16* dy, float* partial, int hidden, int rows_of_sequence, int parts) {
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= hidden / 8) return;
    const i64 sequence = blockIdx.x / parts;
    float b[8], gate[8], dgate[8], dbias[8];
    load8(bias + 8 * c, b);
    slot8(table, time, sequence, GATE, 0.f, hidden, c, gate);
    #pragma unroll
    for (int e = 0; e < 8; ++e) dgate[e] = dbias[e] = 0.f;
    #pragma unroll 2
    for (int r = blockIdx.x % parts; r < rows_of_sequence; r += parts) {
        const i64 at = (sequence * rows_of_sequence + r) * hidden + 8 * c;
        float d[8], v[8];
        load8(dout + at, d);
        load8(y + at, v);
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            dgate[e] = fmaf(d[e], v[e] + b[e], dgate[e]);
            d[e] *= gate[e];
            dbias[e] += d[e];
        }
        store8(dy + at, d);
    }
    float* const out = partial + (i64)blockIdx.x * 2 * hidden + 8 * c;
    store8(out, dgate);
    store8(out + hidden, dbias);
}

// Sum of column `column` of `parts` rows of [2 hidden], every eighth row a warp of the block; every thread of the first warp
// gets its column's.
__device__ __forceinline__ float column_sum(const float* partial, int parts, int hidden, int column, bool there) {
    __shared__ float sums[8][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sum = 0.f;
    if (there)
        for (int p = warp; p < parts; p += 8) sum += partial[(i64)p * 2 * hidden + column];
    __syncthreads();                      // sums may still be read from an earlier call
    sums[warp][lane] = sum;
    __syncthreads();
    float total = 0.f;
    if (warp == 0)
        for (int w = 0; w < 8; ++w) total += sums[w][lane];
    return total;
}
__device__ __forceinline__ void put(OUT* to, float sum) {
#if ACCUMULATE
    sum += to_f32(*to);
#endif
    *to = Store<OUT>::of(sum);
}
// One slot: dtime of every sequence, and dtable over all of them.
__device__ __forceinline__ void slot_gradient(const float* partial, int parts, int first, int slot, OUT* dtable, float* dtime, int sequences,
    int hidden, int c) {
    const bool there = c < hidden, writes = there && threadIdx.x < 32;
    float whole = 0.f;
    for (int s = 0; s < sequences; ++s) {
        const float own = column_sum(partial + (i64)s * parts * 2 * hidden, parts, hidden, first + c, there);
        if (writes) dtime[time_row(s, slot) * hidden + c] += own;
        whole += own;
    }
    if (writes) put(dtable + (i64)slot * hidden + c, whole);
}

// Blocks of 32 columns.
extern "C" __global__ void __launch_bounds__(256) modulation_grad(const float* norm, OUT* dtable, float* dtime, int sequences, int hidden,
    int norm_parts) {
    const int c = blockIdx.x * 32 + (threadIdx.x & 31);
    slot_gradient(norm, norm_parts, hidden, SHIFT, dtable, dtime, sequences, hidden, c);
    slot_gradient(norm, norm_parts, 0, SCALE, dtable, dtime, sequences, hidden, c);
}
extern "C" __global__ void __launch_bounds__(256) modulation_gate_grad(const float* norm, const float* gate, OUT* dtable, float* dtime,
    OUT* dbias, int sequences, int hidden, int norm_parts, int gate_parts) {
    const int c = blockIdx.x * 32 + (threadIdx.x & 31);
    slot_gradient(norm, norm_parts, hidden, SHIFT, dtable, dtime, sequences, hidden, c);
    slot_gradient(norm, norm_parts, 0, SCALE, dtable, dtime, sequences, hidden, c);
    slot_gradient(gate, gate_parts, 0, GATE, dtable, dtime, sequences, hidden, c);
    const float whole = column_sum(gate, sequences * gate_parts, hidden, hidden + c, c < hidden);
    if (c < hidden && threadIdx.x < 32) put(dbias + c, whole);
}
#endif

__device__ __forceinline__ void round8(const float* x, const bf16* add, bf16* out, int len) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= len) return;
    float v[8], a[8];
    load8(x + i, v);
    if (add) {
        load8(add + i, a);
        #pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += a[e];
    }
    store8(out + i, v);
}
extern "C" __global__ void __launch_bounds__(256) to_bf16_rows(const float* x, bf16* out, int len) { round8(x, (const bf16*)0, out, len); }
extern "C" __global__ void __launch_bounds__(256) sum_to_bf16(const float* x, const bf16* add, bf16* out, int len) { round8(x, add, out, len); }
