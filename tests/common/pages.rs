//! Pages of `mbperf report` read back, and steps files made up for them.

use super::binary::{run, text};
use std::fmt::Write;
use std::path::Path;

pub struct Page {
    pub html: String,
}

/// The page of these files (words of a command line).
pub fn page(dir: &Path, files: &str) -> Page {
    let output = run(dir, &format!("report {files} -o -"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    Page { html: text(&output.stdout) }
}

/// What stands between two marks, and the rest.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<(&'a str, &'a str)> {
    let start = text.find(from)? + from.len();
    let end = start + text[start..].find(to)?;
    Some((&text[start..end], &text[end..]))
}

fn unescaped(text: &str) -> String {
    // Places where a line may break are no text.
    text.replace("<wbr>", "")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&#39;", "'")
        .replace("&amp;", "&")
}

impl Page {
    /// Rows of every table of this name, in the order of the page: whole figures, and text.
    pub fn table(&self, name: &str) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        let mut rest = self.html.as_str();
        while let Some((table, more)) = between(rest, &format!("data-table=\"{name}\""), "</table>") {
            let (_, mut body) = table.split_once("<tbody>").unwrap();
            while let Some((row, more)) = between(body, "<tr>", "</tr>") {
                rows.push(row.split("<td").skip(1).map(cell).collect());
                body = more;
            }
            rest = more;
        }
        rows
    }

    /// Of every row, `count` cells after the first `skip`; sorted.
    pub fn cells(&self, name: &str, skip: usize, count: usize) -> Vec<Vec<String>> {
        let mut cells: Vec<Vec<String>> =
            self.table(name).iter().map(|r| r[skip..skip + count].to_vec()).collect();
        cells.sort();
        cells
    }

    /// No script, and nothing that a browser would fetch.
    pub fn needs_nothing(&self) {
        let html = self.html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for tag in
            ["<script", "<link", "<img", "<iframe", "<object", "<embed", "<a ", "@import", "url(", " onload="]
        {
            assert!(!html.contains(tag), "{tag}");
        }
        // Tags are closed, and text is escaped: as many ends as beginnings.
        for tag in ["svg", "table", "tr", "figure", "ul", "section", "h2", "h3", "p", "li", "div"] {
            let begun = html.matches(&format!("<{tag} ")).count() + html.matches(&format!("<{tag}>")).count();
            assert_eq!(begun, html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}

/// Text of a picture, in its pixels.
#[derive(Debug, Clone)]
pub struct Label {
    pub text: String,
    pub left: f64,
    pub right: f64,
    /// Of its middle.
    pub y: f64,
    pub height: f64,
}

/// Labels of every picture of the page, swatches of legends left out, with the picture's width and height.
pub fn pictures(html: &str) -> Vec<(f64, f64, Vec<Label>)> {
    let mut found = Vec::new();
    let mut rest = html;
    while let Some((svg, more)) = between(rest, "<svg ", "</svg>") {
        rest = more;
        let (size, _) = between(svg, "viewBox=\"0 0 ", "\"").unwrap();
        let (width, height) = size.split_once(' ').unwrap();
        let (mut labels, mut inner) = (Vec::new(), svg);
        while let Some((text, more)) = between(inner, "<text ", "</text>") {
            labels.push(label(text));
            inner = more;
        }
        found.push((width.parse().unwrap(), height.parse().unwrap(), labels));
    }
    found
}

/// What stands between `<text ` and its end. Widths are reckoned, as no browser is at hand.
fn label(text: &str) -> Label {
    /// Width of a digit in DejaVu Sans, a wide font, as a part of a font's height; text is narrower on the whole.
    const CHAR: f64 = 0.6;
    let (tag, text) = text.split_once('>').unwrap();
    let of = |name: &str| between(tag, &format!(" {name}=\""), "\"").map(|(value, _)| value);
    let number = |name: &str| of(name).unwrap().parse::<f64>().unwrap();
    let x = tag.strip_prefix("x=\"").unwrap().split('"').next().unwrap().parse::<f64>().unwrap();
    let (text, height) = (unescaped(text.trim()), number("font-size"));
    let width = text.chars().count() as f64 * height * CHAR;
    let left = match of("text-anchor") {
        Some("middle") => x - width / 2.0,
        Some("end") => x - width,
        _ => x,
    };
    Label { text, left, right: left + width, y: number("y"), height }
}

/// The whole figure of a cell (and that it is shown rounded and no otherwise), or its text.
fn cell(cell: &str) -> String {
    let (_, inner) = cell.split_once('>').unwrap();
    let inner = inner.strip_suffix("</td>").unwrap_or(inner);
    if inner == "–" {
        return String::new();
    }
    let Some((value, rest)) = between(inner, "<data value=\"", "\">") else { return unescaped(inner) };
    let (shown, _) = between(rest, "\">", "</data>").unwrap();
    let (whole, shown): (f64, f64) = (value.parse().unwrap(), shown.parse().unwrap());
    assert!((whole - shown).abs() <= whole.abs() * 5.01e-5, "{whole} is shown as {shown}");
    value.to_owned()
}

/// A steps file of `count` steady steps of one run, in blocks of fifty whose first is a switch when there are many.
pub fn steps_file(run_id: &str, count: usize) -> String {
    let header = mbperf::report::steps::COLUMNS.map(|(name, _)| name).join(",");
    let mut text = format!("{header}\r\n");
    for step in 0..count {
        let (block, switch) = (step / 50, step % 50 == 0 && count > 50);
        let (side, arm) = if block % 2 == 0 { ("a", "eager") } else { ("b", "graph") };
        let phase = if switch { "switch" } else { "steady" };
        let wall = 5.0 + (step * 7919 % 100) as f64 / 100.0;
        let wall = if step == 0 { 5.0 } else { wall };
        let _ = write!(text, "{run_id},{step},{side},{arm},{block},{phase},run_ahead,1,0,0,4,{wall},,\r\n");
    }
    text
}
