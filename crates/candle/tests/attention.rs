//! candle-flash-attn's functions against attention that candle computes step by step.

use candle_core::{D, DType, Device, Result, Tensor};
use flashcore_candle::*;

/// Numbers that look random and are the same everywhere, as (batch, length, heads, head_dim).
fn tensor(seed: u64, shape: (usize, usize, usize, usize), dtype: DType) -> Tensor {
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

/// Whether query `i` of `len_q` sees key `j` of `len_k`.
type Sees = fn(i: i64, j: i64) -> bool;

/// Attention step by step in f32; `sees` is given a query's own place and a key.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, softcap: f64, sees: Sees) -> Result<Tensor> {
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
    let max = scores.max_keepdim(D::Minus1)?;
    let weights = scores.broadcast_sub(&max)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&v)?.transpose(1, 2)?.contiguous()
}

fn worst(a: &Tensor, b: &Tensor) -> f32 {
    let values =
        |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Twice the last place of the dtype near 1, which plain attention rounds to as well.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

#[test]
fn full_and_causal_attention_with_grouped_heads_in_every_dtype() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let q = tensor(1, (2, 17, 6, 32), dtype);
        let (k, v) = (tensor(2, (2, 23, 2, 32), dtype), tensor(3, (2, 23, 2, 32), dtype));
        for (causal, sees) in [(false, (|_, _| true) as Sees), (true, |i, j| j <= i)] {
            let o = flash_attn(&q, &k, &v, 0.2, causal).unwrap();
            assert_eq!((o.dims(), o.dtype()), (&[2, 17, 6, 32][..], dtype));
            let error = worst(&o, &plain(&q, &k, &v, 0.2, 0.0, sees).unwrap());
            assert!(error <= tolerance(dtype), "{dtype:?} {causal}: {error}");
        }
    }
}

#[test]
fn windows_and_softcap_are_those_of_candle_flash_attn() {
    let q = tensor(1, (1, 20, 4, 16), DType::F32);
    let (k, v) = (tensor(2, (1, 31, 4, 16), DType::F32), tensor(3, (1, 31, 4, 16), DType::F32));
    let o = flash_attn_windowed(&q, &k, &v, 0.3, Some(5), Some(2)).unwrap();
    let expected = plain(&q, &k, &v, 0.3, 0.0, |i, j| j >= i - 5 && j <= i + 2).unwrap();
    assert!(worst(&o, &expected) < 2e-6);
    let o = flash_attn_windowed(&q, &k, &v, 0.3, Some(7), None).unwrap();
    assert!(worst(&o, &plain(&q, &k, &v, 0.3, 0.0, |i, j| j >= i - 7).unwrap()) < 2e-6);
    let o = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 2.0, None, Some(0), 1.5).unwrap();
    assert!(worst(&o, &plain(&q, &k, &v, 2.0, 1.5, |i, j| j <= i).unwrap()) < 2e-6);
}

#[test]
fn tensors_are_used_with_the_strides_that_they_have() {
    // (batch, heads, length, head_dim) in memory, and a part of a packed projection.
    let packed = tensor(4, (2, 11, 9, 16), DType::F16);
    let parts: Vec<Tensor> = (0..3).map(|i| packed.narrow(2, 3 * i, 3).unwrap()).collect();
    assert!(!parts[1].is_contiguous());
    let transposed: Vec<Tensor> = parts
        .iter()
        .map(|x| x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap())
        .collect();
    let contiguous: Vec<Tensor> = parts.iter().map(|x| x.contiguous().unwrap()).collect();
    let run = |x: &[Tensor]| flash_attn(&x[0], &x[1], &x[2], 0.25, true).unwrap();
    let expected = run(&contiguous);
    for given in [&parts, &transposed] {
        assert_eq!(worst(&run(given), &expected), 0.0);
    }
}

#[test]
fn sequences_one_behind_the_other_are_the_same_as_one_by_one() {
    let lengths: [(usize, usize); 4] = [(5, 9), (0, 3), (12, 12), (1, 30)];
    let cumulative = |side: fn(&(usize, usize)) -> usize| {
        let mut all = vec![0_u32];
        for pair in &lengths {
            all.push(all[all.len() - 1] + side(pair) as u32);
        }
        Tensor::new(all, &Device::Cpu).unwrap()
    };
    let (seqlens_q, seqlens_k) = (cumulative(|pair| pair.0), cumulative(|pair| pair.1));
    let q = tensor(1, (1, 18, 4, 24), DType::F16).squeeze(0).unwrap();
    let k = tensor(2, (1, 54, 2, 24), DType::F16).squeeze(0).unwrap();
    let v = tensor(3, (1, 54, 2, 24), DType::F16).squeeze(0).unwrap();
    let o = flash_attn_varlen(&q, &k, &v, &seqlens_q, &seqlens_k, 12, 30, 0.2, true).unwrap();
    assert_eq!(o.dims(), [18, 4, 24]);
    let (mut at_q, mut at_k) = (0, 0);
    for (len_q, len_k) in lengths {
        let part = |x: &Tensor, at, len| x.narrow(0, at, len).unwrap().unsqueeze(0).unwrap();
        if len_q > 0 {
            let (k, v) = (part(&k, at_k, len_k), part(&v, at_k, len_k));
            let alone = flash_attn(&part(&q, at_q, len_q), &k, &v, 0.2, true).unwrap();
            assert_eq!(worst(&part(&o, at_q, len_q), &alone), 0.0);
        }
        (at_q, at_k) = (at_q + len_q, at_k + len_k);
    }
}

#[test]
fn what_cannot_be_done_is_said() {
    let q = tensor(1, (1, 4, 2, 16), DType::F32);
    let slopes = Tensor::new(&[1.0_f32, 0.5], &Device::Cpu).unwrap();
    let rows = q.squeeze(0).unwrap();
    let ends = Tensor::new(&[0_u32, 4], &Device::Cpu).unwrap();
    let says = |result: Result<Tensor>, words: &str| {
        let text = result.expect_err("it is refused").to_string();
        assert!(text.contains(words), "'{words}' is missing in: {text}");
    };
    says(flash_attn_alibi(&q, &q, &q, &slopes, 1.0, true), "ALiBi");
    says(flash_attn_varlen_alibi(&rows, &rows, &rows, &slopes, &ends, &ends, 4, 4, 1.0, true), "ALiBi");
    let table = Tensor::new(&[[0_u32]], &Device::Cpu).unwrap();
    let paged = flash_attn_varlen_paged_windowed(
        &rows, &q, &q, &ends, &ends, &table, None, 4, 4, 1.0, None, None, 4, None,
    );
    says(paged, "paged");
    says(flash_attn(&rows, &rows, &rows, 1.0, true), "(batch, length, heads, head_dim)");
    says(flash_attn(&q, &q.to_dtype(DType::F16).unwrap(), &q, 1.0, true), "all f16");
    says(flash_attn(&q, &tensor(1, (1, 4, 2, 8), DType::F32), &q, 1.0, true), "head_dim");
    let last = q.transpose(2, 3).unwrap();
    says(flash_attn(&last, &last, &last, 1.0, true), "contiguous in head_dim");
    let varlen =
        |ends: &Tensor, most| flash_attn_varlen(&rows, &rows, &rows, ends, ends, most, most, 1.0, true);
    says(varlen(&Tensor::new(&[0_u32, 5], &Device::Cpu).unwrap(), 9), "q has 4");
    says(varlen(&ends, 3), "lengths from 0 to 3");
    says(varlen(&Tensor::new(&[3_u32, 1], &Device::Cpu).unwrap(), 9), "from 3 to 1");
    says(varlen(&Tensor::new(&[0_i64, 4], &Device::Cpu).unwrap(), 4), "u32");
    says(varlen(&Tensor::new(&[0_u32], &Device::Cpu).unwrap(), 4), "n + 1");
}
