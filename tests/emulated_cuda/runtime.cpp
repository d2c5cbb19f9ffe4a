// The block scheduler, linked into every kernel module: each thread of a block is a fiber with a stack of its own; a
// fiber runs until it must wait for others of its warp or block. One module copy runs one block at a time, so that
// shared memory and the current thread are plain variables; the driver loads one copy a host thread.
//
// The order in which ready threads and warps run is ascending, or, with a seed, shuffled at every block and barrier:
// a result that depends on it lacks a barrier.
#include "device.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

EmuThread* emu_current;
dim3 emu_block_index, emu_block_dim, emu_grid_dim;
// Dynamic shared memory, and room behind it in which writes past its end are seen.
enum { CANARY = 256 };
alignas(1024) char emu_window[EMU_DYNAMIC_AT + EMU_SHARED_LIMIT + CANARY + 64];
extern "C" char __start_emu_shared[] __attribute__((weak)), __stop_emu_shared[] __attribute__((weak));
extern "C" unsigned emu_fixed_shared() { return __start_emu_shared ? __stop_emu_shared - __start_emu_shared : 0; }

namespace {
constexpr unsigned char POISON = 0xff;       // NaN as a float, -1 as an integer
constexpr int MAX_WARPS = EMU_MAX_THREADS / 32;

// ---- fibers ----------------------------------------------------------------------------------------
#if defined(__x86_64__)
typedef void* Place;
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void** save, void* to);
asm(R"(
    .pushsection .text
    .hidden emu_switch
    .globl emu_switch
    .type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
    .size emu_switch, .-emu_switch
    .popsection
)");
inline void jump(Place& from, Place& to) { emu_switch(&from, to); }
inline void prepare(Place& p, char* stack, void (*entry)()) {
    // Six registers, the entry as a return address, and one word that keeps the stack aligned as after a call.
    uint64_t* at = reinterpret_cast<uint64_t*>(stack + EMU_STACK_BYTES - 64);
    memset(at, 0, 64);
    at[6] = reinterpret_cast<uint64_t>(entry);
    p = at;
}
#else
typedef ucontext_t Place;
inline void jump(Place& from, Place& to) { swapcontext(&from, &to); }
inline void prepare(Place& p, char* stack, void (*entry)()) {
    getcontext(&p);
    p.uc_stack.ss_sp = stack;
    p.uc_stack.ss_size = EMU_STACK_BYTES;
    makecontext(&p, entry, 0);
}
#endif

struct Copy { char* dst; const char* src; int bytes, from_src; };
struct Fiber : EmuThread {
    Place place;
    Copy* copies;          // cp.async in flight, oldest first
    int count, room;
    int groups[64], open;  // copies of each committed group; of the group not yet committed
    int group_count;
};
struct Group {
    int kind;
    unsigned mask, arrived;
    void (*op)(void**, unsigned);
    void* lanes[32];
};
struct Warp {
    unsigned ready;        // by place in `order`
    unsigned alive;        // by lane
    unsigned char order[32], place_of[32];
    int group_count;
    Group groups[32];
};

Fiber fibers[EMU_MAX_THREADS];
Warp warps[MAX_WARPS];
unsigned char warp_order[MAX_WARPS];
int warp_count, alive, waiting, barrier_value, barrier_result;
bool copies_at_once;
Place home;
EmuLaunch* launch;
sigjmp_buf failure;
uint64_t random_state;

unsigned random_below(unsigned n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)((random_state >> 11) % n);
}
void shuffle(unsigned char* list, int n) {
    for (int i = n - 1; i > 0; --i) {
        const int j = (int)random_below(i + 1);
        const unsigned char t = list[i];
        list[i] = list[j];
        list[j] = t;
    }
}
// Only where every thread is at a barrier, or not yet begun: `ready` is by place.
void new_order() {
    if (launch->seed == 0) return;
    shuffle(warp_order, warp_count);
    for (int w = 0; w < warp_count; ++w) {
        shuffle(warps[w].order, 32);
        for (int i = 0; i < 32; ++i) warps[w].place_of[warps[w].order[i]] = i;
    }
}

void wake(Warp& w, unsigned lanes) {
    for (; lanes; lanes &= lanes - 1) w.ready |= 1u << w.place_of[__builtin_ctz(lanes)];
}
// Runs the next ready thread; comes back when `from` is ready again and chosen.
void leave(Place& from, int warp) {
    Warp* w = &warps[warp];
    if (!w->ready) {
        w = nullptr;
        for (int i = 0; i < warp_count && !w; ++i)
            if (warps[warp_order[i]].ready) w = &warps[warp_order[i]];
        if (!w) {
            jump(from, home);
            return;
        }
    }
    const int at = __builtin_ctz(w->ready);
    w->ready &= w->ready - 1;
    Fiber* next = &fibers[(w - warps) * 32 + w->order[at]];
    emu_current = next;
    if (&next->place != &from) jump(from, next->place);
}
Fiber* own() { return static_cast<Fiber*>(emu_current); }

// Runs the group's operation if all its living lanes are there; wakes all of them but `caller` (-1: all).
bool complete(Warp& w, int g, int caller) {
    Group& group = w.groups[g];
    const unsigned need = group.mask & w.alive;
    if (!need || (group.arrived & need) != need) return false;
    group.op(group.lanes, group.arrived);
    wake(w, caller < 0 ? group.arrived : group.arrived & ~(1u << caller));
    if (g != --w.group_count) w.groups[g] = w.groups[w.group_count];
    return true;
}
void open_barrier() {
    waiting = 0;
    barrier_result = barrier_value;
    barrier_value = 0;
    new_order();
    for (int w = 0; w < warp_count; ++w) wake(warps[w], warps[w].alive);
}

void run_copy(const Copy& c) {
    memcpy(c.dst, c.src, c.from_src);
    memset(c.dst + c.from_src, 0, c.bytes - c.from_src);
}

void thread_main() {
    launch->kernel->invoke(launch->args);
    Fiber* f = own();
    Warp& w = warps[f->warp];
    w.alive &= ~(1u << f->lane);
    --alive;
    for (int g = 0; g < w.group_count;) g += complete(w, g, -1) ? 0 : 1;
    if (alive && waiting == alive) open_barrier();
    leave(f->place, f->warp);
    abort();   // a thread that ended is never chosen again
}

void describe_waiters(char* out, size_t room) {
    size_t n = (size_t)snprintf(out, room, "%d of %d threads wait at __syncthreads", waiting, alive);
    for (int w = 0; w < warp_count && n < room; ++w)
        for (int g = 0; g < warps[w].group_count && n < room; ++g) {
            static const char* const names[] = {"?", "__syncwarp", "a shuffle", "a ballot", "a match", "a reduction", "mma", "ldmatrix"};
            const Group& group = warps[w].groups[g];
            n += (size_t)snprintf(out + n, room - n, "; lanes %08x of warp %d wait at %s with mask %08x", group.arrived, w, names[group.kind & 7], group.mask);
        }
}

void run_block(unsigned index) {
    const EmuLaunch& l = *launch;
    emu_block_index = {index % l.grid[0], index / l.grid[0] % l.grid[1], index / l.grid[0] / l.grid[1]};
    const int threads = (int)(l.block[0] * l.block[1] * l.block[2]);
    // Seeded runs differ by block, and each block has the same order in every run.
    random_state = (l.seed + 1) * 0x9E3779B97F4A7C15ull ^ (index + 1) * 0xD1342543DE82EF95ull;
    copies_at_once = l.seed & 1;
    warp_count = (threads + 31) / 32;
    alive = threads;
    waiting = barrier_value = 0;
    for (int w = 0; w < warp_count; ++w) {
        warp_order[w] = w;
        warps[w].group_count = 0;
        const int lanes = threads - w * 32 < 32 ? threads - w * 32 : 32;
        warps[w].alive = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
        for (int i = 0; i < 32; ++i) warps[w].order[i] = warps[w].place_of[i] = i;
        warps[w].ready = 0;
    }
    new_order();
    for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[t];
        f.index = {t % l.block[0], t / l.block[0] % l.block[1], t / l.block[0] / l.block[1]};
        f.lane = t % 32;
        f.warp = t / 32;
        f.count = f.open = f.group_count = 0;
        prepare(f.place, l.stacks + (size_t)t * EMU_STACK_BYTES, thread_main);
    }
    for (int w = 0; w < warp_count; ++w) wake(warps[w], warps[w].alive);
    if (__start_emu_shared) memset(__start_emu_shared, POISON, __stop_emu_shared - __start_emu_shared);
    memset(emu_window, POISON, EMU_DYNAMIC_AT + l.shared_bytes + CANARY);
    leave(home, warp_order[0]);
    if (alive) {
        char text[512];
        describe_waiters(text, sizeof text);
        emu_fail(EMU_LAUNCH_FAILED, "deadlock: %s", text);
    }
    for (int i = 0; i < CANARY; ++i)
        if ((unsigned char)emu_dynamic[l.shared_bytes + i] != POISON)
            emu_fail(EMU_ILLEGAL_ADDRESS, "a write %d bytes past the %u bytes of dynamic shared memory", i, l.shared_bytes);
    for (int i = 0; i < EMU_DYNAMIC_AT; ++i)
        if ((unsigned char)emu_window[i] != POISON) emu_fail(EMU_ILLEGAL_ADDRESS, "a write before the dynamic shared memory");
}

// ---- faults ----------------------------------------------------------------------------------------
void on_signal(int number, siginfo_t* info, void*) {
    switch (number) {
    case SIGILL: emu_fail(EMU_MISALIGNED, "a misaligned access, or an array index out of bounds");
    case SIGFPE: emu_fail(EMU_LAUNCH_FAILED, "an integer division by zero");
    default: emu_fail(EMU_ILLEGAL_ADDRESS, "an access at %p, %s", info->si_addr, launch->explain(info->si_addr));
    }
}
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
}  // namespace

// Ends the whole launch of this worker: the other threads of the block are abandoned.
void emu_fail(int code, const char* format, ...) {
    int none = 0;
    if (__atomic_compare_exchange_n(launch->failed, &none, code, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        const dim3 b = emu_block_index;
        const EmuThread* t = emu_current;
        char* out = launch->message;
        int n = snprintf(out, EMU_MESSAGE, "kernel %s, block (%u, %u, %u)", launch->kernel->name, b.x, b.y, b.z);
        if (t) n += snprintf(out + n, EMU_MESSAGE - n, ", thread (%u, %u, %u)", t->index.x, t->index.y, t->index.z);
        n += snprintf(out + n, EMU_MESSAGE - n, ": ");
        va_list list;
        va_start(list, format);
        vsnprintf(out + n, EMU_MESSAGE - n, format, list);
        va_end(list);
    }
    siglongjmp(failure, 1);
}

int emu_barrier(int value) {
    Fiber* f = own();
    barrier_value |= value;
    if (++waiting == alive) {
        open_barrier();
        // With a seed any thread may go on first.
        if (launch->seed == 0) {
            warps[f->warp].ready &= ~(1u << warps[f->warp].place_of[f->lane]);
            return barrier_result;
        }
        leave(f->place, warp_order[0]);
        return barrier_result;
    }
    leave(f->place, f->warp);
    return barrier_result;
}

void emu_meet(int kind, unsigned mask, void* mine, void (*op)(void**, unsigned)) {
    Fiber* f = own();
    Warp& w = warps[f->warp];
    const unsigned bit = 1u << f->lane;
    if (!(mask & bit)) emu_fail(EMU_LAUNCH_FAILED, "a warp operation whose mask %08x leaves out the thread's own lane %u", mask, f->lane);
    int g = 0;
    while (g < w.group_count && (w.groups[g].kind != kind || w.groups[g].mask != mask)) ++g;
    if (g == w.group_count) {
        Group& fresh = w.groups[w.group_count++];
        fresh.kind = kind;
        fresh.mask = mask;
        fresh.arrived = 0;
        fresh.op = op;
    }
    Group& group = w.groups[g];
    if (group.op != op) emu_fail(EMU_LAUNCH_FAILED, "lanes of one warp meet at different operations");
    group.lanes[f->lane] = mine;
    group.arrived |= bit;
    if (!complete(w, g, (int)f->lane)) leave(f->place, f->warp);
}

// ---- warp operations -------------------------------------------------------------------------------
#define EACH(i, present) for (unsigned left_ = (present), i = 0; left_ && (i = __builtin_ctz(left_), true); left_ &= left_ - 1)
static EmuWord& word(void** lanes, unsigned i) { return *static_cast<EmuWord*>(lanes[i]); }
void emu_op_none(void**, unsigned) {}
void emu_op_shuffle(void** lanes, unsigned present) {
    EACH(i, present) {
        const unsigned from = (unsigned)word(lanes, i).from & 31;
        // What comes from a lane that is not there is undefined.
        word(lanes, i).out = (present >> from) & 1 ? word(lanes, from).in : ~0ull;
    }
}
void emu_op_ballot(void** lanes, unsigned present) {
    unsigned votes = 0;
    EACH(i, present) votes |= (unsigned)word(lanes, i).in << i;
    EACH(i, present) word(lanes, i).out = votes;
}
void emu_op_match(void** lanes, unsigned present) {
    EACH(i, present) {
        unsigned same = 0;
        EACH(j, present) same |= (unsigned)(word(lanes, i).in == word(lanes, j).in) << j;
        word(lanes, i).out = same;
    }
}
template <typename F> static void reduce(void** lanes, unsigned present, F f) {
    long long r = 0;
    bool first = true;
    EACH(i, present) {
        const long long x = (long long)word(lanes, i).in;
        r = first ? x : f(r, x);
        first = false;
    }
    EACH(i, present) word(lanes, i).out = (unsigned long long)r;
}
void emu_op_min(void** l, unsigned p) { reduce(l, p, [](long long a, long long b) { return a < b ? a : b; }); }
void emu_op_max(void** l, unsigned p) { reduce(l, p, [](long long a, long long b) { return a > b ? a : b; }); }
void emu_op_add(void** l, unsigned p) { reduce(l, p, [](long long a, long long b) { return a + b; }); }
void emu_op_and(void** l, unsigned p) { reduce(l, p, [](long long a, long long b) { return a & b; }); }
void emu_op_or(void** l, unsigned p) { reduce(l, p, [](long long a, long long b) { return a | b; }); }

static void whole_warp(unsigned present, const char* what) {
    if (present != 0xffffffffu) emu_fail(EMU_LAUNCH_FAILED, "%s with lanes %08x only", what, present);
}
static float low(unsigned pair) { return __uint_as_float(pair << 16); }
static float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16", .bf16. Sums in ascending order of k.
void emu_op_mma(void** lanes, unsigned present) {
    whole_warp(present, "mma");
    typedef float Row __attribute__((vector_size(32)));
    float a[16][16];
    union { Row row[16]; float at[16][8]; } b;
    union { Row row[16]; float at[16][8]; } c;
    for (int i = 0; i < 32; ++i) {
        const EmuMma& m = *static_cast<EmuMma*>(lanes[i]);
        const int g = i >> 2, t = (i & 3) * 2;
        a[g][t] = low(m.a[0]); a[g][t + 1] = high(m.a[0]);
        a[g + 8][t] = low(m.a[1]); a[g + 8][t + 1] = high(m.a[1]);
        a[g][t + 8] = low(m.a[2]); a[g][t + 9] = high(m.a[2]);
        a[g + 8][t + 8] = low(m.a[3]); a[g + 8][t + 9] = high(m.a[3]);
        b.at[t][g] = low(m.b[0]); b.at[t + 1][g] = high(m.b[0]);
        b.at[t + 8][g] = low(m.b[1]); b.at[t + 9][g] = high(m.b[1]);
        c.at[g][t] = m.d[0]; c.at[g][t + 1] = m.d[1];
        c.at[g + 8][t] = m.d[2]; c.at[g + 8][t + 1] = m.d[3];
    }
    for (int r = 0; r < 16; ++r) {
        Row sum = c.row[r];
        for (int k = 0; k < 16; ++k) sum += a[r][k] * b.row[k];
        c.row[r] = sum;
    }
    for (int i = 0; i < 32; ++i) {
        float* d = static_cast<EmuMma*>(lanes[i])->d;
        const int g = i >> 2, t = (i & 3) * 2;
        d[0] = c.at[g][t]; d[1] = c.at[g][t + 1];
        d[2] = c.at[g + 8][t]; d[3] = c.at[g + 8][t + 1];
    }
}
// Lane 8m + r gives the address of row r of matrix m (PTX ISA, ldmatrix).
void emu_op_ldmatrix(void** lanes, unsigned present) {
    whole_warp(present, "ldmatrix");
    for (int m = 0; m < 4; ++m) {
        unsigned short tile[8][8];
        for (int r = 0; r < 8; ++r) memcpy(tile[r], static_cast<EmuTile*>(lanes[8 * m + r])->row, 16);
        for (int i = 0; i < 32; ++i) {
            EmuTile& t = *static_cast<EmuTile*>(lanes[i]);
            const int g = i >> 2, p = (i & 3) * 2;
            t.r[m] = t.transposed ? tile[p][g] | (unsigned)tile[p + 1][g] << 16 : tile[g][p] | (unsigned)tile[g][p + 1] << 16;
        }
    }
}

const char* emu_check_shared(unsigned address, int bytes, const char* what) {
    const char* p = emu_shared_at(address);
    if (address % bytes) emu_fail(EMU_MISALIGNED, "%s at shared address %#x, not a multiple of %d", what, address, bytes);
    const bool dynamic = p >= emu_dynamic && p + bytes <= emu_dynamic + launch->shared_bytes;
    const bool fixed = __start_emu_shared && p >= __start_emu_shared && p + bytes <= __stop_emu_shared;
    if (!dynamic && !fixed)
        emu_fail(EMU_ILLEGAL_ADDRESS, "%s at shared address %#x, outside the %u bytes of dynamic shared memory", what, address, launch->shared_bytes);
    return p;
}

void emu_copy(unsigned dst, const void* src, int bytes, int from_src) {
    char* to = const_cast<char*>(emu_check_shared(dst, bytes, "cp.async"));
    if ((uintptr_t)src % bytes) emu_fail(EMU_MISALIGNED, "cp.async of %d bytes from %p", bytes, src);
    if (from_src < 0 || from_src > bytes) emu_fail(EMU_LAUNCH_FAILED, "cp.async of %d bytes, %d of them from the source", bytes, from_src);
    const Copy copy = {to, static_cast<const char*>(src), bytes, from_src};
    if (copies_at_once) {
        run_copy(copy);
        return;
    }
    Fiber* f = own();
    if (f->count == f->room) {
        f->room = f->room ? 2 * f->room : 32;
        f->copies = static_cast<Copy*>(realloc(f->copies, sizeof(Copy) * f->room));
    }
    f->copies[f->count++] = copy;
    ++f->open;
}
void emu_commit() {
    Fiber* f = own();
    if (copies_at_once) return;
    const int most = sizeof f->groups / sizeof f->groups[0];
    if (f->group_count == most) emu_fail(EMU_LAUNCH_FAILED, "more than %d groups of cp.async in flight", most);
    f->groups[f->group_count++] = f->open;
    f->open = 0;
}
void emu_wait(int left) {
    Fiber* f = own();
    const int done = f->group_count - left;
    if (done <= 0) return;
    int n = 0;
    for (int g = 0; g < done; ++g) n += f->groups[g];
    for (int i = 0; i < n; ++i) run_copy(f->copies[i]);
    memmove(f->copies, f->copies + n, sizeof(Copy) * (f->count - n));
    memmove(f->groups, f->groups + done, sizeof(int) * left);
    f->count -= n;
    f->group_count = left;
}

unsigned long long emu_nanoseconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

extern "C" __attribute__((visibility("default"))) void emu_run(EmuLaunch* l) {
    launch = l;
    emu_block_dim = {l->block[0], l->block[1], l->block[2]};
    emu_grid_dim = {l->grid[0], l->grid[1], l->grid[2]};
    const unsigned blocks = l->grid[0] * l->grid[1] * l->grid[2];
    if (sigsetjmp(failure, 1) == 0)
        while (!__atomic_load_n(l->failed, __ATOMIC_RELAXED)) {
            const unsigned index = __atomic_fetch_add(l->next, 1, __ATOMIC_RELAXED);
            if (index >= blocks) break;
            run_block(index);
        }
    emu_current = nullptr;
}
// Called by the driver's own handler, on the thread that runs blocks of this module.
extern "C" __attribute__((visibility("default"))) void emu_signal(int number, siginfo_t* info) {
    on_signal(number, info, nullptr);
}
