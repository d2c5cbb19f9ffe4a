#!/usr/bin/env python3
"""Tests of what the shell scripts of benches/ do before they run anything, and of files that they keep, with a program that stands for
mbperf: no PyTorch, no GPU.

usage: python3 tests/pytorch/scripts_test.py
"""
import importlib.util
import os
import re
import stat
import subprocess
import tempfile
import unittest

BENCHES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches")
PARTS = {"h200.sh": "cold", "h200x2.sh": "captures", "models.sh": "ops", "verdict.sh": "spin"}
SCRIPTS = [*PARTS, "side_by_side.sh", "host_model_check.sh"]
# Writes its command line down; fails where it holds the word of the variable BROKEN.
FAKE = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "$@" >>"{log}"
case "$*" in *"${{BROKEN:-never}}"*) exit 7 ;; esac
[ "$1" = ops ] && printf 'op,shape\\n%s,s\\n' "$2"
exit 0
"""


class Shell(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.log, self.mbperf, self.out = (os.path.join(folder.name, name) for name in ("log", "mbperf", "out"))
        with open(self.mbperf, "w") as f:
            f.write(FAKE.format(log=self.log))
        os.chmod(self.mbperf, stat.S_IRWXU)
        # Stands for PyTorch, as far as it is looked for.
        self.torch = os.path.join(folder.name, "modules")
        os.mkdir(self.torch)
        with open(os.path.join(self.torch, "torch.py"), "w") as f:
            f.write("raise ImportError('a made-up PyTorch')\n")

    def run_script(self, name, *words, **environment):
        own = ("PARTS", "POINTS", "MAX_TIME", "SANITIZE", "DRYRUN", "MBPERF_SECONDS", "PIECES_TURNS")
        plain = {k: v for k, v in os.environ.items() if k not in own}
        return subprocess.run([os.path.join(BENCHES, name), *words], env=plain | dict(PYTHONPATH=self.torch) | environment, text=True,
                              capture_output=True, stdin=subprocess.DEVNULL)

    def refused(self, said, name, *words, **environment):
        done = self.run_script(name, *words, **environment)
        self.assertEqual(done.returncode, 2, (name, words, environment, done.stdout, done.stderr))
        self.assertIn(said, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertFalse(os.path.exists(self.log), (name, words))

    def test_help_is_the_comment_at_the_head(self):
        for name in SCRIPTS:
            for word in ("-h", "--help"):
                done = self.run_script(name, word)
                self.assertEqual((done.returncode, done.stderr), (0, ""), name)
                self.assertIn("usage: benches/" + name, done.stdout)
                self.assertNotIn("set -", done.stdout)

    def test_unknown_parts_are_refused(self):
        for name, part in PARTS.items():
            self.refused("no part nonsense: known are ", name, self.mbperf, self.out, part, "nonsense")
            self.refused("no part nonsense: known are ", name, self.mbperf, self.out, part + " nonsense")
            self.assertFalse(os.path.exists(self.out))
        for parts in ("nonsense", "dropless nonsense", "dropless\nnonsense", "*"):
            self.refused("no part ", "side_by_side.sh", self.mbperf, self.out, PARTS=parts)

    def test_parts_that_are_known_are_there(self):
        for name in PARTS:
            with open(os.path.join(BENCHES, name)) as f:
                text = f.read()
            known = re.search(r'^all="(.*)"$', text, re.MULTILINE)[1].split()
            tried = set(re.findall(r"wants (\w+)", text)) | set(re.findall(r"^(\w+)_part\(\)", text, re.MULTILINE))
            if name == "h200.sh":
                tried = tried - {"llama"} | {"llama512", "llama8192"}
                # One sweep each: the part is named after the model's family.
                sweeps = re.search(r"^    for line in (.*); do$\n        file=\$out/sweep_", text, re.MULTILINE)[1]
                tried |= {"sweep_" + model for model in re.findall(r'"([a-z]+)[a-z0-9_]* ', sweeps)}
            self.assertEqual(sorted(known), sorted(tried), name)
            head = text[:text.index("\nset -")].replace("\n#", " ")
            self.assertFalse([part for part in known if not re.search(rf"\b{part}\b", head)], name)

    def test_no_words_are_all_parts(self):
        for blank in ("", " ", "\n"):
            done = self.run_script("models.sh", self.mbperf, self.out, blank, DRYRUN="1")
            self.assertEqual((done.returncode, done.stdout.count("== ")), (0, 8), done)
            done = self.run_script("side_by_side.sh", "--check", self.mbperf, self.out, PARTS=blank, PYTHONPATH="")
            # This machine's Python may have PyTorch or lack it, which steps alone asks for at first.
            self.assertIn(done.returncode, (0, 1), done)
            done = self.run_script("side_by_side.sh", self.mbperf, self.out, PARTS=blank)
            self.assertEqual(done.returncode, 1, done)
            self.assertIn("side_by_side.py: a made-up PyTorch", done.stderr)

    def test_what_cannot_be_run_or_written_is_refused(self):
        place = os.path.join(self.out, "x")
        with open(self.out, "w") as f:
            f.write("no folder")
        for name in SCRIPTS:
            for bad in ("/nonexistent", "--nonsense", "/bin/false", "/etc/passwd"):
                self.refused("mbperf cannot be run: " + bad, name, bad, place)
            self.refused("cannot be made or written", name, self.mbperf, place)

    def test_bad_words_and_variables_are_refused(self):
        for bad in ("0", "x", "-1", "nan"):
            self.refused("MAX_TIME=" + bad, "h200.sh", self.mbperf, self.out, "meaning", MAX_TIME=bad)
            self.refused("MBPERF_SECONDS=" + bad, "side_by_side.sh", self.mbperf, self.out, MBPERF_SECONDS=bad)
            self.refused("MBPERF_SECONDS=" + bad, "h200.sh", self.mbperf, self.out, "meaning", "side", MBPERF_SECONDS=bad)
            self.refused("PIECES_TURNS=" + bad, "side_by_side.sh", self.mbperf, self.out, PIECES_TURNS=bad)
            self.refused(bad + " rounds", "host_model_check.sh", self.mbperf, self.out, bad)
        for name in ("models.sh", "models25.sh", "h200x2.sh"):
            self.refused("DRYRUN=no: 1 or nothing", name, self.mbperf, self.out, DRYRUN="no")
        self.refused("SANITIZE=(", "h200.sh", self.mbperf, self.out, "sanitizer", SANITIZE="(")
        self.refused("one argument too many", "host_model_check.sh", self.mbperf, self.out, "4", "5")
        for bad in ("mamba", "nonsense:512", "dense:8192", "default mamba:512", "moe:512,"):
            self.refused("argument --points", "host_model_check.sh", self.mbperf, self.out, POINTS=bad)
        for parts in ("", "dropless", "pieces", "steps"):
            self.refused("no workload nonsense: known are ", "side_by_side.sh", self.mbperf, self.out, "llama3_8b", "nonsense", PARTS=parts)

    def test_mamba_is_known_to_all_parts(self):
        # Each of the three looks at it; what Python lacks is told from what was asked wrongly.
        for name in ("mamba_ssm", "einops"):
            open(os.path.join(self.torch, name + ".py"), "w").close()
        done = self.run_script("side_by_side.sh", "--check", self.mbperf, self.out, "nemotronh_56b")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertFalse(os.path.exists(self.log))
        # The made-up PyTorch is met after the arguments were taken.
        done = self.run_script("host_model_check.sh", self.mbperf, self.out, POINTS="mamba:512,default")
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("a made-up PyTorch", done.stdout)

    @unittest.skipIf(all(map(importlib.util.find_spec, ("mamba_ssm", "einops"))), "this Python has Mamba's package")
    def test_mamba_points_without_their_package_are_refused(self):
        self.refused("which mamba points need", "host_model_check.sh", self.mbperf, self.out, POINTS="mamba:512")
        self.assertFalse(os.path.exists(self.out))

    def test_earlier_files_are_kept(self):
        os.mkdir(self.out)
        for name, script, words, broken in (("pieces_models.csv", "models.sh", ["ops"], "delta_net"),
                                            ("host_model_check.txt", "host_model_check.sh", [], "")):
            path = os.path.join(self.out, name)
            with open(path, "w") as f:
                f.write("before")
            done = self.run_script(script, self.mbperf, self.out, *words, **(dict(BROKEN=broken) if broken else {}))
            self.assertIn(".new holds what was", done.stdout + done.stderr)
            with open(path) as f:
                self.assertEqual(f.read(), "before")
            self.assertTrue(os.path.exists(path + ".new"))
        done = self.run_script("models.sh", self.mbperf, self.out, "ops")
        with open(os.path.join(self.out, "pieces_models.csv")) as f:
            lines = f.read().splitlines()
        self.assertEqual((lines[0], lines.count("op,shape"), len(lines)), ("op,shape", 1, 18))
        self.assertFalse(os.path.exists(os.path.join(self.out, "pieces_models.csv.new")))


if __name__ == "__main__":
    unittest.main()
