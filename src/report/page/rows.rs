//! Pictures of one line a figure: a name on the left, the figure as a mark with its interval or as a bar, and its text
//! on the right, so that no label meets another.

use super::canvas::{
    Align, Canvas, Fill, GREY, GRID, INK, Look, SHADE, SIZES, Scale, Size, TEXT, draw, text_width, wrap,
};

use plotters::style::WHITE;

/// Height of a line of text or of a figure.
const LINE: f64 = 19.0;
/// Space above a row's label, and at the picture's edges.
const GAP: f64 = 7.0;
/// Least width of the plot; names and figures are never given so much that less is left.
const LEAST_PLOT: f64 = 90.0;

/// What the figures are drawn as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Marks with intervals on an axis that need not begin at 0.
    Marks,
    /// Bars from 0.
    Bars,
}

#[derive(Debug)]
pub struct RowPlot {
    pub kind: Kind,
    /// What the axis counts, with its unit.
    pub axis: String,
    /// A value that a line is drawn at, and a band around it: no difference, and the margin.
    pub no_change: Option<(f64, f64)>,
    pub rows: Vec<Row>,
}

/// A labelled group of lines; without any it is a heading.
#[derive(Debug, Clone)]
pub struct Row {
    pub label: String,
    pub lines: Vec<Line>,
}

#[derive(Debug, Clone)]
pub struct Line {
    pub name: String,
    pub look: Look,
    pub value: Option<f64>,
    pub interval: Option<(f64, f64)>,
    /// Part of a bar that is added behind `value`, hatched.
    pub added: f64,
    /// The figure in words.
    pub text: String,
}

impl RowPlot {
    /// Both sizes.
    pub fn svg(&self) -> [String; 2] {
        SIZES.map(|size| self.draw(size))
    }

    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        !self.rows.iter().flat_map(|r| &r.lines).any(|l| l.value.is_some())
    }

    fn draw(&self, size: Size) -> String {
        let labels: Vec<Vec<String>> =
            self.rows.iter().map(|r| wrap(&r.label, size.width * 0.95, TEXT)).collect();
        let lines: usize = self.rows.iter().map(|r| r.lines.len()).sum();
        let label_lines: usize = labels.iter().filter(|l| !is_blank(l)).map(Vec::len).sum();
        let body = (lines + label_lines) as f64 * LINE + self.rows.len() as f64 * GAP;
        let axis = wrap(&self.axis, size.width, TEXT);
        let height = body + GAP + LINE + axis.len() as f64 * LINE;
        let most = |text: fn(&Line) -> &str| {
            let lines = self.rows.iter().flat_map(|r| &r.lines);
            lines.map(|l| text_width(text(l), TEXT)).fold(0.0, f64::max)
        };
        let names = most(|l| &l.name) + 8.0;
        let texts = most(|l| &l.text) + 8.0;
        let left = names.min(size.width - LEAST_PLOT - texts).max(8.0);
        let right = (size.width - texts).max(left + LEAST_PLOT);
        let scale = self.scale((left + 6.0, right - 10.0));
        draw(size.width, height, |c| {
            self.ground(c, &scale, (left, right, body), &axis, size.width);
            let mut y = GAP;
            for (row, label) in self.rows.iter().zip(&labels) {
                if !is_blank(label) {
                    for text in label {
                        c.rect((0.0, y), (size.width, y + LINE), WHITE);
                        c.bold(text, (0.0, y + LINE / 2.0));
                        y += LINE;
                    }
                }
                if row.lines.is_empty() {
                    // A heading.
                    c.rect((0.0, y), (size.width, y + GAP), WHITE);
                    c.line(&[(0.0, y), (size.width, y)], INK, 0.75, false);
                }
                for line in &row.lines {
                    let middle = y + LINE / 2.0;
                    c.text(&line.name, (0.0, middle), INK, Align::Left);
                    c.text(&line.text, (size.width, middle), INK, Align::Right);
                    self.figure(c, &scale, line, middle);
                    y += LINE;
                }
                y += GAP;
            }
        })
    }

    fn scale(&self, pixels: (f64, f64)) -> Scale {
        let lines = self.rows.iter().flat_map(|r| &r.lines);
        let mut values: Vec<f64> = lines
            .flat_map(|l| [l.value.map(|v| v + l.added), l.interval.map(|i| i.0), l.interval.map(|i| i.1)])
            .flatten()
            .collect();
        if self.kind == Kind::Bars {
            values.push(0.0);
        }
        if let Some((at, margin)) = self.no_change {
            values.extend([at - margin * 1.5, at + margin * 1.5]);
        }
        if self.kind == Kind::Marks {
            // No mark lies on the edge.
            let (low, high) = ends(&values);
            let pad = (high - low) * 0.04;
            values.extend([low - pad, high + pad]);
        }
        let (low, high) = ends(&values);
        if low.is_finite() && high.is_finite() {
            Scale::new(low, high, pixels)
        } else {
            Scale::new(0.0, 1.0, pixels)
        }
    }

    /// Grid, band, axis.
    fn ground(
        &self,
        c: &mut Canvas,
        scale: &Scale,
        (left, right, body): (f64, f64, f64),
        axis: &[String],
        width: f64,
    ) {
        if let Some((at, margin)) = self.no_change {
            c.rect((scale.at(at - margin), GAP), (scale.at(at + margin), body), SHADE);
        }
        let bottom = body + GAP;
        let mut free_from = f64::NEG_INFINITY;
        for (value, label) in scale.ticks(((right - left) / 90.0) as usize) {
            let (x, half) = (scale.at(value), text_width(&label, TEXT) / 2.0);
            c.line(&[(x, GAP), (x, bottom)], GRID, 0.75, false);
            // The label stays inside the picture, and clear of its neighbour.
            let middle = x.clamp(half, (width - half).max(half));
            if middle - half > free_from {
                c.text(&label, (middle, bottom + LINE / 2.0), INK, Align::Middle);
                free_from = middle + half + 6.0;
            }
        }
        if let Some((at, _)) = self.no_change {
            c.line(&[(scale.at(at), GAP), (scale.at(at), bottom)], GREY, 1.5, true);
        }
        c.line(&[(left, bottom), (right, bottom)], INK, 1.0, false);
        for (at, text) in axis.iter().enumerate() {
            let y = bottom + LINE * (1.5 + at as f64);
            c.text(text, (width, y), INK, Align::Right);
        }
    }

    fn figure(&self, c: &mut Canvas, scale: &Scale, line: &Line, y: f64) {
        let Some(value) = line.value.filter(|v| self.kind == Kind::Marks || *v > 0.0) else { return };
        const HALF: f64 = 6.0;
        match self.kind {
            Kind::Bars => {
                let fill = line.look.bar.unwrap_or(Fill::Solid);
                let end = scale.at(value);
                c.bar(
                    (scale.at(0.0), y - HALF),
                    (end.max(scale.at(0.0) + 1.0), y + HALF),
                    line.look.color,
                    fill,
                );
                if line.added > 0.0 {
                    let added = scale.at(value + line.added).max(end + 2.0);
                    c.bar((end, y - HALF), (added, y + HALF), line.look.color, Fill::Hatched);
                }
            }
            Kind::Marks => {
                if let Some((low, high)) = line.interval {
                    let (low, high) = (scale.at(low), scale.at(high));
                    c.line(&[(low, y), (high, y)], line.look.color, 2.0, false);
                    for x in [low, high] {
                        c.line(&[(x, y - 4.0), (x, y + 4.0)], line.look.color, 2.0, false);
                    }
                }
                c.mark((scale.at(value), y), 4.5, line.look);
            }
        }
    }
}

fn ends(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)))
}

fn is_blank(label: &[String]) -> bool {
    label.iter().all(String::is_empty)
}
