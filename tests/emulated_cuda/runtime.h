// What a compiled kernel module, the block scheduler inside it (runtime.cpp) and the driver (driver.cpp) agree on.
#pragma once

// Largest dynamic shared memory of a block, bytes: that of compute capability 9.0 (CUDA programming guide, "Technical
// Specifications per Compute Capability": 227 KB), so that kernels which need it are run too. 8.0 has 163 KB:
// MBPERF_EMULATED_SHARED_KIB=163 shows what does not fit there.
#define EMU_SHARED_LIMIT (227 * 1024)
#define EMU_MAX_THREADS 1024
// Stack of one thread of a block, bytes.
#define EMU_STACK_BYTES (64 * 1024)

// Codes of the driver API for what a kernel can do wrong.
enum { EMU_ILLEGAL_ADDRESS = 700, EMU_MISALIGNED = 716, EMU_LAUNCH_FAILED = 719 };

struct EmuKernel {
    const char* name;
    void (*invoke)(void** args);   // runs one thread
    int count;                     // parameters
    const unsigned* sizes;         // bytes of each
    unsigned max_threads;          // of __launch_bounds__
};

// One worker's share of a launch: blocks are taken from `next` until none is left or one failed.
struct EmuLaunch {
    const EmuKernel* kernel;
    void** args;
    unsigned grid[3], block[3], shared_bytes;
    unsigned long long seed;       // order of threads; 0: ascending
    unsigned* next;                // next block, shared by the workers
    int* failed;                   // first failure's code, shared by the workers
    char* message;                 // of the failure, EMU_MESSAGE bytes
    char* stacks;                  // EMU_MAX_THREADS * EMU_STACK_BYTES, this worker's own
    const char* (*explain)(void* address);   // names the allocation near an address
};
enum { EMU_MESSAGE = 1024 };

extern "C" {
// Exported by every module.
const EmuKernel* emu_kernels(int* count);
void emu_run(EmuLaunch* launch);
// Exported by the driver: work of a library as a kernel of `grid` blocks; `run` is called once a block.
int emulated_host_kernel(void* stream, const char* name, unsigned grid, unsigned block, void (*run)(const void* params, unsigned block), const void* params, unsigned long bytes);
}
