//! Gradients of attention against those of attention that candle computes and differentiates step by step.

use candle_core::{DType, Device, Tensor, Var};
use flashcore_candle::*;

use crate::devices::{devices, dtypes};
use crate::plain::{ALL, CAUSAL, Given, Sees, plain, tensor, values};

/// The gradients of q, k and v, of a sum of the output in which every element has a weight of its own.
fn gradients(given: &Given, attention: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor) -> [Tensor; 3] {
    let Given { q, k, v } = given;
    let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(x).unwrap());
    let o = attention(&q, &k, &v).to_dtype(DType::F32).unwrap();
    let (b, s, h, d) = o.dims4().unwrap();
    let weights = tensor(7, (b, s, h, d), DType::F32).to_device(o.device()).unwrap();
    let loss = (o * weights).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    [&q, &k, &v].map(|x| gradients.get(x).unwrap().clone())
}

/// Checks that both have the same gradients, but for a part of the largest.
fn check(
    given: &Given,
    device: &Device,
    ours: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor,
    (scale, cap, sees): (f64, f64, Sees),
) {
    let found = gradients(&given.on(device), ours);
    let truth = gradients(given, &|q, k, v| plain(q, k, v, scale, cap, sees).unwrap());
    let part = match given.q.dtype() {
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        _ => 3e-2,
    };
    for (name, (found, truth)) in ["q", "k", "v"].into_iter().zip(found.iter().zip(&truth)) {
        assert_eq!((found.dims(), found.dtype()), (truth.dims(), truth.dtype()), "{name}");
        let (found, truth) = (values(found), values(truth));
        let largest = truth.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        for (found, truth) in found.into_iter().zip(truth) {
            assert!((found - truth).abs() <= part * largest, "{name}: {found} for {truth}");
        }
    }
}

#[test]
fn gradients_are_those_of_attention_step_by_step() {
    for device in devices() {
        for &dtype in dtypes(&device) {
            let given = Given::new([2, 6, 2, 32], [17, 23], dtype);
            let check = |ours: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor, truth| {
                check(&given, &device, ours, truth);
            };
            check(&|q, k, v| flash_attn(q, k, v, 0.2, false).unwrap(), (0.2, 0.0, ALL));
            check(&|q, k, v| flash_attn(q, k, v, 0.2, true).unwrap(), (0.2, 0.0, CAUSAL));
            check(
                &|q, k, v| flash_attn_windowed(q, k, v, 0.3, Some(5), Some(2)).unwrap(),
                (0.3, 0.0, |i, j| j >= i - 5 && j <= i + 2),
            );
            let capped = |q: &Tensor, k: &Tensor, v: &Tensor| {
                flash_attn_alibi_windowed_softcap(q, k, v, None, 2.0, None, Some(0), 1.5).unwrap()
            };
            check(&capped, (2.0, 1.5, CAUSAL));
        }
    }
}

#[test]
fn packed_sequences_have_the_gradients_of_each_alone() {
    for device in devices() {
        packed(&device, dtypes(&device)[0]);
    }
}

fn packed(device: &Device, dtype: DType) {
    // What a dtype of 16 bits holds, so that the truth on the CPU in f32 is about the same numbers.
    let rows = |seed, rows, heads| {
        let x = tensor(seed, (1, rows, heads, 16), DType::F16).squeeze(0).unwrap();
        x.to_dtype(DType::F32).unwrap()
    };
    let given = [rows(1, 13, 4), rows(2, 16, 2), rows(3, 16, 2)];
    let ours = given.each_ref().map(|x| {
        let x = x.to_device(device).unwrap().to_dtype(dtype).unwrap();
        Var::from_tensor(&x).unwrap()
    });
    let [q, k, v] = given.map(|x| Var::from_tensor(&x).unwrap());
    // An empty sequence, one without queries, and rows after the last one.
    let (ends_q, ends_k) = ([0_u32, 5, 5, 5, 11], [0_u32, 7, 7, 9, 15]);
    let seqlens = |ends: &[u32]| Tensor::new(ends, device).unwrap();
    let weights = rows(7, 13, 4);
    let [our_q, our_k, our_v] = &ours;
    let o = flash_attn_varlen(our_q, our_k, our_v, &seqlens(&ends_q), &seqlens(&ends_k), 6, 7, 0.3, true)
        .unwrap();
    let weighted = o.to_dtype(DType::F32).unwrap() * weights.to_device(device).unwrap();
    let found = weighted.unwrap().sum_all().unwrap().backward().unwrap();
    let part = |x: &Tensor, ends: &[u32], i: usize| {
        let (start, end) = (ends[i] as usize, ends[i + 1] as usize);
        x.narrow(0, start, end - start).unwrap().unsqueeze(0).unwrap()
    };
    let mut loss = Tensor::new(0_f32, &Device::Cpu).unwrap();
    for i in [0, 3] {
        let (q, weights) = (part(&q, &ends_q, i), part(&weights, &ends_q, i));
        let (k, v) = (part(&k, &ends_k, i), part(&v, &ends_k, i));
        let o = plain(&q, &k, &v, 0.3, 0.0, CAUSAL).unwrap();
        loss = (loss + (o * weights).unwrap().sum_all().unwrap()).unwrap();
    }
    let truth = loss.backward().unwrap();
    let most = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
    for (ours, x) in ours.iter().zip([&q, &k, &v]) {
        assert!(crate::plain::worst(found.get(ours).unwrap(), truth.get(x).unwrap()) < most);
    }
}

#[test]
fn one_tensor_may_be_all_three_and_the_gradient_of_a_sum_has_no_stride() {
    let x = Var::from_tensor(&tensor(1, (1, 9, 2, 16), DType::F32)).unwrap();
    let sum = |o: Tensor| o.sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
    let found = sum(flash_attn(&x, &x, &x, 0.25, true).unwrap());
    let truth = sum(plain(&x, &x, &x, 0.25, 0.0, CAUSAL).unwrap());
    assert!(crate::plain::worst(&found, &truth) < 1e-5);
}
