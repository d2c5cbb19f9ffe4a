//! `--csv_dialect`, `--xlsx`, completions and manual pages through the binary.

use crate::common::binary::{RUN, command, fails, names, records, run, text};
use crate::common::results::Results;
use calamine::{Data, Range, Reader, Xlsx, open_workbook};
use mbperf::report::columns::Kind;
use mbperf::report::{COLUMNS, Dialect, steps};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn short(more: &str) -> String {
    format!("{RUN} -ms 5 -q {more}")
}

/// Cells of a semicolon file as a strict reader sees them.
fn excel(path: &Path) -> Vec<csv::StringRecord> {
    let bytes = fs::read(path).unwrap();
    let plain = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap();
    let mut reader =
        csv::ReaderBuilder::new().delimiter(b';').has_headers(false).flexible(false).from_reader(plain);
    reader.records().collect::<Result<_, _>>().unwrap()
}

/// The same file in the other dialect.
fn translated(results: &Results) -> Vec<u8> {
    let mut text = Vec::from(Dialect::ExcelEu.mark());
    let mut writer =
        csv::WriterBuilder::new().delimiter(b';').terminator(csv::Terminator::CRLF).from_writer(&mut text);
    writer.write_record(&results.header).unwrap();
    for row in &results.rows {
        let cells = row.iter().zip(COLUMNS).map(|(cell, c)| Dialect::ExcelEu.write(cell, c.kind));
        writer.write_record(cells.collect::<Vec<_>>()).unwrap();
    }
    drop(writer);
    text
}

#[test]
fn an_excel_file_has_commas_for_points_and_no_formula() {
    let dir = tempdir().unwrap();
    let line = short("-o =x.csv --csv_dialect excel_eu");
    assert_eq!(run(dir.path(), &line).status.code(), Some(0));
    let rows = excel(&dir.path().join("=x.csv"));
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0].iter().collect::<Vec<_>>(), COLUMNS.iter().map(|c| c.name).collect::<Vec<_>>());
    let mut numbers = 0;
    for row in &rows[1..] {
        for (cell, column) in row.iter().zip(COLUMNS) {
            assert!(!cell.starts_with(['=', '+', '@', '\t', '\r']), "{}: {cell}", column.name);
            if matches!(column.kind, Kind::Float) && !cell.is_empty() {
                assert!(!cell.contains('.') && cell.replace(',', ".").parse::<f64>().is_ok(), "{cell}");
                numbers += 1;
            }
        }
    }
    assert!(numbers > 20);
    let of_steps = excel(&dir.path().join("=x.steps.csv"));
    assert_eq!(of_steps[0].len(), steps::COLUMNS.len());
    assert!(of_steps[1..].iter().all(|s| !s[11].contains('.')));
    // It grows in its own dialect, and is refused untouched in the other.
    assert_eq!(run(dir.path(), &line).status.code(), Some(0));
    assert_eq!(excel(&dir.path().join("=x.csv")).len(), 5);
    let bytes = fs::read(dir.path().join("=x.csv")).unwrap();
    assert!(fails(dir.path(), &short("-o =x.csv"), 2).contains("--csv_dialect excel_eu"));
    assert_eq!(fs::read(dir.path().join("=x.csv")).unwrap(), bytes);
    assert_eq!(run(dir.path(), &short("-o plain.csv")).status.code(), Some(0));
    let said = fails(dir.path(), &short("-o plain.csv --csv_dialect excel_eu"), 2);
    assert!(said.contains("--csv_dialect rfc4180"), "{said}");
    assert_eq!(records(&fs::read(dir.path().join("plain.csv")).unwrap()).len(), 3);
    // What is in the file is not run again.
    assert_eq!(run(dir.path(), &format!("{line} --resume")).status.code(), Some(0));
    assert_eq!(excel(&dir.path().join("=x.csv")).len(), 5);
    // Standard output too.
    let output = run(dir.path(), &short("-o - --csv_dialect excel_eu"));
    assert!(output.stdout.starts_with("\u{feff}schema_version;".as_bytes()));
}

#[test]
fn both_dialects_are_read_alike() {
    let dir = tempdir().unwrap();
    let base =
        Results::three("base", 1.0, 1.0).with("status_reason", "=1+1").with("approximations", "'quoted");
    let slow = Results::three("new", 1.0, 0.8);
    base.save(dir.path(), "base.csv");
    slow.save(dir.path(), "slow.csv");
    fs::write(dir.path().join("base_eu.csv"), translated(&base)).unwrap();
    fs::write(dir.path().join("slow_eu.csv"), translated(&slow)).unwrap();
    let compared = |base: &str, new: &str| {
        let output = run(
            dir.path(),
            &format!("compare {base} --new {new} --format json --allow-unlike approximations"),
        );
        // The report names its files.
        (output.status.code(), text(&output.stdout).replace("_eu.csv", ".csv"))
    };
    let plain = compared("base.csv", "slow.csv");
    assert_eq!(plain.0, Some(10), "{}", plain.1);
    for (base, new) in
        [("base_eu.csv", "slow.csv"), ("base.csv", "slow_eu.csv"), ("base_eu.csv", "slow_eu.csv")]
    {
        assert_eq!(compared(base, new), plain);
    }
    let page = |file: &str| text(&run(dir.path(), &format!("report {file} -o -")).stdout);
    assert_eq!(page("base_eu.csv").replace("base_eu", "base"), page("base.csv"));
    // A file that was saved again with grouped numbers is no file of ours.
    let grouped = text(&translated(&base)).replace("99,8;", "1.099,8;");
    fs::write(dir.path().join("grouped.csv"), grouped).unwrap();
    assert!(fails(dir.path(), "report grouped.csv -o -", 2).contains("decimal comma"));
}

fn sheet(path: &Path, name: &str) -> Range<Data> {
    let mut book: Xlsx<_> = open_workbook(path).unwrap();
    assert_eq!(book.sheet_names(), ["rows", "steps", "columns"]);
    book.worksheet_range(name).unwrap()
}

/// A cell as the CSV has it, and its type is the column's.
fn plain(data: &Data, kind: Kind) -> String {
    match (data, kind) {
        (Data::Empty, _) => String::new(),
        (Data::Float(x), Kind::Float | Kind::Int) => mbperf::report::columns::number(*x),
        (Data::Bool(b), Kind::Bool) => b.to_string(),
        (Data::String(s), Kind::Text) => s.clone(),
        other => panic!("{other:?}"),
    }
}

fn assert_same(path: &Path, name: &str, columns: &[(&str, Kind)], csv: &[csv::StringRecord]) {
    let sheet = sheet(path, name);
    let rows: Vec<&[Data]> = sheet.rows().collect();
    assert_eq!(rows.len(), csv.len(), "{name}");
    for (at, (row, record)) in rows.iter().zip(csv).enumerate() {
        for (column, (data, cell)) in columns.iter().zip(row.iter().zip(record)) {
            let kind = if at == 0 { Kind::Text } else { column.1 };
            assert_eq!(plain(data, kind), cell, "{name}, row {at}, {}", column.0);
        }
    }
}

#[test]
fn a_workbook_holds_what_the_csv_holds_with_numbers_as_numbers() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert_eq!(run(dir.path(), &short("-o x.csv --xlsx x.xlsx")).status.code(), Some(0));
    let csv = records(&fs::read(at("x.csv")).unwrap());
    let of_steps = records(&fs::read(at("x.steps.csv")).unwrap());
    let columns: Vec<(&str, Kind)> = COLUMNS.iter().map(|c| (c.name, c.kind)).collect();
    assert_same(&at("x.xlsx"), "rows", &columns, &csv);
    assert_same(&at("x.xlsx"), "steps", &steps::COLUMNS, &of_steps);
    let meanings = sheet(&at("x.xlsx"), "columns");
    assert_eq!(meanings.height(), 1 + COLUMNS.len() + steps::COLUMNS.len());
    // The same workbook from the files, whichever way.
    assert_eq!(run(dir.path(), "report x.csv --xlsx y.xlsx").status.code(), Some(0));
    assert_same(&at("y.xlsx"), "rows", &columns, &csv);
    assert_same(&at("y.xlsx"), "steps", &steps::COLUMNS, &of_steps);
    // Rows on standard output leave no steps file, and the workbook has them.
    assert_eq!(run(dir.path(), &short("-o - --xlsx x.xlsx")).status.code(), Some(0));
    assert_eq!(sheet(&at("x.xlsx"), "rows").height(), 3);
    assert!(sheet(&at("x.xlsx"), "steps").height() > 10);
}

#[test]
fn text_stays_text_in_a_workbook() {
    let dir = tempdir().unwrap();
    let reason = "=HYPERLINK(\"http://e.example\")\u{1}\r\n<b>&";
    let long = "x".repeat(40_000);
    Results::one()
        .with("status_reason", reason)
        .with("command", &long)
        .with("digest", "12e45")
        .save(dir.path(), "x.csv");
    assert_eq!(run(dir.path(), "report x.csv --xlsx x.xlsx").status.code(), Some(0));
    let rows = sheet(&dir.path().join("x.xlsx"), "rows");
    let cell = |name: &str| {
        let at = COLUMNS.iter().position(|c| c.name == name).unwrap();
        rows.rows().nth(1).unwrap()[at].clone()
    };
    assert_eq!(cell("digest"), Data::String("12e45".into()));
    assert!(matches!(cell("status_reason"), Data::String(s) if s.starts_with("=HYPERLINK(")));
    assert!(matches!(cell("command"), Data::String(s) if s.len() == 32_767));
    assert_eq!(cell("step_time_ms_median"), Data::Float(100.0));
}

#[test]
fn a_workbook_that_cannot_be_written_stops_before_the_run() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("rows.txt"), "mine").unwrap();
    for file in ["rows.txt", "no/such.xlsx", "."] {
        let said = fails(dir.path(), &short(&format!("-o x.csv --xlsx {file}")), 2);
        assert!(said.contains("--xlsx"), "{said}");
    }
    assert_eq!(names(dir.path()), ["rows.txt"]);
    assert_eq!(fs::read_to_string(dir.path().join("rows.txt")).unwrap(), "mine");
    if Path::new("/dev/full").exists() {
        assert!(fails(dir.path(), &short("-o x.csv --xlsx /dev/full"), 1).contains("No space left"));
        assert_eq!(records(&fs::read(dir.path().join("x.csv")).unwrap()).len(), 3, "the rows stay");
    }
}

#[test]
fn completions_and_manual_pages_are_printed() {
    let dir = tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(dir.path(), &format!("completions {shell}"));
        assert!(output.status.success() && text(&output.stdout).contains("cuda_graph_scope"), "{shell}");
    }
    assert!(text(&run(dir.path(), "man").stdout).starts_with(".ie"));
    assert!(text(&run(dir.path(), "man report").stdout).contains("mbperf\\-report"));
    fails(dir.path(), "man nothing", 2);
    fails(dir.path(), "completions csh", 2);
    let mut child =
        command(dir.path(), "completions bash").stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
