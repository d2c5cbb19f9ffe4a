#!/usr/bin/env python3
"""What the rows of benches/verdict.sh show, one line a group.

usage: benches/verdict_summary.py [FOLDER]      FOLDER holds aa.csv, spin.csv, neighbour.csv, samplers.* (default: results/h200, the committed ones)
Exit code 2 where it holds none of them, or what benches/verdict.sh did not write.
"""
import csv
import gzip
import math
import os
import statistics
import zlib

from command_line import arguments, refuse

NORMAL_95 = 1.959964  # two-sided 95 % of a normal distribution


def records(path):
    """Rows of a CSV, or of the same compressed; none where there is neither."""
    for name, opened in ((path, open), (path + ".gz", gzip.open)):
        if os.path.exists(name):
            with opened(name, "rt", newline="") as file:
                return list(csv.DictReader(file))
    return []


def measurements(rows):
    """Rows of each measurement together: one an arm, and every one of them holds the verdict."""
    found = {}
    for row in rows:
        found.setdefault((row["run_id"], row["repetition"]), []).append(row)
    return list(found.values())


def verdicts(name, runs):
    """Verdicts and half-widths by configuration and arms."""
    groups = {}
    for rows in runs:
        arms = "/".join(sorted({row["arm"] for row in rows}))
        groups.setdefault((rows[0]["model_recipe"], rows[0]["seq_length"], arms), []).append(rows)
    for key, group in groups.items():
        one = [rows[0] for rows in group]
        said = [row["verdict"] for row in one]
        ends = [(float(row["speedup_ci95_low"]), float(row["speedup_ci95_high"])) for row in one if row["speedup_ci95_low"]]
        widths = sorted((high / low - 1) / 2 * 100 for low, high in ends)
        wide = "half-width median %.2f %%, largest %.2f %%" % (statistics.median(widths), widths[-1]) if widths else "no interval"
        disturbed = max(float(row["disturbed_fraction"] or 0) for rows in group for row in rows)
        status = sorted({row["status"] for rows in group for row in rows})
        print(name, *key, "%d measurements:" % len(one), {word: said.count(word) for word in sorted(set(said))}, wide,
              "disturbed at most %.3f" % disturbed, "/".join(status))


def neighbours(runs):
    """Each run in order: the first of two ran beside a load, the second alone."""
    for rows in runs:
        one = rows[0]
        print("neighbour", one["started_at"], one["model_recipe"], one["verdict"],
              *("%s %s ms, disturbed %s, %s other processes;" % (row["arm"], row["step_time_ms_median"],
                row["disturbed_fraction"], row["other_processes_max"]) for row in rows))


def signed_ranks(values):
    """Median of all pairwise means with its 95 % interval (Hodges and Lehmann; Wilcoxon's rank sum as a normal)."""
    n = len(values)
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    reach = NORMAL_95 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    cut = min(max(int(n * (n + 1) / 4 - reach), 0), (len(means) - 1) // 2)
    return statistics.median(means), means[cut], means[-1 - cut]


def sampled(steps, blocks):
    """Log of the host's time a step behind a reading of the card over that behind none.

    Of three neighbouring pairs of blocks the middle one is set against the outer two, of which it differs: a host that
    drifts does so evenly. No pair is in two threes, so that the values are independent.
    """
    read = {(b["run_id"], int(b["block"])): b["sm_clock_mhz"] != "" for b in blocks}
    pairs = {}
    for s in steps:
        if s["pacing"] == "run_ahead" and s["phase"] == "steady":
            pairs.setdefault(s["run_id"], {}).setdefault(int(s["block"]) // 2, []).append(float(s["submit_ms"]))
    logs = []
    for run, of in pairs.items():
        order = sorted(of)
        submit = {pair: math.log(statistics.median(of[pair])) for pair in order}
        # Whether the card was read while the pair before ran: unknown for the first.
        behind = {pair: read.get((run, 2 * before)) for before, pair in zip(order, order[1:])}
        for at in range(1, len(order) - 2, 3):
            a, b, c = order[at:at + 3]
            if behind[a] is not None and behind[a] == behind[c] and behind[b] == (not behind[a]):
                change = submit[b] - (submit[a] + submit[c]) / 2
                logs.append(change if behind[b] else -change)
    return logs


def samplers(steps, blocks):
    logs = sampled(steps, blocks)
    if len(logs) > 1:
        middle, low, high = (value * 100 for value in signed_ranks(logs))
        mean, error = statistics.mean(logs) * 100, statistics.stdev(logs) / len(logs) ** 0.5 * 100
        print("samplers: host submit behind a reading over behind none: %+.2f %% (%+.2f to %+.2f, 95 %% by signed ranks); "
              "mean %+.2f +- %.2f %%; %d threes of neighbouring pairs"
              % (middle, low, high, mean, NORMAL_95 * error, len(logs)))


# Files by what is shown of them.
SHOWN = {
    ("aa.csv",): lambda rows: verdicts("aa", measurements(rows)),
    ("spin.csv",): lambda rows: verdicts("spin", measurements(rows)),
    ("neighbour.csv",): lambda rows: neighbours(measurements(rows)),
    ("samplers.steps.csv", "samplers.blocks.csv"): samplers,
}


def main():
    folder = (arguments(__doc__, 0, 1) or [os.path.join(os.path.dirname(__file__), "..", "results", "h200")])[0]
    if not os.path.isdir(folder):
        refuse("there is no folder %s" % (folder or "of an empty name"))
    seen = 0
    for names, shown in SHOWN.items():
        try:
            tables = [records(os.path.join(folder, name)) for name in names]
        except (ValueError, OSError, EOFError, csv.Error, zlib.error) as e:
            refuse("%s of %s cannot be read: %s" % (", ".join(names), folder, e))
        seen += any(tables)
        try:
            shown(*tables)
        except (KeyError, ValueError, TypeError) as e:
            refuse("%s of %s: %s: %s: benches/verdict.sh did not write this" % (", ".join(names), folder, type(e).__name__, e))
    if not seen:
        refuse("%s holds no rows: %s are looked for" % (folder, ", ".join(name for names in SHOWN for name in names)))


if __name__ == "__main__":
    main()
