"""Every piece of a step, mbperf's beside its references, in one go on one GPU: `mbperf ops` of each workload, and PyTorch's
time of the same product or attention.

usage: pieces.py [--check] MBPERF OUT.csv [WORKLOAD ...]      --check: looks at the arguments and measures nothing

Workloads: those of side_by_side.py, the Mamba ones too where they are named (with what they need, see there).

A piece is timed as `mbperf ops` times it on both sides: a CUDA graph of at least 24 launches (6 of long ones) over buffers that are rotated
among, 256 MiB or more in all, so that the L2 does not hold them; the median of ten replays, after 200 ms of
them that are not timed. Order: mbperf, PyTorch, PyTorch,
mbperf; a ratio is of neighbours. PIECES_TURNS=1 in the environment: mbperf, PyTorch, once each, in half the time.

- A product: torch.mm, addmm, bmm or baddbmm in the same layout, into a result that is there already.
- Attention: cuDNN by PyTorch's own call, whose backward has the default form alone (it may add in any order); cuDNN's
  deterministic form is timed by mbperf, whatever `auto` takes.
- Mamba's scan: Triton's (`mamba_chunk_scan_combined`), forward, and forward and backward together; of the backward alone Triton has no
  call. Its gradients are those of the four tensors that come from products, as in ref_mamba.py.
- Loss, optimizer and embedding are of the whole step, all else of the layer stack.
"""
import csv, sys
from command_line import Table
from pieces_figures import BOTH_SCANS, COLUMNS, FORMS, SCAN, fields, key, lines
from side_by_side_figures import MAMBA, WORKLOADS, begin, run, torch_with_gpu, turns_of_pieces

PAST_L2 = 256 << 20
MAX_SETS = 16
LAUNCHES, LONG_LAUNCHES, LONG_FLOPS = 24, 6, 2e11   # as src/bench_ops/bench.rs
WARM, REPLAYS = 2, 10
HEAT_MS, MOST_HEATING = 200, 200   # as there: before timing, the card comes to the clock that the piece's own draw leaves
ORDERS = {"1": ("mbperf", "pytorch"), "2": ("mbperf", "pytorch", "pytorch", "mbperf")}
dev = "cuda"


def load():
    global torch, bf
    torch = torch_with_gpu()
    bf = torch.bfloat16


def ops(binary, line, name=None, more=""):
    """Rows of `mbperf ops` by op and shape."""
    command = [binary, "ops", *([name] if name else []), *line.split(), *more.split(), "--format", "csv"]
    return {key(r): r for r in csv.DictReader(run(command).splitlines())}


def whole(binary, line):
    """Ops of the layer stack, and those of the step that it lacks."""
    found = ops(binary, line, more="--stack_only")
    for name in ("cross_entropy", "adam", "embedding"):
        found |= ops(binary, line, name)
    return found


def timed(make, launch, bytes_of_one, flops):
    """Median microseconds of one `launch` of what `make` gave, over rotating buffers in one graph."""
    sets = [make() for _ in range(min(MAX_SETS, max(1, -(-PAST_L2 // bytes_of_one))))]
    launches = max(LAUNCHES if flops < LONG_FLOPS else LONG_LAUNCHES, len(sets))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for s in sets:
            launch(s)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Triton launches its backward kernels from autograd's thread.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(launches):
                launch(sets[i % len(sets)])

        def replay_ms():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        heat_ms = 0.0
        for _ in range(MOST_HEATING):
            heat_ms += replay_ms()
            if heat_ms >= HEAT_MS:
                break
        us = [replay_ms() * 1e3 / launches for _ in range(WARM + REPLAYS)]
    us = sorted(us[WARM:])
    del graph, sets
    torch.cuda.empty_cache()
    return (us[len(us) // 2 - 1] + us[len(us) // 2]) / 2


def product(shape):
    """Microseconds of the same product in PyTorch; None where it has none (an fp32 result of bf16 operands: none that adds, and
    none at all before PyTorch 2.8)."""
    f = fields(shape)
    wide = f["out"] == "F32"
    if wide and (f["accumulate"] != "No" or not hasattr(torch.ops.aten.mm, "dtype_out")):
        return None
    batch = [f["batch"]] if f["batch"] > 1 else []
    a_shape, b_shape = {"Nt": ("mk", "nk"), "Nn": ("mk", "kn"), "Tn": ("km", "kn")}[f["layout"]]
    tensor = lambda sides, dtype=bf: torch.randn(*batch, *(f[s] for s in sides), dtype=dtype, device=dev)
    adds = {"No": None, "InPlace": "d", "Residual": "c"}[f["accumulate"]]
    plain, adding = (torch.bmm, torch.baddbmm) if batch else (torch.mm, torch.addmm)

    def make():
        a, b, d = tensor(a_shape), tensor(b_shape), tensor("mn", torch.float32 if wide else bf)
        c = {None: None, "d": d, "c": tensor("mn") if adds == "c" else None}[adds]
        return a.mT if f["layout"] == "Tn" else a, b.mT if f["layout"] == "Nt" else b, c, d

    def launch(s):
        a, b, c, d = s
        if wide:
            (torch.ops.aten.bmm if batch else torch.ops.aten.mm).dtype_out(a, b, torch.float32, out=d)
        elif c is None:
            plain(a, b, out=d)
        else:
            adding(c, a, b, out=d)

    m, n, k = f["m"], f["n"], f["k"]
    batch_of = f["batch"]
    return timed(make, launch, 2 * batch_of * (m * k + n * k + m * n * (2 if adds == "c" else 1)), 2 * batch_of * m * n * k)


class Attention:
    """Tensors of one attention, laid out as mbperf's: batch, row, head, column."""

    def __init__(self, shape):
        f = fields(shape)
        self.batch, self.seq, self.causal = f["batch"], f["seq"], f["bidirectional"] == "false"
        self.q_heads, self.kv_heads, self.dim = f["q_heads"], f["kv_heads"], f["head_dim"]
        # Of q, k, v and o alone: more is rotated among than needed.
        # Of the forward pass.
        self.flops = (2 if self.causal else 4) * self.batch * self.q_heads * self.seq * self.seq * self.dim
        self.bytes = 4 * self.batch * self.seq * self.dim * (self.q_heads + self.kv_heads)

    def tensor(self, heads):
        return torch.randn(self.batch, self.seq, heads, self.dim, dtype=bf, device=dev).transpose(1, 2)

    def forward(self, q, k, v):
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal, False)

    def forward_us(self):
        make = lambda: (self.tensor(self.q_heads), self.tensor(self.kv_heads), self.tensor(self.kv_heads))
        return timed(make, lambda s: self.forward(*s), self.bytes, self.flops)

    def with_results(self):
        """q, k, v, what the forward left, and the gradient of its output."""
        q, k, v = self.tensor(self.q_heads), self.tensor(self.kv_heads), self.tensor(self.kv_heads)
        return q, k, v, self.forward(q, k, v), self.tensor(self.q_heads)

    def backward_us(self):
        def launch(s):
            q, k, v, (o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _), g = s
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, self.causal)

        return timed(self.with_results, launch, self.bytes, 2.5 * self.flops)


class Scan:
    """Tensors of one scan, as ref_mamba.py makes them."""

    def __init__(self, shape):
        f = fields(shape)
        self.batch, self.seq, self.heads, self.head_dim = f["batch"], f["seq"], f["heads"], f["head_dim"]
        self.groups, self.state, self.chunk = f["groups"], f["state"], f["chunk"]
        tokens = self.batch * self.seq
        # Of x, B, C, dt and y.
        self.bytes = 2 * tokens * (2 * self.heads * self.head_dim + 2 * self.groups * self.state + self.heads)
        # Of chunks and states, forward; by it alone the number of launches is chosen.
        self.flops = 2 * tokens * self.heads * (self.chunk * (self.state + self.head_dim) / 2 + 2 * self.state * self.head_dim)

    def make(self):
        tensor = lambda *sides: torch.randn(self.batch, self.seq, *sides, dtype=bf, device=dev, requires_grad=True)
        taken = tensor(self.heads, self.head_dim), tensor(self.heads), tensor(self.groups, self.state), tensor(self.groups, self.state)
        a = -torch.rand(self.heads, device=dev) * 15 - 1
        dy = torch.randn(self.batch, self.seq, self.heads, self.head_dim, dtype=bf, device=dev)
        return taken, a, torch.ones(self.heads, device=dev), torch.zeros(self.heads, device=dev), dy

    def forward(self, s):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
        (x, dt, b, c), a, d, bias, _ = s
        return mamba_chunk_scan_combined(x, dt, a, b, c, self.chunk, D=d, dt_bias=bias, dt_softplus=True)

    def both(self, s):
        with torch.enable_grad():
            return torch.autograd.grad(self.forward(s), s[0], s[-1])

    def forward_us(self):
        return timed(self.make, self.forward, self.bytes, self.flops)

    def both_us(self):
        return timed(self.make, self.both, 2 * self.bytes, 3 * self.flops)


def references(rows):
    """PyTorch's microseconds of each piece by key."""
    pytorch = {}
    for at in rows:
        name, shape = at
        try:
            with torch.no_grad():
                if name == "gemm":
                    pytorch[at] = product(shape)
                elif name == "attention_fwd":
                    pytorch[at] = Attention(shape).forward_us()
                elif name == "attention_bwd":
                    pytorch[at] = Attention(shape).backward_us()
                elif name == SCAN[0]:
                    pytorch[at] = Scan(shape).forward_us()
                elif name == SCAN[1]:
                    pytorch[BOTH_SCANS, shape] = Scan(shape).both_us()
        except (RuntimeError, NotImplementedError) as e:  # its line then has no reference
            print(f"PyTorch has no {name} {shape}: {e}", file=sys.stderr)
    return pytorch


def together(rounds):
    """Rounds of microseconds by key; a piece without a figure in one round has none."""
    return {at: [r[at] for r in rounds] for at in rounds[0] if all(r.get(at) for r in rounds)}


def main():
    binary, target, names = begin(__doc__, modules=["torch"], mamba_modules=["mamba_ssm", "einops"])
    order = ORDERS[turns_of_pieces()]
    load()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    with Table(target, COLUMNS) as table:
        for name in names:
            line = (WORKLOADS | MAMBA)[name]
            rounds, theirs, forms = [], [], {form: [] for form in FORMS}
            for side in order:
                if side == "pytorch":
                    theirs.append(references(rounds[0]))
                    continue
                rounds.append(whole(binary, line))
                # Of layers without attention `mbperf ops` has no form of it either, and says so by its exit code.
                if any(op.startswith("attention") for op, _ in rounds[-1]):
                    for form, option in FORMS.items():
                        forms[form].append(ops(binary, line, "attention", f"--stack_only {option}"))
            for found in lines(name, rounds, forms, together(theirs), l2_bytes):
                cells = found.cells()
                print(*(c for i, c in enumerate(cells) if COLUMNS[i] != "shape"), flush=True)
                table.row(cells)


if __name__ == "__main__":
    main()
