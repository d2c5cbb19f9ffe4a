"""What pieces.py computes without PyTorch: shapes as `mbperf ops` prints them, targets, and the table's lines."""
import re
from side_by_side_figures import interval

COLUMNS = ["workload", "piece", "shape", "launches_per_step", "mbperf_us", "reference", "reference_us", "ratio", "ratio_low", "ratio_high",
           "target", "past_l2", "met", "tflops", "gb_per_s", "share_of_ceiling"]

# SPEED's bounds: a ratio is the reference's time over mbperf's, 1 is as fast.
OF_DETERMINISTIC = 0.95
OWN_OF_DETERMINISTIC = 0.6
OF_LIST = 0.98
OF_PYTORCH = 1.0
OF_COPY = 0.85
# MAMBA's: at most 0.85 of the time of Triton's scan.
OF_TRITON = 1 / 0.85

# References.
LIST = "cublaslt list"
COPY = "copy ceiling"
PYTORCH = "pytorch"
TRITON = "triton"
DETERMINISTIC = "cudnn deterministic by mbperf"
DEFAULT = "cudnn default"

# Options of `mbperf ops attention` by form.
FORMS = {
    "cudnn": "--attention_backend cudnn",
    "default": "--attention_backend cudnn --attention_deterministic false",
    "own": "--attention_backend own",
}

# Ops that are bound by bytes and have a bound on their share of copy bandwidth: elementwise, norm, permute, loss, optimizer.
MOVES = ("rmsnorm", "swiglu", "qkv_rope", "gather_rows", "combine_rows", "silu", "cross_entropy", "adam", "gated_norm", "squared_relu")
# Held against a copy too, without a bound.
ALSO_MOVE = ("mamba_conv", "embedding", "column_sum")
# The scan's passes; the line of both is named after them.
SCAN = "ssd_fwd", "ssd_bwd"
BOTH_SCANS = "ssd_fwd+ssd_bwd"


def fields(shape):
    """Numbers and words of a shape by name: `Gemm { m: 8, layout: Nt }` gives m and layout. Of a name that comes twice the
    first counts."""
    found = {}
    for name, value in re.findall(r"(\w+): (-?[\w.]+)", shape):
        if name not in found:
            found[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return found


def key(row):
    return row["op"], row["shape"]


class Line:
    """One comparison of one piece, over rounds."""

    def __init__(self, workload, name, ours, reference, theirs, target=None, past_l2=None):
        """`ours`: rows of `mbperf ops`, one a round; `theirs`: microseconds, one a round, or none where there is no
        reference. `past_l2`: of a bound on bandwidth, whether one launch moves more than the L2 holds, so that it applies."""
        self.workload, self.name, self.ours, self.reference = workload, name, ours, reference
        self.theirs, self.target, self.past_l2 = theirs, target, past_l2

    def cells(self):
        first = self.ours[0]
        mine = [float(r["time_us"]) for r in self.ours]
        mean = lambda values: sum(values) / len(values)
        ratio = low = high = met = ""
        if self.theirs:
            ratios = [b / a for a, b in zip(mine, self.theirs)]
            value = interval(ratios)[0] if len(ratios) > 1 else ratios[0]
            ratio, low, high = f"{value:.4f}", f"{min(ratios):.4f}", f"{max(ratios):.4f}"
            if self.target is not None and self.past_l2 is not False:
                met = str(value >= self.target).lower()
        of = lambda name, digits: f"{mean([float(r[name]) for r in self.ours]):.{digits}f}"
        return [self.workload, self.name, first["shape"], first["launches_per_step"], f"{mean(mine):.3f}", self.reference,
                f"{mean(self.theirs):.3f}" if self.theirs else "", ratio, low, high, "" if self.target is None else self.target,
                "" if self.past_l2 is None else str(self.past_l2).lower(), met, of("tflops", 2), of("gb_per_s", 1),
                of("share_of_ceiling", 4)]


def lines(workload, rounds, forms, pytorch, l2_bytes):
    """All comparisons of one workload.

    `rounds`: rows of `mbperf ops` by key, one dictionary a round; `forms`: the same of attention alone by form (`cudnn`,
    `default`, `own`, see FORMS); `pytorch`: microseconds a round by key, of PyTorch (cuDNN in its default form for attention).
    """
    made = []
    for at, row in rounds[0].items():
        if not all(at in r for r in rounds):
            continue
        ours = [r[at] for r in rounds]
        name = row["op"]
        add = lambda *more, **how: made.append(Line(workload, name, ours, *more, **how))
        if name == "gemm":
            best = [float(r["list_best_us"]) for r in ours if r["list_best_us"]]
            add(LIST, best if len(best) == len(ours) else [], target=OF_LIST)
            add(PYTORCH, pytorch.get(at, []), target=OF_PYTORCH)
        elif name.startswith("attention"):
            made += attention(workload, at, ours, forms, pytorch)
        elif name.startswith(MOVES + ALSO_MOVE):
            bytes_moved = float(row["bytes"])
            copied = [bytes_moved / float(r["ceiling_gb_per_s"]) / 1e3 for r in ours]
            add(COPY, copied, target=OF_COPY if name.startswith(MOVES) else None, past_l2=bytes_moved > l2_bytes)
        elif name == SCAN[0]:
            add(TRITON, pytorch.get(at, []), target=OF_TRITON)
        elif name == SCAN[1]:
            add("", [])
            made += both_scans(workload, at, rounds, pytorch)
        else:
            add("", [])
    return made


def scan_key(shape, name):
    """Key of the other pass of a scan: shapes are printed with the pass's name before them."""
    return name, re.sub(r"^Ssd(Fwd|Bwd)", "SsdFwd" if name == SCAN[0] else "SsdBwd", shape)


def both_scans(workload, at, rounds, pytorch):
    """Forward and backward together, as Triton's are timed."""
    forward = scan_key(at[1], SCAN[0])
    if not all(forward in r for r in rounds):
        return []
    ours = []
    for r in rounds:
        passes = r[forward], r[at]
        total = sum(float(p["time_us"]) for p in passes)
        # Rates of both: of each weighed by its time.
        both = {c: sum(float(p[c]) * float(p["time_us"]) for p in passes) / total for c in ("tflops", "gb_per_s", "share_of_ceiling")}
        ours.append(r[at] | both | {"time_us": total})
    return [Line(workload, BOTH_SCANS, ours, TRITON, pytorch.get((BOTH_SCANS, at[1]), []), target=OF_TRITON)]


def attention(workload, at, ours, forms, pytorch):
    """What a run takes (`auto`), and our own kernels, against cuDNN's deterministic form. The forward pass has one form alone."""
    name = at[0]
    mine = lambda form: [r[at] for r in forms.get(form, []) if at in r]
    us = lambda found: [float(r["time_us"]) for r in found]
    # Where cuDNN did not run there is nothing to hold other kernels against.
    cudnn = [r for r in mine("cudnn") if r["attention_backend"].startswith("cudnn")]
    cudnn = us(cudnn) if len(cudnn) == len(ours) else []
    made = [Line(workload, name, ours, DETERMINISTIC, cudnn, target=OF_DETERMINISTIC),
            Line(workload, name, ours, f"{DEFAULT} by pytorch", pytorch.get(at, []))]
    if not name.endswith("_fwd"):
        made.append(Line(workload, name, ours, f"{DEFAULT} by mbperf", us(mine("default"))))
    if mine("own"):
        made.append(Line(workload, f"{name} own", mine("own"), DETERMINISTIC, cudnn, target=OWN_OF_DETERMINISTIC))
    return made
