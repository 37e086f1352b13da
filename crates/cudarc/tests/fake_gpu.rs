//! The adapter without a GPU: cudarc and FlashCore both load a fake driver, in a separate process.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // The fake driver's harness, and lengths that are not checked.

#[path = "../../driver/tests/fake/mod.rs"]
mod fake;

use std::process::Command;

use cudarc::driver::CudaContext;
use flashcore::{Name, Place};
use flashcore_cudarc::{Attention, Error, Gpu, Input, Output, Sequences};
use half::f16;

/// The environment variable that is set in the process with the fake driver.
const INSIDE: &str = "FLASHCORE_TEST_INSIDE";

/// Runs one of the tests below where `libcuda` is the fake one.
fn inside(test: &str) {
    let Some(driver) = fake::as_system_driver(&[]) else { return };
    std::os::unix::fs::symlink("libcuda.so.1", driver.path().join("libcuda.so")).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored"])
        .env("LD_LIBRARY_PATH", driver.path())
        .env("FLASHCORE_CACHE", "")
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

const SHAPE: [usize; 4] = [2, 4, 64, 64];
const ELEMENTS: usize = 2 * 4 * 64 * 64;

#[test]
fn slices_of_any_layout_are_launched_on_in_cudarcs_stream() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("slices_of_any_layout_are_launched_on_in_cudarcs_stream");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let mut lse = stream.alloc_zeros::<f32>(2 * 4 * 64).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let attention = Attention::new().causal();
    let inputs = || [(); 3].map(|()| Input::bhsd(&q, SHAPE));
    gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None).unwrap();
    let lse_out = Output::lse(&mut lse, [2, 4, 64]);
    gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), Some(lse_out)).unwrap();
    // A view of a part, and the other layout.
    let part = q.slice(ELEMENTS / 2..);
    let views = [(); 3].map(|()| Input::bshd(&part, [1, 64, 4, 64]));
    let mut half = o.slice_mut(..ELEMENTS / 2);
    gpu.run_into(&attention, views, Output::bshd(&mut half, [1, 64, 4, 64]), None).unwrap();
    // Another stream, the same kernels.
    let other = stream.context().new_stream().unwrap();
    gpu.on(&other).unwrap().run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None).unwrap();
    other.synchronize().unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn gradients_are_launched_in_cudarcs_stream() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("gradients_are_launched_in_cudarcs_stream");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let lse = stream.clone_htod(&[0.0_f32; 2 * 4 * 64]).unwrap();
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| stream.alloc_zeros::<f16>(ELEMENTS).unwrap());
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |rows: usize| {
        let given = [(); 5].map(|()| Input::bshd(&q, [2, 64, 4, 64]));
        let lse = Input::bhsd(&lse, [2, 4, rows, 1]);
        let gradients = [&mut dq, &mut dk, &mut dv].map(|slice| Output::bshd(slice, [2, 64, 4, 64]));
        gpu.backward_into(&Attention::new().causal(), &given, &lse, gradients)
    };
    assert_eq!(run(64), Ok(()));
    assert!(matches!(run(63), Err(Error::SizeMismatch { tensor: Name::Lse, .. })));
    assert_eq!(run(64), Ok(()));
    stream.synchronize().unwrap();
}

#[test]
fn key_lengths_are_taken_from_a_slice() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("key_lengths_are_taken_from_a_slice");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |lengths: &[u32], most: u32| {
        let lengths = stream.clone_htod(lengths).unwrap();
        let inputs = [(); 3].map(|()| Input::bhsd(&q, SHAPE));
        let out = Output::bhsd(&mut o, SHAPE);
        // SAFETY: the lengths are at most 64.
        unsafe { gpu.run_with_lengths(&Attention::new(), &lengths, most, inputs, out, None) }
    };
    assert_eq!(run(&[64, 3], 64), Ok(()));
    assert_eq!(run(&[64], 64), Err(Error::KeyLengthCount { given: 1, batch: 2 }));
    assert_eq!(run(&[64, 3], 65), Err(Error::KeyLengthBound { given: 65, len_k: 64 }));
}

#[test]
fn packed_sequences_and_pages_are_taken_from_slices() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("packed_sequences_and_pages_are_taken_from_slices");
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let lse = stream.clone_htod(&[0.0_f32; 4 * 128]).unwrap();
    let numbers = |numbers: &[u32]| stream.clone_htod(numbers).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let attention = Attention::new().causal();
    // 128 tokens of 4 heads, in three sequences; or 8 pages of 16 tokens.
    let (tokens, pages) = ([1, 128, 4, 64], [8, 16, 4, 64]);
    let (starts, few) = (numbers(&[0, 64, 64, 128]), numbers(&[0, 64, 128]));
    let mut packed = |sequences: &Sequences<'_>| {
        let inputs = [(); 3].map(|()| Input::bshd(&q, tokens));
        // SAFETY: the sequences end where the tokens do.
        unsafe { gpu.run_sequences(&attention, sequences, inputs, Output::bshd(&mut o, tokens), None) }
    };
    assert_eq!(packed(&Sequences::new().packed(&starts, 64)), Ok(()));
    let other = Sequences::new().packed_queries(&starts, 64).packed_keys(&few, 64);
    assert!(matches!(packed(&other), Err(Error::SizeMismatch { tensor: Name::KStarts, .. })));
    let (table, lengths) = (numbers(&[7, 1, 0, 3, 2, 5]), numbers(&[17, 0, 30]));
    let mut paged = |sequences: Sequences<'_>, most: u32| {
        let inputs = [Input::bshd(&q, tokens), Input::bshd(&q, pages), Input::bshd(&q, pages)];
        let sequences = sequences.packed_queries(&starts, 64).key_lengths(&lengths, most);
        // SAFETY: the pool has these pages, and the lengths are at most 30.
        unsafe { gpu.run_sequences(&attention, &sequences, inputs, Output::bshd(&mut o, tokens), None) }
    };
    assert_eq!(paged(Sequences::new().paged(&table, 2), 32), Ok(()));
    assert_eq!(paged(Sequences::new().paged_up_to(&table, 2, 30), 30), Ok(()));
    assert_eq!(
        paged(Sequences::new().paged(&table, 2), 33),
        Err(Error::KeyLengthBound { given: 33, len_k: 32 })
    );
    assert!(matches!(paged(Sequences::new().paged_up_to(&table, 2, 33), 32), Err(Error::PageTable { .. })));
    let wide = paged(Sequences::new().paged(&table, 3), 32);
    assert!(matches!(wide, Err(Error::SizeMismatch { tensor: Name::Pages, .. })), "{wide:?}");
    let given = [(); 5].map(|()| Input::bshd(&q, tokens));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| stream.alloc_zeros::<f16>(ELEMENTS).unwrap());
    let gradients = [&mut dq, &mut dk, &mut dv].map(|slice| Output::bshd(slice, tokens));
    let (sequences, lse) = (Sequences::new().packed(&starts, 64), Input::bhsd(&lse, [1, 4, 128, 1]));
    // SAFETY: as above.
    let done = unsafe { gpu.backward_sequences(&attention, &sequences, &given, &lse, gradients) };
    assert_eq!(done, Ok(()));
    stream.synchronize().unwrap();
}

#[test]
fn what_does_not_fit_is_an_error_and_the_next_call_goes_through() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("what_does_not_fit_is_an_error_and_the_next_call_goes_through");
    }
    let stream = CudaContext::new(0).unwrap().default_stream();
    let q = stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap();
    let mut o = stream.alloc_zeros::<f16>(ELEMENTS).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let mut run = |shape: [usize; 4]| {
        let inputs = [(); 3].map(|()| Input::bhsd(&q, shape));
        gpu.run_into(&Attention::new(), inputs, Output::bhsd(&mut o, SHAPE), None)
    };
    assert!(matches!(run([2, 4, 65, 64]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(run([1, 4, 64, 64]), Err(Error::SizeMismatch { .. })));
    assert_eq!(run(SHAPE), Ok(()));
}

#[test]
fn streams_of_another_context_are_refused() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("streams_of_another_context_are_refused");
    }
    let context = CudaContext::new(0).unwrap();
    let gpu = Gpu::new(&context.default_stream()).unwrap();
    let other = CudaContext::new(1).unwrap();
    for stream in [other.new_stream().unwrap(), other.default_stream(), other.per_thread_stream()] {
        assert!(matches!(gpu.on(&stream), Err(Error::ForeignStream { stream_device: 1, .. })));
    }
    // SAFETY: the context lives to the end of the process, and nobody destroys it, because the wrapper is forgotten.
    let own = unsafe { CudaContext::from_raw_context(0, context.cu_device(), context.cu_ctx()) }.unwrap();
    assert!(matches!(gpu.on(&own.default_stream()), Err(Error::ForeignStream { stream_device: 0, .. })));
    std::mem::forget(own);
}

#[test]
fn slices_of_another_gpu_are_refused_and_leave_no_error_behind() {
    if std::env::var_os(INSIDE).is_none() {
        return inside("slices_of_another_gpu_are_refused_and_leave_no_error_behind");
    }
    let [stream, other] = [0, 1].map(|gpu| CudaContext::new(gpu).unwrap().new_stream().unwrap());
    let [q, q_there] = [&stream, &other].map(|stream| stream.clone_htod(&vec![f16::ONE; ELEMENTS]).unwrap());
    let [mut o, mut o_there] = [&stream, &other].map(|stream| stream.alloc_zeros::<f16>(ELEMENTS).unwrap());
    let mut lse_there = other.alloc_zeros::<f32>(2 * 4 * 64).unwrap();
    let gpu = Gpu::new(&stream).unwrap();
    let refused = |result: Result<(), Error>, name: Name| {
        let elsewhere = matches!(&result, Err(Error::PlaceMismatch { tensor, given: Place::Cuda(1), .. }) if *tensor == name);
        assert!(elsewhere, "{name}: {result:?}");
        stream.context().check_err().unwrap();
    };
    let attention = Attention::new();
    for (at, name) in [Name::Q, Name::K, Name::V].into_iter().enumerate() {
        let slices = [0, 1, 2].map(|i| Input::bhsd(if i == at { &q_there } else { &q }, SHAPE));
        refused(gpu.run_into(&attention, slices, Output::bhsd(&mut o, SHAPE), None), name);
    }
    let inputs = || [(); 3].map(|()| Input::bhsd(&q, SHAPE));
    refused(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o_there, SHAPE), None), Name::O);
    let lse = Output::lse(&mut lse_there, [2, 4, 64]);
    refused(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), Some(lse)), Name::Lse);
    let lengths = other.clone_htod(&[64_u32, 3]).unwrap();
    let out = Output::bhsd(&mut o, SHAPE);
    // SAFETY: the lengths are at most 64.
    refused(unsafe { gpu.run_with_lengths(&attention, &lengths, 64, inputs(), out, None) }, Name::KeyLengths);
    assert_eq!(gpu.run_into(&attention, inputs(), Output::bhsd(&mut o, SHAPE), None), Ok(()));
    stream.synchronize().unwrap();
}
