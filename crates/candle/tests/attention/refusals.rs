//! What cannot be done is refused with its reason, and later calls still work.

use candle_core::{DType, Device, Result, Tensor};
use flashcore_candle::*;

use crate::devices::{devices, gpu};
use crate::plain::{ALL, CAUSAL, Given, tensor};

fn says(result: Result<Tensor>, words: &str) {
    let text = result.expect_err("it is refused").to_string();
    assert!(text.contains(words), "'{words}' is missing in: {text}");
}

#[test]
fn what_cannot_be_done_is_said_and_the_next_call_works() {
    for device in devices() {
        let dtype = DType::F16;
        let given = Given::new([1, 2, 2, 16], [4, 4], dtype);
        let Given { q, k, v } = given.on(&device);
        let slopes = Tensor::new(&[1.0_f32, 0.5], &device).unwrap();
        let rows = q.squeeze(0).unwrap();
        let ends = |ends: &[u32]| Tensor::new(ends, &device).unwrap();
        let all = ends(&[0, 4]);
        says(flash_attn_alibi(&q, &k, &v, &slopes, 1.0, true), "ALiBi");
        says(flash_attn_alibi_windowed(&q, &k, &v, &slopes, 1.0, Some(1), None), "ALiBi");
        says(flash_attn_varlen_alibi(&rows, &rows, &rows, &slopes, &all, &all, 4, 4, 1.0, true), "ALiBi");
        let windowed =
            flash_attn_varlen_alibi_windowed(&rows, &rows, &rows, &slopes, &all, &all, 4, 4, 1.0, None, None);
        says(windowed, "ALiBi");
        let table = Tensor::new(&[[0_u32]], &device).unwrap();
        let paged = |table: &Tensor, prefixes: Option<&Tensor>, page| {
            flash_attn_varlen_paged_windowed(
                &rows, &k, &v, &all, &all, table, prefixes, 4, 4, 1.0, None, None, page, None,
            )
        };
        says(paged(&table, Some(&table), 4), "prefix");
        says(paged(&table, None, 8), "(pages, 8, heads, head_dim)");
        says(paged(&Tensor::new(&[[0_u32], [0]], &device).unwrap(), None, 4), "2 rows for 1 sequences");
        says(paged(&Tensor::new(&[[0_i64]], &device).unwrap(), None, 4), "u32");
        says(flash_attn(&rows, &rows, &rows, 1.0, true), "(batch, length, heads, head_dim)");
        says(flash_attn(&q, &k.to_dtype(DType::F32).unwrap(), &v, 1.0, true), "all f16");
        says(flash_attn(&q, &k, &v.to_dtype(DType::BF16).unwrap(), 1.0, true), "F16, F16 and BF16");
        let other = |shape| tensor(1, shape, dtype).to_device(&device).unwrap();
        says(flash_attn(&q, &other((1, 4, 2, 8)), &v, 1.0, true), "head_dim");
        says(flash_attn(&q, &other((2, 4, 2, 16)), &v, 1.0, true), "batch");
        says(flash_attn(&q, &k, &other((1, 5, 2, 16)), 1.0, true), "length");
        let three = other((1, 4, 3, 16));
        says(flash_attn(&q, &three, &three, 1.0, true), "a multiple of k's");
        let last = q.transpose(2, 3).unwrap();
        says(flash_attn(&last, &last, &last, 1.0, true), "contiguous in head_dim");
        says(flash_attn(&q, &k, &v, f32::NAN, true), "scale");
        let varlen =
            |ends: &Tensor, most| flash_attn_varlen(&rows, &rows, &rows, ends, ends, most, most, 1.0, true);
        // What lies on a GPU is not read.
        let ends_on_host = |ends: &[u32]| Tensor::new(ends, &Device::Cpu).unwrap();
        says(varlen(&ends_on_host(&[0, 5]), 9), "q has 4");
        says(varlen(&ends_on_host(&[0, 4]), 3), "lengths from 0 to 3");
        says(varlen(&ends_on_host(&[3, 1]), 9), "from 3 to 1");
        says(varlen(&Tensor::new(&[0_i64, 4], &device).unwrap(), 4), "u32");
        says(varlen(&ends(&[0]), 4), "n + 1");
        given.check(&flash_attn(&q, &k, &v, 0.25, true).unwrap(), 0.25, 0.0, CAUSAL, "after refusals");
    }
}

#[test]
fn a_gpu_refuses_what_only_a_cpu_does() {
    let Some(gpu) = gpu() else { return };
    let given = Given::new([1, 2, 2, 32], [6, 6], DType::F16);
    let Given { q, k, v } = given.on(&gpu);
    says(flash_attn(&given.q, &k, &v, 1.0, true), "device mismatch");
    says(flash_attn(&q, &given.k, &v, 1.0, true), "device mismatch");
    says(flash_attn(&q, &k, &given.v, 1.0, true), "device mismatch");
    let single = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
    says(flash_attn(&single(&q), &single(&k), &single(&v), 1.0, true), "not F32, F32 and F32");
    let on_gpu = |shape| tensor(1, shape, DType::F16).to_device(&gpu).unwrap();
    let odd = on_gpu((1, 6, 2, 20));
    says(flash_attn(&odd, &odd, &odd, 1.0, true), "multiple");
    let wide = on_gpu((1, 6, 1, 264));
    says(flash_attn(&wide, &wide, &wide, 1.0, true), "256");
    let shifted = on_gpu((1, 6, 2, 32)).flatten_all().unwrap().narrow(0, 1, 5 * 64).unwrap();
    let shifted = shifted.reshape((1, 5, 2, 32)).unwrap();
    says(flash_attn(&q, &shifted, &shifted, 1.0, true), "multiple of 16 bytes");
    let o = flash_attn(&q, &k, &v, 0.25, false).unwrap();
    given.check(&o, 0.25, 0.0, ALL, "after refusals");
    assert!(gpu.synchronize().is_ok() && matches!(o.device(), Device::Cuda(_)));
}
