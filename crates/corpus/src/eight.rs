//! A forward pass of 8-bit floats as a GPU's kernels do it, and the slips that such kernels make: what the check must accept,
//! and what it must refuse.
//!
//! Keys are taken in tiles, from the last to the first. Probabilities are relative to the largest so far, scaled up by 2^8
//! and rounded to f8; their products with the values of a tile are added with 14 bits, as tensor cores do, and then to the
//! output in f32.

use flashcore::{Attention, DType, Mask, Name, Problem, Tensor, TensorMut};
use flashcore_judge::inputs::Distribution;

use crate::cases::Case;
use crate::engine::Engine;

/// Keys of a tile.
const TILE: usize = 64;

/// Products that are added at once.
const BLOCK: usize = 32;

/// Two to the number of bits that a sum keeps below its leading one.
const STEPS: f32 = 8192.0;

/// In which order the keys of sixteen lie in the registers of a product, which the values have to follow.
const IN_REGISTERS: [usize; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

/// What may be wrong with a forward pass of 8-bit floats, and with it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slip {
    /// The descale of one tensor is left out.
    Forgotten(Name),
    /// The descales are those of the next kv head.
    OtherHead,
    /// The descales are those of the block of keys before.
    BlockBefore,
    /// Numbers are divided by their descales.
    Inverted,
    /// Probabilities are scaled up so far that the largest are beyond f8.
    Saturated,
    /// Values lie in another order than the probabilities that they are multiplied with.
    Permuted,
    /// Sums of 14 bits go on over all keys.
    FewBits,
    /// The values of one tile of keys are left out.
    TileLost,
}

impl Slip {
    /// All of them.
    pub const ALL: [Slip; 10] = [
        Slip::Forgotten(Name::QDescale),
        Slip::Forgotten(Name::KDescale),
        Slip::Forgotten(Name::VDescale),
        Slip::OtherHead,
        Slip::BlockBefore,
        Slip::Inverted,
        Slip::Saturated,
        Slip::Permuted,
        Slip::FewBits,
        Slip::TileLost,
    ];

    /// What it shows in: sums of few bits among many keys that are alike, others in heads with different descales.
    pub fn planted_in(self) -> Case {
        if self == Slip::FewBits {
            let problem = Problem::new(1, 1, 4, 16, DType::F8E4M3).with_kv(1, 16384).with_lse();
            return Case {
                inputs: Distribution::ConstantValues,
                ..Case::new("8 bits among many keys", problem)
            };
        }
        let problem = Problem::new(2, 4, 70, 32, DType::F8E4M3).with_kv(2, 150).with_descales().with_lse();
        if self == Slip::BlockBefore {
            return Case::new("8 bits with descales of blocks of keys", problem.with_descales_per(48));
        }
        Case::new("8 bits with descales", problem.with_mask(Mask::Causal))
    }

    /// What it is, in words.
    pub const fn name(self) -> &'static str {
        match self {
            Slip::Forgotten(Name::QDescale) => "8 bits: the descale of q forgotten",
            Slip::Forgotten(Name::KDescale) => "8 bits: the descale of k forgotten",
            Slip::Forgotten(_) => "8 bits: the descale of v forgotten",
            Slip::OtherHead => "8 bits: descales of another head",
            Slip::BlockBefore => "8 bits: descales of the block of keys before",
            Slip::Inverted => "8 bits: divided by the descales",
            Slip::Saturated => "8 bits: the largest probabilities cut off at 448",
            Slip::Permuted => "8 bits: values in another order than probabilities",
            Slip::FewBits => "8 bits: sums of 14 bits over all keys",
            Slip::TileLost => "8 bits: the values of a tile left out",
        }
    }
}

/// An engine for 8-bit floats alone, right or with a slip.
#[derive(Clone, Copy, Debug)]
pub struct Tiled {
    /// What is wrong with it, if anything.
    pub slip: Option<Slip>,
}

impl Engine for Tiled {
    fn name(&self) -> &'static str {
        self.slip.map_or("tiled 8-bit floats", Slip::name)
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        if !problem.dtype.is_f8() {
            return Err("others than f8 are not its business".into());
        }
        if problem.key_lengths { Err("key lengths are not its business".into()) } else { Ok(()) }
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        mut lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let Problem { heads_kv, len_q, len_k, head_dim, head_dim_v, .. } = problem;
        let (q, k, v) = (q.to_f32(), k.to_f32(), v.to_f32());
        for row in 0..problem.batch * problem.heads_q * len_q {
            let (b, h, s) = (row / len_q / problem.heads_q, row / len_q % problem.heads_q, row % len_q);
            let head_kv = h / problem.group();
            let of_block = |block: usize| {
                let given = attention.given_descales();
                let mut descales = match self.slip {
                    Some(Slip::OtherHead) => given.at(b, (head_kv + 1) % heads_kv, block),
                    Some(Slip::BlockBefore) => given.at(b, head_kv, block.saturating_sub(1)),
                    _ => given.at(b, head_kv, block),
                };
                for (descale, name) in descales.iter_mut().zip(Name::DESCALES) {
                    match self.slip {
                        Some(Slip::Forgotten(forgotten)) if forgotten == name => *descale = 1.0,
                        Some(Slip::Inverted) => *descale = 1.0 / *descale,
                        _ => {}
                    }
                }
                descales
            };
            let blocks = problem.descale_block(len_k.saturating_sub(1)) + 1;
            let descales = (0..blocks).map(of_block).collect();
            let first = (b * heads_kv + head_kv) * len_k;
            let head = Head {
                problem: &problem,
                keys: &k[first * head_dim..][..len_k * head_dim],
                values: &v[first * head_dim_v..][..len_k * head_dim_v],
                descales,
            };
            let (out, of_row) = self.attend(&head, &q[row * head_dim..][..head_dim], s);
            o.write_row(b, h, s, &out);
            if let Some(lse) = &mut lse {
                lse.write_row(b, h, s, &[of_row]);
            }
        }
        Ok(())
    }
}

/// The keys and values of a kv head, as they are stored.
struct Head<'a> {
    problem: &'a Problem,
    keys: &'a [f32],
    values: &'a [f32],
    /// Those of each block of keys.
    descales: Vec<[f32; 3]>,
}

impl Tiled {
    /// The output of a query, and its lse.
    fn attend(self, head: &Head<'_>, query: &[f32], s: usize) -> (Vec<f32>, f32) {
        let Problem { len_q, len_k, head_dim, head_dim_v, mask, scale, softcap, .. } = *head.problem;
        let of_key = |key: usize| head.descales[head.problem.descale_block(key)];
        let seen = mask.keys(s, len_q, len_k);
        let mut out = vec![0.0_f32; head_dim_v];
        if seen.is_empty() {
            return (out, f32::NEG_INFINITY);
        }
        let top = if self.slip == Some(Slip::Saturated) { 512.0 } else { 256.0 };
        let score = |key: usize| {
            let [of_q, of_k, _] = of_key(key);
            let key = &head.keys[key * head_dim..][..head_dim];
            let dot: f32 = query.iter().zip(key).map(|(a, b)| a * b).sum();
            let score = dot * (scale * of_q * of_k);
            softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        for tile in (seen.start / TILE..seen.end.div_ceil(TILE)).rev() {
            let keys = seen.start.max(tile * TILE)..seen.end.min((tile + 1) * TILE);
            let scores: Vec<f32> = keys.clone().map(score).collect();
            let highest = scores.iter().copied().fold(max, f32::max);
            let rescale = (max - highest).exp();
            max = highest;
            sum *= rescale;
            for o in &mut out {
                *o *= rescale;
            }
            let mut weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
            sum += weights.iter().sum::<f32>();
            for p in &mut weights {
                *p = DType::F8E4M3.round(*p * top);
            }
            if self.slip == Some(Slip::TileLost) && keys.end == seen.end {
                continue;
            }
            let place = |key: usize| match self.slip {
                Some(Slip::Permuted) => (key / 16 * 16 + IN_REGISTERS[key % 16]).min(len_k - 1),
                _ => key,
            };
            for (d, o) in out.iter_mut().enumerate() {
                let products: Vec<f32> = keys
                    .clone()
                    .zip(&weights)
                    .map(|(key, p)| p * head.values[place(key) * head_dim_v + d])
                    .collect();
                if self.slip == Some(Slip::FewBits) {
                    *o = products.chunks(BLOCK).fold(*o, short_sum);
                } else {
                    // Sums end with the keys that share a descale, too.
                    let block = |i: usize| head.problem.descale_block(keys.start + i);
                    let mut start = 0;
                    while start < products.len() {
                        let alike = (start..products.len()).take_while(|&i| block(i) == block(start)).count();
                        let sum = products[start..start + alike].chunks(BLOCK).fold(0.0, short_sum);
                        *o += sum * head.descales[block(start)][2];
                        start += alike;
                    }
                }
            }
        }
        let factor = 1.0 / (top * sum);
        for o in &mut out {
            *o *= factor;
        }
        (out, max + sum.ln())
    }
}

/// Some products added to a sum, all of them cut off 13 bits below the largest.
fn short_sum(sum: f32, products: &[f32]) -> f32 {
    let most = products.iter().fold(sum.abs(), |most, x| most.max(x.abs()));
    if most == 0.0 {
        return 0.0;
    }
    let unit = most.log2().floor().exp2() / STEPS;
    products.iter().fold((sum / unit).trunc(), |sum, x| sum + (x / unit).trunc()) * unit
}
