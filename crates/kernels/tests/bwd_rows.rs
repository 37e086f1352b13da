//! The first launch of a backward pass on the simulator: what it writes for every row, and for rows of padding.

use flashcore_kernels::{Args, ElementType, Operand, Packed, ROW_PADDING, Schedule, Spec, TensorArg, sm80};
use flashcore_ptx::{Target, TensorMap};
use flashcore_sim::{LaunchDims, Sim};

/// Numbers from -2 to 2 that look random.
fn noise(len: usize, seed: usize) -> Vec<f32> {
    let word = |i: usize| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 20;
    (0..len).map(|i| (word(word(i)) % 4001) as f32 / 1000.0 - 2.0).collect()
}

/// Rounds to a type: the number, and its bytes.
fn round(x: f32, dtype: ElementType) -> (f32, [u8; 2]) {
    if dtype == ElementType::F16 {
        let x = half::f16::from_f32(x);
        (x.to_f32(), x.to_le_bytes())
    } else {
        let x = half::bf16::from_f32(x);
        (x.to_f32(), x.to_le_bytes())
    }
}

/// Runs the kernel and compares all that it writes. Every seventh row sees no key.
#[track_caller]
fn check([batch, heads, len, dim]: [usize; 4], dtype: ElementType, dlse: bool, target: Target) {
    let spec = Spec { lse: dlse, ..Spec::new(dtype, dim as u32) };
    let schedule = Schedule::BwdRows(sm80::bwd_rows::Schedule { warps: 4 });
    let module = schedule.emit(&spec, target).unwrap();
    let (rows, padded) = (batch * heads * len, len.next_multiple_of(ROW_PADDING as usize));
    let mut sim = Sim::new(flashcore_sim::Config::default());
    let mut args = Args::default();
    let give = |args: &mut Args, operand, address, row: usize, bytes: usize| {
        let strides = [heads * row, row, batch * heads * row].map(|stride| (stride * bytes) as u64);
        // Batch entries and heads lie within a row: the strides are not those of a dense tensor.
        args.set(operand, TensorArg { address, shape: [batch, heads, len, row], strides });
    };
    let mut values = |args: &mut Args, operand, name: &str, seed| {
        let (values, bytes): (Vec<f32>, Vec<[u8; 2]>) =
            noise(rows * dim, seed).into_iter().map(|x| round(x, dtype)).unzip();
        give(args, operand, sim.alloc_from(name, bytes.as_flattened()).address, dim, 2);
        values
    };
    let (o, d_o) = (values(&mut args, Operand::O, "o", 1), values(&mut args, Operand::Do, "do", 2));
    let mut lse = noise(rows, 3);
    lse.iter_mut().step_by(7).for_each(|lse| *lse = f32::NEG_INFINITY);
    let d_lse = noise(rows, 4);
    for (operand, name, values) in [(Operand::Lse, "lse", &lse), (Operand::Dlse, "dlse", &d_lse)] {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        give(&mut args, operand, sim.alloc_from(name, &bytes).address, 1, 4);
    }
    args.set(Operand::Q, TensorArg { shape: [batch, heads, len, dim], ..TensorArg::default() });
    let results = [(Operand::RowLse, "row lse"), (Operand::RowDelta, "row delta")].map(|(operand, name)| {
        let buffer = sim.alloc(name, batch * heads * padded * 4);
        args.set(operand, TensorArg { address: buffer.address, ..TensorArg::default() });
        buffer
    });
    let mut packed = Packed::default();
    schedule.bind(&spec, &args, &mut |_| Ok::<_, ()>(TensorMap::default()), &mut packed).unwrap();
    let geometry = schedule.geometry(&spec);
    let dims = LaunchDims {
        grid: geometry.grid(batch as u32, heads as u32, len as u32, 4),
        block: [geometry.threads, 1, 1],
        cluster: None,
        dynamic_shared: Some(geometry.shared_bytes),
    };
    let report = sim.launch(&module, "flashcore_bwd_rows", dims, packed.launch(0).0).unwrap();
    assert_eq!(report.findings, []);
    let found = results.map(|buffer| {
        assert_eq!(sim.unwritten(buffer), [], "every row of padding is written");
        let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        sim.read(buffer).as_chunks().0.iter().map(number).collect::<Vec<f32>>()
    });
    for head in 0..batch * heads {
        for row in 0..padded {
            let at = row * batch * heads + head;
            let [found_lse, found_delta] = [0, 1].map(|i| found[i][head * padded + row]);
            if row >= len || lse[at] == f32::NEG_INFINITY {
                assert_eq!((found_lse, found_delta), (f32::INFINITY, 0.0), "row {row}");
                continue;
            }
            let dot = |(o, d): (&f32, &f32)| f64::from(*o) * f64::from(*d);
            let sum: f64 = o[at * dim..][..dim].iter().zip(&d_o[at * dim..][..dim]).map(dot).sum();
            let delta = sum - if dlse { f64::from(d_lse[at]) } else { 0.0 };
            assert!((f64::from(found_delta) - delta).abs() < 1e-4, "row {row}: {found_delta} is not {delta}");
            assert!((found_lse - lse[at] * std::f32::consts::LOG2_E).abs() < 1e-5, "row {row}");
        }
    }
}

#[test]
fn every_row_has_its_sum_and_padding_has_no_probability() {
    check([2, 3, 130, 64], ElementType::F16, true, Target::Sm80);
    check([1, 2, 128, 128], ElementType::Bf16, false, Target::Sm90a);
    check([1, 1, 5, 256], ElementType::Bf16, true, Target::Sm80);
    check([1, 2, 33, 8], ElementType::F16, false, Target::Sm89);
    check([2, 1, 77, 72], ElementType::Bf16, true, Target::Sm80);
}
