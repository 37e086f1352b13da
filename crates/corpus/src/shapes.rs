//! Shapes by name, one definition each, and shapes spelled out as BxHxSxD.

use flashcore::{DType, Error, Mask, Problem};

/// A shape that has a name in this project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name.
    pub name: &'static str,
    /// The shape, as it could be spelled out.
    pub shape: Shape,
    /// Whether it is causal unless said otherwise.
    pub causal: bool,
    /// Its dtype unless said otherwise.
    pub dtype: DType,
}

/// Sizes of a problem: batch, heads, length and head dim, with separate sizes for queries and keys where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Batch entries.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Queries per head.
    pub len_q: usize,
    /// Keys per head.
    pub len_k: usize,
    /// Elements of a query, a key and a value.
    pub head_dim: usize,
}

const fn square(batch: usize, heads: usize, len: usize, head_dim: usize) -> Shape {
    Shape { batch, heads_q: heads, heads_kv: heads, len_q: len, len_k: len, head_dim }
}

const fn named(name: &'static str, shape: Shape) -> Named {
    Named { name, shape, causal: false, dtype: DType::F16 }
}

const fn causal(named: Named) -> Named {
    Named { causal: true, ..named }
}

/// Every named shape.
pub const NAMED: [Named; 13] = [
    named("tiny", square(1, 1, 32, 64)),
    named("small", square(1, 2, 64, 64)),
    named("medium", square(1, 4, 128, 64)),
    named("mission", square(1, 8, 512, 64)),
    named("multi_batch", square(4, 8, 256, 64)),
    causal(named("stress", square(1, 8, 8192, 128))),
    causal(named("canonical_1", square(4, 16, 2048, 128))),
    causal(named("canonical_2", square(1, 8, 4096, 128))),
    named("canonical_3", square(8, 16, 1024, 64)),
    named("long", square(1, 8, 2048, 64)),
    Named { dtype: DType::BF16, ..causal(named("large", square(4, 16, 4096, 128))) },
    named("wide", square(1, 32, 512, 128)),
    // One new token against a KV cache that is larger than any last-level cache.
    named("decode", Shape { len_q: 1, ..square(1, 32, 8192, 128) }),
];

impl Shape {
    /// The problem of this shape.
    pub fn problem(&self, mask: Mask, dtype: DType) -> Problem {
        Problem::new(self.batch, self.heads_q, self.len_q, self.head_dim, dtype)
            .with_kv(self.heads_kv, self.len_k)
            .with_mask(mask)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pair = |q: usize, kv: usize| if q == kv { q.to_string() } else { format!("{q}/{kv}") };
        let (heads, len) = (pair(self.heads_q, self.heads_kv), pair(self.len_q, self.len_k));
        f.pad(&format!("{}x{heads}x{len}x{}", self.batch, self.head_dim))
    }
}

/// A shape as a user asks for it: by name or spelled out.
///
/// ```
/// use flashcore_corpus::shapes::parse;
/// assert_eq!(parse("mission").unwrap().shape, parse("1x8x512x64").unwrap().shape);
/// assert_eq!(parse("1x32/8x1/4096x128").unwrap().shape.heads_kv, 8);
/// ```
pub fn parse(text: &str) -> Result<Named, String> {
    if let Some(named) = NAMED.into_iter().find(|named| named.name == text) {
        return Ok(named);
    }
    let fail = |why: &str| Err(format!("'{text}' {why}.\n\n{}", possible()));
    let problem: Problem = match text.parse() {
        Ok(problem) => problem,
        Err(Error::Text { .. }) => return fail("is not a shape"),
        Err(error) => return fail(&format!("cannot run: {error}")),
    };
    let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = problem;
    if text.contains(char::is_whitespace) || head_dim != head_dim_v {
        return fail("is not a shape");
    }
    let shape = Shape { batch, heads_q, heads_kv, len_q, len_k, head_dim };
    if [batch, heads_q, len_q, len_k].contains(&0) {
        return fail("has nothing in it to time");
    }
    Ok(named("", shape))
}

/// The names and the form, for messages.
pub fn possible() -> String {
    let line = |named: Named| {
        let mask = if named.causal { " causal" } else { "" };
        format!("  {:<12} {:<18} {}{mask}\n", named.name, named.shape, named.dtype)
    };
    let names: String = NAMED.into_iter().map(line).collect();
    format!("Possible shapes by name:\n{names}")
        + "or spelled out as BxHxSxD (batch, heads, length, head_dim), such as 1x8x512x64;\n\
            with a slash where queries and keys differ, such as 1x32/8x1/4096x128"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse_to_themselves() {
        for named in NAMED {
            assert_eq!(parse(named.name), Ok(named));
            assert_eq!(NAMED.iter().filter(|other| other.name == named.name).count(), 1);
        }
    }

    #[test]
    fn a_spelled_out_shape_prints_as_it_was_given() {
        for text in ["1x8x512x64", "2x32/8x1/4096x128", "3x4x7/9x16"] {
            assert_eq!(parse(text).unwrap().shape.to_string(), text);
        }
    }

    #[test]
    fn an_unknown_shape_is_answered_with_the_names_and_the_form() {
        for text in ["misson", "1x8x512", "1x8x512x64x2", "ax8x512x64", "1x-8x512x64", "", "0x8x512x64"] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("mission") && error.contains("BxHxSxD"), "{error}");
        }
        assert!(parse("1x8/3x512x64").unwrap_err().contains("multiple"));
        assert!(parse("1x8x512x4096").unwrap_err().contains("head_dim"));
    }
}
