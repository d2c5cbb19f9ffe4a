#!/usr/bin/env python3
"""Host time of eager PyTorch by part and pass, as a file for `mbperf --host_model FILE`.

usage: calibrate_host_model.py [-o FILE] [--steps N] [--layers L] [--check FILE]

Needs PyTorch and one GPU. Small modules of its own stand for the parts of a layer (attention, MLP, router, dispatch,
experts), in bf16, at the shapes of llama3_8b and qwen3_30b_a3b (8 of 128 experts local). A stack of L layers runs
forward and backward; a clock is read at each module's beginning and end, in the backward pass by hooks on the
gradients of what goes in and comes out. All times are the host's: the device is waited for between steps only.

--check FILE also writes, for the same stacks, whole-step figures of eager, scoped graphs and one graph.
"""
import argparse
import json
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

BF16 = torch.bfloat16
DENSE = dict(hidden=4096, heads=32, groups=8, head_dim=128, ffn=14336)
MOE = dict(hidden=2048, heads=32, groups=4, head_dim=128, ffn=768, experts=128, local=8, topk=8)
POINTS = [("dense", 128), ("dense", 512), ("dense", 8192), ("moe", 512), ("moe", 4096)]
NAMES = {"dense": "llama3_8b", "moe": "qwen3_30b_a3b"}


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


class Stack:
    def __init__(self, kind, tokens, layers, wait=True):
        c = DENSE if kind == "dense" else MOE
        self.kind, self.clock, self.parts = kind, Clock(), []
        for _ in range(layers):
            attention = Attention(c, tokens, kind == "moe")
            if kind == "dense":
                self.parts.append((attention, Mlp(c)))
            else:
                self.parts.append((attention, Router(c), Dispatch(c, wait), Experts(c)))
        self.weights = [p for layer in self.parts for m in layer for p in m.parameters()]
        for p in self.weights:
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.x = torch.randn(1, tokens, c["hidden"], dtype=BF16, device="cuda", requires_grad=True)
        self.gradient = torch.randn_like(self.x)

    def forward(self, edges):
        clock, x = self.clock, self.x
        edge = (lambda t, name: Edge.apply(t, clock, name)) if edges else (lambda t, name: t)
        for layer in self.parts:
            x = layer[0](edge(x, "attn"))
            clock.mark(("forward", "attn"))
            if self.kind == "dense":
                x = layer[1](edge(x, "mlp"))
                clock.mark(("forward", "mlp"))
                continue
            y, probs, index = layer[1](edge(x, "moe_router"))
            clock.mark(("forward", "moe_router"))
            rows, weights, source, offsets = layer[2](edge(y, "moe_preprocess"), probs, index)
            clock.mark(("forward", "moe_preprocess"))
            x = layer[3](edge(rows, "moe_experts"), weights, source, offsets, x)
            clock.mark(("forward", "moe_experts"))
        return x

    def step(self, edges=False):
        for p in self.weights:
            p.grad = None
        self.clock.start()
        self.forward(edges).backward(self.gradient)


def host_ms(step, steps):
    """Median host time of a step, the device idle before each."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def wall_ms(step, steps):
    """Median wall time of a step, one after the other without waiting."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def busy_ms(step):
    """Sum of kernel times of one step."""
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        step()
        torch.cuda.synchronize()
    device = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in device) / 1e3, len(device)


def point(kind, tokens, layers, steps):
    """A point of the table: the whole step's host time, shared out as the marks say."""
    stack = Stack(kind, tokens, layers)
    for _ in range(8):
        stack.step(True)
    samples = []
    for _ in range(steps):
        torch.cuda.synchronize()
        stack.clock.ms, stack.clock.on = {}, True
        stack.step(True)
        stack.clock.on = False
        samples.append(stack.clock.ms)
    torch.cuda.synchronize()
    marks = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
    # The marks cost time of their own: their shares are kept, the sum is that of steps without them.
    whole = host_ms(stack.step, steps)
    scale = whole / sum(marks.values()) / layers
    of = lambda wanted: {name: round(ms * scale, 4) for (which, name), ms in marks.items() if which == wanted}
    _, kernels = busy_ms(stack.step)
    print(f"{NAMES[kind]} {tokens} tokens: host {whole:.2f} ms, {kernels} kernels", file=sys.stderr)
    return dict(layer=kind, tokens=tokens, forward_ms=of("forward"), backward_ms=of("backward")), whole, kernels


def graphed(stack, scopes):
    """Replaces modules of the scopes by graphed callables; gives the number of replays a step."""
    replays = 0
    for i, layer in enumerate(stack.parts):
        layer = list(layer)
        for at, name in [(0, "attn"), (1, "mlp" if stack.kind == "dense" else "moe_router")]:
            if name in scopes:
                sample = stack.x.detach().clone().requires_grad_()
                layer[at] = torch.cuda.make_graphed_callables(layer[at], (sample,))
                replays += 2
        stack.parts[i] = tuple(layer)
    return replays


def whole_graph(stack):
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
    with torch.cuda.graph(graph):
        stack.step()
    return graph.replay


def warm(step, times=8):
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return step


def check(kind, tokens, layers, steps):
    """Whole-step figures of the ways to run one stack."""
    rows = []
    second = "mlp" if kind == "dense" else "moe_router"
    for scope in ("eager", "attn", f"attn,{second}", "full"):
        stack = Stack(kind, tokens, layers, wait=scope != "full")
        if scope not in ("eager", "full"):
            graphed(stack, scope.split(","))
        step = warm(whole_graph(stack) if scope == "full" else stack.step)
        busy, kernels = busy_ms(step)
        rows.append(dict(recipe=NAMES[kind], tokens=tokens, layers=layers, scope=scope, wall_ms=wall_ms(step, steps),
                         host_ms=host_ms(step, steps), busy_ms=busy, kernels=kernels))
        del stack, step
        torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="host_model.json")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--check", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("calibrate_host_model.py: PyTorch sees no GPU: run it on the machine whose host time you want")
    torch.manual_seed(0)
    layers, per_kernel = [], []
    for kind, tokens in POINTS:
        entry, whole, kernels = point(kind, tokens, args.layers, args.steps)
        layers.append(entry)
        if kind == "dense":
            per_kernel.append(whole / kernels)
        torch.cuda.empty_cache()
    stack = Stack("dense", 512, args.layers)
    replays = graphed(stack, ("attn", "mlp"))
    module_ms = host_ms(warm(stack.step), args.steps) / replays
    iteration_ms = host_ms(warm(whole_graph(Stack("dense", 512, args.layers))), args.steps)
    model = dict(
        format=1, name="calibrated",
        source=f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {platform.node()}, "
               f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}",
        layers=layers, module_replay_ms=round(module_ms, 4), iteration_replay_ms=round(iteration_ms, 4),
        other_launch_ms=round(statistics.median(per_kernel), 4))
    with open(args.output, "w") as out:
        json.dump(model, out, indent=1)
        out.write("\n")
    if args.check:
        rows = [row for kind, tokens in POINTS if (kind, tokens) != ("dense", 8192)
                for row in check(kind, tokens, args.layers, args.steps)]
        with open(args.check, "w") as out:
            json.dump(rows, out, indent=1)
            out.write("\n")
    print(f"wrote {args.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
