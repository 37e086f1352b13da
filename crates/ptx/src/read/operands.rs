//! The operands of a statement, as they are written.

use super::tokens::{Token, integer};
use super::word;

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand<'a> {
    /// A register, a label, an allocation.
    Name(&'a str),
    /// A special register with its part, such as `%tid.x`.
    Special(String),
    /// A number, perhaps with a minus before it.
    Number(bool, &'a str),
    /// `_`
    Sink,
    /// `{a, b}`
    Vector(Vec<Operand<'a>>),
    /// `[name+offset]`
    Address(&'a str, i32),
    /// `%r1|%p1`
    Pair(&'a str, &'a str),
}

/// Tokens of a statement, from the one that is read next.
pub struct Operands<'t, 'a> {
    pub tokens: &'t [Token<'a>],
}

impl<'a> Operands<'_, 'a> {
    pub fn next(&mut self) -> Option<Token<'a>> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(*first)
    }

    pub fn takes(&mut self, mark: char) -> bool {
        let there = self.tokens.first() == Some(&Token::Mark(mark));
        self.tokens = &self.tokens[usize::from(there)..];
        there
    }

    /// All of them, between commas.
    pub fn all(mut self) -> Result<Vec<Operand<'a>>, String> {
        let mut all = Vec::new();
        if self.tokens.is_empty() {
            return Ok(all);
        }
        loop {
            all.push(self.one()?);
            match self.next() {
                None => return Ok(all),
                Some(Token::Mark(',')) => {}
                Some(token) => return Err(format!("has {} where a comma or its end must be", word(token))),
            }
        }
    }

    pub fn one(&mut self) -> Result<Operand<'a>, String> {
        if self.takes('{') {
            let mut parts = Vec::new();
            loop {
                parts.push(self.plain()?);
                match self.next() {
                    Some(Token::Mark('}')) => return Ok(Operand::Vector(parts)),
                    Some(Token::Mark(',')) => {}
                    _ => return Err("has a list in braces that does not end".into()),
                }
            }
        }
        if self.takes('[') {
            let Some(Token::Name(base)) = self.next() else {
                return Err("has an address that does not begin with a name".into());
            };
            let mut offset = 0;
            if self.takes('+') {
                let negative = self.takes('-');
                let Some(Token::Number(text)) = self.next() else {
                    return Err("has an offset that is no number".into());
                };
                let number = integer(text).and_then(|number| i64::try_from(number).ok());
                offset = number
                    .and_then(|number| i32::try_from(if negative { -number } else { number }).ok())
                    .ok_or_else(|| format!("has an offset that is no number of 32 bits: {text}"))?;
            }
            return match self.next() {
                Some(Token::Mark(']')) => Ok(Operand::Address(base, offset)),
                _ => Err("has an address that does not end with ']'".into()),
            };
        }
        let first = self.plain()?;
        if let Operand::Name(name) = first
            && self.takes('|')
        {
            return match self.plain()? {
                Operand::Name(other) => Ok(Operand::Pair(name, other)),
                _ => Err("has no register after '|'".into()),
            };
        }
        Ok(first)
    }

    /// A name, a number or `_`.
    pub fn plain(&mut self) -> Result<Operand<'a>, String> {
        match self.next() {
            Some(Token::Name(name)) => match self.tokens.first() {
                Some(Token::Dot(part)) => {
                    self.next();
                    Ok(Operand::Special(format!("{name}.{part}")))
                }
                _ => Ok(Operand::Name(name)),
            },
            Some(Token::Number(text)) => Ok(Operand::Number(false, text)),
            Some(Token::Mark('-')) => match self.next() {
                Some(Token::Number(text)) => Ok(Operand::Number(true, text)),
                _ => Err("has a minus without a number".into()),
            },
            Some(Token::Mark('_')) => Ok(Operand::Sink),
            Some(token) => Err(format!("has {} where an operand must be", word(token))),
            None => Err("lacks an operand".into()),
        }
    }
}
