// Token embedding, forward and backward. Rows are `hidden` elements, a multiple of 8.

#ifndef THREADS
#define THREADS 512   // backward: a block covers THREADS * 8 columns
#endif
#ifndef GRAD
#define GRAD bf16     // element of the table's gradient
#endif

// out[t] = table[ids[t] - vocab_start] or zeros; `vectors` = tokens * hidden / 8.
extern "C" __global__ void __launch_bounds__(256) embedding_fwd(const int* ids, const bf16* table, bf16* out,
        unsigned vectors, int vocab, int vocab_start, int hidden) {
    const u32 row_vectors = hidden / 8;        // vectors < 2^31 and the stride is small: no overflow below
    const uint4* in4 = reinterpret_cast<const uint4*>(table);
    uint4* out4 = reinterpret_cast<uint4*>(out);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
        const u32 t = i / row_vectors, c = i - t * row_vectors;
        const i64 row = (i64)ids[t] - vocab_start;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row >= 0 && row < vocab) v = in4[row * row_vectors + c];
        out4[i] = v;
    }
}

// Bit j is set where ids[first + j] == id and low <= first + j < high; first % 4 == 0, high <= tokens.
__device__ __forceinline__ u32 matches(const int* ids, int tokens, i64 first, int id, int low, int high) {
    if (first >= high || first + 4 <= low) return 0;
    int4 q;
    if (first + 4 <= tokens) {
        q = *reinterpret_cast<const int4*>(ids + first);
    } else {                                   // the last one to three ids: nothing is read behind them
        q.x = ids[first];
        q.y = first + 1 < tokens ? ids[first + 1] : 0;
        q.z = first + 2 < tokens ? ids[first + 2] : 0;
        q.w = 0;
    }
    const u32 equal = (u32)(q.x == id) | (u32)(q.y == id) << 1 | (u32)(q.z == id) << 2 | (u32)(q.w == id) << 3;
    u32 inside = 0;
    #pragma unroll
    for (int j = 0; j < 4; ++j) inside |= (u32)(first + j >= low && first + j < high) << j;
    return equal & inside;
}

// dtable[id] += the rows of dout of all tokens with that id, summed in fp32 in token order.
//
// Grid (tokens, column blocks). The block of an id's first token does the whole sum; the others leave. Each scans
// the ids: tokens^2 compares in all, 6.7e7 at 8192 tokens, against atomics that would sum in any order.
extern "C" __global__ void __launch_bounds__(THREADS) embedding_bwd(const int* ids, const bf16* dout, GRAD* dtable,
        int tokens, int vocab, int vocab_start, int hidden) {
    __shared__ int list[4 * THREADS];          // tokens of this tile with our id, ascending
    __shared__ int warp_total[32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int t = blockIdx.x, id = ids[t];
    const i64 row = (i64)id - vocab_start;
    if (row < 0 || row >= vocab) return;       // the whole block agrees

    u32 earlier = 0;
    for (i64 i = 4 * tid; i < t; i += 4 * THREADS) earlier |= matches(ids, tokens, i, id, 0, t);
    if (__syncthreads_or(earlier != 0)) return;

    const int column = (blockIdx.y * THREADS + tid) * 8;
    const bool valid = column < hidden;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (valid) load8(dout + (i64)t * hidden + column, sum);

    for (i64 base = (t + 1) & ~3; base < tokens; base += 4 * THREADS) {
        const i64 first = base + 4 * tid;
        const u32 found = matches(ids, tokens, first, id, t + 1, tokens);
        if (!__syncthreads_or(found != 0)) continue;
        // Positions in the list: inclusive sums over the lanes, then over the warps.
        const int count = __popc(found);
        int upto = count;
        #pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, upto, o);
            if (lane >= o) upto += other;
        }
        if (lane == 31) warp_total[warp] = upto;
        __syncthreads();
        int place = upto - count, total = 0;
        for (int w = 0; w < THREADS / 32; ++w) {
            if (w < warp) place += warp_total[w];
            total += warp_total[w];
        }
        #pragma unroll
        for (int j = 0; j < 4; ++j) if (found >> j & 1) list[place++] = (int)first + j;
        __syncthreads();
        // The barrier at the head of the next tile keeps `list` until all have read it.
        if (valid) {
            #pragma unroll 2
            for (int k = 0; k < total; ++k) {
                float x[8];
                load8(dout + (i64)list[k] * hidden + column, x);
                #pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += x[j];
            }
        }
    }
    if (valid) {
        GRAD* out = dtable + row * hidden + column;
        float old[8];
        load8(out, old);
        #pragma unroll
        for (int j = 0; j < 8; ++j) old[j] += sum[j];
        store8(out, old);
    }
}
