"""Both sides in turn on one GPU: mbperf's stack against the strongest PyTorch (benches/ref_torch.py, `best` and
`best padded`: torch.compile, cuDNN attention, one graph).

usage: side_by_side.py MBPERF OUT.csv [WORKLOAD ...]
The Mamba workloads (benches/ref_mamba.py, `compiled`: torch.compile with Triton's scan) run when they are named: they
need the folder mamba_ssm/ops/triton of the package mamba_ssm, and einops, on PYTHONPATH.

mbperf's graph is timed in two forms: `graph`, everything on one stream as PyTorch's, and `graph_overlap_wgrad`, weight
gradients on a stream of their own (--overlap_wgrad), both against PyTorch's one graph. For each workload PyTorch's step is built and captured once and stays resident; then rounds of
PyTorch, mbperf, mbperf, PyTorch are timed, so that drift of clocks falls on both. A ratio is mbperf / PyTorch of one
round; the interval is Student's t over the rounds' logarithms.
"""
import csv, math, os, subprocess, sys, tempfile
import torch
import ref_torch as ref

ROUNDS = 3
T975 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}   # Student's t, 0.975, by degrees of freedom = rounds - 1
MBPERF_SECONDS = "2"
# Modes of mbperf, and the PyTorch form that each is held against.
MODES = {"eager": "eager", "graph": "graph", "graph_overlap_wgrad": "graph"}

LLAMA = "-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4"
QWEN = "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 4 model.moe_token_dispatcher_type=alltoall --use_tokendrop true"
NANO = "-m nemotronh -mr nemotron_3_nano -g h100 --num_layers 4 model.hybrid_override_pattern=MMMM model.recompute_granularity=null"
MAMBA = {
    "nemotronh_56b": "-m nemotronh -mr nemotronh_56b -g h100 -c fp8_cs --run_dtype bf16 -tp 1 -ng 1 --num_layers 2 model.hybrid_override_pattern=MM model.recompute_granularity=null -sl 8192",
    "nemotron_3_nano": f"{NANO} -sl 8192",
    "nemotron_3_nano_s512": f"{NANO} -sl 512",
}
STACK = "--stack_only --cuda_graph_impl local --cuda_graph_scope full_iteration"
WORKLOADS = {
    "llama3_8b": f"{LLAMA} -sl 8192",
    "llama3_8b_s512": f"{LLAMA} -sl 512",
    "llama3_8b_s128": f"{LLAMA} -sl 128",
    "qwen3_30b_a3b": f"{QWEN} -sl 4096",
    "qwen3_30b_a3b_s512": f"{QWEN} -sl 512",
}


def torch_step(name, graph):
    """A step of the reference, and its kernels: ref_torch.run's setup, kept resident."""
    if name in MAMBA:
        return mamba_step(name, graph)
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


def mamba_step(name, graph):
    """ref_mamba.full's setup, kept resident."""
    import ref_mamba
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        modules, step = ref_mamba.make(name, True)
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
    one, two = mbperf_rows(binary, line), mbperf_rows(binary, line + " --overlap_wgrad")
    return one | {"graph_overlap_wgrad": two["graph"]}


def mbperf_rows(binary, line):
    """Median step times of mbperf's arms, and its launches."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.csv")
        cmd = [binary, *line.split(), *STACK.split(), "--max_time", MBPERF_SECONDS, "-q", "-o", out]
        p = subprocess.run(cmd, capture_output=True, text=True)
        if p.returncode:
            sys.exit(f"{' '.join(cmd)}: exit {p.returncode}\n{p.stderr}")
        with open(out, newline="") as f:
            rows = {r["arm"]: r for r in csv.DictReader(f)}
    if rows["graph"]["digest_match"] != "true":
        sys.exit("the arms are not equal")
    return {arm: (float(r["step_time_ms_median"]), int(r["launches_per_step"])) for arm, r in rows.items()}


def interval(ratios):
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = sum(logs) / n
    half = T975[n - 1] * math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1) / n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    binary, target, names = sys.argv[1], sys.argv[2], sys.argv[3:] or list(WORKLOADS)
    context = ref_context()
    lines = []
    for name in names:
        steps = {"eager": torch_step(name, False), "graph": torch_step(name, True)}
        kernels = {mode: ref.kernels(step)[0] for mode, step in steps.items()}
        theirs, ours, launches = {mode: [] for mode in steps}, {mode: [] for mode in MODES}, {}
        for r in range(ROUNDS):
            order = ["torch", "mbperf"] if r % 2 == 0 else ["mbperf", "torch"]
            for side in order:
                if side == "torch":
                    for mode, step in steps.items():
                        theirs[mode].append(torch_ms(step))
                else:
                    for mode, (ms, n) in mbperf_ms(binary, (WORKLOADS | MAMBA)[name]).items():
                        ours[mode].append(ms)
                        launches[mode] = n
        for mode, other in MODES.items():
            ratio, low, high = interval([a / b for a, b in zip(ours[mode], theirs[other])])
            middle = lambda xs: sorted(xs)[len(xs) // 2]
            line = [name, mode, f"{middle(ours[mode]):.4f}", f"{middle(theirs[other]):.4f}", f"{ratio:.4f}", f"{low:.4f}", f"{high:.4f}", launches[mode], kernels[other]]
            print(*line, flush=True)
            lines.append(line)
        del steps
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    context.__exit__(None, None, None)
    with open(target, "w", newline="") as f:
        w = csv.writer(f)
        w.writerow(["workload", "mode", "mbperf_ms", "reference_ms", "ratio", "ratio_ci95_low", "ratio_ci95_high", "mbperf_launches", "reference_kernels"])
        w.writerows(lines)


def ref_context():
    """cuDNN attention in its default form, as `best` takes it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    c = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    c.__enter__()
    return c


if __name__ == "__main__":
    main()
