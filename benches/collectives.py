#!/usr/bin/env python3
"""Collectives of mbperf's step beside the same ones in a bare loop, on a machine with two GPUs, NCCL and PyTorch.

usage: benches/collectives.py MBPERF OUT.csv [--dryrun]

Workloads of two ranks are run with --profile; the trace has a slice for every kernel of a step of rank 0, sizes follow from the
configuration (`sizes`). The same sizes are then timed with PyTorch's process group over NCCL, one call after the other,
on their own and in a CUDA graph. Columns of OUT.csv: results/README.md. `--dryrun`: plans the workloads (no GPU needed).
MBPERF_SECONDS (default 2): seconds of measuring before the profile.
"""
import bisect, collections, csv, json, os, socket, statistics, subprocess, sys, tempfile

RANKS = 2
# A bus bandwidth in the step is to be this share of the bare loop's.
TARGET = 0.9
# Below this many bytes a collective is bound by its start, and no bandwidth is asked of it.
JUDGED_BYTES = 1 << 20
# No step outruns its own wire: a larger ratio says that a size is wrong.
IMPLAUSIBLE = 1.25
# Longest run of mbperf, kernels compiled anew included.
RUN_TIMEOUT_S = 150
COLUMNS = ("workload", "arm", "op", "bytes", "in_graph", "launches", "beside", "in_step_us", "in_step_us_p10", "bare_us",
           "bus_gb_per_s", "bare_bus_gb_per_s", "ratio", "target", "met")
LLAMA = f"-m llama -mr llama3_8b -g h100 -ng {RANKS} -cp 1 --num_layers 8"
QWEN = f"-m qwen -mr qwen3_30b_a3b -g h100 -ng {RANKS} -ep 2 --num_layers 4"
WORKLOADS = {
    "llama3_8b tp 2": f"{LLAMA} -tp 2 --cuda_graph_scope attn,mlp",
    "llama3_8b tp 2, no sequence parallelism": f"{LLAMA} -tp 2 --cuda_graph_scope attn,mlp model.sequence_parallel=false",
    "llama3_8b dp 2": f"{LLAMA} -tp 1 --cuda_graph_impl local --cuda_graph_scope full_iteration",
    "llama3_8b dp 2, no overlap":
        f"{LLAMA} -tp 1 --cuda_graph_impl local --cuda_graph_scope full_iteration ddp.overlap_grad_reduce=false",
    "qwen3_30b_a3b ep 2, dropless": f"{QWEN} --cuda_graph_scope attn,moe_router",
    "qwen3_30b_a3b ep 2, padded":
        f"{QWEN} --use_tokendrop true model.moe_token_dispatcher_type=alltoall --cuda_graph_impl local --cuda_graph_scope full_iteration",
}
# As mbperf names its ops.
OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce", "all_to_all": "all_to_all",
       "all_to_all_rows": "all_to_all"}
ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "int32": 4}

# What a collective is: `bytes` of the whole buffer of a rank (all ranks' pieces), as nccl-tests counts it.
Size = collections.namedtuple("Size", "bytes dtype in_place")
# One collective of the step: `nth` counts all-to-alls of one layer, pass and micro-batch.
Seen = collections.namedtuple("Seen", "arm op part layer where micro_batch nth of in_graph us beside")


def bus_factor(op, ranks=RANKS):
    """Share of the buffer that crosses a rank's wire in each direction, by a ring."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def bus_gb_per_s(op, size_bytes, us, ranks=RANKS):
    return size_bytes * bus_factor(op, ranks) / us / 1e3


def expert_rows(config):
    """Rows that a rank sends: those of its tokens' choices, or with drop and pad all bins at their capacity."""
    moe, tokens = config["model"]["moe"], tokens_of(config)
    chosen = tokens * moe["router_topk"]
    if moe["pad_to_capacity"]:
        experts = moe["num_experts"]
        return -(-int(chosen * moe["capacity_factor"]) // experts) * experts
    return chosen


def tokens_of(config):
    return config["batch"]["micro_batch_size"] * config["batch"]["seq_length"] // config["parallel"]["cp"]


def size(config, op, part, where, nth=0, of=1):
    """Size of a collective of the step by its place (src/workloads); None where it is not known here. With dropless experts
    that of balanced routing: what really travels differs by a share of 1e-3 or so."""
    parallel, hidden, tokens = config["parallel"], config["model"]["hidden_size"], tokens_of(config)
    if op in ("all_to_all", "all_to_all_rows") and part.startswith("moe_"):
        # Rows, one probability a row, rows back; backward rows, rows back and their probabilities' gradients.
        if of != 3 or where not in ("forward", "backward"):
            return None
        if nth == (1 if where == "forward" else 2):
            return Size(expert_rows(config) * 4, "fp32", False)
        width = config["model"]["moe"]["latent_size"] or hidden
        return Size(expert_rows(config) * width * 2, "bf16", False)
    if op in ("all_gather", "reduce_scatter", "all_reduce") and part in ("embedding", "attn", "mlp", "head") and parallel["tp"] > 1:
        return Size(tokens * hidden * 2, "bf16", op == "all_reduce")
    if (op, part) == ("all_gather", "loss") and parallel["tp"] > 1:
        return Size(tokens * 3 * 4 * parallel["tp"], "fp32", False)
    if (op, part) == ("all_gather", "moe_experts") or (op, part) == ("all_gather", "moe_preprocess"):
        return Size((config["model"]["moe"]["num_experts"] + 1) * 4 * parallel["ep"], "int32", False)
    if (op, part) in (("reduce_scatter", "grad_reduce"), ("all_gather", "optimizer")) and parallel["dp"] > 1:
        dtype = "fp32" if op == "reduce_scatter" and config["optimizer"]["grad_dtype"] == "fp32" else "bf16"
        step = 128 * parallel["dp"]
        elements = (parallel["ddp"]["bucket_size"] or 128 << 20) // step * step
        return Size(elements * ELEMENT_BYTES[dtype], dtype, True)
    return None


def union(spans):
    """Spans joined where they overlap, in order."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def covered(joined, start, end):
    """Time from start to end that lies in the joined spans."""
    at = bisect.bisect_left([s[1] for s in joined], start)
    found = 0.0
    while at < len(joined) and joined[at][0] < end:
        found += max(0.0, min(end, joined[at][1]) - max(start, joined[at][0]))
        at += 1
    return found


def collectives(trace):
    """All collectives of both arms' steps. A launch that is a copy and a kernel (an all-to-all, whose own rows do not travel)
    lasts from its first start to its last end."""
    arms = {e["pid"]: e["args"]["name"].split()[0] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    seen = []
    for pid, arm in arms.items():
        own = [e for e in slices if e["pid"] == pid]
        launches, others = collections.defaultdict(list), []
        for e in own:
            if e["args"]["op"] in OPS and e["args"]["launch"] is not None:
                launches[e["args"]["launch"]].append(e)
            else:
                others.append((e["ts"], e["ts"] + e["dur"]))
        others = union(others)
        exchanges = collections.defaultdict(list)
        place = lambda a: (a["layer"], a["pass"], a["micro_batch"])
        for launch in sorted(launches):
            a = launches[launch][0]["args"]
            if OPS[a["op"]] == "all_to_all":
                exchanges[place(a)].append(launch)
        for launch, events in sorted(launches.items()):
            a = events[0]["args"]
            start, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
            same = exchanges[place(a)] if OPS[a["op"]] == "all_to_all" else [launch]
            beside = covered(others, start, end) / (end - start) if end > start else 0.0
            seen.append(Seen(arm, a["op"], a["part"], a["layer"], a["pass"], a["micro_batch"], same.index(launch), len(same),
                             any(e["args"]["graph"] for e in events), end - start, beside))
    return seen


def grouped(config, seen):
    """Durations and shares beside other kernels by (arm, op, size, in a graph, part where the size is not known). Of buckets
    the shortest is left out: the last one holds what is left, and a lone one is of no known size."""
    groups = collections.defaultdict(list)
    for s in seen:
        found = size(config, s.op, s.part, s.where, s.nth, s.of)
        buckets = found and found.in_place and s.op != "all_reduce"
        groups[s.arm, s.op, found, s.in_graph, s.part if buckets or not found else None].append((s.us, s.beside))
    made = {}
    for (arm, op, found, in_graph, part), durations in groups.items():
        if found and part and len(durations) > 1:
            durations, part = sorted(durations)[1:], None
        elif part:
            found = None
        made[arm, op, found, in_graph, part] = durations
    return made


def tenth(values):
    """The 10th percentile: of few values the least."""
    return sorted(values)[len(values) // 10]


def lines(workload, groups, bare):
    """Lines of the table. `bare`: microseconds by (NCCL's op, size, in a graph)."""
    made = []
    for (arm, op, found, in_graph, part), durations in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1], -(g[0][2] or (0,))[0], g[0][3])):
        us = statistics.median(d[0] for d in durations)
        bare_us = bare.get((OPS[op], found, in_graph)) if found else None
        line = dict.fromkeys(COLUMNS, "")
        line |= dict(workload=workload, arm=arm, op=op if found else f"{op} ({part})", in_graph=str(in_graph).lower(),
                     launches=len(durations), beside=f"{statistics.median(d[1] for d in durations):.2f}", in_step_us=f"{us:.2f}",
                     in_step_us_p10=f"{tenth([d[0] for d in durations]):.2f}")
        if found:
            line |= dict(bytes=found.bytes, bus_gb_per_s=f"{bus_gb_per_s(OPS[op], found.bytes, us):.2f}")
        if bare_us:
            line |= dict(bare_us=f"{bare_us:.2f}", bare_bus_gb_per_s=f"{bus_gb_per_s(OPS[op], found.bytes, bare_us):.2f}",
                         ratio=f"{bare_us / us:.4f}")
            if found.bytes >= JUDGED_BYTES:
                line |= dict(target=TARGET, met=str(bare_us / us >= TARGET).lower())
        made.append(line)
    return made


def planned(binary, line):
    """The configuration that a line stands for."""
    command = [binary, *line.split(), "--nproc_per_node", str(RANKS), "--dryrun", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {line}\n{done.stderr.strip()}")
    found = json.loads(done.stdout)
    if not found["program"]:
        raise RuntimeError(f"not built: {line}")
    return found["config"]


def profiled(binary, line, seconds):
    """The trace of one step of each arm."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "rows.csv")
        command = [binary, *line.split(), "--nproc_per_node", str(RANKS), "--profile", "--max_time", seconds, "-q", "-o", out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {line}\n{done.stderr.strip()}")
        with open(out, newline="") as f:
            if any(r["digest_match"] != "true" for r in csv.DictReader(f)):
                raise RuntimeError(f"the arms are not equal: {line}")
        with open(out.replace(".csv", ".trace.json")) as f:
            return json.load(f)


def worker(rank, jobs, port, path):
    """Times of each job on one of the ranks; rank 0 writes those of the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    found = []
    for op, (size_bytes, dtype, in_place), in_graph in jobs:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}[dtype]
        us = torch.tensor(timed(torch, dist, rank, op, size_bytes, dtype, in_place, in_graph), device="cuda")
        dist.all_reduce(us, op=dist.ReduceOp.MAX)
        found.append(us.item())
        torch.cuda.empty_cache()
    if rank == 0:
        with open(path, "w") as f:
            json.dump(found, f)
    dist.destroy_process_group()


def timed(torch, dist, rank, op, size_bytes, dtype, in_place, in_graph):
    """Microseconds of a call, median of rounds of calls back to back."""
    piece = max(1, size_bytes // dtype.itemsize // RANKS)
    # Past the L2, as in a step.
    sets = max(1, min(8, (256 << 20) // size_bytes))
    pairs = []
    for _ in range(sets):
        whole = torch.ones(piece * RANKS, dtype=dtype, device="cuda")
        own = whole[rank * piece:][:piece] if in_place else torch.ones(piece, dtype=dtype, device="cuda")
        pairs.append((whole, own, torch.empty_like(whole) if op == "all_to_all" else None))

    def call(i):
        whole, own, other = pairs[i % sets]
        if op == "all_gather":
            dist.all_gather_into_tensor(whole, own)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(own, whole)
        elif op == "all_reduce":
            dist.all_reduce(whole)
        else:
            dist.all_to_all_single(other, whole)

    calls = 16 if size_bytes >= 16 << 20 else 64

    def loop():
        for i in range(calls):
            call(i)

    loop()
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loop()
        run = graph.replay
    else:
        run = loop
    rounds = []
    for _ in range(9):
        dist.barrier()
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        rounds.append(first.elapsed_time(last) * 1e3 / calls)
    # The first rounds warm up.
    us = statistics.median(rounds[2:])
    if in_graph:
        del run
        graph.reset()
    return us


def bare_times(jobs):
    """Microseconds of each job, by a process a GPU."""
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bare.json")
        mp.spawn(worker, args=(jobs, port, path), nprocs=RANKS)
        with open(path) as f:
            return dict(zip(jobs, json.load(f), strict=True))


def known(config):
    """Sizes that a configuration's step may hold, for the dry run."""
    places = [("all_gather", p, "forward", 0, 1) for p in ("attn", "loss", "optimizer")]
    places += [("reduce_scatter", "attn", "forward", 0, 1), ("reduce_scatter", "grad_reduce", "other", 0, 1)]
    places += [("all_reduce", "attn", "forward", 0, 1)]
    if config["model"]["moe"]:
        places += [("all_gather", "moe_experts", "forward", 0, 1)] + [("all_to_all", "moe_experts", "forward", n, 3) for n in (0, 1)]
    return [(op, found) for op, *place in places if (found := size(config, op, *place))]


def main(arguments):
    dry = "--dryrun" in arguments
    rest = [a for a in arguments if a != "--dryrun"]
    if len(rest) != 2 or any(a.startswith("-") for a in rest):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    binary, out = rest
    seconds, failed, measured = os.environ.get("MBPERF_SECONDS") or "2", 0, []
    for workload, line in WORKLOADS.items():
        try:
            config = planned(binary, line)
            if dry:
                print(f"{workload}: " + ", ".join(f"{op} {found.bytes}" for op, found in known(config)))
                continue
            measured.append((workload, grouped(config, collectives(profiled(binary, line, seconds)))))
            print(f"{workload}: profiled", flush=True)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            failed += 1
            print(f"FAILED {workload}: {e}", file=sys.stderr)
    if dry:
        return 1 if failed else 0
    jobs = sorted({(OPS[op], found, in_graph) for _, groups in measured for _, op, found, in_graph, _ in groups if found})
    bare = {}
    if jobs:
        try:
            bare = bare_times(jobs)
        except Exception as e:  # Whatever PyTorch throws: the step's own figures are kept.
            failed += 1
            print(f"FAILED the bare loop: {e}", file=sys.stderr)
    made = [line for workload, groups in measured for line in lines(workload, groups, bare)]
    if made:
        with open(out + ".part", "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(made)
        os.replace(out + ".part", out)
        print(f"{len(made)} lines: {out}")
    for line in made:
        if line["met"] == "false" or line["ratio"] and line["target"] and float(line["ratio"]) > IMPLAUSIBLE:
            what = "under the target" if line["met"] == "false" else "over what a wire gives: is its size right?"
            print(f"{line['workload']}, {line['arm']}: {line['op']} of {line['bytes']} bytes at {line['ratio']} of the bare loop, {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
