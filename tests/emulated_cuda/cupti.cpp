// CUPTI's activity records of what the emulated driver ran: kernels, copies, memsets, and the numbers that the program
// gives to its calls. MBPERF_EMULATED_CUPTI=plain leaves those out, =lossy every tenth kernel.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <string>
#include <vector>

namespace {
enum { SUCCESS = 0, INVALID_PARAMETER = 1, MAX_LIMIT_REACHED = 12, INVALID_KIND = 21 };
enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, CONCURRENT_KERNEL = 10, EXTERNAL = 39, KINDS = 64 };

// As in CUDA 12.0 and later: fields that are not filled in are told by their sizes alone.
struct Kernel {
    uint32_t kind;
    uint8_t cache, shared_config;
    uint16_t registers;
    uint32_t partitioned[2];
    uint64_t start, end, completed;
    uint32_t device, context, stream;
    int32_t grid[3], block[3], static_shared, dynamic_shared;
    uint32_t local[2], correlation;
    int64_t grid_id;
    const char* name;
    void* reserved;
    uint64_t queued, submitted;
    uint8_t launch[4];
    uint32_t shared_executed;
    uint64_t node;
    uint32_t limit, graph;
    uint64_t rest[8];
};
struct Memory {   // copies and memsets have the same places
    uint32_t kind, how;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation, flags, pad;
    void* reserved;
    uint64_t node;
    uint32_t graph, channel, channel_type, pad2;
};
struct External { uint32_t kind, of; uint64_t id; uint32_t correlation, reserved; };
static_assert(sizeof(External) == 24 && sizeof(Memory) == 88, "sizes");

std::mutex lock;
bool enabled[KINDS];
std::vector<std::string> records;   // bytes of each
struct Number { uint32_t of; uint64_t id; };
std::vector<Number> numbers;
typedef void (*Requested)(uint8_t**, size_t*, size_t*);
typedef void (*Completed)(void*, uint32_t, uint8_t*, size_t, size_t);
Requested requested;
Completed completed;

template <class T> void keep(const T& record) { records.emplace_back((const char*)&record, sizeof record); }
size_t size_of(const uint8_t* record) {
    uint32_t kind;
    memcpy(&kind, record, 4);
    return kind == CONCURRENT_KERNEL ? sizeof(Kernel) : kind == EXTERNAL ? sizeof(External) : sizeof(Memory);
}

void called(uint64_t serial) {
    std::lock_guard<std::mutex> held(lock);
    const char* how = getenv("MBPERF_EMULATED_CUPTI");
    // Only calls that are recorded themselves have their number told.
    if (numbers.empty() || !enabled[EXTERNAL] || !(enabled[DRIVER] || enabled[RUNTIME]) || (how && !strcmp(how, "plain"))) return;
    External e = {EXTERNAL, numbers.back().of, numbers.back().id, (uint32_t)serial, 0};
    keep(e);
}
void ran(int kind, const char* name, const unsigned* grid, const unsigned* block, uint64_t serial, uint64_t node, void*, uint64_t start, uint64_t end) {
    std::lock_guard<std::mutex> held(lock);
    if (kind == 0) {
        if (!enabled[CONCURRENT_KERNEL]) return;
        static int seen;
        const char* how = getenv("MBPERF_EMULATED_CUPTI");
        if (how && !strcmp(how, "lossy") && ++seen % 10 == 0) return;
        Kernel k = {};
        k.kind = CONCURRENT_KERNEL;
        k.start = start; k.end = end; k.stream = 7; k.correlation = (uint32_t)serial; k.name = name; k.node = node;
        for (int i = 0; i < 3; ++i) { k.grid[i] = (int)grid[i]; k.block[i] = (int)block[i]; }
        keep(k);
        return;
    }
    const uint32_t of = kind == 1 ? MEMCPY : MEMSET;
    if (!enabled[of]) return;
    Memory m = {};
    m.kind = of; m.start = start; m.end = end; m.stream = 7; m.correlation = (uint32_t)serial; m.node = node;
    keep(m);
}
}  // namespace

extern "C" {
int cuptiGetVersion(uint32_t* v) { *v = 28; return SUCCESS; }
int cuptiActivityRegisterCallbacks(Requested r, Completed c) {
    requested = r;
    completed = c;
    auto on_call = (void (**)(uint64_t))dlsym(RTLD_DEFAULT, "emulated_called");
    auto on_run = (decltype(&ran)*)dlsym(RTLD_DEFAULT, "emulated_ran");
    if (!on_call || !on_run) return INVALID_PARAMETER;
    *on_call = called;
    *on_run = ran;
    return SUCCESS;
}
int cuptiActivityEnable(int kind) {
    if (kind <= 0 || kind >= KINDS) return INVALID_KIND;
    enabled[kind] = true;
    return SUCCESS;
}
int cuptiActivityDisable(int kind) {
    if (kind <= 0 || kind >= KINDS) return INVALID_KIND;
    enabled[kind] = false;
    return SUCCESS;
}
int cuptiActivityFlushAll(uint32_t) {
    std::lock_guard<std::mutex> held(lock);
    for (size_t at = 0; at < records.size();) {
        uint8_t* buffer = nullptr;
        size_t size = 0, most = 0, used = 0;
        requested(&buffer, &size, &most);
        // Small ones, so that there are several.
        size = size < (1 << 16) ? size : (1 << 16);
        for (; at < records.size() && used + records[at].size() <= size; used += records[at++].size())
            memcpy(buffer + used, records[at].data(), records[at].size());
        completed(nullptr, 0, buffer, size, used);
    }
    records.clear();
    return SUCCESS;
}
int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, uint8_t** record) {
    uint8_t* next = *record ? *record + size_of(*record) : buffer;
    if (next >= buffer + valid) return MAX_LIMIT_REACHED;
    *record = next;
    return SUCCESS;
}
int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* n) { *n = 0; return SUCCESS; }
int cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) {
    std::lock_guard<std::mutex> held(lock);
    numbers.push_back({kind, id});
    return SUCCESS;
}
int cuptiActivityPopExternalCorrelationId(uint32_t, uint64_t* last) {
    std::lock_guard<std::mutex> held(lock);
    if (numbers.empty()) return INVALID_PARAMETER;
    *last = numbers.back().id;
    numbers.pop_back();
    return SUCCESS;
}
}
