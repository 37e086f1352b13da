//! Where every number of a report comes from: a field of an evidence file, or a quotient of two of them.
//!
//! A [`Number`] can be made in no other way, so a report cannot hold one without a source.

use serde_json::Value;

static NOTHING: Value = Value::Null;

/// Why no report is made of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is no evidence, or none that this version knows.
    NoEvidence(String),
    /// It contradicts itself; where it does so first.
    Contradiction(String),
}

/// One evidence file.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// What it is called in the report.
    pub name: String,
    /// Where it lies as seen from the report.
    pub link: String,
    /// The hash of its bytes.
    pub hash: String,
    /// What it says.
    pub body: Value,
}

impl Evidence {
    /// Reads the text of a file, which must be consistent: `audit` says what contradicts itself in it, or why it is no
    /// evidence.
    pub fn read(
        name: &str,
        link: &str,
        text: &str,
        audit: impl FnOnce(&str) -> Result<Vec<String>, String>,
    ) -> Result<Self, Refused> {
        if let Some(first) = audit(text).map_err(Refused::NoEvidence)?.into_iter().next() {
            return Err(Refused::Contradiction(first));
        }
        let body = serde_json::from_str(text).map_err(|error| Refused::NoEvidence(error.to_string()))?;
        Ok(Self::of(name, link, text, body))
    }

    /// Of a text that says `body`, unchecked.
    fn of(name: &str, link: &str, text: &str, body: Value) -> Self {
        let hash = blake3::hash(text.as_bytes()).to_hex().to_string();
        Self { name: name.into(), link: link.into(), hash, body }
    }

    /// What it is called without its folder.
    pub fn short_name(&self) -> &str {
        self.name.rsplit(['/', '\\']).next().unwrap_or(&self.name)
    }
}

/// A place in an evidence file, which may hold nothing.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    file: usize,
    pointer: String,
    value: &'a Value,
}

impl<'a> Field<'a> {
    /// The whole of the file that has this place in the list of files.
    pub fn root(files: &'a [Evidence], file: usize) -> Self {
        Self { file, pointer: String::new(), value: &files[file].body }
    }

    /// The place of its file in the list of files.
    pub fn file(&self) -> usize {
        self.file
    }

    /// A member of an object.
    pub fn get(&self, key: &str) -> Self {
        let escaped = key.replace('~', "~0").replace('/', "~1");
        let value = self.value.get(key).unwrap_or(&NOTHING);
        Self { file: self.file, pointer: format!("{}/{escaped}", self.pointer), value }
    }

    /// The elements of an array; none if it is not one.
    pub fn items(&self) -> Vec<Self> {
        let elements = self.value.as_array().map_or(&[][..], Vec::as_slice);
        let element = |(i, value)| Self { file: self.file, pointer: format!("{}/{i}", self.pointer), value };
        elements.iter().enumerate().map(element).collect()
    }

    /// The number that stands here.
    pub fn number(&self) -> Option<Number> {
        let origin = Origin::Field { file: self.file, pointer: self.pointer.clone() };
        self.value.as_f64().map(|value| Number { value, origin })
    }

    /// The text that stands here.
    pub fn text(&self) -> Option<&'a str> {
        self.value.as_str()
    }

    /// The yes or no that stands here.
    pub fn flag(&self) -> Option<bool> {
        self.value.as_bool()
    }

    /// Whether nothing stands here.
    pub fn is_absent(&self) -> bool {
        self.value.is_null()
    }
}

/// Where a number comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// A field of a file.
    Field {
        /// The file's place in the list of files.
        file: usize,
        /// The field, as a JSON pointer.
        pointer: String,
    },
    /// One number divided by another.
    Quotient(Box<Number>, Box<Number>),
}

/// A number with its source.
#[derive(Clone, Debug, PartialEq)]
pub struct Number {
    value: f64,
    origin: Origin,
}

impl Number {
    /// Its value.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Its source.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// This one divided by another.
    pub fn over(&self, other: &Number) -> Number {
        // An error of 0 is a share of 0, even where nothing is allowed.
        let value = if self.value == 0.0 { 0.0 } else { self.value / other.value };
        Number { value, origin: Origin::Quotient(Box::new(self.clone()), Box::new(other.clone())) }
    }

    /// The file of its source; of the dividend, if it is a quotient.
    pub fn file(&self) -> usize {
        match &self.origin {
            Origin::Field { file, .. } => *file,
            Origin::Quotient(dividend, _) => dividend.file(),
        }
    }

    /// Its field as a JSON pointer, or two with a division sign.
    pub fn path(&self) -> String {
        match &self.origin {
            Origin::Field { pointer, .. } => pointer.clone(),
            Origin::Quotient(dividend, divisor) => format!("{} ÷ {}", dividend.path(), divisor.path()),
        }
    }

    /// The smaller of two.
    pub fn min(self, other: Number) -> Number {
        if other.value < self.value { other } else { self }
    }

    /// The larger of two.
    pub fn max(self, other: Number) -> Number {
        if other.value > self.value { other } else { self }
    }
}

/// How a number is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Three digits or so: times and rates.
    Digits,
    /// Three decimal places: the ends of intervals.
    Fine,
    /// As `1.13×`.
    Ratio,
    /// As `57.1 %`.
    Percent,
    /// As `1.9e-4`.
    Error,
    /// As it stands in the file.
    Exact,
    /// Bytes, in units of 2³⁰.
    Gibibytes,
    /// Thousandths.
    Thousandths,
}

impl Style {
    /// The factor applied to a value before it is written.
    pub fn factor(self) -> f64 {
        match self {
            Style::Percent => 100.0,
            Style::Gibibytes => 1.0 / f64::from(1 << 30),
            Style::Thousandths => 1e-3,
            Style::Digits | Style::Fine | Style::Ratio | Style::Error | Style::Exact => 1.0,
        }
    }

    /// The name of the style, for those who read a page by program.
    pub fn name(self) -> &'static str {
        match self {
            Style::Digits => "digits",
            Style::Fine => "fine",
            Style::Ratio => "ratio",
            Style::Percent => "percent",
            Style::Error => "error",
            Style::Exact => "exact",
            Style::Gibibytes => "gibibytes",
            Style::Thousandths => "thousandths",
        }
    }

    /// A number in this style.
    pub fn write(self, number: &Number) -> String {
        let value = number.value * self.factor();
        match self {
            Style::Digits if value.abs() >= 100.0 => format!("{value:.0}"),
            Style::Digits if value.abs() >= 10.0 => format!("{value:.1}"),
            Style::Digits => format!("{value:.2}"),
            Style::Fine => format!("{value:.3}"),
            Style::Ratio => format!("{value:.2}×"),
            Style::Percent => format!("{value:.1} %"),
            Style::Error => format!("{value:.1e}"),
            Style::Exact => format!("{value}"),
            Style::Gibibytes => format!("{value:.1} GiB"),
            Style::Thousandths => format!("{value:.0}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(text: &str) -> Evidence {
        Evidence::of("a.json", "a.json", text, serde_json::from_str(text).unwrap())
    }

    #[test]
    fn a_number_knows_the_field_it_was_read_from() {
        let files = [evidence(r#"{"schema": "x/1", "a/b": [{"time": 2.5}, {"time": null}]}"#)];
        let items = Field::root(&files, 0).get("a/b").items();
        let number = items[0].get("time").number().unwrap();
        assert_eq!((number.value(), number.path().as_str()), (2.5, "/a~1b/0/time"));
        assert_eq!(files[0].body.pointer(&number.path()), Some(&Value::from(2.5)));
        assert_eq!(items[1].get("time").number(), None, "null is absent, and not 0");
        assert_eq!(items[1].get("else").get("where").number(), None);
    }

    #[test]
    fn a_quotient_names_both_of_its_fields() {
        let files = [evidence(r#"{"schema": "x/1", "a": 1, "b": 4, "none": 0}"#)];
        let of = |key| Field::root(&files, 0).get(key).number().unwrap();
        let quotient = of("a").over(&of("b"));
        assert_eq!((quotient.value(), quotient.path().as_str()), (0.25, "/a ÷ /b"));
        assert_eq!(of("none").over(&of("none")).value(), 0.0);
    }

    #[test]
    fn numbers_are_written_with_the_digits_that_matter() {
        let files = [evidence(
            r#"{"schema": "x/1", "v": [436.2255, 20.8125, 5.639, 1.128, 0.571, 0.000186, 1980000, 150109880320]}"#,
        )];
        let values = Field::root(&files, 0).get("v").items();
        let write = |i: usize, style: Style| style.write(&values[i].number().unwrap());
        assert_eq!(write(0, Style::Digits), "436");
        assert_eq!(write(1, Style::Digits), "20.8");
        assert_eq!(write(2, Style::Digits), "5.64");
        assert_eq!(write(3, Style::Ratio), "1.13×");
        assert_eq!(write(3, Style::Fine), "1.128");
        assert_eq!(write(4, Style::Percent), "57.1 %");
        assert_eq!(write(5, Style::Error), "1.9e-4");
        assert_eq!(write(6, Style::Thousandths), "1980");
        assert_eq!(write(7, Style::Gibibytes), "139.8 GiB");
        assert_eq!(write(7, Style::Exact), "150109880320");
    }

    #[test]
    fn only_what_the_audit_lets_pass_is_read() {
        let read = |audited: Result<Vec<String>, String>| Evidence::read("a", "a", "{}", |_| audited);
        assert!(read(Ok(Vec::new())).is_ok());
        assert_eq!(read(Err("it has no hash".into())), Err(Refused::NoEvidence("it has no hash".into())));
        let twice = Ok(vec!["first".into(), "second".into()]);
        assert_eq!(read(twice), Err(Refused::Contradiction("first".into())));
    }
}
