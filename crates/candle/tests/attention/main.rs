//! candle-flash-attn's functions against attention that candle computes step by step, on every device there is.

mod devices;
mod eight;
mod gradients;
mod order;
mod plain;
mod refusals;
mod sequences;

use candle_core::{DType, Tensor};
use flashcore_candle::*;

use devices::{devices, dtypes};
use plain::{ALL, CAUSAL, Given, tensor, values, worst};

#[test]
fn full_and_causal_attention_with_grouped_heads_in_every_dtype() {
    for device in devices() {
        for &dtype in dtypes(&device) {
            let given = Given::new([2, 6, 2, 32], [17, 23], dtype);
            let Given { q, k, v } = given.on(&device);
            for (causal, sees) in [(false, ALL), (true, CAUSAL)] {
                let o = flash_attn(&q, &k, &v, 0.2, causal).unwrap();
                given.check(&o, 0.2, 0.0, sees, &format!("{dtype:?}, causal {causal}"));
            }
        }
    }
}

#[test]
fn head_dims_up_to_256_with_fewer_more_and_as_many_queries_as_keys() {
    for device in devices() {
        for (head_dim, dtype) in [
            (8, DType::F16),
            (64, DType::BF16),
            (64, DType::F16),
            (96, DType::F16),
            (128, DType::BF16),
            (256, DType::F16),
        ] {
            for lengths in [[1, 130], [140, 70], [129, 129]] {
                let given = Given::new([1, 2, 1, head_dim], lengths, dtype);
                let Given { q, k, v } = given.on(&device);
                let scale = (head_dim as f32).sqrt().recip();
                let o = flash_attn(&q, &k, &v, scale, true).unwrap();
                let case = format!("head_dim {head_dim}, lengths {lengths:?}, {dtype:?}");
                given.check(&o, scale.into(), 0.0, CAUSAL, &case);
            }
        }
    }
}

#[test]
fn windows_and_softcap_are_those_of_candle_flash_attn() {
    for device in devices() {
        for &dtype in dtypes(&device) {
            let given = Given::new([1, 4, 4, 16], [20, 31], dtype);
            let Given { q, k, v } = given.on(&device);
            let o = flash_attn_windowed(&q, &k, &v, 0.3, Some(5), Some(2)).unwrap();
            given.check(&o, 0.3, 0.0, |i, j| j >= i - 5 && j <= i + 2, "5 before, 2 after");
            let o = flash_attn_windowed(&q, &k, &v, 0.3, Some(7), None).unwrap();
            given.check(&o, 0.3, 0.0, |i, j| j >= i - 7, "7 before");
            let o = flash_attn_windowed(&q, &k, &v, 0.3, None, Some(0)).unwrap();
            given.check(&o, 0.3, 0.0, CAUSAL, "none after");
            let capped =
                |right| flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 2.0, None, right, 1.5).unwrap();
            given.check(&capped(Some(0)), 2.0, 1.5, CAUSAL, "softcap, causal");
            given.check(&capped(None), 2.0, 1.5, ALL, "softcap");
        }
    }
}

/// q, k and v as views of a packed projection, as a model may have them: (batch, length, heads, head_dim).
fn views(packed: &Tensor) -> Vec<[Tensor; 3]> {
    let parts = [0, 3, 6].map(|head| packed.narrow(2, head, 3).unwrap());
    let with = |view: &dyn Fn(&Tensor) -> Tensor| parts.each_ref().map(view);
    let swap = |x: &Tensor| x.transpose(1, 2).unwrap();
    let repeat = |x: &Tensor, dim| x.narrow(dim, 1, 1).unwrap().broadcast_as(x.dims()).unwrap();
    let all = vec![
        with(&Clone::clone),
        // (batch, heads, length, head_dim) in memory.
        with(&|x| swap(&swap(x).contiguous().unwrap())),
        // Broadcast: one sequence, row or head stands for all of them, with a stride of 0.
        with(&|x| repeat(x, 0)),
        with(&|x| repeat(x, 1)),
        with(&|x| repeat(x, 2)),
        // There is one head, whose stride candle chooses.
        with(&|x| x.narrow(2, 1, 1).unwrap().squeeze(2).unwrap().unsqueeze(2).unwrap()),
    ];
    assert!(!all[0][1].is_contiguous() && all[2][0].stride()[0] == 0 && all[5][0].stride()[2] == 1);
    all
}

#[test]
fn tensors_are_used_with_the_strides_that_they_have() {
    for device in devices() {
        let packed = tensor(4, (2, 11, 9, 16), DType::F16);
        for ([q, k, v], [q_cpu, k_cpu, v_cpu]) in
            views(&packed.to_device(&device).unwrap()).into_iter().zip(views(&packed))
        {
            let case = format!("{:?}", q.layout());
            let o = flash_attn(&q, &k, &v, 0.25, true).unwrap();
            Given { q: q_cpu, k: k_cpu, v: v_cpu }.check(&o, 0.25, 0.0, CAUSAL, &case);
            let [q, k, v] = [q, k, v].map(|x| x.contiguous().unwrap());
            let same = flash_attn(&q, &k, &v, 0.25, true).unwrap();
            assert_eq!(worst(&o, &same), 0.0, "{case} on {device:?}");
        }
    }
}

#[test]
fn without_a_key_to_see_the_output_is_zero() {
    for device in devices() {
        let given = Given::new([2, 2, 2, 32], [5, 3], DType::F16);
        let Given { q, k, v } = given.on(&device);
        let (none_k, none_v) = (k.narrow(1, 3, 0).unwrap(), v.narrow(1, 3, 0).unwrap());
        let o = flash_attn(&q, &none_k, &none_v, 0.2, false).unwrap();
        assert_eq!(values(&o), [0.0; 2 * 5 * 2 * 32]);
        // The first two queries come before all keys.
        let o = flash_attn(&q, &k, &v, 0.2, true).unwrap();
        assert_eq!(values(&o.narrow(1, 0, 2).unwrap()), [0.0; 2 * 2 * 2 * 32]);
        given.check(&o, 0.2, 0.0, CAUSAL, "more queries than keys");
        let none_q = q.narrow(1, 5, 0).unwrap();
        assert_eq!(flash_attn(&none_q, &k, &v, 0.2, false).unwrap().dims(), [2, 0, 2, 32]);
    }
}
