// Copies of a stand-in, in one launch: 16-byte vectors, four a thread in flight. blockIdx.y is a copy:
//   y < slots: x to slot y of out, both of slot_vectors;
//   beyond: piece (y - slots) % pieces of what is sent, to the one scratch that all pieces pass through. Nobody reads the
//   scratch, so that pieces may write it in any order.
extern "C" __global__ void __launch_bounds__(256) stand_in_copy(const unsigned char* x, unsigned char* out, long long slot_vectors, int slots, const unsigned char* sent, unsigned char* scratch, long long sent_vectors, long long piece_vectors, int pieces) {
    const int y = blockIdx.y;
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
    const i64 base = (i64)blockIdx.x * 1024 + threadIdx.x;
    uint4 v[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) if (base + i * 256 < vectors) v[i] = from[base + i * 256];
    #pragma unroll
    for (int i = 0; i < 4; ++i) if (base + i * 256 < vectors) to[base + i * 256] = v[i];
}
