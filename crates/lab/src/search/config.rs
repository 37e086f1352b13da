//! `evo.yaml`: what a search is for and how it goes about it, in a file.

use flashcore::{DType, Mask, Pass, Problem};
use serde::Deserialize;

use crate::bench::cells::Cell;
use crate::shapes;

/// The file's fields; all may be left out.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The target cases.
    pub shapes: Vec<Wanted>,
    /// The kernel.
    pub kernel: Option<String>,
    /// Time, such as 20m.
    pub budget: Option<String>,
    /// Candidates per generation.
    pub generation: Option<usize>,
    /// The most generations.
    pub generations: Option<usize>,
    /// The seed of random choices and inputs.
    pub seed: Option<u64>,
    /// Who proposes: elites, random, exhaustive.
    pub proposers: Option<Vec<String>>,
    /// A command that proposes over JSON lines.
    pub external: Option<String>,
    /// How much faster a winner must be, in percent.
    pub gain: Option<f64>,
    /// In how many of the target cases.
    pub cases: Option<usize>,
    /// Where the journal and the results go.
    pub output_dir: Option<String>,
}

/// A target case in the file: a text as on the command line, or its fields.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Wanted {
    /// As `mission` or `4x16x512x64:causal:bf16`.
    Text(String),
    /// Field by field, as in `rbk_config.yaml`.
    Fields(Fields),
}

/// A shape by its fields.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fields {
    /// A name, for people.
    pub name: Option<String>,
    /// Batch entries.
    pub batch_size: usize,
    /// Heads.
    pub num_heads: usize,
    /// Queries and keys per head.
    pub seq_len: usize,
    /// Elements of a query, a key and a value.
    pub head_dim: usize,
    /// Whether it is causal.
    #[serde(default)]
    pub causal: bool,
    /// f16 or bf16.
    pub dtype: Option<String>,
}

impl Config {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_saphyr::from_str(text).map_err(|error| error.to_string())
    }
}

/// A target as it was asked for: its dtype may be left open.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The shape, its mask, and the dtype that it has unless another is asked for.
    pub cell: Cell,
    /// Whether the dtype was said.
    pub has_dtype: bool,
}

/// A shape with what follows it after colons, as `4x16x512x64:causal:bf16` or `mission:backward`; or a problem in words, as
/// `16x32/8x4096x128 bf16 causal packed=18632`.
pub fn target(text: &str) -> Result<Target, String> {
    if text.contains(' ') {
        let problem: Problem = text.parse().map_err(|error: flashcore::Error| error.to_string())?;
        return Ok(Target { cell: Cell::of(&problem)?, has_dtype: true });
    }
    let mut parts = text.split(':');
    let named = shapes::parse(parts.next().unwrap_or_default())?;
    let mask = if named.causal { Mask::Causal } else { Mask::None };
    let mut target = Target {
        cell: Cell {
            name: named.name,
            shape: named.shape,
            mask,
            types: named.dtype.into(),
            pass: Pass::Forward.into(),
            sequences: None,
        },
        has_dtype: false,
    };
    for part in parts {
        match part {
            "causal" => target.cell.mask = Mask::Causal,
            "full" => target.cell.mask = Mask::None,
            "backward" => target.cell.pass = Pass::Backward.into(),
            dtype => {
                target.cell.types.dtype = dtype.parse::<DType>().map_err(|_| {
                    format!("'{part}' after a shape: possible are causal, full, backward, f16 and bf16")
                })?;
                target.has_dtype = true;
            }
        }
    }
    Ok(target)
}

impl Wanted {
    /// The target that is meant.
    pub fn target(&self) -> Result<Target, String> {
        match self {
            Wanted::Text(text) => target(text),
            Wanted::Fields(Fields { batch_size, num_heads, seq_len, head_dim, causal, dtype, .. }) => {
                let mask = if *causal { ":causal" } else { "" };
                let dtype = dtype.as_ref().map(|dtype| format!(":{dtype}")).unwrap_or_default();
                target(&format!("{batch_size}x{num_heads}x{seq_len}x{head_dim}{mask}{dtype}"))
            }
        }
    }
}

/// The cases of some targets. A target whose dtype was left open is a case in each of `dtypes`; where none is asked
/// for, in f16 and bf16 if it is alone, so that there are two, and else in its own.
pub fn cases(targets: &[Target], dtypes: Option<&[DType]>) -> Vec<Cell> {
    let alone = targets.len() == 1;
    let mut cells: Vec<Cell> = Vec::new();
    for target in targets {
        let own = [target.cell.types.dtype];
        let of_target: &[DType] = match dtypes {
            _ if target.has_dtype => &own,
            Some(dtypes) => dtypes,
            None if alone => &[DType::F16, DType::BF16],
            None => &own,
        };
        for &dtype in of_target {
            let cell = Cell { types: dtype.into(), ..target.cell.clone() };
            if !cells.contains(&cell) {
                cells.push(cell);
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_shapes_by_name_or_by_their_fields() {
        let text = "
shapes:
  - mission
  - 4x16x512x64:causal
  - { name: long, batch_size: 2, num_heads: 32, seq_len: 8192, head_dim: 64, causal: false, dtype: bf16 }
budget: 20m
proposers: [elites, random]
gain: 3
";
        let config = Config::parse(text).unwrap();
        let targets: Vec<Target> = config.shapes.iter().map(|wanted| wanted.target().unwrap()).collect();
        let labels: Vec<String> = cases(&targets, None).iter().map(Cell::label).collect();
        assert_eq!(labels, ["1x8x512x64 f16 full", "4x16x512x64 f16 causal", "2x32x8192x64 bf16 full"]);
        assert_eq!(config.budget.as_deref(), Some("20m"));
    }

    #[test]
    fn a_field_that_nobody_knows_is_refused_by_its_name() {
        let error = Config::parse("shapes: [mission]\ngeneratoin: 3\n").unwrap_err();
        assert!(error.contains("generatoin"), "{error}");
        assert_eq!(target("mission:backward").unwrap().cell.pass, Pass::Backward.into());
        assert!(target("mission:casual").unwrap_err().contains("causal"));
    }

    #[test]
    fn a_single_shape_makes_two_cases() {
        let mission = [target("mission").unwrap()];
        assert_eq!(cases(&mission, None).len(), 2);
        assert_eq!(cases(&mission, Some(&[DType::F16])).len(), 1);
        assert_eq!(cases(&["mission", "long"].map(|shape| target(shape).unwrap()), None).len(), 2);
        assert_eq!(cases(&[target("mission:bf16").unwrap()], None).len(), 1);
    }
}
