//! Several processes on the CPU: their losses are those of one; a rank that is killed or never comes ends all.
#![cfg(unix)]

use crate::common::binary::{cell, command, records, run, text};
use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// The same small model whatever the layout: what a CPU run shrinks depends on tp.
const MODEL: &str = "-g h100 -pp 1 -cp 1 --device cpu --full_size --num_layers 2 --hidden_size 64 -sl 32 --vocab_size 512 \
                     -mb 1 model.kv_channels=16 model.num_attention_heads=4 model.num_query_groups=2 --max_microbatches 4 \
                     -ms 3 -q --cuda_graph_impl none";
const DENSE: &str = "-m llama -mr llama3_8b model.ffn_hidden_size=128";
const EXPERTS: &str = "-m qwen -mr qwen3_30b_a3b --num_moe_experts 8 model.moe_ffn_hidden_size=32 model.moe_router_topk=2 \
                       --moe_flex_dispatcher_backend None";

/// Losses of every step, as the steps file of rank 0's directory has them.
fn losses(dir: &Path, line: &str) -> Vec<f64> {
    let output = run(dir, &format!("{line} -o rows.csv"));
    assert_eq!(output.status.code(), Some(0), "{line}\n{}", text(&output.stderr));
    let steps = records(&fs::read(dir.join("rows.steps.csv")).unwrap());
    (0..steps.len() - 1).map(|i| cell(&steps, i, "loss").parse().unwrap()).collect()
}

fn one(line: &str) -> Vec<f64> {
    losses(tempdir().unwrap().path(), &format!("{line} {MODEL} -ng 1 -tp 1 -ep 1 -gb 4"))
}

/// Relative differences of `line`'s losses to `one`'s; the row says `comm` and the groups that are real.
fn differences(line: &str, ranks: usize, one: &[f64], groups: &str) -> Vec<f64> {
    let dir = tempdir().unwrap();
    let own = losses(dir.path(), &format!("{line} {MODEL} -ng {ranks} -gb 4 --nproc_per_node {ranks}"));
    let rows = records(&fs::read(dir.path().join("rows.csv")).unwrap());
    assert_eq!(cell(&rows, 0, "status"), "ok");
    assert_eq!((cell(&rows, 0, "comm"), cell(&rows, 0, "world_size")), ("tcp".into(), ranks.to_string()));
    assert_eq!(cell(&rows, 0, "real_groups"), groups);
    let time = |name: &str| cell(&rows, 0, name).parse::<f64>().unwrap();
    assert!(time("rank_step_time_ms_min") <= time("rank_step_time_ms_max") && time("rank_skew_ms") >= 0.0);
    for rank in 0..ranks {
        let steps = records(&fs::read(dir.path().join(format!("rows.rank{rank}.steps.csv"))).unwrap());
        assert_eq!(steps.len(), own.len() + 1, "every step of rank {rank}");
        assert!(
            (0..own.len()).all(|i| cell(&steps, i, "loss").parse::<f64>().unwrap() == own[i]),
            "rank {rank}"
        );
    }
    assert_eq!(own.len(), one.len());
    own.iter().zip(one).map(|(a, b)| ((a - b) / b).abs()).collect()
}

/// Data-parallel ranks: the first loss to the bit, later ones after gradients that were rounded before they were summed.
/// Tensor ranks sum partial products that are rounded to bf16: unit round-off 2^-9, of logits far smaller than the loss.
#[test]
fn losses_of_several_processes_are_those_of_one() {
    let dense = one(DENSE);
    let dp = differences(&format!("{DENSE} -tp 1"), 2, &dense, "dp");
    assert!(dp[0] < 1e-6 && dp.iter().all(|d| *d < 1e-5), "dp 2: {dp:?}");
    let tp = differences(&format!("{DENSE} -tp 2"), 2, &dense, "tp");
    assert!(tp.iter().all(|d| *d < 1e-3), "tp 2: {tp:?}");
    let experts = one(EXPERTS);
    let ep = differences(&format!("{EXPERTS} -tp 1 -ep 2"), 2, &experts, "ep+dp");
    assert!(ep[0] < 1e-6 && ep.iter().all(|d| *d < 1e-5), "ep 2: {ep:?}");
    let both = differences(&format!("{EXPERTS} -tp 2 -ep 2 -et 1"), 4, &experts, "tp+ep+dp+edp");
    assert!(both.iter().all(|d| *d < 1e-3), "tp 2 x ep 2: {both:?}");
}

/// Graphs and connections are taken down within the time that a job's scheduler waits.
#[test]
fn the_processes_end_within_10_s_of_the_last_row() {
    const MOST: Duration = Duration::from_secs(10);
    let dir = tempdir().unwrap();
    let line = format!("{DENSE} -tp 1 {MODEL} -ng 2 -gb 4 --nproc_per_node 2 -o rows.csv");
    let mut child = command(dir.path(), &line).stderr(Stdio::piped()).spawn().unwrap();
    // One arm, `--cuda_graph_impl none`: a line of columns and a row.
    let whole =
        |path: &Path| fs::read(path).is_ok_and(|bytes| bytes.ends_with(b"\n") && records(&bytes).len() == 2);
    let begun = Instant::now();
    while !whole(&dir.path().join("rows.csv")) {
        assert!(begun.elapsed() < Duration::from_secs(120), "no rows");
        std::thread::sleep(Duration::from_millis(5));
    }
    let last_row = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if last_row.elapsed() > MOST => {
                let _ = child.kill();
                panic!("still there {MOST:?} after the last row");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(status.code(), Some(0));
}

/// One rank as torchrun would start it.
fn rank(dir: &Path, rank: usize, size: usize, port: u16, line: &str) -> Child {
    command(dir, line)
        .envs([
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
        ])
        .envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A port that nobody has just now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn said(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn a_killed_rank_ends_all_and_leaves_whole_files() {
    let (dir, port) = (tempdir().unwrap(), free_port());
    let line = format!("{DENSE} {MODEL} -ng 2 -tp 2 -gb 4 -ms 100000 -o rows.csv");
    let zero = rank(dir.path(), 0, 2, port, &line);
    let mut one = rank(dir.path(), 1, 2, port, &line);
    let begun = Instant::now();
    let steps = dir.path().join("rows.rank1.steps.csv");
    while fs::metadata(&steps).map_or(0, |m| m.len()) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no steps");
        std::thread::sleep(Duration::from_millis(20));
    }
    one.kill().unwrap();
    let killed = Instant::now();
    let output = zero.wait_with_output().unwrap();
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    one.wait().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("rank 1: its process ended without a word"), "{}", said(&output));
    let rows = records(&fs::read(dir.path().join("rows.csv")).unwrap());
    assert_eq!((rows.len(), cell(&rows, 0, "status")), (2, "failed".into()));
    assert!(cell(&rows, 0, "status_reason").contains("rank 1"));
    records(&fs::read(steps).unwrap());
}

#[test]
fn a_rank_that_fails_tells_its_own_reason_first() {
    let dir = tempdir().unwrap();
    let line = format!(
        "{DENSE} {MODEL} -ng 2 -tp 2 -gb 4 --nproc_per_node 2 -o rows.csv --inject equality:driver_error"
    );
    let output = command(dir.path(), &line).env("MBPERF_INJECT_RANK", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let told: Vec<String> = said(&output).lines().map(str::to_owned).collect();
    let of_rank_1 = |l: &String| l.starts_with("mbperf: rank 1: ") && l.contains("an injected call");
    assert!(told.len() == 1 && of_rank_1(&told[0]), "{told:?}");
    let rows = records(&fs::read(dir.path().join("rows.csv")).unwrap());
    assert!(cell(&rows, 0, "status_reason").contains("rank 1: an injected call"), "{told:?}");
}

/// Of several ranks the first that fails is told, once, and nobody waits for those it leaves in their collectives.
#[test]
fn failures_of_rank_0_and_hangs_are_told_once() {
    let dir = tempdir().unwrap();
    for (rank, inject) in [
        ("0", "steady:driver_error"),
        ("1", "steady:driver_error"),
        ("0", "steady:hang"),
        ("1", "steady:hang"),
    ] {
        let line = format!(
            "{DENSE} {MODEL} -ng 2 -tp 2 -gb 4 --nproc_per_node 2 -o rows.csv --inject {inject} --watchdog 2"
        );
        let begun = Instant::now();
        let output = command(dir.path(), &line).env("MBPERF_INJECT_RANK", rank).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{inject}: {}", said(&output));
        let told = said(&output);
        assert_eq!(told.lines().count(), 1, "rank {rank}, {inject}: {told}");
        let part =
            if inject.ends_with("hang") { "phase steady did not come back" } else { "an injected call" };
        assert!(told.contains(part), "rank {rank}, {inject}: {told}");
        // The watchdogs' 2 s and 5 s, and room for a slow machine; a rank that is waited for in vain takes 8 s and more.
        assert!(begun.elapsed() < Duration::from_secs(15), "rank {rank}, {inject}: {:?}", begun.elapsed());
    }
}

/// Whether a process computes or could go on.
#[cfg(target_os = "linux")]
fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

#[cfg(target_os = "linux")]
fn send(signal: &str, pid: u32) {
    assert!(std::process::Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// Starts two ranks, waits for steps, does `before` to rank 1, and signals rank 0 alone; gives the exit code, what was
/// said and how long the end took. Rank 1 is gone.
#[cfg(target_os = "linux")]
fn interrupted(dir: &Path, signal: &str, before: impl Fn(u32)) -> (Option<i32>, String, Duration) {
    // One block would be thousands of steps.
    let line = format!("{DENSE} {MODEL} -ng 2 -tp 2 -gb 4 -ms 100000 --nproc_per_node 2 -o rows.csv");
    let child = command(dir, &line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    let steps = dir.join("rows.rank1.steps.csv");
    while fs::metadata(&steps).map_or(0, |m| m.len()) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no steps");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = child.id();
    let of_child = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let one: u32 = of_child.trim().parse().unwrap();
    // Past the equality check's single steps.
    std::thread::sleep(Duration::from_secs(2));
    before(one);
    send(signal, pid);
    let sent = Instant::now();
    let output = child.wait_with_output().unwrap();
    let took = sent.elapsed();
    // A signal of the kernel's may still be on its way.
    while alive(one) && sent.elapsed() < took + Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!alive(one), "rank 1 was left behind");
    (output.status.code(), said(&output), took)
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_ends_all_ranks_within_a_step() {
    for signal in ["-INT", "-TERM"] {
        let dir = tempdir().unwrap();
        let (code, told, took) = interrupted(dir.path(), signal, |_| {});
        assert_eq!(code, Some(130), "{told}");
        assert!(took < Duration::from_secs(3) && !told.contains("did not come back"), "{took:?}: {told}");
        assert!(!told.contains("rank 1"), "{told}");
        for name in ["rows.steps.csv", "rows.rank0.steps.csv", "rows.rank1.steps.csv"] {
            assert!(records(&fs::read(dir.path().join(name)).unwrap()).len() > 1, "{name}");
        }
        assert!(!dir.path().join("rows.csv").exists(), "a file without rows");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_stopped_rank_is_not_left_behind() {
    let dir = tempdir().unwrap();
    let (code, told, took) = interrupted(dir.path(), "-TERM", |one| send("-STOP", one));
    assert_eq!(code, Some(130), "{told}");
    assert!(took < Duration::from_secs(8), "{took:?}: {told}");
}

/// Ranks of a launcher that signals all, while one is still missing.
#[test]
fn a_signal_ends_ranks_that_wait_for_others() {
    let (dir, port) = (tempdir().unwrap(), free_port());
    let line = format!("{DENSE} {MODEL} -ng 4 -tp 2 -gb 4 -o rows.csv");
    for own in [0, 2] {
        let mut child = rank(dir.path(), own, 4, port, &line);
        // Until it waits: a release build takes a tenth of that.
        std::thread::sleep(Duration::from_secs(3));
        let sent = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        assert!(sent.unwrap().success());
        let begun = Instant::now();
        assert_eq!(child.wait().unwrap().code(), Some(130), "rank {own}");
        assert!(begun.elapsed() < Duration::from_secs(3), "rank {own}: {:?}", begun.elapsed());
    }
}

#[test]
fn numbers_of_processes_and_times_have_their_ranges() {
    let dir = tempdir().unwrap();
    let line = "-m llama -mr llama3_8b -g h100 --device cpu --dryrun";
    let refused = |options: &str, env: &[(&str, &str)], parts: &[&str]| {
        let begun = Instant::now();
        let output =
            command(dir.path(), &format!("{line} {options}")).envs(env.iter().copied()).output().unwrap();
        let told = said(&output);
        assert_eq!(output.status.code(), Some(2), "{options} {env:?}: {told}");
        assert!(parts.iter().all(|p| told.contains(p)), "{options} {env:?}: {told}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{options} {env:?}: {:?}", begun.elapsed());
    };
    for n in ["4294967295", "100000000", "129", "0", "-1"] {
        refused(&format!("--nproc_per_node {n}"), &[], &["--nproc_per_node", n, "1..=128"]);
    }
    refused(
        "-ng 8",
        &[("RANK", "0"), ("WORLD_SIZE", "1048576"), ("MASTER_ADDR", "127.0.0.1")],
        &["1048576 processes", "-ng"],
    );
    refused("", &[("RANK", "1")], &["WORLD_SIZE is not set"]);
    for (option, value) in [
        ("--rendezvous_timeout", "0"),
        ("--rendezvous_timeout", "-1"),
        ("--rendezvous_timeout", "1e19"),
        ("--distributed_timeout_minutes", "0"),
        ("--distributed_timeout_minutes", "-1"),
        ("--distributed_timeout_minutes", "9223372036854775807"),
    ] {
        for processes in ["", "-ng 2 --nproc_per_node 2"] {
            refused(&format!("{option} {value} {processes}"), &[], &[option, "a year"]);
        }
    }
}

#[test]
fn a_missing_rank_is_named() {
    let (dir, port) = (tempdir().unwrap(), free_port());
    let line = format!("{DENSE} {MODEL} -ng 4 -tp 2 -gb 4 --rendezvous_timeout 0.5 -o rows.csv");
    let two = rank(dir.path(), 2, 4, port, &line);
    let output = rank(dir.path(), 0, 4, port, &line).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let wanted = format!("ranks 1 and 3 of 4 did not come to 127.0.0.1:{port} within 0.5 s");
    assert!(said(&output).contains(&wanted), "{}", said(&output));
    let other = two.wait_with_output().unwrap();
    assert_eq!(other.status.code(), Some(1));
    assert!(said(&other).contains("rank 2: rank 0 did not answer"), "{}", said(&other));
    let rows = records(&fs::read(dir.path().join("rows.csv")).unwrap());
    assert!(cell(&rows, 0, "status_reason").contains("ranks 1 and 3 of 4"));
}

#[test]
fn what_processes_cannot_run_is_refused_by_name() {
    let dir = tempdir().unwrap();
    for (line, part) in [
        ("-m llama -mr llama3_8b -g h100 -ng 4 -cp 2 -tp 1", "context parallelism"),
        ("-m llama -mr llama3_8b -g h100 -ng 4 -pp 2 -cp 1", "pipeline stages"),
        ("-m llama -mr llama3_8b -g h100 -ng 3 -cp 1 -tp 1 -gb 3 -mb 1", "multiple of 2"),
        (
            "-m deepseek -mr deepseek_v3 -g h100 -ng 2 -tp 2 -pp 1 -vp None -ep 1 --num_layers 4 --run_dtype bf16",
            "multi-token prediction over tensor ranks",
        ),
        ("-m llama -mr llama3_8b -g h100 --sweep", "--sweep is not built"),
    ] {
        let output = run(dir.path(), &format!("{line} --device cpu --nproc_per_node 2"));
        assert_eq!(output.status.code(), Some(2), "{line}: {}", said(&output));
        assert!(said(&output).contains(part), "{line}: {}", said(&output));
    }
}
