//! Attention that candle computes step by step on the CPU, and inputs for it.

use candle_core::{D, DType, Device, Result, Tensor};

/// Pseudo-random numbers, the same on every machine, as (batch, length, heads, head_dim) on the CPU.
pub fn tensor(seed: u64, shape: (usize, usize, usize, usize), dtype: DType) -> Tensor {
    let count = shape.0 * shape.1 * shape.2 * shape.3;
    let value = |i: usize| {
        let mut x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
        x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Whether the query at position `i` sees key `j`; the last query's position is that of the last key.
pub type Sees = fn(i: i64, j: i64) -> bool;

/// Every query sees every key.
pub const ALL: Sees = |_, _| true;
/// A query sees no key after its own position.
pub const CAUSAL: Sees = |i, j| j <= i;

/// Attention of CPU tensors in f32. A query that sees no key gives zeros.
pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, softcap: f64, sees: Sees) -> Result<Tensor> {
    let heads = |x: &Tensor| x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let (q, k, v) = (heads(q)?, heads(k)?, heads(v)?);
    let (_, h_q, len_q, _) = q.dims4()?;
    let (_, h_kv, len_k, _) = k.dims4()?;
    let repeat = |x: &Tensor| {
        let (b, h, s, d) = x.dims4()?;
        x.unsqueeze(2)?.expand((b, h, h_q / h_kv, s, d))?.reshape((b, h_q, s, d))
    };
    let (k, v) = (repeat(&k)?, repeat(&v)?);
    let mut scores = (q.matmul(&k.transpose(2, 3)?)? * scale)?;
    if softcap > 0.0 {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    let shift = len_k as i64 - len_q as i64;
    let bias: Vec<f32> = (0..len_q as i64)
        .flat_map(|i| {
            (0..len_k as i64).map(move |j| if sees(i + shift, j) { 0.0 } else { f32::NEG_INFINITY })
        })
        .collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(bias, (len_q, len_k), &Device::Cpu)?)?;
    // Where no key is seen, the maximum is made finite, and all weights and their sum are 0.
    let max = scores.max_keepdim(D::Minus1)?.maximum(-1e30)?;
    let weights = scores.broadcast_sub(&max)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?.maximum(1e-30)?)?;
    weights.matmul(&v)?.transpose(1, 2)?.contiguous()
}

/// The largest difference; infinite where one of the two is not finite.
pub fn worst(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let differences = values(a).into_iter().zip(values(b)).map(|(a, b)| (a - b).abs());
    differences.map(|x| if x.is_nan() { f32::INFINITY } else { x }).fold(0.0, f32::max)
}

/// A tensor's elements, from wherever it lies.
pub fn values(x: &Tensor) -> Vec<f32> {
    let x = x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Two units in the last place of the dtype near 1, which plain attention rounds to as well.
pub fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

/// The three tensors of a call, made on the CPU.
pub struct Given {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

impl Given {
    /// (batch, heads, kv heads, head_dim) and the lengths of q and of k and v.
    pub fn new([b, h, h_kv, d]: [usize; 4], [len_q, len_k]: [usize; 2], dtype: DType) -> Self {
        let kv = (b, len_k, h_kv, d);
        Self { q: tensor(1, (b, len_q, h, d), dtype), k: tensor(2, kv, dtype), v: tensor(3, kv, dtype) }
    }

    /// The same, copied to a device.
    pub fn on(&self, device: &Device) -> Self {
        let copy = |x: &Tensor| x.to_device(device).unwrap();
        Self { q: copy(&self.q), k: copy(&self.k), v: copy(&self.v) }
    }

    /// Checks a device's output against attention of these, step by step.
    pub fn check(&self, o: &Tensor, scale: f64, softcap: f64, sees: Sees, case: &str) {
        let Self { q, k, v } = self;
        assert_eq!((o.dims(), o.dtype()), (q.dims(), q.dtype()), "{case}");
        let error = worst(o, &plain(q, k, v, scale, softcap, sees).unwrap());
        assert!(error <= tolerance(q.dtype()), "{case} on {:?}: {error}", o.device());
    }
}
