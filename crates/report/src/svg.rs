//! A small writer of SVG: escaped text, rounded coordinates, marks that differ in form as well as in colour.

use std::fmt::Write;

/// Text escaped for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Where a text is anchored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// At its beginning.
    Start,
    /// At its middle.
    Middle,
    /// At its end.
    End,
}

/// A drawing in progress.
#[derive(Debug, Default)]
pub struct Svg {
    body: String,
}

impl Svg {
    /// The elements drawn so far.
    pub fn body(&self) -> &str {
        &self.body
    }

    /// A straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(&format!(r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#));
    }

    /// A line through points.
    pub fn polyline(&mut self, points: &[(f64, f64)], class: &str) {
        let mut at = String::new();
        for (x, y) in points {
            let _ = write!(at, "{x:.1},{y:.1} ");
        }
        self.push(&format!(r#"<polyline class="{class}" points="{}"/>"#, at.trim_end()));
    }

    /// A bar from a left upper corner, with a text that is shown on pointing at it.
    pub fn bar(&mut self, corner: (f64, f64), size: (f64, f64), class: &str, title: &str) {
        let ((x, y), (w, h)) = (corner, size);
        self.push(&format!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}"><title>{}</title></rect>"#,
            escape(title)
        ));
    }

    /// A text on one line.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.push(&format!(
            r#"<text class="{class}" x="{:.1}" y="{:.1}" text-anchor="{anchor}">{}</text>"#,
            at.0,
            at.1,
            escape(text)
        ));
    }

    /// The mark of a look, with a text that is shown on pointing at it.
    pub fn mark(&mut self, look: usize, at: (f64, f64), size: f64, extra: &str, title: &str) {
        let (x, y) = at;
        let title =
            if title.is_empty() { String::new() } else { format!("<title>{}</title>", escape(title)) };
        let class = format!("m s{look}{}{extra}", if extra.is_empty() { "" } else { " " });
        let around = |corners: &[(f64, f64)]| {
            let point = |(dx, dy): &(f64, f64)| format!("{:.1},{:.1}", x + dx * size, y + dy * size);
            corners.iter().map(point).collect::<Vec<_>>().join(" ")
        };
        let corners: &[(f64, f64)] = match look {
            0 => {
                self.push(&format!(
                    r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{size:.1}">{title}</circle>"#
                ));
                return;
            }
            1 => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            2 => &[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
            3 => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
            4 => &[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
            5 => &[(-1.2, -0.5), (1.2, -0.5), (1.2, 0.5), (-1.2, 0.5)],
            6 => &[(-0.5, -1.2), (0.5, -1.2), (0.5, 1.2), (-0.5, 1.2)],
            7 => &[(0.0, -1.2), (1.15, -0.35), (0.7, 1.0), (-0.7, 1.0), (-1.15, -0.35)],
            8 => &[(-1.2, 0.0), (0.8, -1.1), (0.8, 1.1)],
            _ => &[(1.2, 0.0), (-0.8, -1.1), (-0.8, 1.1)],
        };
        let points = around(corners);
        self.push(&format!(r#"<polygon class="{class}" points="{points}">{title}</polygon>"#));
    }

    /// Adds another drawing, moved.
    pub fn place(&mut self, other: &Svg, at: (f64, f64)) {
        let (x, y) = at;
        self.push(&format!(r#"<g transform="translate({x:.1} {y:.1})">"#));
        self.body.push_str(&other.body);
        self.push("</g>");
    }

    fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }
}

/// Round steps from 0 to a little above the largest value, about as many as wanted.
pub fn steps(largest: f64, wanted: usize) -> Vec<f64> {
    let rough = (largest.max(f64::MIN_POSITIVE)) / wanted as f64;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * decade).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * decade);
    let count = (largest / step - 1e-9).ceil().max(1.0) as usize;
    (0..=count).map(|i| i as f64 * step).collect()
}

/// The 1, 2 and 5 of the decades around two positive values, with one below and one above.
pub fn decades(smallest: f64, largest: f64) -> Vec<f64> {
    let mut all = Vec::new();
    for decade in smallest.log10().floor() as i32..=largest.log10().ceil() as i32 {
        all.extend([1.0, 2.0, 5.0].map(|m| m * 10f64.powi(decade)));
    }
    let first = all.iter().rposition(|tick| *tick <= smallest).unwrap_or(0);
    let last = all.iter().position(|tick| *tick >= largest).unwrap_or(all.len() - 1);
    all[first..=last].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_steps_that_hold_the_largest_value() {
        assert_eq!(steps(788.0, 4), [0.0, 200.0, 400.0, 600.0, 800.0]);
        assert_eq!(steps(800.0, 4), [0.0, 200.0, 400.0, 600.0, 800.0]);
        assert_eq!(steps(39.0, 4), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(steps(0.9, 4).last(), Some(&1.0));
        assert_eq!(decades(9.25, 243.0), [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
    }

    #[test]
    fn text_is_escaped() {
        let mut svg = Svg::default();
        svg.text((0.0, 0.0), Anchor::Start, "t", "a < b & \"c\"");
        assert!(svg.body().contains("a &lt; b &amp; &quot;c&quot;"));
    }
}
