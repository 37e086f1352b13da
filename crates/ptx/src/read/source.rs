//! The text of a module, read word by word: what must come next, and the error where something else does.

use super::tokens::{Token, Tokens, integer};
use super::{ReadError, at, word};
use crate::types::{IsaVersion, Target};

/// The most characters of a statement that a message quotes.
const MOST_REPEATED: usize = 120;

/// The error for one thing where another must be.
pub fn unexpected<T>(line: usize, token: Token<'_>, wanted: &str) -> Result<T, ReadError> {
    Err(at(line, format!("{} stands where {wanted} must", word(token))))
}

/// The text from the place that is read next.
pub struct Source<'a> {
    pub tokens: Tokens<'a>,
}

impl<'a> Source<'a> {
    pub fn next(&mut self) -> Result<Option<Token<'a>>, ReadError> {
        self.tokens.next()
    }

    pub fn peek(&self) -> Result<Option<Token<'a>>, ReadError> {
        self.tokens.clone().next()
    }

    /// The line of the next token.
    pub fn line(&mut self) -> Result<usize, ReadError> {
        self.tokens.skip_space()?;
        Ok(self.tokens.line())
    }

    /// The next token, where something must follow.
    pub fn some(&mut self, wanted: &str) -> Result<(usize, Token<'a>), ReadError> {
        let line = self.line()?;
        match self.next()? {
            Some(token) => Ok((line, token)),
            None => Err(at(line, format!("the text ends, and {wanted} is missing"))),
        }
    }

    pub fn mark(&mut self, mark: char) -> Result<(), ReadError> {
        let wanted = format!("'{mark}'");
        match self.some(&wanted)? {
            (_, token) if token == Token::Mark(mark) => Ok(()),
            (line, token) => unexpected(line, token, &wanted),
        }
    }

    /// Takes a mark, if it is the next token.
    pub fn takes(&mut self, mark: char) -> Result<bool, ReadError> {
        let there = self.peek()? == Some(Token::Mark(mark));
        if there {
            self.next()?;
        }
        Ok(there)
    }

    pub fn name(&mut self, wanted: &str) -> Result<&'a str, ReadError> {
        match self.some(wanted)? {
            (_, Token::Name(name)) => Ok(name),
            (line, token) => unexpected(line, token, wanted),
        }
    }

    pub fn dot(&mut self, word: &str) -> Result<(), ReadError> {
        let wanted = format!("'.{word}'");
        match self.some(&wanted)? {
            (_, Token::Dot(there)) if there == word => Ok(()),
            (line, token) => unexpected(line, token, &wanted),
        }
    }

    /// A number of 32 bits.
    pub fn number(&mut self, wanted: &str) -> Result<u32, ReadError> {
        match self.some(wanted)? {
            (line, Token::Number(text)) => integer(text)
                .and_then(|number| u32::try_from(number).ok())
                .ok_or_else(|| at(line, format!("'{text}' is no number of 32 bits, as {wanted} must be"))),
            (line, token) => unexpected(line, token, wanted),
        }
    }

    /// A number of 32 bits that is not 0.
    pub fn positive(&mut self, wanted: &str) -> Result<u32, ReadError> {
        let line = self.line()?;
        match self.number(wanted)? {
            0 => Err(at(line, format!("{wanted} cannot be 0"))),
            number => Ok(number),
        }
    }

    /// `.version`, which comes first.
    pub fn version(&mut self) -> Result<IsaVersion, ReadError> {
        self.dot("version")?;
        let line = self.line()?;
        match self.some("a version such as 7.0")? {
            (_, Token::Number(text)) => {
                let known = IsaVersion::ALL.iter().find(|version| version.to_string() == text);
                known.copied().ok_or_else(|| {
                    let (first, last) = (IsaVersion::ALL[0], IsaVersion::ALL[IsaVersion::ALL.len() - 1]);
                    at(
                        line,
                        format!("'{text}' is no version of PTX that is known here: {first} to {last} are"),
                    )
                })
            }
            (line, token) => unexpected(line, token, "a version such as 7.0"),
        }
    }

    /// `.target`, which comes second.
    pub fn target(&mut self, version: IsaVersion) -> Result<Target, ReadError> {
        self.dot("target")?;
        let line = self.line()?;
        let name = self.name("a target such as sm_80")?;
        let known = Target::ALL.map(Target::name).join(", ");
        let target = Target::from_name(name)
            .ok_or_else(|| at(line, format!("no target {name} is known here; possible are {known}")))?;
        if version < target.isa() {
            return Err(at(
                line,
                format!("{target} needs .version {} or later, not {version}", target.isa()),
            ));
        }
        Ok(target)
    }

    /// The tokens of a statement up to its semicolon, and its text as a message quotes it.
    pub fn statement(&mut self) -> Result<(Vec<Token<'a>>, String), ReadError> {
        let line = self.line()?;
        let start = self.tokens.rest();
        let text = |end: &str| {
            let whole = &start[..start.len() - end.len()];
            let cut: String = whole.chars().take(MOST_REPEATED).collect();
            cut.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let (mut all, mut depth) = (Vec::new(), 0_usize);
        loop {
            let before = self.tokens.rest();
            match self.next()? {
                Some(Token::Mark(';')) => return Ok((all, text(before))),
                Some(Token::Mark('}')) if depth == 0 => {
                    return Err(at(line, format!("'{}' does not end: a semicolon is missing", text(before))));
                }
                None => return Err(at(line, format!("'{}' does not end: the text does", text(before)))),
                Some(token) => {
                    depth = match token {
                        Token::Mark('{') => depth + 1,
                        Token::Mark('}') => depth - 1,
                        _ => depth,
                    };
                    all.push(token);
                }
            }
        }
    }
}
