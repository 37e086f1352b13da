//! From 16 or 32 bits to 8: q, k and v as f8 with descales, so that every head uses the range of f8.
//!
//! A head is read twice. The first pass finds the mean of its keys, where those are smoothed, and the largest magnitude of
//! what is to be stored; the second stores it. Heads do not depend on each other.

use rayon::prelude::*;

use crate::{
    DType, Descales, Error, F8E4M3, Layout, Name, Place, Problem, Result, Tensor, TensorBuf, TensorMut,
    contract::Call, tensor::Raw,
};

/// The largest number of f8.
const LARGEST: f32 = 448.0;

/// How q, k and v become f8.
///
/// Each kv head of a batch entry has a descale, its largest magnitude / 448; the query heads of a group share theirs. Few large numbers
/// leave little of that range to all others. [Blocks of keys](Self::per_block) can have descales of their own, of k and of v. And
/// two remedies change neither scores nor results, but for rounding:
///
/// - [`smoothed`](Self::smoothed): the mean of a head's keys is subtracted from all of them. All scores of a query change by
///   the same number, which the softmax does not see and lse gets back.
/// - [`rotated`](Self::rotated): q and k are multiplied by the same orthogonal matrix, random signs and a Hadamard matrix,
///   which spreads a large number over the whole head.
///
/// ```
/// use flashcore::{Attention, Device, Quantiser, Tensor};
///
/// let data: Vec<f32> = (0..2 * 128 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let q = Tensor::new(&data, &[1, 2, 128, 64])?;
/// let attention = Attention::new().causal().fp8(Quantiser::new().smoothed().rotated(1));
/// let out = attention.run(&Device::cpu(), &q, &q, &q)?;
/// assert_eq!(out.o.shape(), [1, 2, 128, 64]);
/// let problem = attention.problem(&q, &q, &q)?;
/// assert_eq!(problem.to_string(), "1x2x128x64 f32 quantise=smooth,rotate:1 causal");
/// # Ok::<(), flashcore::Error>(())
/// ```
///
/// On a GPU the launches of the plan do it, with q, k and v of 16 bits where they lie and everything else in the workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Quantiser {
    smooth: bool,
    rotate: Option<u32>,
    block: Option<usize>,
}

/// What a [`Quantiser`] made of q, k and v.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Quantised {
    /// The queries, in f8.
    pub q: TensorBuf,
    /// The keys, in f8.
    pub k: TensorBuf,
    /// The values, in f8.
    pub v: TensorBuf,
    /// What q, k and v are to be multiplied by: f32, (batch, kv heads, 1, 1), of k and v with a number for each block of keys
    /// where blocks have their own.
    pub descales: [TensorBuf; 3],
    /// What was subtracted from the keys, if they were smoothed: f32, (batch, kv heads, 1, head_dim).
    pub k_mean: Option<TensorBuf>,
}

impl Quantiser {
    /// With descales alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// With the mean of a head's keys subtracted from them.
    pub fn smoothed(self) -> Self {
        Self { smooth: true, ..self }
    }

    /// With q and k rotated, by signs from a seed. The head dim must be a power of two.
    pub fn rotated(self, seed: u32) -> Self {
        Self { rotate: Some(seed), ..self }
    }

    /// With a descale of k and one of v for each so many keys of a head, counted from the first.
    pub fn per_block(self, keys: usize) -> Self {
        Self { block: Some(keys), ..self }
    }

    /// The keys that share a descale, where not all of a head do.
    pub fn block(&self) -> Option<usize> {
        self.block
    }

    /// Whether the mean of a head's keys is subtracted from them.
    pub fn smooths(&self) -> bool {
        self.smooth
    }

    /// The seed of the signs, where q and k are rotated.
    pub fn rotates(&self) -> Option<u32> {
        self.rotate
    }

    /// Whether a problem's q, k and v can be quantised in this way.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        if self.smooth && problem.softcap.is_some() {
            let possible = "a softcap changes with the mean: do not smooth them";
            return Err(Error::EightBit {
                what: "smoothed keys under a softcap",
                dtype: problem.dtype,
                possible,
            });
        }
        if self.block == Some(0) {
            let (what, possible) = ("quantising blocks of 0 keys", "a block has at least one");
            return Err(Error::EightBit { what, dtype: problem.dtype, possible });
        }
        self.check_head_dim(problem.head_dim)
    }

    fn check_head_dim(&self, given: usize) -> Result<()> {
        if self.rotate.is_some() && !given.is_power_of_two() {
            let possible = "a power of two, to be rotated";
            return Err(Error::HeadDim { tensor: Name::Q, given, possible });
        }
        Ok(())
    }

    /// Quantises tensors that lie on the host. Rows of k and v from a batch entry's key length on are not read, and become
    /// zeros.
    pub fn quantise(&self, [q, k, v]: [&Tensor<'_>; 3], key_lengths: Option<&[u32]>) -> Result<Quantised> {
        for (tensor, name) in [(q, Name::Q), (k, Name::K), (v, Name::V)] {
            if tensor.place() != Place::Host {
                return Err(Error::Unsupported {
                    device: tensor.place().to_string(),
                    what: format!("quantising {name}"),
                    possible: "tensors on the host, or of f8 already".into(),
                    source: None,
                });
            }
        }
        let head_dim = q.shape()[3];
        self.check_head_dim(head_dim)?;
        let signs = self.rotate.map(|seed| signs(seed, head_dim));
        let [batch, heads_kv, len_k, _] = k.shape();
        let keys = |b: usize| key_lengths.map_or(len_k, |lengths| lengths[b] as usize);
        let means = if self.smooth { Some(means(k, &keys)?) } else { None };
        let all = |_: usize| q.shape()[2];
        let group = q.shape()[1] / heads_kv.max(1);
        let mean_of = |b: usize, h: usize| {
            means.as_ref().map(|means| &means[(b * heads_kv + h) * head_dim..][..head_dim])
        };
        let (q, q_descale) = stored(&q.raw, group, None, &all, |_, _, row| rotate(row, signs.as_deref()))?;
        let (k, k_descale) = stored(&k.raw, 1, self.block, &keys, |b, h, row| {
            let mean = mean_of(b, h).unwrap_or_default();
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
            rotate(row, signs.as_deref());
        })?;
        let (v, v_descale) = stored(&v.raw, 1, self.block, &keys, |_, _, _| {})?;
        let k_mean =
            means.map(|means| TensorBuf::from_f32(&means, [batch, heads_kv, 1, head_dim], DType::F32));
        Ok(Quantised { q, k, v, descales: [q_descale, k_descale, v_descale], k_mean: k_mean.transpose()? })
    }
}

impl Quantiser {
    /// Computes a call on host tensors with an engine that takes f8.
    pub(crate) fn run(&self, call: &Call<'_>, engine: impl FnOnce(&Call<'_>) -> Result<()>) -> Result<()> {
        let inputs = [Name::Q, Name::K, Name::V].map(|name| Tensor::of(call.tensors[name]));
        let made = self.quantise(inputs.each_ref(), call.key_lengths)?;
        let stored = [&made.q, &made.k, &made.v].map(TensorBuf::view);
        let descales = made.descales.each_ref().map(TensorBuf::view);
        let mut tensors = call.tensors;
        for (name, stored) in [Name::Q, Name::K, Name::V].into_iter().zip(&stored) {
            tensors.set(name, stored.raw);
        }
        Descales::of(descales.each_ref()).into_tensors(&mut tensors);
        engine(&Call { problem: call.problem.quantised(), tensors, ..*call })?;
        if let (Some(lse), Some(shifts)) =
            (call.tensors.get(Name::Lse), made.shifts(&inputs[0], call.problem.scale))
        {
            let [_, heads, len, _] = inputs[0].shape();
            let mut to = TensorMut::of(*lse);
            for (i, shift) in shifts.into_iter().enumerate() {
                let (b, h, s) = (i / (heads * len), i / len % heads, i % len);
                let mut before = [0.0];
                lse.read_row(b, h, s, &mut before);
                to.write_row(b, h, s, &[(f64::from(before[0]) + shift) as f32]);
            }
        }
        Ok(())
    }
}

impl Quantised {
    /// What the subtraction of the keys' mean took from all scores of each query, and so from its lse, if they were smoothed:
    /// scale · q · mean, in the order (batch, heads, length).
    #[doc(hidden)]
    pub fn shifts(&self, q: &Tensor<'_>, scale: f32) -> Option<Vec<f64>> {
        let mean = self.k_mean.as_ref()?;
        let [batch, heads, len, head_dim] = q.shape();
        let (means, heads_kv) = (mean.to_f32(), mean.shape()[1]);
        let group = heads / heads_kv.max(1);
        let mut query = vec![0.0; head_dim];
        let mut shift = |i: usize| {
            let (b, h, s) = (i / (heads * len), i / len % heads, i % len);
            q.read_row(b, h, s, &mut query);
            let mean = &means[(b * heads_kv + h / group) * head_dim..][..head_dim];
            let dot: f64 = query.iter().zip(mean).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            f64::from(scale) * dot
        };
        Some((0..batch * heads * len).map(&mut shift).collect())
    }
}

/// As `quantise`, or `quantise=smooth,rotate:7`.
impl std::fmt::Display for Quantiser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let smooth = self.smooth.then(|| "smooth".to_string());
        let ways: Vec<String> =
            smooth.into_iter().chain(self.rotate.map(|seed| format!("rotate:{seed}"))).collect();
        let block = self.block.map(|keys| format!("block:{keys}"));
        let ways: Vec<String> = ways.into_iter().chain(block).collect();
        f.write_str("quantise")?;
        if ways.is_empty() { Ok(()) } else { write!(f, "={}", ways.join(",")) }
    }
}

impl std::str::FromStr for Quantiser {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            let why = "write it as quantise, or as quantise= with smooth, rotate:7 or block:128, or several, with commas";
            Error::Text { what: "quantiser", given: text.into(), why: why.into() }
        };
        let ways = text.strip_prefix("quantise").ok_or_else(refuse)?;
        let ways = if ways.is_empty() { None } else { Some(ways.strip_prefix('=').ok_or_else(refuse)?) };
        let mut quantiser = Self::new();
        for way in ways.into_iter().flat_map(|ways| ways.split(',')) {
            quantiser = match way.split_once(':') {
                None if way == "smooth" => quantiser.smoothed(),
                Some(("rotate", seed)) => quantiser.rotated(seed.parse().map_err(|_| refuse())?),
                Some(("block", keys)) => quantiser.per_block(keys.parse().map_err(|_| refuse())?),
                _ => return Err(refuse()),
            };
        }
        Ok(quantiser)
    }
}

/// The mean of each head's first rows, as many as `rows(batch entry)`.
fn means(k: &Tensor<'_>, rows: &(impl Fn(usize) -> usize + Sync)) -> Result<Vec<f32>> {
    let [batch, heads, _, head_dim] = k.shape();
    let mut means = TensorBuf::zeros(DType::F32, Layout::bhsd([batch, heads, 1, head_dim]))?.to_f32();
    means.par_chunks_mut(head_dim.max(1)).enumerate().for_each(|(i, mean)| {
        let (b, h) = (i / heads, i % heads);
        let (mut row, mut sums) = (vec![0.0; head_dim], vec![0.0_f64; head_dim]);
        for s in 0..rows(b) {
            k.read_row(b, h, s, &mut row);
            sums.iter_mut().zip(&row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        let count = rows(b).max(1) as f64;
        mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / count) as f32);
    });
    Ok(means)
}

/// A tensor in f8, after a change to each of its rows, and its descales: one for each `group` heads of a batch entry, or for
/// each `block` of their rows. Of each head, the first `rows(batch entry)` rows are read.
fn stored(
    raw: &Raw,
    group: usize,
    block: Option<usize>,
    rows: &(impl Fn(usize) -> usize + Sync),
    change: impl Fn(usize, usize, &mut [f32]) + Sync,
) -> Result<(TensorBuf, TensorBuf)> {
    let [batch, heads, len, width] = raw.layout.shape;
    let groups = heads / group.max(1);
    let (keys, blocks) = block.map_or((usize::MAX, 1), |keys| (keys, len.div_ceil(keys)));
    let each = |i: usize| {
        let (b, first) = (i / groups, i % groups * group);
        let mut row = vec![0.0; width];
        let read = |h: usize, s: usize, row: &mut [f32]| {
            raw.read_row(b, h, s, row);
            change(b, h, row);
        };
        let mut most = vec![0.0_f32; blocks];
        for (h, s) in (first..first + group).flat_map(|h| (0..rows(b)).map(move |s| (h, s))) {
            read(h, s, &mut row);
            let most = &mut most[s / keys];
            *most = row.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(*most, f32::max);
        }
        // Of zeros, or of numbers so small that f32 has no such descale.
        let of = |most: f32| if most == 0.0 { 1.0 } else { (most / LARGEST).max(f32::MIN_POSITIVE) };
        let descales: Vec<f32> = most.into_iter().map(of).collect();
        let mut codes = vec![F8E4M3::from_bits(0); group * len * width];
        for (h, s) in (0..group).flat_map(|h| (0..rows(b)).map(move |s| (h, s))) {
            read(first + h, s, &mut row);
            let to = &mut codes[(h * len + s) * width..][..width];
            let descale = descales[s / keys];
            to.iter_mut().zip(&row).for_each(|(code, x)| *code = F8E4M3::from_f32(x / descale));
        }
        (codes, descales)
    };
    let made: Vec<(Vec<F8E4M3>, Vec<f32>)> = (0..batch * groups).into_par_iter().map(each).collect();
    let mut tensor = TensorBuf::zeros(DType::F8E4M3, Layout::bhsd(raw.layout.shape))?;
    if let crate::Storage::F8E4M3(all) = tensor.storage_mut() {
        for (to, (codes, _)) in all.chunks_mut((group * len * width).max(1)).zip(&made) {
            to.copy_from_slice(codes);
        }
    }
    let descales: Vec<f32> = made.into_iter().flat_map(|(_, descales)| descales).collect();
    Ok((tensor, TensorBuf::from_f32(&descales, [batch, groups, blocks, 1], DType::F32)?))
}

/// Signs that a seed decides: those of the kernels.
fn signs(seed: u32, len: usize) -> Vec<f32> {
    let sign = |channel: u32| {
        // The finaliser of MurmurHash3: every bit depends on all bits of the input.
        let mut word = seed.wrapping_mul(0x9e37_79b9).wrapping_add(channel);
        for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35)] {
            word = (word ^ (word >> shift)).wrapping_mul(factor);
        }
        if (word ^ (word >> 16)) & 1 == 0 { 1.0 } else { -1.0 }
    };
    (0..len as u32).map(sign).collect()
}

/// Multiplies a row by signs and a Hadamard matrix of its length, a power of two, scaled such that its length stays. Nothing
/// without signs.
fn rotate(row: &mut [f32], signs: Option<&[f32]>) {
    let Some(signs) = signs else { return };
    row.iter_mut().zip(signs).for_each(|(x, sign)| *x *= sign);
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            low.iter_mut().zip(high).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        half *= 2;
    }
    let scale = 1.0 / (row.len() as f32).sqrt();
    for x in row {
        *x *= scale;
    }
}

impl std::fmt::Display for Quantised {
    /// The smallest and the largest descale of q, k and v.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, descales) in Name::DESCALES.into_iter().zip(&self.descales) {
            let all = descales.to_f32();
            let least = all.iter().copied().fold(f32::INFINITY, f32::min);
            let most = all.iter().copied().fold(0.0, f32::max);
            writeln!(f, "{name} from {least:.3e} to {most:.3e} in {} numbers", all.len())?;
        }
        f.write_str(if self.k_mean.is_some() { "k without its mean" } else { "k with its mean" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Device, oracle};

    /// Normal numbers, some of which are ten times as large.
    struct Draw(u64);

    impl Draw {
        fn uniform(&mut self) -> f64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            radius * (std::f64::consts::TAU * self.uniform()).cos()
        }

        fn outliers(&mut self, shape: [usize; 4], often: f64) -> TensorBuf {
            let mut one = || {
                let large = if self.uniform() < often { 10.0 * self.normal() } else { 0.0 };
                (self.normal() + large) as f32
            };
            let values: Vec<f32> = (0..shape.iter().product()).map(|_: usize| one()).collect();
            TensorBuf::from_f32(&values, shape, DType::BF16).unwrap()
        }
    }

    /// The root mean square of an output's errors against attention of the inputs as they were, and the largest of lse.
    fn errors(quantiser: Quantiser, inputs: [&TensorBuf; 3]) -> [f64; 2] {
        let views = inputs.map(TensorBuf::view);
        let [q, k, v] = views.each_ref();
        let attention = Attention::new().with_lse();
        let out = attention.fp8(quantiser).run(&Device::cpu(), q, k, v).unwrap();
        let problem = attention.problem(q, k, v).unwrap();
        let truth = oracle::attention(&problem, q, k, v, None);
        let squares =
            out.o.to_f32().iter().zip(&truth.o).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
        let lse = out.lse.unwrap().to_f32();
        let off = lse.iter().zip(&truth.lse).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        [(squares / truth.o.len() as f64).sqrt(), off]
    }

    #[test]
    fn rotating_helps_against_single_large_numbers() {
        let mut draw = Draw(7);
        let [q, k, v] = [64, 512, 512].map(|len| draw.outliers([1, 2, len, 64], 0.001));
        let [plain, _] = errors(Quantiser::new(), [&q, &k, &v]);
        let [rotated, off] = errors(Quantiser::new().rotated(3), [&q, &k, &v]);
        assert!(rotated < 0.8 * plain, "{rotated} is not below {plain}");
        assert!(off < 0.2, "lse is off by {off}");
    }

    #[test]
    fn smoothing_helps_against_a_channel_that_is_always_large() {
        let mut draw = Draw(9);
        let [q, mut k, v] = [64, 512, 512].map(|len| draw.outliers([1, 2, len, 64], 0.0));
        let mut values = k.to_f32();
        values.iter_mut().skip(5).step_by(64).for_each(|x| *x += 40.0);
        k = TensorBuf::from_f32(&values, k.shape(), DType::BF16).unwrap();
        let [plain, _] = errors(Quantiser::new(), [&q, &k, &v]);
        let [smoothed, off] = errors(Quantiser::new().smoothed(), [&q, &k, &v]);
        assert!(smoothed < 0.7 * plain, "{smoothed} is not below {plain}");
        // It got back what was subtracted, which is up to a hundred times that.
        assert!(off < 0.2, "lse is off by {off}");
    }

    #[test]
    fn a_rotation_changes_no_dot_product() {
        let mut draw = Draw(3);
        let signs = signs(11, 32);
        assert!(signs.contains(&1.0) && signs.contains(&-1.0));
        let mut rows = [(); 2].map(|()| (0..32).map(|_| draw.normal() as f32).collect::<Vec<_>>());
        let dot = |rows: &[Vec<f32>; 2]| rows[0].iter().zip(&rows[1]).map(|(a, b)| a * b).sum::<f32>();
        let before = dot(&rows);
        for row in &mut rows {
            rotate(row, Some(&signs));
        }
        assert!((dot(&rows) - before).abs() < 1e-4);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn host_and_kernels_have_the_same_signs() {
        for (seed, len) in [(0, 16), (1, 64), (u32::MAX, 256)] {
            let kernels = flashcore_kernels::quantize::signs(seed, len);
            let theirs: Vec<f32> = kernels.into_iter().map(|turns| if turns { -1.0 } else { 1.0 }).collect();
            assert_eq!(signs(seed, len as usize), theirs);
        }
    }

    #[test]
    fn each_head_uses_the_whole_range_and_rows_without_a_key_are_not_read() {
        let mut values = vec![1.0_f32; 2 * 2 * 3 * 16];
        // The second head of the first entry is large, the first head of the second is zero.
        values[48..96].fill(1000.0);
        values[96..144].fill(0.0);
        // Behind the only key of the second entry.
        values[144 + 16..].fill(f32::NAN);
        let k = TensorBuf::from_f32(&values, [2, 2, 3, 16], DType::F32).unwrap();
        let q = TensorBuf::from_f32(&vec![-2.0; 2 * 4 * 16], [2, 4, 1, 16], DType::F32).unwrap();
        let views = [q.view(), k.view(), k.view()];
        let made = Quantiser::new().quantise(views.each_ref(), Some(&[3, 1])).unwrap();
        let [of_q, of_k, _] = made.descales.each_ref().map(TensorBuf::to_f32);
        assert_eq!(of_k, [1.0 / 448.0, 1000.0 / 448.0, 1.0, 1.0 / 448.0]);
        assert_eq!(of_q, [2.0 / 448.0; 4]);
        let stored = made.k.to_f32();
        assert_eq!(
            (stored[0], stored[48], stored[96], stored[144], stored[160]),
            (448.0, 448.0, 0.0, 448.0, 0.0)
        );
        assert!(made.q.to_f32().iter().all(|&x| x == -448.0));
    }

    #[test]
    fn each_block_of_keys_uses_the_whole_range() {
        let mut values = vec![1.0_f32; 2 * 5 * 16];
        // Keys 2 and 3 of the first head, and the last key of the second.
        values[32..64].fill(1000.0);
        values[144..].fill(0.25);
        let k = TensorBuf::from_f32(&values, [1, 2, 5, 16], DType::F32).unwrap();
        let views = [k.view(), k.view(), k.view()];
        let quantiser: Quantiser = "quantise=block:2".parse().unwrap();
        let made = quantiser.quantise(views.each_ref(), None).unwrap();
        let [of_q, of_k, of_v] = made.descales.each_ref().map(TensorBuf::to_f32);
        assert_eq!(of_q, [1000.0 / 448.0, 1.0 / 448.0]);
        assert_eq!(of_k, [1.0, 1000.0, 1.0, 1.0, 1.0, 0.25].map(|most| most / 448.0));
        assert_eq!((of_v, made.k.to_f32()), (of_k, vec![448.0; 160]));
        let out =
            Attention::new().fp8(quantiser).run(&Device::cpu(), &k.view(), &k.view(), &k.view()).unwrap();
        let near = |a: f32, b: f32| (a / b - 1.0).abs() < 0.02;
        // A key of 1000 has all weight in the first head; in the second, four of five keys are alike, and the most.
        assert!(near(out.o.to_f32()[0], 1000.0) && near(out.o.to_f32()[80], 1.0), "{:?}", out.o.to_f32());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let x = TensorBuf::from_f32(&[0.5; 24], [1, 1, 1, 24], DType::BF16).unwrap();
        let x = x.view();
        let run = |attention: Attention<'_>, quantiser: Quantiser| {
            attention.fp8(quantiser).run(&Device::cpu(), &x, &x, &x).map(|_| ())
        };
        assert_eq!(run(Attention::new(), Quantiser::new().smoothed()), Ok(()));
        let rotated = run(Attention::new(), Quantiser::new().rotated(1));
        assert!(matches!(rotated, Err(Error::HeadDim { given: 24, .. })), "{rotated:?}");
        let capped = run(Attention::new().softcap(3.0), Quantiser::new().smoothed());
        assert!(matches!(capped, Err(Error::EightBit { .. })), "{capped:?}");
        let problem = Problem::new(1, 1, 1, 24, DType::F8E4M3);
        let stored = TensorBuf::zeros(problem.dtype, Layout::bhsd([1, 1, 1, 24])).unwrap();
        let stored = stored.view();
        let again = Attention::new().fp8(Quantiser::new());
        let twice = again.run(&Device::cpu(), &stored, &stored, &stored);
        assert!(matches!(twice, Err(Error::EightBit { what: "quantising", .. })), "{twice:?}");
    }
}
