"""Modelled against measured: see host_model_check.sh, which calls this.

usage: host_model_check.py MBPERF FOLDER

FOLDER holds host_model.json and host_model_pytorch.json, as calibrate_host_model.py wrote them. For each stack and scope
mbperf runs under the model; the modelled step time is the larger of its host time (`host_ms_modelled_median`) and of
PyTorch's own device-busy time, so that kernels are equal on both sides and the host alone is judged. Writes
FOLDER/host_model_check.csv; exit code 1 if a ratio or an eager host time is off by over 10 %.
"""
import csv
import json
import os
import subprocess
import sys
import tempfile

LIMIT = 0.10
LLAMA = "-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 4"
QWEN = "-m qwen -mr qwen3_30b_a3b -g h100 --num_layers 4 model.moe_token_dispatcher_type=alltoall"
SECONDS = "3"
# PyTorch's scope by mbperf's options. One graph needs static shapes: expert models drop and pad for it.
SCOPES = {
    "attn": "--cuda_graph_scope attn",
    "attn,mlp": "--cuda_graph_scope attn,mlp",
    "attn,moe_router": "--cuda_graph_scope attn,moe_router",
    "full": "--cuda_graph_impl local --cuda_graph_scope full_iteration",
}


def modelled_host_ms(mbperf, model, recipe, tokens, scope):
    """Host time of a step under the model, eager and graph, as measured on the issuing thread."""
    line = f"{LLAMA if recipe == 'llama3_8b' else QWEN} -sl {tokens} --stack_only {SCOPES[scope]}"
    if recipe != "llama3_8b" and scope == "full":
        line += " --use_tokendrop true"
    with tempfile.TemporaryDirectory() as folder:
        rows = os.path.join(folder, "rows.csv")
        command = [mbperf, *line.split(), "--host_model", model, "--max_time", SECONDS, "-q", "-o", rows]
        subprocess.run(command, check=True, stderr=subprocess.PIPE)
        with open(rows, newline="") as f:
            return {r["arm"]: float(r["host_ms_modelled_median"]) for r in csv.DictReader(f)}


def table_ms(path, recipe, tokens, layers):
    """Eager host time of a stack by a table's own figures."""
    kind = "dense" if recipe == "llama3_8b" else "moe"
    with open(path) as f:
        entry = next(e for e in json.load(f)["layers"] if e["layer"] == kind and e["tokens"] == tokens)
    return layers * sum([*entry["forward_ms"].values(), *entry["backward_ms"].values()])


def main():
    mbperf, folder = sys.argv[1:3]
    fresh = os.path.join(folder, "host_model.json")
    shipped = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "host_models", "pytorch.json")
    with open(os.path.join(folder, "host_model_pytorch.json")) as f:
        measured = {(r["recipe"], r["tokens"], r["scope"]): r for r in json.load(f)}
    rows, failed = [], False
    for (recipe, tokens, scope), graph in measured.items():
        if scope == "eager":
            continue
        eager = measured[recipe, tokens, "eager"]
        host = modelled_host_ms(mbperf, fresh, recipe, tokens, scope)
        modelled = max(host["eager"], eager["busy_ms"]) / max(host["graph"], graph["busy_ms"])
        ratio = eager["wall_ms"] / graph["wall_ms"]
        row = dict(
            recipe=recipe, tokens=tokens, scope=scope.replace(",", "+"),
            speedup_pytorch=ratio, speedup_modelled=modelled, speedup_off=modelled / ratio - 1,
            host_ms_pytorch_eager=eager["host_ms"], host_ms_modelled_eager=host["eager"],
            host_eager_off=host["eager"] / eager["host_ms"] - 1,
            host_ms_pytorch_graph=graph["host_ms"], host_ms_modelled_graph=host["graph"],
            host_ms_shipped_eager=table_ms(shipped, recipe, tokens, eager["layers"]),
            busy_ms_pytorch_eager=eager["busy_ms"], busy_ms_pytorch_graph=graph["busy_ms"])
        row["shipped_eager_off"] = row["host_ms_shipped_eager"] / eager["host_ms"] - 1
        bad = max(abs(row["speedup_off"]), abs(row["host_eager_off"])) > LIMIT
        failed |= bad
        rows.append({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
        print(f"{recipe:14} {tokens:5} {scope:16} PyTorch {ratio:5.2f}x, modelled {modelled:5.2f}x ({row['speedup_off']:+.1%}); "
              f"eager host {eager['host_ms']:5.2f} ms, modelled {host['eager']:5.2f} ({row['host_eager_off']:+.1%}), "
              f"shipped table {row['shipped_eager_off']:+.1%}{'  <-- over 10 %' if bad else ''}", flush=True)
    with open(os.path.join(folder, "host_model_check.csv"), "w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys())
        out.writeheader()
        out.writerows(rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
