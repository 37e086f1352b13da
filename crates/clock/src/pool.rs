//! The inputs of GPU benchmarks: a pool of random numbers for each of q, k and v, drawn once and used by every cell.
//!
//! Element `i` of a tensor is the pool's element `i mod len`, so that a worker reads three files once and takes every
//! cell's tensors from them, and the host can compute the rows that it judges without holding gigabytes. The length
//! is a prime, so that no row or head repeats where a tensor goes through the pool more than once.

use std::ops::Range;
use std::path::{Path, PathBuf};

use flashcore::{DType, F8E4M3, Mask, Name, Pass, Problem, TensorBuf};
use half::{bf16, f16};
use rayon::prelude::*;
use serde::Serialize;

use flashcore_judge::rng::Rng;
use flashcore_judge::rule::{Row, Yardstick};

use crate::protocol::GRADIENT_FROM;
use crate::sequences::{ARRANGEMENT, Lie, Sequences};

/// Elements of a pool: the largest prime below 2^25.
pub const LEN: usize = 33_554_393;
/// Elements per stream of random numbers.
const PART: usize = 1 << 16;

/// The names of the tensors, and of their files.
pub const NAMES: [&str; 3] = ["q", "k", "v"];

/// Numbers for q, k and v.
pub struct Pool {
    dtype: DType,
    seed: u64,
    bits: [Vec<u16>; 3],
}

/// A pool on disk, as workers read it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stored {
    /// Its dtype.
    pub dtype: &'static str,
    /// Its seed.
    pub seed: u64,
    /// Elements per tensor's pool.
    pub elements: usize,
    /// The checksums of q, k and v.
    pub checksums: [u32; 3],
    /// Where they are.
    #[serde(skip)]
    pub paths: [PathBuf; 3],
}

fn bytes(dtype: DType, bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(dtype.size())).collect()
}

/// The bits of a number.
fn round(dtype: DType, x: f64) -> u16 {
    match dtype {
        DType::BF16 => bf16::from_f64(x).to_bits(),
        DType::F16 | DType::F32 => f16::from_f64(x).to_bits(),
        DType::F8E4M3 => u16::from(F8E4M3::from_f64(x).to_bits()),
        DType::I32 => unreachable!("numbers to compute with"),
    }
}

impl Pool {
    /// Draws standard normal numbers in a dtype of 16 bits or 8: `needed` of them, at most [`LEN`].
    pub fn draw(dtype: DType, needed: usize, seed: u64) -> Self {
        let len = needed.clamp(1, LEN);
        let bits = [0_u64, 1, 2].map(|tensor| {
            let mut bits = vec![0; len];
            bits.par_chunks_mut(PART).enumerate().for_each(|(part, bits)| {
                let mut rng = Rng::stream(seed, tensor << 40 | part as u64);
                bits.fill_with(|| round(dtype, rng.normal()));
            });
            bits
        });
        Self { dtype, seed, bits }
    }

    /// These numbers, in a dtype of 16 bits or 8.
    pub fn of(dtype: DType, values: [Vec<f32>; 3]) -> Self {
        let bits = values.map(|values| values.into_iter().map(|x| round(dtype, f64::from(x))).collect());
        Self { dtype, seed: 0, bits }
    }

    /// Writes the three files.
    pub fn store(&self, folder: &Path) -> Result<Stored, String> {
        let paths = NAMES.map(|name| folder.join(format!("{name}.{}", self.dtype)));
        for (bits, path) in self.bits.iter().zip(&paths) {
            std::fs::write(path, bytes(self.dtype, bits))
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        let (elements, checksums) = (self.bits[0].len(), self.checksums());
        Ok(Stored { dtype: self.dtype.name(), seed: self.seed, elements, checksums, paths })
    }

    /// The checksums of q, k and v.
    pub fn checksums(&self) -> [u32; 3] {
        [0, 1, 2].map(|tensor: usize| crc32fast::hash(&bytes(self.dtype, &self.bits[tensor])))
    }

    /// Elements of a tensor (0 for q, 1 for k, 2 for v) from a place on, as f32.
    fn values(&self, tensor: usize, start: usize, count: usize) -> Vec<f32> {
        let bits = &self.bits[tensor];
        let widen = |bits: u16| match self.dtype {
            DType::BF16 => bf16::from_bits(bits).to_f32(),
            DType::F16 | DType::F32 => f16::from_bits(bits).to_f32(),
            DType::F8E4M3 => F8E4M3::from_bits(bits as u8).to_f32(),
            DType::I32 => unreachable!("numbers to compute with"),
        };
        (start..start + count).map(|i| widen(bits[i % bits.len()])).collect()
    }

    /// The truth about some rows of a problem whose tensors are contiguous.
    pub fn yardstick(&self, problem: &Problem, rows: &[Row]) -> Option<Yardstick> {
        let Problem { heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v, dtype, mask, .. } = *problem;
        // Keys and values of a type of their own are the pool's numbers, rounded.
        let dtypes = [dtype, problem.dtype_kv(), problem.dtype_kv()];
        let one = |row: &Row| {
            let &Row { batch, head, position: query, .. } = row;
            let keys = mask.keys(query, len_q, len_k);
            let kv_head = batch * heads_kv + head / problem.group();
            let mut single = problem.with_kv(1, keys.len()).with_mask(Mask::None);
            (single.batch, single.heads_q, single.len_q) = (1, 1, 1);
            let first = kv_head * len_k + keys.start;
            let tensor = |tensor: usize, row: usize, rows: usize, width: usize| {
                let values = self.values(tensor, row * width, rows * width);
                TensorBuf::from_f32(&values, [1, 1, rows, width], dtypes[tensor])
                    .expect("as many values as elements")
            };
            let q = tensor(0, (batch * heads_q + head) * len_q + query, 1, head_dim);
            let k = tensor(1, first, keys.len(), head_dim);
            let v = tensor(2, first, keys.len(), head_dim_v);
            if problem.pass == Pass::Forward {
                return Yardstick::new(&single, &q.view(), &k.view(), &v.view(), None).at(*row);
            }
            let start = GRADIENT_FROM + ((batch * heads_q + head) * len_q + query) * head_dim_v;
            let d_o = TensorBuf::from_f32(&self.values(0, start, head_dim_v), [1, 1, 1, head_dim_v], dtype)
                .expect("one row");
            Yardstick::gradient_of_query(&single, [&q.view(), &k.view(), &v.view()], &d_o.view()).at(*row)
        };
        let parts: Vec<Yardstick> = rows.par_iter().map(one).collect();
        Yardstick::join(parts)
    }

    /// The truth about some rows of sequences, whose tensors lie token after token.
    pub fn yardstick_of(&self, problem: &Problem, sequences: &Sequences, rows: &[Row]) -> Option<Yardstick> {
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = *problem;
        let dtypes = [problem.dtype, problem.dtype_kv(), problem.dtype_kv()];
        let each = sequences.each(problem);
        let one = |row: &Row| {
            let alone = &each[row.batch];
            let query = sequences.query(problem, row);
            let keys = alone.mask.keys(query, alone.len_q, alone.len_k);
            let mut single = alone.with_kv(1, keys.len()).with_mask(Mask::None);
            (single.heads_q, single.len_q) = (1, 1);
            // Of one head of some tokens.
            let tensor = |tensor: usize,
                          from: usize,
                          tokens: Range<usize>,
                          heads: usize,
                          head: usize,
                          width: usize| {
                let rows = tokens.len();
                let at = |token: usize| self.values(tensor, from + (token * heads + head) * width, width);
                let values: Vec<f32> = tokens.flat_map(at).collect();
                TensorBuf::from_f32(&values, [1, 1, rows, width], dtypes[tensor])
                    .expect("as many values as elements")
            };
            let token = sequences.token_of_query(problem, row.batch, query);
            let first = sequences.token_of_key(problem, row.batch, keys.start);
            let seen = first..first + keys.len();
            let kv_head = row.head / problem.group();
            let q = tensor(0, 0, token..token + 1, heads_q, row.head, head_dim);
            let k = tensor(1, 0, seen.clone(), heads_kv, kv_head, head_dim);
            let v = tensor(2, 0, seen, heads_kv, kv_head, head_dim_v);
            let inputs = [&q.view(), &k.view(), &v.view()];
            if problem.pass == Pass::Forward {
                let [q, k, v] = inputs;
                return Yardstick::new(&single, q, k, v, None).at(*row);
            }
            let d_o = tensor(0, GRADIENT_FROM, token..token + 1, heads_q, row.head, head_dim_v);
            Yardstick::gradient_of_query(&single, inputs, &d_o.view()).at(*row)
        };
        let parts: Vec<Yardstick> = rows.par_iter().map(one).collect();
        Yardstick::join(parts)
    }

    /// q, k and v of sequences as a call on the CPU takes them, token after token, or in pages.
    pub fn tensors(&self, problem: &Problem, sequences: &Sequences) -> flashcore::Result<[TensorBuf; 3]> {
        let dtypes = [problem.dtype, problem.dtype_kv(), problem.dtype_kv()];
        let signature = problem.with_pass(Pass::Forward).signature();
        let (mut tensors, table) = (Vec::new(), sequences.table(problem));
        for (tensor, name) in [Name::Q, Name::K, Name::V].into_iter().enumerate() {
            let shape = signature.iter().find(|of| of.name == name).map_or([0; 4], |of| of.shape);
            let mut made = TensorBuf::zeros(dtypes[tensor], ARRANGEMENT.layout(shape))?;
            let mut view = made.view_mut();
            let [batch, heads, len, width] = shape;
            let mut write = |to: (usize, usize), token: usize| {
                for head in 0..heads {
                    let row = self.values(tensor, (token * heads + head) * width, width);
                    view.write_row(to.0, head, to.1, &row);
                }
            };
            match sequences.lie {
                Lie::Pages(page) if name != Name::Q => {
                    let pages = problem.len_k.div_ceil(page);
                    for (sequence, &keys) in sequences.keys.iter().enumerate() {
                        for key in 0..keys as usize {
                            let of = table[sequence * pages + key / page] as usize;
                            write((of, key % page), sequences.token_of_key(problem, sequence, key));
                        }
                    }
                }
                _ => (0..batch * len).for_each(|token| write((token / len, token % len), token)),
            }
            tensors.push(made);
        }
        Ok(tensors.try_into().expect("three tensors"))
    }

    /// The numbers that calls of these types compute with, in 16 bits: those of 8 bits, and keys and values that are rounded
    /// to 8, widened.
    pub fn in_16_bits(&self, dtype: DType, rounds_keys: bool) -> Self {
        let of = |tensor: usize| {
            let values = self.values(tensor, 0, self.bits[tensor].len());
            let rounds = rounds_keys && tensor > 0;
            let one = |x: f32| if rounds { F8E4M3::from_f32(x).to_f32() } else { x };
            values.into_iter().map(one).collect()
        };
        Self { seed: self.seed, ..Self::of(dtype, [0, 1, 2].map(of)) }
    }
}

#[cfg(test)]
mod tests {
    use flashcore::{Backward, oracle};

    use super::*;

    #[test]
    fn the_length_of_a_pool_is_a_prime() {
        assert!((2..6000).all(|divisor| !LEN.is_multiple_of(divisor)), "6000² is more than the length");
    }

    #[test]
    fn a_pool_on_disk_is_what_was_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let pool = Pool::draw(DType::BF16, 100_000, 7);
        let stored = pool.store(folder.path()).unwrap();
        assert_eq!(stored.elements, 100_000);
        for ((path, sum), bits) in stored.paths.iter().zip(stored.checksums).zip(&pool.bits) {
            let bytes = std::fs::read(path).unwrap();
            assert_eq!((bytes.len(), crc32fast::hash(&bytes)), (200_000, sum));
            assert_eq!(bytes[2..4], bits[1].to_le_bytes());
        }
        assert_ne!(stored.checksums[0], stored.checksums[1]);
        let values = pool.values(1, 0, 100_000);
        let variance = values.iter().map(|x| f64::from(x * x)).sum::<f64>() / 1e5;
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn numbers_of_8_bits_are_the_same_in_16_and_keys_are_rounded_where_calls_round_them() {
        let eight = Pool::draw(DType::F8E4M3, 1000, 1);
        let wide = eight.in_16_bits(DType::BF16, false);
        assert!((0..3).all(|tensor| eight.values(tensor, 0, 1000) == wide.values(tensor, 0, 1000)));
        let pool = Pool::draw(DType::BF16, 1000, 1);
        let cache = pool.in_16_bits(DType::BF16, true);
        assert_eq!(cache.values(0, 0, 1000), pool.values(0, 0, 1000), "queries are not rounded");
        let rounded = |x: f32| F8E4M3::from_f32(x).to_f32();
        let keys: Vec<f32> = pool.values(1, 0, 1000).into_iter().map(rounded).collect();
        assert!(cache.values(1, 0, 1000) == keys && keys != pool.values(1, 0, 1000));
    }

    #[test]
    fn the_truth_of_rows_is_that_of_the_whole_problem_also_where_the_pool_wraps() {
        let problem = Problem::new(2, 4, 9, 8, DType::F16).with_kv(2, 13).with_mask(Mask::Causal);
        let pool = Pool::draw(DType::F16, 331, 3);
        let whole = |tensor: usize, shape: [usize; 4]| {
            let values = pool.values(tensor, 0, shape.iter().product());
            TensorBuf::from_f32(&values, shape, DType::F16).unwrap()
        };
        let (q, k, v) = (whole(0, [2, 4, 9, 8]), whole(1, [2, 2, 13, 8]), whole(2, [2, 2, 13, 8]));
        let truth = oracle::attention(&problem, &q.view(), &k.view(), &v.view(), None);
        let rows = flashcore_judge::operands::sample_rows(&problem, 1000, 1);
        assert_eq!(rows.len(), 72);
        let yardstick = pool.yardstick(&problem, &rows).unwrap();
        assert_eq!(yardstick.of(Name::O).truth(), truth.o);
        // The same for the gradient of q.
        let problem = problem.backward();
        let d_o = TensorBuf::from_f32(&pool.values(0, GRADIENT_FROM, 576), [2, 4, 9, 8], DType::F16).unwrap();
        let lse: Vec<f32> = truth.lse.iter().map(|&x| x as f32).collect();
        let lse = TensorBuf::from_f32(&lse, [2, 4, 9, 1], DType::F32).unwrap();
        let (q, k, v, d_o) = (q.view(), k.view(), v.view(), d_o.view());
        // o is not read: the oracle computes it again.
        let given = Backward::new([&q, &k, &v], &d_o, &lse.view(), &d_o);
        let whole = oracle::gradients(&problem, &given, None).dq;
        let yardstick = pool.yardstick(&problem, &rows).unwrap();
        let apart = yardstick.of(Name::Dq).truth().iter().zip(&whole).map(|(a, b)| (a - b).abs());
        assert!(yardstick.of(Name::Dq).truth().len() == whole.len() && apart.fold(0.0, f64::max) < 1e-12);
    }
}
