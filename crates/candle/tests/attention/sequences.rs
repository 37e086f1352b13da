//! Packed sequences, one after the other.

use candle_core::{DType, Device, Tensor};
use flashcore_candle::*;

use crate::devices::{devices, dtypes};
use crate::plain::{CAUSAL, Given, Sees, tensor, values};

/// Queries and keys of each sequence; some have none of either.
const LENGTHS: [[usize; 2]; 6] = [[5, 9], [0, 3], [12, 12], [1, 30], [2, 0], [4, 4]];
const ROWS: [usize; 2] = [24, 58];

/// Where sequences begin and end, on the CPU.
fn cumulative(side: usize) -> Tensor {
    let mut all = vec![0_u32];
    for lengths in LENGTHS {
        all.push(all[all.len() - 1] + lengths[side] as u32);
    }
    Tensor::new(all, &Device::Cpu).unwrap()
}

/// (rows, heads, head_dim)
fn rows(seed: u64, [rows, heads, width]: [usize; 3], dtype: DType) -> Tensor {
    tensor(seed, (1, rows, heads, width), dtype).squeeze(0).unwrap()
}

/// Checks each sequence's part of an output against attention of it alone.
fn check(given: &Given, o: &Tensor, softcap: f64, sees: Sees) {
    assert_eq!(o.dims(), given.q.dims());
    let (mut at_q, mut at_k) = (0, 0);
    for [len_q, len_k] in LENGTHS {
        let part = |x: &Tensor, at, len| x.narrow(0, at, len).unwrap().unsqueeze(0).unwrap();
        let out = part(o, at_q, len_q);
        if len_k == 0 {
            assert!(values(&out).iter().all(|x| *x == 0.0), "no keys, but {out}");
        } else if len_q > 0 {
            let (k, v) = (part(&given.k, at_k, len_k), part(&given.v, at_k, len_k));
            let alone = Given { q: part(&given.q, at_q, len_q), k, v };
            alone.check(&out, 0.2, softcap, sees, &format!("{len_q} queries, {len_k} keys"));
        }
        (at_q, at_k) = (at_q + len_q, at_k + len_k);
    }
}

#[test]
fn every_sequence_attends_to_itself_alone() {
    for device in devices() {
        for &dtype in dtypes(&device) {
            let q = rows(1, [ROWS[0], 4, 24], dtype);
            let (k, v) = (rows(2, [ROWS[1], 2, 24], dtype), rows(3, [ROWS[1], 2, 24], dtype));
            let given = Given { q, k, v };
            let Given { q, k, v } = given.on(&device);
            // The lengths may lie on the device or on the CPU.
            let (ends_q, ends_k) = (cumulative(0).to_device(&device).unwrap(), cumulative(1));
            let o = flash_attn_varlen(&q, &k, &v, &ends_q, &ends_k, 12, 30, 0.2, true).unwrap();
            check(&given, &o, 0.0, CAUSAL);
            let windowed =
                flash_attn_varlen_windowed(&q, &k, &v, &ends_q, &ends_k, 12, 30, 0.2, Some(4), Some(1));
            check(&given, &windowed.unwrap(), 0.0, |i, j| j >= i - 4 && j <= i + 1);
            let capped = flash_attn_varlen_alibi_windowed_softcap(
                &q, &k, &v, None, &ends_q, &ends_k, 12, 30, 0.2, None, None, 1.5,
            );
            check(&given, &capped.unwrap(), 1.5, |_, _| true);
        }
    }
}

#[test]
fn parts_of_a_packed_projection_are_used_where_they_lie() {
    for device in devices() {
        // Keys and values side by side; the last sequence is empty, and would begin beyond the end of the memory.
        let packed = rows(4, [7, 5, 16], DType::F16).to_device(&device).unwrap();
        let part = |at| packed.narrow(1, at, 1).unwrap();
        let (q, k, v) = (packed.narrow(1, 0, 2).unwrap(), part(3), part(4));
        let ends_q = Tensor::new(&[0_u32, 3, 5, 7], &device).unwrap();
        let ends_k = Tensor::new(&[0_u32, 4, 7, 7], &device).unwrap();
        let run = |q: &Tensor, k: &Tensor, v: &Tensor| {
            values(&flash_attn_varlen(q, k, v, &ends_q, &ends_k, 3, 4, 0.25, true).unwrap())
        };
        let copy = |x: &Tensor| x.contiguous().unwrap();
        assert_eq!(run(&q, &k, &v), run(&copy(&q), &copy(&k), &copy(&v)));
        assert_eq!(run(&q, &k, &v)[5 * 32..], [0.0; 2 * 32]);
    }
}

#[test]
fn rows_in_no_sequence_give_zeros() {
    for device in devices() {
        let q = rows(1, [6, 2, 16], DType::BF16).to_device(&device).unwrap();
        let ends = Tensor::new(&[1_u32, 4], &Device::Cpu).unwrap();
        let o = values(&flash_attn_varlen(&q, &q, &q, &ends, &ends, 3, 3, 0.25, false).unwrap());
        let (row, zero) = (2 * 16, |x: &f32| *x == 0.0);
        assert!(o[..row].iter().all(zero) && o[4 * row..].iter().all(zero));
        assert!(!o[row..4 * row].iter().any(zero));
    }
}

#[test]
fn keys_in_pages_are_found_by_the_table() {
    let page = 4;
    for device in devices() {
        let dtype = dtypes(&device)[0];
        let q = rows(1, [ROWS[0], 4, 24], dtype);
        let (k, v) = (rows(2, [ROWS[1], 2, 24], dtype), rows(3, [ROWS[1], 2, 24], dtype));
        let given = Given { q, k, v };
        // Page 16 - i holds the i-th page in the order of sequences; nobody reads what is not a number.
        let most = 30_usize.div_ceil(page);
        let nothing =
            |rows| Tensor::full(f32::NAN, (rows, 2, 24), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let mut pools = [vec![nothing(page); 17], vec![nothing(page); 17]];
        let (mut table, mut used, mut first) = (vec![99_u32; LENGTHS.len() * most], 0, 0);
        for (sequence, [_, len]) in LENGTHS.into_iter().enumerate() {
            for start in (0..len).step_by(page) {
                let count = page.min(len - start);
                table[sequence * most + start / page] = 16 - used as u32;
                for (pool, from) in pools.iter_mut().zip([&given.k, &given.v]) {
                    let held = from.narrow(0, first + start, count).unwrap();
                    pool[16 - used] = Tensor::cat(&[held, nothing(page - count)], 0).unwrap();
                }
                used += 1;
            }
            first += len;
        }
        let [k, v] = pools.map(|pages| Tensor::stack(&pages, 0).unwrap().to_device(&device).unwrap());
        let table = Tensor::from_vec(table, (LENGTHS.len(), most), &Device::Cpu).unwrap();
        let (ends_q, ends_k) = (cumulative(0).to_device(&device).unwrap(), cumulative(1));
        let q = given.q.to_device(&device).unwrap();
        let run = |causal: bool| {
            let right = causal.then_some(0);
            flash_attn_varlen_paged_windowed(
                &q, &k, &v, &ends_q, &ends_k, &table, None, 12, 30, 0.2, None, right, page, None,
            )
        };
        check(&given, &run(true).unwrap(), 0.0, CAUSAL);
        check(&given, &run(false).unwrap(), 0.0, |_, _| true);
    }
}
