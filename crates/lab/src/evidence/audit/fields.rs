//! The raw part of a document: places in it, and whether their values are possible.

use std::ops::RangeBounds;

use serde_json::{Map, Value};

use super::Audit;

/// Marks raw values in a recomputed document, which cannot be recomputed: they were checked where they were read.
pub(super) const RAW: &str = "\0raw";

/// That, as a value.
pub(super) fn raw() -> Value {
    Value::from(RAW)
}

/// An object all of whose members are raw.
pub(super) fn raws(names: &[&str]) -> Map<String, Value> {
    names.iter().map(|name| ((*name).to_string(), raw())).collect()
}

/// Possible microseconds: up to an hour.
const MOST_US: f64 = 3.6e9;

static NOTHING: Value = Value::Null;

/// A place in a document, which may hold nothing.
#[derive(Clone, Debug)]
pub(super) struct Place<'a> {
    pub at: String,
    pub value: &'a Value,
}

impl<'a> Place<'a> {
    pub fn root(document: &'a Value) -> Self {
        Self { at: String::new(), value: document }
    }

    /// A member of an object.
    pub fn get(&self, name: &str) -> Self {
        let at = if self.at.is_empty() { name.to_string() } else { format!("{}.{name}", self.at) };
        Self { at, value: self.value.get(name).unwrap_or(&NOTHING) }
    }

    /// The entries of a list; none where there is no list.
    pub fn items(&self) -> Vec<Self> {
        let items = self.value.as_array().map_or(&[][..], Vec::as_slice);
        items.iter().enumerate().map(|(n, value)| Self { at: format!("{}[{n}]", self.at), value }).collect()
    }

    pub fn is_null(&self) -> bool {
        self.value.is_null()
    }

    /// The text that stands here; empty where there is none.
    pub fn str(&self) -> &'a str {
        self.value.as_str().unwrap_or_default()
    }
}

impl Audit {
    /// Refuses a place that has no possible value.
    fn possible<T>(&mut self, place: &Place<'_>, found: Option<T>) -> Option<T> {
        if found.is_none() {
            self.deny(&place.at, format!("is {}, which cannot be", super::brief(place.value)));
        }
        found
    }

    /// A number within a range; NaN where it is refused.
    pub(super) fn number(&mut self, place: &Place<'_>, range: impl RangeBounds<f64>) -> f64 {
        let number = place.value.as_f64().filter(|number| range.contains(number));
        self.possible(place, number).unwrap_or(f64::NAN)
    }

    /// The same, where the value may be null.
    pub(super) fn maybe_number(&mut self, place: &Place<'_>, range: impl RangeBounds<f64>) -> Option<f64> {
        (!place.is_null()).then(|| self.number(place, range))
    }

    /// A count within a range; 0 where it is refused.
    pub(super) fn count(&mut self, place: &Place<'_>, range: impl RangeBounds<u64>) -> u64 {
        let count = place.value.as_u64().filter(|count| range.contains(count));
        self.possible(place, count).unwrap_or(0)
    }

    /// A time in microseconds.
    pub(super) fn time(&mut self, place: &Place<'_>) -> f64 {
        self.number(place, f64::MIN_POSITIVE..MOST_US)
    }

    /// A list of times.
    pub(super) fn times(&mut self, place: &Place<'_>) -> Vec<f64> {
        self.list(place).iter().map(|item| self.time(item)).collect()
    }

    /// A text that passes a test.
    pub(super) fn text<'a>(&mut self, place: &Place<'a>, passes: impl Fn(&str) -> bool) -> &'a str {
        let text = place.value.as_str().filter(|text| !text.trim().is_empty() && passes(text));
        self.possible(place, text).unwrap_or_default()
    }

    /// The same, where the value may be null.
    pub(super) fn maybe_text<'a>(
        &mut self,
        place: &Place<'a>,
        passes: impl Fn(&str) -> bool,
    ) -> Option<&'a str> {
        (!place.is_null()).then(|| self.text(place, passes))
    }

    /// A yes or no.
    pub(super) fn flag(&mut self, place: &Place<'_>) -> bool {
        let flag = place.value.as_bool();
        if flag.is_none() {
            self.deny(
                &place.at,
                format!("is {}, which is neither true nor false", super::brief(place.value)),
            );
        }
        flag.unwrap_or_default()
    }

    /// The entries of a list.
    pub(super) fn list<'a>(&mut self, place: &Place<'a>) -> Vec<Place<'a>> {
        if !place.value.is_array() {
            self.deny(&place.at, format!("is {}, which is no list", super::brief(place.value)));
        }
        place.items()
    }
}

/// Any text.
pub(super) fn any(_: &str) -> bool {
    true
}

/// Numbers with points between them, as versions are.
pub(super) fn is_version(text: &str) -> bool {
    text.contains('.')
        && text.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// This many hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}
