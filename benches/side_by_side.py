"""Both sides in turn on one GPU: mbperf's stack against the strongest PyTorch (benches/ref_torch.py, `best` and
`best padded`: torch.compile, cuDNN attention, one graph; with experts the padded form, as ragged experts took 19.4 ms at 4096
tokens and 3.08 at 512 where it took 18.8 and 2.78, on an H200).

usage: side_by_side.py [--check] MBPERF OUT.csv [WORKLOAD ...]      --check: looks at the arguments and measures nothing

The Mamba workloads (benches/ref_mamba.py, `compiled`: torch.compile with Triton's scan) run when they are named (`all` names
every workload): they need the folder mamba_ssm/ops/triton of the package mamba_ssm (and mamba_ssm/utils/torch.py, which that
loads), and einops, on PYTHONPATH. Triton tunes its scan for a minute or two a size; TRITON_CACHE_AUTOTUNING=1 keeps that for the
next process.

mbperf's graph is timed in three forms, all against PyTorch's one graph: `graph`, everything on one stream as PyTorch's;
`graph_overlap_wgrad`, weight gradients on a stream of their own (--overlap_wgrad); `graph_attention_default`, cuDNN's attention
in the form that PyTorch uses, which may add in any order (mbperf's arms then need not agree in bits, and no equality is
claimed). `graph_reference_full`, of Mamba workloads: the first form against their layers without torch.compile, in one graph
too (mode `full` of ref_mamba.py). For each workload PyTorch's step is built and captured once and stays resident; then rounds of PyTorch, mbperf,
mbperf, PyTorch are timed, so that drift of clocks falls on both. A ratio is mbperf / PyTorch of one round; the interval is
Student's t over the rounds' logarithms.

Gaps: one lone replay of each side's graph under the profiler of the driver (CUPTI, on both sides), from the first kernel's
start to the last one's end, less the time in which a kernel ran, over the nodes.
"""
import sys
from command_line import Table
from side_by_side_figures import MAMBA, STACK, WORKLOADS, begin, gap_us, graph_gap, interval, middle, times, torch_with_gpu

ROUNDS = 3
# Modes of mbperf, and the PyTorch form that each is held against.
MODES = {"eager": "eager", "graph": "graph", "graph_overlap_wgrad": "graph", "graph_attention_default": "graph", "graph_reference_full": "full"}
COLUMNS = ["workload", "mode", "mbperf_ms", "reference_ms", "ratio", "ratio_ci95_low", "ratio_ci95_high", "mbperf_launches",
           "reference_kernels", "mbperf_gap_us_per_node", "reference_gap_us_per_node"]


def load(names):
    """PyTorch and its stacks; the Mamba one at once where it is needed, as its package may lack a part."""
    global torch, ref
    torch = torch_with_gpu()
    import ref_torch as ref
    if any(name in MAMBA for name in names):
        try:
            import ref_mamba  # noqa: F401
        except ImportError as e:
            sys.exit(f"side_by_side.py: {e}: the Mamba workloads need mamba_ssm/ops/triton and einops")


def torch_step(name, graph):
    """A step of the reference, and its kernels: ref_torch.run's setup, kept resident."""
    if name in MAMBA:
        return mamba_step(name, graph, True)
    ref.Moe.padded = "qwen" in name
    m, cfg = ref.build(name, sync=False)
    x = torch.randn(1, cfg["seq"], cfg["h"], dtype=ref.bf, device=ref.dev, requires_grad=True)
    g = torch.randn(1, cfg["seq"], cfg["h"], dtype=ref.bf, device=ref.dev)
    for p in m.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02)
    mods = [torch.compile(mod) for mod in m]

    def step():
        for p in m.parameters():
            p.grad = None
        y = x
        for mod in mods:
            y = mod(y)
        y.backward(g)

    if not graph:
        for _ in range(3):
            step()
        return step
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(s)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    for p in m.parameters():
        p.grad = None
    with torch.cuda.graph(captured):
        step()
    step.keep = (m, x, g)
    captured.step = step
    return captured.replay


def mamba_step(name, graph, compiled):
    """ref_mamba.full's setup, kept resident."""
    import ref_mamba
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        modules, step = ref_mamba.make(name, compiled)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        if graph:
            with torch.cuda.graph(captured, stream=s, capture_error_mode="thread_local"):
                step()
    torch.cuda.synchronize()
    captured.keep = (modules, step)
    return captured.replay if graph else step


def torch_ms(step, seconds=1.0):
    """Median step time back to back, over about as long as one of mbperf's measurements."""
    probe = ref.measure(step, n=5, warm=5)["back_to_back_ms"]["median"]
    return ref.measure(step, n=max(10, int(seconds * 1e3 / probe)), warm=3)["back_to_back_ms"]["median"]


def mbperf_ms(binary, line):
    """Median step times and launches of mbperf, by mode."""
    one, two = times(binary, line), times(binary, line + " --overlap_wgrad")
    found = one | {"graph_overlap_wgrad": two["graph"]}
    # Mamba's layers have no attention, and a second reference.
    if "hybrid_override_pattern" in line:
        found["graph_reference_full"] = found["graph"]
    else:
        found["graph_attention_default"] = times(binary, line, unordered=True)["graph"]
    return found


def mbperf_gaps(binary, line):
    """Microseconds a node between the kernels of mbperf's graphs, by mode."""
    found = {"graph": graph_gap(binary, line), "graph_overlap_wgrad": graph_gap(binary, line + " --overlap_wgrad")}
    return {mode: f"{of[1] / of[0]:.3f}" for mode, of in found.items() if of and of[0]}


def torch_gap(step):
    """Microseconds a kernel between the kernels of one lone replay of PyTorch's graph. The second profile counts: the
    first loads the profiler."""
    from torch.profiler import profile, ProfilerActivity
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            step()
            torch.cuda.synchronize()
    device = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return f"{gap_us([(e.time_range.start, e.time_range.end) for e in device]) / len(device):.3f}" if device else ""


def main():
    binary, target, names = begin(__doc__, modules=["torch"], mamba_modules=["mamba_ssm", "einops"])
    load(names)
    # Written as it goes: a workload that fails leaves those before it.
    with Table(target, COLUMNS) as table:
        context = ref_context()
        for name in names:
            line = f"{(WORKLOADS | MAMBA)[name]} {STACK}"
            steps = {"eager": torch_step(name, False), "graph": torch_step(name, True)}
            if name in MAMBA:
                steps["full"] = mamba_step(name, True, False)
            kernels = {mode: ref.kernels(step)[0] for mode, step in steps.items()}
            theirs, ours, launches = {mode: [] for mode in steps}, {mode: [] for mode in MODES}, {}
            for r in range(ROUNDS):
                order = ["torch", "mbperf"] if r % 2 == 0 else ["mbperf", "torch"]
                for side in order:
                    if side == "torch":
                        for mode, step in steps.items():
                            theirs[mode].append(torch_ms(step))
                    else:
                        for mode, (ms, n) in mbperf_ms(binary, line).items():
                            ours[mode].append(ms)
                            launches[mode] = n
            # After all that is timed: a profiler slows down what follows it.
            gaps, their_gap = mbperf_gaps(binary, line), torch_gap(steps["graph"])
            for mode, other in MODES.items():
                if not ours[mode]:
                    continue
                ratio, low, high = interval([a / b for a, b in zip(ours[mode], theirs[other])])
                cells = [name, mode, f"{middle(ours[mode]):.4f}", f"{middle(theirs[other]):.4f}", f"{ratio:.4f}", f"{low:.4f}",
                         f"{high:.4f}", launches[mode], kernels[other], gaps.get(mode, ""), their_gap if mode in gaps else ""]
                print(*cells, flush=True)
                table.row(cells)
            del steps
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        context.__exit__(None, None, None)


def ref_context():
    """cuDNN attention in its default form, as `best` takes it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    c = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    c.__enter__()
    return c


if __name__ == "__main__":
    main()
