// What the executor itself needs of the device: first values, digests, and the gathering of a step's results.

// Element i lies in row i / row_len of a block of rows; its index in the whole model's tensor is
// first + row * global_row_len + column. src/device/cpu/storage.rs computes the same values.
template <typename T>
__device__ __forceinline__ void normals(T* out, i64 elements, i64 row_len, u64 first, u64 global_row_len, u64 key, float std) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements; i += (i64)gridDim.x * blockDim.x) {
        u64 g = first + (u64)(i / row_len) * global_row_len + (u64)(i % row_len);
        uint4 w = philox((u32)g, (u32)(g >> 32), 0u, 0u, (u32)key, (u32)(key >> 32));
        out[i] = Store<T>::of(__fmul_rn(normal_of(w), std));
    }
}
extern "C" __global__ void __launch_bounds__(256) normals_bf16(bf16* out, long long elements, long long row_len, unsigned long long first, unsigned long long global_row_len, unsigned long long key, float std) {
    normals(out, elements, row_len, first, global_row_len, key, std);
}
extern "C" __global__ void __launch_bounds__(256) normals_f32(float* out, long long elements, long long row_len, unsigned long long first, unsigned long long global_row_len, unsigned long long key, float std) {
    normals(out, elements, row_len, first, global_row_len, key, std);
}

extern "C" __global__ void __launch_bounds__(256) widen(const bf16* x, float* out, long long elements) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements; i += (i64)gridDim.x * blockDim.x) out[i] = to_f32(x[i]);
}

// Hash of raw bits, see src/device/digest.rs. A wrapping sum: the order of the additions does not matter.
__device__ __forceinline__ u64 mix(u32 bits, u64 index) {
    u64 z = (u64)bits + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
template <typename T>
__device__ __forceinline__ void digest(const T* x, i64 elements, u64* out) {
    u64 sum = 0;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements; i += (i64)gridDim.x * blockDim.x) sum += mix((u32)x[i], (u64)i);
    #pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if ((threadIdx.x & 31) == 0) atomicAdd(out, sum);
}
extern "C" __global__ void __launch_bounds__(256) digest8(const u8* x, long long elements, u64* out) { digest(x, elements, out); }
extern "C" __global__ void __launch_bounds__(256) digest16(const u16* x, long long elements, u64* out) { digest(x, elements, out); }
extern "C" __global__ void __launch_bounds__(256) digest32(const u32* x, long long elements, u64* out) { digest(x, elements, out); }

// One thread that does nothing for a while: to see that measuring finds a step that is longer by a known time.
extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while ((long long)(now - begun) < nanoseconds);
}

// Words that a library's products count in (counters.rs); parameters that are left over name one of them again.
extern "C" __global__ void zero_counters(u32* c0, u32* c1, u32* c2, u32* c3, u32* c4, u32* c5, u32* c6, u32* c7, u32* c8,
    u32* c9, u32* c10, u32* c11, u32* c12, u32* c13, u32* c14, u32* c15) {
    *c0 = 0u; *c1 = 0u; *c2 = 0u; *c3 = 0u; *c4 = 0u; *c5 = 0u; *c6 = 0u; *c7 = 0u;
    *c8 = 0u; *c9 = 0u; *c10 = 0u; *c11 = 0u; *c12 = 0u; *c13 = 0u; *c14 = 0u; *c15 = 0u;
}

// Loss, gradient norm and fault words of a step, from where they lie to pinned host memory.
extern "C" __global__ void gather_words(const u64* addresses, u32* out, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) out[i] = *reinterpret_cast<const u32*>(addresses[i]);
    __threadfence_system();
}
