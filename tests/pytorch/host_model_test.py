#!/usr/bin/env python3
"""Tests of what the host model's scripts compute (benches/host_model_figures.py, host_model_check.py), on made-up times, and of
what calibrate_host_model.py says where PyTorch is missing: no PyTorch, no GPU.

usage: python3 tests/pytorch/host_model_test.py
"""
import contextlib
import csv
import importlib.util
import io
import json
import os
import random
import stat
import statistics
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

BENCHES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches")
sys.path.insert(0, BENCHES)
import calibrate_host_model  # noqa: E402
import host_model_check as check  # noqa: E402
import host_model_figures as figures  # noqa: E402

LAYERS = 4
# A model that the fake mbperf below follows: milliseconds a layer.
MODEL = dict(
    layers=[dict(layer="dense", tokens=128, forward_ms=dict(attn=0.6, mlp=0.3), backward_ms=dict(attn=0.7, mlp=0.4))],
    module_replays=[
        dict(layer="dense", parts=["attn"], forward_ms=0.11, backward_ms=0.13),
        dict(layer="dense", parts=["attn", "mlp"], forward_ms=0.12, backward_ms=0.14),
        dict(layer="dense", parts=["mlp"], forward_ms=0.10, backward_ms=0.12),
    ])
EAGER_MS = 8.0
# Both parts captured: one graph a layer and pass, and a graph a part.
JOINED_MS, APART_MS = LAYERS * 0.26, LAYERS * 0.46
# Stands for mbperf: host times by the model, 0.1 ms of the device beside kernels.
FAKE = """#!{python}
import sys
if "--version" in sys.argv:
    sys.exit(0)
with open(sys.argv[sys.argv.index("-o") + 1], "w") as out:
    out.write("arm,host_ms_modelled_median,device_span_ms_median,device_busy_ms,graph_launches_per_step,"
              "step_time_ms_modelled_median\\n")
    out.write("eager,{eager},2.1,2.0,,{eager}\\n")
    out.write("graph,{joined},2.1,2.0,{replays},2.1\\n")
sys.exit({code})
"""


def rows(eager_wall, joined_wall, apart_wall, rounds=16, busy=2.4):
    """What calibrate_host_model.py --check writes, without noise."""
    def row(scope, apart, replays, wall, host):
        return dict(recipe="llama3_8b", tokens=128, layers=LAYERS, scope=scope, apart=apart, replays=replays, wall_ms=[wall] * rounds,
                    host_ms=[host] * rounds, calibrated_host_ms=[host] * rounds, busy_ms=busy, kernels=250)
    return [row("eager", False, 0, eager_wall, EAGER_MS), row("attn,mlp", False, 8, joined_wall, JOINED_MS),
            row("attn,mlp", True, 16, apart_wall, APART_MS)]


class Figures(unittest.TestCase):
    def test_a_union_counts_overlaps_once(self):
        self.assertEqual(figures.union_ms([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]), 5)
        self.assertEqual(figures.union_ms([]), 0.0)

    def test_marks_are_taken_from_groups_and_the_rest_is_spread(self):
        true = {("forward", "attn"): 4.0, ("forward", "graph"): 0.4, ("backward", "graph"): 0.6, ("backward", "attn"): 5.0}
        cost, outside = dict(forward=0.02, backward=0.01), ("outside", "")
        steps = []
        for noise in (-0.1, 0.0, 0.3):
            step = {key: ms * (1 + noise) + cost[key[0]] * LAYERS for key, ms in true.items()}
            steps.append({**step, outside: 0.5})
        found = figures.shared_out(10.5, steps, outside, cost, LAYERS)
        self.assertEqual(found.keys(), true.keys())
        for key, ms in true.items():
            self.assertAlmostEqual(found[key], ms * 10.5 / 10.0)
        self.assertAlmostEqual(sum(found.values()), 10.5)

    def test_quantiles_lie_between_values(self):
        self.assertEqual(figures.quantiles([3, 1, 2, 4, 5], 0.0, 1.0), (1, 5))
        self.assertEqual(figures.quantiles([1, 2, 3, 4, 5], 0.125, 0.5), (1.5, 3))
        self.assertEqual(figures.quantiles([7], 0.025, 0.975), (7, 7))

    def test_intervals_hold_the_truth_as_often_as_they_say(self):
        rng = random.Random(7)
        held, runs = 0, 200
        with mock.patch.object(figures, "RESAMPLES", 400):
            for _ in range(runs):
                values = [rng.lognormvariate(0.0, 0.1) for _ in range(16)]
                low, high = figures.interval(16, lambda of: figures.median_of(values, of))
                held += low <= 1.0 <= high
        # 95 % of 200, with four standard errors of that share on either side.
        self.assertLess(abs(held / runs - 0.95), 4 * (0.95 * 0.05 / runs) ** 0.5)


class Check(unittest.TestCase):
    def test_words(self):
        self.assertEqual(check.word(0.05, 0.01, 0.09), "within")
        self.assertEqual(check.word(0.05, -0.02, 0.12), "within, interval reaches over")
        self.assertEqual(check.word(0.13, 0.08, 0.18), "OVER, interval reaches within")
        self.assertEqual(check.word(-0.13, -0.15, -0.11), "OVER")

    def test_drift_between_rounds_is_in_the_interval_and_drift_within_one_is_not(self):
        eager, graph, _ = rows(8.0, 2.5, 2.5)
        arms = dict(eager=dict(host_ms=8.0, beside_ms=0.1, step_ms=8.0, replays=0),
                    graph=dict(host_ms=1.0, beside_ms=0.1, step_ms=2.5, replays=8))
        calm = check.judge(eager, graph, arms, 0.0)
        self.assertAlmostEqual(calm["speedup_modelled"], 8.0 / 2.5)
        self.assertAlmostEqual(calm["speedup_modelled_busy_alone"], 8.0 / 2.4)
        self.assertEqual((calm["speedup_off"], calm["speedup_off_ci95_low"], calm["speedup_off_ci95_high"]), (0.0, 0.0, 0.0))
        # A host at two speeds, calibrated and checked at the same one in each round: no distance, whatever rounds are drawn.
        speeds = [1.0, 1.5] * 8
        together = dict(eager, host_ms=[8.0 * s for s in speeds], calibrated_host_ms=[8.0 * s for s in speeds])
        host = statistics.median(together["calibrated_host_ms"])
        arms["eager"]["host_ms"] = host
        row = check.judge(together, graph, arms, 0.0)
        self.assertLess(max(map(abs, (row["host_eager_off_ci95_low"], row["host_eager_off_ci95_high"]))), 1e-9)
        # The ratio, measured at other speeds: its interval says so.
        moved = dict(together, wall_ms=[8.0 * s for s in speeds[1:] + speeds[:1]])
        row = check.judge(moved, graph, arms, 0.0)
        self.assertGreater(row["speedup_pytorch_ci95_high"] / row["speedup_pytorch_ci95_low"], 1.3)
        self.assertGreater(row["speedup_off_ci95_high"] - row["speedup_off_ci95_low"], 0.3)

    def test_graphs_apart_cost_more_by_their_replays(self):
        self.assertAlmostEqual(check.apart_ms(MODEL, "llama3_8b", LAYERS, ["attn", "mlp"]), APART_MS - JOINED_MS)
        self.assertAlmostEqual(check.table_ms(MODEL, "llama3_8b", 128, LAYERS), EAGER_MS)
        self.assertIsNone(check.table_ms(MODEL, "llama3_8b", 512, LAYERS))

    def test_command_lines_are_those_of_the_stacks(self):
        nano = "model.hybrid_override_pattern=MMMM model.recompute_granularity=null -sl 512 --stack_only"
        self.assertIn(f"--num_layers 4 {nano} --cuda_graph_scope mamba", check.options("nemotron_3_nano", 512, LAYERS, "mamba"))
        for recipe, padded in (("llama3_8b", False), ("qwen3_30b_a3b", True), ("nemotron_3_nano", False)):
            line = check.options(recipe, 512, LAYERS, "full")
            self.assertIn(" --cuda_graph_impl local --cuda_graph_scope full_iteration", line)
            self.assertEqual("--use_tokendrop" in line, padded)
        # Every kind that is calibrated can be checked.
        self.assertEqual({kind: recipe for recipe, (kind, *_) in check.STACKS.items()}, calibrate_host_model.NAMES)

    def run_main(self, measured, replays=8, code=0):
        """Exit code, what was printed, and the rows of the CSV."""
        with tempfile.TemporaryDirectory() as folder:
            fake = os.path.join(folder, "mbperf")
            with open(fake, "w") as f:
                f.write(FAKE.format(python=sys.executable, eager=EAGER_MS, joined=JOINED_MS, replays=replays, code=code))
            os.chmod(fake, stat.S_IRWXU)
            for name, what in (("host_model.json", MODEL), ("host_model_pytorch.json", dict(rounds=16, rows=measured))):
                with open(os.path.join(folder, name), "w") as f:
                    json.dump(what, f)
            said = io.StringIO()
            with mock.patch.object(sys, "argv", ["host_model_check.py", fake, folder]), contextlib.redirect_stdout(said), \
                    contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as ended:
                check.main()
            path = os.path.join(folder, "host_model_check.csv")
            table = []
            if os.path.exists(path):
                with open(path, newline="") as f:
                    table = list(csv.DictReader(f))
            return ended.exception.code, said.getvalue(), table

    def test_a_run_from_files_to_verdict(self):
        code, said, table = self.run_main(rows(8.0, 2.6, 2.7))
        self.assertEqual(code, 0, said)
        self.assertIn("2 of 2 ratios and 1 of 1 eager host times within 10%", said)
        self.assertEqual([(r["graphs"], r["speedup_pytorch"], r["speedup_modelled"]) for r in table],
                         [("joined", "3.077", "3.2"), ("apart", "2.963", "3.2")])
        # 8.0 / 2.9 is 2.76, and 3.2 is 16 % above it.
        code, said, table = self.run_main(rows(8.0, 2.6, 2.9))
        self.assertEqual((code, [r["speedup_off"] for r in table]), (1, ["0.04", "0.16"]), said)
        self.assertIn("OVER", said)

    def test_unlike_captures_and_failed_runs_fail(self):
        code, said, _ = self.run_main(rows(8.0, 2.6, 2.7), replays=16)
        self.assertEqual(code, 1)
        self.assertIn("mbperf replays 16 graphs a step, 8 were expected", said)
        code, said, table = self.run_main(rows(8.0, 2.6, 2.7), code=5)
        self.assertEqual((code, table), (1, []))
        self.assertIn("no figures for llama3_8b 128 attn,mlp: RuntimeError: exit 5", said)


class WithoutTorch(unittest.TestCase):
    def calibrate(self, *arguments):
        """The script run by a Python that has no PyTorch, whatever this one has."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "torch.py"), "w") as f:
                f.write("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
            return subprocess.run([sys.executable, os.path.join(BENCHES, "calibrate_host_model.py"), *arguments], text=True,
                                  capture_output=True, cwd=folder, env=dict(os.environ, PYTHONPATH=folder))

    def test_help_and_mistakes_need_none(self):
        done = self.calibrate("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("--points", done.stdout)
        for wrong in ("dense:8192", "dense:0", "mamba:0", "mlp:512", ""):
            done = self.calibrate("--points", wrong)
            self.assertEqual(done.returncode, 2, wrong)
            self.assertIn("--points", done.stderr)

    def test_looking_measures_nothing(self):
        for right in ("moe:512", "dense:8192,moe:512", "default", "dense:8192,default"):
            done = self.calibrate("--look", "--points", right)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""), right)

    @unittest.skipIf(all(map(importlib.util.find_spec, calibrate_host_model.MAMBA_MODULES)), "this Python has Mamba's package")
    def test_mamba_points_need_their_package(self):
        for more in ([], ["--look"]):
            done = self.calibrate("--points", "default,mamba:512", *more)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn("which mamba points need", done.stderr)

    def test_one_line_says_what_is_missing(self):
        done = self.calibrate()
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("No module named 'torch'", done.stderr)
        self.assertIn("install PyTorch", done.stderr)


if __name__ == "__main__":
    unittest.main()
