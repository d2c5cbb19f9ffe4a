// Dropout: a thread handles 8 elements, which two draws of four words cover. The mask is not stored.

// Factors (0 or scale) of elements 8*i .. 8*i+7.
__device__ __forceinline__ void factors8(const u32* words, u32 seed_offset, u32 draw, i64 i, float p, float scale, float f[8]) {
    uint4 a = draw4(words, seed_offset, draw, (u32)(2 * i)), b = draw4(words, seed_offset, draw, (u32)(2 * i + 1));
    f[0] = unit(a.x) >= p ? scale : 0.f; f[1] = unit(a.y) >= p ? scale : 0.f;
    f[2] = unit(a.z) >= p ? scale : 0.f; f[3] = unit(a.w) >= p ? scale : 0.f;
    f[4] = unit(b.x) >= p ? scale : 0.f; f[5] = unit(b.y) >= p ? scale : 0.f;
    f[6] = unit(b.z) >= p ? scale : 0.f; f[7] = unit(b.w) >= p ? scale : 0.f;
}

// out[len] = residual[len] + drop(x[len])
extern "C" __global__ void __launch_bounds__(256) dropout_add_fwd(const bf16* x, const bf16* residual, const u32* words, bf16* out,
    long long len, unsigned int seed_offset, unsigned int draw, float p, float scale) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * i >= len) return;
    float a[8], r[8], f[8];
    load8(x + 8 * i, a);
    load8(residual + 8 * i, r);
    factors8(words, seed_offset, draw, i, p, scale, f);
    #pragma unroll
    for (int e = 0; e < 8; ++e) r[e] = fmaf(a[e], f[e], r[e]);
    store8(out + 8 * i, r);
}

// dx[len] = drop(dout[len])
extern "C" __global__ void __launch_bounds__(256) dropout_bwd(const bf16* dout, const u32* words, bf16* dx,
    long long len, unsigned int seed_offset, unsigned int draw, float p, float scale) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * i >= len) return;
    float a[8], f[8];
    load8(dout + 8 * i, a);
    factors8(words, seed_offset, draw, i, p, scale, f);
    #pragma unroll
    for (int e = 0; e < 8; ++e) a[e] *= f[e];
    store8(dx + 8 * i, a);
}
