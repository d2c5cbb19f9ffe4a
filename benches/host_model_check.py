"""Modelled against measured: see host_model_check.sh, which calls this.

usage: host_model_check.py MBPERF FOLDER

FOLDER holds host_model.json and host_model_pytorch.json, as calibrate_host_model.py wrote them. For each stack and scope
mbperf runs under the model. Its modelled step is the larger of its host time (`host_ms_modelled_median`) and of the
device's time, in which PyTorch's device-busy time stands in place of mbperf's own: PyTorch's, plus what mbperf's device
has beside its own kernels (bare span less busy: gaps, waits for counts). So kernels are equal on both sides and the host
alone is judged. mbperf has one graph for all captured parts of a layer's pass, as Megatron; rows `apart`, where PyTorch
has a graph a part, get the model's figures for those replays in place of the one.

The measured ratio is the median over rounds of eager over graph, both of one round. Intervals (95 %, bootstrap over rounds)
hold what rounds differ by: of the measured ratio, and of the calibration behind the modelled one. Writes
FOLDER/host_model_check.csv and prints a table; exit code 1 if a ratio or an eager host time is off by over 10 %, whatever
the intervals say; 2 where the files or mbperf cannot be read or run.
"""
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile

from command_line import Table, arguments, refuse, runnable, writable
from host_model_figures import interval, median_of, quantiles

LIMIT = 0.10
# By recipe: kind of layer, mbperf's command line of as many layers as are put in, and what it needs more for one graph.
# One graph needs static shapes: expert models drop and pad for it.
STACKS = {
    "llama3_8b": ("dense", lambda n: f"-m llama -mr llama3_8b -g h100 -cp 1 --num_layers {n}", ""),
    "qwen3_30b_a3b": ("moe", lambda n: f"-m qwen -mr qwen3_30b_a3b -g h100 --num_layers {n} model.moe_token_dispatcher_type=alltoall",
                      " --use_tokendrop true"),
    # The recipe's own pattern has other layers between, and it recomputes, which the stacks of host_model_stack.py do not.
    "nemotron_3_nano": ("mamba", lambda n: f"-m nemotronh -mr nemotron_3_nano -g h100 --num_layers {n} "
                                           f"model.hybrid_override_pattern={'M' * n} model.recompute_granularity=null", ""),
}
SECONDS = "3"


def options(recipe, tokens, layers, scope):
    """mbperf's command line for a stack and PyTorch's scope."""
    _, stack, for_one_graph = STACKS[recipe]
    line = f"{stack(layers)} -sl {tokens} --stack_only"
    if scope != "full":
        return f"{line} --cuda_graph_scope {scope}"
    return f"{line} --cuda_graph_impl local --cuda_graph_scope full_iteration{for_one_graph}"


def run(mbperf, model, line):
    """Of each arm: host time of a step under the model, device time beside the kernels (None: not measured), replays."""
    with tempfile.TemporaryDirectory() as folder:
        rows = os.path.join(folder, "rows.csv")
        command = [mbperf, *line.split(), "--device", "cuda", "--host_model", model, "--max_time", SECONDS, "-q", "-o", rows]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"exit {done.returncode} of {' '.join(command)}: {done.stderr.strip()[-500:]}")
        with open(rows, newline="") as f:
            found = {row["arm"]: row for row in csv.DictReader(f)}
    number = lambda cell: float(cell) if cell else None
    arms = {}
    for arm, row in found.items():
        span, busy = number(row["device_span_ms_median"]), number(row["device_busy_ms"])
        beside = None if span is None or busy is None else max(0.0, span - busy)
        arms[arm] = dict(host_ms=float(row["host_ms_modelled_median"]), beside_ms=beside,
                         step_ms=number(row["step_time_ms_modelled_median"]), replays=number(row["graph_launches_per_step"]) or 0)
    return arms


def table_ms(model, recipe, tokens, layers):
    """Eager host time of a stack by a table's own figures; None: it has no such point."""
    kind = STACKS[recipe][0]
    found = [e for e in model["layers"] if e["layer"] == kind and e["tokens"] == tokens]
    return layers * sum([*found[0]["forward_ms"].values(), *found[0]["backward_ms"].values()]) if found else None


def apart_ms(model, recipe, layers, parts):
    """What a graph a part costs a step beyond one graph for all parts, by the model's replays."""
    kind = STACKS[recipe][0]
    of = lambda wanted: next(e["forward_ms"] + e["backward_ms"] for e in model["module_replays"]
                             if e["layer"] == kind and sorted(e["parts"]) == sorted(wanted))
    return layers * (sum(of([part]) for part in parts) - of(parts))


def speedup(eager, graph):
    """Ratio of two steps, each (host, device) milliseconds."""
    return max(eager) / max(graph)


def judge(eager, graph, arms, extra_ms):
    """All figures of a row. `eager`, `graph`: PyTorch's rows; `arms`: mbperf's; `extra_ms`: more host time of the graph arm."""
    rounds = len(eager["wall_ms"])
    ratios = [a / b for a, b in zip(eager["wall_ms"], graph["wall_ms"])]
    beside = {arm: arms[arm]["beside_ms"] or 0.0 for arm in arms}
    device = eager["busy_ms"] + beside["eager"], graph["busy_ms"] + beside["graph"]
    host = arms["eager"]["host_ms"], arms["graph"]["host_ms"] + extra_ms
    calibrated = statistics.median(eager["calibrated_host_ms"])

    def modelled(of):
        # Rounds that calibrated slow make every figure of the table larger.
        scale = median_of(eager["calibrated_host_ms"], of) / calibrated
        return speedup((host[0] * scale, device[0]), (host[1] * scale, device[1])), host[0] * scale

    ratio_off = lambda of: modelled(of)[0] / median_of(ratios, of) - 1
    host_off = lambda of: modelled(of)[1] / median_of(eager["host_ms"], of) - 1
    every = range(rounds)
    row = dict(recipe=eager["recipe"], tokens=eager["tokens"], scope=graph["scope"].replace(",", "+"),
               graphs="one" if graph["scope"] == "full" else "apart" if graph["apart"] else "joined", rounds=rounds)
    row["speedup_pytorch"] = statistics.median(ratios)
    row["speedup_pytorch_ci95_low"], row["speedup_pytorch_ci95_high"] = interval(rounds, lambda of: median_of(ratios, of))
    row["speedup_pytorch_round_p05"], row["speedup_pytorch_round_p95"] = quantiles(ratios, 0.05, 0.95)
    row["speedup_modelled"] = modelled(every)[0]
    row["speedup_off"] = ratio_off(every)
    row["speedup_off_ci95_low"], row["speedup_off_ci95_high"] = interval(rounds, ratio_off)
    row["speedup_modelled_busy_alone"] = speedup((host[0], eager["busy_ms"]), (host[1], graph["busy_ms"]))
    measured = statistics.median(eager["host_ms"])
    row["host_ms_pytorch_eager"], row["host_ms_modelled_eager"] = measured, host[0]
    row["host_eager_off"] = host_off(every)
    row["host_eager_off_ci95_low"], row["host_eager_off_ci95_high"] = interval(rounds, host_off)
    row["host_ms_pytorch_graph"], row["host_ms_modelled_graph"] = statistics.median(graph["host_ms"]), host[1]
    row["wall_ms_pytorch_eager"], row["wall_ms_pytorch_graph"] = (statistics.median(e["wall_ms"]) for e in (eager, graph))
    row["busy_ms_pytorch_eager"], row["busy_ms_pytorch_graph"] = eager["busy_ms"], graph["busy_ms"]
    row["beside_ms_mbperf_eager"], row["beside_ms_mbperf_graph"] = arms["eager"]["beside_ms"], arms["graph"]["beside_ms"]
    row["step_ms_mbperf_modelled_eager"], row["step_ms_mbperf_modelled_graph"] = (arms[a]["step_ms"] for a in ("eager", "graph"))
    row["replays_pytorch"], row["replays_mbperf"] = graph["replays"], arms["graph"]["replays"]
    return row


def word(off, low, high):
    """What a distance says, given its interval."""
    if abs(off) > LIMIT:
        return "OVER" if low > LIMIT or high < -LIMIT else "OVER, interval reaches within"
    return "within" if -LIMIT <= low and high <= LIMIT else "within, interval reaches over"


def line(row):
    off = lambda what: f"{row[what]:+6.1%} ({row[what + '_ci95_low']:+.1%} to {row[what + '_ci95_high']:+.1%})"
    said = word(row["speedup_off"], row["speedup_off_ci95_low"], row["speedup_off_ci95_high"])
    return (f"{row['recipe']:15} {row['tokens']:5} {row['scope']:15} {row['graphs']:6} "
            f"{row['speedup_pytorch']:5.2f} ({row['speedup_pytorch_ci95_low']:.2f} to {row['speedup_pytorch_ci95_high']:.2f}; rounds "
            f"{row['speedup_pytorch_round_p05']:.2f} to {row['speedup_pytorch_round_p95']:.2f})  {row['speedup_modelled']:5.2f}  "
            f"{off('speedup_off')}  {said}")


def host_line(row):
    said = word(row["host_eager_off"], row["host_eager_off_ci95_low"], row["host_eager_off_ci95_high"])
    shipped = "" if row["shipped_eager_off"] is None else f"; shipped table {row['shipped_eager_off']:+.1%}"
    return (f"{row['recipe']:15} {row['tokens']:5} eager host ms: PyTorch {row['host_ms_pytorch_eager']:.2f}, modelled "
            f"{row['host_ms_modelled_eager']:.2f}, {row['host_eager_off']:+.1%} ({row['host_eager_off_ci95_low']:+.1%} to "
            f"{row['host_eager_off_ci95_high']:+.1%}), {said}{shipped}")


def read(path, *lists):
    """A JSON object that holds these lists, none of them empty."""
    try:
        with open(path) as f:
            found = json.load(f)
    except (OSError, ValueError) as e:
        refuse(f"{path} cannot be read: {e}")
    for name in lists:
        if not isinstance(found, dict) or not isinstance(found.get(name), list) or not found[name]:
            refuse(f"{path} has no {name}: calibrate_host_model.py did not write this")
    return found


def main():
    mbperf, folder = arguments(__doc__, 2, 2)
    fresh_path, measured_path = (os.path.join(folder, name) for name in ("host_model.json", "host_model_pytorch.json"))
    fresh = read(fresh_path, "layers", "module_replays")
    shipped = read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "host_models", "pytorch.json"), "layers")
    measured = read(measured_path, "rows")["rows"]
    runnable(mbperf)
    writable(os.path.join(folder, "host_model_check.csv"))
    try:
        eager_rows = {(r["recipe"], r["tokens"]): r for r in measured if r["scope"] == "eager"}
        # Eager, with graphs, and what graphs apart cost beyond joined ones.
        pairs = []
        for graph in measured:
            if graph["scope"] != "eager":
                eager = eager_rows[graph["recipe"], graph["tokens"]]
                parts = graph["scope"].split(",")
                pairs.append((eager, graph, apart_ms(fresh, eager["recipe"], eager["layers"], parts) if graph["apart"] else 0.0))
    except (KeyError, TypeError, AttributeError, StopIteration) as e:
        refuse(f"{measured_path} does not go with {fresh_path}: {type(e).__name__} {e}: both are of one call of calibrate_host_model.py")
    if not pairs:
        refuse(f"{measured_path} has no rows with graphs")
    runs, rows, failed = {}, [], []
    for eager, graph, extra_ms in pairs:
        recipe, tokens, layers = eager["recipe"], eager["tokens"], eager["layers"]
        command = options(recipe, tokens, layers, graph["scope"])
        if command not in runs:
            print(f"mbperf {command}", file=sys.stderr, flush=True)
            try:
                runs[command] = run(mbperf, fresh_path, command)
            except (RuntimeError, OSError, KeyError, ValueError) as e:
                # The other rows are measured all the same.
                runs[command] = None
                failed.append(f"no figures for {recipe} {tokens} {graph['scope']}: {type(e).__name__}: {e}")
        if runs[command] is None:
            continue
        row = judge(eager, graph, runs[command], extra_ms)
        of_table = table_ms(shipped, recipe, tokens, layers)
        row["host_ms_shipped_eager"] = of_table
        row["shipped_eager_off"] = None if of_table is None else of_table / row["host_ms_pytorch_eager"] - 1
        rows.append(row)
    cell = lambda v: "" if v is None else f"{v:.4g}" if isinstance(v, float) else v
    if rows:
        with Table(os.path.join(folder, "host_model_check.csv"), rows[0].keys()) as table:
            for row in rows:
                table.row(map(cell, row.values()))
    print(f"\neager over graph, of {rows[0]['rounds'] if rows else 0} rounds: PyTorch (95 % interval of the median; 5 to 95 % of rounds), "
          f"modelled, off (95 % interval), limit {LIMIT:.0%}")
    for row in rows:
        print(line(row))
    for key in dict.fromkeys((row["recipe"], row["tokens"]) for row in rows):
        print(host_line(next(row for row in rows if (row["recipe"], row["tokens"]) == key)))
    over = [row for row in rows if abs(row["speedup_off"]) > LIMIT]
    slow = {(r["recipe"], r["tokens"]) for r in rows if abs(r["host_eager_off"]) > LIMIT}
    for row in rows:
        expected = row["replays_pytorch"] // (2 if row["graphs"] == "apart" else 1)
        if row["replays_mbperf"] != expected:
            failed.append(f"{row['recipe']} {row['tokens']} {row['scope']}: mbperf replays {row['replays_mbperf']:.0f} graphs a step, "
                          f"{expected} were expected: the sides do not capture the same")
    for what in failed:
        print(what)
    print(f"{len(rows) - len(over)} of {len(rows)} ratios and {len(eager_rows) - len(slow)} of {len(eager_rows)} eager host times "
          f"within {LIMIT:.0%}{', with failures' if failed else ''}")
    sys.exit(1 if over or slow or failed else 0)


if __name__ == "__main__":
    main()
