#!/usr/bin/env python3
"""The host model against PyTorch where the host's speed wanders: calibration and check in turns, not one after the other.

usage: host_model_in_turns.py MBPERF FOLDER [--rounds N]

On a shared host PyTorch's own host time of one stack moves by 10 to 25 % between two loops a second apart (seen on an
H200 machine), more than the 10 % that the model is to be held to. So every stack of benches/calibrate_host_model.py stands
in memory in all its forms (eager, scoped graphs, one graph), and each round runs a few steps of each: steps that calibrate,
and others that are compared with them. Figures are medians over rounds. Writes FOLDER/host_model.json (for
`--host_model`) and FOLDER/host_model_pytorch.json, and then runs benches/host_model_check.py on them, whose exit code is
this script's: 1 if an eager host time or a ratio is off by over 10 %.

Needs PyTorch and one GPU; two minutes.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

BENCHES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches")
sys.path.insert(0, BENCHES)
import calibrate_host_model as bench  # noqa: E402

LAYERS = 4
# Steps of each kind in a round: enough for a median, few enough that a round lasts about a second.
STEPS = 5


def forms(kind, tokens):
    """The ways to run a stack, by scope: the step, and the stack behind it."""
    second = "mlp" if kind == "dense" else "moe_router"
    found = {}
    for scope in ("eager", "attn", f"attn,{second}", "full"):
        stack = bench.Stack(kind, tokens, LAYERS, wait=scope != "full")
        replays = bench.graphed(stack, scope.split(",")) if scope not in ("eager", "full") else 0
        step = bench.warm(bench.whole_graph(stack) if scope == "full" else stack.step)
        found[scope] = dict(stack=stack, step=step, replays=replays, wall=[], host=[])
    return found


def marked(stack, steps):
    """Host time by part and pass, of steps with marks."""
    samples = []
    for _ in range(steps):
        torch.cuda.synchronize()
        stack.clock.ms, stack.clock.on = {}, True
        stack.step(True)
        stack.clock.on = False
        samples.append(stack.clock.ms)
    torch.cuda.synchronize()
    return {key: statistics.median(s[key] for s in samples) for key in samples[0]}


def point(kind, tokens, rounds):
    """A point of the table from calibrating steps, and rows of the other ones."""
    of = forms(kind, tokens)
    eager = of["eager"]
    for _ in range(4):
        eager["stack"].step(True)
    marks, whole = [], []
    for r in range(rounds):
        # Calibrating and checked steps change places, so that drift falls on both.
        for what in ("calibrate", "check") if r % 2 == 0 else ("check", "calibrate"):
            if what == "calibrate":
                marks.append(marked(eager["stack"], STEPS))
                whole.append(bench.host_ms(eager["step"], STEPS))
                continue
            for form in of.values():
                form["wall"].append(bench.wall_ms(form["step"], STEPS))
                form["host"].append(bench.host_ms(form["step"], STEPS))
    parts = {key: statistics.median(m[key] for m in marks) for key in marks[0]}
    host = statistics.median(whole)
    # The marks cost time of their own: their shares are kept, the sum is that of steps without them.
    scale = host / sum(parts.values()) / LAYERS
    by_pass = lambda wanted: {name: round(ms * scale, 4) for (which, name), ms in parts.items() if which == wanted}
    rows = []
    for scope, form in of.items():
        # Last: a profiler slows down what follows.
        busy, kernels = bench.busy_ms(form["step"])
        rows.append(dict(recipe=bench.NAMES[kind], tokens=tokens, layers=LAYERS, scope=scope, busy_ms=busy, kernels=kernels,
                         wall_ms=statistics.median(form["wall"]), host_ms=statistics.median(form["host"])))
        spread = max(form["wall"]) / min(form["wall"])
        print(f"{bench.NAMES[kind]} {tokens} {scope}: wall {rows[-1]['wall_ms']:.2f} ms (rounds up to {spread:.2f}x apart), host "
              f"{rows[-1]['host_ms']:.2f}, busy {busy:.2f}", file=sys.stderr, flush=True)
    entry = dict(layer=kind, tokens=tokens, forward_ms=by_pass("forward"), backward_ms=by_pass("backward"))
    replay = rows[2]["host_ms"] / of[rows[2]["scope"]]["replays"] if kind == "dense" else None
    return entry, rows, host / rows[0]["kernels"], replay, rows[3]["host_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mbperf")
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("host_model_in_turns.py: PyTorch sees no GPU")
    torch.manual_seed(0)
    layers, rows, per_kernel, replays, iterations = [], [], [], [], []
    for kind, tokens in bench.POINTS:
        if (kind, tokens) == ("dense", 8192):  # in the table, in no check: the device is the limit
            layers.append(bench.point(kind, tokens, LAYERS, 10)[0])
            continue
        entry, found, launch, replay, iteration = point(kind, tokens, args.rounds)
        layers.append(entry)
        rows += found
        if kind == "dense":
            per_kernel.append(launch)
            replays.append(replay)
            iterations.append(iteration)
        torch.cuda.empty_cache()
    model = dict(
        format=1, name="calibrated",
        source=f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {platform.node()}, "
               f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, in turns",
        layers=layers, module_replay_ms=round(statistics.median(replays), 4),
        iteration_replay_ms=round(statistics.median(iterations), 4), other_launch_ms=round(statistics.median(per_kernel), 4))
    for name, what in (("host_model.json", model), ("host_model_pytorch.json", rows)):
        with open(os.path.join(args.folder, name), "w") as out:
            json.dump(what, out, indent=1)
            out.write("\n")
    sys.exit(subprocess.run([sys.executable, os.path.join(BENCHES, "host_model_check.py"), args.mbperf, args.folder]).returncode)


if __name__ == "__main__":
    main()
