//! The charts of a report. Each draws numbers of evidence, says in words what it shows, and tells its contenders
//! apart by form and lightness as well as by hue.

use super::contender;
use super::source::{Number, Style};
use super::svg::{Anchor, Svg, decades, escape, steps};

/// The colours, for light and dark.
pub const PALETTE: &str = include_str!("palette.css");
/// How the parts of a chart look.
pub const LOOK: &str = include_str!("chart.css");

/// One contender in a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the evidence.
    pub name: String,
    /// Where it was measured, by the index on the axis, and what.
    pub points: Vec<(usize, Number)>,
}

/// Rates over an ordered axis.
#[derive(Clone, Debug)]
pub struct Lines {
    /// What it shows.
    pub title: String,
    /// What the horizontal axis is.
    pub axis: String,
    /// Its places.
    pub places: Vec<String>,
    /// The unit of the values.
    pub unit: &'static str,
    /// The largest value that the vertical axis must hold, so that charts can be compared.
    pub largest: f64,
    /// The contenders.
    pub series: Vec<Series>,
    /// Lines that nothing should be above, with their names.
    pub ceilings: Vec<(String, Number)>,
}

/// Times of several contenders, one row per thing measured.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What it shows.
    pub title: String,
    /// The unit of the values.
    pub unit: &'static str,
    /// The rows: a name, and what each contender needed.
    pub rows: Vec<(String, Vec<(String, Number)>)>,
    /// Whether the axis is logarithmic; then there are marks rather than bars.
    pub logarithmic: bool,
}

/// Rates over arithmetic intensity, below what the device can do.
#[derive(Clone, Debug)]
pub struct Roofline {
    /// What it shows.
    pub title: String,
    /// Name, whether the mark is hollow, operations per byte, TFLOP/s.
    pub points: Vec<(String, bool, Number, Number)>,
    /// Rates that arithmetic is bounded by, in TFLOP/s, with their names.
    pub ceilings: Vec<(String, Number)>,
    /// The rate of memory in GB/s, where it was measured.
    pub bandwidth: Option<Number>,
}

/// Shares of what is allowed, one row per contender.
#[derive(Clone, Debug)]
pub struct Strip {
    /// What it shows.
    pub title: String,
    /// The rows: a contender, and its shares with what each belongs to.
    pub rows: Vec<(String, Vec<(String, Number)>)>,
}

/// Any of them.
#[derive(Clone, Debug)]
pub enum Chart {
    /// Rates over an ordered axis.
    Lines(Lines),
    /// Times.
    Bars(Bars),
    /// Rates below ceilings.
    Roofline(Roofline),
    /// Shares of what is allowed.
    Strip(Strip),
}

/// A drawing with its size and what it says in words.
pub(crate) struct Drawing {
    pub svg: Svg,
    pub size: (f64, f64),
    pub title: String,
    pub description: String,
}

impl Chart {
    /// As an element of a page; the number makes its names unique there.
    pub fn inline(&self, number: usize) -> String {
        let drawing = self.draw();
        let (width, height) = drawing.size;
        format!(
            "<svg class=\"chart\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-labelledby=\"chart{number}-title chart{number}-desc\" style=\"max-width:{width:.0}px\">\n\
             <title id=\"chart{number}-title\">{}</title>\n<desc id=\"chart{number}-desc\">{}</desc>\n{}</svg>",
            escape(&drawing.title),
            escape(&drawing.description),
            drawing.svg.body()
        )
    }

    /// Whether it is so wide that its table stands below it.
    pub fn is_wide(&self) -> bool {
        matches!(self, Chart::Strip(_))
    }

    /// As a file of its own, which says where its numbers are from.
    pub fn file(&self, source: &str) -> String {
        whole_file(&self.draw(), source)
    }

    fn draw(&self) -> Drawing {
        match self {
            Chart::Lines(lines) => lines.draw(),
            Chart::Bars(bars) => bars.draw(),
            Chart::Roofline(roofline) => roofline.draw(),
            Chart::Strip(strip) => strip.draw(),
        }
    }
}

/// Several charts of lines in one file, with one legend.
pub fn grid(title: &str, panels: &[Lines], columns: usize, source: &str) -> String {
    let mut svg = Svg::default();
    let rows = panels.len().div_ceil(columns);
    let (width, height) = (columns as f64 * PANEL.0, PANEL.1);
    let names =
        contender::sorted(panels.iter().flat_map(|panel| panel.series.iter().map(|s| s.name.clone())));
    svg.text((12.0, 20.0), Anchor::Start, "title", title);
    let top = 28.0 + legend(&mut svg, (12.0, 38.0), width - 20.0, &names);
    let mut words = String::new();
    for (i, panel) in panels.iter().enumerate() {
        let mut drawn = Svg::default();
        panel.plot(&mut drawn);
        svg.place(&drawn, ((i % columns) as f64 * PANEL.0, top + (i / columns) as f64 * height));
        words.push_str(&panel.describe());
        words.push(' ');
    }
    let size = (width, top + rows as f64 * height + 6.0);
    let drawing = Drawing { svg, size, title: title.into(), description: words.trim_end().into() };
    whole_file(&drawing, source)
}

/// A drawing as a file of its own, which says where it is from.
pub(crate) fn whole_file(drawing: &Drawing, source: &str) -> String {
    let (width, height) = drawing.size;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-labelledby=\"title desc\">\n\
         <title id=\"title\">{}</title>\n<desc id=\"desc\">{} From {}.</desc>\n<style>\n{PALETTE}{LOOK}</style>\n\
         <rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n{}</svg>\n",
        escape(&drawing.title),
        escape(&drawing.description),
        escape(source),
        drawing.svg.body()
    )
}

/// The size of one chart of lines.
const PANEL: (f64, f64) = (380.0, 236.0);
/// A letter's width at the size of a legend, roughly.
pub(crate) const LETTER: f64 = 6.3;
/// The same with room for letters that are wider, so that no name is cut.
pub(crate) const WIDE_LETTER: f64 = 7.0;

/// A legend of marks and names, from a corner on, in as many rows as needed; returns its height.
fn legend(svg: &mut Svg, corner: (f64, f64), width: f64, names: &[String]) -> f64 {
    let (mut x, mut y) = corner;
    for name in names {
        let label = contender::label(name);
        let needs = 26.0 + label.chars().count() as f64 * LETTER;
        if x > corner.0 && x + needs > corner.0 + width {
            (x, y) = (corner.0, y + 16.0);
        }
        svg.mark(contender::look(name), (x + 5.0, y), 4.0, "", "");
        svg.text((x + 13.0, y + 4.0), Anchor::Start, "label", &label);
        x += needs;
    }
    y - corner.1 + 20.0
}

pub(crate) fn tick(value: f64) -> String {
    format!("{}", (value * 1e6).round() / 1e6)
}

impl Lines {
    fn draw(&self) -> Drawing {
        let mut svg = Svg::default();
        svg.text((12.0, 18.0), Anchor::Start, "title", &self.title);
        let names: Vec<String> = self.series.iter().map(|series| series.name.clone()).collect();
        let top = 26.0 + legend(&mut svg, (12.0, 36.0), PANEL.0 - 20.0, &names);
        let mut plot = Svg::default();
        Lines { title: String::new(), ..self.clone() }.plot(&mut plot);
        svg.place(&plot, (0.0, top));
        let size = (PANEL.0, PANEL.1 + top);
        Drawing { svg, size, title: self.title.clone(), description: self.describe() }
    }

    /// The axes and the lines; the title stands above them if there is one.
    fn plot(&self, svg: &mut Svg) {
        let titled = if self.title.is_empty() { 0.0 } else { 18.0 };
        let (left, right, top, bottom) = (44.0, PANEL.0 - 14.0, 18.0 + titled, PANEL.1 - 34.0);
        if titled > 0.0 {
            svg.text((12.0, 14.0), Anchor::Start, "title small", &self.title);
        }
        let ticks = steps(self.largest, 4);
        let high = *ticks.last().expect("an axis has ends");
        let y = |value: f64| bottom - (bottom - top) * value / high;
        for value in &ticks {
            svg.line((left, y(*value)), (right, y(*value)), "grid");
            svg.text((left - 6.0, y(*value) + 4.0), Anchor::End, "tick", &tick(*value));
        }
        let step = (right - left) / self.places.len() as f64;
        let x = |place: usize| left + (place as f64 + 0.5) * step;
        for (i, place) in self.places.iter().enumerate() {
            svg.text((x(i), bottom + 15.0), Anchor::Middle, "place", place);
        }
        svg.text((f64::midpoint(left, right), bottom + 30.0), Anchor::Middle, "axis", &self.axis);
        svg.text((12.0, top - 8.0), Anchor::Start, "axis", self.unit);
        for (name, ceiling) in &self.ceilings {
            let at = y(ceiling.value());
            svg.line((left, at), (right, at), "ceiling");
            let words = format!("{name}: {}", Style::Digits.write(ceiling));
            svg.text((left + 4.0, at - 4.0), Anchor::Start, "ceiling-name", &words);
        }
        // Ours is drawn last, so that it lies on top.
        for series in self.series.iter().rev() {
            let look = contender::look(&series.name);
            let points: Vec<(f64, f64)> = series.points.iter().map(|(i, n)| (x(*i), y(n.value()))).collect();
            svg.polyline(&points, &format!("l s{look}"));
            for ((place, number), at) in series.points.iter().zip(points) {
                let name = contender::label(&series.name);
                let words =
                    format!("{name}, {}: {} {}", self.places[*place], Style::Digits.write(number), self.unit);
                svg.mark(look, at, 3.6, "", &words);
            }
        }
    }

    fn describe(&self) -> String {
        let of = |series: &Series| {
            let values: Vec<String> =
                series.points.iter().map(|(_, number)| Style::Digits.write(number)).collect();
            format!("{}: {}", contender::label(&series.name), values.join(", "))
        };
        let all: Vec<String> = self.series.iter().map(of).collect();
        let places = self.places.join(", ");
        format!("{}, {} over {} ({places}). {}.", self.title, self.unit, self.axis, all.join("; "))
    }
}

impl Bars {
    fn draw(&self) -> Drawing {
        let mut svg = Svg::default();
        let width = 430.0;
        svg.text((12.0, 18.0), Anchor::Start, "title", &self.title);
        let names = contender::sorted(
            self.rows.iter().flat_map(|(_, bars)| bars.iter().map(|(name, _)| name.clone())),
        );
        // With one bar per row, the row's name says whose it is.
        let crowded = self.rows.iter().any(|(_, bars)| bars.len() > 1);
        let mut y = 32.0;
        if crowded {
            y += legend(&mut svg, (12.0, 36.0), width - 20.0, &names) - 6.0;
        }
        let letters = self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let (left, right) = (20.0 + letters as f64 * WIDE_LETTER, width - 52.0);
        let values = || self.rows.iter().flat_map(|(_, bars)| bars.iter().map(|(_, number)| number.value()));
        let largest = values().fold(0.0, f64::max);
        let smallest = values().fold(f64::INFINITY, f64::min).min(largest);
        let ticks = if self.logarithmic { decades(smallest, largest) } else { steps(largest, 4) };
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        let x = |value: f64| {
            let share = if self.logarithmic {
                (value.ln() - low.ln()) / (high.ln() - low.ln())
            } else {
                (value - low) / (high - low)
            };
            left + (right - left) * share
        };
        let (thick, space) = if crowded { (9.0, 8.0) } else { (14.0, 10.0) };
        let tall: f64 = self.rows.iter().map(|(_, bars)| bars.len() as f64 * (thick + 1.5) + space).sum();
        for value in &ticks {
            svg.line((x(*value), y), (x(*value), y + tall), "grid");
            svg.text((x(*value), y + tall + 14.0), Anchor::Middle, "tick", &tick(*value));
        }
        svg.text((f64::midpoint(left, right), y + tall + 29.0), Anchor::Middle, "axis", self.unit);
        let bottom = y + tall + 36.0;
        for (row, bars) in &self.rows {
            y += space / 2.0;
            let middle = y + bars.len() as f64 * (thick + 1.5) / 2.0;
            svg.text((left - 8.0, middle + 3.5), Anchor::End, "place", row);
            for (name, number) in bars {
                let look = contender::look(name);
                let value = Style::Digits.write(number);
                let words = format!("{}, {row}: {value} {}", contender::label(name), self.unit);
                let (end, centre) = (x(number.value()), y + thick / 2.0);
                if self.logarithmic {
                    svg.line((left, centre), (end, centre), "leader");
                    svg.mark(look, (end, centre), 4.5, "", &words);
                } else {
                    svg.bar((left, y), ((end - left).max(0.5), thick), &format!("b s{look}"), &words);
                }
                let gap = if self.logarithmic { 9.0 } else { 4.0 };
                svg.text((end + gap, centre + 3.5), Anchor::Start, "value", &value);
                y += thick + 1.5;
            }
            y += space / 2.0;
        }
        Drawing { svg, size: (width, bottom), title: self.title.clone(), description: self.describe() }
    }

    fn describe(&self) -> String {
        let row = |(name, bars): &(String, Vec<(String, Number)>)| {
            let of = |(who, number): &(String, Number)| {
                format!("{} {}", contender::label(who), Style::Digits.write(number))
            };
            format!("{name}: {}", bars.iter().map(of).collect::<Vec<_>>().join(", "))
        };
        let rows: Vec<String> = self.rows.iter().map(row).collect();
        format!("{}, in {}. {}.", self.title, self.unit, rows.join("; "))
    }
}

impl Roofline {
    fn draw(&self) -> Drawing {
        let mut svg = Svg::default();
        let (width, height) = (640.0, 380.0);
        let (left, right, top, bottom) = (52.0, width - 172.0, 44.0, height - 44.0);
        svg.text((12.0, 18.0), Anchor::Start, "title", &self.title);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)))
        };
        let (x_low, x_high) = range(&mut self.points.iter().map(|(_, _, x, _)| x.value()));
        let (y_low, y_high) = range(
            &mut self
                .points
                .iter()
                .map(|(_, _, _, y)| y.value())
                .chain(self.ceilings.iter().map(|(_, c)| c.value())),
        );
        let (across, up) = (decades(x_low * 0.8, x_high * 1.2), decades(y_low * 0.8, y_high * 1.05));
        let scale = |value: f64, ticks: &[f64], from: f64, to: f64| {
            let (low, high) = (ticks[0].ln(), ticks[ticks.len() - 1].ln());
            from + (to - from) * (value.ln() - low) / (high - low)
        };
        let x = |value: f64| scale(value, &across, left, right);
        let y = |value: f64| scale(value, &up, bottom, top);
        for value in &across {
            svg.line((x(*value), top), (x(*value), bottom), "grid");
            svg.text((x(*value), bottom + 15.0), Anchor::Middle, "tick", &tick(*value));
        }
        for value in &up {
            svg.line((left, y(*value)), (right, y(*value)), "grid");
            svg.text((left - 6.0, y(*value) + 4.0), Anchor::End, "tick", &tick(*value));
        }
        let axis = "operations a byte that must move (logarithmic)";
        svg.text((f64::midpoint(left, right), bottom + 32.0), Anchor::Middle, "axis", axis);
        svg.text((12.0, top - 10.0), Anchor::Start, "axis", "TFLOP/s (logarithmic)");
        // Names stand after the ends of their lines, each below the previous one.
        let mut ceilings: Vec<&(String, Number)> = self.ceilings.iter().collect();
        ceilings.sort_by(|a, b| b.1.value().total_cmp(&a.1.value()));
        let mut lowest = f64::NEG_INFINITY;
        for (name, ceiling) in ceilings {
            let at = y(ceiling.value());
            svg.line((left, at), (right, at), "ceiling");
            lowest = (at + 4.0).max(lowest + 13.0);
            let short = name.split(',').next().unwrap_or(name);
            let words = format!("{short}: {}", Style::Digits.write(ceiling));
            svg.text((right + 6.0, lowest), Anchor::Start, "ceiling-name", &words);
        }
        if let Some(bandwidth) = &self.bandwidth {
            // A rate in TFLOP/s is the intensity times the bandwidth in TB/s, inside the frame.
            let rate = |intensity: f64| intensity * bandwidth.value() / 1e3;
            let (low, high) = (up[0], up[up.len() - 1]);
            let from = across[0].max(low / rate(1.0));
            let to = across[across.len() - 1].min(high / rate(1.0));
            if from < to {
                svg.line((x(from), y(rate(from))), (x(to), y(rate(to))), "ceiling");
                let words = format!("memory: {} GB/s", Style::Digits.write(bandwidth));
                svg.text((x(from) + 8.0, y(rate(from)) + 4.0), Anchor::Start, "ceiling-name", &words);
            }
        }
        for (name, hollow, intensity, rate) in &self.points {
            let words = format!("{name}: {} TFLOP/s", Style::Digits.write(rate));
            let extra = if *hollow { "hollow" } else { "" };
            svg.mark(0, (x(intensity.value()), y(rate.value())), 4.0, extra, &words);
        }
        svg.mark(0, (right - 190.0, 30.0), 4.0, "", "");
        svg.text((right - 182.0, 34.0), Anchor::Start, "label", "full");
        svg.mark(0, (right - 136.0, 30.0), 4.0, "hollow", "");
        svg.text((right - 128.0, 34.0), Anchor::Start, "label", "causal, counted half");
        Drawing { svg, size: (width, height), title: self.title.clone(), description: self.describe() }
    }

    fn describe(&self) -> String {
        let ceiling = |(name, number): &(String, Number)| format!("{name} {}", Style::Digits.write(number));
        let ceilings: Vec<String> = self.ceilings.iter().map(ceiling).collect();
        format!(
            "{}: TFLOP/s over operations a byte, both logarithmic, below the ceilings ({}).",
            self.title,
            ceilings.join(", ")
        )
    }
}

impl Strip {
    fn draw(&self) -> Drawing {
        let mut svg = Svg::default();
        let width = 640.0;
        svg.text((12.0, 18.0), Anchor::Start, "title", &self.title);
        let letters =
            self.rows.iter().map(|(name, _)| contender::label(name).chars().count()).max().unwrap_or(0);
        let (left, right, top) = (20.0 + letters as f64 * WIDE_LETTER, width - 24.0, 44.0);
        let largest = self.rows.iter().flat_map(|(_, shares)| shares.iter().map(|(_, n)| n.value()));
        let ticks = steps(largest.filter(|share| share.is_finite()).fold(1.0, f64::max), 4);
        let high = *ticks.last().expect("an axis has ends");
        let x = |share: f64| left + (right - left) * (share / high).clamp(0.0, 1.0);
        let bottom = top + self.rows.len() as f64 * 22.0;
        for value in &ticks {
            svg.line((x(*value), top), (x(*value), bottom), "grid");
            let percent = format!("{} %", tick(value * 100.0));
            svg.text((x(*value), bottom + 14.0), Anchor::Middle, "tick", &percent);
        }
        svg.line((x(1.0), top - 6.0), (x(1.0), bottom), "rule");
        svg.text((x(1.0), top - 10.0), Anchor::Middle, "ceiling-name", "the rule");
        svg.text(
            (f64::midpoint(left, right), bottom + 30.0),
            Anchor::Middle,
            "axis",
            "share of the error that is allowed",
        );
        for (i, (name, shares)) in self.rows.iter().enumerate() {
            let y = top + (i as f64 + 0.5) * 22.0;
            svg.text((left - 8.0, y + 4.0), Anchor::End, "place", &contender::label(name));
            for (what, share) in shares {
                let words = format!("{}, {what}: {}", contender::label(name), Style::Percent.write(share));
                svg.mark(contender::look(name), (x(share.value()), y), 4.0, "thin", &words);
            }
        }
        let worst = |(name, shares): &(String, Vec<(String, Number)>)| {
            let largest = shares
                .iter()
                .map(|(_, share)| share)
                .reduce(|a, b| if b.value() > a.value() { b } else { a });
            largest.map(|share| format!("{} {}", contender::label(name), Style::Percent.write(share)))
        };
        let worst: Vec<String> = self.rows.iter().filter_map(worst).collect();
        let description = format!("{}. The largest share of each: {}.", self.title, worst.join(", "));
        Drawing { svg, size: (width, bottom + 38.0), title: self.title.clone(), description }
    }
}
