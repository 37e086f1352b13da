//! What is timed: shapes by name, and the matrices whose results are kept.

use clap::ValueEnum;
use flashcore::{DType, Error, Keys, Mask, Pass, Problem, Quantiser};

use super::outcome::{SEED, judged_rows, most_rows};
use crate::cases::Passes;
use crate::ceilings::Work;
use crate::gpu::protocol::Asked;
use crate::gpu::sequences::{Lie, Sequences};
use crate::rule::Row;
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

    /// What is computed with 8 bits, in 16.
    pub fn in_16_bits(&self) -> Self {
        let wide = if self.dtype.is_f8() { DType::BF16 } else { self.dtype };
        Self { dtype: wide, kv: None, quantise: None }
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
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Its name, if it has one.
    pub name: &'static str,
    /// Its sizes.
    pub shape: Shape,
    /// Its mask.
    pub mask: Mask,
    /// Its types.
    pub types: Types,
    /// Attention, its gradients, or both in one call, as a training step takes them.
    pub pass: Passes,
    /// Sequences of lengths of their own, of which the shape has the longest; absent where all are as long.
    pub sequences: Option<Sequences>,
}

/// Ours on the same keys, where pages are timed: laid out one behind the other.
pub const DENSE: &str = "flashcore dense";
/// Ours on the same numbers, where floats of 8 bits are timed: in 16 bits.
pub const WIDE: &str = "flashcore 16-bit";

impl Cell {
    /// The cell of a problem that says what a cell can: lengths of sequences that it leaves open are shared out.
    pub fn of(problem: &Problem) -> Result<Self, String> {
        let Problem { batch, heads_q, heads_kv, len_q, len_k, head_dim, mask, .. } = *problem;
        let shape = Shape { batch, heads_q, heads_kv, len_q, len_k, head_dim };
        let types = Types { dtype: problem.dtype, kv: problem.dtype_kv, quantise: problem.quantise };
        let (pass, sequences) = (problem.pass.into(), Sequences::of(problem));
        let cell = Self { name: "", shape, mask, types, pass, sequences };
        let mut again = cell.problem();
        // A pool may have more pages than are used, and lse is computed where it is wanted.
        if matches!(problem.keys, Keys::Paged { .. }) {
            again.keys = problem.keys;
        }
        again.lse = problem.lse;
        if again == *problem && cell.sequences.as_ref().is_none_or(|it| it.fit(&cell.dense())) {
            return Ok(cell);
        }
        Err(format!(
            "'{problem}': what is timed has sizes, types, a mask, and sequences that are packed or cached, and nothing else"
        ))
    }

    /// The problem to compute; where both passes are, that of the last.
    pub fn problem(&self) -> Problem {
        let dense = self.dense();
        self.sequences.as_ref().map_or(dense, |sequences| sequences.problem(dense))
    }

    /// The problem of as many sequences that are all as long as the longest.
    pub fn dense(&self) -> Problem {
        self.types.problem(self.shape, self.mask).with_pass(self.pass.last())
    }

    /// The problem as workers are asked.
    pub fn asked(&self) -> Asked {
        let problem = self.problem();
        let asked = match &self.sequences {
            Some(sequences) => Asked::of_sequences(&problem, sequences),
            None => Asked::of(&problem),
        };
        Asked { forward_too: self.pass == Passes::Both, ..asked }
    }

    /// What a call has to do: what each of its sequences asks.
    pub fn work(&self) -> Work {
        let dense = self.dense();
        let each = self.sequences.as_ref().map_or_else(|| vec![dense], |sequences| sequences.each(&dense));
        let one = |last: Problem| match self.pass {
            Passes::One(_) => Work::of(&last),
            Passes::Both => Work::of(&last.with_pass(Pass::Forward).with_lse()).and(Work::of(&last)),
        };
        each.into_iter().map(one).reduce(Work::and).unwrap_or_else(|| Work::of(&dense))
    }

    /// The same in other forms, which ours is compared with where a matrix wants that.
    pub fn forms(&self) -> Vec<(&'static str, Self)> {
        let mut forms = Vec::new();
        if let Some(sequences) = self.sequences.as_ref().filter(|it| matches!(it.lie, Lie::Pages(_))) {
            forms.push((DENSE, Self { sequences: Some(sequences.lying(Lie::Cache)), ..self.clone() }));
        }
        let types = self.types.in_16_bits();
        if types != self.types {
            forms.push((WIDE, Self { types, ..self.clone() }));
        }
        forms
    }

    /// The cell that a contender of this name computes.
    pub fn of_contender(&self, name: &str) -> Self {
        let found = self.forms().into_iter().find(|(form, _)| *form == name);
        found.map_or_else(|| self.clone(), |(_, cell)| cell)
    }

    /// The rows that are judged: as many as the oracle can compute in reasonable time, spread over all heads.
    pub fn judged_rows(&self) -> Vec<Row> {
        let problem = self.problem();
        match &self.sequences {
            Some(sequences) => sequences.rows(&problem, most_rows(&problem), SEED),
            None => judged_rows(&problem),
        }
    }

    /// As `1x8x512x64 f16 causal`, with `backward` or `both` behind it where that is the pass.
    pub fn label(&self) -> String {
        let pass = if self.pass == Pass::Forward.into() { "" } else { &format!(" {}", self.pass) };
        let sequences = self.sequences.as_ref().map_or_else(String::new, |it| format!(" {it}"));
        format!("{} {} {}{pass}{sequences}", self.shape, self.types, self.mask)
    }

    /// Whether the same call without its mask is timed beside it, for the share of its rate: causal attention itself.
    pub fn has_causal_share(&self) -> bool {
        self.mask == Mask::Causal && self.pass == Pass::Forward.into() && self.sequences.is_none()
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
    /// Whether ours is compared with its other forms too.
    pub with_forms: bool,
}

impl Member {
    /// A cell that is averaged with all others of its run.
    pub fn of_all(cell: Cell) -> Self {
        Self { cell, group: "all".into(), with_forms: false }
    }
}

/// A set of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Matrix {
    /// The CPU engine's record: four shapes in f32, bf16 and f16, causal and not, and a decode (25 cells); gradients in f32
    /// and bf16 (16 cells)
    Cpu,
    /// 16k tokens, heads·head_dim 2048, head_dim 64, 128 and 256, lengths 512 to 16k, causal and not (36 cells)
    Anchors,
    /// The anchors as a training step has them: in bf16, and the backward pass unless --pass says otherwise (36 cells)
    Training,
    /// The small shapes in which launches and idle SMs count, causal and not (18 cells)
    Small,
    /// One query against a cache: batch 1 to 256, 512 to 64k keys, head_dim 64 to 256; 2 to 8 causal ones; and batches whose
    /// sequences differ in length (26 cells)
    Decode,
    /// The same caches in pages of 16, 64 and 256 keys, and laid out densely (18 cells)
    Paged,
    /// Packed sequences: prompts of a batch, even, short, and very uneven ones, and prompts beside single tokens (8 cells)
    Varlen,
    /// 8-bit floats, beside the same numbers in 16 bits: head_dim 64, 128 and 256, causal and not, 2k to 16k keys; with the
    /// quantising of bf16 in the call from 4k keys on; and as a cache (48 cells)
    F8,
}

/// Prompts of a batch, as a server packs them.
const PROMPTS: [u32; 16] =
    [64, 4096, 128, 2048, 333, 1000, 777, 3000, 512, 96, 1536, 2222, 64, 700, 1800, 256];

/// The caches of a batch whose sequences began at different times.
const MIXED: [u32; 16] =
    [128, 512, 1000, 2048, 4096, 8192, 300, 777, 16384, 64, 3000, 1536, 6000, 12000, 256, 32768];

/// Batch, queries and keys of the caches that are laid out in pages.
const PAGED: [[usize; 3]; 5] = [[1, 1, 8192], [8, 1, 4096], [32, 1, 4096], [64, 1, 2048], [4, 8, 4096]];

/// Caches of 8-bit floats: batch, heads, key heads, keys and head_dim.
const F8_CACHES: [[usize; 5]; 6] = [
    [1, 32, 8, 32768, 128],
    [8, 32, 8, 32768, 128],
    [32, 32, 8, 8192, 128],
    [64, 32, 8, 4096, 128],
    [16, 32, 32, 8192, 64],
    [8, 8, 1, 65536, 256],
];

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
/// Their lengths.
const ANCHOR_LENGTHS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Heads times head_dim of every cell of the anchors.
const WIDTH: usize = 2048;

impl Matrix {
    /// The pass of its cells unless another is asked for.
    fn usual_pass(self) -> Passes {
        if self == Matrix::Training { Pass::Backward.into() } else { Pass::Forward.into() }
    }

    /// Its cells, in its usual pass.
    pub fn usual_cells(self) -> Vec<Member> {
        self.cells(self.usual_pass()).unwrap_or_default()
    }

    /// Its cells in a pass, or why they have none.
    pub fn cells(self, pass: Passes) -> Result<Vec<Member>, String> {
        let forward = pass == Pass::Forward.into();
        if matches!(self, Matrix::Decode | Matrix::Paged | Matrix::F8) && !forward {
            return Err(format!(
                "--pass {pass}: caches and 8-bit floats have no gradients; the matrices that have are training, small, varlen \
                 and cpu"
            ));
        }
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
        // Gradients are wanted in the type that models are trained in.
        let usual = if forward && self != Matrix::Training { DType::F16 } else { DType::BF16 };
        let of = |shape: Shape, mask: Mask, types: Types, sequences: Option<Sequences>, group: String| {
            let cell = Cell { name: "", shape, mask, types, pass, sequences };
            Member { cell, group, with_forms: matches!(self, Matrix::Paged | Matrix::F8) }
        };
        let mut add = |shape: Shape, mask: Mask, dtype: DType, group: String| {
            members.push(of(shape, mask, dtype.into(), None, group));
        };
        // 32 query heads and 8 key heads of 128, as models have them.
        let grouped = |batch: usize, len_q: usize, len_k: usize| Shape {
            batch,
            heads_q: 32,
            heads_kv: 8,
            len_q,
            len_k,
            head_dim: 128,
        };
        let bf16 = Types::from(DType::BF16);
        // As many queries of each sequence against caches of these lengths.
        let cached = |keys: &[u32], len_q: usize, lie: Lie, group: &str| {
            let longest = keys.iter().max().map_or(0, |&len| len as usize);
            let mask = if len_q == 1 { Mask::None } else { Mask::Causal };
            let sequences = Sequences::cached(keys.into(), lie);
            of(grouped(keys.len(), len_q, longest), mask, bf16, Some(sequences), group.into())
        };
        // Prompts, each of which attends to itself.
        let packed = |lengths: &[u32], shape: Shape, mask: Mask| {
            let longest = lengths.iter().max().map_or(0, |&len| len as usize);
            let shape = Shape { batch: lengths.len(), len_q: longest, len_k: longest, ..shape };
            of(shape, mask, bf16, Some(Sequences::packed(lengths)), "packed".into())
        };
        match self {
            Matrix::Cpu => {
                let dtypes = [DType::F32, DType::BF16, DType::F16];
                for shape in CPU {
                    for &dtype in &dtypes[..if forward { 3 } else { 2 }] {
                        for mask in masks {
                            add(square(shape), mask, dtype, "all".into());
                        }
                    }
                }
                let decode = shapes::parse("decode").expect("a shape by name");
                let shapes::Named { name, shape, dtype, .. } = decode;
                let types = dtype.into();
                let decode =
                    Member::of_all(Cell { name, shape, mask: Mask::None, types, pass, sequences: None });
                members.extend(forward.then_some(decode));
            }
            Matrix::Anchors | Matrix::Training => {
                for head_dim in [64, 128, 256] {
                    for mask in masks {
                        for len in ANCHOR_LENGTHS {
                            let shape = square([TOKENS / len, WIDTH / head_dim, len, head_dim]);
                            add(shape, mask, usual, format!("head_dim {head_dim} {mask}"));
                        }
                    }
                }
            }
            Matrix::Small => {
                for shape in SMALL {
                    for mask in masks {
                        let heads = shape[0] * shape[1];
                        let group = if heads <= 16 { "up to 16 heads" } else { "more than 16 heads" };
                        add(square(shape), mask, usual, group.into());
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
                let ramp: Vec<u32> = (1..=64).map(|n| 64 * n).collect();
                let one_long: Vec<u32> = [65536].into_iter().chain([512; 63]).collect();
                let drafts = [100, 4096, 1000, 2500, 8192, 50, 3000, 700];
                let mixed = |keys: &[u32], len_q| cached(keys, len_q, Lie::Cache, "mixed lengths");
                members.extend([mixed(&MIXED, 1), mixed(&ramp, 1), mixed(&one_long, 1), mixed(&drafts, 4)]);
            }
            Matrix::Paged => {
                for page in [16, 64, 256] {
                    for [batch, len_q, len_k] in PAGED {
                        let keys = vec![len_k as u32; batch];
                        members.push(cached(&keys, len_q, Lie::Pages(page), &format!("pages of {page}")));
                    }
                    members.push(cached(&MIXED, 1, Lie::Pages(page), &format!("pages of {page}")));
                }
            }
            Matrix::Varlen => {
                let (grouped, narrow) = (grouped(1, 1, 1), square([1, 16, 1, 64]));
                let one_long: Vec<u32> = [16384].into_iter().chain([64; 15]).collect();
                let short: Vec<u32> = (0..256).map(|n| 16 + 48 * (n % 3)).collect();
                members.extend([
                    packed(&PROMPTS, grouped, Mask::Causal),
                    packed(&PROMPTS, grouped, Mask::None),
                    packed(&PROMPTS, narrow, Mask::Causal),
                    packed(&[2048; 8], grouped, Mask::Causal),
                    packed(&one_long, grouped, Mask::Causal),
                    packed(&short, grouped, Mask::Causal),
                    packed(&short, narrow, Mask::None),
                ]);
                if forward {
                    // Two parts of prompts, and the next tokens of others, whose caches are in pages.
                    let queries: Vec<u32> = [512, 512].into_iter().chain([1; 14]).collect();
                    let sequences = Sequences {
                        queries: Some(queries),
                        ..Sequences::cached(MIXED.into(), Lie::Pages(16))
                    };
                    let shape = Shape { batch: MIXED.len(), len_q: 512, len_k: 32768, ..grouped };
                    members.push(of(shape, Mask::Causal, bf16, Some(sequences), "mixed".into()));
                }
            }
            Matrix::F8 => {
                let smooth = Types { quantise: Some(Quantiser::new().smoothed()), ..bf16 };
                for (types, lens) in
                    [(DType::F8E4M3.into(), &ANCHOR_LENGTHS[2..]), (smooth, &ANCHOR_LENGTHS[3..])]
                {
                    for head_dim in [64, 128, 256] {
                        for mask in masks {
                            for &len in lens {
                                let shape = square([TOKENS / len, WIDTH / head_dim, len, head_dim]);
                                let from = if types == smooth { "quantised" } else { "head_dim" };
                                let group = format!("{from} {head_dim} {mask}");
                                members.push(of(shape, mask, types, None, group));
                            }
                        }
                    }
                }
                for [batch, heads_q, heads_kv, len_k, head_dim] in F8_CACHES {
                    let shape = Shape { batch, heads_q, heads_kv, len_q: 1, len_k, head_dim };
                    let types = Types { kv: Some(DType::F8E4M3), ..bf16 };
                    members.push(of(shape, Mask::None, types, None, "cache".into()));
                }
            }
        }
        Ok(members)
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
        let members = Matrix::Anchors.usual_cells();
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
            (Matrix::Decode, 26),
            (Matrix::Paged, 18),
            (Matrix::Varlen, 8),
            (Matrix::F8, 48),
        ] {
            let members = matrix.usual_cells();
            assert_eq!(members.len(), count, "{matrix:?}");
            for (i, member) in members.iter().enumerate() {
                let cell = &member.cell;
                assert!(cell.problem().check().is_ok(), "{}", cell.label());
                assert!(cell.sequences.as_ref().is_none_or(|it| it.fit(&cell.dense())), "{}", cell.label());
                assert!(!member.with_forms || cell.forms().len() == 1, "{}", cell.label());
                assert!(!members[..i].contains(member), "{}", member.cell.label());
            }
        }
    }

    #[test]
    fn gradients_are_of_the_shapes_that_are_trained_in_the_types_that_they_are_trained_in() {
        for pass in [Passes::One(Pass::Backward), Passes::Both] {
            for (matrix, count) in [(Matrix::Training, 36), (Matrix::Small, 18), (Matrix::Cpu, 16)] {
                let members = matrix.cells(pass).unwrap();
                assert_eq!(members.len(), count, "{matrix:?}");
                assert!(members.iter().all(|it| it.cell.pass == pass && it.cell.types.dtype != DType::F16));
                assert!(members.iter().all(|it| it.cell.label().ends_with(pass.name())));
            }
            assert!(Matrix::Decode.cells(pass).unwrap_err().contains("no gradients"));
        }
        let few = Matrix::Small.cells(Pass::Backward.into()).unwrap();
        let few = few.iter().filter(|it| it.group == "up to 16 heads").count();
        assert!((10..18).contains(&few), "{few}");
    }

    #[test]
    fn a_problem_in_words_is_a_cell_unless_it_says_what_a_cell_cannot() {
        for text in [
            "4x8/2x70x64 bf16 causal packed=200",
            "8x32/8x1/4096x128 bf16 key-lengths page=16/2051",
            "1x8x512x64 f16",
        ] {
            let problem: Problem = text.parse().unwrap();
            let cell = Cell::of(&problem).unwrap();
            assert_eq!((cell.problem(), cell.sequences.is_some()), (problem, text.contains("pa")), "{text}");
        }
        let why = Cell::of(&"1x8x512x64 f16 softcap=30".parse().unwrap()).unwrap_err();
        assert!(why.contains("softcap=30"), "{why}");
    }

    #[test]
    fn both_passes_count_three_and_a_half_times_the_operations_of_the_first() {
        let cell = |pass| Matrix::Small.cells(pass).unwrap().swap_remove(0).cell;
        let work = |pass| cell(pass).work();
        let both = work(Passes::Both);
        let forward = work(Pass::Forward.into()).flops;
        assert_eq!(both.flops, 3.5 * forward);
        assert_eq!(both.flops, forward + work(Pass::Backward.into()).flops);
        assert!(both.bytes > work(Pass::Backward.into()).bytes);
        assert!(cell(Passes::Both).asked().forward_too && !cell(Pass::Backward.into()).asked().forward_too);
    }
}
