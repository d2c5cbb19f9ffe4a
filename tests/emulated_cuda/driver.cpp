// A CUDA driver for tests that runs kernels on the host: an A100-like device (compute capability 8.0) whose memory is
// host memory. Work is queued by stream and carried out when something waits for it, in an order that streams, events
// and graph edges allow: the order of issue, or with MBPERF_EMULATED_SEED=n (n > 0) a shuffled one. Each allocation
// ends at a page that cannot be touched. A fault in a kernel is printed and sticks, as on a GPU.
#include "runtime.h"
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

// Set by an emulated CUPTI: a call of the driver that puts work on a stream, and what ran.
extern "C" {
void (*emulated_called)(uint64_t serial);
void (*emulated_ran)(int kind, const char* name, const unsigned* grid, const unsigned* block, uint64_t serial, uint64_t node, void* stream, uint64_t start_ns, uint64_t end_ns);
}

namespace {
enum Result {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_SUPPORTED = 801, INVALID_IMAGE = 200, NOT_FOUND = 500,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, NOT_READY = 600
};
typedef uint64_t Address;

int number(const char* name, int otherwise) { const char* v = getenv(name); return v && *v ? atoi(v) : otherwise; }
double now_ms() { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }

std::recursive_mutex everything;
typedef std::lock_guard<std::recursive_mutex> Lock;
int sticky;   // a fault; every later call gives it
uint64_t seed() { static const uint64_t s = (uint64_t)number("MBPERF_EMULATED_SEED", 0); return s; }
uint64_t random_state = 0x9E3779B97F4A7C15ull;
unsigned random_below(unsigned n) {
    random_state ^= random_state << 13; random_state ^= random_state >> 7; random_state ^= random_state << 17;
    return (unsigned)((random_state >> 11) % n);
}

// ---- memory: [head, head + bytes) ends at a page without access; what lies between `bytes` and it is checked ----
struct Block { char* map; size_t mapped; char* head; size_t bytes; };
constexpr size_t PAGE = 4096, ALIGN = 256;    // cuMemAlloc gives at least 256-byte alignment
constexpr size_t TOTAL = (size_t)8 << 30;
constexpr unsigned char FRESH = 0xff, EDGE = 0xA5;
std::map<Address, Block> blocks;
size_t used;

std::string explain_address(Address a) {
    char text[160];
    auto next = blocks.upper_bound(a);
    if (next != blocks.begin()) {
        const Block& b = std::prev(next)->second;
        const Address end = (Address)b.head + b.bytes;
        if (a < end + (1 << 20)) {
            snprintf(text, sizeof text, "%lld bytes past the end of an allocation of %zu bytes", (long long)(a - end), b.bytes);
            return text;
        }
    }
    if (next != blocks.end() && next->first - a < (1 << 20)) {
        snprintf(text, sizeof text, "%llu bytes before an allocation of %zu bytes", (unsigned long long)(next->first - a), next->second.bytes);
        return text;
    }
    return "far from every allocation";
}
const char* explain(void* address) {
    static thread_local char text[160];
    snprintf(text, sizeof text, "%s", explain_address((Address)address).c_str());
    return text;
}
bool edge_whole(const Block& b) {
    for (const char* p = b.head + b.bytes; p < b.map + b.mapped - PAGE; ++p)
        if ((unsigned char)*p != EDGE) {
            fprintf(stderr, "emulated CUDA: something wrote %zu bytes past the end of an allocation of %zu bytes\n", (size_t)(p - b.head) - b.bytes, b.bytes);
            return false;
        }
    return true;
}
int allocate(Address* out, size_t bytes) {
    if (!bytes) return INVALID_VALUE;
    const size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN, pages = (rounded + PAGE - 1) / PAGE * PAGE;
    if (rounded > TOTAL - used) return OUT_OF_MEMORY;
    Block b;
    b.mapped = pages + 2 * PAGE;
    void* map = mmap(nullptr, b.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect((char*)map + PAGE, pages, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    b.map = (char*)map;
    b.head = b.map + PAGE + pages - rounded;
    b.bytes = bytes;
    // Fresh device memory holds anything: NaN shows best who reads it. Large ones are left to the kernel's zero pages.
    if (bytes <= (1 << 20)) memset(b.head, FRESH, bytes);
    memset(b.head + bytes, EDGE, rounded - bytes);
    blocks[(Address)b.head] = b;
    used += rounded;
    *out = (Address)b.head;
    return SUCCESS;
}

// ---- modules and kernels -------------------------------------------------------------------------------
typedef void (*Run)(EmuLaunch*);
typedef void (*Signal)(int, siginfo_t*);
struct Copy { void* handle; const EmuKernel* list; int count; Run run; Signal signal; unsigned fixed_shared; };
struct Module { std::string image; std::vector<Copy> copies; };   // one a worker: see runtime.cpp
struct Function {
    Module* module; int place; std::string name; const EmuKernel* kernel; unsigned allowed_shared;
    void (*host)(const void*, unsigned);   // of a library, instead of a kernel
    unsigned long host_bytes = 0;           // of its parameters
};

bool open_copy(Module& m, size_t worker) {
    while (m.copies.size() <= worker) {
        // A file of its own each time: the loader knows a library by its name and inode.
        const char* tmp = getenv("TMPDIR");
        std::string path = std::string(tmp ? tmp : "/tmp") + "/mbperf-emulated-XXXXXX";
        const int fd = mkstemp(&path[0]);
        if (fd < 0) return false;
        bool good = true;
        for (size_t at = 0; good && at < m.image.size();) {
            const ssize_t n = write(fd, m.image.data() + at, m.image.size() - at);
            good = n > 0;
            at += good ? n : 0;
        }
        close(fd);
        Copy c = {};
        if (good) c.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!c.handle) fprintf(stderr, "emulated CUDA: %s\n", good ? dlerror() : "cannot write a module to the temporary folder");
        unlink(path.c_str());
        if (!c.handle) return false;
        typedef const EmuKernel* (*Kernels)(int*);
        const Kernels kernels = (Kernels)dlsym(c.handle, "emu_kernels");
        c.run = (Run)dlsym(c.handle, "emu_run");
        c.signal = (Signal)dlsym(c.handle, "emu_signal");
        // Of all kernels of the source together: too much for one of several, never too little.
        const auto fixed = (unsigned (*)())dlsym(c.handle, "emu_fixed_shared");
        c.fixed_shared = fixed ? fixed() : 0;
        if (!kernels || !c.run || !c.signal) return false;
        c.list = kernels(&c.count);
        m.copies.push_back(c);
    }
    return true;
}

// ---- running a launch ----------------------------------------------------------------------------------
struct Config { unsigned grid[3], block[3], shared; };

thread_local Signal current_signal;
struct sigaction before[NSIG];
void on_signal(int number, siginfo_t* info, void* context) {
    if (current_signal) current_signal(number, info);   // does not come back
    const struct sigaction& old = before[number];
    if (old.sa_flags & SA_SIGINFO) old.sa_sigaction(number, info, context);
    else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) old.sa_handler(number);
    else { signal(number, SIG_DFL); raise(number); }
}
void own_signal_stack() {
    stack_t now;
    if (sigaltstack(nullptr, &now) == 0 && !(now.ss_flags & SS_DISABLE)) return;
    stack_t s = {};
    s.ss_size = 64 * 1024;
    s.ss_sp = malloc(s.ss_size);
    sigaltstack(&s, nullptr);
}
void catch_signals() {
    struct sigaction a = {};
    a.sa_sigaction = on_signal;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int s : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(s, &a, &before[s]);
}
char* own_stacks() {
    static thread_local char* stacks = nullptr;
    if (!stacks) {
        void* p = mmap(nullptr, (size_t)EMU_MAX_THREADS * EMU_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stacks = p == MAP_FAILED ? nullptr : (char*)p;
    }
    return stacks;
}

struct Share { const Copy* copy; EmuLaunch launch; void (*host)(const void*, unsigned); const void* params; };
void work(Share& s) {
    own_signal_stack();
    if (s.host) {
        const unsigned count = s.launch.grid[0];
        for (unsigned b; (b = __atomic_fetch_add(s.launch.next, 1, __ATOMIC_RELAXED)) < count;) s.host(s.params, b);
        return;
    }
    s.launch.stacks = own_stacks();
    if (!s.launch.stacks) { *s.launch.failed = OUT_OF_MEMORY; return; }
    current_signal = s.copy->signal;
    s.copy->run(&s.launch);
    current_signal = nullptr;
}

// Helpers of the thread that waits: each runs the share it is given.
class Pool {
    std::mutex lock;
    std::condition_variable wake, done;
    std::vector<Share*> shares;
    std::vector<std::thread> threads;
    size_t running = 0;
    bool ending = false;
    void loop(size_t i) {
        std::unique_lock<std::mutex> held(lock);
        while (true) {
            wake.wait(held, [&] { return ending || shares[i]; });
            if (ending) return;
            Share* s = shares[i];
            held.unlock();
            work(*s);
            held.lock();
            shares[i] = nullptr;
            if (--running == 0) done.notify_all();
        }
    }
public:
    explicit Pool(size_t helpers) : shares(helpers) {
        for (size_t i = 0; i < helpers; ++i) threads.emplace_back([this, i] { loop(i); });
    }
    ~Pool() {
        { std::lock_guard<std::mutex> held(lock); ending = true; }
        wake.notify_all();
        for (auto& t : threads) t.join();
    }
    void run(std::vector<Share>& all) {   // the first one on this thread
        {
            std::lock_guard<std::mutex> held(lock);
            for (size_t i = 1; i < all.size(); ++i) shares[i - 1] = &all[i];
            running = all.size() - 1;
        }
        if (all.size() > 1) wake.notify_all();
        work(all[0]);
        std::unique_lock<std::mutex> held(lock);
        done.wait(held, [&] { return running == 0; });
    }
};
size_t workers() {
    static const size_t n = (size_t)std::max(1, number("MBPERF_EMULATED_THREADS", (int)std::min(4u, std::max(1u, std::thread::hardware_concurrency()))));
    return n;
}

void run_kernel(Function* f, const Config& c, std::vector<char>& params) {
    static Pool pool(workers() - 1);
    const size_t total = (size_t)c.grid[0] * c.grid[1] * c.grid[2];
    unsigned next = 0;
    int failed = 0;
    char message[EMU_MESSAGE] = "";
    std::vector<void*> args;
    if (!f->host)
        for (size_t i = 0, at = 0; i < (size_t)f->kernel->count; at += 8, ++i) args.push_back(&params[at]);
    std::vector<Share> shares(std::min(workers(), total));
    static uint64_t launches = 0;
    ++launches;
    for (size_t i = 0; i < shares.size(); ++i) {
        Share& s = shares[i];
        EmuLaunch& l = s.launch;
        memcpy(l.grid, c.grid, sizeof l.grid);
        memcpy(l.block, c.block, sizeof l.block);
        l.shared_bytes = c.shared;
        l.args = args.data();
        l.seed = seed();
        l.next = &next;
        l.failed = &failed;
        l.message = message;
        l.explain = explain;
        s.host = f->host;
        s.params = params.data();
        if (!f->host) {
            if (!open_copy(*f->module, i)) { failed = INVALID_IMAGE; break; }
        }
    }
    if (!failed) {
        if (!f->host)
            for (size_t i = 0; i < shares.size(); ++i) {
                shares[i].copy = &f->module->copies[i];
                shares[i].launch.kernel = &shares[i].copy->list[f->place];
            }
        pool.run(shares);
    }
    if (failed && !sticky) {
        sticky = failed;
        fprintf(stderr, "emulated CUDA: %s\n", message);
    }
}

// ---- work, streams, events, graphs -----------------------------------------------------------------------
struct Event { bool timed; struct Graph* capture = nullptr; std::vector<int> captured; uint64_t recorded = 0, done = 0; double ms = 0; };
struct Node {
    enum Kind { KERNEL = 0, COPY = 1, SET = 2 } kind;       // as CUgraphNodeType
    Function* f = nullptr;
    Config config = {};
    std::vector<char> params;
    std::vector<void*> pointers;                             // to each, for who asks
    Address dst = 0, src = 0;
    size_t bytes = 0;
    unsigned value = 0, width = 1;
    std::vector<int> after;                                  // places in the graph
};
struct Graph { std::vector<std::unique_ptr<Node>> nodes; struct Stream* origin = nullptr; bool broken = false; };
struct Instance { std::vector<Node> nodes; size_t cost; uint64_t id; };
struct Task {
    enum Kind { NODE, GRAPH, RECORD, WAIT } kind;
    uint64_t serial;
    Node node;
    Instance* graph = nullptr;
    Event* event = nullptr;
    uint64_t target = 0;
};
uint64_t ran_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
struct Stream { std::deque<Task> tasks; Graph* capture = nullptr; std::vector<int> last; };
std::set<Stream*> streams;
uint64_t serials;

// The task that is carried out, for whoever records (cupti.cpp).
uint64_t current_serial, current_node, instances;
Stream* current_stream;

void carry_out_unseen(Node& n) {
    switch (n.kind) {
    case Node::KERNEL: run_kernel(n.f, n.config, n.params); break;
    case Node::COPY: memmove((void*)n.dst, (void*)n.src, n.bytes); break;
    case Node::SET:
        if (n.width == 1) memset((void*)n.dst, (int)n.value, n.bytes);
        else for (size_t i = 0; i < n.bytes; i += n.width) memcpy((char*)n.dst + i, &n.value, n.width);
    }
}
void carry_out(Node& n) {
    if (sticky) return;
    const uint64_t start = ran_ns();
    carry_out_unseen(n);
    if (emulated_ran)
        emulated_ran(n.kind, n.f ? n.f->name.c_str() : "", n.config.grid, n.config.block, current_serial, current_node, current_stream, start, ran_ns());
}
// Nodes in an order that their edges allow.
void run_graph(Instance& g) {
    const size_t n = g.nodes.size();
    std::vector<int> missing(n);
    std::vector<std::vector<int>> then(n);
    std::vector<int> ready;
    for (size_t i = 0; i < n; ++i) {
        missing[i] = (int)g.nodes[i].after.size();
        for (int a : g.nodes[i].after) then[a].push_back((int)i);
        if (!missing[i]) ready.push_back((int)i);
    }
    while (!ready.empty()) {
        const size_t at = seed() ? random_below((unsigned)ready.size()) : (size_t)(std::min_element(ready.begin(), ready.end()) - ready.begin());
        const int i = ready[at];
        ready.erase(ready.begin() + at);
        current_node = (g.id << 32) + i + 1;
        carry_out(g.nodes[i]);
        current_node = 0;
        for (int t : then[i]) if (--missing[t] == 0) ready.push_back(t);
    }
}
bool runnable(const Stream& s) {
    if (s.tasks.empty()) return false;
    const Task& t = s.tasks.front();
    return t.kind != Task::WAIT || t.event->done >= t.target;
}
// Carries out one task; false if there is none that can be.
bool advance() {
    std::vector<Stream*> able;
    for (Stream* s : streams) if (runnable(*s)) able.push_back(s);
    if (able.empty()) return false;
    // Before a choice by chance the streams must stand in an order that does not change from run to run.
    std::sort(able.begin(), able.end(), [](Stream* a, Stream* b) { return a->tasks.front().serial < b->tasks.front().serial; });
    Stream* s = able[seed() ? random_below((unsigned)able.size()) : 0];
    Task t = std::move(s->tasks.front());
    s->tasks.pop_front();
    current_serial = t.serial;
    current_stream = s;
    switch (t.kind) {
    case Task::NODE: carry_out(t.node); break;
    case Task::GRAPH: run_graph(*t.graph); break;
    case Task::RECORD: t.event->done = t.target; t.event->ms = now_ms(); break;
    case Task::WAIT: break;
    }
    return true;
}
int finish_all() { while (advance()) {} return sticky; }
int finish(Stream* s) { while (!s->tasks.empty() && advance()) {} return sticky; }
bool capturing() { for (Stream* s : streams) if (s->capture) return true; return false; }

int put(Stream* s, Node&& n) {
    if (sticky) return sticky;
    if (!streams.count(s)) return INVALID_VALUE;
    if (s->capture) {
        n.after = s->last;
        s->capture->nodes.emplace_back(new Node(std::move(n)));
        s->last = {(int)s->capture->nodes.size() - 1};
        return SUCCESS;
    }
    Task t = {Task::NODE, ++serials};
    if (emulated_called) emulated_called(t.serial);
    t.node = std::move(n);
    s->tasks.push_back(std::move(t));
    return SUCCESS;
}
int check_launch(const Function& f, const Config& c) {
    const uint64_t threads = (uint64_t)c.block[0] * c.block[1] * c.block[2];
    if (!c.grid[0] || !c.grid[1] || !c.grid[2] || !threads || threads > EMU_MAX_THREADS) return INVALID_VALUE;
    if (f.host) return SUCCESS;
    if (threads > f.kernel->max_threads || c.shared > f.allowed_shared) {
        fprintf(stderr, "emulated CUDA: %s: %llu threads of %u, %u bytes of shared memory of %u\n", f.name.c_str(), (unsigned long long)threads, f.kernel->max_threads, c.shared, f.allowed_shared);
        return INVALID_VALUE;
    }
    return SUCCESS;
}
// What an event or a join stands for: `a` and `b` without repetition.
void unite(std::vector<int>& a, const std::vector<int>& b) {
    a.insert(a.end(), b.begin(), b.end());
    std::sort(a.begin(), a.end());
    a.erase(std::unique(a.begin(), a.end()), a.end());
}
// Whether every node of `lasts` is among the ancestors of `from`, or there.
bool covered(const Graph& g, const std::vector<int>& lasts, const std::vector<int>& from) {
    std::vector<char> seen(g.nodes.size());
    std::vector<int> open = from;
    while (!open.empty()) {
        const int i = open.back();
        open.pop_back();
        if (seen[i]) continue;
        seen[i] = 1;
        for (int a : g.nodes[i]->after) open.push_back(a);
    }
    return std::all_of(lasts.begin(), lasts.end(), [&](int i) { return seen[i]; });
}
// CUDA_KERNEL_NODE_PARAMS and CUDA_MEMSET_NODE_PARAMS.
struct KernelParams { Function* f; unsigned grid[3], block[3], shared; void **params, **extra, *kernel, *context; };
struct LaunchConfig { unsigned grid[3], block[3], shared; Stream* stream; void* attributes; unsigned attributes_count; };
struct MemsetParams { Address dst; size_t pitch; unsigned value, element; size_t width, height; };
}  // namespace

typedef int R;
extern "C" {
R cuInit(unsigned) { static const bool once = (catch_signals(), true); return once ? SUCCESS : SUCCESS; }
R cuDriverGetVersion(int* v) { *v = 13000; return SUCCESS; }
R cuDeviceGetCount(int* n) { *n = 1; return SUCCESS; }
R cuDeviceGet(int* d, int i) { *d = i; return i ? INVALID_DEVICE : SUCCESS; }
R cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "emulated on the host"); return SUCCESS; }
R cuDeviceGetUuid_v2(char* u, int) { memset(u, 0xE0, 16); return SUCCESS; }
R cuDeviceTotalMem_v2(size_t* n, int) { *n = TOTAL; return SUCCESS; }
R cuDeviceGetAttribute(int* v, int a, int) {
    // 75, 76: compute capability; 16: multiprocessors, an A100's.
    *v = a == 75 ? 8 : a == 76 ? 0 : a == 16 ? number("MBPERF_EMULATED_SMS", 108) : 0;
    return SUCCESS;
}
R cuDevicePrimaryCtxRetain(void** c, int) { *c = (void*)8; return SUCCESS; }
R cuDevicePrimaryCtxRelease_v2(int) { Lock l(everything); return finish_all(); }
R cuCtxSetCurrent(void*) { return SUCCESS; }
R cuCtxSynchronize() { Lock l(everything); return capturing() ? (int)CAPTURE_UNSUPPORTED : finish_all(); }

R cuMemGetInfo_v2(size_t* free, size_t* total) { Lock l(everything); *total = TOTAL; *free = TOTAL - used; return sticky; }
R cuMemAlloc_v2(Address* p, size_t n) {
    Lock l(everything);
    return sticky ? sticky : capturing() ? (int)CAPTURE_UNSUPPORTED : allocate(p, n);
}
R cuMemFree_v2(Address p) {
    Lock l(everything);
    finish_all();
    auto at = blocks.find(p);
    if (at == blocks.end()) return INVALID_VALUE;
    const Block b = at->second;
    if (!edge_whole(b) && !sticky) sticky = EMU_ILLEGAL_ADDRESS;
    used -= (b.bytes + ALIGN - 1) / ALIGN * ALIGN;
    blocks.erase(at);
    munmap(b.map, b.mapped);
    return sticky;
}
R cuMemHostAlloc(void** p, size_t n, unsigned) {
    *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
    return *p ? SUCCESS : OUT_OF_MEMORY;
}
R cuMemFreeHost(void* p) { Lock l(everything); finish_all(); free(p); return sticky; }
// On the default stream, which the non-blocking streams do not wait for.
R cuMemcpyHtoD_v2(Address d, const void* s, size_t n) { Lock l(everything); if (sticky) return sticky; memcpy((void*)d, s, n); return SUCCESS; }
R cuMemcpyDtoH_v2(void* d, Address s, size_t n) { Lock l(everything); if (sticky) return sticky; memcpy(d, (void*)s, n); return SUCCESS; }

R cuStreamCreate(Stream** s, unsigned) { Lock l(everything); *s = new Stream; streams.insert(*s); return sticky; }
R cuStreamDestroy_v2(Stream* s) { Lock l(everything); finish(s); streams.erase(s); delete s; return sticky; }
R cuStreamSynchronize(Stream* s) { Lock l(everything); return s->capture ? (int)CAPTURE_UNSUPPORTED : finish(s); }
R cuEventCreate(Event** e, unsigned flags) { *e = new Event; (*e)->timed = !(flags & 2); return SUCCESS; }
R cuEventDestroy_v2(Event* e) { Lock l(everything); finish_all(); delete e; return sticky; }
R cuEventRecord(Event* e, Stream* s) {
    Lock l(everything);
    if (sticky) return sticky;
    e->capture = s->capture;
    if (s->capture) { e->captured = s->last; return SUCCESS; }
    Task t = {Task::RECORD, ++serials};
    t.event = e;
    t.target = ++e->recorded;
    s->tasks.push_back(std::move(t));
    return SUCCESS;
}
R cuEventSynchronize(Event* e) {
    Lock l(everything);
    if (e->capture) return CAPTURED_EVENT;
    while (e->done < e->recorded && advance()) {}
    return sticky;
}
R cuEventElapsedTime_v2(float* ms, Event* a, Event* b) {
    Lock l(everything);
    if (!a->timed || !b->timed || !a->recorded || !b->recorded) return INVALID_VALUE;
    if (a->done < a->recorded || b->done < b->recorded) return NOT_READY;
    *ms = (float)(b->ms - a->ms);
    return sticky;
}
R cuStreamWaitEvent(Stream* s, Event* e, unsigned) {
    Lock l(everything);
    if (sticky) return sticky;
    if (e->capture) {
        if (s->capture && s->capture != e->capture) return CAPTURE_ISOLATION;
        if (!s->capture) { s->capture = e->capture; s->last.clear(); }   // drawn into the capture
        unite(s->last, e->captured);
        return SUCCESS;
    }
    if (s->capture) { s->capture->broken = true; return CAPTURE_ISOLATION; }
    if (!e->recorded) return SUCCESS;
    Task t = {Task::WAIT, ++serials};
    t.event = e;
    t.target = e->recorded;
    s->tasks.push_back(std::move(t));
    return SUCCESS;
}

static R fill(Address d, unsigned value, unsigned width, size_t n, Stream* s) {
    Lock l(everything);
    Node node;
    node.kind = Node::SET; node.dst = d; node.value = value; node.width = width; node.bytes = n * width;
    return put(s, std::move(node));
}
static R copy(Address d, Address f, size_t n, Stream* s) {
    Lock l(everything);
    Node node;
    node.kind = Node::COPY; node.dst = d; node.src = f; node.bytes = n;
    return put(s, std::move(node));
}
R cuMemsetD8Async(Address d, unsigned char v, size_t n, Stream* s) { return fill(d, v, 1, n, s); }
R cuMemsetD16Async(Address d, unsigned short v, size_t n, Stream* s) { return d % 2 ? (int)INVALID_VALUE : fill(d, v, 2, n, s); }
R cuMemsetD32Async(Address d, unsigned v, size_t n, Stream* s) { return d % 4 ? (int)INVALID_VALUE : fill(d, v, 4, n, s); }
R cuMemcpyDtoDAsync_v2(Address d, Address f, size_t n, Stream* s) { return copy(d, f, n, s); }
R cuMemcpyDtoHAsync_v2(void* d, Address f, size_t n, Stream* s) { return copy((Address)d, f, n, s); }

R cuModuleLoadData(Module** m, const char* image) {
    Lock l(everything);
    if (sticky) return sticky;
    // The size of an ELF file: its section headers come last.
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    uint64_t headers;
    uint16_t each, count;
    memcpy(&headers, image + 40, 8);
    memcpy(&each, image + 58, 2);
    memcpy(&count, image + 60, 2);
    *m = new Module{std::string(image, headers + (uint64_t)each * count), {}};
    return open_copy(**m, 0) ? SUCCESS : INVALID_IMAGE;
}
R cuModuleUnload(Module* m) {
    Lock l(everything);
    finish_all();
    for (Copy& c : m->copies) dlclose(c.handle);
    delete m;
    return sticky;
}
R cuModuleGetFunction(Function** f, Module* m, const char* name) {
    Lock l(everything);
    if (sticky) return sticky;
    const Copy& c = m->copies[0];
    for (int i = 0; i < c.count; ++i)
        if (!strcmp(c.list[i].name, name)) {
            // What a kernel declares itself lies in the same 48 KiB.
            *f = new Function{m, i, name, &c.list[i], 48 * 1024 - std::min(c.fixed_shared, 48u * 1024), nullptr};
            return SUCCESS;
        }
    return NOT_FOUND;
}
R cuFuncLoad(Function*) { return SUCCESS; }
// Of compute capability 9.0 upward.
R cuTensorMapEncodeTiled(...) { return NOT_SUPPORTED; }
R cuFuncGetName(const char** s, Function* f) { *s = f->name.c_str(); return SUCCESS; }
R cuKernelGetName(const char** s, Function* f) { *s = f->name.c_str(); return SUCCESS; }
R cuFuncGetParamInfo(Function* f, size_t i, size_t* offset, size_t* size) {
    if (f->host || i >= (size_t)f->kernel->count) return INVALID_VALUE;
    *offset = 8 * i;
    *size = f->kernel->sizes[i];
    return SUCCESS;
}
// 8: most dynamic shared memory.
R cuFuncSetAttribute(Function* f, int a, int v) {
    const int limit = std::min(EMU_SHARED_LIMIT, number("MBPERF_EMULATED_SHARED_KIB", 227) * 1024);
    if (a != 8 || v < 0 || v + (int)f->module->copies[0].fixed_shared > limit) return INVALID_VALUE;
    f->allowed_shared = v;
    return SUCCESS;
}
R cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* s, void** args, void**) {
    Lock l(everything);
    Node n;
    n.kind = Node::KERNEL;
    n.f = f;
    n.config = {{gx, gy, gz}, {bx, by, bz}, shared};
    if (const int bad = check_launch(*f, n.config)) return bad;
    n.params.resize(8 * f->kernel->count);
    for (int i = 0; i < f->kernel->count; ++i) {
        if (f->kernel->sizes[i] > 8) return INVALID_VALUE;
        memcpy(&n.params[8 * i], args[i], f->kernel->sizes[i]);
    }
    return put(s, std::move(n));
}
// A library's kernel has one parameter, its struct.
R cuLaunchKernelEx(const LaunchConfig* c, Function* f, void** args, void** extra) {
    if (c->attributes_count || extra) return INVALID_VALUE;
    if (!f->host) return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, args, extra);
    Lock l(everything);
    Node n;
    n.kind = Node::KERNEL;
    n.f = f;
    memcpy(n.config.grid, c->grid, 12);
    memcpy(n.config.block, c->block, 12);
    n.config.shared = c->shared;
    n.params.assign((const char*)args[0], (const char*)args[0] + f->host_bytes);
    return put(c->stream, std::move(n));
}
int emulated_host_kernel(void* stream, const char* name, unsigned grid, unsigned block, void (*run)(const void*, unsigned), const void* params, unsigned long bytes) {
    Lock l(everything);
    static std::map<std::string, Function*> known;
    Function*& f = known[name];
    if (!f) f = new Function{nullptr, 0, name, nullptr, 0, run};
    f->host_bytes = bytes;
    Node n;
    n.kind = Node::KERNEL;
    n.f = f;
    n.config = {{grid, 1, 1}, {block, 1, 1}, 0};
    n.params.assign((const char*)params, (const char*)params + bytes);
    return put((Stream*)stream, std::move(n));
}

R cuStreamBeginCapture_v2(Stream* s, int) {
    Lock l(everything);
    if (sticky) return sticky;
    if (s->capture) return CAPTURE_UNSUPPORTED;
    s->capture = new Graph;
    s->capture->origin = s;
    s->last.clear();
    return SUCCESS;
}
R cuStreamEndCapture(Stream* s, Graph** out) {
    Lock l(everything);
    *out = nullptr;
    Graph* g = s->capture;
    if (!g) return CAPTURE_INVALIDATED;
    if (g->origin != s) return CAPTURE_UNMATCHED;
    int code = g->broken ? (int)CAPTURE_INVALIDATED : (int)SUCCESS;
    for (Stream* other : streams)
        if (other->capture == g) {
            if (other != s && !code && !covered(*g, other->last, s->last)) code = CAPTURE_UNJOINED;
            other->capture = nullptr;
        }
    if (code) delete g;
    else *out = g;
    return code;
}
R cuGraphDestroy(Graph* g) { delete g; return SUCCESS; }
R cuGraphInstantiateWithFlags(Instance** out, Graph* g, unsigned long long) {
    Lock l(everything);
    if (sticky) return sticky;
    // Device memory that an instance takes: made up, so that the accounting has something to count.
    Instance* x = new Instance{{}, (g->nodes.size() * 256 + 65535) / 65536 * 65536, ++instances};
    for (auto& n : g->nodes) x->nodes.push_back(*n);
    used += x->cost;
    *out = x;
    return SUCCESS;
}
R cuGraphExecDestroy(Instance* x) { Lock l(everything); finish_all(); used -= x->cost; delete x; return sticky; }
R cuGraphUpload(Instance*, Stream*) { return sticky; }
R cuGraphLaunch(Instance* x, Stream* s) {
    Lock l(everything);
    if (sticky) return sticky;
    if (s->capture) return CAPTURE_UNSUPPORTED;
    Task t = {Task::GRAPH, ++serials};
    if (emulated_called) emulated_called(t.serial);
    t.graph = x;
    s->tasks.push_back(std::move(t));
    return SUCCESS;
}
R cuGraphGetNodes(Graph* g, Node** list, size_t* count) {
    if (list) for (size_t i = 0; i < *count && i < g->nodes.size(); ++i) list[i] = g->nodes[i].get();
    *count = g->nodes.size();
    return SUCCESS;
}
R cuGraphGetEdges_v2(Graph* g, Node** from, Node** to, void*, size_t* count) {
    size_t n = 0;
    for (auto& node : g->nodes)
        for (int a : node->after) {
            if (from && n < *count) { from[n] = g->nodes[a].get(); to[n] = node.get(); }
            ++n;
        }
    *count = n;
    return SUCCESS;
}
R cuGraphNodeGetType(Node* n, unsigned* type) { *type = n->kind; return SUCCESS; }
R cuGraphKernelNodeGetParams_v2(Node* n, KernelParams* out) {
    memset(out, 0, sizeof *out);
    out->f = n->f;
    memcpy(out->grid, n->config.grid, 12);
    memcpy(out->block, n->config.block, 12);
    out->shared = n->config.shared;
    n->pointers.clear();
    for (int i = 0; i < (n->f->host ? 1 : n->f->kernel->count); ++i) n->pointers.push_back(&n->params[8 * i]);
    out->params = n->pointers.data();
    return SUCCESS;
}
// No attribute is set.
R cuGraphKernelNodeGetAttribute(Node*, unsigned, void* value) { memset(value, 0, 64); return SUCCESS; }
// CUDA_MEMCPY3D: the width in bytes, height and depth are its last three words.
R cuGraphMemcpyNodeGetParams(Node* n, size_t* out) { memset(out, 0, 200); out[22] = n->bytes; out[23] = out[24] = 1; return SUCCESS; }
R cuGraphMemsetNodeGetParams(Node* n, MemsetParams* out) {
    memset(out, 0, sizeof *out);
    out->dst = n->dst; out->value = n->value; out->element = n->width; out->width = n->bytes / n->width; out->height = 1;
    return SUCCESS;
}
}
