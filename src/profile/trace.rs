//! The trace file: Chrome's trace event format as JSON, which Perfetto opens. A process for each arm, a track for each
//! stream, times from the step's first kernel on.

use super::Profile;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What a trace of ours begins with; any other file is left alone.
pub const TRACE_START: &str = "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"producer\":\"mbperf\"";

/// The file's text. `about`: what a person wants to know of the run, by name.
pub fn render(profiles: &[Profile], about: &[(&str, String)]) -> String {
    let mut text = TRACE_START.to_owned();
    for (name, value) in about {
        text += &format!(",{}:{}", json!(name), json!(value));
    }
    text += "},\"traceEvents\":[\n";
    let events: Vec<String> =
        profiles.iter().enumerate().flat_map(|(at, p)| events(p, at + 1)).map(|e| e.to_string()).collect();
    text + &events.join(",\n") + "\n]}\n"
}

/// Events of one arm as process `pid`.
fn events(profile: &Profile, pid: usize) -> Vec<Value> {
    let records = &profile.recorded.records;
    let name = |what: &str, tid: usize, name: String| json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } });
    let mut events = vec![
        name("process_name", 0, format!("{} step", profile.arm)),
        json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": { "sort_index": pid } }),
    ];
    let (tracks, of_record) = tracks(profile);
    events.extend(tracks.iter().enumerate().map(|(tid, title)| name("thread_name", tid + 1, title.clone())));
    let first = records.iter().map(|r| r.start_ns).min().unwrap_or(0);
    // Nanoseconds as the format's microseconds.
    let us = |ns: u64| ns as f64 / 1e3;
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|&at| (records[at].start_ns, records[at].end_ns));
    for at in order {
        let record = &records[at];
        let launch = profile.launch(at);
        let of = |pick: fn(&crate::program::Launch) -> Value| launch.map_or(Value::Null, |(_, l)| pick(l));
        events.push(json!({
            "ph": "X",
            "name": &*record.unit.name,
            "cat": match record.unit.kind {
                crate::device::record::Kind::Kernel => "kernel",
                crate::device::record::Kind::Copy => "copy",
                crate::device::record::Kind::Set => "memset",
            },
            "pid": pid,
            "tid": of_record[at] + 1,
            "ts": us(record.start_ns - first),
            "dur": us(record.ns()),
            "args": {
                "op": of(|l| l.op.name().into()),
                "part": launch.map_or(super::UNATTRIBUTED, |(_, l)| l.part.name()),
                "layer": of(|l| l.layer.map_or(Value::Null, Value::from)),
                "pass": of(|l| l.pass.name().into()),
                "micro_batch": of(|l| l.micro_batch.into()),
                "launch": launch.map_or(Value::Null, |(index, _)| index.into()),
                "graph": record.node != 0,
                "grid": record.unit.grid,
                "block": record.unit.block,
            },
        }));
    }
    events
}

/// Titles of the tracks, and each record's. A track holds one thing at a time (viewers nest what overlaps): what runs
/// beside another on one stream gets a further track.
pub(super) fn tracks(profile: &Profile) -> (Vec<String>, Vec<usize>) {
    let records = &profile.recorded.records;
    let mut by_stream: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (at, record) in records.iter().enumerate() {
        by_stream.entry(record.stream).or_default().push(at);
    }
    let mut titles = Vec::new();
    let mut of_record = vec![0; records.len()];
    for (stream, mut of_stream) in by_stream {
        of_stream.sort_by_key(|&at| (records[at].start_ns, records[at].end_ns));
        let base = titles.len();
        // End of the last record of each track.
        let mut ends: Vec<u64> = Vec::new();
        for at in of_stream {
            let track = ends.iter().position(|end| *end <= records[at].start_ns).unwrap_or(ends.len());
            let end = records[at].end_ns.max(records[at].start_ns);
            if track == ends.len() {
                ends.push(end);
            } else {
                ends[track] = end;
            }
            of_record[at] = base + track;
        }
        titles.extend((0..ends.len()).map(|track| match track {
            0 => format!("stream {stream}"),
            more => format!("stream {stream}, beside it ({more})"),
        }));
    }
    (titles, of_record)
}
