#!/usr/bin/env python3
"""Tests of what the side-by-side scripts compute (benches/side_by_side_figures.py, pieces_figures.py, dropless.py), and of what
they do with arguments and files, on made-up figures and a program that stands for mbperf: no PyTorch, no GPU.

usage: python3 tests/pytorch/side_by_side_test.py
"""
import contextlib
import io
import math
import os
import stat
import sys
import tempfile
import unittest
from unittest import mock

BENCHES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches")
sys.path.insert(0, BENCHES)
import attention_variants  # noqa: E402
import command_line  # noqa: E402
import dropless  # noqa: E402
import pieces as pieces_script  # noqa: E402
import pieces_figures as pieces  # noqa: E402
import side_by_side  # noqa: E402
import side_by_side_figures as figures  # noqa: E402

# Stands for mbperf: writes its command line down, and rows; padded runs take 2 ms, others 2.1. A line that holds `broken` fails.
# Layers of a hybrid pattern have no attention, which `ops` refuses as mbperf does.
FAKE = """#!{python}
import sys
if "--version" in sys.argv:
    sys.exit({version})
line = " ".join(sys.argv[1:])
with open({log!r}, "a") as log:
    log.write(line + "\\n")
if {broken!r} in line:
    sys.exit(7)
if sys.argv[1] == "ops":
    name = sys.argv[2] if sys.argv[2][0] != "-" else ""
    found = [op for op in ("gemm", "adam", "embedding", "cross_entropy") if name in op]
    found += [op for op in ("ssd_fwd", "attention_bwd") if name in op and (op == "ssd_fwd") == ("pattern" in line)]
    if not found:
        sys.exit(2)
    print("op,launches_per_step,time_us,tflops,gb_per_s,share_of_ceiling,ceiling_gb_per_s,bytes,list_best_us,attention_backend,shape")
    for op in found:
        print(op + ",1,2,1,1,0.5,4000,1,,,s")
    sys.exit(0)
out = sys.argv[sys.argv.index("-o") + 1]
ms = 2.0 if "use_tokendrop" in line else 2.1
with open(out, "w") as f:
    f.write("arm,step_time_ms_median,launches_per_step,digest_match\\n")
    for arm in ("eager", "graph"):
        f.write(f"{{arm}},{{ms}},100,{match}\\n")
if "--profile" in line:
    with open(out.replace(".csv", ".profile.csv"), "w") as f:
        f.write("run_id,arm,part,kernel,launches,device_ms,idle_before_ms\\n")
        f.write("r,eager,attn,k,9,1,9\\nr,graph,attn,k,40,1,0.03\\nr,graph,mlp,k,60,1,0.05\\n")
sys.exit({code})
"""


class Fake:
    def __init__(self, folder, match="true", code=0, broken="never", version=0):
        self.log = os.path.join(folder, "log")
        self.path = os.path.join(folder, "mbperf")
        with open(self.path, "w") as f:
            f.write(FAKE.format(python=sys.executable, log=self.log, match=match, code=code, broken=broken, version=version))
        os.chmod(self.path, os.stat(self.path).st_mode | stat.S_IEXEC)

    def lines(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log) as f:
            return f.read().splitlines()


class Steps(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def test_unequal_arms_end_the_script_unless_they_may_differ(self):
        fake = Fake(self.folder.name, match="false")
        with self.assertRaises(SystemExit):
            figures.times(fake.path, "-m x")
        self.assertEqual(figures.times(fake.path, "-m x", unordered=True), {"eager": (2.1, 100), "graph": (2.1, 100)})
        self.assertNotIn("--attention_deterministic", fake.lines()[0])
        self.assertIn("--attention_deterministic false", fake.lines()[1])

    def test_a_failure_is_told(self):
        with self.assertRaises(SystemExit) as e:
            figures.times(Fake(self.folder.name, code=5).path, "-m x")
        self.assertIn("exit 5", str(e.exception))

    def test_gaps_are_of_the_graph_alone(self):
        nodes, us = figures.graph_gap(Fake(self.folder.name).path, "-m x")
        self.assertEqual(nodes, 100)
        self.assertAlmostEqual(us, 80.0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertIsNone(figures.graph_gap(Fake(self.folder.name, code=3).path, "-m x"))
        self.assertIn("exit 3", said.getvalue())

    def test_gaps_leave_out_overlaps(self):
        self.assertEqual(figures.gap_us([(0, 2), (1, 3), (5, 6), (5.5, 5.7), (7, 8)]), 3)
        self.assertEqual(figures.gap_us([(4, 9)]), 0)

    def test_an_interval_holds_equal_ratios_at_a_point(self):
        for n in (2, 4, 8):
            for end in figures.interval([1.25] * n):
                self.assertAlmostEqual(end, 1.25)
        value, low, high = figures.interval([0.5, 2.0])
        self.assertAlmostEqual(value, 1.0)
        self.assertAlmostEqual(math.log(high), 12.706 * math.log(2.0))
        self.assertAlmostEqual(low * high, 1.0)

    def test_dropless_and_padded_are_run_in_turns(self):
        fake = Fake(self.folder.name)
        made = dropless.lines(dropless.measured(fake.path))
        padded = ["use_tokendrop" in line for line in fake.lines()]
        self.assertEqual(padded, [False, True, True, False] * (dropless.ROUNDS // 2))
        self.assertEqual([line[1] for line in made], ["eager", "scoped"])
        for line in made:
            self.assertEqual(len(line), len(dropless.COLUMNS))
            self.assertEqual(line[2:5], ["2.1000", "2.0000", "1.0500"])
            self.assertEqual(line[-1], "true")
        slow = {"dropless": {"eager": [2.2] * 4, "graph": [2.1] * 4}, "padded": {"eager": [2.0] * 4, "graph": [2.0] * 4}}
        self.assertEqual([line[-1] for line in dropless.lines(slow)], ["false", "true"])


GEMM = "Gemm { m: 8192, n: 6144, k: 4096, layout: Nt, batch: 1, out: Bf16, accumulate: No }"
ATTENTION = ("AttnBwd { shape: AttnShape { positions: Positions { batch: 1, seq: 512, chunks: [(0, 512), (512, 0)] }, kv_len: 512, "
             "q_heads: 32, kv_heads: 8, head_dim: 128, head_dim_v: None, scale: None, bidirectional: false } }")
L2 = 50 << 20


def row(op, us, shape="s", **more):
    return dict(op=op, shape=shape, launches_per_step="4", time_us=str(us), tflops="1", gb_per_s="2", share_of_ceiling="0.5",
                ceiling_gb_per_s="4000", bytes="1", list_best_us="", attention_backend="") | more


def table(ours, forms=None, pytorch=None):
    """Cells by column, of as many rounds as there are rows of a piece."""
    rounds = [{pieces.key(r): r for r in one} for one in ours]
    keyed = lambda rows: [{pieces.key(r): r} for r in rows]
    made = pieces.lines("w", rounds, {form: keyed(rows) for form, rows in (forms or {}).items()}, pytorch or {}, L2)
    return [dict(zip(pieces.COLUMNS, line.cells(), strict=True)) for line in made]


class Pieces(unittest.TestCase):
    def test_shapes_are_read(self):
        self.assertEqual(pieces.fields(GEMM), dict(m=8192, n=6144, k=4096, layout="Nt", batch=1, out="Bf16", accumulate="No"))
        f = pieces.fields(ATTENTION)
        self.assertEqual([f[n] for n in ("batch", "seq", "q_heads", "kv_heads", "head_dim", "bidirectional")], [1, 512, 32, 8, 128, "false"])

    def test_a_product_is_held_against_list_and_pytorch(self):
        ours = [[row("gemm", 100.0, GEMM, list_best_us="99")], [row("gemm", 110.0, GEMM, list_best_us="107")]]
        listed, torch = table(ours, pytorch={("gemm", GEMM): [101.0, 111.0]})
        self.assertEqual((listed["reference"], listed["target"], listed["met"]), (pieces.LIST, 0.98, "true"))
        self.assertEqual((listed["ratio_low"], listed["ratio_high"]), ("0.9727", "0.9900"))
        self.assertEqual((listed["mbperf_us"], listed["reference_us"], listed["ratio"]), ("105.000", "103.000", "0.9813"))
        self.assertEqual((torch["reference"], torch["target"], torch["met"]), (pieces.PYTORCH, 1.0, "true"))
        # A list that was not timed, and a product that PyTorch has not: a line, and no verdict.
        for line in table([[row("gemm", 1.0, GEMM)]]):
            self.assertEqual((line["reference_us"], line["ratio"], line["met"]), ("", "", ""))

    def test_bandwidth_is_asked_of_launches_past_the_l2(self):
        for name in ("rmsnorm_fwd", "adam", "cross_entropy", "gather_rows"):
            # 80 MB at 4000 GB/s are 20 us.
            large = table([[row(name, 25.0, bytes="80000000")]])[0]
            self.assertEqual((large["ratio"], large["past_l2"], large["met"]), ("0.8000", "true", "false"), name)
            fast = table([[row(name, 23.0, bytes="80000000")]])[0]
            self.assertEqual(fast["met"], "true")
            small = table([[row(name, 25.0, bytes="40000000")]])[0]
            self.assertEqual((small["target"], small["past_l2"], small["met"]), (0.85, "false", ""))

    def test_attention_is_held_against_both_forms_of_cudnn(self):
        at = ("attention_bwd", ATTENTION)
        ours = [[row(at[0], 10.0, ATTENTION, attention_backend="own")]]
        forms = {"cudnn": [row(at[0], 9.6, ATTENTION, attention_backend="cudnn 9.14.0")], "default": [row(at[0], 8.0, ATTENTION)],
                 "own": [row(at[0], 15.0, ATTENTION, attention_backend="own")]}
        found = table(ours, forms, {at: [7.9]})
        self.assertEqual([(f["piece"], f["reference"], f["ratio"], f["met"]) for f in found], [
            ("attention_bwd", "cudnn deterministic by mbperf", "0.9600", "true"),
            ("attention_bwd", "cudnn default by pytorch", "0.7900", ""),
            ("attention_bwd", "cudnn default by mbperf", "0.8000", ""),
            ("attention_bwd own", "cudnn deterministic by mbperf", "0.6400", "true"),
        ])
        # Where cuDNN did not run there is nothing to hold other kernels against: bounds stand without a verdict.
        forms["cudnn"][0]["attention_backend"] = "own"
        for line in (table(ours, forms)[0], table(ours, forms)[-1], table(ours)[0]):
            self.assertEqual((line["reference_us"], line["met"]), ("", ""))
        self.assertEqual([f["reference"] for f in table([[row("attention_fwd", 10.0, ATTENTION)]])],
                         ["cudnn deterministic by mbperf", "cudnn default by pytorch"])

    def test_a_scan_is_held_against_tritons(self):
        shape = "{} {{ shape: SsdShape {{ batch: 1, seq: 512, heads: 64, head_dim: 64, groups: 8, state: 128, chunk: 128 }} }}"
        forward, backward = ("ssd_fwd", shape.format("SsdFwd")), ("ssd_bwd", shape.format("SsdBwd"))
        ours = [[row(*forward[:1], 10.0, forward[1], tflops="100"), row(*backward[:1], 30.0, backward[1], tflops="300")]]
        triton = {forward: [12.0], (pieces.BOTH_SCANS, backward[1]): [44.0]}
        found = table(ours, pytorch=triton)
        self.assertEqual([(f["piece"], f["reference"], f["mbperf_us"], f["ratio"], f["met"], f["tflops"]) for f in found], [
            ("ssd_fwd", "triton", "10.000", "1.2000", "true", "100.00"), ("ssd_bwd", "", "30.000", "", "", "300.00"),
            ("ssd_fwd+ssd_bwd", "triton", "40.000", "1.1000", "false", "250.00")])
        self.assertEqual([f["met"] for f in table(ours)], ["", "", ""])
        f = pieces.fields(backward[1])
        self.assertEqual([f[n] for n in ("batch", "seq", "heads", "head_dim", "groups", "state", "chunk")], [1, 512, 64, 64, 8, 128, 128])

    def test_other_pieces_have_a_line_and_no_bound(self):
        line = table([[row("router_fwd", 5.0)]])[0]
        self.assertEqual((line["piece"], line["target"], line["met"], line["mbperf_us"]), ("router_fwd", "", "", "5.000"))
        line = table([[row("mamba_conv_bwd", 25.0, bytes="80000000")]])[0]
        self.assertEqual((line["reference"], line["ratio"], line["target"], line["met"]), (pieces.COPY, "0.8000", "", ""))


class Scripts(unittest.TestCase):
    """The scripts whole, PyTorch's side made up."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.out = os.path.join(self.folder, "out.csv")
        for name in ("MBPERF_SECONDS", "PIECES_TURNS"):
            os.environ.pop(name, None)

    def ended(self, module, *words, **environment):
        """Exit code or last words of a script, and all that it wrote to standard error."""
        said = io.StringIO()
        torch = mock.MagicMock()
        torch.cuda.get_device_properties.return_value.L2_cache_size = L2
        code = 0
        with contextlib.ExitStack() as stack:
            for patch in (mock.patch.object(sys, "argv", [module.__name__ + ".py", *words]), mock.patch.dict(os.environ, environment),
                          mock.patch.object(command_line, "installed"), contextlib.redirect_stderr(said),
                          contextlib.redirect_stdout(io.StringIO())):
                stack.enter_context(patch)
            if module is pieces_script:
                for name, stub in (("load", mock.Mock()), ("torch", torch), ("references", lambda rows: {})):
                    stack.enter_context(mock.patch.object(module, name, stub, create=True))
            if module is side_by_side:
                ref = mock.MagicMock()
                ref.kernels.return_value = (10, 1.0)
                for name, stub in (("load", mock.Mock()), ("torch", torch), ("ref", ref), ("torch_step", mock.Mock()),
                                   ("mamba_step", mock.Mock()), ("torch_ms", lambda step: 2.0), ("torch_gap", lambda step: "1"), ("ref_context", mock.MagicMock())):
                    stack.enter_context(mock.patch.object(module, name, stub, create=True))
            try:
                module.main()
            except SystemExit as e:
                code = e.code
        return code, said.getvalue()

    def kept(self):
        with open(self.out) as f:
            return f.read()

    def workloads(self, path):
        with open(path) as f:
            return list(dict.fromkeys(line.split(",")[0] for line in f.read().splitlines()[1:]))

    def test_pieces_of_mamba_layers_are_timed(self):
        fake = Fake(self.folder)
        for name in figures.MAMBA:
            code, said = self.ended(pieces_script, fake.path, self.out, name)
            self.assertEqual(code, 0, said)
            self.assertEqual(self.workloads(self.out), [name])
            self.assertIn("ssd_fwd", self.kept())
        self.assertFalse([line for line in fake.lines() if "--attention_backend" in line])
        code, said = self.ended(pieces_script, fake.path, self.out, "llama3_8b_s128")
        self.assertEqual(code, 0, said)
        self.assertTrue([line for line in fake.lines() if "ops attention" in line and "--attention_backend own" in line])
        self.assertFalse(os.path.exists(self.out + ".new"))

    def test_steps_of_mamba_layers_have_two_references(self):
        code, said = self.ended(side_by_side, Fake(self.folder).path, self.out, "all")
        self.assertEqual((code, said), (0, ""))
        self.assertEqual(self.workloads(self.out), [*figures.WORKLOADS, *figures.MAMBA])
        modes = lambda name: [line.split(",")[1] for line in self.kept().splitlines() if line.startswith(name + ",")]
        plain = ["eager", "graph", "graph_overlap_wgrad"]
        self.assertEqual(modes("llama3_8b"), [*plain, "graph_attention_default"])
        for name in figures.MAMBA:
            self.assertEqual(modes(name), [*plain, "graph_reference_full"])

    def test_what_is_wrong_is_said_before_anything_is_measured(self):
        fake = Fake(self.folder)
        missing = os.path.join(self.folder, "no", "out.csv")
        unfit = os.path.join(self.folder, "unfit")
        os.mkdir(unfit)
        unfit = Fake(unfit, version=3).path
        for module in (side_by_side, pieces_script, dropless):
            named = () if module is dropless else ("nonsense",)
            for words, environment, part in [
                ((), {}, "usage: "),
                ((fake.path,), {}, "usage: "),
                ((fake.path, self.out, *(named or ("llama3_8b",))), {}, "known are llama3_8b, " if named else "one argument too many"),
                ((fake.path, self.out, "--nonsense"), {}, "no option --nonsense"),
                (("--check", fake.path, self.out, "nonsense"), {}, "nemotronh_56b"),
                (("/nonexistent", self.out), {}, "/nonexistent: No such file"),
                ((unfit, self.out), {}, "exit 3"),
                ((fake.path, missing), {}, "no folder"),
                ((fake.path, ""), {}, "an empty name"),
                ((fake.path, self.folder), {}, "is no file"),
                ((fake.path, os.devnull), {}, "is no file"),
                *(((fake.path, self.out), dict(MBPERF_SECONDS=bad), "MBPERF_SECONDS=" + bad)
                  for bad in ("0", "-1", "nan", "x", "inf", "1e9")),
                *(((fake.path, self.out), dict(PIECES_TURNS=bad), "PIECES_TURNS=" + bad) for bad in ("0", "3", "x", " ")),
            ]:
                code, said = self.ended(module, *words, **environment)
                self.assertEqual(code, 2, (module.__name__, words, said))
                self.assertIn(part, said)
                self.assertNotIn("Traceback", said)
            self.assertEqual(self.ended(module, "--check", fake.path, self.out), (0, ""))
            self.assertEqual(self.ended(module, "-h")[0], 0)
        self.assertEqual((fake.lines(), os.path.exists(self.out)), ([], False))

    def test_an_earlier_file_is_kept_until_the_new_one_is_whole(self):
        for module in (side_by_side, pieces_script, dropless):
            with open(self.out, "w") as f:
                f.write("before\n")
            # The first run fails.
            broken = Fake(self.folder, broken="-m")
            code, said = self.ended(module, broken.path, self.out)
            self.assertIn("exit 7", str(code))
            self.assertIn("nothing was measured: " + self.out + " is as it was", said)
            self.assertEqual((self.kept(), os.path.exists(self.out + ".new")), ("before\n", False))
            if module is not dropless:
                # The second workload fails: the first one's lines are there.
                broken = Fake(self.folder, broken="-sl 512")
                code, said = self.ended(module, broken.path, self.out, "llama3_8b", "llama3_8b_s512", "llama3_8b_s128")
                self.assertIn("exit 7", str(code))
                self.assertIn(self.out + ".new holds the ", said)
                self.assertEqual((self.kept(), self.workloads(self.out + ".new")), ("before\n", ["llama3_8b"]))
            names = [] if module is dropless else ["llama3_8b"]
            code, said = self.ended(module, Fake(self.folder).path, self.out, *names, MBPERF_SECONDS="0.5", PIECES_TURNS="1")
            self.assertEqual((code, said), (0, ""))
            self.assertEqual(self.workloads(self.out), names or ["qwen3_30b_a3b"])
            self.assertFalse(os.path.exists(self.out + ".new"))
        self.assertIn("--max_time 0.5", Fake(self.folder).lines()[-1])

    def test_a_link_stays_one(self):
        place = os.path.join(self.folder, "place.csv")
        os.symlink(place, self.out)
        with command_line.Table(self.out, ["a"]) as table:
            table.row([1])
        self.assertTrue(os.path.islink(self.out))
        with open(place) as f:
            self.assertEqual(f.read().split(), ["a", "1"])

    def test_variants_are_held_against_plain_attention_and_the_floor(self):
        columns = "op,launches_per_step,time_us,tflops,gb_per_s,share_of_ceiling,shape\n"

        def run(command):
            if command[2] == "delta_net":
                return columns + "delta_net_fwd,1,1,10,1,0.52,a\ndelta_net_bwd,1,1,10,1,0.49,a\n"
            plain = "llama" in command
            rates = {"attention_fwd": 500, "attention_bwd": 400} if plain else {"attention_fwd": 300, "attention_bwd": 239.9}
            return columns + "".join(f"{op},1,1,{rate},1,0.1,a\n" for op, rate in rates.items())

        with mock.patch.object(attention_variants, "run", run), contextlib.redirect_stdout(io.StringIO()):
            found = list(attention_variants.of_attention("mbperf", "latent"))
            floors = list(attention_variants.of_delta_net("mbperf", "delta_net"))
        self.assertEqual([(r[1], r[6], r[8]) for r in found], [("attention_fwd", "0.600", "true"), ("attention_bwd", "0.600", "false")])
        self.assertEqual([(r[6], r[8]) for r in floors], [("0.520", "true"), ("0.490", "false")])


if __name__ == "__main__":
    unittest.main()
