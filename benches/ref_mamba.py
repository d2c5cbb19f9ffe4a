"""Reference Mamba-2 layer times: Triton SSD kernels (forward + backward), eager and one graph.

Needs the folder mamba_ssm/ops/triton of the mamba_ssm source package (and mamba_ssm/utils/torch.py) on PYTHONPATH, beside einops.
Set TRITON_CACHE_AUTOTUNING=1, or every process tunes again (a minute and more).
usage: ref_mamba.py [WORKLOAD eager|full|compiled|scan]   (no argument: all, each in a process of its own)
"""
import json, os, sys
W = {"nemotronh_56b": (8192, 256, 64, 256, 8, 8192, 2), "nemotron_3_nano": (2688, 64, 64, 128, 8, 8192, 4), "nemotron_3_nano_s512": (2688, 64, 64, 128, 8, 512, 4)}
MODES = ["eager", "full", "compiled", "scan"]
if __name__ == "__main__":            # before PyTorch is loaded
    import command_line
    words = command_line.arguments(__doc__, 0, 2)
    if len(words) == 1: command_line.refuse("a workload needs a mode: " + ", ".join(MODES))
    command_line.known(words[:1], W)
    command_line.known(words[1:], MODES, "mode")
    command_line.installed("torch", "mamba_ssm", "einops")
import time, torch, torch.nn as nn, torch.nn.functional as F
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from ref_torch import measure, kernels, bf, dev

class Mamba2(nn.Module):
    def __init__(s, h, nh, hd, ds, ng, chunk=128):
        super().__init__(); s.nh, s.hd, s.ds, s.ng, s.chunk = nh, hd, ds, ng, chunk
        di = nh * hd; s.di = di; cd = di + 2 * ng * ds
        s.n = nn.RMSNorm(h, dtype=bf, device=dev)
        s.inp = nn.Linear(h, di + cd + nh, bias=False, dtype=bf, device=dev)
        s.conv = nn.Conv1d(cd, cd, 4, groups=cd, padding=3, dtype=bf, device=dev)
        s.A = nn.Parameter(torch.log(torch.rand(nh, device=dev) * 15 + 1)); s.D = nn.Parameter(torch.ones(nh, device=dev)); s.dtb = nn.Parameter(torch.zeros(nh, device=dev))
        s.gn = nn.RMSNorm(di, dtype=bf, device=dev); s.out = nn.Linear(di, h, bias=False, dtype=bf, device=dev)
    def forward(s, x):
        b, t, _ = x.shape
        z, xbc, dt = s.inp(s.n(x)).split([s.di, s.di + 2 * s.ng * s.ds, s.nh], -1)
        xbc = F.silu(s.conv(xbc.transpose(1, 2))[..., :t]).transpose(1, 2)
        xs, B, C = xbc.split([s.di, s.ng * s.ds, s.ng * s.ds], -1)
        y = mamba_chunk_scan_combined(xs.reshape(b, t, s.nh, s.hd).contiguous(), dt.contiguous(), -torch.exp(s.A), B.reshape(b, t, s.ng, s.ds).contiguous(), C.reshape(b, t, s.ng, s.ds).contiguous(), s.chunk, D=s.D, dt_bias=s.dtb, dt_softplus=True)
        return x + s.out(s.gn(y.reshape(b, t, s.di) * F.silu(z)))

def make(w, comp=False):
    h, nh, hd, ds, ng, seq, L = W[w]
    m = nn.ModuleList([Mamba2(h, nh, hd, ds, ng) for _ in range(L)])
    run = [torch.compile(mod) for mod in m] if comp else m
    x = torch.randn(1, seq, h, dtype=bf, device=dev, requires_grad=True); g = torch.randn(1, seq, h, dtype=bf, device=dev)
    def fb():
        for p in m.parameters(): p.grad = None
        x.grad = None
        y = x
        for mod in run: y = mod(y)
        y.backward(g)
    return m, fb

def compiled(w):
    """torch.compile on each layer, then one graph: the strongest PyTorch for this stack."""
    return full(w, True)

def eager(w):
    m, fb = make(w); r = measure(fb, n=20); nk, busy = kernels(fb)
    print(json.dumps(dict(workload=w, mode="eager", layers=W[w][6], seq=W[w][5], kernels=nk, gpu_busy_ms=busy, peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), **r)), flush=True)

def full(w, comp=False):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        m, fb = make(w, comp)
        for _ in range(3): fb()
        torch.cuda.synchronize()
        gr = torch.cuda.CUDAGraph()
        with torch.cuda.graph(gr, stream=s, capture_error_mode="thread_local"): fb()
    torch.cuda.synchronize()
    r = measure(gr.replay, n=20)
    print(json.dumps(dict(workload=w, mode="full", compiled=comp, layers=W[w][6], seq=W[w][5], peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), **r)), flush=True)

def scan(w):
    h, nh, hd, ds, ng, seq, L = W[w]
    mk = lambda *z: torch.randn(*z, dtype=bf, device=dev, requires_grad=True)
    xs, B, C, dt = mk(1, seq, nh, hd), mk(1, seq, ng, ds), mk(1, seq, ng, ds), mk(1, seq, nh)
    A, D, b = -torch.rand(nh, device=dev) * 15 - 1, torch.ones(nh, device=dev), torch.zeros(nh, device=dev)
    f = lambda: mamba_chunk_scan_combined(xs, dt, A, B, C, 128, D=D, dt_bias=b, dt_softplus=True)
    gy = torch.randn(1, seq, nh, hd, dtype=bf, device=dev)
    # in graphs, so that the host does not limit it: forward alone, and forward + backward, ten times each
    st = torch.cuda.Stream(); t = {}
    with torch.cuda.stream(st):
        fb = lambda: torch.autograd.grad(f(), (xs, B, C, dt), gy)
        for _ in range(3): fb()
        torch.cuda.synchronize()
        for name, body in (("fwd", f), ("fwd_bwd", fb)):
            gr = torch.cuda.CUDAGraph()
            with torch.cuda.graph(gr, stream=st, capture_error_mode="thread_local"):
                for _ in range(10): body()
            gr.replay(); ev = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; ts = []
            for _ in range(10): ev[0].record(st); gr.replay(); ev[1].record(st); torch.cuda.synchronize(); ts.append(ev[0].elapsed_time(ev[1]) / 10)
            t[name + "_graph_ms"] = round(sorted(ts)[5], 4)
    print(json.dumps(dict(ssd_scan=w, **t)), flush=True)

if __name__ == "__main__":
    if words:
        try: dict(zip(MODES, (eager, full, compiled, scan)))[words[1]](words[0])
        except Exception as ex: print(json.dumps(dict(workload=words[0], mode=words[1], error=repr(ex)[:400])), flush=True)
    else:
        import subprocess
        for w in W:
            for mode in MODES: subprocess.run([sys.executable, __file__, w, mode], stderr=subprocess.DEVNULL)
