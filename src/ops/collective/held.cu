// Stand-ins that last as long as their bytes would on the wire: few blocks, each copies its share and then waits for the
// clock. Blocks may start late on a busy device; each holds its multiprocessor for the whole time, as a channel does.

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void wait_until(u64 end) {
    if (threadIdx.x == 0) while ((i64)(end - nanoseconds()) > 0) { }
    __syncthreads();
}

// The copies of stand_in_copy (kernel.cu), `copies` of them, by all blocks together; then until `ns` have passed.
extern "C" __global__ void __launch_bounds__(512) stand_in_held(const unsigned char* x, unsigned char* out, long long slot_vectors, int slots, const unsigned char* sent, unsigned char* scratch, long long sent_vectors, long long piece_vectors, int pieces, int copies, long long ns) {
    const u64 end = nanoseconds() + (u64)ns;
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (int y = 0; y < copies; ++y) {
        const uint4* from;
        uint4* to;
        i64 vectors;
        if (y < slots) {
            from = reinterpret_cast<const uint4*>(x);
            to = reinterpret_cast<uint4*>(out) + y * slot_vectors;
            vectors = slot_vectors;
        } else {
            const i64 at = (i64)((y - slots) % pieces) * piece_vectors;
            from = reinterpret_cast<const uint4*>(sent) + at;
            to = reinterpret_cast<uint4*>(scratch);
            vectors = sent_vectors - at < piece_vectors ? sent_vectors - at : piece_vectors;
        }
        for (i64 base = blockIdx.x * (i64)blockDim.x + threadIdx.x; base < vectors; base += 4 * stride) {
            uint4 v[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) if (base + i * stride < vectors) v[i] = from[base + i * stride];
            #pragma unroll
            for (int i = 0; i < 4; ++i) if (base + i * stride < vectors) to[base + i * stride] = v[i];
        }
    }
    wait_until(end);
}

extern "C" __global__ void __launch_bounds__(512) stand_in_wait(long long ns) {
    wait_until(nanoseconds() + (u64)ns);
}
