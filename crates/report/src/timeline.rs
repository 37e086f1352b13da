//! A picture of who does what when: one row per role, one bar per section.

use std::collections::BTreeSet;

use super::chart::{Drawing, LETTER, WIDE_LETTER, tick, whole_file};
use super::svg::{Anchor, Svg, steps};

/// A section in a row.
#[derive(Clone, Debug)]
pub struct Span {
    /// What is done.
    pub name: &'static str,
    /// When it begins and ends.
    pub time: (f64, f64),
    /// What is shown on pointing at it.
    pub words: String,
}

/// How sections of a name look: the number of the colour, and whether it is pale, as for waiting.
pub type Look = fn(&str) -> (usize, bool);

/// A timeline.
pub struct Timeline {
    /// What it shows.
    pub title: String,
    /// The unit of time.
    pub unit: String,
    /// The times at its edges.
    pub time: (f64, f64),
    /// The rows: a name, and its sections in order.
    pub rows: Vec<(String, Vec<Span>)>,
    /// How sections look.
    pub look: Look,
}

const WIDTH: f64 = 980.0;
const ROW: f64 = 30.0;
const BAR: f64 = 22.0;
/// The narrowest bar that is drawn.
const NARROWEST: f64 = 0.15;

impl Timeline {
    /// As a file of its own, which says where it is from.
    pub fn file(&self, source: &str) -> String {
        whole_file(&self.draw(), source)
    }

    fn class(&self, name: &str) -> String {
        let (colour, pale) = (self.look)(name);
        format!("m s{colour}{}", if pale { " thin" } else { "" })
    }

    fn draw(&self) -> Drawing {
        let mut svg = Svg::default();
        svg.text((12.0, 18.0), Anchor::Start, "title", &self.title);
        let top = self.legend(&mut svg) + 8.0;
        let letters = self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let (left, right) = (20.0 + letters as f64 * WIDE_LETTER, WIDTH - 16.0);
        let bottom = top + self.rows.len() as f64 * ROW;
        let (from, to) = self.time;
        let x = |time: f64| left + (right - left) * (time - from) / (to - from);
        for step in steps(to - from, 8).into_iter().filter(|step| *step <= (to - from) * 1.0001) {
            svg.line((x(from + step), top), (x(from + step), bottom), "grid");
            svg.text((x(from + step), bottom + 14.0), Anchor::Middle, "tick", &tick(step));
        }
        svg.text((f64::midpoint(left, right), bottom + 29.0), Anchor::Middle, "axis", &self.unit);
        for (row, (name, spans)) in self.rows.iter().enumerate() {
            let y = top + row as f64 * ROW + (ROW - BAR) / 2.0;
            svg.text((left - 8.0, y + BAR / 2.0 + 4.0), Anchor::End, "place", name);
            for span in spans {
                let (begin, end) = (x(span.time.0.max(from)), x(span.time.1.min(to)));
                let width = end - begin;
                if width < NARROWEST {
                    continue;
                }
                svg.bar((begin, y), (width, BAR), &self.class(span.name), &span.words);
                if width > 4.0 + span.name.chars().count() as f64 * LETTER {
                    let class = if (self.look)(span.name).1 { "value" } else { "value paper" };
                    let middle = (f64::midpoint(begin, end), y + BAR / 2.0 + 3.5);
                    svg.text(middle, Anchor::Middle, class, span.name);
                }
            }
        }
        let size = (WIDTH, bottom + 38.0);
        Drawing { svg, size, title: self.title.clone(), description: self.describe() }
    }

    /// The names that occur, in the order of their colours.
    fn names(&self) -> Vec<&'static str> {
        let spans = self.rows.iter().flat_map(|(_, spans)| spans);
        let names: BTreeSet<_> = spans.map(|span| ((self.look)(span.name), span.name)).collect();
        names.into_iter().map(|(_, name)| name).collect()
    }

    /// Draws what colour is what, and returns where that ends.
    fn legend(&self, svg: &mut Svg) -> f64 {
        let (mut x, mut y) = (12.0, 30.0);
        for name in self.names() {
            let needs = 26.0 + name.chars().count() as f64 * LETTER;
            if x + needs > WIDTH - 12.0 {
                (x, y) = (12.0, y + 17.0);
            }
            svg.bar((x, y), (11.0, 11.0), &self.class(name), name);
            svg.text((x + 16.0, y + 10.0), Anchor::Start, "label", name);
            x += needs;
        }
        y + 14.0
    }

    fn describe(&self) -> String {
        let row = |(name, spans): &(String, Vec<Span>)| {
            let mut totals: Vec<(&str, f64)> = Vec::new();
            for span in spans {
                let took = span.time.1.min(self.time.1) - span.time.0.max(self.time.0);
                match totals.iter_mut().find(|(of, _)| *of == span.name) {
                    Some((_, total)) => *total += took,
                    None => totals.push((span.name, took)),
                }
            }
            totals.sort_by(|a, b| b.1.total_cmp(&a.1));
            let totals: Vec<String> =
                totals.iter().take(3).map(|(of, total)| format!("{of} {total:.2}")).collect();
            format!("{name}: {}", totals.join(", "))
        };
        let rows: Vec<String> = self.rows.iter().map(row).collect();
        format!("{}. What each role does most, in {}: {}.", self.title, self.unit, rows.join("; "))
    }
}
