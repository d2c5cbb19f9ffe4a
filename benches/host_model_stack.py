"""Layer stacks for calibrate_host_model.py: modules that stand for the parts of a layer, the ways to run a stack of them, and
what is timed of a step.

The modules are this project's own, in bf16, at the shapes of llama3_8b, of qwen3_30b_a3b (8 of 128 experts local) and of
nemotron_3_nano (the Mamba-2 layer of ref_mamba.py, whose scan is Triton's). All host times are read by `time.perf_counter`, all
device times by CUDA events or the profiler; milliseconds.
"""
import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch import nn

from host_model_figures import union_ms

BF16 = torch.bfloat16
DENSE = dict(hidden=4096, heads=32, groups=8, head_dim=128, ffn=14336)
MOE = dict(hidden=2048, heads=32, groups=4, head_dim=128, ffn=768, experts=128, local=8, topk=8)
# The part that is captured beside attention, by kind of layer. Mamba layers are one part, and have no attention.
SECOND = {"dense": "mlp", "moe": "moe_router"}
# Steps before anything is timed: kernels are chosen and memory is cached by then. Triton compiles and tunes its kernels in the first
# of the first form's, and keeps its choice for the process, so that no capture meets a kernel that is still to be tuned.
WARM_STEPS = 8
# Steps under the profiler: the first ones run at the clock of an idle GPU.
BUSY_STEPS = 5
# Marks in a row to time one: a millisecond in all.
EDGES = 32


@contextlib.contextmanager
def other_threads_may_launch():
    """While torch.cuda.make_graphed_callables captures: Triton launches its backward kernels from autograd's thread, and the default
    mode of a capture forbids other threads a part of the driver's calls."""
    kept = torch.cuda.graph
    torch.cuda.graph = lambda *graph, **how: kept(*graph, **how | {"capture_error_mode": "thread_local"})
    try:
        yield
    finally:
        torch.cuda.graph = kept


def linear(n_in, n_out, dtype=BF16):
    return nn.Linear(n_in, n_out, bias=False, dtype=dtype, device="cuda")


class Attention(nn.Module):
    """Norm, QKV, rotation (with q/k norm in expert models), causal attention, projection, residual."""

    def __init__(self, c, tokens, qk_norm):
        super().__init__()
        self.c = c
        self.norm = nn.RMSNorm(c["hidden"], dtype=BF16, device="cuda")
        self.qkv = linear(c["hidden"], (c["heads"] + 2 * c["groups"]) * c["head_dim"])
        self.out = linear(c["heads"] * c["head_dim"], c["hidden"])
        per_head = lambda: nn.RMSNorm(c["head_dim"], dtype=BF16, device="cuda")
        self.q_norm, self.k_norm = (per_head(), per_head()) if qk_norm else (None, None)
        half = c["head_dim"] // 2
        angle = torch.arange(tokens, device="cuda")[:, None] * 1e6 ** (-torch.arange(half, device="cuda") / half)
        self.register_buffer("cos", angle.cos().to(BF16).repeat(1, 2)[:, None])
        self.register_buffer("sin", angle.sin().to(BF16).repeat(1, 2)[:, None])

    def rotate(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

    def forward(self, x):
        c, (batch, tokens, _) = self.c, x.shape
        sizes = [n * c["head_dim"] for n in (c["heads"], c["groups"], c["groups"])]
        q, k, v = (t.view(batch, tokens, -1, c["head_dim"]) for t in self.qkv(self.norm(x)).split(sizes, -1))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.RMSNorm(c["hidden"], dtype=BF16, device="cuda")
        self.up, self.down = linear(c["hidden"], 2 * c["ffn"]), linear(c["ffn"], c["hidden"])

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Router(nn.Module):
    """Norm, gate, softmax, top-k; gives the normed tokens too."""

    def __init__(self, c):
        super().__init__()
        self.topk = c["topk"]
        self.norm = nn.RMSNorm(c["hidden"], dtype=BF16, device="cuda")
        self.gate = linear(c["hidden"], c["experts"], torch.float32)

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        probs, index = torch.topk(self.gate(y.float()).softmax(-1), self.topk, -1)
        return y, probs / probs.sum(-1, keepdim=True), index


class Dispatch(nn.Module):
    """Sorts the token copies by expert, brings the counts to the host, gathers the rows."""

    def __init__(self, c, wait):
        super().__init__()
        self.c, self.wait = c, wait

    def forward(self, y, probs, index):
        local = (index % self.c["local"]).flatten()
        order = torch.argsort(local, stable=True)
        if self.wait:
            counts = torch.bincount(local, minlength=self.c["local"])
            counts.cpu()
        else:
            counts = (local[:, None] == torch.arange(self.c["local"], device="cuda")).sum(0)
        source = order // self.c["topk"]
        return y[source], probs.flatten()[order], source, counts.cumsum(0).to(torch.int32)


class Experts(nn.Module):
    """Grouped products over ragged rows, weighting, sum by token, residual."""

    def __init__(self, c):
        super().__init__()
        weight = lambda *shape: nn.Parameter(torch.randn(*shape, dtype=BF16, device="cuda") * shape[1] ** -0.5)
        self.up = weight(c["local"], c["hidden"], 2 * c["ffn"])
        self.down = weight(c["local"], c["ffn"], c["hidden"])

    def forward(self, rows, probs, source, offsets, x):
        gate, up = torch._grouped_mm(rows, self.up, offs=offsets).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down, offs=offsets) * probs[:, None].to(BF16)
        return x + torch.zeros_like(x).flatten(0, 1).index_add_(0, source, out).view_as(x)


class Clock:
    """Time between marks, by what came before the mark."""

    def __init__(self):
        self.on, self.last, self.ms = False, 0.0, {}

    def start(self):
        self.last = time.perf_counter()

    def mark(self, name):
        if self.on:
            now = time.perf_counter()
            self.ms[name] = self.ms.get(name, 0.0) + (now - self.last) * 1e3
            self.last = now


class Edge(torch.autograd.Function):
    """Nothing, but a mark when the gradient passes: then the backward pass of `name`, which follows here, is done."""

    @staticmethod
    def forward(ctx, x, clock, name):
        ctx.clock, ctx.name = clock, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.mark(("backward", ctx.name))
        return gradient, None, None


def edged(state, at, clock, name):
    """The tensors `state`, an edge on the one at `at`."""
    return (*state[:at], Edge.apply(state[at], clock, name), *state[at + 1 :])


def mark_costs_ms():
    """Host time of a mark by pass: of edges one after the other with nothing between them."""
    clock, x = Clock(), torch.zeros(1, dtype=BF16, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    clock.on = True
    clock.start()
    state = (x,)
    for i in range(EDGES):
        state = edged(state, 0, clock, i)
        clock.mark(("forward", i))
    state[0].backward(gradient)
    # The first of a pass is not alone: its way there counts in.
    of = lambda which, first: statistics.median(ms for (p, i), ms in clock.ms.items() if p == which and i != first)
    return dict(forward=of("forward", 0), backward=of("backward", EDGES - 1))


@dataclass
class Form:
    """A way to run a stack: `scope` is eager, full, or the captured parts joined by commas; `apart`: a graph a part in place of
    one for all captured parts of a layer's pass, which is what Megatron and mbperf capture."""

    scope: str
    apart: bool = False

    @property
    def parts(self):
        return [] if self.scope in ("eager", "full") else self.scope.split(",")

    def __str__(self):
        return f"{self.scope} apart" if self.apart else self.scope


def forms(kind):
    """All ways to run a stack of `kind`, eager first."""
    if kind == "mamba":
        return [Form("eager"), Form("mamba"), Form("full")]
    both = f"attn,{SECOND[kind]}"
    return [Form("eager"), Form("attn"), Form(both), Form(both, apart=True), Form("full")]


class Chain(nn.Module):
    """Modules one after the other, to be captured as one. A router gives its own input first, unless it is alone."""

    def __init__(self, modules):
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, x):
        for module in self.inner[:-1]:
            x = module(x)
        out = self.inner[-1](x)
        return (x, *out) if isinstance(out, tuple) and len(self.inner) > 1 else out


@dataclass
class Group:
    """What is marked as one: a part run eagerly, or the parts of one graph (`captured`). `call` takes and gives the tensors between
    the parts of a layer; the gradient of the one at `edge` comes out of the group last."""

    name: str
    call: Callable
    edge: int = 0
    captured: bool = False


def mamba_sizes():
    """Hidden size, heads, size of a head, state and groups of nemotron_3_nano's Mamba-2 layers."""
    # Here, as its package is needed for these layers alone.
    from ref_mamba import W

    return W["nemotron_3_nano"][:5]


def layer(kind, tokens, form):
    """The modules of one layer by part, in their order."""
    if kind == "mamba":
        from ref_mamba import Mamba2

        # Norm and residual are in it: the layer is one part.
        return dict(mamba=Mamba2(*mamba_sizes()))
    if kind == "dense":
        return dict(attn=Attention(DENSE, tokens, False), mlp=Mlp(DENSE))
    # One graph of everything cannot wait for counts on the host.
    return dict(attn=Attention(MOE, tokens, True), moe_router=Router(MOE), moe_preprocess=Dispatch(MOE, form.scope != "full"),
                moe_experts=Experts(MOE))


class Stack:
    """`layers` layers with weights of their own, to be run in one form."""

    def __init__(self, kind, tokens, layers, form):
        self.kind, self.form, self.clock, self.layers = kind, form, Clock(), []
        hidden = mamba_sizes()[0] if kind == "mamba" else (DENSE if kind == "dense" else MOE)["hidden"]
        self.x = torch.randn(1, tokens, hidden, dtype=BF16, device="cuda", requires_grad=True)
        self.gradient = torch.randn_like(self.x)
        self.weights = []
        for _ in range(layers):
            modules = layer(kind, tokens, form)
            weights = [p for module in modules.values() for p in module.parameters()]
            for p in weights:
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02)
            self.weights += weights
            self.layers.append(self.groups(modules))
        self.replays = 2 * sum(group.captured for layer in self.layers for group in layer)

    def groups(self, modules):
        """A layer as groups, those of the form's scope captured."""
        parts = self.form.parts
        found = []
        for names in [[part] for part in parts] if self.form.apart or not parts else [parts]:
            # A chain of its own each: the call below replaces the forward function of what it captures.
            sample = self.x.detach().clone().requires_grad_()
            with other_threads_may_launch():
                graph = torch.cuda.make_graphed_callables(Chain([modules[name] for name in names]), (sample,))
            found.append(Group(",".join(names), calls(names, graph), captured=True))
        for name in modules.keys() - set(parts):
            # Behind the router the first tensor is the residual, which goes around them.
            edge = 1 if name in ("moe_preprocess", "moe_experts") else 0
            found.append(Group(name, calls([name], modules[name]), edge))
        order = list(modules)
        return sorted(found, key=lambda group: order.index(group.name.split(",")[0]))

    def step(self, marks=False):
        """Forward and backward; with `marks` the clock has the time of each group and pass, and what lies outside them."""
        clock = self.clock
        clock.on, clock.ms = marks, {}
        clock.start()
        for p in self.weights:
            p.grad = None
        clock.mark(OUTSIDE)
        state = (self.x,)
        for layer in self.layers:
            for group in layer:
                state = group.call(edged(state, group.edge, clock, group.name) if marks else state)
                clock.mark(("forward", group.name))
        state[0].backward(self.gradient)
        clock.mark(OUTSIDE)

    def marked(self):
        """Milliseconds of a step with marks, by (pass, group)."""
        torch.cuda.synchronize()
        self.step(True)
        return self.clock.ms


# What a step does before its first group and after its last.
OUTSIDE = ("outside", "")


def calls(names, module):
    """A call of `module`, which does the parts `names`, from the tensors before it to those after it."""
    if names[-1] == "moe_router":
        return (lambda state: (state[0], *module(state[0]))) if len(names) == 1 else (lambda state: module(state[0]))
    if names[-1] == "moe_preprocess":
        return lambda state: (state[0], *module(*state[1:]))
    if names[-1] == "moe_experts":
        return lambda state: (module(*state[1:], state[0]),)
    return lambda state: (module(state[0]),)


def whole_graph(stack):
    """One graph of forward and backward: what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            stack.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    for p in stack.weights:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    # Calls of other threads are let through, as in ref_mamba.py: Triton launches its backward kernels from autograd's.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        stack.step()
    return graph.replay


def ready(kind, tokens, layers, form):
    """A stack and its step, warm."""
    stack = Stack(kind, tokens, layers, form)
    step = whole_graph(stack) if form.scope == "full" else stack.step
    for _ in range(WARM_STEPS):
        step()
    torch.cuda.synchronize()
    return stack, step


def host_ms(step):
    """Host time of one step, the device idle before it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def wall_ms(step, steps):
    """Median wall time of a step, one after the other without waiting; one more before them fills the pipe."""
    torch.cuda.synchronize()
    step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def busy(step):
    """Device-busy milliseconds of a step (union of the intervals of kernels and copies) and their number."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(BUSY_STEPS):
            step()
        torch.cuda.synchronize()
    device = [e.time_range for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # Times of the profiler are in microseconds.
    union = union_ms([(t.start / 1e3, t.end / 1e3) for t in device])
    return union / BUSY_STEPS, round(len(device) / BUSY_STEPS)
