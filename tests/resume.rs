//! `--resume` through the binary, on the CPU device.

use std::path::Path;

const RUN: &str = "-m llama -mr llama3_8b -g h100 --cuda_graph_impl local --cuda_graph_scope full_iteration \
    --stack_only --device cpu --num_layers 1 --seq_length 16 -ms 12 -q";

fn run(folder: &Path, more: &str) -> (Option<i32>, String) {
    let words = RUN.split_whitespace().chain(more.split_whitespace());
    let output =
        assert_cmd::Command::cargo_bin("mbperf").unwrap().current_dir(folder).args(words).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn rows(folder: &Path) -> usize {
    csv::Reader::from_path(folder.join("x.csv")).unwrap().records().map(Result::unwrap).count()
}

#[test]
fn what_is_in_the_file_is_not_run_again_and_anything_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // A failed run is no result.
    assert_eq!(run(folder, "-o x.csv --inject capture:driver_error").0, Some(4));
    let failed = rows(folder);
    for (more, expected) in [
        ("-o x.csv --resume", 2),
        ("-o x.csv --resume", 2),
        ("-o x.csv --resume --margin 0.02", 2),
        ("-o x.csv --resume --seed 2", 4),
        ("-o x.csv --resume --seq_length 24", 6),
        ("-o x.csv --resume --seed 2", 6),
        ("-o x.csv", 8),
    ] {
        let (code, stderr) = run(folder, more);
        assert_eq!((code, rows(folder)), (Some(0), failed + expected), "{more}: {stderr}");
    }
    let (code, stderr) = run(folder, "-o - --resume");
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--resume needs a file"), "{stderr}");
}

/// A run of the whole step: `--stack_only` is in the way of some options.
fn step(folder: &Path, more: &str) -> usize {
    let line = "-m llama -mr llama3_8b -g h100 --device cpu --num_layers 1 --seq_length 16 -ms 12 -q -o x.csv \
        --cuda_graph_impl local --cuda_graph_scope full_iteration --resume";
    let words = line.split_whitespace().chain(more.split_whitespace());
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    let output = command.current_dir(folder).args(words).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{more}: {}", String::from_utf8_lossy(&output.stderr));
    rows(folder)
}

/// A row with another setting, whether it has a column or not, is not the row that is asked for.
#[test]
fn another_setting_is_run_and_then_held() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut expected = 0;
    for more in [
        "",
        "--grad_dtype bf16",
        "--optimizer none",
        "--lr 0.01",
        "--max_microbatches 1",
        "--host_model pytorch",
    ] {
        expected += 2;
        assert_eq!((step(folder, more), step(folder, more)), (expected, expected), "{more}");
    }
}

/// Without `--device` the CPU takes the GPU's place, and has no streams: the row must not say that it used them.
#[test]
fn a_cpu_that_stands_in_has_no_streams() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let line = format!("{} -o x.csv --overlap_wgrad", RUN.replace("--device cpu", "").replace("-q", ""));
    let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
    // A driver with no device, where there is a driver.
    let command = command.current_dir(folder).env("CUDA_VISIBLE_DEVICES", "");
    let output = command.args(line.split_whitespace()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("--overlap_wgrad changes nothing"), "{said}");
    let mut reader = csv::Reader::from_path(folder.join("x.csv")).unwrap();
    let at = reader.headers().unwrap().iter().position(|c| c == "overlap_wgrad").unwrap();
    let cells: Vec<String> = reader.records().map(|r| r.unwrap()[at].to_owned()).collect();
    assert_eq!(cells, ["false", "false"]);
    // It is the run without the option, and is held as one.
    assert_eq!((run(folder, "-o x.csv --resume").0, rows(folder)), (Some(0), 2));
}

/// Writes `cell` into a column of the file's last rows.
fn fill(folder: &Path, column: &str, cell: &str, last: usize) {
    let path = folder.join("x.csv");
    let mut reader = csv::Reader::from_path(&path).unwrap();
    let header = reader.headers().unwrap().clone();
    let mut rows: Vec<Vec<String>> =
        reader.records().map(|r| r.unwrap().iter().map(String::from).collect()).collect();
    let (at, first) = (header.iter().position(|c| c == column).unwrap(), rows.len() - last);
    rows[first..].iter_mut().for_each(|r| r[at] = cell.into());
    let mut writer = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_path(path).unwrap();
    writer.write_record(&header).unwrap();
    rows.iter().for_each(|r| writer.write_record(r).unwrap());
    writer.flush().unwrap();
}

/// Figures that are asked for must be there, in both rows.
#[test]
fn figures_that_a_row_lacks_are_measured() {
    for (option, column) in [
        ("--extrapolate", "step_time_ms_extrapolated"),
        ("--host_model pytorch", "step_time_ms_modelled_median"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!((step(folder, ""), step(folder, option)), (2, 4), "{option}");
        // Of so few steps there may be no figure.
        fill(folder, column, "5", 2);
        assert_eq!(step(folder, option), 4, "{option}");
        fill(folder, column, "", 1);
        assert_eq!(step(folder, option), 6, "{option}");
        // Who does not ask for them finds the row anyway.
        assert_eq!(step(folder, ""), 6, "{option}");
    }
}

/// Sets a cell of the row at `row` (from 0), or drops the row.
fn edit(folder: &Path, row: usize, change: Option<(&str, &str)>) {
    let path = folder.join("x.csv");
    let mut reader = csv::Reader::from_path(&path).unwrap();
    let header = reader.headers().unwrap().clone();
    let mut writer = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    writer.write_record(&header).unwrap();
    for (at, record) in reader.records().map(Result::unwrap).enumerate() {
        let cells = header.iter().zip(&record).map(|(name, cell)| match change {
            Some((column, new)) if at == row && column == name => new,
            _ => cell,
        });
        if at != row || change.is_some() {
            writer.write_record(cells).unwrap();
        }
    }
    std::fs::write(path, writer.into_inner().unwrap()).unwrap();
}

fn repetitions(folder: &Path) -> Vec<String> {
    let mut reader = csv::Reader::from_path(folder.join("x.csv")).unwrap();
    let at = reader.headers().unwrap().iter().position(|c| c == "repetition").unwrap();
    reader.records().map(|r| r.unwrap()[at].to_owned()).collect()
}

#[test]
fn the_repetitions_that_lack_are_made_under_their_own_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(run(folder, "-o x.csv --repeat 3").0, Some(0));
    edit(folder, 2, None);
    edit(folder, 2, None);
    assert_eq!(repetitions(folder), ["1", "1", "3", "3"]);
    assert_eq!(run(folder, "-o x.csv --repeat 3 --resume").0, Some(0));
    assert_eq!(repetitions(folder), ["1", "1", "3", "3", "2", "2"]);
    assert_eq!(run(folder, "-o x.csv --repeat 3 --resume").0, Some(0));
    assert_eq!(repetitions(folder).len(), 6);
}

#[test]
fn what_no_run_leaves_is_not_taken_for_one() {
    for (column, cell) in [
        ("step_time_ms_median", "abc"),
        ("step_time_ms_median", "NaN"),
        ("repetition", "0"),
        ("verdict", "zzz"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(run(folder, "-o x.csv").0, Some(0));
        edit(folder, 1, Some((column, cell)));
        let (code, said) = run(folder, "-o x.csv --resume");
        assert_eq!(code, Some(2), "{column}={cell}: {said}");
        assert!(said.contains(column), "{said}");
    }
    // A run without the proof or the figure is made again.
    for (column, cell) in [("digest_match", "false"), ("digest_match", ""), ("step_time_ms_median", "")] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(run(folder, "-o x.csv").0, Some(0));
        edit(folder, 1, Some((column, cell)));
        assert_eq!(run(folder, "-o x.csv --resume").0, Some(0));
        assert_eq!(rows(folder), 4, "{column}={cell}");
    }
}

/// A file that was cut, if only between the two bytes of its last end, is refused by all who read it or add to it.
#[test]
fn half_a_line_end_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(run(folder, "-o x.csv").0, Some(0));
    let path = folder.join("x.csv");
    let whole = std::fs::read(&path).unwrap();
    assert!(whole.ends_with(b"\r\n"));
    let codes = || {
        let of = |line: &str| {
            let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
            command.current_dir(folder).args(line.split(' ')).output().unwrap().status.code()
        };
        [
            run(folder, "-o x.csv").0,
            run(folder, "-o x.csv --resume").0,
            of("report x.csv -o page.html"),
            of("compare x.csv --new x.csv"),
        ]
    };
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(codes(), [Some(2), Some(2), Some(2), Some(12)]);
    // Lines that end in LF alone are whole.
    std::fs::write(&path, String::from_utf8(whole).unwrap().replace("\r\n", "\n")).unwrap();
    assert_eq!(codes()[..3], [Some(0); 3]);
}

/// Two would make the same runs.
#[test]
fn a_file_that_another_process_resumes_is_left_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let lock = std::fs::File::create(folder.join(".x.csv.resume")).unwrap();
    lock.lock().unwrap();
    for more in ["", " --sweep"] {
        let line =
            format!("-m llama -mr llama3_8b -g h100 --device cpu -sl 16 -ms 5 -q -o x.csv --resume{more}");
        let mut command = assert_cmd::Command::cargo_bin("mbperf").unwrap();
        let output = command.current_dir(folder).args(line.split_whitespace()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("another process resumes x.csv") && said.lines().count() == 1, "{said}");
        assert!(!folder.join("x.csv").exists());
    }
    // Who does not ask what is there may add to it.
    assert_eq!(run(folder, "-o x.csv").0, Some(0));
    drop(lock);
    assert_eq!(run(folder, "-o x.csv --resume").0, Some(0));
    assert_eq!(rows(folder), 2);
    assert!(!folder.join(".x.csv.resume").exists());
}

/// What `--strict` refused once is not let pass because it stands in the file.
#[test]
fn strict_looks_at_rows_of_the_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(run(folder, "-o x.csv --inject steady:throttled_clock").0, Some(0));
    assert_eq!(run(folder, "-o x.csv --resume --inject steady:throttled_clock").0, Some(0));
    assert_eq!(rows(folder), 2);
    let again = |line: &str| {
        run(folder, line);
        rows(folder)
    };
    assert_eq!(again("-o x.csv --resume --strict --inject steady:throttled_clock"), 4);
    let (_, said) = run(folder, "-o x.csv --resume --inject steady:throttled_clock --profile");
    assert!(said.contains("--profile"), "{said}");
}
