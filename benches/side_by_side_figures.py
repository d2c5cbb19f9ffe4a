"""What the side-by-side scripts have in common and compute without PyTorch: the workloads, mbperf's runs, ratios with
their intervals, gaps between kernels."""
import csv, math, os, statistics, subprocess, sys, tempfile
import command_line
import host_model_figures as figures

# Student's t, 0.975, by degrees of freedom = ratios - 1.
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
LLAMA = "-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4"
QWEN_DROPLESS = "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 4"
PADDED = "model.moe_token_dispatcher_type=alltoall --use_tokendrop true"
QWEN = f"{QWEN_DROPLESS} {PADDED}"
NANO = "-m nemotronh -mr nemotron_3_nano -g h100 --num_layers 4 model.hybrid_override_pattern=MMMM model.recompute_granularity=null"
MAMBA = {
    "nemotronh_56b": "-m nemotronh -mr nemotronh_56b -g h100 -c fp8_cs --run_dtype bf16 -tp 1 -ng 1 --num_layers 2 model.hybrid_override_pattern=MM model.recompute_granularity=null -sl 8192",
    "nemotron_3_nano": f"{NANO} -sl 8192",
    "nemotron_3_nano_s512": f"{NANO} -sl 512",
}
# Stands for every workload, those with Mamba layers too.
ALL = "all"
WORKLOADS = {
    "llama3_8b": f"{LLAMA} -sl 8192",
    "llama3_8b_s512": f"{LLAMA} -sl 512",
    "llama3_8b_s128": f"{LLAMA} -sl 128",
    "qwen3_30b_a3b": f"{QWEN} -sl 4096",
    "qwen3_30b_a3b_s512": f"{QWEN} -sl 512",
}
STACK = "--stack_only --cuda_graph_impl local --cuda_graph_scope full_iteration"


def seconds_of_a_run():
    """What the pairs of steps of one run of mbperf take: MBPERF_SECONDS of the environment."""
    return command_line.seconds("MBPERF_SECONDS", "2")


def turns_of_pieces():
    """How often each side times a piece: PIECES_TURNS of the environment."""
    return command_line.choice("PIECES_TURNS", "2", ("1", "2"))


def begin(doc, named=True, modules=(), mamba_modules=()):
    """mbperf, the file to be written and the workloads, once all that can be wrong before measuring was looked at; with `--check` as
    the first argument the script ends there. `named`: workloads may be named (beside `--check` always: side_by_side.sh has them looked
    at by every script); `modules`: what Python must have."""
    check = sys.argv[1:2] == ["--check"]
    if check:
        del sys.argv[1]
    binary, target, *names = command_line.arguments(doc, 2, None if named or check else 2)
    command_line.known(names, [*WORKLOADS, *MAMBA, ALL])
    if ALL in names:
        names = [*WORKLOADS, *MAMBA]
    # Both, whichever this script asks for: its caller has other scripts run too.
    seconds_of_a_run(), turns_of_pieces()
    command_line.runnable(binary)
    command_line.writable(target)
    command_line.installed(*modules, *(mamba_modules if any(n in MAMBA for n in names) else ()))
    if check:
        sys.exit(0)
    return binary, target, names or list(WORKLOADS)


def torch_with_gpu():
    """PyTorch, once the arguments are looked at: it takes seconds to load."""
    try:
        import torch
    except ImportError as e:
        sys.exit(f"{command_line.script()}: {e} (of {sys.executable}): run this with a Python that has PyTorch for CUDA")
    if not torch.cuda.is_available():
        sys.exit(f"{command_line.script()}: PyTorch sees no GPU")
    return torch


def run(command):
    """Standard output of a command; one that fails ends the script with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def rows(binary, line, unordered=False):
    """mbperf's rows of one run, by arm. `unordered`: attention may add in any order, so that bits may differ."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.csv")
        more = ["--attention_deterministic", "false"] if unordered else []
        run([binary, *line.split(), *more, "--device", "cuda", "--max_time", seconds_of_a_run(), "-q", "-o", out])
        found = {r["arm"]: r for r in read(out)}
    if found["graph"]["digest_match"] != "true" and not unordered:
        sys.exit(f"the arms are not equal: {line}")
    return found


def times(binary, line, **how):
    """Median step times of mbperf's arms, and its launches."""
    return {arm: (float(r["step_time_ms_median"]), int(r["launches_per_step"])) for arm, r in rows(binary, line, **how).items()}


def graph_gap(binary, line):
    """(nodes, microseconds between them) of one lone replay of mbperf's graph, as its profiler recorded it; None where it
    cannot record (no CUPTI)."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.csv")
        command = [binary, *line.split(), "--device", "cuda", "--max_time", "1", "--profile", "-q", "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        profile = os.path.join(folder, "rows.profile.csv")
        if done.returncode or not os.path.exists(profile):
            print(f"no gaps: {' '.join(command)}: exit {done.returncode}\n{done.stderr}", file=sys.stderr)
            return None
        mine = [r for r in read(profile) if r["arm"] == "graph"]
    return sum(int(r["launches"]) for r in mine), sum(float(r["idle_before_ms"]) for r in mine) * 1e3


def gap_us(intervals):
    """Microseconds between the first start and the last end in which no kernel ran."""
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return span - figures.union_ms(intervals)


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def interval(ratios):
    """Geometric mean, and the ends of its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = sum(logs) / n
    half = T975[n - 1] * math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1) / n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def middle(values):
    return statistics.median(values)
