//! What is timed: shapes by name, and the matrices whose results are kept.

use clap::ValueEnum;
use flashcore::{DType, Error, Mask, Pass, Problem, Quantiser};

use crate::shapes::{self, Shape};

/// Of what types the tensors of a cell are, and whether they become f8 within the call.
///
/// Its text is that part of a problem's text: `bf16`, `bf16 kv=f8` or `bf16 quantise=smooth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// The type of q, and of k and v where they have none of their own.
    pub dtype: DType,
    /// The type of k and v, where it is not that of q.
    pub kv: Option<DType>,
    /// How q, k and v become f8.
    pub quantise: Option<Quantiser>,
}

impl From<DType> for Types {
    fn from(dtype: DType) -> Self {
        Self { dtype, kv: None, quantise: None }
    }
}

impl Types {
    /// A shape's problem of these types.
    pub fn problem(&self, shape: Shape, mask: Mask) -> Problem {
        let mut problem = shape.problem(mask, self.dtype);
        (problem.dtype_kv, problem.quantise) = (self.kv, self.quantise);
        problem
    }

    /// The options of the command line that mean them.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec!["--dtype".into(), self.dtype.name().into()];
        if let Some(kv) = self.kv {
            options.extend(["--kv".into(), kv.name().into()]);
        }
        if let Some(quantiser) = self.quantise {
            let text = quantiser.to_string();
            let ways = text.split_once('=').map_or(AS_THEY_ARE, |(_, ways)| ways);
            options.extend(["--quantise".into(), ways.into()]);
        }
        options
    }
}

/// The word for quantising tensors as they are.
pub const AS_THEY_ARE: &str = "plain";

impl std::fmt::Display for Types {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.dtype)?;
        self.kv.map_or(Ok(()), |kv| write!(f, " kv={kv}"))?;
        self.quantise.map_or(Ok(()), |quantiser| write!(f, " {quantiser}"))
    }
}

impl std::str::FromStr for Types {
    type Err = Error;

    /// Reads the text, which must be as it is printed.
    fn from_str(text: &str) -> Result<Self, Error> {
        let Problem { dtype, dtype_kv: kv, quantise, .. } = format!("1x1x1x16 {text}").parse()?;
        let types = Self { dtype, kv, quantise };
        let why = || "write it as bf16, bf16 kv=f8 or bf16 quantise=smooth".into();
        let refused = || Error::Text { what: "types of tensors", given: text.into(), why: why() };
        (types.to_string() == text).then_some(types).ok_or_else(refused)
    }
}

/// What is to be timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Its name, if it has one.
    pub name: &'static str,
    /// Its sizes.
    pub shape: Shape,
    /// Its mask.
    pub mask: Mask,
    /// Its types.
    pub types: Types,
    /// Attention, or its gradients.
    pub pass: Pass,
}

impl Cell {
    /// The problem to compute.
    pub fn problem(&self) -> Problem {
        self.types.problem(self.shape, self.mask).with_pass(self.pass)
    }

    /// As `1x8x512x64 f16 causal`, with `backward` behind it for gradients.
    pub fn label(&self) -> String {
        let pass = if self.pass == Pass::Forward { "" } else { " backward" };
        format!("{} {} {}{pass}", self.shape, self.types, self.mask)
    }

    /// Whether memory rather than arithmetic sets its limit: one query reads every key and value once.
    pub fn is_decode(&self) -> bool {
        self.shape.len_q == 1
    }
}

/// A cell with the group that it is averaged in.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// What is timed.
    pub cell: Cell,
    /// The group's name.
    pub group: String,
}

impl Member {
    /// A cell that is averaged with all others of its run.
    pub fn of_all(cell: Cell) -> Self {
        Self { cell, group: "all".into() }
    }
}

/// A set of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Matrix {
    /// The CPU engine's record: four shapes in f32, bf16 and f16, causal and not, and a decode (25 cells)
    Cpu,
    /// 16k tokens, heads·head_dim 2048, head_dim 64, 128 and 256, lengths 512 to 16k, causal and not (36 cells)
    Anchors,
    /// Gradients in bf16, for the shapes of the anchors (36 cells)
    Training,
    /// The small shapes in which launches and idle SMs count, causal and not (18 cells)
    Small,
    /// One query against a cache: batch 1 to 256, 512 to 64k keys, head_dim 64 to 256; and 2 to 8 causal ones (22 cells)
    Decode,
}

const CPU: [[usize; 4]; 4] = [[1, 8, 512, 64], [1, 8, 2048, 64], [1, 8, 2048, 128], [1, 32, 1024, 128]];

const SMALL: [[usize; 4]; 9] = [
    [1, 8, 512, 64],
    [1, 8, 128, 64],
    [1, 8, 1024, 64],
    [1, 8, 2048, 64],
    [2, 8, 512, 64],
    [4, 16, 512, 64],
    [8, 16, 512, 64],
    [1, 8, 512, 128],
    [1, 32, 512, 128],
];

/// Batch, query heads, key heads, queries, keys and head_dim: those that share 8 key heads, as models have them; others; and
/// few queries, as of drafts that are verified.
const DECODE: [[usize; 6]; 22] = [
    [1, 32, 8, 1, 1000, 128],
    [1, 32, 8, 1, 4096, 128],
    [1, 32, 8, 1, 8192, 128],
    [1, 32, 8, 1, 32768, 128],
    [1, 32, 8, 1, 65536, 128],
    [8, 32, 8, 1, 2048, 128],
    [8, 32, 8, 1, 32768, 128],
    [16, 32, 8, 1, 4096, 128],
    [32, 32, 8, 1, 1024, 128],
    [32, 32, 8, 1, 8192, 128],
    [64, 32, 8, 1, 4096, 128],
    [64, 32, 8, 1, 8192, 128],
    [128, 32, 8, 1, 1024, 128],
    [2, 64, 8, 1, 4096, 128],
    [4, 28, 4, 1, 5000, 128],
    [1, 8, 1, 1, 16384, 256],
    [1, 32, 32, 1, 4096, 128],
    [16, 32, 32, 1, 2048, 64],
    [256, 16, 2, 1, 512, 64],
    [4, 32, 8, 2, 4096, 128],
    [4, 32, 8, 4, 4096, 128],
    [4, 32, 8, 8, 4096, 128],
];

/// Tokens of every cell of the anchors.
const TOKENS: usize = 16384;
/// Heads times head_dim of every cell of the anchors.
const WIDTH: usize = 2048;

impl Matrix {
    /// Its cells.
    pub fn cells(self) -> Vec<Member> {
        let masks = [Mask::None, Mask::Causal];
        let square = |[batch, heads, len, head_dim]: [usize; 4]| Shape {
            batch,
            heads_q: heads,
            heads_kv: heads,
            len_q: len,
            len_k: len,
            head_dim,
        };
        let mut members = Vec::new();
        let (dtype_of_anchors, pass) = match self {
            Matrix::Training => (DType::BF16, Pass::Backward),
            _ => (DType::F16, Pass::Forward),
        };
        let mut add = |shape: Shape, mask: Mask, dtype: DType, group: String| {
            members.push(Member { cell: Cell { name: "", shape, mask, types: dtype.into(), pass }, group });
        };
        match self {
            Matrix::Cpu => {
                for shape in CPU {
                    for dtype in [DType::F32, DType::BF16, DType::F16] {
                        for mask in masks {
                            add(square(shape), mask, dtype, "all".into());
                        }
                    }
                }
                let decode = shapes::parse("decode").expect("a shape by name");
                let shapes::Named { name, shape, dtype, .. } = decode;
                let types = dtype.into();
                members.push(Member::of_all(Cell { name, shape, mask: Mask::None, types, pass }));
            }
            Matrix::Anchors | Matrix::Training => {
                for head_dim in [64, 128, 256] {
                    for mask in masks {
                        for len in [512, 1024, 2048, 4096, 8192, 16384] {
                            let shape = square([TOKENS / len, WIDTH / head_dim, len, head_dim]);
                            add(shape, mask, dtype_of_anchors, format!("head_dim {head_dim} {mask}"));
                        }
                    }
                }
            }
            Matrix::Small => {
                for shape in SMALL {
                    for mask in masks {
                        let heads = shape[0] * shape[1];
                        let group = if heads <= 16 { "up to 16 heads" } else { "more than 16 heads" };
                        add(square(shape), mask, DType::F16, group.into());
                    }
                }
            }
            Matrix::Decode => {
                for [batch, heads_q, heads_kv, len_q, len_k, head_dim] in DECODE {
                    let shape = Shape { batch, heads_q, heads_kv, len_q, len_k, head_dim };
                    let (mask, group) =
                        if len_q == 1 { (Mask::None, "decode") } else { (Mask::Causal, "several queries") };
                    add(shape, mask, DType::BF16, group.into());
                }
            }
        }
        members
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_texts_and_options_that_mean_them() {
        for (text, options) in [
            ("f8", "--dtype f8"),
            ("bf16 kv=f8", "--dtype bf16 --kv f8"),
            ("f16 quantise", "--dtype f16 --quantise plain"),
            ("bf16 quantise=smooth,rotate:7", "--dtype bf16 --quantise smooth,rotate:7"),
        ] {
            let types: Types = text.parse().unwrap();
            assert_eq!((types.to_string(), types.options().join(" ")), (text.into(), options.into()));
        }
        for text in ["", "bf17", "bf16 causal", "kv=f8 bf16", "f8 kv=f8", "f8 quantise"] {
            assert!(text.parse::<Types>().is_err(), "{text}");
        }
    }

    #[test]
    fn every_anchor_has_16k_tokens_of_width_2048() {
        let members = Matrix::Anchors.cells();
        for Member { cell: Cell { shape, .. }, .. } in &members {
            assert_eq!((shape.batch * shape.len_q, shape.heads_q * shape.head_dim), (16384, 2048));
        }
        let groups: std::collections::BTreeSet<&str> = members.iter().map(|m| m.group.as_str()).collect();
        assert_eq!(groups.len(), 6);
    }

    #[test]
    fn matrices_have_no_cell_twice_and_every_cell_can_be_posed() {
        for (matrix, count) in [
            (Matrix::Cpu, 25),
            (Matrix::Anchors, 36),
            (Matrix::Training, 36),
            (Matrix::Small, 18),
            (Matrix::Decode, 22),
        ] {
            let members = matrix.cells();
            assert_eq!(members.len(), count, "{matrix:?}");
            for (i, member) in members.iter().enumerate() {
                assert!(member.cell.problem().check().is_ok());
                assert!(!members[..i].contains(member), "{}", member.cell.label());
            }
        }
    }
}
