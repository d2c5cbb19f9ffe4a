"""Dropless experts against drop-and-pad at qwen3_30b_a3b, sequence 4096: mbperf on both sides, scoped graphs
(attn,moe_router), in turns of which every second goes backwards.

usage: dropless.py [--check] MBPERF OUT.csv      --check: looks at the arguments and measures nothing

Needs a GPU and no PyTorch. Each round gives one ratio, dropless over padded; the interval is Student's t over the rounds'
logarithms.
"""
from command_line import Table
from side_by_side_figures import PADDED, QWEN_DROPLESS, begin, interval, middle, times

ROUNDS = 4
# SPEED's bound: dropless, eager and scoped, takes at most 8 % more.
TARGET = 1.08
WORKLOAD = f"{QWEN_DROPLESS} -sl 4096 --stack_only --cuda_graph_impl transformer_engine --cuda_graph_scope attn,moe_router"
FORMS = {"dropless": WORKLOAD, "padded": f"{WORKLOAD} {PADDED}"}
# mbperf's arms as this table calls them.
MODES = {"eager": "eager", "graph": "scoped"}
COLUMNS = ["workload", "mode", "dropless_ms", "padded_ms", "ratio", "ratio_ci95_low", "ratio_ci95_high", "target", "met"]


def measured(binary):
    """Step times by form and arm, a round after the other."""
    found = {form: {arm: [] for arm in MODES} for form in FORMS}
    for r in range(ROUNDS):
        for form in list(FORMS) if r % 2 == 0 else reversed(FORMS):
            for arm, (ms, _) in times(binary, FORMS[form]).items():
                found[form][arm].append(ms)
    return found


def lines(found):
    """The table."""
    made = []
    for arm, mode in MODES.items():
        dropless, padded = found["dropless"][arm], found["padded"][arm]
        ratio, low, high = interval([a / b for a, b in zip(dropless, padded)])
        made.append(["qwen3_30b_a3b", mode, f"{middle(dropless):.4f}", f"{middle(padded):.4f}", f"{ratio:.4f}", f"{low:.4f}", f"{high:.4f}",
                     TARGET, str(ratio <= TARGET).lower()])
    return made


def main():
    binary, target, _ = begin(__doc__, named=False)
    with Table(target, COLUMNS) as table:
        for line in lines(measured(binary)):
            print(*line)
            table.row(line)


if __name__ == "__main__":
    main()
