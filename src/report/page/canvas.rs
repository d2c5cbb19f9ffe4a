//! A small drawing surface over plotters' SVG backend: marks, lines, text and axes in pixels of the page.

use plotters::coord::Shift;
use plotters::element::{Drawable, PointCollection};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A picture is drawn twice, for a window and for a phone; the page shows the one that fits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    pub width: f64,
    /// Class of the picture in the page's style sheet.
    pub class: &'static str,
}

/// The wide one fits the text's column and a printed page (A4 and letter) as it is; the narrow one a phone of 375
/// pixels with its margins.
pub const SIZES: [Size; 2] = [Size { width: 760.0, class: "wide" }, Size { width: 344.0, class: "narrow" }];

/// Height of text in pixels, of either picture.
pub const TEXT: f64 = 13.0;
/// Width of a character as a part of its height: of a wide sans serif, so that no text is longer than reckoned.
const CHAR: f64 = 0.62;
/// plotters places whole pixels only: drawing larger and showing smaller gives quarters of one.
const SCALE: f64 = 4.0;
/// What plotters divides the height of a font by.
const FONT_FACTOR: f64 = 1.24;

/// Colours of Okabe and Ito (2008), which colour-blind readers tell apart; shapes differ beside them.
pub const BLUE: RGBColor = RGBColor(0, 114, 178);
pub const VERMILLION: RGBColor = RGBColor(213, 94, 0);
pub const GREEN: RGBColor = RGBColor(0, 158, 115);
pub const PURPLE: RGBColor = RGBColor(204, 121, 167);
pub const INK: RGBColor = RGBColor(26, 26, 26);
pub const GREY: RGBColor = RGBColor(110, 110, 110);
pub const GRID: RGBColor = RGBColor(214, 214, 214);
pub const SHADE: RGBColor = RGBColor(232, 232, 232);
/// Of what is shaded in part.
pub const SHADE_LIGHT: RGBColor = RGBColor(243, 243, 243);
pub const SHADE_DARK: RGBColor = RGBColor(208, 208, 208);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Circle,
    Diamond,
    Square,
    Cross,
}

/// How a series is told apart: by colour and by shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Look {
    pub color: RGBColor,
    pub shape: Shape,
    /// Hollow marks are in no statistic, or have no interval.
    pub filled: bool,
    pub dashed: bool,
    /// A bar of this fill in legends, not a mark.
    pub bar: Option<Fill>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    Solid,
    Hatched,
    Hollow,
}

impl Look {
    pub const fn new(color: RGBColor, shape: Shape) -> Self {
        Look { color, shape, filled: true, dashed: false, bar: None }
    }

    /// Of the first and the second side.
    pub const fn side(at: usize) -> Self {
        match at {
            0 => Look::new(BLUE, Shape::Circle),
            _ => Look { dashed: true, ..Look::new(VERMILLION, Shape::Diamond) },
        }
    }

    pub const fn hollow(self) -> Self {
        Look { filled: false, ..self }
    }

    pub const fn bar(self, fill: Fill) -> Self {
        Look { bar: Some(fill), ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Middle,
    Right,
}

pub struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
    failed: bool,
}

/// An SVG of this size in pixels of the page.
pub fn draw(width: f64, height: f64, paint: impl FnOnce(&mut Canvas)) -> String {
    let mut svg = String::new();
    let failed = {
        let size = ((width * SCALE).ceil() as u32, (height * SCALE).ceil() as u32);
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut canvas = Canvas { area, failed: false };
        paint(&mut canvas);
        canvas.failed |= canvas.area.present().is_err();
        canvas.failed
    };
    if failed {
        return "<p>This picture could not be drawn; its figures are in the table.</p>".into();
    }
    // What is so anyway, left out; text cannot hold a bare quotation mark.
    svg = svg.replace(" opacity=\"1\"", "").replace(" stroke=\"none\"", "");
    svg.replacen(
        &format!("width=\"{}\" height=\"{}\"", (width * SCALE).ceil(), (height * SCALE).ceil()),
        &format!("width=\"{width}\" height=\"{height}\" aria-hidden=\"true\""),
        1,
    )
}

/// A mark as a legend shows it.
pub fn swatch(look: Look) -> String {
    draw(18.0, 14.0, |c| match look.bar {
        Some(fill) => c.bar((1.0, 2.0), (17.0, 12.0), look.color, fill),
        None => c.mark((9.0, 7.0), 4.5, look),
    })
}

/// Width of a text in pixels, rather too much than too little.
pub fn text_width(text: &str, height: f64) -> f64 {
    text.chars().count() as f64 * height * CHAR
}

/// Characters that may stand in a picture: control characters are illegal in SVG.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Lines of at most `width` pixels, broken after blanks and after signs that join names; a longer word is cut up.
pub fn wrap(text: &str, width: f64, height: f64) -> Vec<String> {
    let most = ((width / (height * CHAR)) as usize).max(1);
    let (mut lines, mut line, mut count) = (Vec::new(), String::new(), 0);
    let text = plain(text);
    for word in text.split_inclusive([' ', '+', '_', ',', '/']) {
        for c in word.chars().collect::<Vec<_>>().chunks(most) {
            if count + c.len() > most {
                lines.push(std::mem::take(&mut line));
                count = 0;
            }
            line.extend(c);
            count += c.len();
        }
    }
    lines.push(line);
    lines.into_iter().map(|l| l.trim_end().to_owned()).collect()
}

fn at((x, y): (f64, f64)) -> (i32, i32) {
    ((x * SCALE).round() as i32, (y * SCALE).round() as i32)
}

impl<'a> Canvas<'a> {
    fn put<E>(&mut self, element: E)
    where
        for<'b> &'b E: PointCollection<'b, (i32, i32)>,
        E: Drawable<SVGBackend<'a>>,
    {
        self.failed |= self.area.draw(&element).is_err();
    }

    pub fn rect(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor) {
        self.put(Rectangle::new([at(from), at(to)], color.filled()));
    }

    /// A bar that is told apart without its colour.
    pub fn bar(&mut self, from: (f64, f64), to: (f64, f64), color: RGBColor, fill: Fill) {
        if fill == Fill::Solid {
            return self.rect(from, to, color);
        }
        if fill == Fill::Hatched {
            const GAP: f64 = 4.0;
            let height = to.1 - from.1;
            let mut x = from.0;
            while x < to.0 {
                let end = (x + height).min(to.0);
                self.line(&[(x, to.1), (end, to.1 - (end - x))], color, 1.0, false);
                x += GAP;
            }
        }
        let corners = [from, (to.0, from.1), to, (from.0, to.1), from];
        self.line(&corners, color, 1.25, false);
    }

    pub fn line(&mut self, points: &[(f64, f64)], color: RGBColor, width: f64, dashed: bool) {
        let style = color.stroke_width((width * SCALE).round() as u32);
        if !dashed {
            let points: Vec<(i32, i32)> = points.iter().copied().map(at).collect();
            return self.put(PathElement::new(points, style));
        }
        const DASH: f64 = 6.0;
        for pair in points.windows(2) {
            let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
            let length = (x1 - x0).hypot(y1 - y0);
            let along = |d: f64| (x0 + (x1 - x0) * d / length, y0 + (y1 - y0) * d / length);
            let mut d = 0.0;
            while d < length {
                let dash = [at(along(d)), at(along((d + DASH * 0.6).min(length)))];
                self.put(PathElement::new(dash.to_vec(), style));
                d += DASH;
            }
        }
    }

    pub fn mark(&mut self, (x, y): (f64, f64), radius: f64, look: Look) {
        let style = |filled: bool| {
            if filled { look.color.filled() } else { look.color.stroke_width((1.25 * SCALE) as u32) }
        };
        let outline = |points: &[(f64, f64)]| {
            points.iter().map(|(dx, dy)| at((x + dx * radius, y + dy * radius))).collect::<Vec<_>>()
        };
        let points: &[(f64, f64)] = match look.shape {
            Shape::Circle => {
                return self.put(Circle::new(at((x, y)), (radius * SCALE) as i32, style(look.filled)));
            }
            Shape::Cross => {
                for points in [[(-1.0, -1.0), (1.0, 1.0)], [(-1.0, 1.0), (1.0, -1.0)]] {
                    self.put(PathElement::new(
                        outline(&points),
                        look.color.stroke_width((2.0 * SCALE) as u32),
                    ));
                }
                return;
            }
            Shape::Diamond => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0), (0.0, -1.3)],
            Shape::Square => &[(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0)],
        };
        if look.filled {
            self.put(Polygon::new(outline(points), style(true)));
        } else {
            self.put(PathElement::new(outline(points), style(false)));
        }
    }

    /// Text whose middle stands at the height of `y`.
    pub fn text(&mut self, text: &str, (x, y): (f64, f64), color: RGBColor, align: Align) {
        self.text_of(text, (x, y), color, align, false);
    }

    pub fn bold(&mut self, text: &str, at: (f64, f64)) {
        self.text_of(text, at, INK, Align::Left, true);
    }

    fn text_of(&mut self, text: &str, place: (f64, f64), color: RGBColor, align: Align, bold: bool) {
        let h = match align {
            Align::Left => HPos::Left,
            Align::Middle => HPos::Center,
            Align::Right => HPos::Right,
        };
        let font = ("sans-serif", TEXT * FONT_FACTOR * SCALE).into_font();
        let font = if bold { font.style(FontStyle::Bold) } else { font };
        let style = font.color(&color).pos(Pos::new(h, VPos::Center));
        self.failed |= self.area.draw_text(&plain(text), &style, at(place)).is_err();
    }
}

/// From values to pixels.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    low: f64,
    high: f64,
    pixels: (f64, f64),
    log: bool,
}

/// Ends of what a scale spans: nothing that is measured lies outside, and arithmetic on a scale neither overflows nor
/// vanishes inside.
const LEAST: f64 = 1e-12;
const MOST: f64 = 1e100;
/// A range that is a smaller part of its values than this has fewer doubles in it than ticks.
const LEAST_PART: f64 = 1e-12;

/// A value that a scale can begin or end with.
fn drawable(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x.clamp(-MOST, MOST) }
}

impl Scale {
    /// `pixels` may run backwards; an empty range is widened, and so is one that is too narrow to be told apart.
    pub fn new(low: f64, high: f64, pixels: (f64, f64)) -> Self {
        let (low, high) = (drawable(low), drawable(high));
        let pad = match low {
            _ if high - low > (low.abs().max(high.abs()) * LEAST_PART).max(LEAST) => 0.0,
            _ if low.abs() < LEAST => 1.0,
            _ => low.abs() * 0.05,
        };
        Scale { low: low - pad, high: high.max(low) + pad, pixels, log: false }
    }

    /// Over powers of ten; the range must be above 0.
    pub fn log(low: f64, high: f64, pixels: (f64, f64)) -> Self {
        let (low, high) = (drawable(low).max(LEAST), drawable(high));
        Scale { low, high: high.max(low * 1.1), pixels, log: true }
    }

    pub fn at(&self, x: f64) -> f64 {
        let part = if self.log {
            (x / self.low).ln() / (self.high / self.low).ln()
        } else {
            (x - self.low) / (self.high - self.low)
        };
        self.pixels.0 + (self.pixels.1 - self.pixels.0) * part.clamp(0.0, 1.0)
    }

    pub fn holds(&self, x: f64) -> bool {
        x >= self.low && x <= self.high
    }

    /// A round step for about so many ticks, and the first and last of its multiples.
    fn steps(&self, ticks: f64) -> (f64, i64, i64) {
        let rough = (self.high - self.low) / ticks;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * magnitude).into_iter().find(|s| *s >= rough * 0.999);
        let step = step.unwrap_or(magnitude * 10.0);
        (step, (self.low / step).ceil() as i64, (self.high / step).floor() as i64)
    }

    /// Round values with their labels, at most `most` (at least 2).
    pub fn ticks(&self, most: usize) -> Vec<(f64, String)> {
        if self.log {
            let (first, last) = (self.low.log10().ceil() as i32, self.high.log10().floor() as i32);
            let mut values: Vec<f64> = (first..=last).map(|e| 10f64.powi(e)).collect();
            if values.len() < 2 {
                values = (first - 1..=last)
                    .flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e)))
                    .filter(|v| self.holds(*v))
                    .collect();
            }
            if values.is_empty() {
                // Between two neighbours of 1, 2, 5: the ends.
                values = vec![self.low, self.high];
            }
            let every = values.len().div_ceil(most.max(2));
            return values.into_iter().step_by(every).map(|v| (v, super::html::shown(v))).collect();
        }
        // A wide step may leave a single tick: a finer one then.
        let finer = [1.0, 2.0, 4.0].map(|f| self.steps(most.max(2) as f64 * f));
        let found = finer.iter().find(|(_, first, last)| last > first).unwrap_or(&finer[2]);
        let (step, first, last) = *found;
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        (first..=last)
            .take(most.max(2) + 2)
            .map(|i| (i as f64 * step, format!("{:.decimals$}", i as f64 * step)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_few_and_inside() {
        for (low, high) in [(0.0, 1.0), (107.9, 113.0), (0.0, 83774.6), (-3.0, 0.2), (1e-9, 2e-9), (5.0, 5.0)]
        {
            for most in [2, 4, 7] {
                let scale = Scale::new(low, high, (0.0, 100.0));
                let ticks = scale.ticks(most);
                assert!((1..=most + 2).contains(&ticks.len()), "{low} {high} {most}: {ticks:?}");
                assert!(ticks.iter().all(|(v, _)| scale.at(*v) >= 0.0 && scale.at(*v) <= 100.0));
                let mut labels: Vec<&String> = ticks.iter().map(|(_, l)| l).collect();
                labels.dedup();
                assert_eq!(labels.len(), ticks.len(), "{ticks:?}");
            }
        }
        // Whatever a file holds: finite ticks with labels, and every value somewhere on the axis.
        let odd = [
            5e-324,
            -5e-324,
            f64::MIN_POSITIVE,
            1e-300,
            1e300,
            f64::MAX,
            f64::MIN,
            1e9,
            1e9 + 1e-7,
            0.0,
            f64::NAN,
        ];
        for (low, high) in odd.iter().flat_map(|low| odd.map(|high| (*low, high))) {
            for scale in [Scale::new(low, high, (0.0, 100.0)), Scale::log(low, high, (0.0, 100.0))] {
                let ticks = scale.ticks(5);
                assert!(
                    ticks.len() <= 7 && ticks.iter().all(|(v, _)| v.is_finite()),
                    "{low} {high}: {ticks:?}"
                );
                let on = |x: f64| (0.0..=100.0).contains(&scale.at(x));
                assert!(
                    ticks.iter().all(|(v, _)| on(*v)) && on(5e-324) && on(f64::MAX),
                    "{low} {high}: {ticks:?}"
                );
            }
        }
        assert!(Scale::log(0.3, 4000.0, (0.0, 1.0)).ticks(4).len() >= 2);
        assert!(Scale::log(3.0, 4.0, (0.0, 1.0)).ticks(4).len() <= 4);
    }

    #[test]
    fn lines_fit_and_lose_nothing() {
        let text = "transformer_engine attn+moe_router+moe_preprocess, a_very_long_name_without_any_end";
        let lines = wrap(text, 100.0, TEXT);
        assert!(lines.iter().all(|l| text_width(l, TEXT) <= 100.0), "{lines:?}");
        assert_eq!(lines.concat().replace(' ', ""), text.replace(' ', ""));
    }

    #[test]
    fn text_in_a_picture_is_escaped() {
        let svg = draw(50.0, 20.0, |c| c.text("<b>&\"\u{1}\"", (0.0, 10.0), INK, Align::Left));
        assert!(svg.contains("&lt;b&gt;&amp;&quot; &quot;"), "{svg}");
    }
}
