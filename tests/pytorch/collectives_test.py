#!/usr/bin/env python3
"""Tests of what benches/collectives.py computes, on made-up traces and a program that stands for mbperf, and of what
benches/h200x2.sh refuses: no PyTorch, no GPU.

usage: python3 tests/pytorch/collectives_test.py
"""
import contextlib
import copy
import csv
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "benches"))
import collectives as c  # noqa: E402

CONFIG = dict(
    model=dict(hidden_size=4096, moe=None),
    parallel=dict(tp=2, cp=1, ep=1, dp=1, ddp=dict(bucket_size=134217728)),
    batch=dict(micro_batch_size=1, seq_length=8192),
    optimizer=dict(grad_dtype="bf16"),
)
EXPERTS = dict(num_experts=128, router_topk=8, capacity_factor=None, pad_to_capacity=False, latent_size=None)
# Of rows, gathered or scattered at tensor parallelism 2.
ROWS = c.Size(64 << 20, "bf16", False)

# Stands for mbperf: a plan in a dry run, else rows and a trace.
FAKE = """#!{python}
import json, sys
if "--version" in sys.argv:
    sys.exit(0)
if "--dryrun" in sys.argv:
    print(json.dumps(dict(program={program}, config={config})))
    sys.exit({code})
out = sys.argv[sys.argv.index("-o") + 1]
with open(out, "w") as f:
    f.write("arm,digest_match\\neager,{match}\\ngraph,{match}\\n")
with open(out.replace(".csv", ".trace.json"), "w") as f:
    f.write(json.dumps({trace}))
"""


def config(moe=None, **parallel):
    made = copy.deepcopy(CONFIG)
    made["parallel"] |= parallel
    made["model"]["moe"] = moe and EXPERTS | moe
    return made


def arm(pid, name):
    return dict(ph="M", name="process_name", pid=pid, args=dict(name=f"{name} step"))


def piece(launch, op, ts, dur, pid=1, part="attn", layer=0, where="forward", micro_batch=0, graph=False):
    args = dict(op=op, part=part, layer=layer, micro_batch=micro_batch, launch=launch, graph=graph) | {"pass": where}
    return dict(ph="X", pid=pid, ts=ts, dur=dur, args=args)


def trace(*events):
    return dict(traceEvents=[arm(1, "eager"), arm(2, "graph"), *events])


class Sizes(unittest.TestCase):
    def test_rows_of_tensor_ranks(self):
        for op in ("all_gather", "reduce_scatter"):
            self.assertEqual(c.size(config(), op, "mlp", "backward"), ROWS)
            # Without tensor parallelism there are none.
            self.assertIsNone(c.size(config(tp=1), op, "mlp", "backward"))
        self.assertEqual(c.size(config(), "all_reduce", "attn", "forward"), c.Size(64 << 20, "bf16", True))
        self.assertEqual(c.size(config(), "all_gather", "loss", "forward").bytes, 8192 * 3 * 4 * 2)

    def test_buckets_of_data_ranks(self):
        at = config(tp=1, dp=2)
        bucket = c.Size(256 << 20, "bf16", True)
        self.assertEqual(c.size(at, "reduce_scatter", "grad_reduce", "other"), bucket)
        at["optimizer"]["grad_dtype"] = "fp32"
        self.assertEqual(c.size(at, "reduce_scatter", "grad_reduce", "other"), c.Size(512 << 20, "fp32", True))
        # Weights are bf16 whatever gradients are; whole elements of every rank alone.
        at["parallel"]["ddp"]["bucket_size"] = 1000
        self.assertEqual(c.size(at, "all_gather", "optimizer", "other").bytes, 768 * 2)
        at["parallel"]["ddp"]["bucket_size"] = None
        self.assertEqual(c.size(at, "all_gather", "optimizer", "other"), bucket)
        self.assertIsNone(c.size(config(), "all_gather", "optimizer", "other"))

    def test_rows_of_expert_ranks_by_their_place(self):
        at = config(tp=1, ep=2, dp=2, moe=EXPERTS)
        rows, numbers = 8192 * 8 * 4096 * 2, 8192 * 8 * 4
        of = lambda where, n: [c.size(at, "all_to_all_rows", "moe_experts", where, i, n) for i in range(n)]
        self.assertEqual([s.bytes for s in of("forward", 3)], [rows, numbers, rows])
        self.assertEqual([s.bytes for s in of("backward", 3)], [rows, rows, numbers])
        self.assertEqual(of("forward", 2), [None, None])
        at["model"]["moe"]["latent_size"] = 1024
        self.assertEqual(of("forward", 3)[0].bytes, rows // 4)

    def test_padded_bins_are_of_their_capacity(self):
        at = config(tp=1, ep=2, moe=dict(capacity_factor=1.25, pad_to_capacity=True))
        self.assertEqual(c.expert_rows(at), 8192 * 10)
        at["batch"]["seq_length"] = 100
        # 1,000 rows on 128 experts: 8 each.
        self.assertEqual(c.expert_rows(at), 1024)

    def test_bus_bandwidth(self):
        # 64 MiB in 100 us, half of it over the wire.
        self.assertAlmostEqual(c.bus_gb_per_s("all_gather", 64 << 20, 100.0), 335.54432)
        self.assertAlmostEqual(c.bus_gb_per_s("all_reduce", 64 << 20, 100.0), 671.08864)
        self.assertAlmostEqual(c.bus_factor("all_to_all", 4), 0.75)


class Traces(unittest.TestCase):
    def test_a_launch_lasts_from_its_first_to_its_last_piece(self):
        seen = c.collectives(trace(
            piece(7, "all_to_all", 10.0, 5.0), piece(7, "all_to_all", 16.0, 20.0),
            piece(8, "gemm", 0.0, 13.0), piece(9, "rmsnorm_fwd", 12.0, 2.0), piece(None, None, 30.0, 1.0),
        ))
        self.assertEqual(len(seen), 1)
        self.assertEqual((seen[0].arm, seen[0].us, seen[0].in_graph), ("eager", 26.0, False))
        # 10 to 14, joined of two, and 30 to 31.
        self.assertAlmostEqual(seen[0].beside, 5.0 / 26.0)

    def test_all_to_alls_are_counted_by_layer_pass_and_micro_batch(self):
        events = [piece(n, "all_to_all_rows", 10.0 * n, 5.0, part="moe_experts", layer=n // 3, pid=2, graph=True) for n in range(6)]
        seen = c.collectives(trace(*events, piece(9, "all_gather", 90.0, 1.0, pid=2)))
        self.assertEqual([(s.arm, s.layer, s.nth, s.of) for s in seen],
                         [("graph", n // 3, n % 3, 3) for n in range(6)] + [("graph", 0, 0, 1)])
        self.assertTrue(seen[0].in_graph and not seen[-1].in_graph)

    def test_spans(self):
        self.assertEqual(c.union([(5, 6), (0, 2), (1, 3)]), [[0, 3], [5, 6]])
        self.assertEqual(c.covered([[0, 3], [5, 6]], 2, 5.5), 1.5)
        self.assertEqual(c.covered([[0, 3]], 3, 5), 0.0)
        self.assertEqual(c.covered([], 3, 5), 0.0)
        self.assertEqual(c.tenth(list(range(20, 0, -1))), 3)
        self.assertEqual(c.tenth([4.0]), 4.0)


def seen(us, op="all_gather", part="attn", arm="graph", in_graph=True, beside=0.0):
    return c.Seen(arm, op, part, 0, "forward", 0, 0, 1, in_graph, us, beside)


class Lines(unittest.TestCase):
    def test_of_buckets_the_shortest_is_what_is_left(self):
        at = config(tp=1, dp=2)
        key = ("graph", "reduce_scatter", c.Size(256 << 20, "bf16", True), True, None)
        some = [seen(us, "reduce_scatter", "grad_reduce") for us in (40.0, 400.0, 410.0)]
        self.assertEqual(c.grouped(at, some), {key: [(400.0, 0.0), (410.0, 0.0)]})
        # A lone one may be of any size.
        self.assertEqual(c.grouped(at, some[:1]), {("graph", "reduce_scatter", None, True, "grad_reduce"): [(40.0, 0.0)]})

    def test_parts_of_one_size_are_one_line(self):
        groups = c.grouped(config(), [seen(200.0), seen(220.0, part="mlp"), seen(9.0, part="moe_router")])
        self.assertEqual(groups, {("graph", "all_gather", ROWS, True, None): [(200.0, 0.0), (220.0, 0.0)],
                                  ("graph", "all_gather", None, True, "moe_router"): [(9.0, 0.0)]})

    def test_a_line_holds_both_bandwidths_and_a_verdict(self):
        groups = c.grouped(config(), [seen(us, beside=0.25) for us in (190.0, 200.0, 300.0)])
        (line,) = c.lines("w", groups, {("all_gather", ROWS, True): 180.0, ("all_gather", ROWS, False): 1.0})
        self.assertEqual(tuple(line), c.COLUMNS)
        self.assertEqual(line, dict(
            workload="w", arm="graph", op="all_gather", bytes=64 << 20, in_graph="true", launches=3, beside="0.25", in_step_us="200.00",
            in_step_us_p10="190.00", bare_us="180.00", bus_gb_per_s="167.77", bare_bus_gb_per_s="186.41", ratio="0.9000", target=0.9, met="true"))
        (line,) = c.lines("w", groups, {("all_gather", ROWS, True): 179.0})
        self.assertEqual((line["ratio"], line["met"]), ("0.8950", "false"))

    def test_no_verdict_without_a_bare_time_or_on_small_messages(self):
        (line,) = c.lines("w", c.grouped(config(), [seen(200.0)]), {})
        self.assertEqual((line["bare_us"], line["target"], line["met"], line["bus_gb_per_s"]), ("", "", "", "167.77"))
        groups = c.grouped(config(), [seen(9.0, part="loss"), seen(9.0, part="moe_router")])
        small, unknown = c.lines("w", groups, {("all_gather", c.Size(8192 * 24, "fp32", False), True): 20.0})
        self.assertEqual((small["ratio"], small["target"], small["met"]), ("2.2222", "", ""))
        self.assertEqual((unknown["op"], unknown["bytes"], unknown["ratio"]), ("all_gather (moe_router)", "", ""))


class Script(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.out = folder.name, os.path.join(folder.name, "collectives.csv")

    def fake(self, program="dict(launches=1)", match="true", code=0):
        found = trace(piece(1, "all_gather", 0.0, 200.0), piece(1, "all_gather", 0.0, 150.0, pid=2, graph=True))
        path = os.path.join(self.folder, "mbperf")
        with open(path, "w") as f:
            # As Python's literals, which JSON's are not.
            f.write(FAKE.format(python=sys.executable, program=program, config=CONFIG, code=code, match=match, trace=found))
        os.chmod(path, os.stat(path).st_mode | stat.S_IEXEC)
        return path

    def main(self, *arguments, bare=None):
        asked = []

        def timed(jobs):
            asked.extend(jobs)
            return bare(jobs)

        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            with mock.patch.object(c, "WORKLOADS", {"w": "-m x"}), mock.patch.object(c, "bare_times", timed):
                code = c.main(list(arguments))
        return code, said.getvalue(), asked

    def rows(self):
        with open(self.out, newline="") as f:
            return list(csv.DictReader(f))

    def test_the_table(self):
        code, said, asked = self.main(self.fake(), self.out, bare=lambda jobs: dict.fromkeys(jobs, 170.0))
        self.assertEqual(code, 0, said)
        self.assertEqual(asked, [("all_gather", ROWS, False), ("all_gather", ROWS, True)])
        self.assertEqual([(r["arm"], r["ratio"], r["met"]) for r in self.rows()], [("eager", "0.8500", "false"), ("graph", "1.1333", "true")])
        self.assertIn("w, eager: all_gather of 67108864 bytes at 0.8500", said)

    def test_an_implausible_ratio_is_told(self):
        _, said, _ = self.main(self.fake(), self.out, bare=lambda jobs: dict.fromkeys(jobs, 400.0))
        self.assertIn("is its size right?", said)

    def test_the_steps_own_figures_outlive_the_bare_loop(self):
        def none(jobs):
            raise ModuleNotFoundError("torch")

        code, said, _ = self.main(self.fake(), self.out, bare=none)
        self.assertEqual((code, [r["ratio"] for r in self.rows()]), (1, ["", ""]))
        self.assertIn("FAILED the bare loop: torch", said)

    def test_failures_are_told_and_leave_no_file(self):
        for fake, what in ((dict(code=2), "exit 2"), (dict(match="false"), "not equal"), (dict(program=None), "not built")):
            code, said, asked = self.main(self.fake(**fake), self.out)
            self.assertEqual((code, asked, os.path.exists(self.out)), (1, [], False))
            self.assertIn(what, said)

    def test_a_dry_run_plans_alone(self):
        code, said, asked = self.main(self.fake(), self.out, "--dryrun")
        self.assertEqual((code, asked, os.path.exists(self.out)), (0, [], False))
        self.assertIn("w: all_gather 67108864", said)
        self.assertEqual(self.main(self.fake())[0], 2)

    def shell(self, *arguments, **env):
        # No nvidia-smi beyond those of the test.
        env = {"PATH": f"{self.folder}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"} | env
        script = os.path.join(ROOT, "benches", "h200x2.sh")
        return subprocess.run(["bash", script, *arguments], env=env, capture_output=True, text=True)

    def gpus(self, n):
        path = os.path.join(self.folder, "nvidia-smi")
        with open(path, "w") as f:
            f.write("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: x'\n" for i in range(n)))
        os.chmod(path, 0o755)

    def test_what_the_script_refuses(self):
        self.gpus(1)
        out = os.path.join(self.folder, "out")
        for arguments, env, what in (
            ((self.fake(), out), {}, "two GPUs are needed, nvidia-smi -L lists 1"),
            ((self.fake(), out), dict(CAPTURES="0"), "CAPTURES=0"),
            ((self.fake(), out), dict(MAX_TIME="soon"), "MAX_TIME=soon"),
        ):
            done = self.shell(*arguments, **env)
            self.assertEqual((done.returncode, done.stdout), (2, ""), what)
            self.assertIn(what, done.stderr)
            self.assertFalse(os.path.exists(out) and os.listdir(out))

    def test_dry_runs_plan_and_failures_end_with_1(self):
        out = os.path.join(self.folder, "out")
        done = self.shell(self.fake(), out, "llama", "captures", DRYRUN="1")
        self.assertEqual((done.returncode, done.stdout.count("exit 0")), (0, 7), done.stdout + done.stderr)
        self.assertEqual(os.listdir(out), [])
        done = self.shell(self.fake(program=None), out, "nemotron", DRYRUN="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("== failed: 2", done.stdout)

    def test_captures_are_counted(self):
        self.gpus(2)
        path = os.path.join(self.folder, "rows")
        # Two captures a run; the second of the second run is not equal.
        with open(path, "w") as f:
            f.write("#!/bin/sh\n[ $1 = --version ] && exit 0\nfor o; do out=$last; last=$o; done\nout=$last\n"
                    "[ -e $out ] && m=false || { m=true; echo 'arm,status,digest_match,graphs,repetition,status_reason' >$out; }\n"
                    "printf 'eager,ok,true,0,1,\\ngraph,ok,true,8,1,\\neager,ok,true,0,2,\\ngraph,ok,%s,8,2,\\n' $m >>$out\n")
        os.chmod(path, 0o755)
        out = os.path.join(self.folder, "out")
        for code, good in ((0, 2), (1, 1)):
            done = self.shell(path, out, "captures", CAPTURES="2")
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            self.assertIn(f"{good} of 2 captures: ok and digest_match=true; graphs each: 8", done.stdout)
        self.assertIn("repetition 2: ok, digest_match=false", done.stdout)


if __name__ == "__main__":
    unittest.main()
