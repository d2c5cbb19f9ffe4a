//! A picture with its legend, its notes and the table of its figures.

use super::canvas::{Look, SIZES, swatch};
use super::html::{Table, escape};
use std::fmt::Write;

#[derive(Debug)]
pub struct Figure {
    pub title: String,
    /// What it shows, in a sentence.
    pub what: String,
    /// Wide and narrow; `None` when nothing can be drawn, which a note explains.
    pub svg: Option<[String; 2]>,
    pub legend: Vec<(Look, String)>,
    pub notes: Vec<String>,
    pub table: Table,
}

impl Figure {
    pub fn html(&self) -> String {
        // One block, which a printed page does not part.
        let mut text = format!("<div class=keep>\n<h3>{}</h3>\n", escape(&self.title));
        if !self.what.is_empty() {
            let _ = writeln!(text, "<p class=what>{}</p>", escape(&self.what));
        }
        if let Some(svg) = &self.svg {
            if !self.legend.is_empty() {
                text += "<ul class=legend>";
                for (look, name) in &self.legend {
                    let _ = write!(text, "<li>{}{}</li>", swatch(*look), escape(name));
                }
                text += "</ul>\n";
            }
            let label = format!("{}; its figures are in the table below", self.title);
            let _ = write!(text, "<figure role=img aria-label=\"{}\">", escape(&label));
            for (svg, size) in svg.iter().zip(SIZES) {
                let _ = write!(text, "<div class={}>{svg}</div>", size.class);
            }
            text += "</figure>\n";
        }
        for note in &self.notes {
            let _ = writeln!(text, "<p class=note>{}</p>", escape(note));
        }
        text += "</div>\n";
        if !self.table.rows.is_empty() {
            text += &self.table.html();
        }
        text
    }
}
