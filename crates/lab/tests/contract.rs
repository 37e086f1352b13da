//! The contract under fire: no input whatever panics, and every refusal is an error that names what it refuses.
#![allow(unsafe_code)] // Only raw addresses can be null, misaligned, elsewhere or shared with an output.

use std::panic::{AssertUnwindSafe, catch_unwind};

use flashcore::{
    Attention, DType, Device, Element, Error, Layout, Mask, Name, Place, Problem, Tensor, TensorBuf,
    TensorMut,
};
use flashcore_lab::engine::DeviceEngine;
use flashcore_lab::rng::Rng;
use half::{bf16, f16};

/// Elements of every buffer: room for small problems, and an end to run over.
const ROOM: usize = 600;

/// Memory that can be seen as any dtype.
struct Memory {
    bytes: Vec<u64>,
}

impl Memory {
    fn new(rng: &mut Rng) -> Self {
        // Random bits: NaNs, infinities and subnormals among them.
        Self { bytes: (0..ROOM / 2).map(|_| rng.next_u64()).collect() }
    }

    fn as_slice<T: Element>(&self) -> &[T] {
        // SAFETY: the memory is initialised and aligned to 8, every bit pattern is a float, and ROOM elements of 4
        // bytes fit into it.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), ROOM) }
    }

    fn as_slice_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), ROOM) }
    }
}

fn size(rng: &mut Rng) -> usize {
    if rng.chance(0.95) {
        rng.pick(&[0, 1, 1, 2, 2, 3, 4, 5, 8])
    } else {
        rng.pick(&[65, 1025, 1 << 31, 1 << 40, usize::MAX / 2, usize::MAX])
    }
}

fn layout(rng: &mut Rng, shape: [usize; 4]) -> Layout {
    match rng.below(10) {
        0..6 => Layout::bhsd(shape),
        6..8 => Layout::bshd(shape),
        _ => {
            let strides = [0, 1, 2, 4, 8, 16, 64, 1 << 33, usize::MAX];
            Layout {
                shape,
                strides: [
                    rng.pick(&strides),
                    rng.pick(&strides),
                    rng.pick(&strides),
                    rng.pick(&[1, 1, 1, 2, 0]),
                ],
            }
        }
    }
}

/// A number that a call may or may not accept.
fn number(rng: &mut Rng) -> f32 {
    let random = f32::from_bits(rng.next_u64() as u32);
    rng.pick(&[0.5, 30.0, 0.0, -0.0, -1.0, 1e-40, 3e38, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, random])
}

fn mask(rng: &mut Rng) -> Mask {
    let side = |rng: &mut Rng| rng.pick(&[None, Some(0), Some(1), Some(5), Some(1 << 31), Some(usize::MAX)]);
    match rng.below(4) {
        0 => Mask::None,
        1 => Mask::Causal,
        2 => Mask::CausalTopLeft,
        _ => Mask::Window { left: side(rng), right: side(rng) },
    }
}

fn view(memory: &Memory, dtype: DType, layout: Layout) -> flashcore::Result<Tensor<'_>> {
    match dtype {
        DType::F16 => Tensor::strided(memory.as_slice::<f16>(), layout),
        DType::BF16 => Tensor::strided(memory.as_slice::<bf16>(), layout),
        DType::F32 => Tensor::strided(memory.as_slice::<f32>(), layout),
        DType::F8E4M3 => Tensor::strided(memory.as_slice::<flashcore::F8E4M3>(), layout),
        DType::I32 => Tensor::strided(memory.as_slice::<i32>(), layout),
    }
}

fn view_mut(memory: &mut Memory, dtype: DType, layout: Layout) -> flashcore::Result<TensorMut<'_>> {
    match dtype {
        DType::F16 => TensorMut::strided(memory.as_slice_mut::<f16>(), layout),
        DType::BF16 => TensorMut::strided(memory.as_slice_mut::<bf16>(), layout),
        DType::F32 => TensorMut::strided(memory.as_slice_mut::<f32>(), layout),
        DType::F8E4M3 => TensorMut::strided(memory.as_slice_mut::<flashcore::F8E4M3>(), layout),
        DType::I32 => TensorMut::strided(memory.as_slice_mut::<i32>(), layout),
    }
}

/// Whether an error's text names what it speaks of.
fn names_its_subject(error: &Error) -> bool {
    let text = error.to_string();
    let says = |name: Name| text.contains(&name.to_string());
    match error {
        Error::Rank { tensor, .. }
        | Error::DTypeMismatch { tensor, .. }
        | Error::PlaceMismatch { tensor, .. }
        | Error::HeadDim { tensor, .. }
        | Error::InnerStride { tensor, .. }
        | Error::OutOfBounds { tensor, .. }
        | Error::OverlappingOutput { tensor, .. }
        | Error::Alignment { tensor, .. }
        | Error::NullPointer { tensor, .. }
        | Error::TooLarge { tensor, .. } => says(*tensor),
        Error::SizeMismatch { tensor, other, .. } => says(*tensor) && says(*other),
        Error::Aliasing { output, other } => says(*output) && says(*other),
        Error::HeadGroups { .. } => text.contains('q') && text.contains('k'),
        Error::Scale { .. } => text.contains("scale"),
        Error::Softcap { .. } => text.contains("softcap"),
        Error::KeyLengthCount { .. } | Error::KeyLength { .. } => text.contains("key length"),
        Error::Unsupported { device, .. } | Error::Device { device, .. } => text.contains(device),
        _ => false,
    }
}

/// The work of a problem, so that those that are legal and endless can be left out. Sizes of 0 count as 1.
fn work(problem: &Problem) -> f64 {
    let size = |x: usize| x.max(1) as f64;
    let rows = size(problem.batch) * size(problem.heads_q) * size(problem.len_q);
    let width = (problem.head_dim + problem.head_dim_v) as f64;
    (rows + size(problem.batch) * size(problem.heads_kv)) * size(problem.len_k) * width
}

/// One random call. Says whether it ran, or how it was refused.
fn fire(rng: &mut Rng, device: &Device) -> Result<(), Error> {
    let (batch, heads_kv, len_k, head_dim, head_dim_v) =
        (size(rng), size(rng), size(rng), size(rng), size(rng));
    let (heads_q, len_q) = (heads_kv.wrapping_mul(rng.pick(&[1, 1, 2, 3])), size(rng));
    // Now and then one size of one tensor is not what the others make it.
    let bend = |rng: &mut Rng, shape: [usize; 4]| {
        let mut shape = shape;
        if rng.chance(0.06) {
            shape[rng.below(4)] = size(rng);
        }
        shape
    };
    let shapes = [
        bend(rng, [batch, heads_q, len_q, head_dim]),
        bend(rng, [batch, heads_kv, len_k, head_dim]),
        bend(rng, [batch, heads_kv, len_k, head_dim_v]),
        bend(rng, [batch, heads_q, len_q, head_dim_v]),
        bend(rng, [batch, heads_q, len_q, 1]),
    ];
    let dtype = rng.pick(&DType::WIDE);
    let mut dtypes = [dtype, dtype, dtype, dtype, DType::F32];
    if rng.chance(0.1) {
        dtypes[rng.below(5)] = rng.pick(&DType::WIDE);
    }
    let memories: [Memory; 3] = std::array::from_fn(|_| Memory::new(rng));
    let (mut o_memory, mut lse_memory) = (Memory::new(rng), Memory::new(rng));
    let (o_before, lse_before) = (o_memory.bytes.clone(), lse_memory.bytes.clone());
    let lengths: Vec<u32> = (0..if rng.chance(0.8) { batch.min(9) } else { size(rng).min(9) })
        .map(
            |_| if rng.chance(0.95) { rng.below(len_k.clamp(1, 64) + 1).min(len_k) as u32 } else { u32::MAX },
        )
        .collect();
    let mut attention = Attention::new().mask(mask(rng));
    if rng.chance(0.2) {
        attention = attention.scale(number(rng));
    }
    if rng.chance(0.2) {
        attention = attention.softcap(number(rng));
    }
    if rng.chance(0.3) {
        attention = attention.key_lengths(&lengths);
    }
    let with_lse = rng.chance(0.5);
    let result = (|| {
        let mut input = |i: usize| view(&memories[i], dtypes[i], layout(rng, shapes[i]));
        let (q, k, v) = (input(0)?, input(1)?, input(2)?);
        let mut o = view_mut(&mut o_memory, dtypes[3], layout(rng, shapes[3]))?;
        let mut lse = view_mut(&mut lse_memory, dtypes[4], layout(rng, shapes[4]))?;
        let problem = attention.problem(&q, &k, &v)?;
        if work(&problem) > 1e6 {
            return Ok(());
        }
        let returned = attention.run(device, &q, &k, &v)?;
        assert_eq!(returned.o.shape(), [problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v]);
        attention.run_into(device, &q, &k, &v, &mut o, with_lse.then_some(&mut lse))
    })();
    if result.is_err() {
        assert!(
            o_memory.bytes == o_before && lse_memory.bytes == lse_before,
            "a refused call wrote to its outputs"
        );
    }
    result
}

#[test]
fn no_input_whatever_panics_and_every_refusal_names_what_it_refuses() {
    let engines = DeviceEngine::cpu_paths();
    let (mut ran, mut refused) = (0, std::collections::BTreeMap::new());
    for seed in 0..200_000 {
        let device = engines[seed as usize % engines.len()].device();
        let Ok(result) = catch_unwind(AssertUnwindSafe(|| fire(&mut Rng::new(seed), device))) else {
            panic!("the call of seed {seed} panicked");
        };
        let Err(error) = result else {
            ran += 1;
            continue;
        };
        assert!(names_its_subject(&error), "seed {seed}: {error}");
        let kind = format!("{error:?}").split([' ', '{']).next().unwrap_or_default().to_string();
        *refused.entry(kind).or_insert(0) += 1;
    }
    // The fire must hit both sides of every line that the contract draws.
    assert!(ran > 20_000, "only {ran} calls ran: {refused:?}");
    let drawn = [
        "DTypeMismatch",
        "SizeMismatch",
        "HeadGroups",
        "HeadDim",
        "InnerStride",
        "OutOfBounds",
        "OverlappingOutput",
        "TooLarge",
        "Scale",
        "Softcap",
        "KeyLengthCount",
        "KeyLength",
    ];
    for kind in drawn {
        assert!(refused.contains_key(kind), "nothing was refused as {kind}: {refused:?}");
    }
}

#[test]
fn addresses_that_no_call_can_use_are_refused() {
    let data = [0.25_f32; 64];
    let shape = Layout::bhsd([1, 1, 4, 8]);
    let q = Tensor::new(&data[..32], &[1, 1, 4, 8]).unwrap();
    // SAFETY: all of these are refused, or read only what `data` holds.
    unsafe {
        let at = |address: *const u8, place| Tensor::from_raw_parts(address, 32, DType::F32, place, shape);
        assert!(matches!(at(std::ptr::null(), Place::Host), Err(Error::NullPointer { .. })));
        let odd = data.as_ptr().cast::<u8>().add(2);
        assert!(matches!(at(odd, Place::Host), Err(Error::Alignment { .. })));
        let elsewhere = at(data.as_ptr().cast(), Place::Cuda(0)).unwrap();
        let error = Attention::new().run(&Device::cpu(), &q, &elsewhere, &q).unwrap_err();
        assert!(matches!(error, Error::PlaceMismatch { tensor: Name::K, .. }), "{error}");
        assert!(names_its_subject(&error));
    }
}

#[test]
fn an_output_that_shares_memory_with_anything_is_refused() {
    let mut memory = vec![0.5_f32; 256];
    let layout = Layout::bhsd([1, 1, 4, 8]);
    let address = memory.as_mut_ptr().cast::<u8>();
    for (output, offset) in [(Name::Q, 0), (Name::K, 32), (Name::V, 64)] {
        for shift in [-31_isize, 0, 31] {
            let place = offset + shift;
            if place < 0 {
                continue;
            }
            // SAFETY: every view lies inside `memory`, and the call that would write through one is refused.
            let error = unsafe {
                let input = |offset: usize| {
                    Tensor::from_raw_parts(address.add(offset * 4), 32, DType::F32, Place::Host, layout)
                        .unwrap()
                };
                let at = address.offset(place * 4);
                let mut o = TensorMut::from_raw_parts(at, 32, DType::F32, Place::Host, layout).unwrap();
                Attention::new()
                    .run_into(&Device::cpu(), &input(0), &input(32), &input(64), &mut o, None)
                    .unwrap_err()
            };
            assert!(matches!(error, Error::Aliasing { output: Name::O, .. }), "{output} {shift}: {error}");
            assert!(names_its_subject(&error));
        }
    }
    assert_eq!(memory, vec![0.5; 256], "a refused call wrote");
}

/// Runs a call whose outputs hold nothing, on a thread that is given ten minutes: any work for each of its elements would
/// take years.
fn ends_at_once(shape_q: [usize; 4], shape_k: [usize; 4]) {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let nothing: [f32; 0] = [];
        let (q, k) = (Tensor::new(&nothing, &shape_q).unwrap(), Tensor::new(&nothing, &shape_k).unwrap());
        let out = Attention::new().causal().with_lse().run(&Device::cpu(), &q, &k, &k);
        let _ = sender.send(out.map(|out| out.o.to_f32().len()));
    });
    match receiver.recv_timeout(std::time::Duration::from_mins(10)) {
        Ok(Ok(elements)) => assert_eq!(elements, 0),
        Ok(Err(error)) => assert!(names_its_subject(&error), "{error}"),
        Err(end) => panic!("q {shape_q:?} and k {shape_k:?} panicked or did not end: {end}"),
    }
}

#[test]
fn an_empty_problem_of_any_size_ends_at_once() {
    let most = usize::MAX;
    ends_at_once([1 << 40, 2, 0, 8], [1 << 40, 2, 0, 8]);
    ends_at_once([1 << 40, 0, 5, 8], [1 << 40, 0, 5, 8]);
    ends_at_once([most, most, 0, 8], [most, most, 0, 8]);
    ends_at_once([most, 0, 1 << 30, 1024], [most, 0, 1 << 30, 1024]);
    ends_at_once([0, most, most >> 33, 64], [0, most, most >> 33, 64]);
}

#[test]
fn buffers_of_any_size_are_refused_rather_than_allocated() {
    for shape in [[usize::MAX; 4], [1 << 40, 1 << 40, 1, 1], [1, 1, usize::MAX, 2]] {
        for dtype in DType::WIDE {
            let error = TensorBuf::zeros(dtype, Layout::bhsd(shape)).unwrap_err();
            assert!(matches!(error, Error::TooLarge { .. }) && names_its_subject(&error), "{error}");
        }
    }
}
