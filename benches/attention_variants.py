"""Rates of attention's variants beside plain attention of the same heads, and of gated delta nets beside their floor, by `mbperf ops`
on one GPU.

usage: attention_variants.py [--check] MBPERF OUT.csv [VARIANT ...]      --check: looks at the arguments and measures nothing

A variant's rate counts the pairs of rows that it lets see each other, plain attention's those under the diagonal: `ratio` is
between rates, not times. A delta net's `ratio` is the share of the larger of its floors by FLOPs and by bytes, both measured in the
same process.
"""
import csv, sys
import command_line
from command_line import Table
from side_by_side_figures import run

COLUMNS = ["variant", "op", "shape", "tflops", "reference", "reference_tflops", "ratio", "target", "met"]
# What a variant's rate is aimed at, and a delta net's share of its floor: twice the time at most.
RATE_TARGET, FLOOR_TARGET = 0.6, 0.5
PLAIN = "-m llama -mr llama3_8b -g h100 -cp 1 --num_layers 1 model.num_attention_heads={0} model.num_query_groups={1} model.kv_channels={2} -sl {3}"
OSS = "-m gpt_oss -mr gpt_oss_120b -g h100 -c bf16 -pp 1 --num_layers 4"
# By variant: what is timed, and plain attention of as many heads, as wide as the variant's values. Models: deepseek_v3, gpt_oss_120b,
# deepseek_v4_flash, wan_14b (itself and over the text), qwen3_vl_30b_a3b (its tower too).
ATTENTION = {
    "latent": (
        "-m deepseek -mr deepseek_v3 -g h100 -c bf16 --task pretrain -pp 1 -vp None -tp 1 -ep 64 optimizer.optimizer=adam "
        "model.mtp_num_layers=0 --num_layers 4", PLAIN.format(128, 128, 128, 4096)),
    "sinks": (OSS, f"{OSS} model.softmax_type=vanilla model.window_size=null"),
    "one_key_head": (
        "-m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16 model.moe_paged_stash=false --num_layers 2",
        PLAIN.format(64, 1, 512, 4096)),
    "video": (
        "-m wan -mr wan_14b -g h100 model.recompute_granularity=null --max_microbatches 1 --num_layers 2", PLAIN.format(20, 20, 128, 8192)),
    "image_tower": (
        "-m qwen_vl -mr qwen3_vl_30b_a3b -g h100 -c bf16 --moe_a2a_overlap false --num_layers 24", PLAIN.format(16, 16, 72, 4096)),
}
DELTA_NET = {"delta_net": "-m qwen -mr qwen3_next_80b_a3b -g h100 --num_layers 4"}


def ops(binary, name, line):
    return list(csv.DictReader(run([binary, "ops", name, *line.split(), "--format", "csv"]).splitlines()))


def of_attention(binary, name):
    """A row for each shape and pass of the variant."""
    line, plain_line = ATTENTION[name]
    plain = {}
    for row in ops(binary, "attention", plain_line):
        plain[row["op"]] = float(row["tflops"])
    for row in ops(binary, "attention", line):
        rate = float(row["tflops"])
        ratio = rate / plain[row["op"]]
        yield [name, row["op"], row["shape"], f"{rate:.1f}", "plain attention", f"{plain[row['op']]:.1f}", f"{ratio:.3f}", RATE_TARGET,
               str(ratio >= RATE_TARGET).lower()]


def of_delta_net(binary, name):
    for row in ops(binary, "delta_net", DELTA_NET[name]):
        share = float(row["share_of_ceiling"])
        yield [name, row["op"], row["shape"], row["tflops"], "floor", "", f"{share:.3f}", FLOOR_TARGET, str(share >= FLOOR_TARGET).lower()]


def main():
    check = sys.argv[1:2] == ["--check"]
    if check:
        del sys.argv[1]
    binary, target, *names = command_line.arguments(__doc__, 2, None)
    command_line.known(names, ATTENTION | DELTA_NET, "variant")
    command_line.runnable(binary)
    command_line.writable(target)
    if check:
        return
    with Table(target, COLUMNS) as table:
        for name in names or [*ATTENTION, *DELTA_NET]:
            for cells in (of_attention if name in ATTENTION else of_delta_net)(binary, name):
                print(*(c for i, c in enumerate(cells) if COLUMNS[i] != "shape"), sep=", ", flush=True)
                table.row(cells)


if __name__ == "__main__":
    main()
