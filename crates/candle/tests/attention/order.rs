//! Calls among candle's own operations, without synchronising in between, and calls from several threads.

use candle_core::{DType, Device, Tensor};
use flashcore_candle::*;

use crate::devices::{devices, gpu};
use crate::plain::{CAUSAL, Given, plain, tensor, tolerance, values, worst};

/// Rows and columns of matrices that keep a GPU busy for a while.
const WIDE: usize = 4096;
/// One head's width, and the number of products that it takes to shift a matrix by one head.
const HEAD: usize = 64;
/// Heads of q, of k and of v.
const HEADS: usize = 4;
/// Rows of q, of k and of v.
const LENGTH: usize = 48;

/// A matrix that shifts the columns of another by one when multiplied with it.
fn shift(n: usize, device: &Device) -> Tensor {
    let eye = Tensor::eye(n, DType::F16, device).unwrap();
    let columns = |at, count| eye.narrow(1, at, count).unwrap();
    Tensor::cat(&[columns(n - 1, 1), columns(0, n - 1)], 1).unwrap().contiguous().unwrap()
}

/// A packed projection that is ready only after a long chain of products, which shift it by one head. Each product is
/// written to new memory, or over an earlier one, which holds other values: a call that runs too early reads those.
fn late(packed: &Tensor, shift: &Tensor) -> Tensor {
    let rows = packed.reshape((LENGTH, ())).unwrap().to_device(shift.device()).unwrap();
    let mut wide = rows.pad_with_zeros(0, 0, WIDE - LENGTH).unwrap();
    wide = wide.pad_with_zeros(1, 0, WIDE - 3 * HEADS * HEAD).unwrap().contiguous().unwrap();
    for _ in 0..HEAD {
        wide = wide.matmul(shift).unwrap();
    }
    let wide = wide.reshape((1, WIDE, WIDE / HEAD, HEAD)).unwrap();
    wide.narrow(1, 0, LENGTH).unwrap().narrow(2, 1, 3 * HEADS).unwrap()
}

/// q, k and v of a packed projection.
fn parts(packed: &Tensor) -> Given {
    let part = |at| packed.narrow(2, at * HEADS, HEADS).unwrap();
    Given { q: part(0), k: part(1), v: part(2) }
}

/// The output shifted by one column, on the CPU.
fn expected(Given { q, k, v }: &Given) -> Tensor {
    let o = plain(q, k, v, 0.125, 0.0, CAUSAL).unwrap().reshape((LENGTH, HEADS * HEAD)).unwrap();
    let columns = |at, count| o.narrow(1, at, count).unwrap();
    Tensor::cat(&[columns(HEADS * HEAD - 1, 1), columns(0, HEADS * HEAD - 1)], 1).unwrap()
}

fn check(results: &[(Tensor, Given)]) {
    for (result, given) in results {
        let error = worst(result, &expected(given));
        assert!(error <= tolerance(DType::F16), "{error}");
    }
}

#[test]
fn attention_runs_behind_the_products_before_it_and_before_those_behind_it() {
    let Some(gpu) = gpu() else { return };
    // Calls go to the thread's stream, or to one of the device's own.
    for device in [gpu, Device::new_cuda_with_stream(0).unwrap()] {
        let (wide_shift, out_shift) = (shift(WIDE, &device), shift(HEADS * HEAD, &device));
        let run = |seed| {
            let packed = tensor(seed, (1, LENGTH, 3 * HEADS, HEAD), DType::F16);
            let Given { q, k, v } = parts(&late(&packed, &wide_shift));
            let o = flash_attn(&q, &k, &v, 0.125, true).unwrap();
            let o = o.reshape((LENGTH, HEADS * HEAD)).unwrap();
            (o.matmul(&out_shift).unwrap(), parts(&packed))
        };
        // Nothing is read back, and so nothing is waited for, before everything is queued.
        let results: Vec<_> = (0..5).map(run).collect();
        check(&results);
    }
}

#[test]
fn tensors_of_several_streams_are_waited_for() {
    if gpu().is_none() {
        return;
    }
    let [a, b] = [0, 1].map(|_| Device::new_cuda_with_stream(0).unwrap());
    let (shift_a, shift_b) = (shift(WIDE, &a), shift(WIDE, &b));
    let out_shift = shift(HEADS * HEAD, &a);
    let run = |seed| {
        let packed = tensor(seed, (1, LENGTH, 3 * HEADS, HEAD), DType::F16);
        // Keys and values are made in another stream than the queries, and their memory is freed there at once.
        let (Given { q, .. }, Given { k, v, .. }) =
            (parts(&late(&packed, &shift_a)), parts(&late(&packed, &shift_b)));
        let o = flash_attn(&q, &k, &v, 0.125, true).unwrap();
        let o = o.reshape((LENGTH, HEADS * HEAD)).unwrap();
        (o.matmul(&out_shift).unwrap(), parts(&packed))
    };
    let results: Vec<_> = (0..5).map(run).collect();
    check(&results);
}

#[test]
fn calls_from_several_threads_give_what_one_gives() {
    for device in devices() {
        let given = [
            Given::new([2, 4, 2, 64], [50, 70], DType::F16),
            Given::new([1, 2, 2, 128], [33, 33], DType::BF16),
        ];
        let call = |Given { q, k, v }: &Given| flash_attn(q, k, v, 0.125, true).unwrap();
        let run = |given: &Given| values(&call(given));
        let shared = given.each_ref().map(|given| given.on(&device));
        for (given, shared) in given.iter().zip(&shared) {
            given.check(&call(shared), 0.125, 0.0, CAUSAL, "one thread");
        }
        let alone = shared.each_ref().map(run);
        // candle gives each thread a stream of its own: what is passed between threads must be ready.
        device.synchronize().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (given, shared, alone) = (&given[thread % 2], &shared[thread % 2], &alone[thread % 2]);
                let device = &device;
                scope.spawn(move || {
                    let own = given.on(device);
                    for _ in 0..20 {
                        assert_eq!(run(&own), *alone);
                        assert_eq!(run(shared), *alone);
                    }
                });
            }
        });
    }
}
