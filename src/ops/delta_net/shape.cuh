// What all kernels of the gated delta rule share. Defines: CHUNK tokens of a chunk (Q), KEY_DIM (K), VALUE_DIM (V), NORM_EPS.
//
// Notation, per sequence and value head, inside one chunk (mod.rs): c_t the running sum of g (kept in units of ln 2, so
// that decays are exp2), c_Q the chunk's whole sum, S the state [V, K] at its start, dS the gradient of that at its end.
// q and k stay as the convolution wrote them: rq_t (with 1/sqrt(K)) and rk_t, by which they are scaled to length 1, enter
// as factors of rows and columns.
//
// c and beta lie in workspace as f32 [batch, value heads, padded], rq and rk as [batch, key heads, padded], padded =
// chunks * CHUNK. Past the sequence g and beta are 0 and every tile row is filled with zeros, so that tails need no other
// care. T and the masked q k^T: bf16 [batch, chunks, value heads, Q, Q], zero above the diagonal.

// Shapes, as every kernel's last parameters.
struct Shape {
    int seq, key_heads, value_heads, chunks;
    __device__ __forceinline__ int key_width() const { return key_heads * KEY_DIM; }
    __device__ __forceinline__ int value_width() const { return value_heads * VALUE_DIM; }
    __device__ __forceinline__ int width() const { return 2 * key_width() + value_width(); }   // of a row of qkv
    __device__ __forceinline__ int group() const { return value_heads / key_heads; }
    __device__ __forceinline__ i64 series(int b, int h) const { return ((i64)b * value_heads + h) * chunks * CHUNK; }
    __device__ __forceinline__ i64 key_series(int b, int kh) const { return ((i64)b * key_heads + kh) * chunks * CHUNK; }
    __device__ __forceinline__ i64 item(int b, int c, int h) const { return ((i64)b * chunks + c) * value_heads + h; }
};

// Inclusive prefix sum over a warp.
__device__ __forceinline__ float warp_scan(float x) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const float y = __shfl_up_sync(0xffffffffu, x, o);
        if (lane >= o) x += y;
    }
    return x;
}
