//! 8-bit floats against candle's own operations on the numbers that they stand for.

use candle_core::{DType, Device, Tensor};
use flashcore_candle::FlashAttnFp8;

use crate::devices::devices;
use crate::plain::{ALL, CAUSAL, plain, tensor, worst};

/// Codes, and what they stand for in f32.
fn codes(seed: u64, shape: (usize, usize, usize, usize)) -> [Tensor; 2] {
    let stored = tensor(seed, shape, DType::F8E4M3);
    let wide = stored.to_dtype(DType::F32).unwrap();
    [stored, wide]
}

/// A number for each of (batch, kv heads), or also for each block of keys.
fn numbers(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}

/// Multiplies (batch, length, heads, head_dim) by a number for each of (batch, heads).
fn times(x: &Tensor, descale: &Tensor) -> Tensor {
    x.broadcast_mul(&descale.unsqueeze(1).unwrap().unsqueeze(3).unwrap()).unwrap()
}

/// Outputs are rounded to bf16; on a GPU scores and probabilities have few bits.
fn close(device: &Device) -> f32 {
    if device.is_cpu() { 1e-2 } else { 6e-2 }
}

#[test]
fn stored_numbers_stand_for_themselves_times_their_descales() {
    for device in devices() {
        let on = |x: &Tensor| x.to_device(&device).unwrap();
        let [[q, q_wide], [k, k_wide], [v, v_wide]] =
            [codes(1, (2, 19, 4, 32)), codes(2, (2, 23, 2, 32)), codes(3, (2, 23, 2, 32))];
        let run = |op: FlashAttnFp8| {
            let descales = op.descales.each_ref().map(|it| it.as_ref().map(on));
            on(&q).apply_op3(&on(&k), &on(&v), FlashAttnFp8 { descales, ..op }).unwrap()
        };
        let o = run(FlashAttnFp8::new(0.3).causal());
        assert_eq!(o.dtype(), DType::BF16);
        let truth = plain(&q_wide, &k_wide, &v_wide, 0.3, 0.0, CAUSAL).unwrap();
        assert!(worst(&o, &truth) < close(&device), "causal, on {device:?}");

        let of_q = numbers(&[0.5], &[1]);
        let of_k = numbers(&[1.0, 3.0, 0.25, 2.0], &[2, 2]);
        let of_v = numbers(&[0.5, 0.25, 1.5, 0.125], &[2, 2]);
        let descales = [Some(of_q), Some(of_k.clone()), Some(of_v.clone())];
        let o = run(FlashAttnFp8 { descales, out: DType::F16, ..FlashAttnFp8::new(0.3) });
        assert_eq!(o.dtype(), DType::F16);
        let truth = plain(&q_wide, &times(&k_wide, &of_k), &times(&v_wide, &of_v), 0.15, 0.0, ALL).unwrap();
        assert!(worst(&o, &truth) < close(&device), "descales, on {device:?}");
    }
}

#[test]
fn a_cache_goes_with_queries_of_16_bits_and_blocks_of_keys_with_descales_of_their_own() {
    for device in devices() {
        let on = |x: &Tensor| x.to_device(&device).unwrap();
        let q = tensor(4, (1, 1, 4, 64), DType::F16);
        let [[k, k_wide], [v, v_wide]] = [codes(5, (1, 80, 2, 64)), codes(6, (1, 80, 2, 64))];
        // Three blocks of 32 keys, the last of 16.
        let of_v = numbers(&[0.5, 2.0, 1.0, 0.25, 1.0, 3.0], &[1, 2, 3]);
        let op = FlashAttnFp8 {
            descales: [None, None, Some(on(&of_v))],
            descale_keys: Some(32),
            ..FlashAttnFp8::new(0.2).causal()
        };
        let o = on(&q).apply_op3(&on(&k), &on(&v), op).unwrap();
        assert_eq!(o.dtype(), DType::F16);
        let of_block = |block| of_v.narrow(2, block, 1).unwrap().squeeze(2).unwrap();
        let parts = [(0, 32), (1, 32), (2, 16)]
            .map(|(block, keys)| times(&v_wide.narrow(1, 32 * block, keys).unwrap(), &of_block(block)));
        let v_wide = Tensor::cat(&parts, 1).unwrap();
        let truth = plain(&q, &k_wide, &v_wide, 0.2, 0.0, CAUSAL).unwrap();
        assert!(worst(&o, &truth) < close(&device), "on {device:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_can() {
    let [q, _] = codes(1, (1, 4, 2, 16));
    let wide = q.to_dtype(DType::F32).unwrap();
    let said = |q: &Tensor, k: &Tensor, op| q.apply_op3(k, k, op).unwrap_err().to_string();
    assert!(said(&wide, &q, FlashAttnFp8::new(1.0)).contains("k and v of f8 e4m3"));
    assert!(said(&q, &wide, FlashAttnFp8::new(1.0)).contains("k and v of f8 e4m3"));
    let op = FlashAttnFp8 { out: DType::F32, ..FlashAttnFp8::new(1.0) };
    assert!(said(&q, &q, op).contains("f16 or bf16"));
    let with = |descale| FlashAttnFp8 { descales: [None, Some(descale), None], ..FlashAttnFp8::new(1.0) };
    assert!(said(&q, &q, with(numbers(&[1.0; 3], &[3]))).contains("k_descale has the shape [3]"));
    assert!(said(&q, &q, with(numbers(&[1.0, 0.0], &[1, 2]))).contains("descale"));
    let double = numbers(&[1.0; 2], &[1, 2]).to_dtype(DType::F64).unwrap();
    assert!(said(&q, &q, with(double)).contains("k_descale is not of f32"));
}
