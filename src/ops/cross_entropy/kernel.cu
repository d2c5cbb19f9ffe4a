// Softmax cross-entropy over rows of `vocab` bf16 logits; the gradient takes the logits' place.

#ifndef THREADS
#define THREADS 1024
#endif

// Running maximum and sum of exp(x - maximum). The start is finite, so that a logit of -inf adds 0, not NaN.
struct Softmax {
    float max = -3.4e38f, sum = 0.f;
    __device__ __forceinline__ void raise(float m) {
        if (m > max) { sum *= __expf(max - m); max = m; }
    }
    __device__ __forceinline__ void add(float x) { raise(x); sum += __expf(x - max); }
    __device__ __forceinline__ void add8(const float v[8]) {
        raise(fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), fmaxf(fmaxf(v[4], v[5]), fmaxf(v[6], v[7]))));
        float s = 0.f;
        #pragma unroll
        for (int j = 0; j < 8; ++j) s += __expf(v[j] - max);
        sum += s;
    }
};

__device__ __forceinline__ void unpack8(uint4 q, float v[8]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}
// exp(x - max) * scale of eight logits.
__device__ __forceinline__ uint4 gradient8(uint4 q, float max, float scale) {
    float v[8];
    unpack8(q, v);
    #pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __expf(v[j] - max) * scale;
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// One block a row. The row is `head` elements up to the next 16-byte boundary (none when vocab % 8 == 0), then
// vectors of eight, then `tail` elements. A first pass finds maximum and sum and keeps the first `kept` vectors
// in shared memory; the second writes the gradients, reading again only what was not kept, newest first, while
// it still lies in L2. Each thread reads back the vectors that it kept itself.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy(bf16* logits, const int* labels, float* loss,
        int vocab, int kept, float grad_scale) {
    extern __shared__ uint4 stash[];
    __shared__ float scratch[32];
    const int UNROLL = 4;                      // loads in flight a thread
    const int tid = threadIdx.x;
    bf16* row = logits + (i64)blockIdx.x * vocab;
    const int misaligned = (int)((u64)row & 15) / 2;
    const int head = min(misaligned ? 8 - misaligned : 0, vocab);
    const int vectors = (vocab - head) / 8;
    const int tail = vocab - head - 8 * vectors;
    uint4* body = reinterpret_cast<uint4*>(row + head);   // not read when vectors == 0
    bf16* end = row + head + 8 * vectors;
    kept = min(kept, vectors);

    const int label = labels[blockIdx.x];
    const bool labelled = label >= 0 && label < vocab;
    float target = 0.f;
    if (labelled && tid == 0) target = to_f32(row[label]);   // before any gradient overwrites it

    Softmax own;
    float edge = 0.f;                          // this thread's element outside the vectors: at most one of 14
    bf16* edge_at = 0;
    if (tid < head) edge_at = row + tid;
    else if (tid - head < tail) edge_at = end + (tid - head);
    if (edge_at) { edge = to_f32(*edge_at); own.add(edge); }

    for (int base = tid; base < vectors; base += UNROLL * THREADS) {
        uint4 q[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) if (base + u * THREADS < vectors) q[u] = body[base + u * THREADS];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = base + u * THREADS;
            if (i < vectors) {
                if (i < kept) stash[i] = q[u];
                float v[8];
                unpack8(q[u], v);
                own.add8(v);
            }
        }
    }
    const float max = block_max(own.max, scratch);
    const float sum = block_sum(own.sum * __expf(own.max - max), scratch);
    const float scale = grad_scale / sum;

    // Not kept: last read first. Index n counts from the end of the row.
    const int again = vectors - kept;
    for (int base = tid; base < again; base += UNROLL * THREADS) {
        uint4 q[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int n = base + u * THREADS;
            if (n < again) q[u] = body[vectors - 1 - n];
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int n = base + u * THREADS;
            if (n < again) body[vectors - 1 - n] = gradient8(q[u], max, scale);
        }
    }
    for (int i = tid; i < kept; i += THREADS) body[i] = gradient8(stash[i], max, scale);
    if (edge_at) *edge_at = to_bf16(__expf(edge - max) * scale);

    __syncthreads();                           // the label's element is written last
    if (tid == 0) {
        loss[blockIdx.x] = (max - target) + logf(sum);   // near 0 for a sure hit: no cancellation
        if (labelled) row[label] = to_bf16((__expf(target - max) / sum - 1.f) * grad_scale);
    }
}

// loss[0] += scale * sum of per_token. One block: the order is fixed.
extern "C" __global__ void __launch_bounds__(1024) loss_sum(const float* per_token, float* loss, int tokens, float scale) {
    __shared__ float scratch[32];
    float sum = 0.f;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) sum += per_token[t];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) loss[0] += scale * sum;
}
