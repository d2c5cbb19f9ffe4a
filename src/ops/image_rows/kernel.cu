// Rows of an image in place of, or added to, those of its tokens; and backward. Define: REPLACE. One block a row.

#ifndef REPLACE
#define REPLACE 1
#endif

// The image's row for row `row`, or -1. Chunks of a context-parallel rank as in rope/positions.rs.
__device__ __forceinline__ int image_row(int row, int seq, int start0, int len0, int start1, int first, int tokens) {
    const int i = row % seq;
    const int at = (i < len0 ? start0 + i : start1 + (i - len0)) - first;
    return at >= 0 && at < tokens ? row / seq * tokens + at : -1;
}
__device__ __forceinline__ void copy(bf16* to, const bf16* from, int hidden, bool zero) {
    const uint4 nothing = make_uint4(0, 0, 0, 0);
    for (int c = threadIdx.x; c < hidden / 8; c += blockDim.x)
        reinterpret_cast<uint4*>(to)[c] = zero ? nothing : reinterpret_cast<const uint4*>(from)[c];
}

extern "C" __global__ void __launch_bounds__(256) image_rows_fwd(const bf16* x, const bf16* image, bf16* out, int rows, int hidden,
    int seq, int start0, int len0, int start1, int len1, int first, int tokens) {
    const int row = blockIdx.x, i = image_row(row, seq, start0, len0, start1, first, tokens);
    const bf16 *from = x + (i64)row * hidden, *own = image + (i64)max(i, 0) * hidden;
    bf16* const to = out + (i64)row * hidden;
    if (i < 0) return copy(to, from, hidden, false);
#if REPLACE
    copy(to, own, hidden, false);
#else
    for (int c = threadIdx.x; c < hidden / 8; c += blockDim.x) {
        float a[8], b[8];
        load8(from + 8 * c, a);
        load8(own + 8 * c, b);
        #pragma unroll
        for (int e = 0; e < 8; ++e) a[e] += b[e];
        store8(to + 8 * c, a);
    }
#endif
}

// With REPLACE first a block for each row of dx, then one for each row of the images.
extern "C" __global__ void __launch_bounds__(256) image_rows_bwd(const bf16* dout, bf16* dx, bf16* dimage, int rows, int hidden,
    int seq, int start0, int len0, int start1, int len1, int first, int tokens) {
    int i = blockIdx.x;
#if REPLACE
    if (i < rows)
        return copy(dx + (i64)i * hidden, dout + (i64)i * hidden, hidden, image_row(i, seq, start0, len0, start1, first, tokens) >= 0);
    i -= rows;
#endif
    const int position = first + i % tokens;
    int local = -1;
    if (position >= start0 && position < start0 + len0) local = position - start0;
    else if (position >= start1 && position < start1 + len1) local = len0 + position - start1;
    const int row = i / tokens * seq + local;
    const bool here = local >= 0 && row < rows;
    copy(dimage + (i64)i * hidden, dout + (here ? (i64)row * hidden : 0), hidden, !here);
}
