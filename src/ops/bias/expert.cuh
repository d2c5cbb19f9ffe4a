// The expert that owns sorted row `row`: the last one whose rows begin at or before it. Call for rows below
// offsets[experts] alone; experts without rows begin where the next one does.
__device__ __forceinline__ int expert_of(const int* offsets, int experts, int row) {
    int low = 0, high = experts - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (offsets[middle] <= row) low = middle; else high = middle - 1;
    }
    return low;
}
