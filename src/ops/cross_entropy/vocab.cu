// Cross-entropy over columns that tensor ranks share: one block a token. `start` is the id of this rank's first column.

#define THREADS 512
#define STATS 3

// A row is up to 7 elements to the next 16-byte boundary, then vectors of eight, then up to 7.
struct Row {
    bf16* at;
    int head, vectors, tail;
    __device__ __forceinline__ Row(bf16* logits, int vocab) {
        at = logits + (i64)blockIdx.x * vocab;
        const int misaligned = (int)((u64)at & 15) / 2;
        head = min(misaligned ? 8 - misaligned : 0, vocab);
        vectors = (vocab - head) / 8;
        tail = vocab - head - 8 * vectors;
    }
    __device__ __forceinline__ uint4* body() const { return reinterpret_cast<uint4*>(at + head); }
    // The element outside the vectors that thread `tid` has, or null.
    __device__ __forceinline__ bf16* edge(int tid) const {
        if (tid < head) return at + tid;
        return tid - head < tail ? at + head + 8 * vectors + (tid - head) : 0;
    }
};

__device__ __forceinline__ void unpack8(uint4 q, float v[8]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}

// logits [tokens, vocab], labels [tokens] -> stats [tokens, 3]: maximum, sum of exp(x - maximum), the label's logit or 0.
extern "C" __global__ void __launch_bounds__(THREADS) vocab_stats(bf16* logits, const int* labels, float* stats,
        int vocab, int start) {
    __shared__ float scratch[32];
    const int tid = threadIdx.x;
    const Row row(logits, vocab);
    const uint4* body = row.body();
    float max = -3.4e38f, sum = 0.f;
    const bf16* edge = row.edge(tid);
    if (edge) { max = to_f32(*edge); sum = 1.f; }
    for (int i = tid; i < row.vectors; i += THREADS) {
        float v[8];
        unpack8(body[i], v);
        float m = max;
        #pragma unroll
        for (int j = 0; j < 8; ++j) m = fmaxf(m, v[j]);
        if (m > max) { sum *= __expf(max - m); max = m; }
        #pragma unroll
        for (int j = 0; j < 8; ++j) sum += __expf(v[j] - max);
    }
    const float top = block_max(max, scratch);
    const float all = block_sum(sum * __expf(max - top), scratch);
    if (tid == 0) {
        const int label = labels[blockIdx.x] - start;
        float* out = stats + (i64)blockIdx.x * STATS;
        out[0] = top;
        out[1] = all;
        out[2] = label >= 0 && label < vocab ? to_f32(row.at[label]) : 0.f;
    }
}

// stats [ranks, tokens, 3] of all ranks; the logits become their gradient, loss [tokens].
extern "C" __global__ void __launch_bounds__(THREADS) vocab_cross_entropy(bf16* logits, const int* labels,
        const float* stats, float* loss, int tokens, int vocab, int start, int ranks, float grad_scale) {
    const int tid = threadIdx.x;
    const Row row(logits, vocab);
    uint4* body = row.body();
    float max = -3.4e38f, sum = 0.f, target = 0.f;
    for (int r = 0; r < ranks; ++r) max = fmaxf(max, stats[((i64)r * tokens + blockIdx.x) * STATS]);
    for (int r = 0; r < ranks; ++r) {
        const float* s = stats + ((i64)r * tokens + blockIdx.x) * STATS;
        sum += s[1] * __expf(s[0] - max);
        target += s[2];
    }
    const float scale = grad_scale / sum;
    const int label = labels[blockIdx.x] - start;
    const bool here = label >= 0 && label < vocab;
    for (int i = tid; i < row.vectors; i += THREADS) {
        float v[8];
        unpack8(body[i], v);
        #pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __expf(v[j] - max) * scale;
        body[i] = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    bf16* edge = row.edge(tid);
    if (edge) *edge = to_bf16(__expf(to_f32(*edge) - max) * scale);
    __syncthreads();  // the label's element is written last
    if (tid == 0) {
        loss[blockIdx.x] = (max - target) + logf(sum);
        if (here) row.at[label] = to_bf16((__expf(target - max) / sum - 1.f) * grad_scale);
    }
}
