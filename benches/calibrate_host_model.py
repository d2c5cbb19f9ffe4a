#!/usr/bin/env python3
"""Host time of eager PyTorch by part and pass, and of replays, as a file for `mbperf --host_model FILE`.

usage: calibrate_host_model.py [-o FILE] [--check FILE] [--rounds N] [--layers L] [--points KIND:TOKENS,...] [--look]

Needs PyTorch and one GPU (about 25 GB for llama3_8b at 512 tokens; --points chooses others). Stacks of L layers of
host_model_stack.py, in bf16, run forward and backward: eager, with graphs of attention and of attention and a second part (one
graph for both, and one each), and as one graph; Mamba layers, which are one part, eager, with graphs of it, and as one graph. A
clock is read at each part's beginning and end, in the backward pass by hooks on the gradients of what goes in and comes out. All
times are the host's: the device is waited for between steps only.

On a shared host PyTorch's own host time of one stack moves by 10 to 25 % between two loops a second apart (seen on an H200
machine). So everything is measured in turns: each of N rounds runs a few steps of every form, steps with and without marks
in alternation, and figures are medians over rounds.

--points: dense (llama3_8b's layers), moe (qwen3_30b_a3b's) or mamba (nemotron_3_nano's Mamba-2) and the tokens of a micro-batch, in
place of the default; the word `default` stands for that, as in default,mamba:512. mamba needs the folder mamba_ssm/ops/triton of
the mamba_ssm source package (and mamba_ssm/utils/torch.py, which that loads) on PYTHONPATH, beside einops: no default point is of
it. Triton tunes its kernels before the first Mamba step, a minute and more; TRITON_CACHE_AUTOTUNING=1 keeps most of that for the
next process. Without a dense point of at most 4096 tokens a stack of dense:128 runs for whole graphs and single launches alone.

--look looks at the arguments, and for the package where a point needs it, and measures nothing.

--check FILE also writes, from other steps of the same rounds, what host_model_check.py compares a model with: host and wall
times of every form, round by round, and device-busy times (last: a profiler slows down all that follows).
"""
import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time

from command_line import Replaced, lacking, refuse, writable
from host_model_figures import shared_out, spread

POINTS = "dense:128,dense:512,dense:8192,moe:512,moe:4096"
NAMES = {"dense": "llama3_8b", "moe": "qwen3_30b_a3b", "mamba": "nemotron_3_nano"}
# What Python must have for Mamba layers beside PyTorch.
MAMBA_MODULES = "mamba_ssm", "einops"
# Dense stacks of more tokens are in the table of eager host times alone: there the device is the limit, by far.
MOST_DENSE_TOKENS = 4096
# Whole graphs and single launches are timed on dense layers: on these where no point is of that kind. The default's smallest.
ASIDE = "dense", 128
# Measured on an H200: 4 rounds of the default points with --check, and the check, take 110 s together; 16 some 200 s, estimated.
ROUNDS = 16
# Steps of each sort and form in a round: a form's turn is then long enough to be run in, and short beside drift.
STEPS = 4
# Steps of a wall time: the median of less moves with one late wake-up.
WALL_STEPS = 5


class Turns:
    """A form of one stack, and what its turns gave."""

    def __init__(self, kind, tokens, layers, form):
        self.form, self.layers = form, layers
        self.stack, self.step = stacks.ready(kind, tokens, layers, form)
        self.replays = 1 if form.scope == "full" else self.stack.replays
        # By round: host time of steps that calibrate, host and wall time of other ones, to be checked.
        self.host_ms, self.checked_ms, self.wall_ms = [], [], []
        # Steps with marks, and what marks alone cost by round. One graph has no parts to be told apart.
        self.marked, self.mark_costs, self.marks = [], [], form.scope != "full"
        if self.marks:
            self.stack.marked()

    def turn(self, r, check):
        """One round: sorts of steps in alternation, in another order each time, so that drift falls on all."""
        checked, plain = [], []
        sorts = [lambda: plain.append(stacks.host_ms(self.step))]
        if self.marks:
            sorts.append(lambda: self.marked.append(self.stack.marked()))
        if check:
            sorts.append(lambda: checked.append(stacks.host_ms(self.step)))
        # Not timed: the form before has left its own data in the caches.
        stacks.host_ms(self.step)
        for i in range(STEPS):
            at = (r + i) % len(sorts)
            for sort in sorts[at:] + sorts[:at]:
                sort()
        self.host_ms.append(statistics.median(plain))
        if self.marks:
            self.mark_costs.append(stacks.mark_costs_ms())
        if check:
            self.checked_ms.append(statistics.median(checked))
            self.wall_ms.append(stacks.wall_ms(self.step, WALL_STEPS))

    def host(self):
        """Host milliseconds of a step that calibrates."""
        return statistics.median(self.host_ms)

    def mark_ms(self):
        """Host milliseconds of one mark by pass."""
        return {which: statistics.median(costs[which] for costs in self.mark_costs) for which in self.mark_costs[0]}

    def groups(self):
        """Host milliseconds a layer by (pass, group)."""
        by_key = shared_out(self.host(), self.marked, stacks.OUTSIDE, self.mark_ms(), self.layers)
        return {key: ms / self.layers for key, ms in by_key.items()}

    def row(self, kind, tokens):
        """For --check: what was measured of this form, lists by round."""
        rounded = lambda values: [round(ms, 4) for ms in values]
        row = dict(recipe=NAMES[kind], tokens=tokens, layers=self.layers, scope=self.form.scope, apart=self.form.apart,
                   replays=self.replays, wall_ms=rounded(self.wall_ms), host_ms=rounded(self.checked_ms),
                   calibrated_host_ms=rounded(self.host_ms))
        if self.marks:
            row.update(by_pass(self.groups()), mark_ms={which: round(ms, 5) for which, ms in self.mark_ms().items()})
        return row


def by_pass(groups):
    """Times by (pass, group) as two tables."""
    of = lambda wanted: {name: round(ms, 4) for (which, name), ms in groups.items() if which == wanted}
    return dict(forward_ms=of("forward"), backward_ms=of("backward"))


def eager_alone(kind, tokens):
    """Whether a stack is run eagerly and in no other form."""
    return kind == "dense" and tokens > MOST_DENSE_TOKENS


def forms_of(kind, tokens):
    forms = stacks.forms(kind)
    return forms[:1] if eager_alone(kind, tokens) else forms


def measure(kind, tokens, layers, rounds, check, forms):
    """These forms of one stack, in turns."""
    alone = len(forms) == 1
    check = check and not alone
    turns = [Turns(kind, tokens, layers, form) for form in forms]
    for r in range(max(2, rounds // 4) if alone else rounds):
        at = r % len(turns)
        for each in turns[at:] + turns[:at]:
            each.turn(r, check)
    for each in turns:
        wall = f", wall {statistics.median(each.wall_ms):.2f} (up to {spread(each.wall_ms):.2f}x)" if check else ""
        print(f"{NAMES[kind]} {tokens} {each.form}: host {each.host():.2f} ms (rounds up to "
              f"{spread(each.host_ms):.2f}x apart){wall}", file=sys.stderr, flush=True)
        # The figures stay, the stack goes.
        del each.stack, each.step
    return turns


def release():
    gc.collect()
    torch.cuda.empty_cache()


def busy(kind, tokens, layers, form):
    """Device-busy milliseconds and kernels of a step of a form, from a stack built anew."""
    stack, step = stacks.ready(kind, tokens, layers, form)
    found = stacks.busy(step)
    del stack, step
    release()
    return found


def replays(found):
    """Entries of `module_replays`: by kind and captured parts, medians over the points of the kind."""
    figures = {}
    for (kind, _), turns in found.items():
        for each in turns:
            if not each.form.parts:
                continue
            # Graphs apart give the second part's figure: attention's is that of its own form.
            name = each.form.parts[1] if each.form.apart else ",".join(each.form.parts)
            groups = each.groups()
            figures.setdefault((kind, name), []).append((groups["forward", name], groups["backward", name]))
    middle = lambda values: round(statistics.median(values), 4)
    return [dict(layer=kind, parts=name.split(","), forward_ms=middle(f for f, _ in of), backward_ms=middle(b for _, b in of))
            for (kind, name), of in figures.items()]


def one_a_line(value, indent=0):
    """JSON whose lists of objects have one object a line."""
    pad = " " * (indent + 1)
    if isinstance(value, dict) and indent == 0:
        inner = ",\n".join(f"{pad}{json.dumps(key)}: {one_a_line(of, 1)}" for key, of in value.items())
        return f"{{\n{inner}\n}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        inner = ",\n".join(f"{pad}{json.dumps(of)}" for of in value)
        return f"[\n{inner}\n{' ' * indent}]"
    return json.dumps(value)


def write(path, value):
    with Replaced(path) as out:
        out.write(one_a_line(value) + "\n")
    print(f"wrote {path}", file=sys.stderr, flush=True)


def points(text):
    found = []
    for word in text.split(","):
        kind, _, tokens = word.partition(":")
        if word == "default":
            found += points(POINTS)
        elif kind not in NAMES or not tokens.isdecimal() or int(tokens) < 1:
            raise argparse.ArgumentTypeError(f"{word!r} is not dense:TOKENS, moe:TOKENS, mamba:TOKENS or default")
        else:
            found.append((kind, int(tokens)))
    if all(eager_alone(*point) for point in found):
        raise argparse.ArgumentTypeError(
            f"a point other than dense ones above {MOST_DENSE_TOKENS} tokens is needed: those have no graphs")
    return list(dict.fromkeys(found))


def load():
    """PyTorch, and the stacks that are built with it: once the arguments are read, as --help needs neither."""
    global torch, stacks
    try:
        import torch
        import host_model_stack as stacks
    except ImportError as e:
        sys.exit(f"calibrate_host_model.py: {e} (of {sys.executable}): install PyTorch for CUDA there (pip install torch), or run "
                 "this with a Python that has it")


def load_mamba():
    """The Mamba layer at once, as its package may lack a part: other points would have been measured before that is seen."""
    try:
        import ref_mamba  # noqa: F401
    except ImportError as e:
        refuse(f"mamba points need mamba_ssm/ops/triton and what it loads: {e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="host_model.json")
    parser.add_argument("--check", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--points", type=points, default=POINTS)
    parser.add_argument("--look", action="store_true")
    args = parser.parse_args()
    kinds = {kind for kind, _ in args.points}
    if args.rounds < 1 or args.layers < 1:
        parser.error("--rounds and --layers must be at least 1")
    if args.check and os.path.realpath(args.check) == os.path.realpath(args.output):
        parser.error("-o and --check name one file")
    missing = lacking(*MAMBA_MODULES) if "mamba" in kinds else []
    if missing:
        refuse(f"{sys.executable} has no {', '.join(missing)}, which mamba points need: run this with a Python that has it "
               "(PYTHONPATH counts)")
    if args.look:
        return
    for path in (args.output, *([args.check] if args.check else [])):
        writable(path)
    load()
    if not torch.cuda.is_available():
        sys.exit("calibrate_host_model.py: PyTorch sees no GPU: run it on the machine whose host time you want")
    if "mamba" in kinds:
        load_mamba()
    torch.manual_seed(0)
    found = {}
    for kind, tokens in args.points:
        found[kind, tokens] = measure(kind, tokens, args.layers, args.rounds, bool(args.check), forms_of(kind, tokens))
        release()
    aside = {}
    if not any(kind == "dense" and not eager_alone(kind, tokens) for kind, tokens in found):
        forms = [form for form in forms_of(*ASIDE) if not form.parts]
        aside[ASIDE] = measure(*ASIDE, args.layers, args.rounds, False, forms)
        release()
    rows, per_launch = [], []
    for (kind, tokens), turns in (found | aside).items():
        checked = args.check and len(turns) > 1 and (kind, tokens) not in aside
        for each in turns:
            eager = each.form.scope == "eager"
            if not checked and not (kind == "dense" and eager):
                continue
            busy_ms, kernels = busy(kind, tokens, args.layers, each.form)
            if kind == "dense" and eager:
                per_launch.append(each.host() / kernels)
            if checked:
                rows.append(dict(each.row(kind, tokens), busy_ms=round(busy_ms, 4), kernels=kernels))
    # Graphs of several layers: dense ones, as expert layers need static shapes for that.
    whole = [each.host() for (kind, _), turns in (found | aside).items() if kind == "dense"
             for each in turns if each.form.scope == "full"]
    layers = [dict(layer=kind, tokens=tokens, **by_pass(turns[0].groups())) for (kind, tokens), turns in found.items()]
    source = (f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {platform.node()}, {time.strftime('%Y-%m-%d')}, "
              f"Python {platform.python_version()}, {args.rounds} rounds in turns, {args.layers} layers")
    write(args.output, dict(
        format=2, name="calibrated", source=source, layers=layers, module_replays=replays(found),
        iteration_replay_ms=round(statistics.median(whole), 4), other_launch_ms=round(statistics.median(per_launch), 4)))
    if args.check:
        write(args.check, dict(source=source, rounds=args.rounds, rows=rows))


if __name__ == "__main__":
    main()
