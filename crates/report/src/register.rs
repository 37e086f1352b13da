//! Which numbers a report has shown so far, each with the name that links use.

use std::collections::HashMap;

use super::source::{Number, Origin};

/// The numbers of a report in the order of their first use.
#[derive(Debug, Default)]
pub struct Register {
    known: HashMap<String, usize>,
    numbers: Vec<Number>,
}

impl Register {
    /// The name of a number; the same source has the same name.
    pub fn name(&mut self, number: &Number) -> String {
        let next = self.numbers.len() + 1;
        let id = *self.known.entry(key(number)).or_insert(next);
        if id == next {
            self.numbers.push(number.clone());
        }
        format!("n{id}")
    }

    /// All of them, with their names.
    pub fn all(&self) -> impl Iterator<Item = (String, &Number)> {
        self.numbers.iter().enumerate().map(|(i, number)| (format!("n{}", i + 1), number))
    }
}

fn key(number: &Number) -> String {
    match number.origin() {
        Origin::Field { file, pointer } => format!("{file}{pointer}"),
        Origin::Quotient(dividend, divisor) => format!("{} ÷ {}", key(dividend), key(divisor)),
    }
}
