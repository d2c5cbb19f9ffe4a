#!/usr/bin/env bash
# Every figure that results/h200/ holds, on a machine with a GPU (PyTorch and compute-sanitizer beside it): builds nothing.
# usage: benches/h200.sh [MBPERF [OUTPUT FOLDER [PART ...]]]
# Without a folder: results/mine; results/h200 holds committed figures and is written by naming it.
# parts: selftest referee sanitizer (at the same time: no figure of theirs is a time) faults meaning cold qwen llama512 llama8192 side verdict
#        host_model sweep (all scopes of three models, their pages and workbooks; sweep_qwen, sweep_llama, sweep_nemotron: of one) pages;
#        without one all but verdict, host_model and the sweeps, which take minutes each
# SANITIZE: a pattern; the sanitizer then sees the ops alone whose names match.
# MAX_TIME: seconds of measuring a row, in place of the default, which grows to what eight pairs need.
# Exit code: 0 all was made and agrees, 1 something was not, 2 nothing was begun.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. benches/common.sh
help_if_asked "$@"
mbperf=${1:-target/release/mbperf}
out=${2:-results/mine}
shift $(($# < 2 ? $# : 2))
all="selftest referee sanitizer faults meaning cold qwen llama512 llama8192 side verdict host_model sweep sweep_qwen sweep_llama sweep_nemotron pages"
choose "$all" "selftest referee sanitizer faults meaning cold qwen llama512 llama8192 side pages" "$@"
seconds_in MAX_TIME
grep -qE -e "${SANITIZE:-.}" </dev/null 2>/dev/null
[ $? -le 1 ] || refuse "SANITIZE=$SANITIZE: no pattern of grep -E"
begin
if wants side; then # Words that it would refuse; PyTorch it may lack as long as other parts run.
    benches/side_by_side.sh --check "$mbperf" "$out"
    [ $? != 2 ] || exit 2
fi
row() { # FILE ARGUMENTS...
    local file=$1 start=$SECONDS
    shift
    "$mbperf" "$@" --device cuda ${MAX_TIME:+--max_time "$MAX_TIME"} -q -o "$out/$file.csv" >"$out/last.log" 2>&1
    local code=$?
    echo "exit $code, $((SECONDS - start)) s: $*"
    [ $code != 130 ] || exit 130
    [ $code = 0 ] && return
    failed
    tail -3 "$out/last.log"
}
LLAMA="-m llama -mr llama3_8b -g h100 -cp 1"
QWEN="-m qwen -mr qwen3_30b_a3b -g h100"
LATENT="-c bf16 --task pretrain -pp 1 -vp None -tp 1 -ep 64 optimizer.optimizer=adam model.mtp_num_layers=0"
# Experts as few and narrow as a dump of them should be; a window that hides most of a short sequence.
OSS="-m gpt_oss -mr gpt_oss_120b -g h100 -c bf16 -pp 1 -ep 8 model.num_moe_experts=32 model.moe_ffn_hidden_size=256 model.window_size=[63,0]"
PADDED="--use_tokendrop true model.moe_token_dispatcher_type=alltoall"

selftest_part() {
    local code=0
    "$mbperf" selftest >"$out/selftest.txt" 2>&1 || { code=$?; failed; }
    echo "selftest: exit $code, $(tail -1 "$out/selftest.txt"), $SECONDS s"
    grep FAILED "$out/selftest.txt" | cut -c1-300
}
referee_part() {
    local dumps
    dumps=$(mktemp -d)
    local small="--hidden_size 512 -sl 256 --vocab_size 1024 --max_microbatches 1 -q --max_time 0.5"
    dump() { local name=$1; shift; "$mbperf" "$@" $small -o "$dumps/$name.csv" --dump "$dumps/$name" >/dev/null 2>&1 || { echo "dump of $name: exit $?"; failed; rm -rf "${dumps:?}/$name"; }; }
    of_device() { # Both at the same time: neither is a time.
        local device=$1
        dump ${device}_llama3_8b $LLAMA --num_layers 2 --device $device
        dump ${device}_qwen3_dropless $QWEN --num_layers 2 --device $device
        dump ${device}_qwen3_dropless_own_routing $QWEN --num_layers 2 --device $device model.moe_router_force_load_balancing=false
        dump ${device}_qwen3_padded $QWEN --num_layers 2 --device $device $PADDED --cuda_graph_impl none
        dump ${device}_nemotron_3_nano -m nemotronh -mr nemotron_3_nano -g h100 --num_layers 4 model.hybrid_override_pattern=ME*M --device $device
        dump ${device}_nemotron_3_super -m nemotronh -mr nemotron_3_super -g h100 -c bf16 -tp 1 -pp 1 --num_layers 4 model.hybrid_override_pattern=ME*E --device $device
        dump ${device}_deepseek_v3 -m deepseek -mr deepseek_v3 -g h100 ${LATENT/mtp_num_layers=0/mtp_num_layers=1} --num_layers 2 --device $device
        dump ${device}_kimi_k2 -m kimi -mr kimi_k2 -g h100 $LATENT --num_layers 2 --device $device
        dump ${device}_gpt_oss_120b $OSS --num_layers 2 --device $device
        dump ${device}_qwen3_next_80b_a3b -m qwen -mr qwen3_next_80b_a3b -g h100 --num_layers 2 --device $device
        dump ${device}_qwen3_vl_30b_a3b -m qwen_vl -mr qwen3_vl_30b_a3b -g h100 -c bf16 --moe_a2a_overlap false -pp 1 -vp None --num_layers 2 --device $device
        dump ${device}_qwen35_vl_35b_a3b -m qwen_vl -mr qwen35_vl_35b_a3b -g h100 -c bf16 --moe_a2a_overlap false -pp 1 -vp None --num_layers 4 model.moe_router_load_balancing_type=aux_loss --device $device
        dump ${device}_deepseek_v4_flash -m deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16 model.moe_paged_stash=false --num_layers 2 --device $device
        dump ${device}_wan_14b -m wan -mr wan_14b -g h100 -tp 1 -cp 1 model.recompute_granularity=null --num_layers 2 --device $device
    }
    of_device cuda &
    of_device cpu
    wait $!
    # A process a dump, of few threads each: PyTorch's own threads wait for one another where others use the same cores.
    ls -d "$dumps"/*/ | OMP_NUM_THREADS=2 xargs -r -d '\n' -n 1 -P "$((($(nproc) + 1) / 2))" sh -c 'python3 tests/pytorch/check.py "$0" >"${0%/}.txt" 2>&1' ||
        { echo "referee: it does not agree with every dump"; failed; }
    cat "$dumps"/c*.txt >"$out/referee.txt"
    echo "PyTorch referee: $(grep -c agrees "$out/referee.txt") losses agree, $SECONDS s"
    sed -i "s|$dumps/||" "$out/referee.txt"
    grep -E "EXCEEDS|DIFFERS" "$out/referee.txt" | head -5
    rm -rf "$dumps"
}
sanitizer_check() { # TOOL ONLY EXCEPT: our own kernels; cuDNN and cuBLASLt are not ours to check.
    local log code
    log=$(mktemp)
    timeout 100 compute-sanitizer --tool "$1" --log-file "$log" "$mbperf" selftest --small --only "$2" --except "$3" >"$log.out" 2>&1
    code=$?
    echo "$1 selftest --small --only '$2' --except '$3': exit $code, $(tail -1 "$log.out"), $(grep -h SUMMARY "$log" | sed 's/=* *//')"
    grep -qE 'SUMMARY: 0 (errors|hazards)' "$log" || cut -c1-200 "$log" >"$out/sanitizer_${1}_${2//[^a-z_]/_}.txt"
    rm -f "$log" "$log.out"
}
sanitizer_part() {
    local op arms
    export -f sanitizer_check
    export mbperf out
    "$mbperf" selftest --small --list --except 'arms equal' >"$out/last.names" || { failed; echo "sanitizer: selftest --list failed"; return; }
    # One process a check: a finding names its op.
    grep -vE '^(gemm|fresh|replays|capture|profile)' "$out/last.names" | grep -E -e "${SANITIZE:-.}" | while read -r op; do
        printf '%s\n' memcheck "$op" 'arms equal' racecheck "$op" 'arms equal'
    done >"$out/last.list"
    for arms in 'llama attn,mlp' 'qwen alltoall' 'hybrid mamba'; do
        printf '%s\n' memcheck "arms equal: $arms" cudnn
    done >>"$out/last.list"
    xargs -d '\n' -n 3 -P "$(nproc)" bash -c 'sanitizer_check "$@"' _ <"$out/last.list" >"$out/sanitizer.txt"
    sort -o "$out/sanitizer.txt" "$out/sanitizer.txt"
    echo "compute-sanitizer: $(wc -l <"$out/sanitizer.txt") runs, $SECONDS s; those with a finding or none:"
    ! grep -v 'exit 0, [1-9].* 0 \(errors\|hazards\)' "$out/sanitizer.txt" || failed
}
running=()
for part in selftest referee sanitizer; do
    if wants $part; then
        ${part}_part &
        running+=($!)
    fi
done
[ ${#running[@]} = 0 ] || wait "${running[@]}"
if wants selftest; then # A time: nothing runs beside it.
    "$mbperf" selftest --only 'launch cost' >"$out/selftest_launch_cost.txt" 2>&1 || failed
    head -1 "$out/selftest_launch_cost.txt"
fi
if wants faults; then
    echo "== provoked faults: phase, kind, exit code, the rows' status"
    # Each with the exit code that README.md gives it.
    for fault in 4:capture:driver_error 4:instantiate:driver_error 4:upload:driver_error 1:first_replay:driver_error 1:steady:driver_error \
        5:capture:out_of_memory 5:instantiate:out_of_memory 5:prepare:out_of_memory 6:equality:wrong_result 6:switch:wrong_result; do
        wanted=${fault%%:*} fault=${fault#*:}
        rm -f "$out"/last_fault*
        timeout --foreground 60 "$mbperf" $LLAMA -sl 128 --num_layers 1 --device cuda --cuda_graph_scope attn --inject $fault --max_time 1 -q -o "$out/last_fault.csv" >"$out/last.log" 2>&1
        code=$?
        echo "$fault: exit $code, $(cut -d, -f3 "$out/last_fault.csv" 2>/dev/null | tail -n +2 | sort -u | tr '\n' ' ' | tr -d '\r')$(tail -1 "$out/last.log" | cut -c1-200)"
        [ $code = $wanted ] || { failed; echo "$fault: exit $wanted was expected"; }
    done | tee "$out/faults.txt"
    rm -f "$out"/last_fault*
fi
if wants meaning; then
    echo "== twice the layers, twice the device time; the warm-up does not move the ratio"
    for layers in 8 16; do row meaning $LLAMA -sl 512 --num_layers $layers --stack_only --cuda_graph_scope full_iteration; done
    for warmup in 3 30; do row meaning $LLAMA -sl 512 --num_layers 8 --stack_only --cuda_graph_scope attn model.cuda_graph_warmup_steps=$warmup; done
fi
# In the default time about 3 minutes, llama's rows 2 and 4.
if wants qwen; then
    echo "== rows of qwen3_30b_a3b"
    row qwen3_30b_a3b $QWEN
    row qwen3_30b_a3b $QWEN --cuda_graph_scope attn,moe_router
    row qwen3_30b_a3b $QWEN --cuda_graph_scope attn,moe_router,moe_preprocess
    row qwen3_30b_a3b $QWEN $PADDED --cuda_graph_impl transformer_engine --cuda_graph_scope moe
    row qwen3_30b_a3b $QWEN $PADDED --cuda_graph_impl local --cuda_graph_scope full_iteration
fi
for seq in 512 8192; do
    if wants llama$seq; then
        echo "== rows of llama3_8b, sequence $seq"
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope attn
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope attn,mlp
        row llama3_8b $LLAMA -sl $seq --cuda_graph_impl transformer_engine
        row llama3_8b $LLAMA -sl $seq --cuda_graph_scope full_iteration
    fi
done
if wants cold; then
    echo "== the main command, process start to CSV, with a cold and then a warm kernel cache"
    cache=$(mktemp -d)
    for state in cold warm; do
        start=$(date +%s%N)
        "$mbperf" $QWEN --device cuda --cuda_graph_scope attn,moe_router --kernel_cache "$cache" -q -o "$out/main_command_$state.csv" >/dev/null 2>&1
        code=$?
        [ $code = 0 ] || failed
        echo "$state cache: exit $code, $(($(($(date +%s%N) - start)) / 1000000)) ms"
    done | tee "$out/main_command.txt"
    rm -rf "$cache"
fi
if wants side; then
    echo "== side by side with PyTorch"
    # Mamba's workloads too where Python has what they need; their tuning takes minutes unless it is kept.
    with_mamba=$(python3 -c 'import importlib.util as u; print("" if None in map(u.find_spec, ("mamba_ssm", "einops")) else "all")' 2>/dev/null)
    TRITON_CACHE_AUTOTUNING=${TRITON_CACHE_AUTOTUNING:-1} benches/side_by_side.sh "$mbperf" "$out" $with_mamba 2>"$out/last.log" || { failed; tail -5 "$out/last.log"; }
fi
if wants verdict; then
    benches/verdict.sh "$mbperf" "$out" || failed
fi
if wants host_model; then
    echo "== host model against PyTorch"
    benches/host_model_check.sh "$mbperf" "$out" || failed
fi
if [[ $parts == *sweep* ]]; then
    echo "== sweeps: every scope worth trying, under PyTorch's host model too, with a profile of the last"
    for line in "qwen3_30b_a3b $QWEN" "llama3_8b $LLAMA -sl 512" "nemotron_3_nano -m nemotronh -mr nemotron_3_nano -g h100"; do
        file=$out/sweep_${line%% *} start=$SECONDS
        wants sweep || wants "sweep_${line%%[0-9_]*}" || continue
        timeout --foreground -k 20 580 "$mbperf" ${line#* } --device cuda --sweep --host_model pytorch --profile ${MAX_TIME:+--max_time "$MAX_TIME"} \
            -o "$file.csv" >"$file.txt" 2>&1 && code=0 || { code=$?; failed; }
        echo "exit $code, $((SECONDS - start)) s: ${line#* } --sweep: $(tail -1 "$file.txt")"
        "$mbperf" report "$file.csv" -o "$file.html" --xlsx "$file.xlsx" && code=0 || { code=$?; failed; }
        echo "exit $code: $(basename "$file").html, .xlsx"
    done
fi
if wants pages; then
    echo "== pages and workbooks of every result file"
    for file in "$out"/*.csv; do
        [ "$(head -c 14 "$file" 2>/dev/null)" = schema_version ] || continue
        "$mbperf" report "$file" -o "${file%.csv}.html" --xlsx "${file%.csv}.xlsx" && code=0 || { code=$?; failed; }
        echo "exit $code: $(basename "${file%.csv}").html, .xlsx"
    done
fi
rm -f "$out/last.log" "$out/last.list"
ended
