// Stable counting sort of (token, choice) pairs by bin. Constants: BINS (1..512), PADDED and BY_POSITION (0 or 1, of
// moe_select). Blocks of 1024 threads.
//
// 1. moe_histogram: counts of each block of 1024 pairs.
// 2. moe_scatter: every block sums the counts before its own, ranks its pairs, writes their rows.
// 3. moe_select (capacity only): one block a bin keeps the pairs of highest probability, or the first ones.
// All atomics are on integers in sums that do not depend on order.

#define PAIRS 1024
#define WARPS (PAIRS / 32)
#define FULL 0xffffffffu

// Bin of a pair, -1 outside the bins or beyond the pairs.
__device__ __forceinline__ int bin_of(const int* index, int pair, int pairs, int modulo) {
    if (pair >= pairs) return -1;
    const int e = index[pair];
    if (e < 0) return -1;
    if (modulo) return e % BINS;
    return e < BINS ? e : -1;
}

// Exclusive scan over the block of one value a thread; `total` is the sum. `scratch`: 32 ints.
__device__ __forceinline__ int block_scan(int v, int* scratch, int* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int x = v;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const int y = __shfl_up_sync(FULL, x, o);
        if (lane >= o) x += y;
    }
    __syncthreads();  // scratch may still be read from an earlier call
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    int before = 0, sum = 0;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int s = scratch[w];
        if (w < warp) before += s;
        sum += s;
    }
    *total = sum;
    return before + x - v;
}

// index [pairs] -> counts [blocks, BINS]; src [rows] = -1.
extern "C" __global__ void __launch_bounds__(PAIRS) moe_histogram(
    const int* index, int* counts, int* src, int pairs, int rows, int modulo) {
    __shared__ int hist[BINS];
    for (int b = threadIdx.x; b < BINS; b += PAIRS) hist[b] = 0;
    __syncthreads();
    const int b = bin_of(index, blockIdx.x * PAIRS + threadIdx.x, pairs, modulo);
    if (b >= 0) atomicAdd(hist + b, 1);
    for (int r = blockIdx.x * PAIRS + threadIdx.x; r < rows; r += gridDim.x * PAIRS) src[r] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += PAIRS) counts[(i64)blockIdx.x * BINS + i] = hist[i];
}

// index, counts -> offsets [BINS+1], dest [pairs], src [limit]. Rows from `limit` on are dropped. Block 0 writes the
// micro-batch's line of `tally` [micro_batches, 3]: pairs, those without a row, rows without a pair. `capacity`: -1 none.
extern "C" __global__ void __launch_bounds__(PAIRS) moe_scatter(
    const int* index, const int* counts, const u32* words, int* offsets, int* dest, int* src, int* fault, int* tally,
    int pairs, int limit, int modulo, int capacity, u32 stride, u32 micro_batches) {
    __shared__ int before[BINS], all[BINS];   // pairs of the bin in earlier blocks, in all blocks
    __shared__ u16 ranks[WARPS][BINS];        // counts of each warp, then pairs of the bin in earlier warps
    __shared__ int scratch[32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    for (int b = tid; b < BINS; b += PAIRS) { before[b] = 0; all[b] = 0; }
    for (int i = tid; i < WARPS * BINS; i += PAIRS) (&ranks[0][0])[i] = 0;
    __syncthreads();

    // Threads p*BINS .. p*BINS+BINS-1 take blocks p, p+parts, ...
    constexpr int parts = PAIRS / BINS;
    if (tid < parts * BINS) {
        const int b = tid % BINS;
        int mine = 0, sum = 0;
        #pragma unroll 4
        for (int k = tid / BINS; k < gridDim.x; k += parts) {
            const int c = counts[(i64)k * BINS + b];
            sum += c;
            mine += k < blockIdx.x ? c : 0;
        }
        atomicAdd(before + b, mine);
        atomicAdd(all + b, sum);
    }

    // Rank within the warp: equal bins in lower lanes.
    const int pair = blockIdx.x * PAIRS + tid;
    const int b = bin_of(index, pair, pairs, modulo);
    const u32 same = __match_any_sync(FULL, b);
    const int in_warp = __popc(same & ((1u << lane) - 1u));
    if (b >= 0 && in_warp == 0) ranks[warp][b] = (u16)__popc(same);
    __syncthreads();

    int total;
    const int first = block_scan(tid < BINS ? all[tid] : 0, scratch, &total);
    if (tid < BINS) {
        before[tid] += first;  // from here: row of this block's first pair of the bin
        int sum = 0;
        #pragma unroll 8
        for (int w = 0; w < WARPS; ++w) {
            const int c = ranks[w][tid];
            ranks[w][tid] = (u16)sum;
            sum += c;
        }
        if (blockIdx.x == 0) offsets[tid] = min(first, limit);
    }
    if (blockIdx.x == 0) {
        int kept = min(total, limit);
        if (capacity >= 0) block_scan(tid < BINS ? min(all[tid], capacity) : 0, scratch, &kept);
        if (tid == 0) {
            offsets[BINS] = min(total, limit);
            if (total > limit) fault[0] = 1;
            int* line = tally + 3 * (words[WORD_MICRO_BATCH] / stride % micro_batches);
            line[0] = total;
            line[1] = total - kept;
            line[2] = PADDED ? BINS * capacity - kept : 0;
        }
    }
    __syncthreads();

    if (pair < pairs) {
        int row = -1;
        if (b >= 0) {
            row = before[b] + ranks[warp][b] + in_warp;
            if (row < limit) src[row] = pair;
            else row = -1;
        }
        dest[pair] = row;
    }
}

// probs, pairs sorted by bin -> offsets, dest, src with at most `capacity` rows a bin. One block a bin.
//
// The capacity-th largest key is found by four passes of 256-way counting: O(pairs of the bin), some 10 us for
// 4096. Keys: float bits in an order-preserving form.
extern "C" __global__ void __launch_bounds__(PAIRS, 1) moe_select(
    const float* probs, const int* bounds, const int* sorted, int* offsets, int* dest, int* src, int capacity) {
    __shared__ int digits[256];
    __shared__ int scratch[32];
    __shared__ u32 found_digit;
    __shared__ int found_above;
    const int bin = blockIdx.x, tid = threadIdx.x;
    const int begin = bounds[bin], n = bounds[bin + 1] - begin;
    const int* mine = sorted + begin;
    auto key_of = [&](int pair) {
#if BY_POSITION
        return 1u;  // all equal: the first ones are kept
#endif
        const u32 bits = __float_as_uint(probs[pair]);
        return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
    };

    u32 cut = 0u;      // smallest key kept
    int equals = n;    // how many pairs with that very key are kept
    if (n > capacity && capacity > 0) {
        int need = capacity;  // still to be kept among keys whose upper digits equal those of `cut`
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int d = tid; d < 256; d += PAIRS) digits[d] = 0;
            __syncthreads();
            for (int i = tid; i < n; i += PAIRS) {
                const u32 key = key_of(mine[i]);
                // Shifting by 32 is undefined: in the first pass every key takes part.
                if (shift == 24 || (key >> (shift + 8)) == (cut >> (shift + 8)))
                    atomicAdd(digits + ((key >> shift) & 255u), 1);
            }
            __syncthreads();
            // Thread d looks at digit 255-d: the scan counts the larger digits.
            int total;
            const int c = tid < 256 ? digits[255 - tid] : 0;
            const int above = block_scan(c, scratch, &total);
            if (tid < 256 && above < need && above + c >= need) { found_digit = 255 - tid; found_above = above; }
            __syncthreads();
            cut |= found_digit << shift;
            need -= found_above;
            __syncthreads();
        }
        equals = need;
    }

#if PADDED
    const int first = bin * capacity;
#else
    int first;
    block_scan(tid < bin ? min(bounds[tid + 1] - bounds[tid], capacity) : 0, scratch, &first);
#endif

    // Kept pairs in order: those above the cut, and the first `equals` at the cut.
    int kept_before = 0, equal_before = 0;
    for (int base = 0; base < n; base += PAIRS) {
        const int i = base + tid;
        const int pair = i < n ? mine[i] : -1;
        const u32 key = pair >= 0 ? key_of(pair) : 0u;
        const bool equal = pair >= 0 && key == cut;
        int equal_total, kept_total;
        const int equal_rank = equal_before + block_scan(equal, scratch, &equal_total);
        const bool kept = capacity > 0 && pair >= 0 && (key > cut || (equal && equal_rank < equals));
        const int rank = kept_before + block_scan(kept, scratch, &kept_total);
        if (pair >= 0) {
            const int row = kept ? first + rank : -1;
            dest[pair] = row;
            if (kept) src[row] = pair;
        }
        equal_before += equal_total;
        kept_before += kept_total;
    }
    if (tid == 0) {
        offsets[bin] = first;
        if (bin == BINS - 1) offsets[BINS] = first + (PADDED ? capacity : kept_before);
    }
}
