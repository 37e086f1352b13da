//! The words of PTX text: names, directives, numbers and marks, each with its line.

use super::{ReadError, at};

/// A word of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// A name: of an instruction, a register, a label.
    Name(&'a str),
    /// What follows a dot, without it: a directive, a type, a modifier.
    Dot(&'a str),
    /// Something that begins with a digit; [`integer`] and [`float`] say whether it is a number.
    Number(&'a str),
    /// One character.
    Mark(char),
}

/// A place in the text.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    rest: &'a str,
    line: usize,
}

/// Whether a character may follow the first one in a name.
fn follows(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

impl<'a> Tokens<'a> {
    /// The beginning of a text.
    pub fn new(text: &'a str) -> Tokens<'a> {
        Tokens { rest: text, line: 1 }
    }

    /// The line of the next token, or of the end.
    pub fn line(&self) -> usize {
        self.line
    }

    /// What has not been read yet.
    pub fn rest(&self) -> &'a str {
        self.rest
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        self.take(self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len()))
    }

    /// Goes to the next token, past whitespace and comments.
    pub fn skip_space(&mut self) -> Result<(), ReadError> {
        loop {
            let space = self.take_while(|c| matches!(c, ' ' | '\t' | '\r' | '\n'));
            self.line += space.matches('\n').count();
            let comment = if self.rest.starts_with("//") {
                self.take_while(|c| c != '\n')
            } else if self.rest.starts_with("/*") {
                match self.rest.find("*/") {
                    Some(end) => self.take(end + 2),
                    None => return Err(at(self.line, "the comment that begins here does not end")),
                }
            } else {
                return Ok(());
            };
            if let Some(c) = comment.chars().find(|c| !c.is_ascii()) {
                return Err(at(self.line, format!("a comment holds {c:?}, and PTX is ASCII text")));
            }
            self.line += comment.matches('\n').count();
        }
    }

    /// The next token; none at the end.
    pub fn next(&mut self) -> Result<Option<Token<'a>>, ReadError> {
        self.skip_space()?;
        let Some(first) = self.rest.chars().next() else { return Ok(None) };
        let token = match first {
            '.' => {
                self.take(1);
                let start = self.rest;
                let mut len = self.take_while(follows).len();
                // `L1::evict_last` is one word.
                while len > 0 && self.rest.starts_with("::") && self.rest[2..].starts_with(follows) {
                    self.take(2);
                    len += 2 + self.take_while(follows).len();
                }
                if len == 0 {
                    return Err(at(self.line, "a dot without a word after it"));
                }
                Token::Dot(&start[..len])
            }
            '0'..='9' => {
                let start = self.rest;
                let mut len = 0;
                loop {
                    len += self.take_while(|c| follows(c) || c == '.').len();
                    // The sign of an exponent belongs to a decimal number.
                    let exponent = start[..len]
                        .strip_suffix(['e', 'E'])
                        .is_some_and(|before| before.bytes().all(|b| b.is_ascii_digit() || b == b'.'));
                    if !exponent || !self.rest.starts_with(['+', '-']) {
                        break;
                    }
                    len += self.take(1).len();
                }
                Token::Number(&start[..len])
            }
            'a'..='z' | 'A'..='Z' => Token::Name(self.take_while(follows)),
            '_' | '$' | '%' if self.rest[1..].starts_with(follows) => {
                let len = 1 + self.rest[1..].find(|c| !follows(c)).unwrap_or(self.rest.len() - 1);
                Token::Name(self.take(len))
            }
            '_' | ',' | ';' | ':' | '{' | '}' | '(' | ')' | '[' | ']' | '<' | '>' | '+' | '-' | '@' | '!'
            | '|' => {
                self.take(1);
                Token::Mark(first)
            }
            other => return Err(at(self.line, format!("{other:?} begins no word of PTX"))),
        };
        Ok(Some(token))
    }
}

/// The value of an integer: decimal, hexadecimal, octal or binary, perhaps with `U` after it.
pub fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('U').unwrap_or(text);
    let (digits, radix) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&digits[2..], 16),
        [b'0', b'b' | b'B', ..] => (&digits[2..], 2),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (digits, 10),
    };
    // `from_str_radix` would take a sign.
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// The value of a float: `0f` and the eight digits of its bits, `0d` and sixteen, or a decimal number with a point or an
/// exponent. Only a decimal number may have a minus before it.
pub fn float(negative: bool, text: &str) -> Option<f32> {
    let bits = |digits: &str, count: usize| {
        let whole = digits.len() == count && digits.bytes().all(|b| b.is_ascii_hexdigit());
        whole.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
    };
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return bits(digits, 8).filter(|_| !negative).map(|bits| f32::from_bits(bits as u32));
    }
    if let Some(digits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return bits(digits, 16).filter(|_| !negative).map(|bits| f64::from_bits(bits) as f32);
    }
    let plain = text.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    let decimal = plain && text.contains(['.', 'e', 'E']);
    let number = text.parse::<f64>().ok().filter(|_| decimal)? as f32;
    number.is_finite().then_some(if negative { -number } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_the_four_bases_of_ptx_and_nothing_around_their_digits() {
        for (text, value) in [
            ("0", 0),
            ("7U", 7),
            ("0x1fU", 31),
            ("0X1F", 31),
            ("017", 15),
            ("0b101", 5),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(integer(text), Some(value), "{text}");
        }
        for text in
            ["", "U", "0x", "0b", "0b2", "08", "1UU", "1u", "12ab", "0x+1", "18446744073709551616", "1.0"]
        {
            assert_eq!(integer(text), None, "{text}");
        }
    }

    #[test]
    fn floats_have_all_digits_of_their_bits_or_a_point() {
        for (text, value) in [
            ("0f3F800000", 1.0),
            ("0FC0000000", -2.0),
            ("0d3FF0000000000000", 1.0),
            ("1.5", 1.5),
            ("1.5e-1", 0.15),
            ("1e3", 1000.0),
        ] {
            assert_eq!(float(false, text), Some(value), "{text}");
        }
        for text in [
            "0f3F8",
            "0f3F8000000",
            "0f3F80000g",
            "0f+F800000",
            "0d3FF0",
            "1",
            "1.2.3",
            "1.5e",
            "inf",
            "1.0f",
        ] {
            assert_eq!(float(false, text), None, "{text}");
        }
        assert_eq!(float(true, "1.5"), Some(-1.5));
        assert_eq!(float(true, "0f3F800000"), None);
    }
}
