// Modulation of a sequence's rows: a table of the layer plus the sequence's time embedding. Defines: TIME_SLOTS (slots of a
// sequence's time embedding; 1: one for all), TIME_FIRST (the slot of the table's first).
#define SHIFT 0
#define SCALE 1
#define GATE 2

#ifdef TIME_SLOTS
__device__ __forceinline__ i64 time_row(i64 sequence, int slot) {
    return sequence * TIME_SLOTS + (TIME_SLOTS == 1 ? 0 : TIME_FIRST + slot);
}
// one + table + time of a slot, eight columns from 8 c on.
__device__ __forceinline__ void slot8(const bf16* table, const bf16* time, i64 sequence, int slot, float one, int hidden, int c, float out[8]) {
    float t[8];
    load8(table + (i64)slot * hidden + 8 * c, out);
    load8(time + time_row(sequence, slot) * hidden + 8 * c, t);
    #pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = one + out[e] + t[e];
}
#endif
