//! Text of the page: escaping, tables, and the style sheet.

use crate::report::columns::number;
use std::fmt::Write;

/// Digits of a figure as shown; the whole one is in the table cell's `value`.
const SHOWN_DIGITS: i32 = 5;

/// Everything that comes from a file goes through here.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Illegal in HTML; a line's end is a blank there.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// [`escape`], with options (`--max_time`) as code that is not broken at their hyphens.
pub fn prose(text: &str) -> String {
    let word = |word: &str| {
        let bare = word.trim_matches(|c: char| "().,;".contains(c));
        let escaped = escape(word);
        if !bare.starts_with("--") {
            return escaped;
        }
        let bare = escape(bare);
        escaped.replacen(&bare, &format!("<code>{bare}</code>"), 1)
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// A figure in five digits.
pub fn shown(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        return number(x);
    }
    let digits = (SHOWN_DIGITS - 1 - x.abs().log10().floor() as i32).clamp(0, 9);
    let factor = 10f64.powi(digits);
    number((x * factor).round() / factor)
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    Text(String),
    /// A cell of a file, whole.
    Number(String),
    /// Computed here.
    Figure(f64),
    Empty,
}

impl Cell {
    /// A number's cell of a file.
    pub fn of(cell: &str) -> Self {
        if cell.is_empty() { Cell::Empty } else { Cell::Number(cell.to_owned()) }
    }

    pub fn text(text: impl Into<String>) -> Self {
        Cell::Text(text.into())
    }

    pub fn maybe(x: Option<f64>) -> Self {
        x.map_or(Cell::Empty, Cell::Figure)
    }

    fn html(&self) -> String {
        let data = |whole: &str, x: f64| {
            format!("<td class=n><data value=\"{}\">{}</data></td>", escape(whole), shown(x))
        };
        match self {
            Cell::Text(text) => format!("<td>{}</td>", escape(text)),
            Cell::Number(whole) => match whole.parse() {
                Ok(x) => data(whole, x),
                Err(_) => format!("<td>{}</td>", escape(whole)),
            },
            Cell::Figure(x) => data(&number(*x), *x),
            Cell::Empty => "<td class=e>–</td>".into(),
        }
    }
}

/// A table with the figures of a picture.
#[derive(Debug, Default)]
pub struct Table {
    /// Says which figures these are, for readers of the page and of its source.
    pub name: &'static str,
    pub head: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    pub fn new(name: &'static str, head: &[&str]) -> Self {
        Table { name, head: head.iter().map(|h| (*h).to_owned()).collect(), rows: vec![] }
    }

    pub fn html(&self) -> String {
        let mut text = format!(
            "<div class=scroll tabindex=0 role=region aria-label=\"table: {0}\"><table data-table=\"{0}\"{1}><thead><tr>",
            escape(self.name),
            if self.head.first().is_some_and(|h| h == "run") { " class=named" } else { "" }
        );
        for head in &self.head {
            let _ = write!(text, "<th scope=col>{}</th>", escape(head));
        }
        text += "</tr></thead><tbody>\n";
        for row in &self.rows {
            text += "<tr>";
            row.iter().for_each(|cell| text += &cell.html());
            text += "</tr>\n";
        }
        text + "</tbody></table></div>\n"
    }
}

/// The page's look: one column, black on white; two sizes of every picture, of which one is shown; a printed page
/// keeps pictures whole and shows the tables in full.
pub const STYLE: &str = "
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:800px;font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;color:#1a1a1a;background:#fff;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0}
h2{font-size:1.25rem;line-height:1.3;margin:2em 0 .4em;border-top:2px solid #1a1a1a;padding-top:.5em}
h3{font-size:1.05rem;margin:1.6em 0 .3em}
p,ul{margin:.5em 0}
ul{padding-left:1.3em}
li{margin:.35em 0}
.what{color:#444}
.verdict{border:2px solid #1a1a1a;border-radius:6px;padding:.6em 1em;margin:1em 0}
.verdict h2{border:0;margin:.2em 0;padding:0}
.word{font-weight:700}
figure{margin:.6em 0}
figure svg{display:block;max-width:100%;height:auto}
.narrow{display:none}
.narrow svg{width:100%;max-width:440px}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;padding:0;margin:.3em 0;font-size:.9rem}
.legend li{display:flex;align-items:center;gap:6px;margin:0}
.legend svg{flex:none}
.note{font-size:.9rem;color:#333;margin:.3em 0}
.scroll{overflow-x:auto;margin:.4em 0 1em}
table{border-collapse:collapse;font-size:.86rem;line-height:1.35;overflow-wrap:normal}
th,td{border-bottom:1px solid #c8c8c8;padding:3px 10px 3px 0;text-align:left;vertical-align:top}
th{border-bottom:2px solid #1a1a1a;vertical-align:bottom;font-weight:600}
.named td:first-child{min-width:9em}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.e{text-align:right;color:#555}
code{font-size:.92em;white-space:nowrap}
@media (max-width:640px){.wide{display:none}.narrow{display:block}body{padding:12px}}
@media print{
@page{margin:14mm 12mm}
body{max-width:none;padding:0;font-size:10pt}
.wide{display:block!important}.narrow{display:none!important}
figure,tr,.verdict{break-inside:avoid}
h2,h3,.what,.legend{break-after:avoid}
.scroll{overflow:visible}
table{font-size:7.5pt}
th,td{padding-right:6px}
.named td:first-child{min-width:0}
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_shown_in_five_digits_and_kept_whole() {
        assert_eq!(
            Cell::of("1462.69793").html(),
            "<td class=n><data value=\"1462.69793\">1462.7</data></td>"
        );
        assert_eq!(shown(143155.9375), "143156");
        assert_eq!(shown(0.000123456), "0.00012346");
        assert_eq!(shown(0.0), "0");
        assert_eq!(Cell::of("").html(), "<td class=e>–</td>");
    }

    #[test]
    fn nothing_from_a_file_is_markup() {
        assert_eq!(prose("<i> (--a_b). x"), "&lt;i&gt; (<code>--a_b</code>). x");
        assert_eq!(escape("<a href='x'>\"&\u{0}"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp; ");
    }
}
