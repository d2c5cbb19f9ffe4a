//! `mbperf compare` through the binary: what CI sees, exit codes included.
//!
//! Over 500 lines: one test a row of what a comparison must refuse, report or fail, over one table of results.

use crate::common::results::Results;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What a comparison came to.
struct Seen {
    code: i32,
    stdout: String,
    stderr: String,
    json: Value,
}

fn binary() -> assert_cmd::Command {
    assert_cmd::Command::cargo_bin("mbperf").unwrap()
}

fn files(base: &[PathBuf], new: &[PathBuf], options: &[&str]) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json");
    let mut command = binary();
    command.arg("compare").args(base).arg("--new").args(new).args(options).arg("--json").arg(&json);
    let output = command.output().unwrap();
    let report = std::fs::read_to_string(&json).unwrap_or_else(|_| "null".into());
    let seen = Seen {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        json: serde_json::from_str(&report).unwrap(),
    };
    // The report is written before the exit, whatever the verdict, and agrees with it.
    if ![1, 2].contains(&seen.code) {
        assert_eq!(seen.json["exit_code"], seen.code, "{}{}", seen.stdout, seen.stderr);
        assert!(!seen.stdout.is_empty());
    }
    assert!(!seen.stderr.contains("panicked"), "{}", seen.stderr);
    seen
}

fn compare(base: &Results, new: &Results, options: &[&str]) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let base = base.save(folder.path(), "base.csv");
    let new = new.save(folder.path(), "new.csv");
    files(&[base], &[new], options)
}

fn code(base: &Results, new: &Results, options: &[&str]) -> i32 {
    compare(base, new, options).code
}

#[test]
fn b26_equal_runs_pass_and_only_sure_and_large_changes_fail() {
    let base = Results::three("base", 1.0, 1.0);
    assert_eq!(code(&base, &Results::three("new", 1.0, 1.0), &[]), 0);
    // 2 % is surely there, and below the threshold.
    let small = compare(&base, &Results::three("new", 1.0, 0.98), &[]);
    assert_eq!((small.code, &small.json["rows"][0]["verdict"]), (0, &Value::from("within_threshold")));
    assert_eq!(code(&base, &Results::three("new", 1.0, 0.9), &[]), 10);
    // Noise that holds both no change and the threshold is called neither.
    let noisy = |name: &str, r: f64| {
        let wobble = [0.9, 1.0, 1.1].iter().enumerate();
        wobble.fold(Results::default(), |f, (i, w)| f.run(&format!("{name}{i}"), 100.0, 1.25 * r * w, 0.003))
    };
    let undecided = compare(&noisy("b", 1.0), &noisy("n", 0.97), &[]);
    assert_eq!((undecided.code, &undecided.json["verdict"]), (11, &Value::from("undecided")));
    assert!(undecided.stderr.contains("UNDECIDED"));
    assert_eq!(code(&noisy("b", 1.0), &noisy("n", 0.97), &["--undecided", "pass"]), 0);
    // Gains are told and pass.
    let gain = compare(&base, &Results::three("new", 1.0, 1.2), &[]);
    assert_eq!((gain.code, &gain.json["rows"][0]["verdict"]), (0, &Value::from("improvement")));
    assert!(gain.stdout.contains("improvement"));
}

#[test]
fn b26_one_run_a_side_says_so_and_still_finds_twenty_percent() {
    let base = Results::one();
    let run = |ratio: f64| Results::default().run("new-1", 100.0, 1.25 * ratio, 0.003);
    for (ratio, expected) in [(1.0, 0), (1.0 / 1.2, 10), (1.2, 0)] {
        let seen = compare(&base, &run(ratio), &[]);
        assert_eq!(seen.code, expected, "{ratio}: {}", seen.stdout);
        assert!(seen.stdout.contains("one run a side") && seen.stdout.contains("+-3.0 %"), "{}", seen.stdout);
        assert!(seen.stdout.contains("no change between -10.4 and +11.6 % is called"), "{}", seen.stdout);
    }
    // Without intervals of their own (under eight pairs) runs cannot pass, and 20 % is still called.
    let bare = |r: Results| r.with("speedup_ci95_low", "").with("speedup_ci95_high", "");
    assert_eq!(code(&bare(base.clone()), &bare(run(1.0)), &[]), 11);
    assert_eq!(code(&bare(base), &bare(run(1.0 / 1.2)), &[]), 10);
}

#[test]
fn b27_unlike_machines_builds_and_workloads_are_refused_by_field() {
    let base = Results::three("base", 1.0, 1.0);
    for (field, value) in [
        ("gpu_name", "NVIDIA H100 NVL"),
        ("gpu_name", "NVIDIA H200 MIG 1g.18gb"),
        ("gpu_memory_mib", "98304"),
        ("driver_version", "575.10"),
        ("cuda_version", "12.9"),
        ("power_limit_w", "500"),
        ("sm_clock_mhz_median", "1200"),
        ("schema_version", "2"),
        ("device", "cpu"),
        ("seed", "7"),
        ("te_rng_tracker", "false"),
        ("approximations", "x"),
        ("comm", "nccl"),
        ("tokens_dropped", "17"),
    ] {
        let new = Results::three("new", 1.0, 1.0).with(field, value);
        let refused = compare(&base, &new, &[]);
        assert_eq!(refused.code, 12, "{field}");
        assert_eq!(refused.json["unlike"][0]["field"], field);
        assert!(refused.stdout.contains(field) && refused.stdout.contains(value), "{}", refused.stdout);
        assert_eq!(refused.json["rows"][0]["verdict"], "cannot_compare");
        assert!(refused.json["rows"][0]["change"].is_null());
        // More runs make it no surer.
        assert_eq!(
            code(&base, &new.clone().and(Results::three("more", 1.0, 1.0).with(field, value)), &[]),
            12
        );
        // Allowed, it is compared, and the report says what was allowed.
        let allowed = compare(&base, &new, &["--allow-unlike", field]);
        assert_eq!(allowed.code, 0, "{field}: {}", allowed.stdout);
        assert_eq!(allowed.json["unlike_allowed"][0]["field"], field);
        assert_eq!(allowed.json["options"]["allow_unlike"][0], field);
        assert!(allowed.stdout.contains("allowed by --allow-unlike"));
    }
    // Clocks that move a little by themselves are alike.
    assert_eq!(code(&base, &Results::three("new", 1.0, 1.0).with("sm_clock_mhz_median", "1935"), &[]), 0);
    // A side that is unlike in itself is refused too.
    let mixed = base.clone().and(Results::three("other", 1.0, 1.0).with("driver_version", "575.10"));
    assert_eq!(code(&mixed, &base, &[]), 12);
}

#[test]
fn b27_settings_of_the_workload_are_told_by_name() {
    let base = Results::three("base", 1.0, 1.0);
    for (field, value) in
        [("seq_length", "8192"), ("num_layers", "4"), ("tp", "2"), ("cuda_graph_scope", "attn")]
    {
        let refused = compare(&base, &Results::three("new", 1.0, 1.0).with(field, value), &[]);
        assert_eq!(refused.code, 12, "{field}");
        assert!(refused.stdout.contains(&format!("differs in {field}")), "{}", refused.stdout);
        assert_eq!(
            code(&base, &Results::three("new", 1.0, 1.0).with(field, value), &["--allow-unlike", field]),
            0
        );
    }
    let sized = Results::three("new", 1.0, 1.0)
        .with("command", "mbperf -m llama -mr llama3_8b -g h100 --hidden_size 64");
    let refused = compare(&base, &sized, &[]);
    assert_eq!(refused.code, 12);
    assert!(refused.stdout.contains("--hidden_size=64"), "{}", refused.stdout);
    assert_eq!(code(&base, &sized, &["--allow-unlike", "workload"]), 0);
    let elsewhere =
        Results::three("new", 1.0, 1.0).with("command", "mbperf -m llama -mr llama3_8b -g h100 -o b.csv");
    assert_eq!(code(&base, &elsewhere, &[]), 0);
    // What no column tells.
    for line in [
        "--spin_percent 2",
        "--attention_backend own",
        "--attention_deterministic false",
        "--no_samplers",
        "--dump folder",
    ] {
        let command = format!("mbperf -m llama -mr llama3_8b -g h100 {line}");
        let new = Results::three("new", 1.0, 1.0).with("command", &command);
        let refused = compare(&base, &new, &[]);
        assert_eq!(refused.code, 12, "{line}");
        let option = line.split(' ').next().unwrap();
        assert!(refused.stdout.contains("differs in workload") && refused.stdout.contains(option), "{line}");
        assert_eq!(code(&base, &new, &["--allow-unlike", "workload"]), 0, "{line}");
        assert_eq!(code(&new, &new, &[]), 0, "{line}");
    }
    for (field, value) in [("overlap_wgrad", "true"), ("microbatches_extrapolated", "16")] {
        let new = Results::three("new", 1.0, 1.0).with(field, value);
        let refused = compare(&base, &new, &[]);
        assert_eq!(refused.code, 12, "{field}");
        assert!(refused.stdout.contains(field), "{}", refused.stdout);
        assert_eq!(code(&base, &new, &["--allow-unlike", field]), 0, "{field}");
    }
    // Another order of scope names is the same scope.
    assert_eq!(code(&base, &Results::three("new", 1.0, 1.0).with("cuda_graph_scope", "mlp+attn"), &[]), 0);
}

/// What a row must tell, and does not, is unlike: on one side and on both.
#[test]
fn what_is_not_told_is_unlike() {
    let base = || Results::three("base", 1.0, 1.0);
    let new = || Results::three("new", 1.0, 1.0);
    for (field, column) in [
        ("gpu_name", "gpu_name"),
        ("gpu_memory_mib", "gpu_memory_mib"),
        ("driver_version", "driver_version"),
        ("cuda_version", "cuda_version"),
        ("sm_clock_mhz_median", "sm_clock_mhz_median"),
        ("power_limit_w", "power_limit_w"),
        ("device", "device"),
        ("comm", "comm"),
        ("seed", "seed"),
        ("te_rng_tracker", "te_rng_tracker"),
        ("overlap_wgrad", "overlap_wgrad"),
        ("seq_length", "seq_length"),
        ("workload", "command"),
    ] {
        for (said, of) in [
            ("(absent)", (|r: Results, c: &str| r.without(c)) as fn(Results, &str) -> Results),
            ("(empty)", |r, c| r.with(c, "")),
        ] {
            for (b, n, sides) in [
                (base(), of(new(), column), &["new"][..]),
                (of(base(), column), new(), &["base"]),
                (of(base(), column), of(new(), column), &["base", "new"]),
            ] {
                let seen = compare(&b, &n, &[]);
                assert_eq!(seen.code, 12, "{field} {said} {sides:?}: {}", seen.stdout);
                let listed = seen.json["unlike"].as_array().unwrap();
                let unlike = listed.iter().find(|u| u["field"] == field);
                let unlike = unlike.unwrap_or_else(|| panic!("{field} {said}: {listed:?}"));
                for side in ["base", "new"] {
                    assert_eq!(unlike[side] == said, sides.contains(&side), "{field} {said}: {unlike}");
                }
                let allowed = compare(&b, &n, &["--allow-unlike", field]);
                // Whether a row is of a GPU is told by its device.
                assert_eq!(allowed.code, 0, "{field} {said} {sides:?}: {}", allowed.stdout);
                let recorded = allowed.json["unlike_allowed"].as_array().unwrap();
                assert!(recorded.iter().any(|u| u["field"] == field), "{field} {said}: {recorded:?}");
            }
        }
    }
    // Some rows of a side.
    assert_eq!(code(&base(), &new().with_row(2, "gpu_name", ""), &[]), 12);
    // The harness's own lines, and those of a later mbperf.
    for command in ["python run_script.py", "mbperf --from_the_future", "mbperf rules", "mbperf 'open"] {
        for (b, n) in [
            (base(), new().with("command", command)),
            (base().with("command", command), new().with("command", command)),
        ] {
            let seen = compare(&b, &n, &[]);
            assert_eq!(seen.code, 12, "{command}");
            assert_eq!(seen.json["unlike"][0]["field"], "workload", "{command}: {}", seen.stdout);
            assert!(seen.stdout.contains(&format!("cannot read: {command}")), "{}", seen.stdout);
            assert_eq!(code(&b, &n, &["--allow-unlike", "workload"]), 0, "{command}");
        }
    }
}

/// A CPU has no GPU's name, driver or clock, a dense model no routing: nothing is missing there.
#[test]
fn what_a_row_cannot_have_is_not_missed() {
    const OF_A_GPU: [&str; 6] = [
        "gpu_name",
        "gpu_memory_mib",
        "driver_version",
        "cuda_version",
        "sm_clock_mhz_median",
        "power_limit_w",
    ];
    let cpu = |name| {
        let results = Results::three(name, 1.0, 1.0).with("device", "cpu");
        OF_A_GPU.iter().fold(results, |r, column| r.with(column, ""))
    };
    let gate = ["--gate", "time"];
    assert_eq!(code(&cpu("a"), &cpu("b"), &gate), 0);
    let bare = |name| OF_A_GPU.iter().fold(cpu(name), |r, column| r.without(column));
    assert_eq!(code(&bare("a"), &cpu("b"), &gate), 0);
    for column in OF_A_GPU {
        // Found on one side it is a difference all the same.
        let seen = compare(&cpu("a"), &cpu("b").with(column, "7"), &gate);
        assert_eq!((seen.code, &seen.json["unlike"][0]["field"]), (12, &Value::from(column)));
    }
    let seen = compare(&cpu("a"), &Results::three("b", 1.0, 1.0), &gate);
    assert_eq!((seen.code, &seen.json["unlike"][0]["field"]), (12, &Value::from("device")));
    // Experts.
    let of = |name, routing: &str, routed: &str| {
        Results::three(name, 1.0, 1.0)
            .with("moe_routing", routing)
            .with("tokens_routed", routed)
            .with("tokens_padded", "0")
            .with("tokens_dropped", "0")
    };
    assert_eq!(code(&of("a", "router", "64"), &of("b", "router", "64"), &[]), 0);
    for other in [of("b", "router", "65"), of("b", "router", ""), of("b", "balanced", "64")] {
        assert_eq!(code(&of("a", "router", "64"), &other, &[]), 12);
    }
    let untold = of("a", "router", "");
    let seen = compare(&untold, &untold, &[]);
    assert_eq!((seen.code, &seen.json["unlike"][0]["field"]), (12, &Value::from("tokens_routed")));
    let dense = |name| ["tokens_routed", "tokens_padded"].iter().fold(of(name, "", ""), |r, c| r.without(c));
    assert_eq!(code(&dense("a"), &dense("b"), &[]), 0);
}

#[test]
fn b28_exit_codes_and_reports_in_every_form() {
    let base = Results::three("base", 1.0, 1.0);
    let slow = Results::three("new", 1.0, 0.8);
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.md");
    let seen = compare(&base, &slow, &["--markdown", page.to_str().unwrap()]);
    assert_eq!(seen.code, 10);
    assert!(seen.stderr.contains("REGRESSION"), "{}", seen.stderr);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("| configuration |") && page.contains("REGRESSION"), "{page}");
    let json: Value = serde_json::from_str(&compare(&base, &slow, &["--format", "json"]).stdout).unwrap();
    assert_eq!((json["verdict"].as_str(), json["exit_code"].as_u64()), (Some("regression"), Some(10)));
    let row = &json["rows"][0];
    assert_eq!(row["configuration"]["model_recipe"], "llama3_8b");
    assert!((row["change"].as_f64().unwrap() + 0.2).abs() < 1e-9);
    assert!(row["change_ci99_high"].as_f64().unwrap() < -0.15);
    // Nothing has no sign, neither in print nor in JSON.
    let same = compare(&base, &base, &["--gate", "both"]);
    assert!(same.stdout.contains("0.0 % [") && !same.stdout.contains("-0.0 %"), "{}", same.stdout);
    let signs = same.json["rows"].as_array().unwrap().iter().map(|r| r["change"].as_f64().unwrap());
    assert!(signs.clone().all(|x| x == 0.0 && x.is_sign_positive()), "{:?}", signs.collect::<Vec<_>>());
    assert!(compare(&base, &slow, &["--format", "markdown"]).stdout.starts_with("### mbperf compare"));
    // A report that cannot be written is no pass.
    assert_eq!(code(&base, &base.clone(), &["--markdown", "/dev/full"]), 1);
}

#[test]
fn b28_wrong_use_is_exit_2() {
    let base = Results::one();
    for options in [
        &["--gate", "speed"][..],
        &["--timing_threshold", "5"],
        &["--timing_threshold", "0"],
        &["--timing_threshold", "-0.05"],
        &["--memory_threshold", "nan"],
        &["--allow-unlike", "drivers"],
        &["--undecided", "maybe"],
        &["--no-such-option"],
    ] {
        assert_eq!(code(&base, &base.clone(), options), 2, "{options:?}");
    }
    // A threshold of a gate that is off: what it was meant to hold would pass.
    for (options, say) in [
        (&["--memory_threshold", "0.1"][..], "Give --gate ratio,memory, or leave --memory_threshold out"),
        (&["--gate", "time", "--ratio_threshold", "0.1"], "Give --gate time,ratio"),
        (&["--gate", "memory", "--timing_threshold", "0.1"], "Give --gate memory,time"),
        (
            &["--timing_threshold", "0.1", "--ratio_threshold", "0.1"],
            "does not gate time, and --ratio_threshold is given for the ratio. Give --gate ratio,time",
        ),
    ] {
        let seen = compare(&base, &base.clone(), options);
        assert_eq!(seen.code, 2, "{options:?}");
        assert!(seen.stderr.contains("would be held against nothing"), "{}", seen.stderr);
        assert!(seen.stderr.contains(say), "{options:?}: {}", seen.stderr);
    }
    for options in [
        &["--timing_threshold", "0.1"][..],
        &["--ratio_threshold", "0.1"],
        &["--gate", "both", "--timing_threshold", "0.1", "--ratio_threshold", "0.2"],
        &["--gate", "memory,time", "--memory_threshold", "0.1", "--timing_threshold", "0.1"],
    ] {
        assert_eq!(code(&base, &base.clone(), options), 0, "{options:?}");
    }
    for line in [&["compare"][..], &["compare", "a.csv"], &["compare", "--new", "b.csv"]] {
        assert_eq!(binary().args(line).output().unwrap().status.code(), Some(2), "{line:?}");
    }
    let seen = compare(&base, &base.clone(), &["--allow-unlike", "driver_versio"]);
    assert!(seen.stderr.contains("Did you mean `driver_version`"), "{}", seen.stderr);
}

#[test]
fn b29_rows_pair_by_key_and_missing_ones_fail_by_name() {
    let second = |name: &str, ratio: f64| Results::three(name, 1.0, ratio).with("cuda_graph_scope", "attn");
    let base = Results::three("base", 1.0, 1.0).and(second("base-attn", 1.1));
    // The other order of rows.
    let turned = second("new-attn", 1.1).and(Results::three("new", 1.0, 1.0));
    assert_eq!(code(&base, &turned, &[]), 0);
    for (base, new, side) in [(&base, &second("n", 1.1), "new"), (&second("n", 1.1), &base, "base")] {
        let lacking = compare(base, new, &[]);
        assert_eq!(lacking.code, 12);
        assert_eq!(lacking.json["missing"][0]["side"], side);
        assert!(lacking.stdout.contains("attn+mlp"), "{}", lacking.stdout);
        assert_eq!(code(base, new, &["--allow-missing"]), 0);
    }
    // Nothing matched is an error whatever is allowed.
    let other = Results::three("x", 1.0, 1.0).with("model_recipe", "qwen3_30b_a3b");
    assert_eq!(code(&base, &other, &["--allow-missing"]), 12);
    // A missing or misnamed baseline is named.
    let folder = tempfile::tempdir().unwrap();
    let new = base.save(folder.path(), "new.csv");
    let seen = files(&[folder.path().join("bas.csv")], &[new], &[]);
    assert_eq!(seen.code, 12);
    assert!(seen.stdout.contains("bas.csv cannot be read"), "{}", seen.stdout);
}

/// A run that left no figures.
fn failed(name: &str) -> Results {
    let rows = Results::default().run(name, 100.0, 1.25, 0.003).with("status", "failed");
    let empty = ["speedup", "step_time_ms_median"].iter().fold(rows, |r, c| r.with(c, ""));
    empty.with("status_reason", "out of memory")
}

#[test]
fn b29_a_run_that_failed_is_a_missing_row() {
    let base = Results::three("base", 1.0, 1.0);
    let seen = compare(&base, &failed("new"), &[]);
    assert_eq!(seen.code, 12);
    assert!(seen.stdout.contains("out of memory"), "{}", seen.stdout);
    // Not excused: the row is there and broke.
    let other = |name| Results::three(name, 1.0, 1.0).with("tp", "2");
    assert_eq!(code(&base.clone().and(other("a")), &failed("new").and(other("b")), &["--allow-missing"]), 12);
    // Broken before as well, or repaired: --allow-missing goes on with the rest.
    assert_eq!(code(&failed("x").and(other("a")), &failed("new").and(other("b")), &["--allow-missing"]), 0);
    assert_eq!(code(&failed("x").and(other("a")), &base.clone().and(other("b")), &["--allow-missing"]), 0);
    assert_eq!(code(&failed("x").and(other("a")), &base.and(other("b")), &[]), 12);
}

#[test]
fn a_run_that_fails_beside_good_ones_is_no_pass() {
    let base = Results::three("base", 1.0, 1.0);
    let new = Results::three("new", 1.0, 1.0).and(failed("new-3"));
    let seen = compare(&base, &new, &["--allow-missing"]);
    assert_eq!(seen.code, 12, "{}", seen.stdout);
    assert!(seen.stdout.contains("1 of 4 runs failed, none in base: out of memory"), "{}", seen.stdout);
    // It failed before as well: the others are compared.
    assert_eq!(code(&base.clone().and(failed("base-3")), &new, &[]), 0);
    // What was not run is no failure.
    let resumed = Results::three("new", 1.0, 1.0).and(failed("new-3").with("status", "skipped"));
    assert_eq!(code(&base, &resumed, &[]), 0);
}

#[test]
fn arms_that_differ_in_any_run_are_no_pass() {
    let base = Results::three("base", 1.0, 1.0);
    let unequal = Results::default()
        .run("odd", 100.0, 1.25, 0.003)
        .with("status", "failed")
        .with("digest_match", "false");
    for (base, new) in [(&base, &base.clone().and(unequal.clone())), (&base.clone().and(unequal), &base)] {
        let seen = compare(base, new, &["--allow-missing"]);
        assert_eq!(seen.code, 12, "{}", seen.stdout);
        assert!(seen.stdout.contains("the arms did not do the same work"), "{}", seen.stdout);
    }
}

#[test]
fn a_ratio_rests_on_both_arms() {
    let base = Results::three("base", 1.0, 1.0);
    // Rows alternate: eager, graph.
    let seen = compare(&base, &Results::three("new", 1.0, 1.0).with_row(2, "steady_reached", "false"), &[]);
    assert_eq!(seen.code, 11, "{}", seen.stdout);
    assert!(seen.stdout.contains("not reached by the eager arm"), "{}", seen.stdout);
    let new = Results::three("new", 1.0, 1.0);
    assert_eq!(code(&base, &new.clone().with_row(2, "steady_reached", ""), &[]), 12);
    let seen = compare(&base, &new.with_row(2, "speedup", "0.5"), &[]);
    assert_eq!(seen.code, 12, "{}", seen.stdout);
    assert!(seen.stdout.contains("the arms of one run have one"), "{}", seen.stdout);
}

#[test]
fn half_a_run_is_a_missing_row() {
    let base = Results::three("base", 1.0, 1.0);
    for arm in 0..2 {
        let mut half = Results::three("new", 1.0, 1.0);
        half.rows.remove(2 + arm);
        for (base, new) in [(&base, &half), (&half, &base)] {
            let seen = compare(base, new, &[]);
            assert_eq!(seen.code, 12, "{}", seen.stdout);
            let part = "1 of its 3 runs have no row of this arm, only of the other (new-1)";
            assert!(seen.stdout.contains(part), "{}", seen.stdout);
            assert_eq!(code(base, new, &["--allow-missing"]), 0);
        }
    }
}

/// Three runs of one arm against itself.
fn against_itself(name: &str, arm: &str) -> Results {
    let mut runs = Results::three(&format!("{name}-{arm}"), 1.0, 0.8).with("arm", arm);
    let side = runs.at("aa");
    runs.rows.iter_mut().enumerate().for_each(|(at, row)| row[side] = ["a", "b"][at % 2].into());
    runs
}

#[test]
fn runs_of_an_arm_against_itself_stand_beside_others_of_the_configuration() {
    let both = |name: &str| against_itself(name, "eager").and(against_itself(name, "graph"));
    let all = |name: &str| Results::three(name, 1.0, 1.0).and(both(name));
    for (base, new, ratios) in [
        (both("base"), both("new"), 2),
        (both("base"), both("base"), 2),
        (all("base"), all("new"), 3),
        (against_itself("base", "graph"), against_itself("new", "graph"), 1),
    ] {
        let seen = compare(&base, &new, &[]);
        assert_eq!(seen.code, 0, "{}", seen.stdout);
        assert_eq!(seen.json["missing"], serde_json::json!([]));
        assert_eq!(seen.json["rows"].as_array().unwrap().len(), ratios);
    }
    // A row of either side tells of its own run alone: the others pass.
    let unsteady = all("new").with_row(6, "steady_reached", "false");
    let seen = compare(&all("base"), &unsteady, &[]);
    let verdicts = seen.json["rows"].as_array().unwrap().iter().filter(|r| r["verdict"] == "undecided");
    assert_eq!((seen.code, verdicts.count()), (11, 1), "{}", seen.stdout);
    let torn = all("new").with_row(6, "speedup", "0.5");
    let seen = compare(&all("base"), &torn, &[]);
    assert_eq!((seen.code, seen.json["reasons"].as_array().unwrap().len()), (12, 1), "{}", seen.stdout);
    assert!(seen.stdout.contains("the arms of one run have one"), "{}", seen.stdout);
}

#[test]
fn half_a_run_of_an_arm_against_itself_is_a_missing_row() {
    let whole = |name: &str| against_itself(name, "eager").and(against_itself(name, "graph"));
    for side in 0..2 {
        // One of three runs, and every run: nothing is there to be told from then.
        let one = |at: &usize| *at != 2 + side;
        let every = |at: &usize| at / 6 == 1 || at % 2 != side;
        for (keep, lacking) in [(&one as &dyn Fn(&usize) -> bool, "1 of its 3"), (&every, "3 of its 3")] {
            let half = |name: &str| {
                let mut half = whole(name);
                let rows = half.rows.iter().enumerate().filter(|(at, _)| keep(at));
                half.rows = rows.map(|(_, row)| row.clone()).collect();
                half
            };
            let part = format!("eager {}: {lacking} runs have no row of this side", ["a", "b"][side]);
            for (base, new) in [(whole("base"), half("new")), (half("base"), half("new"))] {
                let seen = compare(&base, &new, &[]);
                assert_eq!(seen.code, 12, "{}", seen.stdout);
                assert!(seen.stdout.contains(&part), "{part}: {}", seen.stdout);
                assert_eq!(code(&base, &new, &["--allow-missing"]), 0);
            }
        }
    }
}

#[test]
fn recorded_runs_against_themselves_pass() {
    // Both arms of two models, each against itself.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200/aa.csv");
    let seen = files(std::slice::from_ref(&file), std::slice::from_ref(&file), &[]);
    assert_eq!(seen.code, 0, "{}", seen.stdout);
}

#[test]
fn b29_each_gate_has_its_threshold() {
    let base = Results::three("base", 1.0, 1.0);
    // A slow machine moves times and not the ratio.
    let slow_machine = Results::three("new", 1.2, 1.0);
    assert_eq!(code(&base, &slow_machine, &[]), 0);
    assert_eq!(code(&base, &slow_machine, &["--gate", "time"]), 10);
    assert_eq!(code(&base, &slow_machine, &["--gate", "both"]), 10);
    assert_eq!(code(&base, &slow_machine, &["--gate", "time", "--timing_threshold", "0.3"]), 0);
    let lost_ratio = Results::three("new", 1.0, 0.9);
    assert_eq!(code(&base, &lost_ratio, &["--gate", "both", "--timing_threshold", "0.3"]), 0);
    let both = ["--gate", "both", "--timing_threshold", "0.3", "--ratio_threshold", "0.05"];
    assert_eq!(code(&base, &lost_ratio, &both), 10);
    let larger = Results::three("new", 1.0, 1.0).with("peak_memory_mib", "44000");
    assert_eq!(code(&base, &larger, &[]), 0);
    assert_eq!(code(&base, &larger, &["--gate", "memory"]), 10);
    assert_eq!(code(&base, &larger, &["--gate", "ratio,memory"]), 10);
    assert_eq!(code(&base, &larger, &["--gate", "memory", "--memory_threshold", "0.2"]), 0);
    let graphs = Results::three("new", 1.0, 1.0).with("graph_memory_mib", "9000");
    assert_eq!(code(&base, &graphs, &["--gate", "memory"]), 10);
    // Rows without graphs have no ratio: nothing to gate is no pass.
    let eager = |name| {
        let mut results = Results::three(name, 1.0, 1.0).with("cuda_graph_impl", "none");
        let arm = results.at("arm");
        results.rows.retain(|r| r[arm] == "eager");
        results.with("speedup", "")
    };
    assert_eq!(code(&eager("a"), &eager("b"), &[]), 12);
    assert_eq!(code(&eager("a"), &eager("b"), &["--gate", "time"]), 0);
}

#[test]
fn cells_that_are_no_figures_are_named_by_row_and_column() {
    let base = Results::three("base", 1.0, 1.0);
    for (gate, columns) in [
        ("ratio", &["speedup", "speedup_ci95_low", "speedup_ci95_high"][..]),
        ("time", &["step_time_ms_median", "step_time_ms_ci95_low"]),
        ("memory", &["peak_memory_mib"]),
    ] {
        for column in columns {
            for cell in
                ["NaN", "nan", "inf", "-inf", "0", "-1.2", "", "fast", "1,25", " 1.25", "1e999", "0x1"]
            {
                for (b, n) in [
                    (base.clone(), Results::three("new", 1.0, 1.0).with_row(3, column, cell)),
                    (base.clone().with_row(3, column, cell), Results::three("new", 1.0, 1.0)),
                ] {
                    let seen = compare(&b, &n, &["--gate", gate]);
                    assert_eq!(seen.code, 12, "{column} {cell:?}: {}", seen.stdout);
                    let named =
                        seen.stdout.contains("row 4") && seen.stdout.contains(&format!("column {column}"));
                    assert!(named, "{column} {cell:?}: {}", seen.stdout);
                }
            }
        }
    }
    for (gate, column) in
        [("both", "step_time_ms_median"), ("both", "speedup"), ("memory", "peak_memory_mib")]
    {
        let seen = compare(&base, &base.clone().with_row(3, column, "1e300"), &["--gate", gate]);
        assert_eq!(seen.code, 12, "{column}: {}", seen.stdout);
        assert!(
            seen.stdout.contains("row 4") && seen.stdout.contains(&format!("column {column}")),
            "{}",
            seen.stdout
        );
        assert!(!seen.stdout.contains("00000000"), "{}", seen.stdout);
    }
    let outside = Results::three("new", 1.0, 1.0).with_row(1, "speedup", "9");
    assert!(compare(&base, &outside, &[]).stdout.contains("outside its interval"));
}

#[test]
fn what_a_pass_rests_on_is_said_to_be_so() {
    let base = Results::three("base", 1.0, 1.0);
    let new = || Results::three("new", 1.0, 1.0);
    let columns = ["digest_match", "steady_reached"];
    // As spreadsheets and scripts write booleans.
    for column in columns {
        for cell in ["TRUE", "True"] {
            assert_eq!(code(&base, &new().with(column, cell), &[]), 0, "{column} {cell}");
        }
    }
    for cell in ["FALSE", "False", "false"] {
        let seen = compare(&base, &new().with_row(3, "digest_match", cell), &[]);
        assert_eq!(seen.code, 12, "{cell}");
        assert!(seen.stdout.contains("did not do the same work"), "{}", seen.stdout);
        assert_eq!(code(&base, &new().with_row(3, "steady_reached", cell), &[]), 11, "{cell}");
    }
    for column in columns {
        for cell in ["0", "1", "no", "maybe", ""] {
            for gate in ["ratio", "time", "memory"] {
                let seen = compare(&base, &new().with_row(3, column, cell), &["--gate", gate]);
                assert_eq!(seen.code, 12, "{column} {cell:?} {gate}: {}", seen.stdout);
                let named =
                    seen.stdout.contains("row 4") && seen.stdout.contains(&format!("column {column}"));
                assert!(named, "{column} {cell:?}: {}", seen.stdout);
            }
        }
        let seen = compare(&base, &new().without(column), &[]);
        assert_eq!(seen.code, 12, "{column}");
        assert!(
            seen.stdout.contains(&format!("column {column}: the file has no such column")),
            "{}",
            seen.stdout
        );
        assert_eq!(code(&base.clone().without(column), &new(), &[]), 12, "{column}");
    }
    // What mbperf leaves empty itself: under six blocks there is no steady state, of one arm no equality.
    let few = |r: Results| {
        r.with("steady_reached", "").with("step_time_ms_ci95_low", "").with("step_time_ms_ci95_high", "")
    };
    assert_eq!(code(&few(base.clone()), &few(new()), &[]), 0);
    let alone = |r: Results| {
        let arm = r.at("arm");
        let mut r = r.with("cuda_graph_impl", "none").with("digest_match", "");
        r.rows.retain(|row| row[arm] == "eager");
        r
    };
    assert_eq!(code(&alone(base.clone()), &alone(new()), &["--gate", "time"]), 0);
    // Cells that no gate uses are cells all the same.
    for (column, cell) in [
        ("pairs", "x"),
        ("margin", "y"),
        ("verdict", "great"),
        ("steps_steady", "2.5"),
        ("te_rng_tracker", "on"),
    ] {
        let seen = compare(&base, &new().with_row(1, column, cell), &[]);
        assert_eq!(seen.code, 12, "{column}");
        let named = seen.stdout.contains("row 2") && seen.stdout.contains(&format!("column {column}"));
        assert!(named, "{column}: {}", seen.stdout);
    }
}

#[test]
fn memory_that_was_not_measured_is_no_zero() {
    let of = |name, cell: &str| Results::three(name, 1.0, 1.0).with_row(3, "graph_memory_mib", cell);
    let large = |name| Results::three(name, 1.0, 1.0).with("graph_memory_mib", "80000");
    let gate = ["--gate", "memory"];
    for cell in ["", "-5", "NaN", "much"] {
        for (base, new) in
            [(large("a"), of("b", cell)), (of("a", cell), large("b")), (of("a", cell), of("b", cell))]
        {
            let seen = compare(&base, &new, &gate);
            assert_eq!(seen.code, 12, "{cell:?}: {}", seen.stdout);
            assert!(seen.stdout.contains("column graph_memory_mib"), "{cell:?}: {}", seen.stdout);
        }
    }
    let lacking = large("b").without("graph_memory_mib");
    assert_eq!(compare(&large("a"), &lacking, &gate).code, 12);
    // Measured, it may be 0; the eager arm has none, nor has a CPU.
    let zero = |name| Results::three(name, 1.0, 1.0).with("graph_memory_mib", "0");
    assert_eq!(code(&zero("a"), &zero("b"), &gate), 0);
    assert_eq!(code(&zero("a"), &large("b"), &gate), 10);
    let eager = |name| {
        let results = Results::three(name, 1.0, 1.0);
        [0, 2, 4].into_iter().fold(results, |r, row| r.with_row(row, "graph_memory_mib", ""))
    };
    assert_eq!(code(&eager("a"), &eager("b"), &gate), 0);
    let cpu = |name| Results::three(name, 1.0, 1.0).with("device", "cpu").with("graph_memory_mib", "");
    assert_eq!(code(&cpu("a"), &cpu("b"), &gate), 0);
}

#[test]
fn outputs_replace_no_input_and_nothing_but_reports() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let base = Results::three("base", 1.0, 1.0).save(dir.path(), "base.csv");
    Results::three("new", 1.0, 1.0).save(dir.path(), "new.csv");
    std::fs::write(at("notes.md"), "mine").unwrap();
    std::fs::write(at("config.json"), "{}").unwrap();
    std::os::unix::fs::symlink("base.csv", at("link.csv")).unwrap();
    std::fs::hard_link(&base, at("hard.csv")).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    let run = |options: &[&str]| {
        let mut command = binary();
        command.current_dir(dir.path()).args(["compare", "base.csv", "--new", "new.csv"]).args(options);
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let kept = ["base.csv", "new.csv", "notes.md", "config.json"];
    let before = kept.map(|name| std::fs::read(at(name)).unwrap());
    for (options, said) in [
        (&["--json", "base.csv"][..], "--json would write base.csv, which BASE reads"),
        (&["--markdown", "new.csv"], "--markdown would write new.csv, which --new reads"),
        (&["--json", "link.csv"], "BASE"),
        (&["--json", "hard.csv"], "BASE"),
        (&["--json", "folder/../base.csv"], "BASE"),
        (&["--json", "x", "--markdown", "x"], "would both write x"),
        (&["--markdown", "notes.md"], "notes.md is there and is no Markdown report"),
        (&["--json", "config.json"], "config.json is there and is no JSON report"),
        (&["--json", "-"], "give --format json"),
        (&["--markdown", "-"], "give --format markdown"),
    ] {
        let (code, err) = run(options);
        assert_eq!(code, 2, "{options:?}: {err}");
        assert!(err.contains(said), "{options:?}: {err}");
        assert_eq!(kept.map(|name| std::fs::read(at(name)).unwrap()), before, "{options:?}");
    }
    assert!(!at("x").exists() && !at("-").exists());
    // Reports are replaced by reports, and a device may be named twice.
    for _ in 0..2 {
        assert_eq!(run(&["--json", "report.json", "--markdown", "report.md"]).0, 0);
    }
    assert_eq!(run(&["--json", "/dev/null", "--markdown", "/dev/null"]).0, 0);
    // A place for no file is told before anything is compared.
    for place in ["folder", "no/x", "base.csv/x"] {
        for option in ["--json", "--markdown"] {
            let (code, err) = run(&[option, place]);
            assert_eq!(code, 2, "{place}: {err}");
            assert!(err.contains(&format!("{option}: cannot write {place}")), "{err}");
        }
    }
    // What cannot be written all the same is named, and the other report is there.
    let (code, err) = run(&["--json", "/dev/full", "--markdown", "other.md"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("cannot write the report to /dev/full"), "{err}");
    assert!(std::fs::read_to_string(at("other.md")).unwrap().contains("fine"));
    std::fs::remove_file(at("other.md")).unwrap();
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 9, "nothing half is left: {names:?}");
}

#[test]
fn several_files_and_run_ids_count_as_runs_and_copies_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str, r: Results| r.save(folder.path(), name);
    let run = |id: &str, ratio: f64| Results::default().run(id, 100.0, 1.25 * ratio, 0.003);
    let base =
        [save("b1.csv", run("b1", 1.0)), save("b2.csv", run("b2", 1.004)), save("b3.csv", run("b3", 0.996))];
    let new = [save("n1.csv", run("n1", 1.0)), save("n2.csv", run("n2", 1.003))];
    let seen = files(&base, &new, &[]);
    assert_eq!(seen.code, 0);
    assert_eq!(
        (&seen.json["rows"][0]["base_runs"], &seen.json["rows"][0]["new_runs"]),
        (&3.into(), &2.into())
    );
    assert!(!seen.stdout.contains("one run a side"));
    // One file twice is one run.
    let twice = files(&[base[0].clone(), base[0].clone()], &[new[0].clone(), new[0].clone()], &[]);
    assert_eq!(twice.json["rows"][0]["base_runs"], 1);
    assert!(twice.stdout.contains("counted once") && twice.stdout.contains("one run a side"));
    // One run id with two figures is no run.
    let torn = save("torn.csv", run("b1", 1.2));
    assert_eq!(files(&[base[0].clone(), torn], &[new[0].clone()], &[]).code, 12);
    // A file against itself.
    let itself = files(&base, &base, &[]);
    assert_eq!(itself.code, 0);
    assert!(itself.stdout.contains("compared with themselves"));
}

#[test]
fn runs_that_were_not_steady_are_undecided_by_default() {
    let base = Results::three("base", 1.0, 1.0);
    for ratio in [1.0, 0.8] {
        let new = Results::three("new", 1.0, ratio).with("steady_reached", "false");
        assert_eq!(code(&base, &new, &[]), 11);
        assert_eq!(code(&base, &new, &["--allow-unsteady"]), if ratio < 1.0 { 10 } else { 0 });
    }
}

#[test]
fn what_may_explain_a_change_is_a_warning() {
    let base = Results::three("base", 1.0, 1.0);
    for (column, cell) in
        [("attention_backend", "cudnn"), ("throttle_reasons", "sw_power_cap"), ("other_processes_max", "2")]
    {
        let seen = compare(&base, &Results::three("new", 1.0, 1.0).with(column, cell), &[]);
        assert_eq!(seen.code, 0);
        assert!(!seen.json["warnings"].as_array().unwrap().is_empty(), "{column}");
    }
    // What many rows share is one line, with their number.
    let capped = |name| Results::three(name, 1.0, 1.0).with("throttle_reasons", "sw_power_cap");
    let seen = compare(&capped("base"), &capped("new").with_row(0, "throttle_reasons", "none"), &[]);
    let warnings = seen.json["warnings"].as_array().unwrap();
    let said: Vec<&str> = warnings.iter().filter_map(Value::as_str).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].starts_with("clocks were held back (sw_power_cap): 11 of 12 rows, the first "),
        "{said:?}"
    );
    assert!(said[0].contains("base.csv, row 1 (llama3_8b eager)"), "{said:?}");
    // A cause that one file could not tell; that neither could is no difference.
    let untold = |r: Results| r.without("gemm_plan_digest");
    let seen = compare(&base, &untold(Results::three("new", 1.0, 1.0)), &[]);
    assert!(
        seen.stdout.contains("gemm_plan_digest differs: (empty) in base, (absent) in new"),
        "{}",
        seen.stdout
    );
    let seen = compare(&untold(base.clone()), &untold(Results::three("new", 1.0, 1.0)), &[]);
    assert_eq!(seen.json["warnings"], serde_json::json!([]));
    let plan = |digest: &str, name: &str| Results::three(name, 1.0, 1.0).with("gemm_plan_digest", digest);
    let seen = compare(&plan("a1", "base"), &plan("b2", "new"), &[]);
    assert_eq!(seen.code, 0);
    assert!(seen.stdout.contains("gemm_plan_digest differs: a1 in base, b2 in new"), "{}", seen.stdout);
}

#[test]
fn broken_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let good = Results::three("base", 1.0, 1.0);
    let base = good.save(folder.path(), "base.csv");
    let whole = good.bytes();
    let text = String::from_utf8(whole.clone()).unwrap();
    let header = text.lines().next().unwrap().to_owned();
    for (what, bytes) in [
        ("empty", vec![]),
        ("header alone", format!("{header}\r\n").into_bytes()),
        ("half a row", whole[..whole.len() - 60].to_vec()),
        ("an open quote", format!("{text}\"").into_bytes()),
        ("two equal columns", text.replacen("run_id", "speedup", 1).into_bytes()),
        ("no CSV", b"{\"rows\": []}\n".to_vec()),
        ("not UTF-8", [whole.as_slice(), b"\xff\xfe\n"].concat()),
        ("steps file", b"run_id,step,arm\r\nx,1,eager\r\n".to_vec()),
        ("unknown status", text.replacen(",ok,", ",fine,", 1).into_bytes()),
        ("unknown arm", text.replacen(",eager,", ",edger,", 1).into_bytes()),
        ("no run id", text.replacen("1,base-0,", "1,,", 1).into_bytes()),
    ] {
        let path: &Path = &folder.path().join("broken.csv");
        std::fs::write(path, bytes).unwrap();
        let seen = files(std::slice::from_ref(&base), &[path.into()], &[]);
        assert_eq!(seen.code, 12, "{what}: {}", seen.stdout);
        assert!(seen.stdout.contains("broken.csv"), "{what}: {}", seen.stdout);
    }
    // What is no plain file is wrong use, as for every command.
    assert_eq!(files(&[base], &[folder.path().into()], &[]).code, 2);
}

/// A number that was cut is one: the row alone does not tell.
#[test]
fn a_last_line_without_its_end_may_be_cut() {
    let folder = tempfile::tempdir().unwrap();
    let base = Results::three("base", 1.0, 1.0).save(folder.path(), "base.csv");
    let mut new = Results::three("new", 1.0, 1.0);
    let speedup = new.at("speedup");
    new.header.push("speedup".into());
    new.header.remove(speedup);
    new.rows.iter_mut().for_each(|row| {
        let cell = row.remove(speedup);
        row.push(cell);
    });
    let whole = new.bytes();
    assert!(whole.ends_with(b",1.2525\r\n"));
    let cut = folder.path().join("cut.csv");
    for (lacking, expected) in [(0, 0), (1, 12), (2, 12), (3, 12), (5, 12)] {
        std::fs::write(&cut, &whole[..whole.len() - lacking]).unwrap();
        let seen = files(std::slice::from_ref(&base), std::slice::from_ref(&cut), &[]);
        assert_eq!(seen.code, expected, "{lacking}: {}", seen.stdout);
        let told = seen.stdout.contains("cut.csv: its last line has no line end");
        assert_eq!(told, expected == 12, "{lacking}: {}", seen.stdout);
    }
}

#[test]
fn markup_in_cells_stays_text() {
    let evil = |name| Results::three(name, 1.0, 1.0).with("task", "a|b\n<img>`x`");
    let other = |name| Results::three(name, 1.0, 1.0);
    let seen = compare(&evil("a").and(other("b")), &evil("c").and(other("d")), &["--format", "markdown"]);
    assert_eq!(seen.code, 0);
    let row = seen.stdout.lines().find(|l| l.contains("&lt;img")).unwrap();
    assert!(row.contains("a\\|b") && !row.contains("<img"), "{row}");
}
