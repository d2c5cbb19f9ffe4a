//! What a user, a scheduler or a disk does to a run: it is refused, told or survived, and earlier results stay.

use crate::common::binary::{RUN, cell, command, fails, names, records, run, text};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn short(more: &str) -> String {
    format!("{RUN} -ms 5 -q {more}")
}

/// Contents of every file of a folder.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    names(dir)
        .into_iter()
        .filter(|n| dir.join(n).is_file())
        .map(|n| (n.clone(), fs::read(dir.join(n)).unwrap()))
        .collect()
}

#[test]
fn no_file_is_written_twice_or_in_place_of_another_kind() {
    let dir = tempdir().unwrap();
    assert_eq!(run(dir.path(), &short("-o ex.csv --save_config_filepath ex.json")).status.code(), Some(0));
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/config.json"), "{\n  \"mine\": 1}").unwrap();
    fs::copy(dir.path().join("ex.csv"), dir.path().join("model.json")).unwrap();
    let before = contents(dir.path());
    for more in [
        "-o ex.csv --save_config_filepath ex.csv",
        "-o ex.csv --save_config_filepath ex.steps.csv",
        "-o ex.csv --save_config_filepath ./ex.runs.jsonl",
        "-o other.csv --save_config_filepath ex.csv",
        "-o other.csv --save_config_filepath ex.runs.jsonl",
        "-o other.csv --save_config_filepath notes.txt",
        "-o f.csv --xlsx f.csv",
        "-o f.csv --xlsx f.steps.csv",
        "-o f.csv --xlsx f.runs.jsonl",
        "-o f.csv --xlsx f.blocks.csv",
        "-o f.csv --profile --xlsx f.trace.json",
        "--xlsx c.json --save_config_filepath c.json -o f.csv",
        "-o d/config.json --dump d",
        "-o f.csv --dump d",
        "-o f.csv --dump e --save_config_filepath e/config.json",
        "-o f.csv --host_model model.json --save_config_filepath model.json",
        // Both go into files.
        "-o f.csv --save_config_filepath -",
        "-o f.csv --xlsx -",
    ] {
        for also in ["", " --dryrun"] {
            fails(dir.path(), &short(&format!("{more}{also}")), 2);
            assert_eq!(contents(dir.path()), before, "{more}{also}");
        }
    }
    let scopeless = "-m llama -mr llama3_8b -g h100 --device cpu -sl 32 --num_layers 2 -q --sweep";
    fails(dir.path(), &format!("{scopeless} -o f.csv --xlsx f.csv"), 2);
    assert_eq!(contents(dir.path()), before);
    // Of its own kind it is replaced, and a device may be named as often as one likes.
    let again = short("-o ex.csv --save_config_filepath ex.json --seed 7");
    assert_eq!(run(dir.path(), &again).status.code(), Some(0));
    assert!(fs::read_to_string(dir.path().join("ex.json")).unwrap().contains("\"seed\": 7"));
    if Path::new("/dev/null").exists() {
        let null = short("-o /dev/null --save_config_filepath /dev/null");
        assert_eq!(run(dir.path(), &null).status.code(), Some(0));
    }
}

#[test]
fn a_dump_writes_its_files_again() {
    let dir = tempdir().unwrap();
    for _ in 0..2 {
        let output = run(dir.path(), &short("-o - --dump d"));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(
            names(&dir.path().join("d")),
            ["config.json", "grads.safetensors", "step.safetensors", "weights.safetensors"]
        );
    }
    // One that fails before it leaves no empty file.
    fails(dir.path(), &short("-o - --dump e --inject prepare:driver_error"), 1);
    assert_eq!(names(&dir.path().join("e")), Vec::<String>::new());
}

#[test]
fn cut_and_foreign_lines_are_refused() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert_eq!(run(dir.path(), &short("-o x.csv")).status.code(), Some(0));
    let (rows, runs) =
        (fs::read_to_string(at("x.csv")).unwrap(), fs::read_to_string(at("x.runs.jsonl")).unwrap());
    let cut_runs = runs[..runs.len() - 10].to_owned();
    let header = rows.lines().next().unwrap();
    let other_version = rows.replace("\r\n1,", "\r\n2,");
    assert_ne!(other_version, rows);
    let junk = format!("{header}\r\n1,junk\r\n");
    for (rows, runs, part) in [
        (&rows, &cut_runs, "not complete"),
        (&rows, &"notes\n".to_owned(), "something else"),
        (&other_version, &runs, "schema version \"2\""),
        (&junk, &runs, "row 1"),
    ] {
        fs::write(at("x.csv"), rows).unwrap();
        fs::write(at("x.runs.jsonl"), runs).unwrap();
        for more in ["", " --resume"] {
            let said = fails(dir.path(), &short(&format!("-o x.csv{more}")), 2);
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(&fs::read_to_string(at("x.csv")).unwrap(), rows);
        assert_eq!(&fs::read_to_string(at("x.runs.jsonl")).unwrap(), runs);
    }
}

#[test]
fn repetitions_that_lack_are_made_up_for() {
    let dir = tempdir().unwrap();
    let made = |more: &str| {
        let output = run(dir.path(), &short(&format!("-o x.csv {more}")));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let rows = records(&fs::read(dir.path().join("x.csv")).unwrap());
        (0..rows.len() - 1).step_by(2).map(|r| cell(&rows, r, "repetition")).collect::<Vec<_>>()
    };
    // As an interruption after the first pair leaves it.
    assert_eq!(made(""), ["1"]);
    assert_eq!(made("--resume --repeat 3"), ["1", "2", "3"]);
    assert_eq!(made("--resume --repeat 3"), ["1", "2", "3"]);
    assert_eq!(made("--resume"), ["1", "2", "3"]);
}

#[test]
fn faults_that_nothing_saw_are_told() {
    let dir = tempdir().unwrap();
    let said = |more: &str| {
        let output = run(dir.path(), &short(&format!("-o - {more}")));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    assert!(said("--inject final_check:driver_error").contains("final_check:driver_error:1 did not happen"));
    assert!(said("--inject steady:driver_error:999999").contains("did not happen"));
    assert!(said("--inject steady:wrong_result").contains("nothing saw it: the final check was left out"));
    // The last one wins, and each is read.
    assert_eq!(said("--inject prepare:driver_error --inject steady:slow_step"), "");
    assert!(
        fails(dir.path(), &short("-o - --inject nowhere:hang --inject steady:slow_step"), 2)
            .contains("nowhere")
    );
    assert_eq!(
        fails(dir.path(), &short("-o - --inject steady:slow_step --inject prepare:driver_error"), 1)
            .lines()
            .count(),
        1
    );
}

#[test]
fn a_dry_run_refuses_what_the_run_does() {
    let dir = tempdir().unwrap();
    let long = format!("-o {}.csv", "x".repeat(300));
    fs::write(dir.path().join("file"), "").unwrap();
    fs::write(dir.path().join("foreign.csv"), "a,b\n").unwrap();
    std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
    let before = contents(dir.path());
    for more in [
        "--watchdog -1",
        "--margin 0",
        "--inject nowhere:hang",
        "--max_time 0",
        "--resume",
        "-o .",
        "-o no/x.csv",
        &long,
        "-o foreign.csv",
        "-o loop",
        "--xlsx loop",
        "--save_config_filepath loop",
        "--dump file",
        "--dump file/d",
        "--host_model none",
        "--spin_percent 1",
        "--kernel_cache file",
        "--cuda_path none",
    ] {
        let (dry, wet) = (
            fails(dir.path(), &short(&format!("-o - {more} --dryrun")), 2),
            fails(dir.path(), &short(&format!("-o - {more}")), 2),
        );
        assert_eq!(dry, wet);
        assert_eq!(contents(dir.path()), before, "{more}");
    }
    assert!(fails(dir.path(), &short("--dryrun --xlsx new.xlsx"), 2).contains("--xlsx"));
    // A run would make these folders; a dry run does not.
    for more in ["--profile", "-o - --dump a/b"] {
        assert_eq!(run(dir.path(), &short(&format!("{more} --dryrun"))).status.code(), Some(0), "{more}");
        assert_eq!(contents(dir.path()), before, "{more}");
    }
    let said = fails(dir.path(), &short("-d optimizer.lr=1e308 optimizer.min_lr=-1e308"), 2);
    assert!(said.len() < 400, "{said}");
    let long = "x".repeat(100_000);
    let begun = std::time::Instant::now();
    for more in
        [long.clone(), format!("{long}=1"), format!("model.hidden_size={long}"), format!("model.{long}=1")]
    {
        let said = fails(dir.path(), &short(&more), 2);
        assert!(said.len() < 1000, "{}", said.len());
    }
    assert!(begun.elapsed().as_secs() < 10);
    let said = fails(dir.path(), &short("model.hidden\u{1b}[2J\u{202e}_size=1"), 2);
    assert!(!said.contains(['\u{1b}', '\u{202e}']), "{said:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn limits_of_the_process_are_told() {
    use std::process::{Command, Stdio};
    let dir = tempdir().unwrap();
    let limited = |limit: &str, more: &str, variable: (&str, &str)| {
        let mbperf = assert_cmd::cargo::cargo_bin!("mbperf").display().to_string();
        let line = format!("ulimit {limit}; exec {mbperf} {}", short(more));
        let output = Command::new("sh")
            .args(["-c", &line])
            .env(variable.0, variable.1)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let none = ("MBPERF_TEST", "1");
    let (code, said) = limited("-f 2", "-o rows.csv", none);
    assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("rows.") && said.contains("choose another file"), "{said}");
    let (code, said) = limited("-v 2000000", "-o - --num_layers 1 --full_size --vocab_size 1024", none);
    assert_eq!((code, said.lines().count()), (Some(5), 1), "{said}");
    assert!(said.contains("ulimit -v"), "{said}");
    // More than once: the process was aborted in one of fifteen, where a thread that had just been started found no memory.
    for _ in 0..5 {
        let (code, said) = limited("-v 1000000", "-o -", ("RAYON_NUM_THREADS", "2000"));
        assert_eq!((code, said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains("ulimit -u") && said.contains("ulimit -v"), "{said}");
    }
}

#[test]
#[cfg(unix)]
fn an_environment_that_is_no_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let dir = tempdir().unwrap();
    let odd = OsStr::from_bytes(b"\xff");
    let output = command(dir.path(), &short("-o p.csv"))
        .env("FOO", odd)
        .env(odd, "1")
        .env("CUDA_FOO", odd)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(fs::read_to_string(dir.path().join("p.runs.jsonl")).unwrap().contains("CUDA_FOO"));
}
