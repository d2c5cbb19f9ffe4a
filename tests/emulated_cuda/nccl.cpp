// NCCL for the emulated device: one communicator is a Unix socket between any two of its processes; a collective is a
// kernel of one block that exchanges messages over them when the stream comes to it. Sums are made in the order of ranks.
//
// The device runs one kernel at a time: collectives of two communicators on two streams may come in another order on
// another rank, and then wait for each other for ever, which a GPU would run side by side.
#include "runtime.h"
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { MOST = 16 };
struct Id { char bytes[128]; };
struct Comm { int ranks, rank, fd[MOST]; char path[108]; };
struct Peer { const char* sent; size_t send; char* received; size_t receive; };
enum Kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, SEND_RECEIVE };
struct Call { Comm* comm; int kind, type; const char* x; char* out; size_t count; Peer peers[MOST]; };
thread_local int depth;
thread_local Call open_group;
thread_local void* open_stream;

size_t bytes_of(int type) { return type == 1 ? 1 : type == 9 ? 2 : type == 2 || type == 3 || type == 7 ? 4 : 0; }
float wide(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
uint16_t narrow(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// Both directions at once, so that no side waits for the other to read.
void swap_with(int fd, const char* sent, size_t send, char* received, size_t receive) {
    while (send || receive) {
        struct pollfd p = {fd, (short)((send ? POLLOUT : 0) | (receive ? POLLIN : 0)), 0};
        poll(&p, 1, -1);
        if (receive && (p.revents & (POLLIN | POLLHUP | POLLERR))) {
            const ssize_t n = recv(fd, received, receive, MSG_DONTWAIT);
            if (n == 0) return;   // the other process has ended; its launcher tells
            if (n > 0) received += n, receive -= n;
        }
        if (send && (p.revents & POLLOUT)) {
            const ssize_t n = ::send(fd, sent, send, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0) sent += n, send -= n;
            else if (p.revents & (POLLHUP | POLLERR)) return;
        }
    }
}
template <typename T, typename F> void add(char* out, const std::vector<const char*>& parts, size_t count, F sum) {
    for (size_t i = 0; i < count; ++i) {
        T all[MOST];
        for (size_t r = 0; r < parts.size(); ++r) memcpy(&all[r], parts[r] + i * sizeof(T), sizeof(T));
        const T s = sum(all, parts.size());
        memcpy(out + i * sizeof(T), &s, sizeof(T));
    }
}
void run(const void* params, unsigned) {
    const Call& c = *static_cast<const Call*>(params);
    Comm& comm = *c.comm;
    const size_t size = bytes_of(c.type) * c.count;
    if (c.kind == SEND_RECEIVE) {
        for (int r = 0; r < comm.ranks; ++r)
            if (r != comm.rank) swap_with(comm.fd[r], c.peers[r].sent, c.peers[r].send, c.peers[r].received, c.peers[r].receive);
        return;
    }
    if (c.kind == ALL_GATHER) {
        if (c.out + comm.rank * size != c.x) memmove(c.out + comm.rank * size, c.x, size);
        for (int r = 0; r < comm.ranks; ++r)
            if (r != comm.rank) swap_with(comm.fd[r], c.out + comm.rank * size, size, c.out + r * size, size);
        return;
    }
    // What this rank sums: its own chunk, or everything.
    const bool scatter = c.kind == REDUCE_SCATTER;
    std::vector<std::vector<char>> received(comm.ranks);
    std::vector<const char*> parts(comm.ranks);
    for (int r = 0; r < comm.ranks; ++r) {
        if (r == comm.rank) {
            parts[r] = c.x + (scatter ? r * size : 0);
            continue;
        }
        received[r].resize(size);
        swap_with(comm.fd[r], c.x + (scatter ? r * size : 0), size, received[r].data(), size);
        parts[r] = received[r].data();
    }
    std::vector<char> sum(size);
    if (c.type == 9) add<uint16_t>(sum.data(), parts, c.count, [](uint16_t* a, size_t n) { float s = wide(a[0]); for (size_t i = 1; i < n; ++i) s += wide(a[i]); return narrow(s); });
    else if (c.type == 7) add<float>(sum.data(), parts, c.count, [](float* a, size_t n) { float s = a[0]; for (size_t i = 1; i < n; ++i) s += a[i]; return s; });
    else add<uint32_t>(sum.data(), parts, c.count, [](uint32_t* a, size_t n) { uint32_t s = a[0]; for (size_t i = 1; i < n; ++i) s += a[i]; return s; });
    memcpy(c.out, sum.data(), size);
}
int launch(const Call& c, void* stream) {
    static const char* const names[] = {"emulated_nccl_all_gather", "emulated_nccl_reduce_scatter", "emulated_nccl_all_reduce", "emulated_nccl_send_receive"};
    return emulated_host_kernel(stream, names[c.kind], 1, 32, run, &c, sizeof c) ? SYSTEM_ERROR : SUCCESS;
}
int collective(int kind, const void* x, void* out, size_t count, int type, Comm* comm, void* stream) {
    if (!bytes_of(type) || depth) return INVALID_ARGUMENT;
    Call c = {};
    c.comm = comm; c.kind = kind; c.type = type;
    c.x = static_cast<const char*>(x); c.out = static_cast<char*>(out); c.count = count;
    return launch(c, stream);
}
int message(Comm* comm, int peer, size_t bytes, void* stream, Peer** found) {
    if (!depth || !bytes || peer < 0 || peer >= comm->ranks || peer == comm->rank) return INVALID_USAGE;
    if (open_group.comm && (open_group.comm != comm || open_stream != stream)) return INVALID_USAGE;
    open_group.comm = comm; open_group.kind = SEND_RECEIVE; open_stream = stream;
    *found = &open_group.peers[peer];
    return SUCCESS;
}
bool all_io(int fd, char* p, size_t n, bool out) {
    while (n) {
        const ssize_t did = out ? write(fd, p, n) : read(fd, p, n);
        if (did <= 0) return false;
        p += did; n -= did;
    }
    return true;
}
}  // namespace

extern "C" {
int ncclGetVersion(int* v) { *v = 22800; return SUCCESS; }
const char* ncclGetErrorString(int code) { return code == SUCCESS ? "no error" : code == INVALID_USAGE ? "invalid usage" : "emulated NCCL failed"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclCommGetAsyncError(Comm*, int* code) { *code = SUCCESS; return SUCCESS; }
int ncclGetUniqueId(Id* id) {
    static unsigned count;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, 60, "/tmp/emulated_nccl.%d.%u.%lld", (int)getpid(), count++, (long long)t.tv_nsec);
    return SUCCESS;
}
int ncclCommInitRank(Comm** out, int ranks, Id id, int rank) {
    if (ranks > MOST || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    Comm* c = new Comm{ranks, rank, {}, {}};
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un at = {AF_UNIX, {}};
    snprintf(at.sun_path, sizeof at.sun_path, "%s.%d", id.bytes, rank);
    memcpy(c->path, at.sun_path, sizeof c->path);
    if (bind(listener, (struct sockaddr*)&at, sizeof at) || listen(listener, MOST)) return SYSTEM_ERROR;
    for (int r = 0; r < rank; ++r) {
        snprintf(at.sun_path, sizeof at.sun_path, "%s.%d", id.bytes, r);
        for (int tries = 0;; ++tries) {
            c->fd[r] = socket(AF_UNIX, SOCK_STREAM, 0);
            if (!connect(c->fd[r], (struct sockaddr*)&at, sizeof at)) break;
            close(c->fd[r]);
            if (tries == 3000) return SYSTEM_ERROR;
            usleep(10000);
        }
        all_io(c->fd[r], (char*)&rank, sizeof rank, true);
    }
    for (int left = ranks - 1 - rank; left > 0; --left) {
        const int fd = accept(listener, nullptr, nullptr);
        int who = -1;
        if (fd < 0 || !all_io(fd, (char*)&who, sizeof who, false) || who <= rank || who >= ranks) return SYSTEM_ERROR;
        c->fd[who] = fd;
    }
    close(listener);
    unlink(c->path);
    *out = c;
    return SUCCESS;
}
int ncclCommDestroy(Comm* c) {
    for (int r = 0; r < c->ranks; ++r) if (r != c->rank) close(c->fd[r]);
    delete c;
    return SUCCESS;
}
int ncclAllGather(const void* x, void* out, size_t n, int type, Comm* c, void* s) { return collective(ALL_GATHER, x, out, n, type, c, s); }
int ncclReduceScatter(const void* x, void* out, size_t n, int type, int op, Comm* c, void* s) { return op ? INVALID_ARGUMENT : collective(REDUCE_SCATTER, x, out, n, type, c, s); }
int ncclAllReduce(const void* x, void* out, size_t n, int type, int op, Comm* c, void* s) { return op ? INVALID_ARGUMENT : collective(ALL_REDUCE, x, out, n, type, c, s); }
int ncclGroupStart() { if (depth++ == 0) memset(&open_group, 0, sizeof open_group); return SUCCESS; }
int ncclGroupEnd() {
    if (depth == 0) return INVALID_USAGE;
    if (--depth || !open_group.comm) return SUCCESS;
    return launch(open_group, open_stream);
}
int ncclSend(const void* x, size_t n, int type, int peer, Comm* c, void* s) {
    Peer* p;
    if (int e = message(c, peer, n * bytes_of(type), s, &p)) return e;
    p->sent = static_cast<const char*>(x); p->send = n * bytes_of(type);
    return SUCCESS;
}
int ncclRecv(void* x, size_t n, int type, int peer, Comm* c, void* s) {
    Peer* p;
    if (int e = message(c, peer, n * bytes_of(type), s, &p)) return e;
    p->received = static_cast<char*>(x); p->receive = n * bytes_of(type);
    return SUCCESS;
}
}
