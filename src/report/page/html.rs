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
        if !bare.starts_with("--") && !["-ms", "-o"].contains(&bare) {
            return escaped;
        }
        let bare = escape(bare);
        escaped.replacen(&bare, &format!("<code>{bare}</code>"), 1)
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// [`escape`], with places where a joined name (`attn,moe_router`, `a+b`, a path) may be broken; what is read and
/// copied stays the same.
fn breakable(text: &str) -> String {
    const JOINS: [char; 3] = [',', '+', '/'];
    let pieces: Vec<String> = text.split_inclusive(JOINS).map(escape).collect();
    pieces.join("<wbr>")
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

    /// `head` is the column's, which stands before the cell where a row is stacked.
    fn html(&self, head: &str) -> String {
        let open = |class: &str| format!("<td{class} data-h=\"{}\">", escape(head));
        let data = |whole: &str, x: f64| {
            format!("{}<data value=\"{}\">{}</data></td>", open(" class=n"), escape(whole), shown(x))
        };
        match self {
            Cell::Text(text) => format!("{}{}</td>", open(""), breakable(text)),
            Cell::Number(whole) => match whole.parse() {
                Ok(x) => data(whole, x),
                Err(_) => format!("{}{}</td>", open(""), escape(whole)),
            },
            Cell::Figure(x) => data(&number(*x), *x),
            Cell::Empty => format!("{}–</td>", open(" class=e")),
        }
    }
}

/// First columns that name their row.
const NAMES: [&str; 3] = ["run", "scope", "part"];

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
            "<div class=scroll tabindex=0 role=region aria-label=\"table: {0}\"><table data-table=\"{0}\"{1}>\
             <thead><tr>",
            escape(self.name),
            if self.head.first().is_some_and(|h| NAMES.contains(&h.as_str())) { " class=named" } else { "" }
        );
        for head in &self.head {
            let _ = write!(text, "<th scope=col>{}</th>", escape(head));
        }
        text += "</tr></thead><tbody>\n";
        for row in &self.rows {
            text += "<tr>";
            let heads = self.head.iter().map(String::as_str).chain(std::iter::repeat(""));
            row.iter().zip(heads).for_each(|(cell, head)| text += &cell.html(head));
            text += "</tr>\n";
        }
        text + "</tbody></table></div>\n"
    }
}

/// The page's look: one column of text, black on white, beyond which wide tables reach; two sizes of every picture, of
/// which one is shown. A table that scrolls has a shadow at the side where more of it is. On a phone each row of a table
/// is a paragraph, its cells after their columns' names; so are the runs, with their commands, on a printed page, which
/// keeps pictures whole with what is said of them.
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
.scroll{overflow-x:auto;margin:.4em 0 1em 50%;transform:translateX(-50%);width:max-content;min-width:100%;max-width:calc(100vw - 48px);background:linear-gradient(to right,#fff 50%,#fff0) left/60px 100% no-repeat local,linear-gradient(to left,#fff 50%,#fff0) right/60px 100% no-repeat local,linear-gradient(to right,#0006,#0000) left 1px top/14px 100% no-repeat scroll,linear-gradient(to left,#0006,#0000) right 1px top/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.86rem;line-height:1.35;overflow-wrap:normal}
th,td{border-bottom:1px solid #c8c8c8;padding:3px 10px 3px 0;text-align:left;vertical-align:top}
th{border-bottom:2px solid #1a1a1a;vertical-align:bottom;font-weight:600}
.named td:first-child{min-width:9em;max-width:26em}
th{max-width:9em}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.e{text-align:right;color:#555}
code{font-size:.92em;white-space:nowrap}
@media screen and (min-width:641px){
[data-table=runs] td:nth-child(2),[data-table=runs] td:last-child{overflow-wrap:anywhere;min-width:7em}
[data-table=runs] td:last-child{min-width:12em;max-width:34em}
}
@media (max-width:640px){
.wide{display:none}.narrow{display:block}body{padding:12px}
.scroll{overflow:visible;margin:.4em 0 1em;transform:none;width:auto;max-width:none;background:none}
table,table tbody{display:block}
table thead{display:none}
table tr{display:flex;flex-wrap:wrap;gap:0 14px;border-bottom:1px solid #c8c8c8;padding:4px 0}
table td{display:block;border:0;padding:0;text-align:left;min-width:0;max-width:100%;overflow-wrap:anywhere}
table td::before{content:attr(data-h) ' ';color:#444}
table.named td:first-child{flex-basis:100%;font-weight:600;min-width:0;max-width:100%}
table.named td:first-child::before{content:none}
[data-table=sweep_scopes] td:nth-child(2){order:1}
}
@media print{
@page{margin:14mm 12mm}
body{max-width:none;padding:0;font-size:10pt}
.wide{display:block!important}.narrow{display:none!important}
.keep,figure,tr,.verdict li{break-inside:avoid}
h2,h3,.what,.legend,.before{break-after:avoid}
.scroll{overflow:visible;margin:.4em 0 1em;transform:none;width:auto;max-width:none;background:none}
table{font-size:7.5pt}
th,td{padding-right:6px}
.named td:first-child{min-width:0}
[data-table=runs],[data-table=runs] tbody{display:block}
[data-table=runs] thead{display:none}
[data-table=runs] tr{display:flex;flex-wrap:wrap;gap:0 14px;border-bottom:1px solid #c8c8c8;padding:4px 0}
[data-table=runs] td{display:block;border:0;padding:0;text-align:left;min-width:0;max-width:100%;overflow-wrap:anywhere}
[data-table=runs] td::before{content:attr(data-h) ' ';color:#444}
[data-table=runs].named td:first-child{flex-basis:100%;font-weight:600;min-width:0;max-width:100%}
[data-table=runs].named td:first-child::before{content:none}
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_shown_in_five_digits_and_kept_whole() {
        assert_eq!(
            Cell::of("1462.69793").html("ms"),
            "<td class=n data-h=\"ms\"><data value=\"1462.69793\">1462.7</data></td>"
        );
        assert_eq!(shown(143155.9375), "143156");
        assert_eq!(shown(0.000123456), "0.00012346");
        assert_eq!(shown(0.0), "0");
        assert_eq!(Cell::of("").html("a<b"), "<td class=e data-h=\"a&lt;b\">–</td>");
    }

    #[test]
    fn nothing_from_a_file_is_markup() {
        assert_eq!(prose("<i> (--a_b). x"), "&lt;i&gt; (<code>--a_b</code>). x");
        assert_eq!(Cell::text("a,<b>+c, d").html(""), "<td data-h=\"\">a,<wbr>&lt;b&gt;+<wbr>c,<wbr> d</td>");
        assert_eq!(escape("<a href='x'>\"&\u{0}"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp; ");
    }
}
